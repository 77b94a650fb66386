"""The fence and the packing, on a store in memory under virtual time."""

from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.controller.commit import ELECTION, HEAD, META, Committer, pack
from llmgw.core.catalog import ModelSpec, Task
from llmgw.core.ids import Secret
from llmgw.core.node import Liveness, NodeState
from llmgw.core.plan import Delete, Group, Put, Write
from llmgw.core.record import Head, Leader, StoreMeta
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    EngineSecret,
    Launch,
    ModelState,
    Replica,
    ReplicaPhase,
    ReplicaShard,
)
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Conflict, InvariantError, LostTerm, NotApplied, OutcomeUnknown, Outdated, TooLarge, WentBack
from llmgw.store import codec, keys
from llmgw.store.incarnation import HighWater
from llmgw.store.limits import check_txn
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Compare, DeleteOp, GetOp, Operation, PutOp, TxnResult, unchanged
from llmgw.testing.faults import Fate, FaultyStore, TxnFault, once
from llmgw.testing.virtual import run_virtual


def state(name: str, *, reason: str = "") -> Put:
    return Put(
        ref=Ref(Kind.MODEL_STATE, name), record=ModelState(name=name, wanted=1, placed=0, ready=0, reason=reason)
    )


def note(name: str, *, reason: str = "") -> Group:
    return Group(cause="note", writes=(state(name, reason=reason),))


def placement(replica: str, *, shards: int = 1, padding: int = 0) -> Group:
    """A replica with everything that belongs to it."""
    key = Secret("ab" * 32)
    claim = Claim(memory_bytes=1)
    launch = Launch(
        source="s", task=Task.GENERATE, profile="cpu", engine="llama.cpp", context=1, slots=1, args=("x" * padding,)
    )
    whole = Replica(
        id=replica,
        model="m",
        profile="cpu",
        engine="llama.cpp",
        launch="0",
        phase=ReplicaPhase.PLACED,
        shards=tuple(ReplicaShard(rank=rank, node=f"n{rank}", claim=claim) for rank in range(shards)),
        created_at=0,
        phase_at=0,
    )
    orders = [
        Put(
            ref=Ref(Kind.ASSIGNMENT, f"n{rank}/{replica}.{rank}"),
            record=Assignment(
                node=f"n{rank}",
                replica=replica,
                rank=rank,
                model="m",
                desired=Desired.RUNNING,
                launch=launch,
                claim=claim,
                engine_key=key,
            ),
        )
        for rank in range(shards)
    ]
    return Group(
        cause="place",
        writes=(
            Put(ref=Ref(Kind.REPLICA, replica), record=whole),
            Put(ref=Ref(Kind.SECRET, replica), record=EngineSecret(replica=replica, key=key)),
            *orders,
        ),
    )


class Bench:
    """A store in which controller `a` leads, and its committer."""

    def __init__(self, cluster: MemoryCluster, tasks: anyio.abc.TaskGroup) -> None:
        self.cluster = cluster
        self.plain = MemoryStore(cluster)
        self.store = FaultyStore(self.plain, tasks)
        self.term = 0
        self.committer: Committer

    async def begin(self) -> None:
        meta = PutOp(key=META, value=codec.encode_stored(StoreMeta(incarnation="1")))
        self.meta_rev = (await self.plain.txn([], [meta])).revision
        await self.elect("a")
        self.committer = await self.lead()

    async def elect(self, name: str) -> None:
        """Whoever led does not any more."""
        lease = await self.plain.grant(10_000)  # longer than any scene: it is the head that must refuse late writes
        held = await self.plain.get(ELECTION)
        if held is not None:
            await self.plain.revoke(held.lease)
        value = codec.encode_stored(Leader(id=name, address="", version="", pid=0))
        self.term = (await self.plain.txn([], [PutOp(key=ELECTION, value=value, lease=lease.id)])).revision

    async def lead(self) -> Committer:
        head = await self.plain.get(HEAD)
        return Committer(self.store, term=self.term, meta_rev=self.meta_rev, head=head, high_water=HighWater())

    def stored(self, kind: Kind) -> list[str]:
        prefix = keys.prefix(kind)
        return [item.key.removeprefix(prefix) for item in self.cluster.find(prefix, prefix=kind.many)]

    def head(self) -> tuple[int, Head]:
        (item,) = self.cluster.find(HEAD, prefix=False)
        head = codec.decode(Ref(Kind.HEAD), item.value)
        assert isinstance(head, Head)
        return item.mod_revision, head


