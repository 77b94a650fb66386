"""A machine that is not there: its disk and its engines outlive the agents on it, as a real one's do.

`Machine` is the machine; `FakeHost` is what one agent process sees of it and implements `llmgw_agent.host.Host`. Time
is `anyio.current_time()`, and nothing runs by itself: an engine's state is worked out when somebody looks.

What must never happen on a real machine is checked here, where it would happen: two engines of one shard, more memory
promised to living engines than there is, a signal to an engine that nobody ordered to stop and that is not at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import msgspec

from llmgw.core.ids import shard_name
from llmgw.core.node import Build, EngineFacts, Facts
from llmgw.core.replica import Assignment
from llmgw.testing.seed import Random
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

ENGINE: Final = "llama.cpp"
BUILD: Final = Build(engine=ENGINE, version="b1", named=True)

SILENT_PROBE_S: Final = 5.0
"""How long a probe without an answer takes. Source: the contract in llmgw_agent.host."""


ENGINES_KEPT: Final = 200
"""Processes remembered per machine, dead ones for their last words. More than can be alive at once."""


class Temper(msgspec.Struct, frozen=True, kw_only=True):
    """How one start of an engine will go. Seconds; None: that does not happen.

    `fails`: the start itself is refused, with this reason. `loads_s`: until it can work. `dies_s`: its process ends so
    long after its start. `wrong`: it comes up as something else than was ordered.
    """

    fails: str | None = None
    loads_s: float = 3.0
    dies_s: float | None = None
    wrong: bool = False
    ends_s: float = 1.0
    """How long it takes to end after SIGTERM."""
    busy_s: float = 0.0
    """How long its last request takes once nothing new is sent to it."""


class Witness(Protocol):
    """Who is told of what happens on machines."""

    def engine_started(self, machine: Machine, engine: Engine) -> None:
        """An engine's process exists."""
        ...

    def engine_signalled(self, machine: Machine, engine: Engine, *, kill: bool) -> None:
        """The agent ends a living engine."""
        ...

    def wrong(self, what: str) -> None:
        """Something happened that never may."""
        ...


@dataclass(kw_only=True, eq=False)
class Engine:
    """One process, dead or alive. Moments are on the simulation's clock."""

    process: Process
    shard: str
    order: Assignment
    incarnation: str
    port: int
    temper: Temper
    started_s: float
    ends_s: float = math.inf
    exit: str = ""
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when it is known when it ends."""
    hung: bool = False
    idle_s: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its process exists."""
        return anyio.current_time() < self.ends_s

    @property
    def loaded(self) -> bool:
        """Whether it could work."""
        return anyio.current_time() >= self.started_s + self.temper.loads_s

    @property
    def serves(self) -> bool:
        """Whether it would answer a request now."""
        return self.alive and self.loaded and not self.hung and not self.temper.wrong

    def end(self, at_s: float, how: str) -> None:
        """It ends at `at_s`, unless it ends before that anyway."""
        if at_s < self.ends_s:
            self.ends_s, self.exit = at_s, how
            self.ended.set()
            self.ended = anyio.Event()


@dataclass(kw_only=True, eq=False)
class Machine:
    """One node's hardware. `temper` decides how each start of an engine goes."""

    name: str
    memory_bytes: int
    witness: Witness
    temper: Callable[[Assignment], Temper]
    random: Random
    address: str = "10.0.0.1"
    on: bool = True
    boots: int = 1
    disk: SavedState | None = None
    disk_damaged: bool = False
    disk_full: bool = False
    engines: list[Engine] = field(default_factory=list)
    _pid: int = 1000

    @property
    def boot_id(self) -> str:
        """The kernel's."""
        return f"{self.name}-boot-{self.boots}"

    def next_pid(self) -> int:
        """A process id that was never used before on this machine."""
        self._pid += 1
        return self._pid

    def running(self) -> list[Engine]:
        """Engines whose process exists."""
        if not self.engines:
            return []
        now_s = anyio.current_time()
        return [engine for engine in self.engines if now_s < engine.ends_s]

    def power_off(self) -> None:
        """Every process is gone, the disk stays."""
        self.on = False
        for engine in self.running():
            engine.end(anyio.current_time(), "power lost")

    def power_on(self) -> None:
        """Another boot."""
        self.on = True
        self.boots += 1


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
        if temper.fails is not None:
            raise StartFailed(temper.fails)
        if any(engine.port == port for engine in machine.running()):
            raise StartFailed(f"port {port} is taken", port_taken=True)
        now_s = anyio.current_time()
        shard = shard_name(order.node, order.replica, order.rank).partition("/")[2]
        engine = Engine(
            process=Process(
                pid=machine.next_pid(),
                started=round(now_s * 100),
                boot_id=machine.boot_id,
                mark=f"{self.data}/{order.node}/{shard}/{incarnation}",
            ),
            shard=shard,
            order=order,
            incarnation=incarnation,
            port=port,
            temper=temper,
            started_s=now_s,
        )
        if temper.dies_s is not None:
            engine.end(now_s + temper.dies_s, "killed by SIGSEGV")
        self._check_start(engine)
        machine.engines = [*machine.engines[-ENGINES_KEPT:], engine]
        machine.witness.engine_started(machine, engine)
        return Launched(process=engine.process, build=BUILD.id)

    async def look(self, shard: str, process: Process | None, *, whole: bool) -> Look:
        await self._pause(0)  # by far the most frequent call: nobody waits, so that no clock has to jump
        mine = [engine for engine in self._machine.engines if engine.shard == shard]
        alive = any(engine.alive and engine.process == process for engine in mine)
        left = sum(engine.alive for engine in mine) if whole else int(alive)
        ended = next((engine.exit for engine in mine if engine.process == process and not engine.alive), "")
        return Look(alive=alive, left=left, exit=ended)

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
        await self._pause(0.02)
        living = self._machine.running()
        engine = next((each for each in living if each.process == process and each.port == port), None)
        if engine is None:
            return Silent(why="connection refused")
        if engine.hung:
            await self._pause(SILENT_PROBE_S)
            return Silent(why="no answer")
        if not engine.loaded:
            return Loading(detail="loading model")
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
        await self._pause(0.1)
        return Facts(
            node=self._machine.name,
            boot_id=self._boot_id,
            os="Debian 12",
            arch="x86_64",
            cpus=32.0,
            memory_bytes=self._machine.memory_bytes,
            gpus=(),
            engines=EngineFacts(probed=True, builds=(BUILD,)),
            weights=(),
        )

    def _check_start(self, new: Engine) -> None:
        machine = self._machine
        living = machine.running()
        if any(engine.shard == new.shard for engine in living):
            machine.witness.wrong(f"{machine.name} runs two engines of {new.shard}")
        promised = sum(engine.order.claim.memory_bytes or 0 for engine in (*living, new))
        if promised > machine.memory_bytes:
            names = ", ".join(engine.shard for engine in (*living, new))
            machine.witness.wrong(
                f"{machine.name} has {machine.memory_bytes} bytes of memory, living engines claim {promised}: {names}"
            )

    async def _pause(self, seconds: float) -> None:
        """Time passes; a killed process never comes back from it."""
        if seconds:
            await pause(seconds)
        if self._killed or not self._machine.on:
            await anyio.sleep_forever()
