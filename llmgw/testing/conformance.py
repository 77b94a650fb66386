"""What every store must do: the port's contract as checks, run on `MemoryStore` and on real etcd alike.

A check is an async function that gets a `Rig` of its own and asserts. On the memory store it runs under virtual time,
on etcd under real time with the same code: seconds in here are dead-lines for awaiting a condition, or a lease's own.
A test module parametrises over `CHECKS`.
"""

from __future__ import annotations

import anyio
import pytest

from llmgw.errors import TooLarge
from llmgw.store.port import (
    Compare,
    DeleteOp,
    GetOp,
    KeyValue,
    Op,
    Operation,
    PutOp,
    Target,
    absent,
    created_at,
    unchanged,
)
from llmgw.testing import conformance_time
from llmgw.testing.conformance_rig import Check, Rig, events_until, put

__all__ = ["CHECKS", "Check", "Rig", "events_until", "put"]


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
    *conformance_time.CHECKS,
)
"""Every check. A store conforms if it passes all."""
