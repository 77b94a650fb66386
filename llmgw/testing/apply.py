"""What a mirror would see of groups and records that are written, and copies of an index."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.core.plan import Group, Put
from llmgw.core.record import Record
from llmgw.core.snapshot import Change, Index, Kind, Ref


def changes_of(index: Index, group: Group, *, revision: int) -> list[Change]:
    """What the mirror would see of `group`, committed at `revision`."""
    found: list[Change] = []
    for write in group.writes:
        if isinstance(write, Put):
            row = index.row(write.ref)
            created = revision if row is None else row.create_revision
            found.append(Change(ref=write.ref, mod_revision=revision, create_revision=created, record=write.record))
        elif index.row(write.ref) is not None:
            found.append(Change(ref=write.ref, mod_revision=revision))
    return found


def changes_for(index: Index, *records: tuple[Kind, str, Record | None], revision: int) -> list[Change]:
    """What the mirror would see of records written at `revision`, or deleted where a record is None."""
    changes: list[Change] = []
    for kind, name, record in records:
        row = index.row(Ref(kind, name))
        if record is None:
            changes.append(Change(ref=Ref(kind, name), mod_revision=revision))
        else:
            created = revision if row is None else row.create_revision
            changes.append(Change(ref=Ref(kind, name), mod_revision=revision, create_revision=created, record=record))
    return changes


def copy_of(index: Index, refs: Iterable[Ref] | None = None) -> Index:
    """Another index with the same rows, everything dirty, nothing kept. `refs`: the order to load them in."""
    rows = dict(index.rows())
    fresh = Index()
    for ref in rows if refs is None else refs:
        fresh.swap(ref, rows[ref])
    fresh.revision = index.revision
    fresh.take_dirty()
    fresh.dirty.everything = True
    return fresh
