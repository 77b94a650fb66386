"""`mirror`: the decoded tree, what one can wait for, and what bad records and restores do to it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from llmgw.core.catalog import ModelSpec
from llmgw.core.record import Record, StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Denied
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.mirror import YIELD_EVERY, Mirror, mirror
from llmgw.store.port import Batch, DeleteOp, Listing, PutOp, Store
from llmgw.testing.conformance import put
from llmgw.testing.faults import FaultyStore
from llmgw.testing.virtual import run_virtual

META, MODEL = Ref(Kind.META), Ref(Kind.MODEL, "qwen/7b")
SPEC = ModelSpec(name="qwen/7b", source="x")


def write(ref: Ref, record: Record) -> PutOp:
    return PutOp(key=keys.key(ref), value=codec.encode_stored(record))


async def commit(store: Store, *writes: PutOp) -> int:
    return (await store.txn([], writes)).revision


def play(scenario: Callable[[MemoryStore, Mirror], Awaitable[None]], prefixes: Sequence[str] = ("/llmgw/",)) -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster())
        async with mirror(store, prefixes, jitter=lambda: 0.5) as reflected:
            await scenario(store, reflected)

    run_virtual(main)


def test_it_starts_knowing_nothing_and_says_when_it_does() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        assert (reflected.ready, reflected.revision, reflected.age_s, reflected.incarnation) == (False, 0, None, None)
        await reflected.wait_ready()
        assert (reflected.ready, reflected.revision, reflected.age_s) == (True, 1, 0)
        assert reflected.changes == 1

    play(scenario)


def test_records_come_and_go_and_each_change_can_be_waited_for() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await reflected.wait_ready()
        revision = await commit(store, write(META, StoreMeta(incarnation="one")), write(MODEL, SPEC))
        before = reflected.changes
        with anyio.fail_after(1):
            await reflected.wait_revision(revision)
        assert reflected.index.models.record("qwen/7b") == SPEC
        assert reflected.incarnation == "one"
        await store.txn([], [DeleteOp(key=keys.key(MODEL))])
        with anyio.fail_after(1):
            assert await reflected.wait_changed(before + 1) == before + 2
        assert reflected.index.models.names() == []

    play(scenario)


def test_a_write_elsewhere_moves_the_revision_but_is_no_change() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await reflected.wait_ready()
        revision = await put(store, "/other/a")
        with anyio.fail_after(5):
            await reflected.wait_revision(revision)
        with anyio.move_on_after(60) as waited:
            await reflected.wait_changed(1)
        assert waited.cancelled_caught

    play(scenario)


def test_several_prefixes_and_single_keys_are_one_mirror() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await reflected.wait_ready()
        revision = await commit(
            store,
            write(META, StoreMeta(incarnation="one")),
            write(MODEL, SPEC),
            write(Ref(Kind.MODEL, "gpu-10"), ModelSpec(name="gpu-10", source="x")),
        )
        await reflected.wait_revision(revision)
        assert reflected.incarnation == "one"
        assert reflected.index.models.names() == ["gpu-10", "qwen/7b"]

    play(scenario, [keys.prefix(Kind.META), keys.prefix(Kind.MODEL)])


def test_a_corrupt_record_is_told_once_keeps_its_last_value_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [
            record.fields["key"]  # type: ignore[attr-defined]  # our logs carry their fields so
            for record in caplog.records
            if record.levelno == logging.ERROR
        ]

    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await commit(store, write(MODEL, SPEC))
        await reflected.wait_revision(2)
        for value in (b"{", b"\xff", b'{"name": "another", "source": "x"}'):
            await commit(store, PutOp(key=keys.key(MODEL), value=value))
        revision = await put(store, "/llmgw/no/such/kind", b"{")
        await reflected.wait_revision(revision)
        assert reflected.index.models.record("qwen/7b") == SPEC
        assert [ref for ref, _ in reflected.index.corrupt()] == [MODEL]
        assert told() == [keys.key(MODEL)]
        await commit(store, write(MODEL, SPEC))
        revision = await commit(store, PutOp(key=keys.key(MODEL), value=b""))
        await reflected.wait_revision(revision)
        assert told() == [keys.key(MODEL)] * 2  # it was well in between

    play(scenario)


def test_another_incarnation_means_listing_everything_again() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await commit(store, write(META, StoreMeta(incarnation="one")))
        await reflected.wait_revision(2)
        assert reflected.resets == {"start": 1}
        revision = await commit(store, write(META, StoreMeta(incarnation="two")))
        await reflected.wait_revision(revision)
        with anyio.fail_after(5):
            await reflected.wait_changed(reflected.changes)
        assert reflected.resets == {"start": 1, "went_back": 1}
        assert reflected.incarnation == "two"

    play(scenario)


def test_whoever_knows_better_has_it_listed_again() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        reflected.start_over()  # nothing is followed yet
        await reflected.wait_ready()
        reflected.start_over()
        with anyio.fail_after(5):
            await reflected.wait_changed(1)
        assert reflected.resets == {"start": 1, "went_back": 1}

    play(scenario)


def test_a_restored_store_takes_the_mirror_back() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await commit(store, write(META, StoreMeta(incarnation="one")))
        backup = store.cluster.snapshot()
        await commit(store, write(MODEL, SPEC))
        await reflected.wait_revision(3)
        store.cluster.restore(backup)
        with anyio.fail_after(5):
            await reflected.wait_changed(reflected.changes)
        assert (reflected.revision, reflected.index.models.names()) == (2, [])

    play(scenario)


def test_without_a_store_it_grows_old_but_never_empty() -> None:
    async def scenario(store: MemoryStore, reflected: Mirror) -> None:
        await commit(store, write(MODEL, SPEC))
        await reflected.wait_revision(2)
        store.cluster.stop()
        await anyio.sleep(3600)
        assert reflected.age_s is not None
        assert reflected.age_s >= 3590
        assert reflected.index.models.names() == ["qwen/7b"]

    play(scenario)


def test_a_long_listing_leaves_others_their_turn() -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster())
        for n in range(4 * YIELD_EVERY):
            await commit(store, write(Ref(Kind.MODEL, f"m{n}"), ModelSpec(name=f"m{n}", source="x")))
        turns = 0
        async with mirror(store, ["/llmgw/"], jitter=lambda: 0.5) as reflected:
            while not reflected.ready:
                await anyio.lowlevel.checkpoint()
                turns += 1
        assert len(reflected.index.models) == 4 * YIELD_EVERY
        assert turns >= 4

    run_virtual(main)


class Denying(MemoryStore):
    denied = False

    async def list(self, prefixes: Sequence[str]) -> Listing:
        if self.denied:
            raise Denied("wrong password")
        return await super().list(prefixes)


def test_denied_from_the_start_is_an_error() -> None:
    async def main() -> None:
        store = Denying(MemoryCluster())
        store.denied = True
        with pytest.raises(Denied):
            async with mirror(store, ["/llmgw/"], jitter=lambda: 0.5) as reflected:
                await reflected.wait_ready()

    run_virtual(main)


def test_denied_later_it_keeps_what_it_knows_and_asks_again() -> None:
    async def main() -> None:
        store = Denying(MemoryCluster())
        await commit(store, write(MODEL, SPEC))
        backup = store.cluster.snapshot()
        await put(store, "/llmgw/other")
        async with mirror(store, ["/llmgw/"], jitter=lambda: 0.5) as reflected:
            await reflected.wait_ready()
            store.denied = True
            store.cluster.restore(backup)
            await anyio.sleep(60)
            assert isinstance(reflected.denied, Denied)
            assert reflected.index.models.names() == ["qwen/7b"]
            store.denied = False
            with anyio.fail_after(20):
                await reflected.wait_changed(1)
            assert reflected.denied is None

    run_virtual(main)


class Shuffled(FaultyStore):
    """Delivers the events of one revision prefix by prefix, last prefix first, as several watches on one stream may."""

    @asynccontextmanager
    async def watch(self, prefixes: Sequence[str], *, from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
        async with super().watch(prefixes, from_revision=from_revision) as batches:
            yield _shuffle(batches, prefixes)


class _shuffle(AsyncIterator[Batch]):  # noqa: N801  # reads as the function it is
    def __init__(self, batches: AsyncIterator[Batch], prefixes: Sequence[str]) -> None:
        self.batches, self.prefixes, self.queue = batches, prefixes, list[Batch]()

    async def __anext__(self) -> Batch:
        while not self.queue:
            batch = await anext(self.batches)
            if not batch.events:
                return batch
            for prefix in self.prefixes:
                events = tuple(event for event in batch.events if event.key.startswith(prefix))
                if events:
                    self.queue.append(Batch(revision=batch.revision, events=events))
        return self.queue.pop()


def test_between_prefixes_any_order_ends_in_the_same_index() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = MemoryStore(cluster)
        async with anyio.create_task_group() as tasks:
            prefixes = [keys.prefix(Kind.META), keys.prefix(Kind.MODEL), keys.prefix(Kind.ALIAS)]
            async with mirror(Shuffled(store, tasks), prefixes, jitter=lambda: 0.5) as reflected:
                await reflected.wait_ready()
                for n in range(5):
                    name = f"m{n % 2}"
                    await commit(
                        store,
                        write(META, StoreMeta(incarnation="one")),
                        write(Ref(Kind.MODEL, name), ModelSpec(name=name, source=str(n))),
                    )
                with anyio.fail_after(10):
                    while reflected.revision < 6 or reflected.incarnation is None:
                        await reflected.wait_changed(reflected.changes)
                await anyio.sleep(5)
                assert [spec.source for spec in reflected.index.models.records()] == ["4", "3"]
                assert reflected.resets == {"start": 1}

    run_virtual(main)
