"""The whole control plane in one virtual run: store, controllers, machines with their agents, a gateway's view.

Everything here is what ships, but the machines and the store. `Fleet` holds the parts and can do to them what befalls
them in life: a process killed, stopped or started, a machine without power, a link cut. It decides nothing and draws
nothing but what its seed gives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from llmgw.config import AgentConfig, ControllerConfig, EtcdConfig
from llmgw.controller.loop import control
from llmgw.core.record import Leader, Record
from llmgw.core.replica import Assignment
from llmgw.core.snapshot import Kind, Ref
from llmgw.core.units import GB
from llmgw.obs.status import ControllerStatus
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.mirror import Mirror, mirror
from llmgw.store.port import DeleteOp, Operation, PutOp
from llmgw.testing.fake_host import FakeHost
from llmgw.testing.faults import FaultyStore, Link
from llmgw.testing.judge import who
from llmgw.testing.load import LoadTeller
from llmgw.testing.seed import SeededIds, stream
from llmgw.testing.sim_hardware import Hardware, draw, plain
from llmgw.testing.sim_machine import Machine, Temper, Witness
from llmgw_agent.agent import run_agent

EPOCH_S: Final = 1_800_000_000.0
"""Wall time when the run starts, Unix seconds."""

LATENCY_S: Final = (0.0005, 0.005)
"""One way to the store. Source: 1 to 4 ms for a call were measured on loopback."""

PROGRESS_S: Final = 15.0
PROGRESS_AGENT_S: Final = 120.0
"""Between two words of progress on a watch: of controllers and gateways, and of agents, to whom it says nothing. Less
often than etcd's, so that time passes faster."""

ROUTES: Final = (
    keys.prefix(Kind.META),
    keys.prefix(Kind.MODEL),
    keys.prefix(Kind.ALIAS),
    keys.prefix(Kind.REPLICA),
    keys.prefix(Kind.SECRET),
    keys.prefix(Kind.SHARD),
)
"""What a gateway mirrors for its routes."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How large a fleet is, and its times in seconds.

    `hardware`: machines as drawn from the seed, some with GPUs; otherwise all are alike, with `memory_bytes` and
    nothing else. `machines`: exactly these instead, by number.
    """

    controllers: int = 3
    nodes: int = 4
    hardware: bool = False
    machines: tuple[Hardware, ...] = ()
    memory_bytes: int = 64 * GB
    lost_after_s: float = 300.0
    relist_s: float = 200.0


