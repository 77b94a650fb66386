"""From the catalog in the store to the one that is wanted: which records change, in which order and transactions.

Invariant: the catalog is valid after every batch (no alias or fallback without its model, no loop, no name twice), if
it was before the first. So an apply that stops half-way leaves something that can be served from, and running it again
ends it. Each batch fits one transaction; what can only change together is in one batch.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from llmgw.core.catalog import Alias, Catalog, EngineSpec, ModelSpec
from llmgw.core.catalog_diff import describe_changes
from llmgw.core.catalog_load import Loaded, fallback_loops
from llmgw.core.snapshot import Kind, Ref
from llmgw.core.yaml_tree import fold, show
from llmgw.errors import Refused

Entry = ModelSpec | Alias | EngineSpec

_SECTION: Final[Mapping[Kind, str]] = {Kind.MODEL: "models", Kind.ALIAS: "aliases", Kind.ENGINE: "engines"}
_NOUN: Final[Mapping[Kind, str]] = {Kind.MODEL: "model", Kind.ALIAS: "alias", Kind.ENGINE: "engine"}
_NAMED_BY_CLIENTS: Final = (Kind.MODEL, Kind.ALIAS)

_EDIT_BYTES: Final = 400
"""What an edit takes in a request beside its name and record: the compare, the field names. Measured ~200; doubled."""


class Action(enum.Enum):
    """What happens to a record."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One record to write, or with `record` None to delete. `before`: what an update replaces, None if unreadable."""

    ref: Ref
    action: Action
    record: Entry | None
    before: Entry | None = None

    def __str__(self) -> str:
        text = f"{self.action.value} {_NOUN[self.ref.kind]} {self.ref.name}"
        if self.action is not Action.UPDATE or self.record is None:
            return text
        return f"{text}: {'was unreadable' if self.before is None else describe_changes(self.before, self.record)}"


class ApplyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an apply does: one transaction a batch, in order.

    `left`: stored, not in the files and not pruned, though pruning would delete it. `untouched`: section that no file
    has -> how many stored things are in it, which stay whatever is asked for.
    """

    batches: tuple[tuple[Edit, ...], ...]
    left: tuple[Ref, ...]
    untouched: Mapping[str, int]

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Every edit, in the order they are made."""
        return tuple(edit for batch in self.batches for edit in batch)


def plan_apply(
    current: Catalog,
    wanted: Loaded,
    *,
    prune: bool,
    changes_max: int,
    bytes_max: int,
    corrupt: frozenset[Ref] = frozenset(),
) -> ApplyPlan:
    """How to get from `current` to `wanted`; records that are equal are not touched.

    Args:
        current: what can be read in the store.
        wanted: the files. Sections that no file has are left alone, with `prune` too.
        prune: delete what is in the store and not in the files.
        changes_max: most changes in one batch.
        bytes_max: most bytes in one batch.
        corrupt: places in the store that hold something unreadable; written if wanted, deleted if pruned.

    Raises:
        Refused: the outcome would not be valid (what is left contradicts what is new), or changes that only make sense
            together do not fit one batch.
    """
    have: dict[Ref, Entry | None] = {**dict.fromkeys(corrupt), **_flat(current)}
    want = _flat(wanted.catalog)
    missing = sorted((ref for ref in have if ref not in want), key=_order)
    spoken = [ref for ref in missing if _SECTION[ref.kind] in wanted.sections]
    gone = spoken if prune else []
    changes = {ref: Edit(ref=ref, action=Action.DELETE, record=None) for ref in gone}
    for ref, record in want.items():
        if ref not in have:
            changes[ref] = Edit(ref=ref, action=Action.CREATE, record=record)
        elif have[ref] != record:
            changes[ref] = Edit(ref=ref, action=Action.UPDATE, record=record, before=have[ref])
    after = {ref: record for ref, record in {**have, **want}.items() if ref not in gone}
    before = set(problems(have))
    new = [problem for problem in problems(after) if problem not in before]
    if new:
        raise Refused("with what the store holds the outcome would not be valid: " + "; ".join(new))
    units = _units(changes, _dependencies(changes, have, want))
    return ApplyPlan(
        batches=tuple(_pack(units, changes_max=changes_max, bytes_max=bytes_max)),
        left=() if prune else tuple(spoken),
        untouched=Counter(_SECTION[ref.kind] for ref in missing if _SECTION[ref.kind] not in wanted.sections),
    )


def problems(state: Mapping[Ref, Entry | None]) -> Iterator[str]:
    """What is not valid in a stored catalog; None stands for a record that can't be read, of which nothing is known."""
    models = {ref.name: record for ref, record in state.items() if isinstance(record, ModelSpec)}
    names = {ref.name for ref in state if ref.kind is Kind.MODEL}
    same: defaultdict[str, list[Ref]] = defaultdict(list)
    for ref, record in state.items():
        if ref.kind in _NAMED_BY_CLIENTS:
            same[fold(ref.name)].append(ref)
        for target in _targets(record):
            if target not in names:
                yield f"{_NOUN[ref.kind]} {show(ref.name)} needs model {show(target)}, which is not there"
    for refs in same.values():
        if len(refs) > 1:
            shown = ", ".join(f"{_NOUN[ref.kind]} {show(ref.name)}" for ref in sorted(refs, key=_order))
            yield f"these names are the same or nearly so: {shown}"
    for loop in fallback_loops(models):
        yield f"fallbacks go round in a loop: {' -> '.join(show(name) for name in loop)}"