def on_bench(scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            bench = Bench(MemoryCluster(), tasks)
            await bench.begin()
            with anyio.fail_after(600):
                await scene(bench)
            tasks.cancel_scope.cancel()

    run_virtual(main)


# --- the fence -------------------------------------------------------------------------------------------------------


def test_a_commit_writes_its_groups_and_extends_the_head() -> None:
    async def scene(bench: Bench) -> None:
        done = await bench.committer.commit([placement("r-a"), note("m")])
        assert done.txns == 1
        assert bench.stored(Kind.REPLICA) == ["r-a"]
        revision, head = bench.head()
        assert (revision, head) == (bench.committer.head_rev, Head(commits=1, term=bench.term))
        await bench.committer.commit([note("n")])
        assert bench.head()[1].commits == 2

    on_bench(scene)


def test_an_empty_plan_writes_nothing() -> None:
    async def scene(bench: Bench) -> None:
        before = bench.cluster.revision
        assert (await bench.committer.commit([])).txns == 0
        assert bench.cluster.revision == before

    on_bench(scene)


def test_every_transaction_carries_the_whole_fence() -> None:
    seen: list[tuple[Sequence[Compare], Sequence[Operation]]] = []

    class Spy(MemoryStore):
        async def txn(
            self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
        ) -> TxnResult:
            seen.append((compares, ops))
            return await super().txn(compares, ops, or_else)

    async def scene(bench: Bench) -> None:
        committer = Committer(
            Spy(bench.cluster), term=bench.term, meta_rev=bench.meta_rev, head=None, high_water=HighWater()
        )
        await committer.commit([placement(f"r-{n}", shards=50) for n in range(5)])

    on_bench(scene)
    assert len(seen) == 3
    for compares, ops in seen:
        assert {compare.key for compare in compares} == {ELECTION, META, HEAD}
        assert ops[-1].key == HEAD


def lost(name: str) -> Group:
    state = NodeState(name=name, liveness=Liveness.LOST, since_at=0)
    return Group(cause="liveness", writes=(Put(ref=Ref(Kind.NODE_STATE, name), record=state),))


def test_nobody_is_declared_lost_who_has_a_session() -> None:
    async def scene(bench: Bench) -> None:
        await bench.plain.txn([], [PutOp(key=keys.key(Ref(Kind.SESSION, "n2")), value=b"{}")])
        head_rev = bench.committer.head_rev
        with pytest.raises(Outdated, match="is there"):
            await bench.committer.commit([note("m"), lost("n1"), lost("n2")])
        assert bench.committer.head_rev == head_rev
        assert bench.stored(Kind.NODE_STATE) == bench.stored(Kind.MODEL_STATE) == []
        await bench.committer.commit([note("m"), lost("n1")])
        assert bench.stored(Kind.NODE_STATE) == ["n1"]

    on_bench(scene)


def test_more_lost_nodes_than_one_transaction_compares_go_in_several() -> None:
    async def scene(bench: Bench) -> None:
        done = await bench.committer.commit([lost(f"n{number}") for number in range(300)])
        assert done.txns == 3
        assert len(bench.stored(Kind.NODE_STATE)) == 300

    on_bench(scene)


def test_a04_paused_leader_is_fenced() -> None:
    """A leader that was frozen while another took over gets nothing in, and learns why."""

    async def scene(bench: Bench) -> None:
        frozen = bench.committer
        await frozen.commit([placement("r-a")])
        await bench.elect("b")
        await (await bench.lead()).commit([placement("r-b")])
        before = bench.cluster.revision
        with pytest.raises(LostTerm, match="another controller leads"):
            await frozen.commit([placement("r-c")])
        assert bench.cluster.revision == before
        assert bench.stored(Kind.REPLICA) == ["r-a", "r-b"]

    on_bench(scene)


def test_a04_a_leader_whose_key_is_gone_is_fenced_although_nobody_leads() -> None:
    async def scene(bench: Bench) -> None:
        held = await bench.plain.get(ELECTION)
        assert held is not None
        await bench.plain.revoke(held.lease)
        with pytest.raises(LostTerm, match="gone"):
            await bench.committer.commit([placement("r-a")])

    on_bench(scene)


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.ANSWER_LOST, Fate.LATE])
def test_a04_late_txn_never_lands_after_a_newer_one(fate: Fate) -> None:
    """A timed-out write is decided before anything else is: it has landed by then, or it never will."""

    async def scene(bench: Bench) -> None:
        committer = bench.committer
        await committer.commit([note("m")])
        bench.store.judges.append(once(TxnFault(fate=fate, delay_s=20)))
        with pytest.raises(OutcomeUnknown):
            await committer.commit([placement("r-a")])
        landed = fate is Fate.ANSWER_LOST
        assert bench.stored(Kind.REPLICA) == (["r-a"] if landed else [])
        assert committer.head_rev == bench.head()[0]
        await committer.commit([placement("r-b")])
        await anyio.sleep(100)
        assert bench.stored(Kind.REPLICA) == (["r-a", "r-b"] if landed else ["r-b"])
        assert committer.head_rev == bench.head()[0]

    on_bench(scene)


