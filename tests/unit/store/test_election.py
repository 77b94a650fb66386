"""Leading on a store in memory, under a clock of our own: seconds below are virtual."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest
import trio
from trio.testing import MockClock

from llmgw.core.record import FORMAT, Leader, StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Denied, Invalid, LeaseLost, LostTerm, OutcomeUnknown, StoreError, Unavailable
from llmgw.store import codec, keys
from llmgw.store.election import KEY, META, Term, check_durations, lead
from llmgw.store.memory import MemoryStore
from llmgw.store.memory_cluster import MemoryCluster
from llmgw.store.port import Batch, Compare, DeleteOp, Operation, PutOp, TxnResult


class Client(MemoryStore):
    """One controller's way to the store, which can be broken."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.keepalive_error: StoreError | None = None
        self.keepalives = 0
        self.answer_s = 0.0
        self.fate = ""
        self.late: tuple[Sequence[Compare], Sequence[Operation]] | None = None
        self.deaf = False

    async def keepalive(self, lease: int) -> int:
        self.keepalives += 1
        if (error := self.keepalive_error) is not None:
            await anyio.lowlevel.checkpoint()
            raise error
        ttl_s = await super().keepalive(lease)
        await anyio.sleep(self.answer_s)
        return ttl_s

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        fate, self.fate = self.fate, ""
        if fate == "late":
            self.late = (compares, ops)
            raise OutcomeUnknown("timed out")
        result = await super().txn(compares, ops, or_else)
        if fate == "landed":
            raise OutcomeUnknown("timed out")
        return result

    async def land(self) -> TxnResult:
        """The write that timed out reaches the store after all."""
        assert self.late is not None
        return await super().txn(*self.late)

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        return _silence() if self.deaf else super().watch(prefixes, from_revision=from_revision)


@asynccontextmanager
async def _silence() -> AsyncIterator[AsyncIterator[Batch]]:
    async def never() -> AsyncIterator[Batch]:
        await anyio.sleep_forever()
        yield Batch(revision=0)

    yield never()


def leader(name: str) -> Leader:
    return Leader(id=name, address=f"{name}:8800", version="1", pid=1)


def leading(store: MemoryStore, name: str = "a") -> AbstractAsyncContextManager[Term]:
    return lead(store, leader(name), ttl_s=10, keepalive_s=2.5, margin_s=3, call_timeout_s=3)


def run(
    scene: Callable[[MemoryCluster], Awaitable[None]], *, meta: StoreMeta | None = None, deadline_s: float = 300
) -> None:
    """Run `scene` on a fresh store of our format."""

    async def main() -> None:
        cluster = MemoryCluster()
        await write_meta(MemoryStore(cluster), meta or StoreMeta(incarnation="1"))
        with trio.fail_after(deadline_s):
            await scene(cluster)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def write_meta(store: MemoryStore, meta: StoreMeta) -> None:
    await store.txn([], [PutOp(key=META, value=codec.encode_stored(meta))])


class Candidate:
    """A controller that stands until it leads, and stays leader until told to leave or thrown out."""

    def __init__(self, cluster: MemoryCluster, name: str) -> None:
        self.store = Client(cluster)
        self.name = name
        self.leave = trio.Event()
        self.won = trio.Event()
        self.term: Term | None = None
        self.won_s = self.stopped_s = 0.0
        self.lost: LostTerm | None = None
        self.key_when_stopped = False

    async def run(self) -> None:
        try:
            async with leading(self.store, self.name) as self.term:
                self.won_s = trio.current_time()
                self.won.set()
                try:
                    await self.leave.wait()
                finally:
                    self.stopped_s = trio.current_time()
                    self.key_when_stopped = bool(self.store.cluster.find(KEY, prefix=False))
        except LostTerm as error:
            self.lost = error


def test_the_term_is_the_create_revision_of_a_leased_key() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        async with leading(MemoryStore(cluster)) as term:
            (held,) = cluster.find(KEY, prefix=False)
            assert (held.create_revision, held.lease) == (term.number, term.lease)
            assert codec.decode(Ref(Kind.LEADER), held.value) == leader("a")
        assert cluster.find(KEY, prefix=False) == ()

    run(scene)


def test_one_of_many_leads_and_hand_over_takes_less_than_half_a_second() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        async with trio.open_nursery() as nursery:
            waiting = [Candidate(cluster, name) for name in "abcde"]
            for one in waiting:
                nursery.start_soon(one.run)
            terms = []
            left_s = None
            while waiting:
                await trio.sleep(60)
                (one,) = [one for one in waiting if one.won.is_set()]
                assert one.term is not None
                terms.append(one.term.number)
                assert left_s is None or one.won_s - left_s < 0.5
                waiting.remove(one)
                left_s = trio.current_time()
                one.leave.set()
            assert terms == sorted(set(terms))

    run(scene, deadline_s=600)


