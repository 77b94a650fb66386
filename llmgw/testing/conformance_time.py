"""The part of the store's contract that takes time: leases and watches. See `llmgw.testing.conformance`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from llmgw.errors import Compacted, LeaseLost
from llmgw.store.port import Batch, Compare, DeleteOp, Event, PutOp, Target
from llmgw.testing.conformance_rig import WAIT_S, Check, Rig, events_until, put


@asynccontextmanager
async def _watch(rig: Rig, *below: str, from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
    async with rig.other.watch([rig.root + part for part in below], from_revision=from_revision) as batches:
        yield batches


# --- leases ---------------------------------------------------------------------------------------------------------


async def a_short_lease_is_made_longer(rig: Rig) -> None:
    lease = await rig.store.grant(1)
    assert lease.ttl_s == 2
    assert (await rig.store.grant(7)).ttl_s == 7
    assert await rig.other.keepalive(lease.id) == 2


async def a_lease_takes_its_keys_with_it(rig: Rig) -> None:
    start = anyio.current_time()
    lease = await rig.store.grant(2)
    for name in ("b", "a", "c"):
        await put(rig.store, rig.root + name, lease=lease.id)
    kept = await put(rig.store, rig.root + "c")  # without a lease: it lets go of the one it had
    async with _watch(rig, "", from_revision=kept + 1) as batches:
        with anyio.fail_after(WAIT_S):
            batch = await anext(batches)
            while not batch.events:
                batch = await anext(batches)
    assert anyio.current_time() - start >= 2  # late, never early
    at = batch.revision
    assert at > kept
    assert batch.events == (
        Event(key=rig.root + "a", value=None, mod_revision=at),
        Event(key=rig.root + "b", value=None, mod_revision=at),
    )
    assert [item.key for item in (await rig.store.list([rig.root])).items] == [rig.root + "c"]
    with pytest.raises(LeaseLost) as lost:
        await rig.store.keepalive(lease.id)
    assert lost.value.lease == lease.id


async def a_renewed_lease_lives_on(rig: Rig) -> None:
    lease = await rig.store.grant(3)
    await put(rig.store, rig.root + "a", lease=lease.id)
    for _ in range(4):
        await anyio.sleep(1)
        assert await rig.store.keepalive(lease.id) == 3
    found = await rig.store.get(rig.root + "a")
    assert found is not None
    assert found.lease == lease.id


async def a_key_moves_to_the_lease_of_its_last_put(rig: Rig) -> None:
    first, second = await rig.store.grant(60), await rig.store.grant(60)
    await put(rig.store, rig.root + "a", lease=first.id)
    await put(rig.store, rig.root + "a", lease=second.id)
    await rig.store.revoke(first.id)
    assert await rig.store.get(rig.root + "a") is not None
    condition = Compare(key=rig.root + "a", target=Target.LEASE, number=second.id)
    assert (await rig.store.txn([condition], [DeleteOp(key=rig.root + "a")])).ok
    await put(rig.store, rig.root + "a")  # another key by the same name
    await rig.store.revoke(second.id)
    assert await rig.store.get(rig.root + "a") is not None


async def a_revoked_lease_is_gone(rig: Rig) -> None:
    lease = await rig.store.grant(60)
    await put(rig.store, rig.root + "a", lease=lease.id)
    before = await put(rig.store, rig.root + "b", lease=lease.id)
    await rig.store.revoke(lease.id)
    listing = await rig.store.list([rig.root])
    assert (listing.items, listing.revision) == ((), before + 1)
    await rig.store.revoke(lease.id)
    with pytest.raises(LeaseLost):
        await rig.store.keepalive(lease.id)
    leased = PutOp(key=rig.root + "d", value=b"", lease=lease.id)
    with pytest.raises(LeaseLost):
        await rig.store.txn([], [PutOp(key=rig.root + "c", value=b""), leased])
    assert (await rig.store.list([rig.root])).items == ()
    # Only the branch that runs needs its leases.
    assert (await rig.store.txn([], [], [leased])).ok


# --- watching -------------------------------------------------------------------------------------------------------


async def a_watch_tells_everything_once_and_in_order(rig: Rig) -> None:
    start = await put(rig.store, rig.root + "a", b"0")
    async with _watch(rig, "", from_revision=start) as batches:
        last = max([await put(rig.store, rig.root + "a", b"%d" % n) for n in range(1, 20)])
        seen = await events_until(batches, last)
    assert [event.value for event in seen] == [b"%d" % n for n in range(20)]
    assert [event.version for event in seen] == list(range(1, 21))
    assert {event.create_revision for event in seen} == {start}
    async with _watch(rig, "", from_revision=seen[11].mod_revision + 1) as batches:
        assert await events_until(batches, last) == seen[12:]


async def a_watch_hears_only_its_prefixes(rig: Rig) -> None:
    start = await put(rig.store, rig.root + "start")
    names = ("gpu-1", "gpu-1/x", "gpu-10", "gpu-10/x", "ending", "other/x", "end")
    async with _watch(rig, "gpu-1/", "other/", "end", from_revision=start) as batches:
        for name in names:
            await put(rig.store, rig.root + name)
        last = (await rig.store.list([rig.root])).revision
        events: list[Event] = []
        with anyio.fail_after(WAIT_S):
            while len(events) < 3:  # order holds within a prefix only
                events.extend((await anext(batches)).events)
    assert sorted(event.key.removeprefix(rig.root) for event in events) == ["end", "gpu-1/x", "other/x"]
    assert all(event.mod_revision <= last for event in events)


async def a_revision_comes_whole_and_in_order_of_its_operations(rig: Rig) -> None:
    start = await put(rig.store, rig.root + "d/2")
    await put(rig.store, rig.root + "d/1")
    async with _watch(rig, "", from_revision=start + 2) as batches:
        result = await rig.store.txn(
            [],
            [
                PutOp(key=rig.root + "z", value=b"z"),
                DeleteOp(key=rig.root + "d/", prefix=True),
                DeleteOp(key=rig.root + "none"),
                PutOp(key=rig.root + "a", value=b"a"),
            ],
        )
        with anyio.fail_after(WAIT_S):
            batch = await anext(batches)
            while not batch.events:
                batch = await anext(batches)
    at = result.revision
    assert batch.revision == at
    assert [(event.key.removeprefix(rig.root), event.value) for event in batch.events] == [
        ("z", b"z"),
        ("d/1", None),
        ("d/2", None),
        ("a", b"a"),
    ]
    assert batch.events[1] == Event(key=rig.root + "d/1", value=None, mod_revision=at)


async def an_idle_watch_says_how_far_it_is(rig: Rig) -> None:
    start = await put(rig.store, rig.root + "a")
    async with _watch(rig, "quiet/", from_revision=start) as batches:
        last = await put(rig.store, rig.root + "b")
        with anyio.fail_after(WAIT_S):
            batch = await anext(batches)
            while batch.revision < last:
                assert batch.events == ()
                batch = await anext(batches)
        assert batch.events == ()
        event = await put(rig.store, rig.root + "quiet/a")
        assert [event.key for event in await events_until(batches, event)] == [rig.root + "quiet/a"]


async def a_watch_below_compacted_history_says_so(rig: Rig) -> None:
    first = await put(rig.store, rig.root + "a", b"1")
    await put(rig.store, rig.root + "a", b"2")
    third = await put(rig.store, rig.root + "a", b"3")
    last = await put(rig.store, rig.root + "a", b"4")
    async with _watch(rig, "", from_revision=last + 1) as idle:
        await rig.compact(third)
        async with _watch(rig, "", from_revision=first) as batches:
            with pytest.raises(Compacted) as told:
                await events_until(batches, last)
        assert told.value.revision == third
        async with _watch(rig, "", from_revision=third) as batches:
            assert [event.value for event in await events_until(batches, last)] == [b"3", b"4"]
        # One that was up to date notices nothing.
        after = await put(rig.store, rig.root + "a", b"5")
        assert [event.value for event in await events_until(idle, after)] == [b"5"]


async def an_idle_watch_does_not_fall_behind_a_compaction(rig: Rig) -> None:
    start = await put(rig.store, rig.root + "quiet/a")
    async with _watch(rig, "quiet/", from_revision=start) as batches:
        await events_until(batches, start)
        last = max([await put(rig.store, rig.root + "b") for _ in range(3)])
        await rig.compact(last)
        event = await put(rig.store, rig.root + "quiet/b")
        assert [event.key for event in await events_until(batches, event)] == [rig.root + "quiet/b"]


CHECKS: tuple[Check, ...] = (
    a_short_lease_is_made_longer,
    a_lease_takes_its_keys_with_it,
    a_renewed_lease_lives_on,
    a_key_moves_to_the_lease_of_its_last_put,
    a_revoked_lease_is_gone,
    a_watch_tells_everything_once_and_in_order,
    a_watch_hears_only_its_prefixes,
    a_revision_comes_whole_and_in_order_of_its_operations,
    an_idle_watch_says_how_far_it_is,
    a_watch_below_compacted_history_says_so,
    an_idle_watch_does_not_fall_behind_a_compaction,
)
