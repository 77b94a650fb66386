"""What was so until lately: what people wanted, and what nodes said of themselves.

A leader decides by a tree that is a moment old, and nothing but the head is compared when the decision is committed. So
whoever judges a decision must ask whether it was right by what is said now, or was said a moment ago.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from llmgw.core.catalog import EngineSpec, ModelSpec, NodeSpec
from llmgw.core.node import Facts
from llmgw.core.record import Record
from llmgw.core.replica import ShardReport
from llmgw.core.snapshot import Change, Index, Kind, Ref

SPAN_COMMITS: Final = 16
"""For how many commits what was said before counts: a pass is cut into several, and all rest on its beginning."""

_KINDS: Final = frozenset({Kind.MODEL, Kind.NODE_SPEC, Kind.ENGINE, Kind.FACTS})


def _is_lost(change: Change) -> bool:
    """Whether a shard's report was deleted: what it proved is still so."""
    return change.ref.kind is Kind.SHARD and change.deleted


@dataclass
class Lately:
    """Remembers for a while what is changed, except where plans are applied to the very tree they were made from.

    late: decisions may be a moment late. Otherwise only the present counts.
    """

    late: bool = True
    _rows: list[tuple[int, Ref, Record | None]] = field(default_factory=list)
    """(commits of the head when it was changed, where, what it was)."""

    def note(self, index: Index, changes: Iterable[Change]) -> None:
        """These changes are about to be made to `index`."""
        if not self.late:
            return
        head = None if index.head is None else index.head.record
        commits = 0 if head is None else head.commits
        self._rows = [row for row in self._rows if row[0] >= commits - SPAN_COMMITS]
        for ref in (each.ref for each in changes if each.ref.kind in _KINDS or _is_lost(each)):
            row = index.row(ref)
            # Before something was said for the first time nobody could decide by it.
            if row is not None or any(ref == at for _, at, _ in self._rows):
                self._rows.append((commits, ref, None if row is None else row.record))

    def _records(self, index: Index, ref: Ref) -> list[Record | None]:
        """What stands there now, then what stood there lately; None for when nothing did."""
        row = index.row(ref)
        return [None if row is None else row.record, *(record for _, at, record in self._rows if at == ref)]

    def models(self, index: Index, name: str) -> list[ModelSpec | None]:
        """What was wanted of a model; None for when the catalog had no such model."""
        found = self._records(index, Ref(Kind.MODEL, name))
        return [each if isinstance(each, ModelSpec) else None for each in found]

    def engines(self, index: Index, name: str) -> list[EngineSpec | None]:
        """What version was wanted of an engine; None for no wish."""
        found = self._records(index, Ref(Kind.ENGINE, name))
        return [each if isinstance(each, EngineSpec) else None for each in found]

    def drains(self, index: Index, node: str) -> bool:
        """Whether the node was to be drained."""
        found = self._records(index, Ref(Kind.NODE_SPEC, node))
        return any(isinstance(each, NodeSpec) and each.drain for each in found)

    def reports(self, index: Index, name: str) -> list[ShardReport]:
        """What is reported of a shard, then what was until somebody deleted it."""
        return [each for each in self._records(index, Ref(Kind.SHARD, name)) if isinstance(each, ShardReport)]

    def facts(self, index: Index, node: str) -> list[Facts]:
        """What the node said of itself, the present first; empty when it never did."""
        return [each for each in self._records(index, Ref(Kind.FACTS, node)) if isinstance(each, Facts)]
