"""What every store must do: the port's contract as checks, run on `MemoryStore` and on real etcd alike.

A check is an async function that gets a `Rig` of its own and asserts. On the memory store it runs under virtual time,
on etcd under real time with the same code: seconds in here are dead-lines for awaiting a condition, or a lease's own.
A test module parametrises over `CHECKS`.
"""

# a check's name says what it shows

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from llmgw.errors import Compacted, LeaseLost, TooLarge
from llmgw.store.port import (
    Batch,
    Compare,
    DeleteOp,
    Event,
    GetOp,
    KeyValue,
    Op,
    Operation,
    PutOp,
    Store,
    Target,
    absent,
    created_at,
    unchanged,
)

WAIT_S = 20.0
"""Dead-line for whatever must happen soon."""


@dataclass(kw_only=True)
class Rig:
    """Two clients of one store, and a prefix (ending with `/`) that nobody else uses.

    `compact`: make the store forget history below a revision.
    """

    store: Store
    other: Store
    root: str
    compact: Callable[[int], Awaitable[None]]


Check = Callable[[Rig], Awaitable[None]]


async def put(store: Store, key: str, value: bytes = b"v", *, lease: int = 0) -> int:
    """Write one key; returns the revision."""
    return (await store.txn([], [PutOp(key=key, value=value, lease=lease)])).revision


async def events_until(batches: AsyncIterator[Batch], revision: int) -> list[Event]:
    """Every event up to `revision`, which must be one that reaches this watch."""
    events: list[Event] = []
    with anyio.fail_after(WAIT_S):
        async for batch in batches:
            assert all(event.mod_revision <= batch.revision for event in batch.events)
            events.extend(batch.events)
            if events and events[-1].mod_revision >= revision:
                break
    return events


