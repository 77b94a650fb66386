"""What one agent process sees of a machine that is not there (`llmgw.testing.sim_machine`).

Implements `llmgw_agent.host.Host` in virtual time.
"""

from __future__ import annotations

from typing import Final

import anyio

from llmgw.core.node import EngineFacts, Facts, WeightSet
from llmgw.core.replica import Assignment
from llmgw.testing.sim_machine import BUILDS, Engine, Machine
from llmgw.testing.virtual import pause
from llmgw_agent.host import (
    LOOK_S,
    Found,
    Launched,
    Loaded,
    Loading,
    Look,
    Probe,
    Purpose,
    Silent,
    StartFailed,
    Working,
    Wrong,
)
from llmgw_agent.state import Process, SavedState

SILENT_PROBE_S: Final = 5.0
"""How long a probe without an answer takes. Source: the contract in llmgw_agent.host."""

STEP_S: Final = 10.0
"""A load that shows how it gets on shows something new this often."""


class FakeHost:
    """One agent process on a machine. `kill` makes it harmless at once, whatever its tasks still try."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._boot_id = machine.boot_id
        self._pid = machine.next_pid()
        self._killed = False

    def kill(self) -> None:
        """SIGKILL: nothing it does from now on has an effect."""
        self._killed = True

    @property
    def boot_id(self) -> str:
        return self._boot_id

    @property
    def data(self) -> str:
        return f"259:{self._machine.name}"

    @property
    def pid(self) -> int:
        return self._pid

    async def load(self) -> Loaded:
        await self._pause(0.01)
        machine = self._machine
        if machine.disk_damaged:
            machine.disk_damaged, machine.disk = False, None
            return Loaded(state=None, damage=("state.json: is not JSON",), lost=True)
        return Loaded(state=machine.disk)

    async def save(self, state: SavedState) -> None:
        await self._pause(0.002)
        if self._machine.disk_full:
            raise OSError(28, "No space left on device")
        self._machine.disk = state

    async def find(self) -> tuple[Found, ...]:
        await self._pause(0.05)
        return tuple(
            Found(
                node=engine.order.node,
                shard=engine.shard,
                incarnation=engine.incarnation,
                process=engine.process,
                port=engine.port,
            )
            for engine in self._machine.running()
        )

    async def start(self, order: Assignment, *, incarnation: str, port: int) -> Launched:
        machine = self._machine
        await self._pause(machine.random.uniform(0.01, 0.2))
        temper = machine.temper(order)
        build = next((each for each in BUILDS if order.launch.build in (None, each.id)), None)
        if build is None:
            raise StartFailed(f"no {order.launch.build} here")
        if (why := temper.fails or machine.refusal(order)) is not None:
            raise StartFailed(why)
        if any(engine.port == port for engine in machine.running()):
            raise StartFailed(f"port {port} is taken", port_taken=True)
        engine = machine.launch(order, temper, data=self.data, incarnation=incarnation, port=port)
        return Launched(process=engine.process, build=build.id)

    async def look(self, shard: str, process: Process | None, *, whole: bool) -> Look:
        await self._pause(0)  # by far the most frequent call: nobody waits, so that no clock has to jump
        mine = [engine for engine in self._machine.engines if engine.shard == shard]
        main = next((engine for engine in mine if engine.process == process), None)
        alive = main is not None and main.alive
        left = sum(engine.alive for engine in mine) if whole else int(alive)
        steps = _steps(main) if whole and main is not None and alive else None
        return Look(alive=alive, left=left, exit="" if main is None or alive else main.exit, progress=steps)

    async def gone(self, shard: str, process: Process | None) -> Look:
        engine = next((engine for engine in self._machine.engines if engine.process == process), None)
        while engine is not None and engine.alive:
            with anyio.CancelScope(deadline=engine.ends_s):
                await engine.ended.wait()
        await self._pause(self._machine.random.uniform(0, LOOK_S))
        return await self.look(shard, process, whole=False)

    async def signal(self, shard: str, process: Process | None, *, kill: bool) -> None:
        await self._pause(0.001)
        now_s = anyio.current_time()
        for engine in self._machine.running():
            if engine.shard != shard or not (kill or engine.process == process):
                continue
            self._machine.witness.engine_signalled(self._machine, engine, kill=kill)
            if kill:
                engine.end(now_s + 0.01, "killed by SIGKILL")
            elif not engine.hung:
                engine.end(now_s + engine.temper.ends_s, "exited with 0")

    async def probe(self, order: Assignment, *, process: Process, port: int, purpose: Purpose) -> Probe:
        living = self._machine.running()
        engine = next((each for each in living if each.process == process and each.port == port), None)
        at_once = engine is None or purpose is Purpose.LIVE or not engine.loaded
        await self._pause(0 if at_once else 0.02)  # by far the most are such: no clock has to jump for them
        if engine is None:
            return Silent(why="connection refused")
        detail = engine.look_around()
        if engine.hung:
            await self._pause(SILENT_PROBE_S)
            return Silent(why="no answer")
        if not engine.alive:
            return Silent(why="connection reset by peer")
        if detail is not None:
            return Loading(detail=detail)
        if engine.temper.wrong:
            return Wrong(reason="the GPU was asked for, it runs on the CPU")
        if purpose is Purpose.READY:
            return Working(context=order.launch.context, slots=order.launch.slots)
        if purpose is Purpose.LIVE:
            return Working()
        if engine.idle_s is None:
            engine.idle_s = anyio.current_time() + engine.temper.busy_s
        return Working(busy=int(anyio.current_time() < engine.idle_s))

    async def facts(self) -> Facts:
        await self._pause(0)
        machine = self._machine
        facts = Facts(
            node=machine.name,
            boot_id=self._boot_id,
            os="Debian 12",
            arch="x86_64",
            cpus=32.0,
            memory_bytes=machine.memory_bytes,
            labels=machine.labels,
            gpus=machine.gpus,
            fabrics=machine.fabrics,
            gang_ports=(21000, 21999),
            engines=EngineFacts(probed=True, builds=BUILDS),
            weights=None if machine.weights is None else tuple(WeightSet(source=each) for each in machine.weights),
        )
        return facts if machine.lies is None else machine.lies(facts)

    async def _pause(self, seconds: float) -> None:
        """Time passes; a killed process never comes back from it."""
        if seconds:
            await pause(seconds)
        if self._killed or not self._machine.on:
            await anyio.sleep_forever()


def _steps(engine: Engine) -> int | None:
    """How far its load has visibly come; None where that can't be told."""
    if not engine.temper.shows:
        return None
    loading_s = min(anyio.current_time() - engine.started_s, engine.temper.loads_s)
    return int(loading_s / STEP_S)