def test_a04_late_txn_that_lands_while_it_is_being_settled_is_found() -> None:
    async def scene(bench: Bench) -> None:
        faults = [TxnFault(fate=Fate.LATE, delay_s=4), TxnFault(fate=Fate.LOST), TxnFault(fate=Fate.REFUSED)]
        for fault in faults:
            bench.store.judges.append(once(fault))
        with pytest.raises(OutcomeUnknown):
            await bench.committer.commit([placement("r-a")])
        assert bench.stored(Kind.REPLICA) == ["r-a"]
        assert bench.committer.head_rev == bench.head()[0]
        await bench.committer.commit([note("m")])

    on_bench(scene)


def test_a_leader_thrown_out_while_settling_learns_it() -> None:
    async def scene(bench: Bench) -> None:
        bench.store.judges.append(once(TxnFault(fate=Fate.LOST)))
        async with anyio.create_task_group() as tasks:

            async def take_over() -> None:
                await anyio.sleep(1)
                await bench.elect("b")

            tasks.start_soon(take_over)
            with pytest.raises(LostTerm):
                await bench.committer.commit([placement("r-a")])

    on_bench(scene)


def test_a_plan_on_an_older_head_is_refused_and_the_head_read_again() -> None:
    async def scene(bench: Bench) -> None:
        other = await bench.lead()
        await other.commit([placement("r-a")])
        with pytest.raises(Conflict) as caught:
            await bench.committer.commit([placement("r-b")])
        assert not isinstance(caught.value, LostTerm)
        assert bench.committer.head_rev == other.head_rev
        await bench.committer.commit([placement("r-c")])
        assert bench.stored(Kind.REPLICA) == ["r-a", "r-c"]
        assert bench.head()[1].commits == 2

    on_bench(scene)


def test_another_incarnation_ends_the_term() -> None:
    async def scene(bench: Bench) -> None:
        await bench.plain.txn([], [PutOp(key=META, value=codec.encode_stored(StoreMeta(incarnation="2")))])
        with pytest.raises(LostTerm, match="incarnation"):
            await bench.committer.commit([placement("r-a")])
        assert bench.stored(Kind.REPLICA) == []

    on_bench(scene)


def test_a_refused_write_changes_nothing_and_can_be_repeated() -> None:
    async def scene(bench: Bench) -> None:
        bench.store.judges.append(once(TxnFault(fate=Fate.REFUSED)))
        with pytest.raises(NotApplied):
            await bench.committer.commit([placement("r-a")])
        await bench.committer.commit([placement("r-a")])
        assert bench.head()[1].commits == 1

    on_bench(scene)


def test_a_store_that_went_back_under_a_leader_is_noticed() -> None:
    async def scene(bench: Bench) -> None:
        await bench.committer.commit([note("m")])
        backup = bench.cluster.snapshot()
        for n in range(10):
            await bench.committer.commit([note(f"m{n}")])
        bench.cluster.restore(backup)
        with pytest.raises(WentBack):
            await bench.committer.commit([placement("r-a")])
        assert bench.stored(Kind.REPLICA) == []

    on_bench(scene)


def test_a_corrupt_head_is_written_over_and_counting_goes_on() -> None:
    async def scene(bench: Bench) -> None:
        await bench.committer.commit([note("m")])
        await bench.plain.txn([], [PutOp(key=HEAD, value=b"{")])
        committer = await bench.lead()
        await committer.commit([note("n")])
        assert bench.head()[1] == Head(commits=3, term=bench.term)

    on_bench(scene)


# --- packing ---------------------------------------------------------------------------------------------------------


FENCE = [unchanged(key, 2**62) for key in (ELECTION, META, HEAD)]
FENCE_PUT = PutOp(key=HEAD, value=codec.encode_stored(Head(commits=2**62, term=2**62)))
FENCE_READS = [GetOp(key=key) for key in (ELECTION, META, HEAD)]

