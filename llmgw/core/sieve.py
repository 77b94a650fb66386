"""What placement keeps from one decision to the next, so that only nodes that changed are judged anew.

Speed only: what is found here is what judging every node (`llmgw.core.candidates`) finds, whatever was kept before.
Two observations carry it. How many GPUs and how much memory a profile asks for are the last questions, so the answers
to all others (`admit`) serve every profile of one `Shape`. And nodes that differ in nothing but name and memory can lie
together in one `Cell`, sorted, so that both questions are answered for all of them by a search.

Invariant: everything kept hangs on the index and is brought up to date from its log of changed nodes before it is used;
changes that a draft takes back are in that log as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final, NamedTuple, cast

from llmgw.core.candidates import admit, alike_but_taken, claimed_bytes, claimed_gpus, free_bytes
from llmgw.core.cards import Cards, Shortage, cards_of, shortage
from llmgw.core.catalog import EngineSpec, Profile
from llmgw.core.explain import Constraint, Refusal
from llmgw.core.inventory import NodeInventory, node_inventory
from llmgw.core.snapshot import Index

SIEVES_MAX: Final = 64
"""Shapes kept at a time, the ones used last: each costs some MB at 10,000 nodes, and catalogs come and go."""

_KEPT: Final = "placement"
"""Under which name the ledger hangs on the index."""

Amount = tuple[float, str]
"""(bytes or infinity where they are not known, node)."""
Load = tuple[int, int, str]
"""(claimed GPUs, claimed bytes, node)."""


class Figures(NamedTuple):
    """What of a node changes with every claim, as the keys it is sorted by.

    `since`: the tick since which the node is `alike_but_taken`. `room`: memory that may still be promised. `total`:
    memory in all. `load`: how much is claimed. `empty`: nothing runs there. `murky`: something runs there of which
    nobody knows how much memory it holds.
    """

    node: NodeInventory
    since: int
    room: Amount
    total: Amount
    load: Load
    empty: bool
    murky: bool


def figures_of(node: NodeInventory, *, before: Figures | None, tick: int) -> Figures:
    """The figures of a node that changed, or is new, at `tick`."""
    total = node.memory_total_bytes
    return Figures(
        node=node,
        since=before.since if before is not None and alike_but_taken(before.node, node) else tick,
        room=(free_bytes(node), node.name),
        total=(math.inf if total is None else total, node.name),
        load=(claimed_gpus(node), claimed_bytes(node), node.name),
        empty=not node.holdings and not node.unclaimed,
        murky=bool(node.unaccounted) and total is not None,
    )


class Shape(NamedTuple):
    """What `admit` looks at in a profile, and the wished version of its engine."""

    engine: str
    wish: EngineSpec | None
    selector: tuple[tuple[str, str], ...]
    gang: bool
    gpus: bool
    gpu_class: str | None
    gpu_memory_bytes: int | None


def shape_of(profile: Profile, wish: EngineSpec | None) -> Shape:
    """The shape of a profile."""
    return Shape(
        engine=profile.engine,
        wish=wish,
        selector=tuple(sorted(profile.node_selector.items())),
        gang=profile.nodes > 1,
        gpus=profile.gpus_per_node > 0,
        gpu_class=profile.gpu_class,
        gpu_memory_bytes=profile.gpu_memory_bytes,
    )


class Kind(NamedTuple):
    """What the nodes of a cell have in common. For one node: `empty`; for a gang: `fabrics` and `builds`."""

    murky: bool
    cards: tuple[Cards, ...]
    empty: bool = False
    fabrics: tuple[str, ...] = ()
    builds: tuple[str | None, ...] = ()


class Cell:
    """Nodes of one kind: their names, and what they have, each sorted. `loads` is kept for gangs only."""

    __slots__ = ("_shortages", "gang", "kind", "loads", "names", "rooms", "totals")

    def __init__(self, kind: Kind, members: Iterable[Figures], *, gang: bool) -> None:
        found = list(members)
        self._shortages: dict[int, Shortage | None] = {}
        self.kind = kind
        self.gang = gang
        self.names = sorted(each.node.name for each in found)
        self.rooms = sorted(each.room for each in found)
        self.totals = sorted(each.total for each in found)
        self.loads = sorted(each.load for each in found) if gang else []

    def shortage(self, count: int) -> Shortage | None:
        """Why its nodes have too few free GPUs, None when they have enough: one answer for all, found once."""
        if count not in self._shortages:
            self._shortages[count] = shortage(self.kind.cards, count)
        return self._shortages[count]

    def add(self, new: Figures) -> None:
        """Take a node in."""
        insort(self.names, new.node.name)
        insort(self.rooms, new.room)
        insort(self.totals, new.total)
        if self.gang:
            insort(self.loads, new.load)

    def remove(self, old: Figures) -> None:
        """Let a node go that is in."""
        del self.names[bisect_left(self.names, old.node.name)]
        del self.rooms[bisect_left(self.rooms, old.room)]
        del self.totals[bisect_left(self.totals, old.total)]
        if self.gang:
            del self.loads[bisect_left(self.loads, old.load)]

    def renew(self, old: Figures, new: Figures) -> None:
        """Note what has changed of a node that stays in."""
        if old.room != new.room:
            del self.rooms[bisect_left(self.rooms, old.room)]
            insort(self.rooms, new.room)
        if old.total != new.total:
            del self.totals[bisect_left(self.totals, old.total)]
            insort(self.totals, new.total)
        if self.gang and old.load != new.load:
            del self.loads[bisect_left(self.loads, old.load)]
            insort(self.loads, new.load)


Seat = tuple[Cell, Figures]
"""In which cell a node is, and with what."""


class Sieve:
    """Every node judged for one shape.

    `refused`: constraint -> the nodes it turns down, sorted. `cells`: the others, by kind. `seats`: where each of these
    is. `tick`: up to where in the index's log.
    """

    def __init__(self, profile: Profile, wish: EngineSpec | None, nodes: Iterable[Figures]) -> None:
        self.tick = 0
        self.refused: dict[Constraint, list[str]] = {}
        self.seats: dict[str, Seat] = {}
        self.told: dict[object, dict[str, tuple[NodeInventory, Refusal]]] = {}
        """What was told last of the nearest misses, by who asked: to be told again while their nodes stay the same."""
        self._profile = profile
        self.wish = wish
        self._gang = profile.nodes > 1
        self._turned_down: dict[str, tuple[Constraint, int]] = {}
        """Node -> why, and since when it is so."""
        kinds: dict[Kind, list[Figures]] = {}
        for figures in nodes:
            found = self._judge(figures)
            if isinstance(found, Constraint):
                self._turned_down[figures.node.name] = found, figures.since
                self.refused.setdefault(found, []).append(figures.node.name)
            else:
                kinds.setdefault(found, []).append(figures)
        for names in self.refused.values():
            names.sort()
        self.cells = {kind: Cell(kind, members, gang=self._gang) for kind, members in kinds.items()}
        for cell in self.cells.values():
            self.seats |= {each.node.name: (cell, each) for each in kinds[cell.kind]}

    def update(self, name: str, figures: Figures | None) -> None:
        """Judge a node that changed; None: it is there no more."""
        seat, why = self.seats.get(name), self._turned_down.get(name)
        if figures is None:
            self._leave(name)
        elif seat is not None:
            cell, before = seat
            found = self._judge(figures) if before.since != figures.since else self._kind_again(cell.kind, figures)
            if found == cell.kind:
                cell.renew(before, figures)
                self.seats[name] = cell, figures
            else:
                self._leave(name)
                self._enter(figures, found)
        elif why is None or why[1] != figures.since:
            self._leave(name)
            self._enter(figures, self._judge(figures))

    def _kind_again(self, kind: Kind, figures: Figures) -> Kind:
        """The kind of a node of which only what is taken has changed."""
        cards = cards_of(figures.node.gpus or (), self._profile) if kind.cards else ()
        return Kind(figures.murky, cards, not self._gang and figures.empty, kind.fabrics, kind.builds)

    def _judge(self, figures: Figures) -> Constraint | Kind:
        found = admit(figures.node, self._profile, self.wish)
        if isinstance(found, Refusal):
            return found.constraint
        if self._gang:
            return Kind(figures.murky, found.cards, False, found.fabrics, found.builds)
        return Kind(figures.murky, found.cards, figures.empty)

    def _enter(self, figures: Figures, found: Constraint | Kind) -> None:
        name = figures.node.name
        if isinstance(found, Constraint):
            self._turned_down[name] = found, figures.since
            insort(self.refused.setdefault(found, []), name)
            return
        cell = self.cells.get(found)
        if cell is None:
            cell = self.cells[found] = Cell(found, [figures], gang=self._gang)
        else:
            cell.add(figures)
        self.seats[name] = cell, figures

    def _leave(self, name: str) -> None:
        why, seat = self._turned_down.pop(name, None), self.seats.pop(name, None)
        if why is not None:
            names = self.refused[why[0]]
            del names[bisect_left(names, name)]
        if seat is not None:
            cell, figures = seat
            cell.remove(figures)
            if not cell.names:
                del self.cells[cell.kind]


class Ledger:
    """What hangs on one index: the figures of every node, who has which weights, and the sieves used last.

    `holders`: source -> nodes where the whole set of weights is. `judged`: how often a node was judged for a new sieve.
    """

    def __init__(self, index: Index) -> None:
        self.figures: dict[str, Figures] = {}
        self.holders: dict[str, set[str]] = {}
        self.judged = 0
        self._index = index
        self._tick: int | None = None
        self._sieves: dict[Shape, Sieve] = {}

    def refresh(self) -> None:
        """Bring the figures up to date."""
        index, tick = self._index, self._tick
        if tick == index.tick:
            return
        changed = None if tick is None else index.changed_nodes_since(tick)
        for name in {*index.nodes(), *self.figures} if changed is None else changed:
            there = name in index.sessions or name in index.facts or name in index.node_states
            self._note(name, node_inventory(index, name) if there else None)
        self._tick = index.tick

    def _note(self, name: str, node: NodeInventory | None) -> None:
        before = self.figures.pop(name, None)
        if node is not None:
            self.figures[name] = figures_of(node, before=before, tick=self._index.tick)
        had = frozenset[str]() if before is None else before.node.weights or frozenset()
        has = frozenset[str]() if node is None else node.weights or frozenset()
        if had != has:
            for source in had - has:
                self.holders[source].discard(name)
                if not self.holders[source]:
                    del self.holders[source]
            for source in has - had:
                self.holders.setdefault(source, set()).add(name)

    def sieve(self, profile: Profile, wish: EngineSpec | None) -> Sieve:
        """The sieve of a profile, as up to date as the figures."""
        shape = shape_of(profile, wish)
        sieve = self._sieves.pop(shape, None)
        changed = None if sieve is None else self._index.changed_nodes_since(sieve.tick)
        if sieve is None or changed is None:
            sieve = Sieve(profile, wish, self.figures.values())
            self.judged += len(self.figures)
        for name in changed or ():
            sieve.update(name, self.figures.get(name))
        sieve.tick = self._index.tick
        self._sieves[shape] = sieve
        if len(self._sieves) > SIEVES_MAX:
            del self._sieves[next(iter(self._sieves))]
        return sieve


def ledger_of(index: Index) -> Ledger:
    """What is kept with an index, up to date."""
    ledger = cast("Ledger", index.kept.setdefault(_KEPT, Ledger(index)))
    ledger.refresh()
    return ledger