@asynccontextmanager
async def _watch(rig: Rig, *below: str, from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
    async with rig.other.watch([rig.root + part for part in below], from_revision=from_revision) as batches:
        yield batches


# --- keys and revisions ---------------------------------------------------------------------------------------------


async def revision_moves_only_when_something_is_written(rig: Rig) -> None:
    key = rig.root + "a"
    first = await put(rig.store, key)
    assert await put(rig.store, key) == first + 1  # the same value is a change, too
    refused = await rig.store.txn([absent(key)], [PutOp(key=key, value=b"x")])
    nothing = await rig.store.txn([], [DeleteOp(key=rig.root + "none"), DeleteOp(key=rig.root + "none/", prefix=True)])
    reading = await rig.store.txn([], [GetOp(key=key)])
    assert (refused.ok, nothing.ok, reading.ok) == (False, True, True)
    assert {refused.revision, nothing.revision, reading.revision} == {first + 1}
    assert (await rig.store.txn([], [DeleteOp(key=key)])).revision == first + 2


async def numbers_of_a_key(rig: Rig) -> None:
    key = rig.root + "a"
    assert await rig.store.get(key) is None
    first = await put(rig.store, key, b"1")
    second = await put(rig.store, key, b"2")
    assert await rig.other.get(key) == KeyValue(
        key=key, value=b"2", create_revision=first, mod_revision=second, version=2
    )
    await rig.store.txn([], [DeleteOp(key=key)])
    assert await rig.other.get(key) is None
    third = await put(rig.store, key, b"")
    assert await rig.other.get(key) == KeyValue(
        key=key, value=b"", create_revision=third, mod_revision=third, version=1
    )


async def any_bytes_are_a_value(rig: Rig) -> None:
    value = bytes(range(256)) * 5
    await put(rig.store, rig.root + "%C3%BF.-_a", value)
    found = await rig.store.get(rig.root + "%C3%BF.-_a")
    assert found is not None
    assert found.value == value


async def bad_keys_are_refused(rig: Rig) -> None:
    for key in ("", "/ÿ"):
        with pytest.raises(ValueError, match="key"):
            await rig.store.get(key)
        with pytest.raises(ValueError, match="key"):
            await rig.store.list([key])
        with pytest.raises(ValueError, match="key"):
            await put(rig.store, key)
    for op in (GetOp(key=rig.root + "a", prefix=True), DeleteOp(key=rig.root + "a", prefix=True)):
        with pytest.raises(ValueError, match="does not end"):
            await rig.store.txn([], [op])
    with pytest.raises(ValueError, match="does not end"):
        await rig.store.txn([Compare(key=rig.root + "a", target=Target.MOD, number=0, prefix=True)], [])


# --- listing --------------------------------------------------------------------------------------------------------


async def a_prefix_is_not_a_longer_name(rig: Rig) -> None:
    for name in ("gpu-1", "gpu-1/x", "gpu-10", "gpu-10/x", "gpu-1.x"):
        await put(rig.store, rig.root + name)

    async def listed(*prefixes: str) -> list[str]:
        found = await rig.store.list([rig.root + prefix for prefix in prefixes])
        return [item.key.removeprefix(rig.root) for item in found.items]

    assert await listed("gpu-1/") == ["gpu-1/x"]
    assert await listed("gpu-1") == ["gpu-1"]
    assert await listed("gpu-10/", "gpu-1") == ["gpu-1", "gpu-10/x"]
    assert await listed("") == ["gpu-1", "gpu-1.x", "gpu-1/x", "gpu-10", "gpu-10/x"]
    await rig.store.txn([], [DeleteOp(key=rig.root + "gpu-1/", prefix=True), DeleteOp(key=rig.root + "gpu-1")])
    assert await listed("") == ["gpu-1.x", "gpu-10", "gpu-10/x"]


async def a_long_listing_is_whole(rig: Rig) -> None:
    names = [f"{rig.root}k{n:04}" for n in range(1100)]
    revision = 0
    for start in range(0, len(names), 110):
        result = await rig.store.txn([], [PutOp(key=key, value=b"v" * 50) for key in names[start : start + 110]])
        revision = result.revision
    listing = await rig.other.list([rig.root])
    assert [item.key for item in listing.items] == names
    assert listing.revision >= revision


async def an_empty_listing_has_a_revision(rig: Rig) -> None:
    revision = await put(rig.store, rig.root + "a")
    listing = await rig.store.list([rig.root + "none/", rig.root + "none"])
    assert listing.items == ()
    assert listing.revision >= revision


# --- transactions ---------------------------------------------------------------------------------------------------


async def compares(rig: Rig) -> None:
    key, gone = rig.root + "a", rig.root + "none"
    created = await put(rig.store, key)
    changed = await put(rig.store, key)

    async def holds(*conditions: Compare) -> bool:
        return (await rig.store.txn(conditions, [GetOp(key=key)])).ok

    assert await holds(created_at(key, created), unchanged(key, changed), absent(gone), unchanged(gone, 0))
    assert not await holds(created_at(key, created), absent(key))
    assert not await holds(unchanged(key, created))
    numbers = {Target.CREATE: created, Target.MOD: changed, Target.VERSION: 2, Target.LEASE: 0}
    for at, here in ((key, numbers), (gone, dict.fromkeys(Target, 0))):
        for target, number in here.items():
            for op, below, equal, above in (
                (Op.EQUAL, False, True, False),
                (Op.NOT_EQUAL, True, False, True),
                (Op.GREATER, True, False, False),
                (Op.LESS, False, False, True),
            ):
                for offset, expected in ((-1, below), (0, equal), (1, above)):
                    condition = Compare(key=at, target=target, op=op, number=number + offset)
                    assert await holds(condition) is expected, condition


async def a_compare_of_a_prefix_speaks_of_every_key(rig: Rig) -> None:
    below = rig.root + "p/"

    async def holds(op: Op, number: int) -> bool:
        condition = Compare(key=below, target=Target.MOD, op=op, number=number, prefix=True)
        return (await rig.store.txn([condition], [GetOp(key=below)])).ok

    assert await holds(Op.LESS, 1)  # nothing there compares as an absent key
    assert await holds(Op.EQUAL, 0)
    assert not await holds(Op.GREATER, 0)
    await put(rig.store, below + "a")
    last = await put(rig.store, below + "b")
    await put(rig.store, rig.root + "p0")  # just after the range
    assert await holds(Op.LESS, last + 1)
    assert not await holds(Op.LESS, last)
    assert not await holds(Op.EQUAL, last)


async def reads_in_a_transaction_see_the_puts_before_them(rig: Rig) -> None:
    a, b = rig.root + "a", rig.root + "b"
    first = await put(rig.store, b, b"old")
    result = await rig.store.txn(
        [],
        [
            GetOp(key=rig.root, prefix=True),
            PutOp(key=a, value=b"new"),
            GetOp(key=rig.root, prefix=True),
            DeleteOp(key=b),
            GetOp(key=b),
            GetOp(key=a),
        ],
    )
    old = KeyValue(key=b, value=b"old", create_revision=first, mod_revision=first, version=1)
    new = KeyValue(key=a, value=b"new", create_revision=first + 1, mod_revision=first + 1, version=1)
    assert result.reads == ((old,), (new, old), (), (new,))
    assert result.revision == first + 1


async def the_other_branch(rig: Rig) -> None:
    key = rig.root + "a"
    refused = await rig.store.txn(
        [created_at(key, 1)], [PutOp(key=key, value=b"then")], [PutOp(key=key, value=b"else"), GetOp(key=key)]
    )
    assert not refused.ok
    assert [item.value for item in refused.reads[0]] == [b"else"]
    assert refused.reads[0][0].mod_revision == refused.revision


async def a_key_is_written_once(rig: Rig) -> None:
    key = rig.root + "d/a"
    bad: list[list[Operation]] = [
        [PutOp(key=key, value=b"1"), PutOp(key=key, value=b"2")],
        [PutOp(key=key, value=b"1"), DeleteOp(key=key)],
        [DeleteOp(key=key), PutOp(key=key, value=b"1")],
        [PutOp(key=key, value=b"1"), DeleteOp(key=rig.root + "d/", prefix=True)],
    ]
    for ops in bad:
        with pytest.raises(ValueError, match="in one transaction"):
            await rig.store.txn([], ops)
        with pytest.raises(ValueError, match="in one transaction"):
            await rig.store.txn([], [], ops)
    assert await rig.store.get(key) is None
    await put(rig.store, key)
    twice = [DeleteOp(key=key), DeleteOp(key=rig.root + "d/", prefix=True), DeleteOp(key=key)]
    assert (await rig.store.txn([], twice, [PutOp(key=key, value=b"1")])).ok


async def limits(rig: Rig) -> None:
    names = [f"{rig.root}{n}" for n in range(129)]
    puts = [PutOp(key=key, value=b"") for key in names]
    conditions = [absent(key) for key in names]
    assert (await rig.store.txn(conditions[:128], puts[:128], puts[:128])).ok
    too_many: list[tuple[list[Compare], list[PutOp], list[PutOp]]] = [
        (conditions, [], []),
        ([], puts, []),
        ([], [], puts),
    ]
    for these, then, other in too_many:
        with pytest.raises(TooLarge) as told:
            await rig.store.txn(these, then, other)
        assert (told.value.size, told.value.limit) == (129, 128)
    assert await rig.store.get(names[128]) is None
    await put(rig.store, names[0], b"x" * 1_499_000)
    with pytest.raises(TooLarge):
        await put(rig.store, names[0], b"x" * 1_500_000)
    half = [[PutOp(key=key, value=b"x" * 800_000)] for key in names[:2]]
    with pytest.raises(TooLarge):  # the request in all counts, the branch not taken included
        await rig.store.txn([], half[0], half[1])


async def one_of_many_creates_a_key(rig: Rig) -> None:
    won: list[int] = []

    async def create(n: int) -> None:
        store = (rig.store, rig.other)[n % 2]
        if (await store.txn([absent(rig.root + "a")], [PutOp(key=rig.root + "a", value=b"%d" % n)])).ok:
            won.append(n)

    async with anyio.create_task_group() as tasks:
        for n in range(8):
            tasks.start_soon(create, n)
    found = await rig.store.get(rig.root + "a")
    assert found is not None
    assert (won, found.version) == ([int(found.value)], 1)


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
    revision_moves_only_when_something_is_written,
    numbers_of_a_key,
    any_bytes_are_a_value,
    bad_keys_are_refused,
    a_prefix_is_not_a_longer_name,
    a_long_listing_is_whole,
    an_empty_listing_has_a_revision,
    compares,
    a_compare_of_a_prefix_speaks_of_every_key,
    reads_in_a_transaction_see_the_puts_before_them,
    the_other_branch,
    a_key_is_written_once,
    limits,
    one_of_many_creates_a_key,
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
"""Every check. A store conforms if it passes all."""
