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

SIEVES_MAX: Final = 1024
SEATS_MAX: Final = 640_000
"""How many shapes are kept, and how many nodes have a seat in them together: those used last, as catalogs come and go.

A seat costs 0.2 to 0.5 kB, a node that is turned down 8 bytes; so 64 shapes that would do anywhere in a fleet of 10,000
nodes are kept, or 1024 for few nodes each.
"""

_KEPT: Final = "placement"
"""Under which name the ledger hangs on the index."""

Amount = tuple[float, str]
"""(bytes or infinity where they are not known, node)."""
Burden = tuple[int, int, str]
"""(claimed GPUs, claimed bytes, node)."""


class Figures(NamedTuple):
    """What of a node changes with every claim, as the keys it is sorted by.

    `since`: the tick since which the node is `alike_but_taken`. `room`: memory that may still be promised. `total`:
    memory in all. `burden`: how much is claimed. `gang_starts`: as in its inventory. `empty`: nothing runs there.
    `murky`: something runs there of which nobody knows how much memory it holds.
    """

    since: int
    room: Amount
    total: Amount
    burden: Burden
    gang_starts: int
    empty: bool
    murky: bool


def figures_of(node: NodeInventory, *, since: int) -> Figures:
    """The figures of a node."""
    total = node.memory_total_bytes
    return Figures(
        since=since,
        room=(free_bytes(node), node.name),
        total=(math.inf if total is None else total, node.name),
        burden=(claimed_gpus(node), claimed_bytes(node), node.name),
        gang_starts=node.gang_starts,
        empty=not node.holdings and not node.unclaimed,
        murky=bool(node.unaccounted) and total is not None,
    )


class Known(NamedTuple):
    """A node as it is now."""

    node: NodeInventory
    figures: Figures


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


class Traits(NamedTuple):
    """What the nodes of a cell have in common. For one node: `empty`; for a gang: `fabrics` and `builds`."""

    murky: bool
    cards: tuple[Cards, ...]
    empty: bool = False
    fabrics: tuple[str, ...] = ()
    builds: tuple[str | None, ...] = ()


class Cell:
    """Nodes with the same traits: their names, and what they have, each sorted. `burdens` is kept for gangs only."""

    __slots__ = ("_shortages", "burdens", "gang", "names", "rooms", "totals", "traits")

    def __init__(self, traits: Traits, members: Iterable[Figures], *, gang: bool) -> None:
        found = list(members)
        self._shortages: dict[int, Shortage | None] = {}
        self.traits = traits
        self.gang = gang
        self.names = sorted(each.room[1] for each in found)
        self.rooms = sorted(each.room for each in found)
        self.totals = sorted(each.total for each in found)
        self.burdens = sorted(each.burden for each in found) if gang else []

    def shortage(self, count: int) -> Shortage | None:
        """Why its nodes have too few free GPUs, None when they have enough: one answer for all, found once."""
        if count not in self._shortages:
            self._shortages[count] = shortage(self.traits.cards, count)
        return self._shortages[count]

    def add(self, new: Figures) -> None:
        """Take a node in."""
        insort(self.names, new.room[1])
        insort(self.rooms, new.room)
        insort(self.totals, new.total)
        if self.gang:
            insort(self.burdens, new.burden)

    def remove(self, old: Figures) -> None:
        """Let a node go that is in."""
        del self.names[bisect_left(self.names, old.room[1])]
        del self.rooms[bisect_left(self.rooms, old.room)]
        del self.totals[bisect_left(self.totals, old.total)]
        if self.gang:
            del self.burdens[bisect_left(self.burdens, old.burden)]

    def renew(self, old: Figures, new: Figures) -> None:
        """Note what has changed of a node that stays in."""
        if old.room != new.room:
            del self.rooms[bisect_left(self.rooms, old.room)]
            insort(self.rooms, new.room)
        if old.total != new.total:
            del self.totals[bisect_left(self.totals, old.total)]
            insort(self.totals, new.total)
        if self.gang and old.burden != new.burden:
            del self.burdens[bisect_left(self.burdens, old.burden)]
            insort(self.burdens, new.burden)


Seat = tuple[Cell, Figures]
"""In which cell a node is, and with what."""


