"""What happens to a `MemoryCluster` as a whole, and exactly when: virtual time makes lateness exact."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from llmgw.errors import Compacted, LeaseLost, NotApplied, Unavailable, WentBack
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Batch, DeleteOp, PutOp
from llmgw.testing.conformance import events_until, put
from llmgw.testing.virtual import run_virtual

Scenario = Callable[[MemoryCluster, MemoryStore], Awaitable[None]]


def play(scenario: Scenario) -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        await scenario(cluster, MemoryStore(cluster))

    run_virtual(main)


def test_a_lease_lapses_on_the_next_tick_of_half_a_second() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        await anyio.sleep(0.2)
        lease = await store.grant(3)
        await put(store, "/a", lease=lease.id)
        async with store.watch(["/a"], from_revision=3) as batches:
            lapsed = (await events_until(batches, 3))[0]
        assert lapsed.value is None
        assert anyio.current_time() == pytest.approx(3.5)

    play(scenario)


def test_between_dead_line_and_lapse_a_lease_is_lost_but_its_key_still_there() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        await anyio.sleep(0.2)
        lease = await store.grant(3)
        await put(store, "/a", lease=lease.id)
        await anyio.sleep(3.1)
        with pytest.raises(LeaseLost):
            await store.keepalive(lease.id)
        assert await store.get("/a") is not None
        await anyio.sleep(0.2)
        assert await store.get("/a") is None

    play(scenario)


def test_leases_lapse_in_the_order_of_their_time_one_revision_each() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        late, soon, bare = await store.grant(9), await store.grant(3), await store.grant(3)
        await put(store, "/late", lease=late.id)
        await put(store, "/soon", lease=soon.id)
        await anyio.sleep(60)  # nobody looks, and it makes no difference
        async with store.watch(["/late", "/soon"], from_revision=4) as batches:
            gone = await events_until(batches, 5)
        assert [(event.key, event.mod_revision) for event in gone] == [("/soon", 4), ("/late", 5)]
        assert cluster.revision == 5  # a lease without keys spends no revision
        with pytest.raises(LeaseLost):
            await store.keepalive(bare.id)

    play(scenario)


def test_a_watch_that_waits_learns_of_a_new_lease_that_lapses_first() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        long = await store.grant(100)
        await put(store, "/long", lease=long.id)
        patient = MemoryStore(cluster, progress_s=1000)
        async with anyio.create_task_group() as tasks, patient.watch(["/a"], from_revision=2) as batches:

            async def later() -> None:
                await anyio.sleep(1)
                lease = await store.grant(2)
                await put(store, "/a", lease=lease.id)

            tasks.start_soon(later)
            assert [event.value for event in await events_until(batches, 4)] == [b"v", None]
        assert anyio.current_time() == pytest.approx(3)

    play(scenario)


def test_without_members_calls_fail_and_leases_live() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        lease = await store.grant(10)
        await put(store, "/a", lease=lease.id)
        await anyio.sleep(8)
        cluster.stop()
        with pytest.raises(NotApplied):
            await put(store, "/b")
        with pytest.raises(NotApplied):
            await store.grant(10)
        reads: list[Callable[[], Awaitable[object]]] = [
            lambda: store.get("/a"),
            lambda: store.list(["/"]),
            lambda: store.txn([], []),
            lambda: store.keepalive(lease.id),
            lambda: store.revoke(lease.id),
        ]
        for read in reads:
            with pytest.raises(Unavailable) as told:
                await read()
            assert not isinstance(told.value, NotApplied)
        await anyio.sleep(60)
        cluster.start()
        await anyio.sleep(9.5)
        assert await store.get("/a") is not None  # the full TTL from the start on
        await anyio.sleep(0.5)
        assert await store.get("/a") is None

    play(scenario)


def test_a_watch_falls_silent_with_the_members_and_goes_on_with_them() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        lease = await store.grant(60)
        heard: list[tuple[float, Batch]] = []
        async with anyio.create_task_group() as tasks, store.watch(["/a"], from_revision=2) as batches:

            async def listen() -> None:
                while True:
                    batch = await anext(batches)
                    heard.append((anyio.current_time(), batch))

            tasks.start_soon(listen)
            await anyio.sleep(3)
            cluster.stop()
            await anyio.sleep(30)
            assert [at for at, _ in heard] == pytest.approx([2])
            assert store.stats().watch_progress_age_s == pytest.approx(31)
            cluster.start()
            await put(store, "/a", lease=lease.id)
            await anyio.sleep(1)
            assert [batch.revision for _, batch in heard] == [1, 1, 2]
            assert heard[-1][1].events[0].key == "/a"
            tasks.cancel_scope.cancel()

    play(scenario)


def test_a_new_leader_of_etcd_gives_every_lease_its_full_time_again() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        lease, lapsed = await store.grant(10), await store.grant(2)
        await put(store, "/a", lease=lease.id)
        await put(store, "/b", lease=lapsed.id)
        await anyio.sleep(9)
        cluster.elect()
        await anyio.sleep(9)
        assert [item.key for item in (await store.list(["/"])).items] == ["/a"]
        await anyio.sleep(1)
        assert (await store.list(["/"])).items == ()

    play(scenario)


def test_compaction_is_refused_below_the_last_one_and_in_the_future() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        for _ in range(4):
            await put(store, "/a")
        cluster.compact(3)
        with pytest.raises(Compacted) as told:
            cluster.compact(3)
        assert told.value.revision == 3
        with pytest.raises(ValueError, match="future"):
            cluster.compact(6)
        cluster.compact(5)
        async with store.watch(["/a"], from_revision=5) as batches:
            assert [event.mod_revision for event in await events_until(batches, 5)] == [5]

    play(scenario)


def test_a_restore_takes_revisions_back_and_brings_back_keys_and_leases() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        lease = await store.grant(10)
        await put(store, "/a", b"old", lease=lease.id)
        backup = cluster.snapshot()
        await put(store, "/a", b"new")
        await store.txn([], [DeleteOp(key="/a"), PutOp(key="/b", value=b"")])
        later = await store.grant(10)
        for _ in range(2):  # one backup serves more than once
            await anyio.sleep(60)
            async with (
                store.watch(["/"], from_revision=5) as far,
                store.watch(["/"], from_revision=2) as near,
            ):
                cluster.restore(backup)
                with pytest.raises(WentBack) as told:
                    await anext(far)
                assert (told.value.seen, told.value.got) == (4, 2)
                assert [event.value for event in await events_until(near, 2)] == [b"old"]
            listing = await store.list(["/"])
            assert [(item.key, item.value, item.lease) for item in listing.items] == [("/a", b"old", lease.id)]
            assert listing.revision == 2
            assert await store.keepalive(lease.id) == 10
            with pytest.raises(LeaseLost):
                await store.keepalive(later.id)
            assert (await store.grant(5)).id > later.id  # ids are never given twice
            await store.txn([], [PutOp(key="/a", value=b"other"), PutOp(key="/c", value=b"")])
            await put(store, "/d")

    play(scenario)


def test_a_restore_to_a_later_revision_is_told_by_the_raft_term_alone() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        await put(store, "/old")
        for _ in range(5):
            await put(store, "/a")
        backup = cluster.snapshot()
        cluster.restore(None)
        async with store.watch(["/"], from_revision=2) as unaware:
            await put(store, "/b")
            assert [event.key for event in await events_until(unaware, 2)] == ["/b"]
            cluster.restore(backup)  # the same term as before: nothing shows it
            assert [event.key for event in await events_until(unaware, 7)] == ["/a"] * 5
        cluster.elect()
        async with store.watch(["/"], from_revision=2) as aware:
            await events_until(aware, 7)
            cluster.restore(backup)
            with pytest.raises(WentBack) as told:
                await anext(aware)
        assert (told.value.what, told.value.seen, told.value.got) == ("raft term", 3, 2)

    play(scenario)


def test_a_restore_while_stopped_waits_for_the_start() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        lease = await store.grant(10)
        await put(store, "/a", lease=lease.id)
        backup = cluster.snapshot()
        await put(store, "/b")
        cluster.stop()
        await anyio.sleep(60)
        async with store.watch(["/"], from_revision=4) as batches:
            cluster.restore(backup)
            with anyio.move_on_after(60) as silent:
                await anext(batches)
            assert silent.cancelled_caught
            cluster.start()
            with pytest.raises(WentBack):
                await anext(batches)
        assert [item.key for item in (await store.list(["/"])).items] == ["/a"]

    play(scenario)


def test_a_watch_of_what_a_wiped_store_has_not_reached_says_so() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        await put(store, "/a")
        cluster.restore(None)
        assert (await store.list(["/"])).items == ()
        async with store.watch(["/"], from_revision=2) as batches:
            with anyio.move_on_after(1):
                await anext(batches)
        async with store.watch(["/"], from_revision=3) as batches:
            with pytest.raises(WentBack):
                await anext(batches)

    play(scenario)


def test_stats_count_calls_errors_and_the_silence_of_the_oldest_watch() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        assert store.stats().watch_progress_age_s is None
        await put(store, "/a")
        with pytest.raises(LeaseLost):
            await store.keepalive(1)
        async with store.watch(["/"], from_revision=1) as first:
            await anext(first)
            await anyio.sleep(2)
            async with store.watch(["/"], from_revision=1) as second:
                await anext(second)
                await anyio.sleep(1)
                stats = store.stats()
        assert (stats.endpoint, stats.calls, stats.errors) == ("memory", 2, 1)
        assert stats.watch_progress_age_s == pytest.approx(3)

    play(scenario)


def test_a_cancelled_call_has_done_nothing() -> None:
    async def scenario(cluster: MemoryCluster, store: MemoryStore) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await put(store, "/a")
        assert cluster.revision == 1

    play(scenario)
