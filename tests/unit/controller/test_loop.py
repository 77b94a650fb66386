"""The controller's loop on a store in memory, under virtual time: when it decides, on what, and what it forgets."""

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec
import pytest

from llmgw.config import ControllerConfig
from llmgw.controller.commit import ELECTION, META
from llmgw.controller.loop import Decide, control
from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.explain import Constraint
from llmgw.core.ids import Ids, Secret
from llmgw.core.node import Build, EngineFacts, Facts, Gpu, GpuHealth, Session
from llmgw.core.plan import Group, Plan, Put, Settings, View, Wake
from llmgw.core.reconcile import reconcile
from llmgw.core.record import Head, Leader, Record, StoreMeta
from llmgw.core.replica import ModelState, Replica
from llmgw.core.snapshot import Dirty, Index, Kind, Ref, Rest
from llmgw.core.units import GB, Now
from llmgw.errors import Invalid
from llmgw.obs.status import ControllerStatus
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Operation, PutOp
from llmgw.testing.faults import Fate, FaultyStore, Link, TxnFault, once
from llmgw.testing.virtual import run_virtual

CONFIG = ControllerConfig()


class CountedIds:
    """Ids in sequence; each controller counts in an alphabet of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0

    def suffix(self) -> str:
        self._count += 1
        return self._name * 2 + "".join(chr(ord("a") + int(digit)) for digit in f"{self._count:03}")

    def key(self) -> Secret:
        return Secret("0" * 64)

    def token(self) -> str:
        self._count += 1
        return f"{self._name}{self._count}"


class Scripted:
    """Decides what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, Dirty, View, int]] = []
        self.plans: list[Plan] = []
        self.check: Callable[[Index], None] = lambda _: None

    def __call__(self, index: Index, dirty: Dirty, *, now: Now, view: View, ids: Ids, settings: Settings) -> Plan:
        self.check(index)
        self.asked.append((now.mono_s, dirty, view, index.revision))
        return self.plans.pop(0) if self.plans else Plan()

    @property
    def dirty(self) -> list[Dirty]:
        return [dirty for _, dirty, _, _ in self.asked]

    @property
    def times(self) -> list[float]:
        return [time_s for time_s, _, _, _ in self.asked]


class Controller:
    """One controller and its network."""

    def __init__(self, world: "World", name: str, decide: Decide, config: ControllerConfig) -> None:
        self.store: FaultyStore = FaultyStore(MemoryStore(world.cluster), world.tasks)
        self.name = name
        self.identity = Leader(id=name, address=f"{name}:8800", version="1", pid=1)
        self.status = ControllerStatus(leader=self.identity, renew_within_s=5)
        self._decide, self._config = decide, config
        self.scope = anyio.CancelScope()
        self.wall_step_s = 0.0

    async def run(self) -> None:
        with self.scope:
            await control(
                self.store,
                self._config,
                identity=self.identity,
                wall=lambda: 1_800_000_000 + anyio.current_time() + self.wall_step_s,
                ids=CountedIds(self.name),
                jitter=lambda: 0.5,
                status=self.status,
                decide=self._decide,
            )