class Sieve:
    """Every node judged for one shape.

    `refused`: constraint -> the nodes it turns down, sorted. `cells`: the others, by traits. `seats`: where each of
    these is. `tick`: up to where in the index's log.
    """

    def __init__(self, profile: Profile, wish: EngineSpec | None, nodes: Iterable[Known], *, tick: int) -> None:
        self.tick = tick
        self.wish = wish
        self.refused: dict[Constraint, list[str]] = {}
        self.seats: dict[str, Seat] = {}
        self.told: dict[object, dict[str, tuple[NodeInventory, Refusal]]] = {}
        """What was told last of the nearest misses, by who asked: to be told again while their nodes stay the same."""
        self._profile = profile
        self._gang = profile.nodes > 1
        by_traits: dict[Traits, list[Figures]] = {}
        for known in nodes:
            found = self._judge(known)
            if isinstance(found, Constraint):
                self.refused.setdefault(found, []).append(known.node.name)
            else:
                by_traits.setdefault(found, []).append(known.figures)
        for names in self.refused.values():
            names.sort()
        self.cells = {traits: Cell(traits, members, gang=self._gang) for traits, members in by_traits.items()}
        for cell in self.cells.values():
            self.seats |= {each.room[1]: (cell, each) for each in by_traits[cell.traits]}

    def update(self, name: str, known: Known | None) -> None:
        """Judge a node that changed since `tick`; None: it is there no more."""
        if known is None:
            self._leave(name)
            return
        seat, as_before = self.seats.get(name), known.figures.since <= self.tick
        if seat is None and as_before:
            return  # what is taken on a node has no part in why it was turned down
        found = self._judge(known) if seat is None or not as_before else self._traits_again(seat[0].traits, known)
        if seat is not None and found == seat[0].traits:
            seat[0].renew(seat[1], known.figures)
            self.seats[name] = seat[0], known.figures
        else:
            self._leave(name)
            self._enter(known, found)

    def _traits_again(self, traits: Traits, known: Known) -> Traits:
        """The traits of a node of which only what is taken has changed."""
        node, figures = known
        cards = cards_of(node.gpus or (), self._profile) if traits.cards else ()
        return Traits(figures.murky, cards, not self._gang and figures.empty, traits.fabrics, traits.builds)

    def _judge(self, known: Known) -> Constraint | Traits:
        node, figures = known
        found = admit(node, self._profile, self.wish)
        if isinstance(found, Refusal):
            return found.constraint
        if self._gang:
            return Traits(figures.murky, found.cards, False, found.fabrics, found.builds)
        return Traits(figures.murky, found.cards, figures.empty)

    def _enter(self, known: Known, found: Constraint | Traits) -> None:
        name = known.node.name
        if isinstance(found, Constraint):
            insort(self.refused.setdefault(found, []), name)
            return
        cell = self.cells.get(found)
        if cell is None:
            cell = self.cells[found] = Cell(found, [known.figures], gang=self._gang)
        else:
            cell.add(known.figures)
        self.seats[name] = cell, known.figures

    def _leave(self, name: str) -> None:
        seat = self.seats.pop(name, None)
        if seat is not None:
            cell, figures = seat
            cell.remove(figures)
            if not cell.names:
                del self.cells[cell.traits]
            return
        for names in self.refused.values():
            at = bisect_left(names, name)
            if at < len(names) and names[at] == name:
                del names[at]


class Ledger:
    """What hangs on one index: every node, who has which weights and replicas, and the sieves used last.

    `holders`: source -> nodes where the whole set of weights is. `replicas`: model -> node -> its live replicas there.
    Neither keeps what is empty. `judged`: how often a node was judged for a new sieve.
    """

    def __init__(self, index: Index) -> None:
        self.nodes: dict[str, Known] = {}
        self.holders: dict[str, set[str]] = {}
        self.replicas: dict[str, dict[str, int]] = {}
        self.judged = 0
        self._index = index
        self._tick: int | None = None
        self._sieves: dict[Shape, Sieve] = {}
        self._seats = 0

    def refresh(self) -> None:
        """Bring the nodes up to date."""
        index, tick = self._index, self._tick
        if tick == index.tick:
            return
        changed = None if tick is None else index.changed_nodes_since(tick)
        for name in {*index.nodes(), *self.nodes} if changed is None else changed:
            there = name in index.sessions or name in index.facts or name in index.node_states
            self._note(name, node_inventory(index, name) if there else None)
        self._tick = index.tick

    def _note(self, name: str, node: NodeInventory | None) -> None:
        known = self.nodes.pop(name, None)
        before = None if known is None else known.node
        if node is not None:
            same = known is not None and alike_but_taken(known.node, node)
            since = known.figures.since if known is not None and same else self._index.tick
            self.nodes[name] = Known(node, figures_of(node, since=since))
        had = frozenset[str]() if before is None else before.weights or frozenset()
        has = frozenset[str]() if node is None else node.weights or frozenset()
        if had != has:
            for source in had - has:
                self.holders[source].discard(name)
                if not self.holders[source]:
                    del self.holders[source]
            for source in has - had:
                self.holders.setdefault(source, set()).add(name)
        there = {} if before is None else before.live_replicas
        here = {} if node is None else node.live_replicas
        if there != here:
            for model in there.keys() - here.keys():
                del self.replicas[model][name]
                if not self.replicas[model]:
                    del self.replicas[model]
            for model, count in here.items():
                self.replicas.setdefault(model, {})[name] = count

    def sieve(self, profile: Profile, wish: EngineSpec | None) -> Sieve:
        """The sieve of a profile, as up to date as the nodes."""
        shape, tick = shape_of(profile, wish), self._index.tick
        sieve = self._sieves.pop(shape, None)
        self._seats -= 0 if sieve is None else len(sieve.seats)
        changed = None if sieve is None else self._index.changed_nodes_since(sieve.tick)
        if sieve is None or changed is None:
            sieve = Sieve(profile, wish, self.nodes.values(), tick=tick)
            self.judged += len(self.nodes)
        for name in changed or ():
            sieve.update(name, self.nodes.get(name))
        sieve.tick = tick
        while self._sieves and (len(self._sieves) >= SIEVES_MAX or self._seats + len(sieve.seats) > SEATS_MAX):
            self._seats -= len(self._sieves.pop(next(iter(self._sieves))).seats)
        self._sieves[shape] = sieve
        self._seats += len(sieve.seats)
        return sieve


def ledger_of(index: Index) -> Ledger:
    """What is kept with an index, up to date."""
    ledger = cast("Ledger", index.kept.setdefault(_KEPT, Ledger(index)))
    ledger.refresh()
    return ledger
