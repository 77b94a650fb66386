"""The weather of one run, drawn from its seed: which fault strikes when, what people want, and calm at the end.

The faults themselves are in `llmgw.testing.storm_kinds` and beside it. Each undoes after a while what it did, and
`heal` undoes everything at once. They overlap. The first one takes the leader away, so that no run goes without a
change of leader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import anyio
import msgspec

from llmgw.core.catalog import EngineSpec, ModelSpec, NodeSpec
from llmgw.core.record import Generation, Record
from llmgw.core.replica import Assignment
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Unavailable
from llmgw.store import keys
from llmgw.store.memory_cluster import MemorySnapshot
from llmgw.testing.judge import Judge
from llmgw.testing.seed import Random
from llmgw.testing.sim_fleet import Fleet, Process
from llmgw.testing.sim_machine import ENGINE, Engine, Machine, Temper
from llmgw.testing.storm_models import START_S, draw

FAULTS_MIN: Final = 5
"""Fewest faults in a run."""

GAPS_S: Final = ((5.0, 90.0), (5.0, 90.0), (1.0, 20.0))
"""Between the beginnings of two faults; which of these it is in a run is drawn."""

DEMAND_S: Final = (5.0, 90.0)
"""Between two changes of what people ask of a model."""

NODES_PER_MODEL: Final = 12
"""In a large fleet there are more models: one more for so many nodes."""


class Fault(Protocol):
    """One kind of fault."""

    __name__: str

    async def __call__(self, storm: Storm) -> None:
        """Strike, and undo it after a while."""
        ...


class Storm:
    """The faults of one run. `begin` gives it what it strikes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.faults = 0
        self.models: dict[str, ModelSpec] = {}
        """The catalog as people have it at the moment."""
        self.wish: EngineSpec | None = None
        """The version of the engine that they want."""
        self.backups: list[MemorySnapshot] = []
        self.bad_builds: set[str] = set()
        """Versions that don't start."""
        self.bad_nodes: set[str] = set()
        """Nodes on which nothing starts."""
        self._generation = 0
        self._troubled: Counter[str] = Counter()
        self.fleet: Fleet
        self.judge: Judge

    def begin(self, fleet: Fleet, judge: Judge) -> None:
        """What to strike, and who is told."""
        self.fleet, self.judge = fleet, judge

    # --- what others may rely on ---

    @property
    def gateway_calm(self) -> bool:
        """Whether the gateway sees the store as it is."""
        return self.calm(self.fleet.gateway)

    def calm(self, process: Process) -> bool:
        """Whether `process` and the store are without trouble."""
        return not self._troubled["store"] and not self._troubled[process.name]

    def temper(self, order: Assignment, /) -> Temper:
        """How the next start of an engine goes."""
        random = self.random
        temper = Temper(
            loads_s=random.uniform(1, 15),
            ends_s=random.uniform(0.1, 4),
            busy_s=random.uniform(0, 15),
            hangs_alone=random.random() < 0.2,
        )
        if order.node in self.bad_nodes:
            return msgspec.structs.replace(temper, fails="libcudart.so.12: cannot open shared object file")
        if order.launch.build is not None and order.launch.build.partition("@")[2] in self.bad_builds:
            return msgspec.structs.replace(temper, dies_s=random.uniform(0.1, 5), loads_s=START_S)
        if not self._troubled["engines"]:
            return temper
        match random.randrange(7):
            case 0:
                return msgspec.structs.replace(temper, fails="the weights can't be read")
            case 1:
                return msgspec.structs.replace(temper, dies_s=random.uniform(0.1, 60))
            case 2:
                return msgspec.structs.replace(temper, wrong=True)
            case 3:
                return msgspec.structs.replace(temper, loads_s=START_S * random.uniform(0.8, 3))
            case 4:
                return msgspec.structs.replace(temper, loads_s=START_S * random.uniform(0.8, 3), shows=True)
            case _:
                return temper

    # --- the run ---

    async def populate(self) -> None:
        """What people want: a few models that fit even with a node less."""
        random, sizes = self.random, self.fleet.sizes
        for n in range(random.randint(2, 4) + sizes.nodes // NODES_PER_MODEL):
            name = f"model/{n}"
            self.models[name] = draw(random, name, hardware=sizes.hardware, most=min(3, sizes.nodes))
        await self.apply()

    async def rage(self, first: Sequence[Fault], kinds: Sequence[Fault], *, for_s: float) -> None:
        """Faults for at least `for_s`, and at least `FAULTS_MIN` of them: one of `first`, then any of `kinds`."""
        until_s = anyio.current_time() + for_s
        fault, gap_s = self.random.choice(first), self.random.choice(GAPS_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ask)
            while anyio.current_time() < until_s or self.faults < FAULTS_MIN:
                self.faults += 1
                tasks.start_soon(self._strike, fault)
                await anyio.sleep(self.some(*gap_s))
                self.backups = [*self.backups[-5:], self.fleet.cluster.snapshot()]
                fault = self.random.choice(kinds)
            if not self.gateway_calm:
                self.doubt_gateway()
            tasks.cancel_scope.cancel()

    async def _strike(self, fault: Fault) -> None:
        self.judge.totals[f"fault {fault.__name__}"] += 1
        self.judge.tell(f"FAULT {fault.__name__}", name="storm")
        await fault(self)
        self.judge.tell(f"end of {fault.__name__}", name="storm")

    async def _ask(self) -> None:
        """People ask more or less of the models, all the time."""
        while True:
            await anyio.sleep(self.some(*DEMAND_S))
            name = self.random.choice(sorted(self.models))
            in_flight, queued = self.random.choice([(0, 0), (0, 0), (0, 1), (2, 0), (6, 3)])
            if self.fleet.gateway.teller is not None:
                self.fleet.gateway.teller.say({name: (in_flight, queued)})

    async def heal(self) -> None:
        """Everything runs and works, as people would have it."""
        self.judge.tell("HEAL", name="storm")
        fleet = self.fleet
        self.bad_builds.clear()
        self.bad_nodes.clear()
        if not fleet.cluster.running:
            fleet.cluster.start()
        for process in fleet.processes:
            process.skew_s = 0.0
            if process.running:
                process.faulty.heal()
        for n, machine in enumerate(fleet.machines):
            machine.disk_full, machine.lies = False, None
            machine.mend()
            if not machine.on:
                fleet.power_on(n)
        fleet.start()
        await self.write(*((Ref(Kind.NODE_SPEC, m.name), NodeSpec(name=m.name)) for m in fleet.machines))
        await self.apply()

    # --- for the faults ---

    def doubt_gateway(self) -> None:
        """The gateway may have missed something that only its periodic listing finds: it is not judged until then."""

        async def doubt() -> None:
            with self.trouble(self.fleet.gateway):
                await anyio.sleep(1.3 * self.fleet.sizes.relist_s)

        self.fleet.tasks.start_soon(doubt)

    def some(self, low_s: float, high_s: float) -> float:
        """A time between the two, seconds."""
        return self.random.uniform(low_s, high_s)

    async def leader(self) -> Process:
        """The leader, once there is one."""
        while (leader := self.fleet.leader) is None:  # noqa: ASYNC110  # three processes' opinions have no one event
            await anyio.sleep(0.5)
        return leader

    def anyone(self, among: Sequence[Process] | None = None) -> Process | None:
        """Some process that runs."""
        running = [process for process in among or self.fleet.processes if process.running]
        return self.random.choice(running) if running else None

    def engine(self) -> Engine | None:
        """Some engine that has loaded, on a machine drawn first: where little runs it is hit as often."""
        busy = [machine for machine in self.fleet.machines if any(self._works(each) for each in machine.running())]
        if not busy:
            return None
        return self.random.choice([each for each in self.random.choice(busy).running() if self._works(each)])

    @staticmethod
    def _works(engine: Engine) -> bool:
        return engine.loaded and not engine.hung and not engine.temper.wrong

    def busy_gpu(self) -> tuple[Machine, str] | None:
        """Some GPU of some machine, one in use rather than an idle one; None where there is none at all."""
        equipped = [machine for machine in self.fleet.machines if machine.gpus]
        if not equipped:
            return None
        busy = [m for m in equipped if any(engine.order.claim.gpus for engine in m.running())]
        machine = self.random.choice(busy or equipped)
        used = [gpu.uuid for engine in machine.running() for gpu in engine.order.claim.gpus]
        return machine, self.random.choice(used or [gpu.uuid for gpu in machine.gpus])

    @contextmanager
    def trouble(self, *processes: Process, store: bool = False, engines: bool = False) -> Iterator[None]:
        """Who can't be judged as healthy meanwhile; `engines`: starts of engines go wrong."""
        names = [process.name for process in processes] + ["store"] * store + ["engines"] * engines
        self._troubled.update(names)
        try:
            yield
        finally:
            self._troubled.subtract(names)

    async def write(self, *puts: tuple[Ref, Record]) -> None:
        """What people write, once the store is there: they try again."""
        await self._insist(lambda: self.fleet.write(*puts))

    async def apply(self) -> None:
        """Write what people want now, and nothing else."""

        async def once() -> None:
            stored = await self.fleet.store.list([keys.prefix(Kind.MODEL), keys.prefix(Kind.ENGINE)])
            self._generation += 1
            wanted: dict[Ref, Record] = {Ref(Kind.MODEL, name): spec for name, spec in self.models.items()}
            if self.wish is not None:
                wanted[Ref(Kind.ENGINE, ENGINE)] = self.wish
            refs = [ref for item in stored.items if (ref := keys.parse(item.key)) is not None]
            generation = Ref(Kind.GENERATION), Generation(number=self._generation)
            await self.fleet.write(*wanted.items(), generation, delete=[ref for ref in refs if ref not in wanted])

        await self._insist(once)

    async def _insist(self, write: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await write()
            except Unavailable:
                await anyio.sleep(2)
            else:
                return