def _flat(catalog: Catalog) -> dict[Ref, Entry]:
    return {
        **{Ref(Kind.ENGINE, name): engine for name, engine in catalog.engines.items()},
        **{Ref(Kind.MODEL, name): model for name, model in catalog.models.items()},
        **{Ref(Kind.ALIAS, name): alias for name, alias in catalog.aliases.items()},
    }


def _targets(record: Entry | None) -> tuple[str, ...]:
    """The models that a record names."""
    match record:
        case Alias():
            return (record.model,)
        case ModelSpec():
            return record.fallbacks
        case _:
            return ()


def _order(ref: Ref) -> tuple[str, str]:
    return ref.kind.value, ref.name


def _dependencies(
    changes: Mapping[Ref, Edit], have: Mapping[Ref, Entry | None], want: Mapping[Ref, Entry]
) -> dict[Ref, set[Ref]]:
    """Edit -> the changes that must not come after it.

    Models that stay as they are take part as steps that do nothing: without them an order could close a loop that runs
    through one of them.
    """
    before: dict[Ref, set[Ref]] = {ref: set() for ref in (*changes, *want)}
    dying: defaultdict[str, set[Ref]] = defaultdict(set)
    for ref, change in changes.items():
        if change.record is None and ref.kind in _NAMED_BY_CLIENTS:
            dying[fold(ref.name)].add(ref)
    for ref, record in want.items():
        # What is named must be there first, and must have its own new fallbacks first.
        before[ref] |= {Ref(Kind.MODEL, target) for target in _targets(record)} & before.keys()
        # A name must be free before somebody else takes it.
        if ref.kind in _NAMED_BY_CLIENTS:
            before[ref] |= dying[fold(ref.name)]
    for ref in changes:
        # Who names a model that goes must let go of it first.
        for target in _targets(have.get(ref)):
            model = Ref(Kind.MODEL, target)
            if model in changes and changes[model].record is None:
                before[model].add(ref)
    return before


def _units(changes: Mapping[Ref, Edit], before: Mapping[Ref, set[Ref]]) -> Iterator[tuple[Edit, ...]]:
    """The changes in an order that respects `before`; what depends on each other in a circle is one unit."""
    circles = _circles(before)
    unit_of = {ref: i for i, unit in enumerate(circles) for ref in unit}
    waits = [{unit_of[dep] for ref in unit for dep in before[ref]} - {i} for i, unit in enumerate(circles)]
    followers: defaultdict[int, set[int]] = defaultdict(set)
    for i, deps in enumerate(waits):
        for dep in deps:
            followers[dep].add(i)
    rank = [min(_rank(ref, changes.get(ref)) for ref in unit) for unit in circles]
    ready = [(rank[i], i) for i, deps in enumerate(waits) if not deps]
    heapq.heapify(ready)
    while ready:
        _, i = heapq.heappop(ready)
        unit = tuple(changes[ref] for ref in sorted(circles[i], key=_order) if ref in changes)
        if unit:
            yield unit
        for follower in followers[i]:
            waits[follower].discard(i)
            if not waits[follower]:
                heapq.heappush(ready, (rank[follower], follower))


def _rank(ref: Ref, change: Edit | None) -> tuple[int, str]:
    """What comes first where there is a choice: engines, models, aliases; then deletions the other way round."""
    place = (Kind.ENGINE, Kind.MODEL, Kind.ALIAS).index(ref.kind)
    return (5 - place if change is not None and change.record is None else place), ref.name


def _circles(before: Mapping[Ref, set[Ref]]) -> list[list[Ref]]:
    """The strongly connected parts of the graph (Tarjan's algorithm, without recursion)."""
    number: dict[Ref, int] = {}
    low: dict[Ref, int] = {}
    stack: list[Ref] = []
    stacked: set[Ref] = set()
    parts: list[list[Ref]] = []
    for start in before:
        steps: list[tuple[Ref, Iterator[Ref]]] = []
        at: Ref | None = start if start not in number else None
        while at is not None or steps:
            if at is not None:
                number[at] = low[at] = len(number)
                stack.append(at)
                stacked.add(at)
                steps.append((at, iter(sorted(before[at], key=_order))))
            node, rest = steps[-1]
            at = next(rest, None)
            if at is None:
                steps.pop()
                if steps:
                    low[steps[-1][0]] = min(low[steps[-1][0]], low[node])
                if low[node] == number[node]:
                    part: list[Ref] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                    stacked.difference_update(part)
                    parts.append(part)
            elif at in number:
                if at in stacked:
                    low[node] = min(low[node], number[at])
                at = None
    return parts


def _pack(units: Iterator[tuple[Edit, ...]], *, changes_max: int, bytes_max: int) -> Iterator[tuple[Edit, ...]]:
    batch: list[Edit] = []
    size = 0
    for unit in units:
        more = sum(_bytes(change) for change in unit)
        if len(unit) > changes_max or more > bytes_max:
            names = ", ".join(show(change.ref.name) for change in unit[:5])
            raise Refused(
                f"{len(unit)} changes ({more} bytes) depend on each other in a circle and do not fit one transaction "
                f"({changes_max} changes, {bytes_max} bytes): {names}…; apply them in two steps"
            )
        if batch and (len(batch) + len(unit) > changes_max or size + more > bytes_max):
            yield tuple(batch)
            batch, size = [], 0
        batch += unit
        size += more
    if batch:
        yield tuple(batch)


def _bytes(change: Edit) -> int:
    """What a change takes in a request, at most: three bytes for each byte of an escaped name, in compare and put."""
    record = b"" if change.record is None else msgspec.json.encode(change.record)
    return _EDIT_BYTES + 6 * len(change.ref.name.encode()) + len(record)