SIZES = st.sampled_from([0, 100, 20_000, 400_000, 740_000, 1_480_000, 1_500_000, 3_000_000])


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Plans of every shape: many small groups, wide ones, huge ones, and some that write the same places."""
    made: list[Group] = []
    for n in range(draw(st.integers(0, 40))):
        match draw(st.sampled_from(["small", "wide", "huge", "shared", "delete"])):
            case "small":
                made.append(placement(f"r{n}-a"))
            case "wide":
                made.append(placement(f"r{n}-a", shards=draw(st.sampled_from([60, 124, 125, 126, 200]))))
            case "huge":
                made.append(note(f"huge{n}", reason="x" * draw(SIZES)))
            case "shared":
                made.append(note(draw(st.sampled_from("abc"))))
            case _:
                made.append(Group(cause="gone", writes=(Delete(ref=Ref(Kind.REPLICA, f"r{n}-b")),)))
    return made


def written(group: Group) -> list[tuple[str, bytes | None]]:
    return [
        (keys.key(write.ref), codec.encode_stored(write.record) if isinstance(write, Put) else None)
        for write in group.writes
    ]


@given(plan=groups())
def test_a12_any_plan_is_packed_within_the_limits_whole_and_in_order(plan: list[Group]) -> None:
    bundles, rejected = pack(plan)
    for one in bundles:
        check_txn(FENCE, [*one.ops, FENCE_PUT], FENCE_READS)
    fitting = [group for group in plan if all(each.group is not group for each in rejected)]
    assert [(op.key, op.value if isinstance(op, PutOp) else None) for one in bundles for op in one.ops] == [
        write for group in fitting for write in written(group)
    ]
    ends, total = set(), 0
    for group in fitting:
        total += len(group.writes)
        ends.add(total)
    cuts, total = set(), 0
    for one in bundles:
        total += len(one.ops)
        cuts.add(total)
    assert cuts <= ends
    for each in rejected:
        ops = [PutOp(key=key, value=value or b"") for key, value in written(each.group)]
        with pytest.raises(TooLarge):
            # Within the room kept for the fence it may have been a close call.
            check_txn(FENCE, [*ops, FENCE_PUT, PutOp(key="/room", value=b"x" * 1024)], FENCE_READS)


def test_small_groups_share_a_transaction() -> None:
    bundles, _ = pack([placement(f"r{n}-a") for n in range(42)])
    assert [len(one.ops) for one in bundles] == [126]


def test_a12_a_group_that_fits_nowhere_is_reported_with_its_cause_and_the_others_land() -> None:
    async def scene(bench: Bench) -> None:
        huge = placement("huge-a", padding=3_000_000)
        done = await bench.committer.commit([placement("r-a"), huge, placement("wide-a", shards=200), placement("r-b")])
        assert bench.stored(Kind.REPLICA) == ["r-a", "r-b"]
        assert [one.group.cause for one in done.rejected] == ["place", "place"]
        texts = [str(one.error) for one in done.rejected]
        assert "'huge-a'" in texts[0]
        assert "bytes, the limit is 14" in texts[0]
        assert "'wide-a'" in texts[1]
        assert "202 operations, the limit is 127" in texts[1]

    on_bench(scene)


def test_a12_killed_between_transactions_no_replica_is_half_there() -> None:
    plan = [placement(f"r{n}-a", shards=1 + n % 3) for n in range(1200)]
    txns = len(pack(plan)[0])
    assert txns > 30

    class Mortal(MemoryStore):
        """Dies after some transactions."""

        life = 0

        async def txn(
            self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
        ) -> TxnResult:
            if self.life == 0:
                raise KeyboardInterrupt
            self.life -= 1
            return await super().txn(compares, ops, or_else)

    async def scene(bench: Bench) -> None:
        for life in range(0, txns, 5):
            await bench.plain.txn([], [DeleteOp(key=keys.ROOT + "plan/", prefix=True)])
            store = Mortal(bench.cluster)
            store.life = life
            committer = Committer(store, term=bench.term, meta_rev=bench.meta_rev, head=None, high_water=HighWater())
            with pytest.raises(KeyboardInterrupt):
                await committer.commit(plan)
            replicas = set(bench.stored(Kind.REPLICA))
            assert bool(replicas) == bool(life)
            assert set(bench.stored(Kind.SECRET)) == replicas
            orders = {name.partition("/")[2] for name in bench.stored(Kind.ASSIGNMENT)}
            assert orders == {
                f"r{n}-a.{rank}" for n in range(1200) for rank in range(1 + n % 3) if f"r{n}-a" in replicas
            }

    on_bench(scene)


@pytest.mark.parametrize(
    "write",
    [
        Put(ref=Ref(Kind.MODEL, "m"), record=ModelSpec(name="m", source="s")),
        Put(ref=Ref(Kind.HEAD), record=Head(commits=1, term=1)),
        Delete(ref=Ref(Kind.SESSION, "n")),
        Put(ref=Ref(Kind.META), record=StoreMeta(incarnation="x")),
    ],
)
def test_a_plan_cannot_write_what_is_not_the_leaders(write: Write) -> None:
    async def scene(bench: Bench) -> None:
        done = await bench.committer.commit([Group(cause="bug", writes=(write,)), placement("r-a")])
        assert isinstance(done.rejected[0].error, InvariantError)
        assert bench.stored(Kind.REPLICA) == ["r-a"]

    on_bench(scene)


def test_a_group_that_writes_a_place_twice_is_a_bug_and_skipped() -> None:
    _, rejected = pack([Group(cause="bug", writes=(state("m"), state("m")))])
    assert isinstance(rejected[0].error, InvariantError)
