"""Applying to a store: bounded batches, one winner, lost answers, and a valid catalog wherever it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.abc
import pytest

from llmgw.cli.catalog_write import CATALOG_KINDS, Progress, read_catalog, read_plan, write_plan
from llmgw.cli.connection import read_index
from llmgw.core.apply import Edit, problems
from llmgw.core.catalog import Alias, Catalog, ModelSpec, Profile, Scaling
from llmgw.core.catalog_load import Loaded
from llmgw.core.record import Generation
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import OutcomeUnknown, Partial, Refused, StoreError, Unavailable
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import TXN_OPS_MAX, Compare, Operation, PutOp, Store, TxnResult
from llmgw.testing.faults import Fate, FaultyStore, Link, TxnFault, once
from llmgw.testing.virtual import run_virtual

EVERY_SECTION = frozenset({"models", "aliases", "engines"})


def fleet(size: int, *, context: int = 4096, first: int = 0) -> Loaded:
    """`size` models of four replicas each, every one with an alias and the one before it as fallback."""
    names = [f"model-{i:04}" for i in range(first, first + size)]
    models = {
        name: ModelSpec(
            name=name,
            source=f"{name}.gguf",
            profiles=(Profile(name="cpu", engine="llama.cpp", context=context, env={"NOTE": "x" * 300}),),
            scaling=Scaling(min=4, max=4),
            fallbacks=(names[i - 1],) if i else (),
        )
        for i, name in enumerate(names)
    }
    aliases = {f"alias-{name}": Alias(name=f"alias-{name}", model=name) for name in names}
    return Loaded(catalog=Catalog(models=models, aliases=aliases), sections=EVERY_SECTION)


async def apply(store: Store, wanted: Loaded, *, prune: bool = True) -> tuple[Progress, list[Edit]]:
    index, plan = await read_plan(store, wanted, prune=prune)
    progress, told = Progress(), list[Edit]()
    await write_plan(store, index, plan, progress, tell=told.append)
    return progress, told


async def stored(store: Store) -> tuple[Catalog, int]:
    """The catalog, which must be valid, and the generation's number."""
    index = await read_index(store, (*CATALOG_KINDS, Kind.GENERATION))
    catalog, corrupt = read_catalog(index)
    assert not corrupt
    assert not list(problems({ref: row.record for ref, row in index.rows() if ref.kind in CATALOG_KINDS}))  # type: ignore[misc]  # only these kinds are read
    row = index.generation
    return catalog, 0 if row is None or row.record is None else row.record.number


class Mortal(MemoryStore):
    """A store whose client is killed before its transaction number `lives`, and counts what it was sent."""

    def __init__(self, cluster: MemoryCluster, *, lives: int = 1000) -> None:
        super().__init__(cluster)
        self.lives = lives
        self.sent: list[int] = []

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        if len(self.sent) == self.lives:
            raise KeyboardInterrupt
        self.sent.append(len(ops))
        return await super().txn(compares, ops, or_else)


def test_a12_a_large_apply_killed_between_any_two_batches_leaves_a_valid_catalog() -> None:
    async def main() -> None:
        counter = Mortal(MemoryCluster())
        await apply(counter, fleet(300))
        assert len(counter.sent) > 4
        assert max(counter.sent) <= TXN_OPS_MAX
        assert (await stored(counter))[0] == fleet(300).catalog
        for lives in range(len(counter.sent)):
            cluster = MemoryCluster()
            with pytest.raises(KeyboardInterrupt):
                await apply(Mortal(cluster, lives=lives), fleet(300))
            half, number = await stored(MemoryStore(cluster))
            assert number == lives
            assert len(half.models) + len(half.aliases) == sum(counter.sent[:lives]) - lives
            await apply(MemoryStore(cluster), fleet(300))
            assert (await stored(MemoryStore(cluster)))[0] == fleet(300).catalog

    run_virtual(main)


def test_a12_pruning_in_batches_is_valid_at_each_step_too() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        await apply(MemoryStore(cluster), fleet(200))
        with pytest.raises(KeyboardInterrupt):
            await apply(Mortal(cluster, lives=2), fleet(100, first=150))
        await stored(MemoryStore(cluster))
        await apply(MemoryStore(cluster), fleet(100, first=150))
        assert (await stored(MemoryStore(cluster)))[0] == fleet(100, first=150).catalog

    run_virtual(main)


def test_nothing_is_written_when_nothing_changes() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = MemoryStore(cluster)
        await apply(store, fleet(5))
        before = cluster.revision
        progress, told = await apply(store, fleet(5))
        assert (cluster.revision, progress.total, told) == (before, 0, [])
        _, told = await apply(store, fleet(5, context=8192))
        assert {edit.ref.kind for edit in told} == {Kind.MODEL}

    run_virtual(main)


def test_the_second_of_two_concurrent_applies_fails_whole() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = MemoryStore(cluster)
        index, plan = await read_plan(store, fleet(5), prune=True)
        await apply(store, fleet(3, context=1))
        before = await stored(store)
        with pytest.raises(Refused, match="nothing was changed"):
            await write_plan(store, index, plan, Progress(), tell=lambda _: None)
        assert await stored(store) == before

    run_virtual(main)


