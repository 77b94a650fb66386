"""A cluster on a bare index: nodes, models and agents reduced to what they write, for tests of the pure core.

No time passes and nothing waits: the test moves the clock, lets agents answer and runs passes, each on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from llmgw.core.catalog import ModelSpec, NodeSpec, Profile, Scaling
from llmgw.core.history import Checker
from llmgw.core.ids import CountedIds, shard_name
from llmgw.core.invariants import require
from llmgw.core.liveness import observe
from llmgw.core.node import Build, EngineFacts, Fabric, Facts, Gpu, GpuHealth, Session, WeightSet
from llmgw.core.plan import Plan, Settings, View, WakeKey
from llmgw.core.reconcile import due, reconcile
from llmgw.core.record import Generation, Record, StoreMeta
from llmgw.core.replica import GONE, Assignment, Desired, Replica, ShardPhase, ShardReport
from llmgw.core.snapshot import Change, Dirty, Index, Kind, Ref
from llmgw.core.units import GB, Now
from llmgw.testing.apply import changes_for, changes_of, copy_of

LLAMA = Build(engine="llama.cpp", version="b1", named=True)


def cpu_profile(memory_gb: float | None = 1.0, *, name: str = "cpu", **more: object) -> Profile:
    """A profile for machines without GPUs."""
    profile = Profile(name=name, engine="llama.cpp", min_memory_gb=memory_gb)
    return msgspec.structs.replace(profile, **more)


def model_spec(name: str, *profiles: Profile, replicas: int = 1, source: str = "") -> ModelSpec:
    """A model of the catalog, with one CPU profile if none is given."""
    return ModelSpec(
        name=name,
        source=source or f"{name}.gguf",
        profiles=profiles or (cpu_profile(),),
        scaling=Scaling(min=replicas, max=replicas),
    )


def gpu(index: int, gpu_class: str = "H100", **more: object) -> Gpu:
    """A healthy GPU that nobody uses; its uuid names its index."""
    made = Gpu(uuid=f"GPU-{index}", index=index, gpu_class=gpu_class, health=GpuHealth.OK, foreign=0, foreign_bytes=0)
    return msgspec.structs.replace(made, **more)


@dataclass(kw_only=True)
class Cluster:
    """The tree, the two clocks, one leader's view, and what agents would do about it."""

    index: Index = field(default_factory=Index)
    now: Now = field(default_factory=lambda: Now(wall_s=1_000_000.0, mono_s=100.0))
    view: View = field(default_factory=View)
    ids: CountedIds = field(default_factory=CountedIds)
    settings: Settings = field(default_factory=Settings)
    wakes: dict[WakeKey, float] = field(default_factory=dict)
    leases: int = 0
    saved: dict[str, Assignment] = field(default_factory=dict)
    """What agents run, by shard: the order as they saved it."""
    checker: Checker = field(default_factory=lambda: Checker(fenced=False))
    """Sees every revision; a broken invariant ends the test there."""

    def __post_init__(self) -> None:
        self.checker.reset(self._listing(), revision=self.index.revision)
        if self.index.meta is None:
            self.write(Kind.META, "", StoreMeta(incarnation="store-1"))

    # --- writing as people and nodes do

    def commit(self, changes: list[Change], *, revision: int) -> None:
        """One revision happens. Raises: InvariantError, if it breaks an invariant."""
        self.index.apply(changes, revision=revision)
        require(self.checker.advance(changes, revision=revision))

    def write(self, kind: Kind, name: str, record: Record | None) -> int:
        """Put or delete one record; returns the revision."""
        return self.write_all((kind, name, record))

    def write_all(self, *records: tuple[Kind, str, Record | None]) -> int:
        """Put or delete records in one transaction; returns the revision."""
        revision = self.index.revision + 1
        self.commit(changes_for(self.index, *records, revision=revision), revision=revision)
        return revision

    def meddle(self, *records: tuple[Kind, str, Record | None]) -> int:
        """As `write_all`, by somebody who may break every rule: the invariants are judged from here on only."""
        revision = self.index.revision + 1
        self.index.apply(changes_for(self.index, *records, revision=revision), revision=revision)
        self.checker.reset(self._listing(), revision=revision)
        return revision

    def spoil(self, kind: Kind, name: str = "") -> None:
        """A record becomes unreadable."""
        revision = self.index.revision + 1
        row = self.index.row(Ref(kind, name))
        created = revision if row is None else row.create_revision
        change = Change(ref=Ref(kind, name), mod_revision=revision, create_revision=created, corrupt="not JSON")
        self.commit([change], revision=revision)

    def _listing(self) -> list[Change]:
        return [
            Change(
                ref=ref,
                mod_revision=row.mod_revision,
                create_revision=row.create_revision,
                record=row.record,
                corrupt=None if row.record is not None else row.corrupt,
            )
            for ref, row in self.index.rows()
        ]

    def model(self, name: str, *profiles: Profile, replicas: int = 1, source: str = "") -> ModelSpec:
        """Apply a model."""
        spec = model_spec(name, *profiles, replicas=replicas, source=source)
        self.apply_model(spec)
        return spec

    def apply_model(self, spec: ModelSpec) -> None:
        """Apply a model as it is."""
        self.write(Kind.MODEL, spec.name, spec)
        self._applied()

    def remove_model(self, name: str) -> None:
        """Take a model out of the catalog."""
        self.write(Kind.MODEL, name, None)
        self._applied()

    def _applied(self) -> None:
        """Every apply bumps the generation, which also says that somebody told this store what is wanted."""
        row = self.index.generation
        number = 0 if row is None or row.record is None else row.record.number
        self.write(Kind.GENERATION, "", Generation(number=number + 1))

    def node(
        self,
        name: str,
        memory_gb: float | None = 16.0,
        *,
        engines: EngineFacts | None = EngineFacts(probed=True, builds=(LLAMA,)),  # noqa: B008  # frozen
        weights: tuple[str, ...] | None = None,
        labels: dict[str, str] | None = None,
        gpus: tuple[Gpu, ...] | None = None,
        fabrics: tuple[Fabric, ...] = (),
        gang_ports: tuple[int, int] | None = None,
    ) -> None:
        """A node registers: session, facts and the reports it has, in one transaction."""
        facts = Facts(
            node=name,
            boot_id=f"boot-{name}",
            memory_bytes=None if memory_gb is None else round(memory_gb * GB),
            labels=labels or {},
            gpus=gpus,
            fabrics=fabrics,
            gang_ports=gang_ports,
            engines=engines,
            weights=None if weights is None else tuple(WeightSet(source=each) for each in weights),
        )
        self.write_all((Kind.FACTS, name, facts), (Kind.SESSION, name, self.session(name)))

    def back(self, name: str) -> None:
        """A node whose session ended gets a new one, its reports as they stand."""
        self.write(Kind.SESSION, name, self.session(name))

    def away(self, name: str) -> None:
        """A node's session ends."""
        self.write(Kind.SESSION, name, None)

    def spec(self, name: str, **fields: object) -> None:
        """People say something of a node."""
        self.write(Kind.NODE_SPEC, name, msgspec.structs.replace(NodeSpec(name=name), **fields))

    def session(self, name: str) -> Session:
        """A new session of a node, told all that it runs; nothing is written."""
        self.leases += 1
        meta = self.index.meta
        assert meta is not None
        assert meta.record is not None
        return Session(
            node=name,
            boot_id=f"boot-{name}",
            data=f"8:{name}",
            lease=self.leases,
            store=meta.record.incarnation,
            address="127.0.0.1",
            version="1",
            pid=1,
            started_at=self.now.wall_s,
        )

    # --- agents

    def report(self, name: str, phase: ShardPhase, *, reason: str = "", order: Assignment | None = None) -> None:
        """A node reports on the shard `<node>/<replica>.<rank>`; `order` is what it saved, when nothing orders it."""
        row = self.index.assignments.get(name)
        known = row.record if row is not None and row.record is not None else order
        assert known is not None
        self.write(
            Kind.SHARD,
            name,
            ShardReport(
                node=known.node,
                replica=known.replica,
                rank=known.rank,
                model=known.model,
                phase=phase,
                phase_at=self.now.wall_s,
                assigned=row is not None,
                assignment_rev=0 if row is None else row.mod_revision,
                order=None if row is not None else order,
                incarnation="i1",
                address="127.0.0.1",
                port=20000,
                pid=None if phase in GONE or phase is ShardPhase.HELD else 4711,
                reason=reason,
            ),
        )

    def answer(self, *nodes: str, ready: bool = True) -> None:
        """Agents do what they are ordered to, at once: engines get ready, stop, and records of the gone are deleted.

        Only nodes with a session; `nodes` empty means all of them. `ready` false: engines go on loading.
        """
        for node in nodes or tuple(self.index.sessions.names()):
            if node in self.index.sessions:
                orders = self.index.assignments_on.get(node, set())
                for name in sorted(orders):
                    self._obey(name, ready=ready)
                for name in sorted(self.index.reports_on.get(node, set()) - orders):
                    self._unordered(name)

    def _obey(self, name: str, *, ready: bool) -> None:
        row, report = self.index.assignments[name], self.index.reports.record(name)
        if row.record is None or row.corrupt is not None:
            return
        over = report is not None and report.phase in GONE
        if row.record.desired is Desired.STOPPED:
            phase = report.phase if report is not None and over else ShardPhase.STOPPED
            self.saved.pop(name, None)
        elif report is not None and over:
            phase = report.phase  # for good; it says so of a newer order as well
        elif report is None and self._taken(row.record):
            return
        else:
            phase = ShardPhase.READY if ready or _is_ready(report) else ShardPhase.STARTING
            phase = ShardPhase.HELD if row.record.desired is Desired.HELD else phase
            self.saved[name] = row.record
        if report is None or report.phase is not phase or report.assignment_rev < row.mod_revision:
            self.report(name, phase, reason="" if report is None else report.reason)

    def _taken(self, order: Assignment) -> bool:
        """Whether a GPU of a shard that is to start is still held by another one here: agents see that, and wait."""
        wanted = {gpu.uuid for gpu in order.claim.gpus}
        for name in self.index.reports_on.get(order.node, ()) if wanted else ():
            report = self.index.reports.record(name)
            if report is None or report.pid is None:
                continue
            other = self.index.assignments.record(name) or report.order or self.saved.get(name)
            if other is not None and wanted & {gpu.uuid for gpu in other.claim.gpus}:
                return True
        return False

    def _unordered(self, name: str) -> None:
        report = self.index.reports.record(name)
        if report is None:
            return
        if report.phase in GONE:
            self.write(Kind.SHARD, name, None)
        elif report.assigned:
            order = self.saved.get(name)
            unassigned = msgspec.structs.replace(report, assigned=False, assignment_rev=0, order=order)
            self.write(Kind.SHARD, name, unassigned)

    # --- the leader

    def advance(self, seconds: float, *, step_wall_s: float = 0.0) -> None:
        """Time passes; `step_wall_s`: the wall clock jumps on top of it."""
        wall_s = self.now.wall_s + seconds + step_wall_s
        self.now = Now(wall_s=wall_s, mono_s=self.now.mono_s + seconds)

    def new_leader(self) -> None:
        """Another controller takes over, with a clock of its own and nothing seen yet."""
        self.now = Now(wall_s=self.now.wall_s, mono_s=self.now.mono_s + 5000.0)
        self.view, self.wakes = View(), {}
        self.index.take_dirty()
        self.index.dirty.everything = True

    def plan(self, dirty: Dirty | None = None) -> Plan:
        """What a pass would decide; nothing changes. `dirty` None: look at everything."""
        self.view = observe(self.view, self.index, now=self.now)
        return reconcile(
            self.index,
            Dirty(everything=True) if dirty is None else dirty,
            now=self.now,
            view=self.view,
            ids=CountedIds(count=self.ids.count),
            settings=self.settings,
        )

    def dirty(self) -> Dirty:
        """What a leader would look at now: what changed, and what is due."""
        dirty = self.index.take_dirty()
        dirty.add(due(self.wakes, now=self.now))
        return dirty

    def step(self, dirty: Dirty | None = None) -> Plan:
        """One pass over what is dirty, applied."""
        plan = self.plan(self.dirty() if dirty is None else dirty)
        self.apply(plan)
        self.index.dirty.add(plan.left)
        return plan

    def apply(self, plan: Plan) -> None:
        """A plan is committed, one revision a group; what it asks to look at again is remembered."""
        self.ids.count += sum(1 for group in plan.groups for write in group.writes if write.ref.kind is Kind.SECRET)
        for group in plan.groups:
            revision = self.index.revision + 1
            self.commit(changes_of(self.index, group, revision=revision), revision=revision)
        self.wakes |= plan.wake_mono_s
        self.index.dirty.add(plan.left)

    def settle(self, passes_max: int = 50) -> None:
        """Agents answer and passes run until neither has anything to do. Raises AssertionError if that never ends."""
        for _ in range(passes_max):
            revision = self.index.revision
            self.step()
            self.answer()
            if self.index.revision == revision and not self.index.dirty:
                return
        raise AssertionError(f"not settled after {passes_max} passes")

    def copy(self) -> Cluster:
        """The same cluster once more, with an index of its own."""
        return Cluster(
            index=copy_of(self.index),
            now=self.now,
            view=self.view,
            ids=CountedIds(count=self.ids.count),
            settings=self.settings,
            wakes=dict(self.wakes),
            leases=self.leases,
            saved=dict(self.saved),
        )

    # --- reading

    def replicas(self, model: str) -> list[Replica]:
        """A model's replicas by id."""
        return [replica for replica in self.index.replicas.records() if replica.model == model]

    def one(self, model: str) -> Replica:
        """The only replica of a model."""
        (replica,) = self.replicas(model)
        return replica

    def shard(self, replica: Replica) -> str:
        """The name of a replica's first shard."""
        return shard_name(replica.shards[0].node, replica.id, replica.shards[0].rank)


def _is_ready(report: ShardReport | None) -> bool:
    return report is not None and report.phase is ShardPhase.READY
