"""The faults do what they say: a simulation is only worth something if what strikes it is real."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from llmgw.errors import Compacted, NotApplied, OutcomeUnknown, StoreError, Unavailable
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Batch, Event, GetOp, PutOp
from llmgw.testing.conformance import CHECKS, Check, Rig, events_until, put
from llmgw.testing.faults import CALL_TIMEOUT_S, Fate, FaultyStore, Link, TxnFault, once
from llmgw.testing.virtual import run_virtual


def play(scenario: Callable[[FaultyStore, MemoryStore], Awaitable[None]]) -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster())
        async with anyio.create_task_group() as tasks:
            await scenario(FaultyStore(store, tasks), store)

    run_virtual(main)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_faults_it_is_a_store(check: Check) -> None:
    async def main() -> None:
        cluster = MemoryCluster()

        async def compact(revision: int) -> None:
            cluster.compact(revision)

        async with anyio.create_task_group() as tasks:
            here = FaultyStore(MemoryStore(cluster), tasks, latency=lambda: 0.001)
            there = FaultyStore(MemoryStore(cluster), tasks)
            await check(Rig(store=here, other=there, root="/t/", compact=compact))

    run_virtual(main)


@pytest.mark.parametrize(
    ("fate", "error", "at_once", "later"),
    [
        (Fate.REFUSED, NotApplied, False, False),
        (Fate.LOST, OutcomeUnknown, False, False),
        (Fate.ANSWER_LOST, OutcomeUnknown, True, True),
        (Fate.LATE, OutcomeUnknown, False, True),
    ],
)
def test_the_fates_of_a_transaction(fate: Fate, error: type[StoreError], *, at_once: bool, later: bool) -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        faulty.judges.append(once(TxnFault(fate=fate, delay_s=10), where=lambda ops: ops[0].key == "/struck"))
        await put(faulty, "/spared")
        with pytest.raises(error):
            await put(faulty, "/struck")
        assert (await store.get("/struck") is not None) is at_once
        await anyio.sleep(10)
        assert (await store.get("/struck") is not None) is later
        await put(faulty, "/struck")  # only once

    play(scenario)


def test_a_late_transaction_that_finds_no_store_is_lost_quietly() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        faulty.judges.append(once(TxnFault(fate=Fate.LATE)))
        with pytest.raises(OutcomeUnknown):
            await put(faulty, "/a")
        store.cluster.stop()
        await anyio.sleep(60)
        store.cluster.start()
        assert await store.get("/a") is None

    play(scenario)


@pytest.mark.parametrize(
    ("link", "write_error", "took_s"), [(Link.REFUSED, NotApplied, 0.0), (Link.SILENT, OutcomeUnknown, CALL_TIMEOUT_S)]
)
def test_a_link_that_is_down(link: Link, write_error: type[StoreError], took_s: float) -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        lease = await faulty.grant(60)
        faulty.link = link
        assert faulty.link is link
        calls: list[tuple[Callable[[], Awaitable[object]], type[StoreError]]] = [
            (lambda: put(faulty, "/a"), write_error),
            (lambda: faulty.grant(5), write_error),
            (lambda: faulty.get("/a"), Unavailable),
            (lambda: faulty.list(["/"]), Unavailable),
            (lambda: faulty.txn([], [GetOp(key="/a")]), Unavailable),
            (lambda: faulty.keepalive(lease.id), Unavailable),
            (lambda: faulty.revoke(lease.id), Unavailable),
        ]
        for call, error in calls:
            start = anyio.current_time()
            with pytest.raises(error):
                await call()
            assert anyio.current_time() - start == pytest.approx(took_s)
        assert store.cluster.revision == 1
        faulty.heal()
        assert await faulty.keepalive(lease.id) == 60

    play(scenario)


def test_an_answer_is_lost_when_the_link_goes_down_under_way() -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster())
        async with anyio.create_task_group() as tasks:
            faulty = FaultyStore(store, tasks, latency=lambda: 1.0)

            async def cut() -> None:
                await anyio.sleep(1.5)
                faulty.link = Link.REFUSED

            tasks.start_soon(cut)
            with pytest.raises(OutcomeUnknown):
                await put(faulty, "/a")
        assert await store.get("/a") is not None

    run_virtual(main)


def test_keepalives_alone_may_fail() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        lease = await faulty.grant(60)
        faulty.keepalives_fail = True
        with pytest.raises(Unavailable):
            await faulty.keepalive(lease.id)
        await put(faulty, "/a", lease=lease.id)
        faulty.heal()
        assert await faulty.keepalive(lease.id) == 60

    play(scenario)


def test_a_lagging_watch_is_late_and_in_order() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        faulty.watch_lag_s = 7.5
        async with faulty.watch(["/"], from_revision=2) as batches:
            await put(store, "/a")
            await anyio.sleep(1)
            faulty.watch_lag_s = 0
            await put(store, "/b")
            assert [event.key for event in await events_until(batches, 3)] == ["/a", "/b"]
        assert anyio.current_time() == pytest.approx(7.5)

    play(scenario)


def test_a_watch_may_lose_and_repeat() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        async with faulty.watch(["/"], from_revision=2) as batches:
            faulty.watches_lose = True
            await put(store, "/lost")
            await anyio.sleep(1)
            faulty.heal()
            faulty.watches_repeat = True
            await put(store, "/twice")
            keys = [event.key for _ in range(2) for event in (await anext(batches)).events]
        assert keys == ["/twice", "/twice"]

    play(scenario)


def test_a_cut_watch_resumes_after_what_it_told_even_if_more_was_under_way() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        async with faulty.watch(["/"], from_revision=2) as batches:
            await put(store, "/told")
            assert (await anext(batches)).revision == 2
            faulty.watch_lag_s = 100
            await put(store, "/under-way")
            await anyio.sleep(1)
            faulty.link = Link.SILENT
            await put(store, "/unheard")
            with anyio.move_on_after(500) as silent:
                await anext(batches)
            assert silent.cancelled_caught
            faulty.heal()
            seen: list[Event] = await events_until(batches, 4)
        assert [event.key for event in seen] == ["/under-way", "/unheard"]

    play(scenario)


def test_a_watch_can_be_broken() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        async with faulty.watch(["/"], from_revision=2) as batches:
            faulty.break_watches(Compacted(5))
            with pytest.raises(Compacted):
                await anext(batches)
        async with faulty.watch(["/"], from_revision=2) as batches:
            await put(store, "/a")
            async for batch in batches:
                assert batch == Batch(revision=2, events=batch.events)
                break

    play(scenario)


def test_what_it_tells_of_itself_is_the_store_s() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        await faulty.txn([], [PutOp(key="/a", value=b"")])
        assert faulty.stats() == store.stats()

    play(scenario)


def test_a_frozen_client_goes_on_where_it_was_and_still_sends_what_it_was_about_to() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        landed: list[str] = []

        async def write(key: str) -> None:
            await put(faulty, key)
            landed.append(key)

        async with anyio.create_task_group() as tasks:
            faulty.link = Link.FROZEN
            tasks.start_soon(write, "/waits")
            with anyio.move_on_after(5):
                await write("/given-up")
            await anyio.sleep(2 * CALL_TIMEOUT_S)
            assert (await store.get("/waits"), await store.get("/given-up"), landed) == (None, None, [])
            faulty.link = Link.UP
        assert landed == ["/waits"], "its own time stood still: nothing timed out"
        await anyio.sleep(1)
        assert await store.get("/waits") is not None
        assert await store.get("/given-up") is not None, "it was on its way, and nobody can call it back"

    play(scenario)


def test_a_frozen_client_hears_of_what_happened_when_it_goes_on() -> None:
    async def scenario(faulty: FaultyStore, store: MemoryStore) -> None:
        async with faulty.watch(["/a/"], from_revision=2) as batches:
            faulty.link = Link.FROZEN
            await put(store, "/a/1")
            with anyio.move_on_after(30) as waiting:
                await anext(batches)
            assert waiting.cancelled_caught
            faulty.link = Link.UP
            batch = await anext(batches)
            assert [event.key for event in batch.events] == ["/a/1"]

    play(scenario)