def test_a_leader_that_cannot_renew_stops_before_its_lease_lapses() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a, b = Candidate(cluster, "a"), Candidate(cluster, "b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            nursery.start_soon(b.run)
            await trio.sleep(21)
            assert a.term is not None
            a.store.keepalive_error = Unavailable("no answer")
            renewed_s = a.term.renewed_mono_s
            await b.won.wait()
            assert a.stopped_s == pytest.approx(renewed_s + 10 - 3)
            assert a.key_when_stopped
            assert a.stopped_s <= b.won_s
            assert "7 s" in str(a.lost)
            b.leave.set()

    run(scene)


def test_a_term_counts_from_when_the_last_good_keepalive_was_sent_not_answered() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            assert a.term is not None
            a.store.answer_s = 2
            await trio.sleep(20)
            a.store.keepalive_error = Unavailable("no answer")
            await trio.sleep(2)  # what was under way is answered
            assert a.term.until_mono_s == a.term.renewed_mono_s + 10 - 3
            assert trio.current_time() - a.term.renewed_mono_s >= 2
            (lapses_s,) = [lease.deadline_s for lease in cluster._state.leases.values()]
        assert a.stopped_s == a.term.until_mono_s <= lapses_s - 3

    run(scene)


def test_a_leader_whose_store_is_gone_leaves_the_key_to_lapse() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            cluster.stop()
        assert isinstance(a.lost, LostTerm)
        cluster.start()
        b = Candidate(cluster, "b")
        b.leave.set()
        await b.run()
        assert a.term is not None
        assert b.term is not None
        assert b.term.number > a.term.number

    run(scene)


def test_failed_keepalives_are_retried_until_the_leaders_own_deadline() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            assert a.term is not None
            for _ in range(10):
                a.store.keepalive_error = Unavailable("no answer")
                await trio.sleep(4.4)  # the last good one is at most 2.5 s old, its scope ends 7 s after it
                assert a.term.failed_mono_s is not None
                a.store.keepalive_error = None
                before = a.store.keepalives
                await trio.sleep(1)
                assert a.store.keepalives > before
            a.leave.set()
        assert a.lost is None

    run(scene)


def test_a_lost_lease_ends_the_term_at_once() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            assert a.term is not None
            a.store.deaf = True
            a.store.keepalive_error = LeaseLost(a.term.lease)
        assert f"{a.term.lease:x}" in str(a.lost)
        assert a.stopped_s - a.won_s <= 2.5

    run(scene)


def test_a_deleted_election_key_ends_the_term_although_keepalives_succeed() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            await trio.sleep(30)
            deleted_s = trio.current_time()
            await MemoryStore(cluster).txn([], [DeleteOp(key=KEY)])
        assert a.stopped_s == pytest.approx(deleted_s)
        assert "gone" in str(a.lost)

    run(scene)


def test_a_standby_whose_watch_is_deaf_still_takes_over() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a, b = Candidate(cluster, "a"), Candidate(cluster, "b")
        b.store.deaf = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            nursery.start_soon(b.run)
            await trio.sleep(5)
            a.leave.set()
            with trio.fail_after(10.5):
                await b.won.wait()
            b.leave.set()

    run(scene)


def test_a_standby_waits_without_asking_again_and_again() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a, b = Candidate(cluster, "a"), Candidate(cluster, "b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            nursery.start_soon(b.run)
            await trio.sleep(100)
            cluster.compact(cluster.revision)
            await trio.sleep(100)
            assert b.store.stats().calls < 50
            a.leave.set()
            b.leave.set()
            await b.won.wait()

    run(scene)


@pytest.mark.parametrize("fate", ["landed", "late"])
def test_a_campaign_with_unknown_outcome_ends_with_one_leader(fate: str) -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        a.store.fate = fate
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await a.won.wait()
            assert a.term is not None
            if fate == "late":
                assert not (await a.store.land()).ok
            (held,) = cluster.find(KEY, prefix=False)
            assert held.create_revision == a.term.number
            a.leave.set()
        assert a.lost is None

    run(scene)


def test_a_late_election_write_finds_its_lease_revoked() -> None:
    class Landing(Client):
        async def revoke(self, lease: int) -> None:
            await super().revoke(lease)
            with pytest.raises(LeaseLost):
                await self.land()

    async def scene(cluster: MemoryCluster) -> None:
        store = Landing(cluster)
        store.fate = "late"
        async with leading(store) as term:
            assert [held.create_revision for held in cluster.find(KEY, prefix=False)] == [term.number]

    run(scene)


def test_an_election_write_landing_under_a_lease_nobody_keeps_lapses() -> None:
    class Landing(Client):
        async def revoke(self, lease: int) -> None:
            if self.late is None:
                return await super().revoke(lease)
            await self.land()
            self.late = None
            raise Unavailable("no answer")

    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        a.store = Landing(cluster)
        a.store.fate = "late"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await trio.sleep(1)
            assert cluster.find(KEY, prefix=False)
            assert not a.won.is_set()
            with trio.fail_after(10):
                await a.won.wait()
            a.leave.set()

    run(scene)


def test_a_refused_store_is_not_stormed_and_denial_is_told() -> None:
    class Denying(Client):
        async def grant(self, ttl_s: int) -> object:  # type: ignore[override]  # it never returns
            raise Denied("permission denied")

    async def scene(cluster: MemoryCluster) -> None:
        with pytest.raises(Denied):
            async with leading(Denying(cluster)):
                pytest.fail("leads")
        cluster.stop()
        store = Client(cluster)
        with trio.move_on_after(60):
            async with leading(store):
                pytest.fail("leads")
        assert store.stats().calls <= 130

    run(scene)


def test_it_does_not_stand_in_a_store_of_a_newer_format() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await trio.sleep(100)
            assert not a.won.is_set()
            assert cluster.find(KEY, prefix=False) == ()
            await write_meta(a.store, StoreMeta(incarnation="1"))
            await a.won.wait()
            a.leave.set()

    run(scene, meta=StoreMeta(incarnation="1", format=FORMAT + 1))


@pytest.mark.parametrize("value", [None, b"{", b'{"format": 1}'])
def test_it_does_not_stand_without_a_readable_incarnation(value: bytes | None) -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        await a.store.txn([], [DeleteOp(key=META) if value is None else PutOp(key=META, value=value)])
        with trio.move_on_after(60):
            await a.run()
        assert not a.won.is_set()

    run(scene)


def test_an_election_key_that_never_lapses_is_told_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(cluster: MemoryCluster) -> None:
        a = Candidate(cluster, "a")
        await a.store.txn([], [PutOp(key=KEY, value=b"me")])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run)
            await trio.sleep(60)
            assert not a.won.is_set()
            await a.store.txn([], [DeleteOp(key=KEY)])
            await a.won.wait()
            a.leave.set()

    run(scene)
    (told, *_) = [record for record in caplog.records if "by hand" in record.message]
    assert told.levelname == "WARNING"
    assert f"delete {KEY}" in str(told.__dict__["fields"])


def test_what_the_body_raises_passes_and_the_lease_is_revoked() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        with pytest.raises(KeyError, match="mine"):
            async with leading(MemoryStore(cluster)):
                raise KeyError("mine")
        assert cluster.find(KEY, prefix=False) == ()

    run(scene)


def test_cancellation_from_outside_revokes_the_lease() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        with trio.move_on_after(30):
            async with leading(MemoryStore(cluster)):
                await trio.sleep_forever()
        assert cluster.find(KEY, prefix=False) == ()

    run(scene)


def test_a_store_that_cannot_revoke_does_not_hold_up_leaving() -> None:
    class Stuck(Client):
        async def revoke(self, lease: int) -> None:
            await anyio.sleep_forever()

    async def scene(cluster: MemoryCluster) -> None:
        async with leading(Stuck(cluster)):
            left_s = trio.current_time()
        assert trio.current_time() - left_s <= 3

    run(scene)


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        ((10, 2.5, 2.9, 3), ["margin_s is 2.9", "= 3"]),
        ((10, 3.6, 3, 3), ["2 × keepalive_s is 7.2", "10 - 3 = 7"]),
        ((5, 2.5, 1, 3), ["margin_s is 1", "2 × keepalive_s is 5"]),
        ((10, 0, 3, 3), ["keepalive_s (0)"]),
    ],
)
def test_bad_durations_are_refused_with_their_values(durations: tuple[float, ...], said: list[str]) -> None:
    ttl_s, keepalive_s, margin_s, call_timeout_s = durations
    with pytest.raises(Invalid) as caught:
        check_durations(ttl_s=ttl_s, keepalive_s=keepalive_s, margin_s=margin_s, call_timeout_s=call_timeout_s)
    for text in said:
        assert text in str(caught.value)


def test_bad_durations_are_refused_before_anything_is_sent() -> None:
    async def scene(cluster: MemoryCluster) -> None:
        store = MemoryStore(cluster)
        with pytest.raises(Invalid):
            async with lead(store, leader("a"), ttl_s=10, keepalive_s=4, margin_s=3, call_timeout_s=3):
                pytest.fail("leads")
        assert store.stats().calls == 0

    run(scene)


def test_the_default_durations_are_good() -> None:
    check_durations(ttl_s=10, keepalive_s=2.5, margin_s=3, call_timeout_s=3)


def test_the_keys_are_those_of_the_tree() -> None:
    assert (KEY, META) == (keys.ROOT + "election/controller", keys.ROOT + "meta/store")