class World:
    """A store, the controllers on it, and whoever else writes to it."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.cluster = MemoryCluster()
        self.tasks = tasks
        self.store = MemoryStore(self.cluster)

    def start(self, name: str, decide: Decide, config: ControllerConfig = CONFIG) -> Controller:
        one = Controller(self, name, decide, config)
        self.tasks.start_soon(one.run)
        return one

    async def put(self, *records: tuple[Ref, Record]) -> int:
        ops = [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in records]
        return (await self.store.txn([], ops)).revision

    async def model(self, name: str, *, memory_gb: float = 1, gpus: int = 0) -> int:
        profile = Profile(name="p", engine="llama.cpp", min_memory_gb=memory_gb, gpus_per_node=gpus)
        return await self.put((Ref(Kind.MODEL, name), ModelSpec(name=name, source="s", profiles=(profile,))))

    async def node(self, name: str, *, memory_gb: float, ttl_s: int | None = None) -> None:
        """An agent of a machine with one GPU registers: session and facts in one transaction."""
        lease = await self.store.grant(10_000)
        meta = self.records(Kind.META)[""]
        assert isinstance(meta, StoreMeta)
        build = Build(engine="llama.cpp", version="1", named=True)
        facts = Facts(
            node=name,
            boot_id="b",
            cpus=4,
            memory_bytes=round(memory_gb * GB),
            gpus=(Gpu(uuid="GPU-0", index=0, gpu_class="h100", health=GpuHealth.OK, foreign=0),),
            engines=EngineFacts(probed=True, builds=(build,)),
        )
        session = Session(
            node=name,
            boot_id="b",
            data="1:1",
            lease=lease.id,
            store=meta.incarnation,
            address="127.0.0.1",
            version="1",
            pid=1,
            started_at=0,
            ttl_s=ttl_s,
        )
        await self.store.txn(
            [],
            [
                PutOp(key=keys.key(Ref(Kind.SESSION, name)), value=codec.encode_stored(session), lease=lease.id),
                PutOp(key=keys.key(Ref(Kind.FACTS, name)), value=codec.encode_stored(facts)),
            ],
        )

    def records(self, kind: Kind) -> dict[str, Record]:
        found: dict[str, Record] = {}
        for item in self.cluster.find(keys.prefix(kind), prefix=kind.many):
            ref = keys.parse(item.key)
            assert ref is not None
            found[ref.name] = codec.decode(ref, item.value)
        return found

    def replicas(self) -> list[Replica]:
        return [record for record in self.records(Kind.REPLICA).values() if isinstance(record, Replica)]

    @property
    def leader(self) -> str | None:
        found = self.records(Kind.LEADER).get("")
        return found.id if isinstance(found, Leader) else None

    async def until(self, holds: Callable[[], bool], *, within_s: float = 60) -> None:
        """Until `holds`; it is looked at whenever the tree changes."""
        with anyio.fail_after(within_s):
            async with self.store.watch([keys.ROOT], from_revision=self.cluster.revision) as batches:
                while not holds():
                    await anext(batches)


def in_world(scene: Callable[[World], Awaitable[None]], *, seed: int = 0) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(5000):
                await scene(World(tasks))
            tasks.cancel_scope.cancel()

    run_virtual(main, seed=seed)


def note(name: str, *, reason: str = "") -> Group:
    record = ModelState(name=name, wanted=1, placed=0, ready=0, reason=reason)
    return Group(cause="note", writes=(Put(ref=Ref(Kind.MODEL_STATE, name), record=record),))


# --- a reign ---------------------------------------------------------------------------------------------------------


def test_the_first_controller_names_the_store_and_only_one_leads() -> None:
    async def scene(world: World) -> None:
        controllers = [world.start(name, Scripted()) for name in "abc"]
        await anyio.sleep(30)
        assert isinstance(world.records(Kind.META)[""], StoreMeta)
        leading = [one.name for one in controllers if one.status.term is not None]
        assert leading == [world.leader]
        revision = world.cluster.revision
        await anyio.sleep(300)
        assert world.cluster.revision == revision

    in_world(scene)


def test_a_cancelled_leader_hands_over_and_the_next_has_decided_within_half_a_second() -> None:
    async def scene(world: World) -> None:
        a = world.start("a", Scripted())
        await world.until(lambda: world.leader == "a")
        decide = Scripted()
        world.start("b", decide)
        await anyio.sleep(20)
        left_s = anyio.current_time()
        a.scope.cancel()
        await world.until(lambda: world.leader == "b")
        await anyio.sleep(0.4)
        assert decide.times
        assert decide.times[0] - left_s < 0.5

    in_world(scene)


def test_every_plan_sees_all_that_this_leader_committed_before() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        # `more`: the next pass is due at once, long before the watch tells of the last one's commit.
        decide.plans = [Plan(groups=[note("m", reason=str(n))], left=Dirty(models={"m"})) for n in range(50)]
        committed = [0]

        def check(index: Index) -> None:
            head = index.head
            head_rev = 0 if head is None else head.mod_revision
            stored = world.cluster.find(keys.key(Ref(Kind.HEAD)), prefix=False)
            assert head_rev == (stored[0].mod_revision if stored else 0)
            committed[0] += 1

        decide.check = check
        a = world.start("a", decide)
        a.store.watch_lag_s = 3
        await anyio.sleep(300)
        assert committed[0] > 50

    in_world(scene)


@pytest.mark.parametrize("fate", list(Fate))
def test_what_was_dirty_stays_so_until_its_commit_succeeds(fate: Fate) -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        a = world.start("a", decide)
        await anyio.sleep(20)
        decide.asked.clear()
        decide.plans = [Plan(groups=[note("x")])]
        a.store.judges.append(once(TxnFault(fate=fate, delay_s=20)))
        await world.model("m")
        await anyio.sleep(60)
        assert decide.dirty[0].models == {"m"}
        assert "m" in decide.dirty[1].models
        assert a.status.commits["failed"] == 1
        failed_s = decide.asked[1][2].write_failed_mono_s
        assert failed_s is not None
        assert failed_s >= decide.times[0]
        assert decide.asked[0][2].write_failed_mono_s is None
        asked = len(decide.asked)
        await anyio.sleep(100)
        assert len(decide.asked) == asked

    in_world(scene)


def test_a_failed_commit_does_not_lose_what_only_a_timer_had_made_due() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        decide.plans = [Plan(wake_mono_s={(Wake.FLEET, ""): 30.0}), Plan(groups=[note("x")])]
        a = world.start("a", decide)
        await anyio.sleep(20)
        a.store.judges.append(once(TxnFault(fate=Fate.REFUSED)))
        await anyio.sleep(40)
        assert a.status.commits["failed"] == 1
        assert len(decide.asked) >= 3

    in_world(scene)


def test_a_failed_keepalive_is_a_failed_write_to_the_core() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        a = world.start("a", decide)
        await anyio.sleep(19)  # in between two of them
        a.store.keepalives_fail = True
        await anyio.sleep(2)
        a.store.keepalives_fail = False
        await anyio.sleep(4)
        await world.model("m")
        await anyio.sleep(1)
        assert a.status.terms == 1
        assert decide.asked[-1][2].write_failed_mono_s is not None

    in_world(scene)


def test_timers_bring_back_just_what_they_speak_of_when_they_say() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        wake = {(Wake.MODEL, "m"): 40.0, (Wake.NODE, "n"): 50.0, (Wake.FLEET, ""): 60.0, (Wake.MODEL, "later"): 5000.0}
        fleet = {(Wake.FLEET, ""): 60.0}  # looked at in every pass, so said again by each
        decide.plans = [Plan(wake_mono_s=wake), Plan(wake_mono_s=fleet), Plan(wake_mono_s=fleet)]
        world.start("a", decide)
        await anyio.sleep(100)
        (_, *others) = decide.asked
        assert [round(time_s) for time_s, _, _, _ in others] == [40, 50, 60]
        assert [dirty for _, dirty, _, _ in others] == [Dirty(models={"m"}), Dirty(nodes={"n"}), Dirty(fleet=True)]

    in_world(scene)


def test_a_look_at_something_replaces_its_timer() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        decide.plans = [Plan(wake_mono_s={(Wake.MODEL, "m"): 40.0, (Wake.MODEL, "k"): 45.0})]
        world.start("a", decide)
        await anyio.sleep(20)
        await world.model("m")
        await anyio.sleep(80)
        assert [round(time_s) for time_s in decide.times] == [0, 20, 45]

    in_world(scene)


def test_everything_is_looked_at_every_ten_minutes() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        world.start("a", decide)
        await anyio.sleep(1900)
        assert [dirty.everything for dirty in decide.dirty] == [True] * 4
        assert [round(later - earlier) for earlier, later in zip(decide.times, decide.times[1:], strict=False)] == [
            600
        ] * 3

    in_world(scene)


def test_a_look_at_everything_goes_on_where_it_was_cut_and_counts_from_its_beginning() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        lefts = [Dirty(rest=Rest(after="n"), nodes={"k"}), Dirty(rest=Rest(models=True)), Dirty(rest=Rest(after="z"))]
        decide.plans = [Plan(left=left) for left in lefts]
        world.start("a", decide)
        await anyio.sleep(300)
        assert decide.dirty == [Dirty(everything=True), *lefts]
        apart_s = [later - earlier for earlier, later in zip(decide.times, decide.times[1:], strict=False)]
        assert apart_s == pytest.approx([CONFIG.pass_interval_s] * 3)
        await anyio.sleep(400)
        assert decide.dirty[4:] == [Dirty(everything=True)]
        assert decide.times[4] == pytest.approx(decide.times[0] + CONFIG.full_pass_s)

    in_world(scene)


def test_a_failed_commit_does_not_lose_what_is_left_of_a_look_at_everything() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        rest = Rest(models=True, after="m")
        decide.plans = [Plan(left=Dirty(rest=rest)), Plan(groups=[note("x")])]
        a = world.start("a", decide)
        a.store.judges.append(once(TxnFault(fate=Fate.REFUSED), where=lambda ops: len(ops) > 1))
        await anyio.sleep(300)
        assert a.status.commits["failed"] == 1
        assert decide.dirty == [Dirty(everything=True), Dirty(rest=rest), Dirty(rest=rest)]

    in_world(scene)


def test_a_stepped_wall_clock_makes_the_next_pass_a_full_one() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        one = world.start("a", decide)
        await anyio.sleep(5)
        for step_s in (0.0, 0.0, -900.0, 0.0):
            one.wall_step_s += step_s
            await world.model("m")
            await anyio.sleep(5)
        assert [dirty.everything for dirty in decide.dirty] == [True, False, False, True, False]

    in_world(scene)


def test_changes_are_gathered() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        world.start("a", decide)
        await anyio.sleep(20)
        decide.asked.clear()
        for n in range(100):
            await world.model(f"m{n}")
            await anyio.sleep(0.01)
        await anyio.sleep(1)
        assert len(decide.asked) <= 12
        assert {name for dirty in decide.dirty for name in dirty.models} == {f"m{n}" for n in range(100)}
        assert all(b - a >= 0.1 - 1e-9 for a, b in zip(decide.times, decide.times[1:], strict=False))

    in_world(scene)


def test_a_pass_that_was_cut_is_taken_up_at_once() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        decide.plans = [Plan(left=Dirty(models={"late"})), Plan()]
        world.start("a", decide)
        await anyio.sleep(20)
        assert [dirty.models for dirty in decide.dirty] == [set(), {"late"}]
        assert decide.times[1] - decide.times[0] < 0.2

    in_world(scene)


def test_a12_what_can_never_be_committed_is_reported_and_does_not_become_a_hot_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(world: World) -> None:
        class Stubborn(Scripted):
            def __call__(
                self, index: Index, dirty: Dirty, *, now: Now, view: View, ids: Ids, settings: Settings
            ) -> Plan:
                super().__call__(index, dirty, now=now, view=view, ids=ids, settings=settings)
                fitting = note("fits", reason=str(len(self.asked)))
                return Plan(groups=[note("m", reason="x" * 2_000_000), fitting])

        decide = Stubborn()
        a = world.start("a", decide)
        await anyio.sleep(98)
        assert 2 <= len(decide.asked) <= 25
        assert a.status.rejected == len(decide.asked)
        assert a.status.writes["note"] == len(decide.asked)
        assert set(world.records(Kind.MODEL_STATE)) == {"fits"}

    with caplog.at_level(logging.ERROR):
        in_world(scene)
    assert "the limit is" in caplog.records[0].__dict__["fields"]["why"]


def test_one_log_line_for_a_pass_that_did_something_and_none_for_others(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        decide.plans = [Plan(groups=[note("m"), note("k")]), Plan()]
        world.start("a", decide)
        await anyio.sleep(20)
        await world.model("z")
        await anyio.sleep(20)
        assert len(decide.asked) > 2

    with caplog.at_level(logging.INFO, logger="llmgw.controller.loop"):
        in_world(scene)
    (line,) = [record for record in caplog.records if record.message == "pass"]
    fields = line.__dict__["fields"]
    assert {key: fields[key] for key in ("note", "txns", "cause")} == {"note": 2, "txns": 1, "cause": "won"}
    assert fields["term"] > 0
    assert fields["revision"] >= fields["term"]


def test_agents_whose_session_ttl_is_another_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        world.start("a", Scripted())
        await anyio.sleep(20)
        for name, ttl_s in (("old", None), ("same", 30), ("n1", 60), ("n2", 60), ("n3", 10)):
            await world.node(name, memory_gb=1, ttl_s=ttl_s)
            await anyio.sleep(5)
        await anyio.sleep(2 * CONFIG.full_pass_s)

    with caplog.at_level(logging.WARNING, logger="llmgw.controller.loop"):
        in_world(scene)
    assert [record.__dict__["fields"] for record in caplog.records if "session_ttl_s" in record.message] == [
        {"node": "n1", "ttl_s": 60, "session_ttl_s": 30.0},
        {"node": "n3", "ttl_s": 10, "session_ttl_s": 30.0},
    ]


def test_a_head_moved_by_somebody_else_is_read_again() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        a = world.start("a", decide)
        await anyio.sleep(20)
        decide.plans = [Plan(groups=[note("m")]), Plan(groups=[note("m")])]
        a.store.watch_lag_s = 5
        await world.model("z")
        await anyio.sleep(4)
        await world.put((Ref(Kind.HEAD), Head(commits=77, term=1)))
        await anyio.sleep(30)
        assert a.status.commits["conflict"] == 1
        assert a.status.terms == 1
        assert set(world.records(Kind.MODEL_STATE)) == {"m"}
        assert world.records(Kind.HEAD)[""] == Head(commits=78, term=a.status.term.number if a.status.term else 0)

    in_world(scene)


def test_an_outage_of_the_store_shorter_than_the_lease_costs_no_term() -> None:
    async def scene(world: World) -> None:
        decide = Scripted()
        a = world.start("a", decide)
        await anyio.sleep(20)
        a.store.link = Link.REFUSED
        await anyio.sleep(3)
        a.store.link = Link.UP
        await anyio.sleep(20)
        assert (a.status.terms, world.leader) == (1, "a")

    in_world(scene)


def test_after_a_long_outage_somebody_leads_again_without_help() -> None:
    async def scene(world: World) -> None:
        controllers = [world.start(name, Scripted()) for name in "ab"]
        await anyio.sleep(20)
        world.cluster.stop()
        await anyio.sleep(120)
        assert all(one.status.term is None for one in controllers)
        world.cluster.start()
        await world.until(lambda: any(one.status.term is not None for one in controllers))

    in_world(scene)


def test_bad_durations_are_refused_before_anything_is_read() -> None:
    async def scene(world: World) -> None:
        one = Controller(world, "a", Scripted(), msgspec.structs.replace(CONFIG, margin_s=1.0))
        with pytest.raises(Invalid):
            await one.run()
        assert one.store.stats().calls == 0

    in_world(scene)


# --- another store under the same name --------------------------------------------------------------------------------


@pytest.mark.parametrize("heir", ["a", "b"])
def test_a_restore_that_nobody_announced_gets_a_new_incarnation(heir: str) -> None:
    """Whoever leads afterwards notices, because every controller remembers how far the store had come."""

    async def scene(world: World) -> None:
        controllers = {name: world.start(name, Scripted()) for name in "ab"}
        await anyio.sleep(20)
        before = world.records(Kind.META)[""]
        backup = world.cluster.snapshot()
        for n in range(50):
            await world.model(f"m{n}")
        await anyio.sleep(30)
        world.cluster.restore(backup)
        for name, one in controllers.items():
            if name != heir:
                one.scope.cancel()
        await world.until(lambda: world.records(Kind.META)[""] != before)
        await anyio.sleep(60)
        assert controllers[heir].status.term is not None
        after = world.records(Kind.META)[""]
        await anyio.sleep(600)
        assert world.records(Kind.META)[""] == after

    in_world(scene)


def test_an_announced_restore_keeps_its_incarnation_and_starts_a_new_term() -> None:
    async def scene(world: World) -> None:
        a = world.start("a", Scripted())
        await anyio.sleep(20)
        backup = world.cluster.snapshot()
        for n in range(50):
            await world.model(f"m{n}")
        await anyio.sleep(30)
        term = a.status.term
        world.cluster.restore(backup)
        await world.put((Ref(Kind.META), StoreMeta(incarnation="restored")))
        await anyio.sleep(60)
        assert world.records(Kind.META)[""] == StoreMeta(incarnation="restored")
        assert a.status.term is not None
        assert term is not None
        assert a.status.terms >= 2

    in_world(scene)


# --- two of them, with the real core ----------------------------------------------------------------------------------


async def settle(world: World) -> None:
    """Until every model has a state."""
    await world.until(lambda: world.records(Kind.MODEL).keys() == world.records(Kind.MODEL_STATE).keys())


class Sought(msgspec.Struct, frozen=True, kw_only=True):
    """What two models want of one node that has it once: how much of it, and the rule that refuses the second."""

    memory_gb: float
    gpus: int
    constraint: Constraint
    amount: int


MEMORY = Sought(memory_gb=14, gpus=0, constraint=Constraint.MEMORY, amount=14 * GB)
GPU = Sought(memory_gb=1, gpus=1, constraint=Constraint.GPU_CLAIMED, amount=1)


def assert_one_claim(world: World, models: Sequence[str], sought: Sought = MEMORY) -> None:
    """One of the two is placed, the other says why not, with both numbers."""
    replicas = world.replicas()
    assert len(replicas) == 1
    (claim,) = [shard.claim for one in replicas for shard in one.shards]
    assert claim.memory_bytes == round(sought.memory_gb * GB)
    assert [gpu.uuid for gpu in claim.gpus] == ["GPU-0"] * sought.gpus
    (other,) = set(models) - {replicas[0].model}
    state = world.records(Kind.MODEL_STATE)[other]
    assert isinstance(state, ModelState)
    assert state.unplaced is not None
    (refusal,) = state.unplaced.nearest
    assert (refusal.constraint, refusal.needed) == (sought.constraint, sought.amount)
    assert refusal.holders == ((replicas[0].id, sought.amount),)


def places(ops: Sequence[Operation]) -> bool:
    return any(op.key.startswith(keys.prefix(Kind.REPLICA)) for op in ops)


def strike(fate: Fate, *, delay_s: float = 4) -> Callable[[Controller], None]:
    """The first transaction that places something meets `fate`."""
    return lambda one: one.store.judges.append(once(TxnFault(fate=fate, delay_s=delay_s), where=places))


def no_keepalives(one: Controller) -> None:
    one.store.keepalives_fail = True


def cut(one: Controller) -> None:
    one.store.link = Link.SILENT


FAULTS: dict[str, Callable[[Controller], None]] = {
    "none": lambda _: None,
    "late": strike(Fate.LATE),
    "late_after_the_term": strike(Fate.LATE, delay_s=30),
    "answer_lost": strike(Fate.ANSWER_LOST),
    "lost": strike(Fate.LOST),
    "keepalives": no_keepalives,
    "cut": cut,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sought", [MEMORY, GPU], ids=["memory", "gpu"])
@pytest.mark.parametrize("lag_s", [0.0, 12.0])
def test_c03_two_controllers_during_a_change_of_leader_commit_one_claim(
    fault: str, lag_s: float, sought: Sought
) -> None:
    """Two models of 14 GB for a node of 24, or for its one GPU, applied in one second while the lead changes hands."""

    async def scene(world: World) -> None:
        a = world.start("a", reconcile)
        await world.until(lambda: world.leader == "a")
        b = world.start("b", reconcile)
        await world.node("n1", memory_gb=24)
        await anyio.sleep(20)
        b.store.watch_lag_s = lag_s
        FAULTS[fault](a)
        await world.model("m1", memory_gb=sought.memory_gb, gpus=sought.gpus)
        await anyio.sleep(0.05)
        a.scope.cancel()
        await world.model("m2", memory_gb=sought.memory_gb, gpus=sought.gpus)
        await world.until(lambda: world.leader == "b")
        await settle(world)
        await anyio.sleep(60)
        assert_one_claim(world, ["m1", "m2"], sought)
        assert ELECTION in {item.key for item in world.cluster.find(keys.ROOT, prefix=True)}

    in_world(scene)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sought", [MEMORY, GPU], ids=["memory", "gpu"])
def test_c03_one_controller_commits_one_claim_through_every_fault(fault: str, sought: Sought) -> None:
    async def scene(world: World) -> None:
        a = world.start("a", reconcile)
        await world.until(lambda: world.leader == "a")
        world.start("b", reconcile)
        await world.node("n1", memory_gb=24)
        await anyio.sleep(20)
        FAULTS[fault](a)
        await world.model("m1", memory_gb=sought.memory_gb, gpus=sought.gpus)
        await world.model("m2", memory_gb=sought.memory_gb, gpus=sought.gpus)
        await settle(world)
        await anyio.sleep(60)
        assert_one_claim(world, ["m1", "m2"], sought)

    in_world(scene)


def test_a04_a_lagging_mirror_at_take_over_never_claims_twice() -> None:
    """The new leader's watch is behind; the old one placed meanwhile. Nothing is placed on that old picture."""

    async def scene(world: World) -> None:
        a = world.start("a", reconcile)
        await world.until(lambda: world.leader == "a")
        b = world.start("b", reconcile)
        await world.node("n1", memory_gb=24)
        await anyio.sleep(20)
        b.store.watch_lag_s = 25
        await world.model("m1", memory_gb=14)
        await world.until(lambda: len(world.replicas()) == 1)
        a.scope.cancel()
        await world.until(lambda: world.leader == "b")
        await world.model("m2", memory_gb=14)
        await anyio.sleep(20)
        assert len(world.replicas()) == 1
        await settle(world)
        assert_one_claim(world, ["m1", "m2"])
        assert b.status.commits["conflict"] == 0

    in_world(scene)


def test_whoever_takes_over_lists_afresh_what_its_watch_may_have_lost() -> None:
    """A standby's watch lost the first claim and everything else of that time, and nobody said so."""

    async def scene(world: World) -> None:
        a = world.start("a", reconcile)
        await world.until(lambda: world.leader == "a")
        b = world.start("b", reconcile)
        await world.node("n1", memory_gb=24)
        await anyio.sleep(20)
        b.store.watches_lose = True
        await world.model("m1", memory_gb=14)
        await world.until(lambda: len(world.replicas()) == 1)
        await anyio.sleep(1)
        b.store.watches_lose = False
        await world.model("m2", memory_gb=14)
        await anyio.sleep(5)
        a.scope.cancel()
        await world.until(lambda: world.leader == "b")
        await world.until(lambda: sum(b.status.passes.values()) > 0)
        assert_one_claim(world, ["m1", "m2"])

    in_world(scene)


def test_the_keys_of_the_fence_are_those_of_the_tree() -> None:
    assert (ELECTION, META) == ("/llmgw/election/controller", "/llmgw/meta/store")
