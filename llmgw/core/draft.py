"""One pass at work: each decided group is written into the index at once, so that the next decision sees it.

Afterwards everything is taken back, and the groups remain. So no decision ever reads a tree that the decisions before
it have not changed yet, and every prefix of a plan was a whole tree that the pass itself stood on.

Invariant: leaving the context leaves the index as it was, its dirty set included; no place is written by two groups of
one plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from llmgw.core.ids import Ids
from llmgw.core.node import Guard
from llmgw.core.plan import Group, Plan, Put, Settings, View, Wake, Write
from llmgw.core.record import Record
from llmgw.core.snapshot import Dirty, Index, Ref, Row
from llmgw.core.units import Now

UNWRITTEN: Final = 2**62
"""The revision of what is only planned: above every real one, so that no report can have answered it yet."""


class Draft:
    """A plan in the making over `index`. A context manager; inside it the index holds what is planned so far."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.groups: list[Group] = []
        self.touched = Dirty()
        """What the pass itself has changed so far. Collected by the index, as it does for anybody's changes."""
        self._owner: dict[Ref, Group] = {}
        self._undo: list[tuple[Ref, Row[Record] | None]] = []
        self._dirty = index.dirty

    def __enter__(self) -> Self:
        self._dirty, self.index.dirty = self.index.dirty, self.touched
        self.index.memo_before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._back_to(0)
        self.index.dirty = self._dirty
        before, self.index.memo_before = self.index.memo_before, None
        self.index.memo.update((node, kept) for node, kept in (before or {}).items() if kept is not None)

    def emit(self, cause: str, *writes: Write, first: bool = False) -> None:
        """Decide a group; nothing happens without writes.

        It takes in every earlier group that wrote one of the same places; the last value counts.

        Args:
            cause: one word for the log.
            writes: the group.
            first: it stands where the first of those it took in stood; otherwise at the end of the plan.
        """
        if not writes:
            return
        earlier = {id(group): group for write in writes if (group := self._owner.get(write.ref)) is not None}
        merged = {write.ref: write for group in earlier.values() for write in group.writes}
        merged |= {write.ref: write for write in writes}
        for write in writes:
            self._write(write)
        group = Group(cause=cause, writes=tuple(merged.values()))
        self._owner |= dict.fromkeys(merged, group)
        if earlier:
            at = next(i for i, each in enumerate(self.groups) if id(each) in earlier)
            self.groups = [each for each in self.groups if id(each) not in earlier]
            self.groups.insert(at if first else len(self.groups), group)
        else:
            self.groups.append(group)

    def put(self, cause: str, ref: Ref, record: Record, *, first: bool = False) -> None:
        """Decide a group of one record, unless just that stands there already."""
        row = self.index.row(ref)
        if row is None or row.record != record:
            self.emit(cause, Put(ref=ref, record=record), first=first)

    @contextmanager
    def imagine(self, *writes: Write) -> Iterator[None]:
        """A context in which `writes` have happened; they are taken back at its end and never planned."""
        mark, dirty = len(self._undo), self.index.dirty
        self.index.dirty = Dirty()
        for write in writes:
            self._write(write)
        try:
            yield
        finally:
            self._back_to(mark)
            self.index.dirty = dirty

    def _write(self, write: Write) -> None:
        before = self.index.row(write.ref)
        row: Row[Record] | None = None
        if isinstance(write, Put):
            created = UNWRITTEN if before is None else before.create_revision
            row = Row(record=write.record, mod_revision=UNWRITTEN, create_revision=created)
        self._undo.append((write.ref, self.index.swap(write.ref, row)))

    def _back_to(self, mark: int) -> None:
        while len(self._undo) > mark:
            ref, row = self._undo.pop()
            self.index.swap(ref, row)


@dataclass(kw_only=True)
class Pass:
    """One pass at work.

    `tries`: placements that may still be tried. `looks`: nodes, models and replicas that may still be looked at.
    `gone`: nodes whose machine was declared gone for good. `restoring`: the store was restored and not every node has
    reported, so nothing is stopped, placed or pruned.
    """

    draft: Draft
    now: Now
    view: View
    ids: Ids
    settings: Settings
    incarnation: str
    plan: Plan = field(default_factory=Plan)
    guard: Guard = field(default_factory=Guard)
    gone: frozenset[str] = frozenset()
    restoring: bool = False
    tries: int = 0
    looks: int = 0

    @property
    def index(self) -> Index:
        """The tree, with what this pass has decided so far."""
        return self.draft.index

    def wake_at(self, what: Wake, name: str, *, wall_s: float) -> None:
        """Look at that again when the wall clock says so."""
        self.wake_in(what, name, delay_s=wall_s - self.now.wall_s)

    def wake_in(self, what: Wake, name: str, *, delay_s: float) -> None:
        """Look at that again after so long, or earlier if somebody said so already."""
        at = self.now.mono_s + max(0.0, delay_s)
        key = (what, name)
        self.plan.wake_mono_s[key] = min(at, self.plan.wake_mono_s.get(key, at))
