"""Writing a planned catalog to the store, batch by batch, so that two people's applies never mix.

Each batch compares `spec/generation` and every key it touches with what was read, and bumps the generation: whoever
comes second fails whole, before or between batches, and what is stored is valid in either case. A batch whose answer
was lost is sent again as it is: its compare lets it happen once at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llmgw.cli.connection import read_index
from llmgw.core.apply import ApplyPlan, Edit, plan_apply
from llmgw.core.catalog import Catalog
from llmgw.core.catalog_load import Loaded
from llmgw.core.record import Generation
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.errors import Conflict, OutcomeUnknown, Partial, Refused, Unavailable
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.port import REQUEST_BYTES_MAX, TXN_OPS_MAX, Compare, DeleteOp, Operation, PutOp, Store, unchanged

CATALOG_KINDS: Final = (Kind.MODEL, Kind.ALIAS, Kind.ENGINE)

GENERATION: Final = Ref(Kind.GENERATION)

EDITS_MAX: Final = TXN_OPS_MAX - 1
"""Most edits in a batch: the generation takes one operation and one compare."""

BYTES_MAX: Final = REQUEST_BYTES_MAX // 2
"""Most bytes of records in a batch. Half of a request: base64 makes four bytes of three."""

ATTEMPTS_MAX: Final = 5
"""How often a batch is sent whose answer was lost each time."""


@dataclass(kw_only=True)
class Progress:
    """How far an apply is, for whoever has to say so when it ends early."""

    done: int = 0
    total: int = 0


def read_catalog(index: Index) -> tuple[Catalog, frozenset[Ref]]:
    """The stored catalog, and the places in it that can't be read."""
    catalog = Catalog(
        models={record.name: record for record in index.models.records()},
        aliases={record.name: record for record in index.aliases.records()},
        engines={record.name: record for record in index.engines.records()},
    )
    return catalog, frozenset(ref for ref, _ in index.corrupt() if ref.kind in CATALOG_KINDS)


async def read_plan(store: Store, wanted: Loaded, *, prune: bool) -> tuple[Index, ApplyPlan]:
    """What the store holds, and what is to be changed in it. Raises: Refused, Unavailable, Denied."""
    index = await read_index(store, (*CATALOG_KINDS, Kind.GENERATION))
    return index, plan_for(index, wanted, prune=prune)


def plan_for(index: Index, wanted: Loaded, *, prune: bool) -> ApplyPlan:
    """What is to be changed in the catalog that `index` holds. Raises: Refused."""
    current, corrupt = read_catalog(index)
    return plan_apply(current, wanted, prune=prune, changes_max=EDITS_MAX, bytes_max=BYTES_MAX, corrupt=corrupt)


async def write_plan(
    store: Store, index: Index, plan: ApplyPlan, progress: Progress, *, tell: Callable[[Edit], None]
) -> None:
    """Carry out a plan made from `index`. `tell` hears of each edit once it is stored.

    Raises:
        Refused: somebody else changed the catalog since it was read, and nothing of this plan was written.
        Partial: the same, or the store went away, when part of it was written already.
        Unavailable, OutcomeUnknown: no answer, before anything was known to be written.
        Denied: the user may not write the catalog.
    """
    progress.total = len(plan.edits)
    row = index.generation
    generation, number = (0, 0) if row is None else (row.mod_revision, 0 if row.record is None else row.record.number)
    for batch in plan.batches:
        number += 1
        try:
            generation = await _commit(store, index, batch, generation=generation, number=number)
        except Conflict:
            why = "somebody else changed the catalog at the same time"
            if progress.done == 0:
                raise Refused(f"{why}; nothing was changed, run it again") from None
            raise Partial(done=progress.done, total=progress.total, why=_so_far(why)) from None
        except (Unavailable, OutcomeUnknown) as error:
            if progress.done == 0:
                raise
            raise Partial(done=progress.done, total=progress.total, why=_so_far(str(error))) from error
        progress.done += len(batch)
        for edit in batch:
            tell(edit)


def _so_far(why: str) -> str:
    return f"{why}; what was changed so far is valid, run it again to finish"


async def _commit(store: Store, index: Index, batch: tuple[Edit, ...], *, generation: int, number: int) -> int:
    """Write one batch; returns the generation's new mod_revision. Raises: Conflict, Unavailable, OutcomeUnknown."""
    compares = [_as_read(index, GENERATION, generation), *(_as_read(index, edit.ref) for edit in batch)]
    ops: list[Operation] = [PutOp(key=keys.key(GENERATION), value=encode_stored(Generation(number=number)))]
    ops += [_operation(edit) for edit in batch]
    lost: OutcomeUnknown | None = None
    for _ in range(ATTEMPTS_MAX):
        try:
            result = await store.txn(compares, ops)
        except OutcomeUnknown as error:
            lost = error
            continue
        if result.ok:
            return result.revision
        landed = await _landed(store, batch, number) if lost is not None else None
        if landed is None:
            raise Conflict(f"generation {number} is somebody else's")
        return landed
    assert lost is not None  # noqa: S101  # every attempt ended in it
    raise lost


async def _landed(store: Store, batch: tuple[Edit, ...], number: int) -> int | None:
    """Where the generation stands if an attempt without an answer was carried out after all; None if it was not."""
    now = await read_index(store, (*CATALOG_KINDS, Kind.GENERATION))
    row = now.generation
    if row is None or row.record != Generation(number=number):
        return None
    rows = ((now.row(edit.ref), edit.record) for edit in batch)
    same = all((None if row is None else row.record) == record for row, record in rows)
    return row.mod_revision if same else None


def _as_read(index: Index, ref: Ref, revision: int | None = None) -> Compare:
    row = index.row(ref)
    if revision is None:
        revision = 0 if row is None else row.mod_revision
    return unchanged(keys.key(ref), revision)


def _operation(edit: Edit) -> Operation:
    if edit.record is None:
        return DeleteOp(key=keys.key(edit.ref))
    return PutOp(key=keys.key(edit.ref), value=encode_stored(edit.record))