def test_an_apply_overtaken_between_its_batches_says_how_far_it_got() -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        store = MemoryStore(cluster)
        progress = Progress()
        index, plan = await read_plan(store, fleet(300), prune=True)

        class Overtaken(MemoryStore):
            sent = 0

            async def txn(
                self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
            ) -> TxnResult:
                self.sent += 1
                if self.sent == 3:
                    await apply(store, Loaded(catalog=Catalog(), sections=frozenset({"engines"})))
                    await apply(store, fleet(1, context=7), prune=False)
                return await super().txn(compares, ops, or_else)

        with pytest.raises(Partial, match="run it again") as told:
            await write_plan(Overtaken(cluster), index, plan, progress, tell=lambda _: None)
        assert told.value.done == progress.done == 2 * (TXN_OPS_MAX - 1)
        assert told.value.total == 600
        await stored(store)

    run_virtual(main)


def test_a_record_changed_by_hand_since_it_was_read_is_not_overwritten() -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster())
        await apply(store, fleet(2))
        index, plan = await read_plan(store, fleet(2, context=1), prune=True)
        by_hand = fleet(2, context=99).catalog.models["model-0001"]
        await store.txn([], [PutOp(key=keys.key(Ref(Kind.MODEL, "model-0001")), value=encode_stored(by_hand))])
        with pytest.raises(Refused):
            await write_plan(store, index, plan, Progress(), tell=lambda _: None)
        assert (await stored(store))[0].models["model-0001"] == by_hand

    run_virtual(main)


def with_faults(body: Callable[[FaultyStore, MemoryStore], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = MemoryCluster()
        async with anyio.create_task_group() as tasks:
            await body(FaultyStore(MemoryStore(cluster), tasks), MemoryStore(cluster))
            tasks.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("fate", [Fate.ANSWER_LOST, Fate.LOST, Fate.LATE])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_lost_answer_changes_nothing_about_the_outcome(fate: Fate, batch: int) -> None:
    async def body(store: FaultyStore, quiet: MemoryStore) -> None:
        seen = 0

        def nth(_: Sequence[Operation]) -> bool:
            nonlocal seen
            seen += 1
            return seen == batch + 1

        store.judges.append(once(TxnFault(fate=fate), where=nth))
        progress, told = await apply(store, fleet(150))
        await anyio.sleep(60)  # until what was late has landed, or rather has not
        catalog, number = await stored(quiet)
        assert catalog == fleet(150).catalog
        assert number == 3
        assert (progress.done, len(told)) == (300, 300)

    with_faults(body)


def test_somebody_elses_apply_is_not_taken_for_ours_after_a_lost_answer() -> None:
    async def body(store: FaultyStore, quiet: MemoryStore) -> None:
        index, plan = await read_plan(store, fleet(2), prune=True)
        store.judges.append(once(TxnFault(fate=Fate.LOST)))
        await apply(quiet, fleet(2, context=1))
        with pytest.raises(Refused):
            await write_plan(store, index, plan, Progress(), tell=lambda _: None)
        assert (await stored(quiet))[0] == fleet(2, context=1).catalog

    with_faults(body)


@pytest.mark.parametrize(
    ("fate", "error"), [(Fate.REFUSED, Unavailable), (Fate.ANSWER_LOST, OutcomeUnknown)], ids=["refused", "unknown"]
)
def test_a_store_that_goes_away_at_once(fate: Fate, error: type[StoreError]) -> None:
    async def body(store: FaultyStore, quiet: MemoryStore) -> None:
        index, plan = await read_plan(store, fleet(2), prune=True)
        for _ in range(10):
            store.judges.append(lambda _: TxnFault(fate=Fate.LOST if fate is Fate.ANSWER_LOST else fate))
        with pytest.raises(error):
            await write_plan(store, index, plan, Progress(), tell=lambda _: None)
        assert (await stored(quiet))[0] == Catalog()

    with_faults(body)


def test_a_store_that_goes_away_half_way() -> None:
    async def body(store: FaultyStore, quiet: MemoryStore) -> None:
        index, plan = await read_plan(store, fleet(300), prune=True)
        progress = Progress()

        def tell(_: Edit) -> None:
            store.link = Link.REFUSED

        with pytest.raises(Partial) as told:
            await write_plan(store, index, plan, progress, tell=tell)
        assert told.value.done == TXN_OPS_MAX - 1
        catalog, number = await stored(quiet)
        assert len(catalog.models) + len(catalog.aliases) == told.value.done
        assert number == 1

    with_faults(body)


def test_a_corrupt_record_is_replaced_if_wanted_and_named_if_not() -> None:
    async def main() -> None:
        store = MemoryStore(MemoryCluster())
        for name in ("model-0000", "other"):
            await store.txn([], [PutOp(key=keys.key(Ref(Kind.MODEL, name)), value=b"{")])
        await store.txn([], [PutOp(key=keys.key(Ref(Kind.GENERATION)), value=b"{")])
        index, plan = await read_plan(store, fleet(1), prune=False)
        assert plan.left == (Ref(Kind.MODEL, "other"),)
        await write_plan(store, index, plan, Progress(), tell=lambda _: None)
        found = await store.get(keys.key(Ref(Kind.GENERATION)))
        assert found is not None
        assert found.value == encode_stored(Generation(number=1))
        await apply(store, fleet(1))
        assert (await stored(store))[0] == fleet(1).catalog

    run_virtual(main)
