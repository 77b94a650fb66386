"""The weather of one run, drawn from its seed: which fault strikes when, what people want, and calm at the end.

The faults themselves are `llmgw.testing.storm_faults`. Each undoes after a while what it did, and `heal` undoes
everything at once. They overlap. The first one takes the leader away, so that no run goes without a change of leader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import anyio
import msgspec

from llmgw.core.catalog import ModelSpec, NodeSpec, Profile, Scaling
from llmgw.core.record import Generation, Record
from llmgw.core.replica import Assignment
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Unavailable
from llmgw.store import keys
from llmgw.store.memory_cluster import MemorySnapshot
from llmgw.testing.fake_host import ENGINE, Engine, Temper
from llmgw.testing.judge import Judge
from llmgw.testing.seed import Random
from llmgw.testing.sim_fleet import Fleet, Process

FAULTS_MIN: Final = 5
"""Fewest faults in a run."""

GAPS_S: Final = ((5.0, 90.0), (5.0, 90.0), (1.0, 20.0))
"""Between the beginnings of two faults; which of these it is in a run is drawn."""

START_S: Final = 120.0
"""Start budget of every model here."""


class Fault(Protocol):
    """One kind of fault."""

    __name__: str

    async def __call__(self, storm: Storm) -> None:
        """Strike, and undo it after a while."""
        ...


def model(name: str, *, memory_gb: float, replicas: int, context: int = 4096) -> ModelSpec:
    """A model of one profile. Another `context` is another launch, so it rolls."""
    profile = Profile(
        name="cpu", engine=ENGINE, min_memory_gb=memory_gb, context=context, start_s=START_S, drain_s=20.0
    )
    return ModelSpec(name=name, source=f"{name}.gguf", profiles=(profile,), scaling=Scaling(min=replicas, max=replicas))


class Storm:
    """The faults of one run. `begin` gives it what it strikes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.faults = 0
        self.models: dict[str, ModelSpec] = {}
        """The catalog as people have it at the moment."""
        self.backups: list[MemorySnapshot] = []
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

    def temper(self, _: Assignment) -> Temper:
        """How the next start of an engine goes."""
        random = self.random
        temper = Temper(loads_s=random.uniform(1, 15), ends_s=random.uniform(0.1, 4), busy_s=random.uniform(0, 15))
        if not self._troubled["engines"]:
            return temper
        match random.randrange(6):
            case 0:
                return msgspec.structs.replace(temper, fails="the weights can't be read")
            case 1:
                return msgspec.structs.replace(temper, dies_s=random.uniform(0.1, 60))
            case 2:
                return msgspec.structs.replace(temper, wrong=True)
            case 3:
                return msgspec.structs.replace(temper, loads_s=START_S * random.uniform(0.8, 3))
            case _:
                return temper

    # --- the run ---

    async def populate(self) -> None:
        """What people want: a few models that fit even with a node less."""
        random, nodes = self.random, self.fleet.sizes.nodes
        for n in range(random.randint(2, 4)):
            name, replicas = f"model/{n}", random.randint(1, min(3, nodes))
            self.models[name] = model(name, memory_gb=random.choice([4, 10, 20]), replicas=replicas)
        await self.apply()

    async def rage(self, first: Sequence[Fault], kinds: Sequence[Fault], *, for_s: float) -> None:
        """Faults for at least `for_s`, and at least `FAULTS_MIN` of them: one of `first`, then any of `kinds`."""
        until_s = anyio.current_time() + for_s
        fault, gap_s = self.random.choice(first), self.random.choice(GAPS_S)
        async with anyio.create_task_group() as tasks:
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

    async def heal(self) -> None:
        """Everything runs and works, as people would have it."""
        self.judge.tell("HEAL", name="storm")
        fleet = self.fleet
        if not fleet.cluster.running:
            fleet.cluster.start()
        for process in fleet.processes:
            process.skew_s = 0.0
            if process.running:
                process.faulty.heal()
        for n, machine in enumerate(fleet.machines):
            machine.disk_full = False
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
        """Some engine that serves."""
        serving = [engine for machine in self.fleet.machines for engine in machine.running() if engine.serves]
        return self.random.choice(serving) if serving else None

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
            stored = await self.fleet.store.list([keys.prefix(Kind.MODEL)])
            self._generation += 1
            generation = Ref(Kind.GENERATION), Generation(number=self._generation)
            wanted = [(Ref(Kind.MODEL, name), spec) for name, spec in self.models.items()]
            refs = [ref for item in stored.items if (ref := keys.parse(item.key)) is not None]
            await self.fleet.write(*wanted, generation, delete=[ref for ref in refs if ref.name not in self.models])

        await self._insist(once)

    async def _insist(self, write: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await write()
            except Unavailable:
                await anyio.sleep(2)
            else:
                return