class Process:
    """One program at a place: started, killed (nothing it still does has an effect) or stopped with grace."""

    def __init__(
        self, fleet: Fleet, name: str, run: Callable[[Process], Awaitable[None]], *, progress_s: float = PROGRESS_S
    ) -> None:
        self._fleet, self._progress_s = fleet, progress_s
        self._run = run
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self.name = name
        self.skew_s = 0.0
        """How far its machine's wall clock is off."""
        self.faulty: FaultyStore
        self.host: FakeHost | None = None
        self.status: ControllerStatus | None = None
        self.view: Mirror | None = None
        self.teller: LoadTeller | None = None
        self.starts = 0

    @property
    def running(self) -> bool:
        """Started and not ended."""
        return self._scope is not None

    def wall(self) -> float:
        """Its machine's wall clock."""
        return EPOCH_S + anyio.current_time() + self.skew_s

    def start(self) -> None:
        """Nothing happens to one that runs."""
        if self._scope is not None:
            return
        self.starts += 1
        self.random = stream(self._fleet.seed, f"{self.name}/{self.starts}")
        self.faulty = FaultyStore(
            MemoryStore(self._fleet.cluster, progress_s=self._progress_s, waits=False),
            self._fleet.tasks,
            latency=lambda: self.random.uniform(*LATENCY_S),
        )
        self._scope, self._ended = anyio.CancelScope(), anyio.Event()
        self._fleet.tasks.start_soon(self._live, self._scope, self._ended, name=self.name)

    async def kill(self) -> None:
        """SIGKILL: no farewell. Returns when it is gone."""
        if self._scope is not None:
            self.faulty.link = Link.REFUSED
            if self.host is not None:
                self.host.kill()
            await self.stop()

    async def stop(self) -> None:
        """SIGTERM. Returns when it is gone."""
        if self._scope is not None:
            self._scope.cancel()
            await self._ended.wait()

    async def _live(self, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        who.set(self.name)
        try:
            with scope:
                await self._run(self)
        finally:
            self._scope = self.host = self.status = self.view = self.teller = None
            ended.set()


class Fleet:
    """All parts of one run. `tasks` runs them; `witness` is told of what happens on machines."""

    def __init__(
        self,
        tasks: TaskGroup,
        cluster: MemoryCluster,
        *,
        seed: int,
        sizes: Sizes,
        witness: Witness,
        temper: Callable[[Assignment], Temper],
    ) -> None:
        self.tasks = tasks
        self.seed = seed
        self.sizes = sizes
        self.cluster = cluster
        self.store = MemoryStore(cluster)
        """A client without faults: the people's, and the test's own."""
        self._etcd = EtcdConfig(relist_s=sizes.relist_s)
        self.controllers = [Process(self, f"controller-{n}", self._control) for n in range(sizes.controllers)]
        self.world: dict[str, Machine] = {}
        self.machines = [self._machine(n, witness, temper) for n in range(sizes.nodes)]
        self.agents = [
            Process(self, machine.name, self._agent(machine), progress_s=PROGRESS_AGENT_S) for machine in self.machines
        ]
        self.gateway = Process(self, "gateway", self._route)

    def _machine(self, n: int, witness: Witness, temper: Callable[[Assignment], Temper]) -> Machine:
        sizes, name = self.sizes, f"node-{n}"
        if sizes.machines:
            hardware = sizes.machines[n]
        elif sizes.hardware:
            hardware = draw(stream(self.seed, f"{name}/hardware"), name=name, number=n, memory_bytes=sizes.memory_bytes)
        else:
            hardware = plain(sizes.memory_bytes)
        made = self.world[name] = Machine(
            name=name,
            address=f"10.0.0.{n + 1}",
            memory_bytes=hardware.memory_bytes,
            gpus=hardware.gpus,
            fabrics=hardware.fabrics,
            labels=hardware.labels,
            weights=hardware.weights,
            world=self.world,
            witness=witness,
            temper=temper,
            random=stream(self.seed, f"{name}/machine"),
        )
        return made

    @property
    def processes(self) -> list[Process]:
        """Every one, running or not."""
        return [*self.controllers, *self.agents, self.gateway]

    @property
    def leader(self) -> Process | None:
        """The controller whose term is running, in its own opinion; the newest where two think so."""
        leading = [
            (process.status.term.number, process)
            for process in self.controllers
            if process.status is not None and process.status.term is not None
        ]
        return max(leading, key=lambda pair: pair[0])[1] if leading else None

    def start(self) -> None:
        """Everything that does not run and has power."""
        for process in (*self.controllers, self.gateway):
            process.start()
        for agent, machine in zip(self.agents, self.machines, strict=True):
            if machine.on:
                agent.start()

    async def power_off(self, n: int) -> None:
        """A machine loses power, and its agent and engines with it."""
        await self.agents[n].kill()
        self.machines[n].power_off()

    def power_on(self, n: int) -> None:
        """It boots, and its agent comes up."""
        if not self.machines[n].on:
            self.machines[n].power_on()
        self.agents[n].start()

    async def write(self, *puts: tuple[Ref, Record], delete: Sequence[Ref] = ()) -> None:
        """What people write, in one transaction, past all faults."""
        ops: list[Operation] = [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in puts]
        ops += [DeleteOp(key=keys.key(ref)) for ref in delete]
        await self.store.txn([], ops)

    async def _control(self, process: Process) -> None:
        leader = Leader(id=process.name, address=f"{process.name}:8800", version="sim", pid=process.starts)
        process.status = ControllerStatus(leader=leader, renew_within_s=7.0)
        await control(
            process.faulty,
            ControllerConfig(etcd=self._etcd, id=process.name, lost_after_s=self.sizes.lost_after_s),
            identity=leader,
            wall=process.wall,
            ids=SeededIds(process.random),
            jitter=process.random.random,
            status=process.status,
        )

    def _agent(self, machine: Machine) -> Callable[[Process], Awaitable[None]]:
        async def run(process: Process) -> None:
            process.host = FakeHost(machine)
            config = AgentConfig(
                name=machine.name, data_dir=f"/{machine.name}", address=machine.address, etcd=self._etcd
            )
            await run_agent(process.faulty, process.host, config, wall=process.wall, ids=SeededIds(process.random))

        return run

    async def _route(self, process: Process) -> None:
        """A gateway's part in this: the routes it sees, and what it tells of its load."""
        process.teller = LoadTeller(process.faulty, process.name, wall=process.wall)
        async with mirror(
            process.faulty, ROUTES, jitter=process.random.random, relist_s=self.sizes.relist_s
        ) as process.view:
            await process.teller.run()
