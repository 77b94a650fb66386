"""`follow`: whatever happens to the store or to the watch, the reader ends up with what is there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from llmgw.errors import Compacted, Denied, WentBack
from llmgw.store.follow import BUFFER_BATCHES, SETTLE_S, Following, follow
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Batch, DeleteOp, Listing, PutOp, Reset
from llmgw.testing.conformance import put
from llmgw.testing.faults import FaultyStore, Link
from llmgw.testing.virtual import run_virtual

RELIST_S = 400.0


class Reader:
    """Folds what `follow` says, as every user of it must."""

    def __init__(self, following: Following) -> None:
        self.following = following
        self.known: dict[str, bytes] = {}
        self.causes: list[str] = []
        self.awake = anyio.Event()
        self.awake.set()

    async def run(self) -> None:
        async for word in self.following:
            await self.awake.wait()
            if isinstance(word, Reset):
                self.causes.append(word.cause)
                self.known = {item.key: item.value for item in word.items}
                continue
            for event in word.events:
                if event.value is None:
                    self.known.pop(event.key, None)
                else:
                    self.known[event.key] = event.value


class Rig:
    def __init__(self, cluster: MemoryCluster, faulty: FaultyStore, reader: Reader) -> None:
        self.cluster, self.faulty, self.reader = cluster, faulty, reader
        self.store = MemoryStore(cluster)

    async def behind(self) -> bool:
        listing = await self.store.list(["/a/"])
        return self.reader.known != {item.key: item.value for item in listing.items}

    async def caught_up(self, within_s: float = 20.0) -> None:
        with anyio.fail_after(within_s):
            while await self.behind():  # noqa: ASYNC110  # two sides are compared, neither could set an event
                await anyio.sleep(0.1)  # two stores are compared; neither could set an event


def play(scenario: Callable[[Rig], Awaitable[None]], prefixes: Sequence[str] = ("/a/",)) -> None:
    @asynccontextmanager
    async def rig() -> AsyncIterator[Rig]:
        cluster = MemoryCluster()
        async with anyio.create_task_group() as tasks:
            faulty = FaultyStore(MemoryStore(cluster), tasks)
            async with follow(faulty, prefixes, jitter=lambda: 0.5, relist_s=RELIST_S) as following:
                reader = Reader(following)
                tasks.start_soon(reader.run)
                yield Rig(cluster, faulty, reader)
                tasks.cancel_scope.cancel()

    async def main() -> None:
        async with rig() as made:
            await scenario(made)

    run_virtual(main)


def test_everything_first_and_then_every_change() -> None:
    async def scenario(rig: Rig) -> None:
        await put(rig.store, "/a/1", b"x")
        await put(rig.store, "/b/1", b"x")
        await rig.caught_up()
        await rig.store.txn([], [PutOp(key="/a/2", value=b"y"), DeleteOp(key="/a/1")])
        await rig.caught_up()
        assert rig.reader.known == {"/a/2": b"y"}
        assert rig.reader.causes == ["start"]
        await anyio.sleep(20 * RELIST_S)
        assert rig.reader.causes == ["start"]  # a listing that finds nothing says nothing
        assert rig.reader.following.age_s is not None
        assert rig.reader.following.age_s <= 2

    play(scenario)


def test_a02_a_compacted_watch_lists_afresh_and_counts_it() -> None:
    async def scenario(rig: Rig) -> None:
        await put(rig.store, "/a/r1")
        await rig.caught_up()
        rig.faulty.link = Link.REFUSED
        await rig.store.txn([], [DeleteOp(key="/a/r1")])
        last = await put(rig.store, "/a/r2")
        rig.cluster.compact(last)
        await put(rig.store, "/a/r3")
        await anyio.sleep(5)
        assert list(rig.reader.known) == ["/a/r1"]
        rig.faulty.heal()
        await rig.caught_up()
        assert sorted(rig.reader.known) == ["/a/r2", "/a/r3"]
        assert rig.reader.following.resets == {"start": 1, "compacted": 1}
        await put(rig.store, "/a/r4")  # and it watches from just there
        await rig.caught_up()
        assert rig.reader.causes == ["start", "compacted"]

    play(scenario)


def test_a_short_cut_is_resumed_without_a_listing() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.caught_up()
        rig.faulty.watch_lag_s = 2
        await put(rig.store, "/a/on-its-way")
        rig.faulty.link = Link.REFUSED
        await put(rig.store, "/a/during")
        await anyio.sleep(1)
        rig.faulty.heal()
        await rig.caught_up()
        assert rig.reader.causes == ["start"]

    play(scenario)


def test_a_restored_store_is_listed_afresh() -> None:
    async def scenario(rig: Rig) -> None:
        await put(rig.store, "/a/old")
        backup = rig.cluster.snapshot()
        await put(rig.store, "/a/new")
        await rig.caught_up()
        rig.cluster.restore(backup)
        await rig.caught_up()
        assert list(rig.reader.known) == ["/a/old"]
        assert rig.reader.causes == ["start", "went_back"]
        rig.cluster.restore(None)
        await rig.caught_up()
        assert rig.reader.known == {}

    play(scenario)


class Deaf(MemoryStore):
    """Its watches never say anything; its answers to listings take `slow_s`."""

    slow_s = 0.0

    async def list(self, prefixes: Sequence[str]) -> Listing:
        listing = await super().list(prefixes)
        await anyio.sleep(self.slow_s)
        return listing

    @asynccontextmanager
    async def watch(self, prefixes: Sequence[str], *, from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
        send, receive = anyio.create_memory_object_stream[Batch]()
        with send, receive:
            yield receive


def test_a_restore_that_no_watch_noticed_is_found_by_the_periodic_listing() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = Deaf(cluster)
        backup = cluster.snapshot()
        await put(store, "/a/1")
        async with follow(store, ["/a/"], jitter=lambda: 0.5, relist_s=RELIST_S) as following:
            assert isinstance(await anext(following), Reset)
            cluster.restore(backup)
            assert await anext(following) == Reset(items=(), revision=1, cause="went_back")

    run_virtual(main)


def test_a_periodic_listing_is_given_up_when_the_store_is_away_or_a_fresh_one_comes_in_between() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = Deaf(cluster)
        async with follow(store, ["/a/"], jitter=lambda: 0.5, relist_s=RELIST_S) as following:
            assert isinstance(await anext(following), Reset)
            await anyio.sleep(RELIST_S - 10)
            cluster.stop()
            await anyio.sleep(20)  # a check fails: no word, and no listing
            cluster.start()
            store.slow_s = 5
            await anyio.sleep(RELIST_S - 9)  # the second one is under way
            await put(store, "/a/1")
            following.start_over("compacted")
            assert (await anext(following)).revision == 2
            cluster.stop()
            following.start_over("compacted")
            await anyio.sleep(RELIST_S)  # the third comes while nothing is watched
            cluster.start()
            assert isinstance(await anext(following), Reset)
            assert following.resets == {"start": 1, "compacted": 2}
            await anyio.sleep(3 * RELIST_S)
            assert following.resets == {"start": 1, "compacted": 2}

    run_virtual(main)


@pytest.mark.parametrize("lost", ["put", "change", "delete"])
def test_what_the_watch_lost_is_found_by_the_periodic_listing(lost: str) -> None:
    async def scenario(rig: Rig) -> None:
        await put(rig.store, "/a/1")
        await rig.caught_up()
        rig.faulty.watches_lose = True
        match lost:
            case "put":
                await put(rig.store, "/a/2")
            case "change":
                await put(rig.store, "/a/1", b"other")
            case _:
                await rig.store.txn([], [DeleteOp(key="/a/1")])
        await anyio.sleep(1)
        rig.faulty.watches_lose = False
        await rig.caught_up(within_s=1.5 * RELIST_S)
        assert rig.reader.causes == ["start", "relist"]

    play(scenario)


def test_a_watch_that_is_merely_behind_is_left_alone_by_the_periodic_listing() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.caught_up()
        rig.faulty.watch_lag_s = SETTLE_S / 2
        for n in range(round(3 * RELIST_S)):  # a change a second, so that some are always on their way
            await rig.store.txn([], [PutOp(key=f"/a/{n % 7}", value=b"%d" % n), DeleteOp(key=f"/a/{(n + 3) % 7}")])
            await anyio.sleep(1)
        await rig.caught_up()
        assert rig.reader.causes == ["start"]

    play(scenario)


def test_an_event_that_overtakes_the_periodic_listing_is_no_difference() -> None:
    async def scenario(rig: Rig) -> None:
        await put(rig.store, "/a/1")
        await rig.caught_up()
        slow = rig.faulty.list

        async def slow_list(prefixes: Sequence[str]) -> Listing:
            listing = await slow(prefixes)
            await put(rig.store, "/a/2")
            await rig.store.txn([], [DeleteOp(key="/a/1")])
            await anyio.sleep(3)  # the watch has told of both by the time the answer is here
            return listing

        rig.faulty.list = slow_list  # type: ignore[method-assign]  # one slow listing
        await anyio.sleep(1.5 * RELIST_S)
        await rig.caught_up()
        assert rig.reader.causes == ["start"]

    play(scenario)


def test_a_slow_reader_gets_one_fresh_listing_however_long_it_stalls() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.caught_up()
        rig.reader.awake = anyio.Event()
        for n in range(5 * BUFFER_BATCHES):
            await put(rig.store, f"/a/{n}")
            await anyio.sleep(0.1)
        await anyio.sleep(300)
        rig.reader.awake.set()
        await rig.caught_up()
        assert len(rig.reader.known) == 5 * BUFFER_BATCHES
        assert rig.reader.causes == ["start", "overflow"]
        assert rig.reader.following.resets == {"start": 1, "overflow": 1}

    play(scenario)


def test_a_reader_that_stalls_while_nothing_happens_misses_nothing() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.caught_up()
        rig.reader.awake = anyio.Event()
        await anyio.sleep(10 * BUFFER_BATCHES)  # word of progress alone fills the buffer
        rig.reader.awake.set()
        await put(rig.store, "/a/1")
        await rig.caught_up()
        assert rig.reader.causes == ["start"]

    play(scenario)


def test_batches_that_come_twice_change_nothing() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.caught_up()
        rig.faulty.watches_repeat = True
        for n in range(10):
            await rig.store.txn([], [PutOp(key="/a/1", value=b"%d" % n), DeleteOp(key="/a/2")])
            await put(rig.store, "/a/2")
        await rig.caught_up()
        assert rig.reader.causes == ["start"]

    play(scenario)


def test_an_absent_store_is_waited_for_and_the_age_says_so() -> None:
    async def scenario(rig: Rig) -> None:
        await put(rig.store, "/a/1")
        await rig.caught_up()
        rig.cluster.stop()
        rig.faulty.break_watches(Compacted(2))
        await anyio.sleep(100)
        age_s = rig.reader.following.age_s
        assert age_s is not None
        assert 98 <= age_s <= 103
        assert list(rig.reader.known) == ["/a/1"]
        rig.cluster.start()
        await anyio.sleep(10)
        await put(rig.store, "/a/2")
        await rig.caught_up()
        assert rig.reader.causes == ["start", "compacted"]

    play(scenario)


def test_before_the_first_word_there_is_no_age() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        cluster.stop()
        async with follow(MemoryStore(cluster), ["/a/"], jitter=lambda: 0.5) as following:
            await anyio.sleep(30)
            assert following.age_s is None
            cluster.start()
            assert isinstance(await anext(following), Reset)
            assert following.age_s == pytest.approx(0)

    run_virtual(main)


def test_iteration_can_be_cancelled_and_taken_up_again() -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster(), progress_s=1000)
        seen: list[int] = []
        async with follow(store, ["/a/"], jitter=lambda: 0.5) as following:
            for n in range(100):
                if n % 3 == 0:
                    await put(store, f"/a/{n}")
                with anyio.move_on_after(0.01):
                    word = await anext(following)
                    seen.extend(event.mod_revision for event in word.events) if isinstance(word, Batch) else None
        assert seen == list(range(3, 3 + len(seen)))
        assert len(seen) >= 32

    run_virtual(main)


class Denying(MemoryStore):
    denied = False

    async def list(self, prefixes: Sequence[str]) -> Listing:
        if self.denied:
            raise Denied("no")
        return await super().list(prefixes)


def test_a_denial_reaches_the_reader_after_what_was_there_before_it() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = Denying(cluster)
        await put(store, "/a/1")
        backup = cluster.snapshot()
        await put(store, "/a/2")
        async with follow(store, ["/a/"], jitter=lambda: 0.5) as following:
            assert isinstance(await anext(following), Reset)
            store.denied = True
            cluster.restore(backup)
            for _ in range(2):
                with pytest.raises(Denied):
                    await anext(following)

    run_virtual(main)


def test_a_denial_of_the_periodic_listing_ends_it_too() -> None:
    async def main() -> None:
        store = Denying(MemoryCluster(), progress_s=10_000)
        async with follow(store, ["/a/"], jitter=lambda: 0.5) as following:
            assert isinstance(await anext(following), Reset)
            store.denied = True
            with pytest.raises(Denied):
                await anext(following)

    run_virtual(main)


def test_a_denial_in_the_moment_of_a_cancellation_is_no_error() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            cluster, scope = MemoryCluster(), anyio.CancelScope()

            class Denying(FaultyStore):
                async def list(self, prefixes: Sequence[str]) -> Listing:
                    scope.cancel()
                    raise Denied("permission denied")

            store = Denying(MemoryStore(cluster), tasks)
            with scope:
                async with follow(store, ["/a/"], jitter=lambda: 0.5) as following:
                    await anext(following)
            assert scope.cancelled_caught

    run_virtual(main)


def test_an_error_of_the_body_passes_as_it_is() -> None:
    async def main() -> None:
        with pytest.raises(WentBack):
            async with follow(MemoryStore(MemoryCluster()), ["/a/"], jitter=lambda: 0.5):
                raise WentBack(seen=2, got=1)

    run_virtual(main)


def test_asked_to_start_over_it_lists_afresh_once() -> None:
    async def scenario(rig: Rig) -> None:
        rig.reader.following.start_over("went_back")  # before the first listing: nothing to do over
        await put(rig.store, "/a/1")
        await rig.caught_up()
        rig.reader.following.start_over("went_back")
        rig.reader.following.start_over("went_back")
        await anyio.sleep(5)
        assert rig.reader.causes == ["start", "went_back"]

    play(scenario)
