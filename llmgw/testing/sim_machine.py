"""A machine that is not there, its engines and its GPUs: they outlive the agents on it, as real ones do.

Time is `anyio.current_time()`, and nothing runs by itself: an engine's state is worked out when somebody looks.
`llmgw.testing.fake_host` is what an agent sees of a machine.

What must never happen on a real machine is checked here, where it would happen: two engines of one shard, more memory
promised to living engines than there is, one GPU given to two of them, the head of a gang before its workers listen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import msgspec

from llmgw.core.gang import HEAD_WAITS
from llmgw.core.ids import shard_name
from llmgw.core.node import Build, Fabric, Facts, Gpu, GpuHealth
from llmgw.core.replica import Assignment
from llmgw.core.units import GB
from llmgw.testing.seed import Random
from llmgw_agent.state import Process, SavedState

ENGINE: Final = "llama.cpp"
ENGINE_GPU: Final = "vllm"
BUILDS: Final = (
    Build(engine=ENGINE, version="b1"),
    Build(engine=ENGINE, version="b2"),
    Build(engine=ENGINE_GPU, version="v1", named=True),
)
"""What every machine can run, the best first."""

ENGINES_KEPT: Final = 200
"""Processes remembered per machine, dead ones for their last words. More than can be alive at once."""


class Temper(msgspec.Struct, frozen=True, kw_only=True):
    """How one start of an engine will go. Seconds; None: that does not happen.

    `fails`: the start itself is refused, with this reason. `loads_s`: until it can work. `dies_s`: its process ends so
    long after its start. `wrong`: it comes up as something else than was ordered. `ends_s`: how long it takes to end
    after SIGTERM. `busy_s`: how long its last request takes once nothing new is sent to it. `shows`: whether one can
    see its load getting on. `hangs_alone`: a part of a gang that has lost another one hangs, instead of ending.
    """

    fails: str | None = None
    loads_s: float = 3.0
    dies_s: float | None = None
    wrong: bool = False
    ends_s: float = 1.0
    busy_s: float = 0.0
    shows: bool = False
    hangs_alone: bool = False


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
    """One process, dead or alive. Moments are on the simulation's clock.

    `whole`: it once worked, for a part of a gang together with all others. `ended`: set when it is known when it ends.
    """

    machine: Machine = field(repr=False)
    process: Process
    shard: str
    order: Assignment
    incarnation: str
    port: int
    temper: Temper
    started_s: float
    ends_s: float = math.inf
    exit: str = ""
    hung: bool = False
    idle_s: float | None = None
    whole: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def alive(self) -> bool:
        """Whether its process exists."""
        return anyio.current_time() < self.ends_s

    @property
    def loaded(self) -> bool:
        """Whether it could work, as far as it itself is concerned."""
        return anyio.current_time() >= self.started_s + self.temper.loads_s

    @property
    def serves(self) -> bool:
        """Whether it would answer a request now. Of a gang only the head does, and only with all its workers."""
        able = self.alive and self.loaded and not self.hung and not self.temper.wrong
        others = [other for _, other in self.others()]
        return able and all(other is not None and other.loaded and not other.hung for other in others)

    def others(self) -> Iterator[tuple[int, Engine | None]]:
        """The other parts of its gang that live, by rank; None where there is none."""
        gang = self.order.gang
        for peer in () if gang is None else gang.peers:
            if peer.rank != self.order.rank:
                machine = self.machine.world.get(peer.node)
                yield peer.rank, None if machine is None else machine.engine_of(f"{self.order.replica}.{peer.rank}")

    def end(self, at_s: float, how: str) -> None:
        """It ends at `at_s`, unless it ends before that anyway."""
        if at_s < self.ends_s:
            self.ends_s, self.exit = at_s, how
            self.ended.set()
            self.ended = anyio.Event()

    def look_around(self) -> str | None:
        """What it says while it can't work yet, None once it can; a part of a gang reacts to the others' absence."""
        others = dict(self.others())
        waits = HEAD_WAITS.get(self.order.launch.engine, False)
        if self.whole:
            lost = [rank for rank, other in others.items() if other is None or other.hung]
            if lost and not (waits and self.order.rank):  # an rpc-server waits for the next head
                self._alone(f"lost rank {lost[0]}")
            return None
        if not self.loaded:
            return "loading model"
        if waits and self.order.rank == 0:
            missing = [rank for rank, other in others.items() if other is None or not other.loaded]
            if missing:
                self.end(anyio.current_time(), f"no rpc-server at rank {missing[0]}")
                return "loading model"
        elif not waits and any(other is None or not other.loaded for other in others.values()):
            return "waiting for the other ranks"
        self.whole = True
        return None

    def _alone(self, why: str) -> None:
        if self.temper.hangs_alone:
            self.hung = True
        else:
            self.end(anyio.current_time(), why)


@dataclass(kw_only=True, eq=False)
class Machine:
    """One node's hardware. `temper` decides how each start of an engine goes; `world`: all machines, by name.

    `lies`: what its facts become before its agent sees them, as with a driver gone mad.
    """

    name: str
    memory_bytes: int
    witness: Witness
    temper: Callable[[Assignment], Temper]
    random: Random
    address: str = "10.0.0.1"
    gpus: tuple[Gpu, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    weights: tuple[str, ...] | None = ()
    world: Mapping[str, Machine] = field(default_factory=dict, repr=False)
    lies: Callable[[Facts], Facts] | None = None
    on: bool = True
    boots: int = 1
    disk: SavedState | None = None
    disk_damaged: bool = False
    disk_full: bool = False
    engines: list[Engine] = field(default_factory=list)
    _pid: int = 1000

    def __post_init__(self) -> None:
        self._fitted = self.gpus, self.fabrics

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

    def engine_of(self, shard: str) -> Engine | None:
        """The living engine of a shard."""
        return next((engine for engine in self.running() if engine.shard == shard), None)

    def power_off(self) -> None:
        """Every process is gone, the disk stays."""
        self.on = False
        for engine in self.running():
            engine.end(anyio.current_time(), "power lost")

    def power_on(self) -> None:
        """Another boot."""
        self.on = True
        self.boots += 1

    # --- engines ----------------------------------------------------------------------------------------------------

    def launch(self, order: Assignment, temper: Temper, *, data: str, incarnation: str, port: int) -> Engine:
        """A process comes to be."""
        now_s = anyio.current_time()
        shard = shard_name(order.node, order.replica, order.rank).partition("/")[2]
        engine = Engine(
            machine=self,
            process=Process(
                pid=self.next_pid(),
                started=round(now_s * 100),
                boot_id=self.boot_id,
                mark=f"{data}/{order.node}/{shard}/{incarnation}",
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
        self.engines = [*self.engines[-ENGINES_KEPT:], engine]
        self.witness.engine_started(self, engine)
        return engine

    def _check_start(self, new: Engine) -> None:
        living = self.running()
        if any(engine.shard == new.shard for engine in living):
            self.witness.wrong(f"{self.name} runs two engines of {new.shard}")
        promised = sum(engine.order.claim.memory_bytes or 0 for engine in (*living, new))
        if promised > self.memory_bytes:
            names = ", ".join(engine.shard for engine in (*living, new))
            self.witness.wrong(
                f"{self.name} has {self.memory_bytes} bytes of memory, living engines claim {promised}: {names}"
            )
        wanted = {gpu.uuid for gpu in new.order.claim.gpus}
        for engine in living:
            if shared := wanted & {gpu.uuid for gpu in engine.order.claim.gpus}:
                self.witness.wrong(f"{new.shard} starts on {min(shared)}, which {engine.shard} uses")
        if HEAD_WAITS.get(new.order.launch.engine, False) and new.order.rank == 0:
            for rank, _ in new.others():
                if not self._was_up(new, rank):
                    self.witness.wrong(f"{new.shard} is started before its rank {rank} has ever listened")

    def _was_up(self, head: Engine, rank: int) -> bool:
        """Whether a worker of this head listened at any time."""
        peers = () if head.order.gang is None else head.order.gang.peers
        node = next(peer.node for peer in peers if peer.rank == rank)
        shard, now_s = f"{head.order.replica}.{rank}", anyio.current_time()
        engines = [engine for engine in self.world[node].engines if engine.shard == shard]
        return any(min(now_s, engine.ends_s) >= engine.started_s + engine.temper.loads_s for engine in engines)

    # --- GPUs and fabrics -------------------------------------------------------------------------------------------

    def gpu(self, uuid: str) -> Gpu | None:
        """A GPU as it is now; None when the machine has none of that uuid."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def change_gpu(self, uuid: str, **fields: object) -> None:
        """Something happens to a GPU, or to how the driver sees it."""
        self.gpus = tuple(msgspec.structs.replace(gpu, **fields) if gpu.uuid == uuid else gpu for gpu in self.gpus)

    def lose_gpu(self, uuid: str, *, hangs: bool, listed: bool = True) -> None:
        """It falls off the bus; engines on it end, or hang. Not `listed`: the list is shorter, and indices shift."""
        self.change_gpu(uuid, health=GpuHealth.LOST, memory_bytes=None, fault="GPU has fallen off the bus (Xid 79)")
        if not listed:
            left = [gpu for gpu in self.gpus if gpu.uuid != uuid]
            self.gpus = tuple(msgspec.structs.replace(gpu, index=n) for n, gpu in enumerate(left))
        for engine in self.running():
            if any(gpu.uuid == uuid for gpu in engine.order.claim.gpus):
                if hangs:
                    engine.hung = True
                else:
                    engine.end(anyio.current_time(), "CUDA error: the device is lost")

    def lose_fabrics(self) -> None:
        """Its cables are out; the gangs that it is part of hang."""
        self.fabrics = ()
        for engine in self.running():
            if engine.order.gang is not None:
                engine.hung = True

    def mend(self) -> None:
        """All its GPUs and fabrics are as they were fitted."""
        self.gpus, self.fabrics = self._fitted

    def refusal(self, order: Assignment) -> str | None:
        """Why an engine could not start on the GPUs of its claim; None when it can."""
        for claim in order.claim.gpus:
            gpu = self.gpu(claim.uuid)
            if gpu is None or gpu.health is GpuHealth.LOST:
                return f"CUDA error: no device {claim.uuid}"
            if gpu.health is GpuHealth.FAULT:
                return f"CUDA error: uncorrectable ECC error on {claim.uuid}"
            if (gpu.foreign_bytes or 0) > GB:
                return f"CUDA error: out of memory on {claim.uuid}"
        return None
