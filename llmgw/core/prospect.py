"""One profile looked up in its sieve: which nodes have room for it, in order, and how many each constraint turns down.

Speed only, as `llmgw.core.sieve`: the questions how many GPUs and how much memory are answered for whole cells, and
the order of `llmgw.core.placement.rank` is walked from its beginning instead of sorting all that fits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import groupby, islice
from operator import itemgetter
from typing import Final, NamedTuple

from llmgw.core.candidates import Admission, Pool, judge, lonely
from llmgw.core.catalog import Profile
from llmgw.core.explain import DISTANCE, NEAREST_MAX, Constraint, Refusal
from llmgw.core.gang_ports import common, meet
from llmgw.core.inventory import NodeInventory
from llmgw.core.sieve import Amount, Burden, Cell, Sieve, Traits

FEW: Final = 256
"""Up to so many nodes with a model's weights are looked at one by one. Of more, some are as a rule met early on."""

ASKED_MAX: Final = 64
"""Profiles of one shape whose nearest misses are remembered: those that differ in name or amounts."""

Candidate = tuple[bool, int, float, str, str | None]
"""A node with room for a replica on one node: (empty, free GPUs, room, node, GPU class), in the order of `rank` as far
as the model plays no part in it. Thousands are made for one decision, so it is no class."""

_OF_MANY: Final = frozenset({Constraint.GANG, Constraint.GANG_PORTS})
"""Constraints that are judged over all nodes, so that no node tells whether they still hold."""


class Member(NamedTuple):
    """A node with room for a shard of a gang, in the order of `rank`."""

    failed_lately: bool
    claimed_gpus: int
    claimed_bytes: int
    replicas: int
    weights_missing: bool
    node: str


class Leaning(NamedTuple):
    """What a model makes of nodes. `holders`: those with its weights; `replicas`: node -> its live replicas there."""

    failed: AbstractSet[str]
    holders: AbstractSet[str]
    replicas: Mapping[str, int]


class Prospect:
    """What one profile meets in the fleet.

    `counts`: how many nodes each constraint turns down. `pools`: those that a gang can be drawn from.
    """

    def __init__(self, sieve: Sieve, profile: Profile) -> None:
        self.counts: dict[Constraint, int] = {each: len(names) for each, names in sieve.refused.items() if names}
        self.pools: list[Pool] = []
        self._sieve = sieve
        self._seats = sieve.seats
        self.profile = profile
        self._needed = profile.memory_bytes
        self._open: dict[Cell, int] = {}
        """Cells of which some have room -> from where on in `rooms`."""
        self._offers: dict[Cell, list[Pool]] = {}
        self._cells: dict[Pool, list[Cell]] = {}
        self._sizes: dict[Pool, int] = {}
        """How many nodes with room offer themselves to each pool."""
        self._held: AbstractSet[Pool] | None = None
        self._short: dict[Constraint, list[tuple[int, Cell]]] = {}
        """Cells with too few free GPUs, and how many too few."""
        self._tight: list[tuple[Cell, int, int]] = []
        """Cells of which memory turns some down: up to where in `totals`, and in `rooms`."""
        for cell in sieve.cells.values():
            self._meet(cell)
        if profile.nodes > 1:
            self._gather()

    # --- what turns nodes down

    def _meet(self, cell: Cell) -> None:
        count, nodes, murky = self.profile.gpus_per_node, len(cell.names), cell.traits.murky
        if count and (short := cell.shortage(count)) is not None:
            missing = 0 if short.total is None else count - (short.total if short.free is None else short.free)
            self._short.setdefault(short.constraint, []).append((missing, cell))
            self._note(short.constraint, nodes)
            return
        start = 0
        if self._needed is not None:
            small = bisect_left(cell.totals, (self._needed, ""))
            start = nodes if murky else bisect_left(cell.rooms, (self._needed, ""))
            self._note(Constraint.MEMORY_TOTAL, small)
            self._note(Constraint.UNACCOUNTED if murky else Constraint.MEMORY, start - small)
            if start:
                self._tight.append((cell, small, start))
        if start < nodes:
            self._open[cell] = start

    def _note(self, constraint: Constraint, count: int) -> None:
        if count:
            self.counts[constraint] = self.counts.get(constraint, 0) + count

    def _gather(self) -> None:
        """Make pools of what has room. Who has room, but not enough companions in any pool, is turned down as well."""
        for cell, start in self._open.items():
            traits = cell.traits
            offers = Admission(traits.builds, traits.fabrics, traits.cards).pools(self.profile)
            self._offers[cell] = offers
            for pool in offers:
                self._sizes[pool] = self._sizes.get(pool, 0) + len(cell.names) - start
                self._cells.setdefault(pool, []).append(cell)
        self.pools = [pool for pool, size in self._sizes.items() if size >= self.profile.nodes and self._meet_in(pool)]
        for constraint, cells in self._lonely().items():
            self._note(constraint, sum(len(cell.names) - self._open[cell] for cell in cells))

    def _meet_in(self, pool: Pool) -> bool:
        """Whether some nodes of a pool have gang ports in common; as a rule any have."""
        nodes = self.profile.nodes
        names = (name for cell in self._cells[pool] for _, name in _from(cell.rooms, self._open[cell]))
        first = self._ports(islice(names, nodes))
        return common(first) != 0 or meet([*first, *self._ports(names)], nodes) is not None

    def _ports(self, names: Iterable[str]) -> list[int]:
        return [self._seats[name][1].gang_starts for name in names]

    def _lonely(self) -> dict[Constraint, list[Cell]]:
        """Cells with room none of whose pools gives a gang, by what it lacks: nodes, or ports in common."""
        found: dict[Constraint, list[Cell]] = {}
        for cell, pools in self._offers.items():
            if not any(pool in self.pools for pool in pools):
                large = any(self._sizes[pool] >= self.profile.nodes for pool in pools)
                found.setdefault(Constraint.GANG_PORTS if large else Constraint.GANG, []).append(cell)
        return found

    def refusals(self, node_of: Callable[[str], NodeInventory]) -> list[Refusal]:
        """Why the nodes that miss by least do, the nearest first, as `llmgw.core.explain.nearest` orders them."""
        profile, told = self.profile, self._sieve.told
        ask = (profile.name, profile.nodes, profile.gpus_per_node, profile.memory_bytes)
        known = told.get(ask, {})
        found: dict[str, tuple[NodeInventory, Refusal]] = {}
        for name in self._nearest():
            node = node_of(name)
            before = known.get(name)
            if before is not None and before[0] is node and before[1].constraint not in _OF_MANY:
                found[name] = before
            else:
                found[name] = node, self._refusal(node)
        if len(told) > ASKED_MAX:
            told.clear()
        told[ask] = found
        return [refusal for _, refusal in found.values()]

    def _refusal(self, node: NodeInventory) -> Refusal:
        found = judge(node, self.profile, wish=self._sieve.wish)
        if isinstance(found, Refusal):
            return found
        return lonely(node, self.profile, pools=found.pools(self.profile), sizes=self._sizes)

    def _nearest(self) -> list[str]:
        found: list[str] = []
        for constraint in sorted(self.counts, key=DISTANCE.__getitem__):
            if len(found) < NEAREST_MAX:
                misses = heapq.nsmallest(NEAREST_MAX - len(found), self._misses(constraint))
                found += (name for _, name in misses)
        return found

    def _misses(self, constraint: Constraint) -> Iterator[tuple[float, str]]:
        """(what is missing, node) of those turned down by a constraint: at least the nearest few of them."""
        yield from ((0, name) for name in self._sieve.refused.get(constraint, ())[:NEAREST_MAX])
        for missing, cell in self._short.get(constraint, ()):
            yield from ((missing, name) for name in cell.names[:NEAREST_MAX])
        needed = self._needed or 0
        for cell, small, start in self._tight:
            murky = cell.traits.murky
            if constraint is Constraint.MEMORY_TOTAL:
                yield from ((needed - total, name) for total, name in _highest(cell.totals, small))
            elif constraint is Constraint.MEMORY and not murky and small < start:
                yield from ((needed - room, name) for room, name in self._roomiest(cell, small, start))
            elif constraint is Constraint.UNACCOUNTED and murky:
                yield from ((0, name) for _, name in _from(cell.totals, small))
        for cell in self._lonely().get(constraint, ()) if constraint in _OF_MANY else ():
            have = max(self._sizes[pool] for pool in self._offers[cell])
            missing = self.profile.nodes - have if constraint is Constraint.GANG else 0
            yield from ((missing, name) for _, name in _from(cell.rooms, self._open[cell]))

    def _roomiest(self, cell: Cell, small: int, start: int) -> list[Amount]:
        """Of the nodes with memory enough in all but too little left, those with most left; by the shorter way."""
        needed, seats = self._needed or 0, self._seats
        if len(cell.totals) - small < start:
            rooms = (seats[name][1].room for _, name in _from(cell.totals, small))
            tight = sorted(room for room in rooms if room[0] < needed)
            return _highest(tight, len(tight))
        return _highest(cell.rooms, start, lambda name: seats[name][1].total[0] >= needed)

    # --- a replica on one node

    def best(self, leaning: Leaning, want: int) -> list[tuple[str, str | None]]:
        """The first `want` nodes with room, best first, each with the class of GPUs that it would give."""
        failed, holders = leaning.failed, leaning.holders
        found: list[Candidate] = []
        for group in (
            self._with_weights(leaning, want),
            (each for each in self._in_order() if each[3] not in holders and each[3] not in failed),
            self._among(failed & holders),
            self._among(failed - holders),
        ):
            if len(found) < want:
                found += _spread(group, leaning.replicas, want - len(found))
        return [each[3:] for each in found]

    def _with_weights(self, leaning: Leaning, want: int) -> list[Candidate]:
        failed, holders, replicas = leaning
        if len(holders) > FEW:
            first = islice(self._in_order(), FEW)
            found = [each for each in first if each[3] in holders and each[3] not in failed]
            if sum(each[3] not in replicas for each in found) >= want:
                return found
        return self._among(holders - failed)

    def _among(self, names: AbstractSet[str]) -> list[Candidate]:
        """Of these nodes those with room, best first; one stands here for each class of its GPUs with enough free."""
        if not names:
            return []
        seats, needed = self._seats, self._needed or 0
        ways = {cell: [(cell.traits.empty, *each) for each in self._classes(cell.traits)] for cell in self._open}
        found: list[Candidate] = []
        for name in names:
            seat = seats.get(name)
            if seat is not None and (room := seat[1].room[0]) >= needed:
                for empty, free, gpu_class in ways.get(seat[0], ()):
                    found.append((empty, free, room, name, gpu_class))
        found.sort()
        return found

    def _classes(self, traits: Traits) -> list[tuple[int, str | None]]:
        """(how many are free, class) of the classes with GPUs enough; (0, None) where none are asked for."""
        count = self.profile.gpus_per_node
        return [(each.free, each.gpu_class) for each in traits.cards if each.free >= count] if count else [(0, None)]

    def _in_order(self) -> Iterator[Candidate]:
        """All nodes with room, best first."""
        levels: dict[tuple[bool, int], list[tuple[Cell, int, str | None]]] = {}
        for cell, start in self._open.items():
            for free, gpu_class in self._classes(cell.traits):
                levels.setdefault((cell.traits.empty, free), []).append((cell, start, gpu_class))
        for (empty, free), parts in sorted(levels.items(), key=lambda level: level[0]):
            streams = [_stream(empty, free, *part) for part in parts]
            yield from streams[0] if len(streams) == 1 else heapq.merge(*streams)

    # --- a gang

    def gang(self, pool: Pool, leaning: Leaning) -> tuple[list[Member], list[Member]]:
        """(the best members that one of the `pools` gives, best first; of its others at least the best)."""
        nodes = self.profile.nodes
        members = self._members(pool, leaning, nodes + 1)
        if common(self._ports(each.node for each in members[:nodes])):
            return members[:nodes], members[nodes:]
        members = self._members(pool, leaning, self._sizes[pool])
        chosen = meet(self._ports(each.node for each in members), nodes) or ()
        return [members[i] for i in chosen], [each for i, each in enumerate(members) if i not in chosen]

    def _members(self, pool: Pool, leaning: Leaning, want: int) -> list[Member]:
        """The first `want` nodes with room in a pool, best first."""
        if pool not in self._pools_of(leaning.holders):
            leaning = leaning._replace(holders=frozenset())
        burdens = [self._burdens(cell) for cell in self._cells[pool]]
        late: list[Member] = []
        found: list[Member] = []
        for burden, same in groupby(burdens[0] if len(burdens) == 1 else heapq.merge(*burdens), key=itemgetter(0, 1)):
            names = (name for _, _, name in same)
            if leaning.failed:
                here = list(names)
                late += (_member(burden, name, leaning) for name in here if name in leaning.failed)
                names = (name for name in here if name not in leaning.failed)
            found += _alike(burden, names, leaning, want - len(found))
            if len(found) == want:
                return found
        return [*found, *sorted(late)[: want - len(found)]]

    def _pools_of(self, holders: AbstractSet[str]) -> AbstractSet[Pool]:
        """The pools in which there may be one of these nodes."""
        if self._held is None and len(holders) <= FEW:
            cells = {seat[0] for name in holders if (seat := self._seats.get(name)) is not None}
            self._held = {pool for cell in cells for pool in self._offers.get(cell, ())}
        elif self._held is None:
            self._held = set(self.pools)
        return self._held

    def _burdens(self, cell: Cell) -> Iterable[Burden]:
        """The nodes of an open cell that have room, the emptiest first."""
        needed, seats = self._needed or 0, self._seats
        return cell.burdens if self._open[cell] == 0 else (x for x in cell.burdens if seats[x[2]][1].room[0] >= needed)

    def preference(self, pool: Pool, members: Iterable[Member]) -> int:
        """How far the pool's build is from being the best of its members' builds; 0 when it is the best of each."""
        return sum(self._seats[each.node][0].traits.builds.index(pool.build) for each in members)


def _stream(empty: bool, free: int, cell: Cell, start: int, gpu_class: str | None) -> Iterator[Candidate]:
    for room, name in _from(cell.rooms, start):
        yield (empty, free, room, name, gpu_class)


def _from(pairs: list[Amount], begin: int, end: int | None = None) -> Iterator[Amount]:
    """A part of a list, without a copy and without going through what lies before it."""
    return (pairs[i] for i in range(begin, len(pairs) if end is None else end))


def _spread(ranked: Iterable[Candidate], replicas: Mapping[str, int], want: int) -> list[Candidate]:
    """The first `want` in order, but the fewer replicas of the model a node has, the better."""
    fresh: list[Candidate] = []
    others: list[Candidate] = []
    for each in ranked:
        if len(fresh) == want:
            break
        (others if each[3] in replicas else fresh).append(each)
    others.sort(key=lambda each: replicas[each[3]])  # stable, so in order among equals
    return [*fresh, *others][:want]


def _alike(burden: tuple[int, int], names: Iterable[str], leaning: Leaning, want: int) -> list[Member]:
    """The first `want` of members with equal burden, from names in order. The search ends when none can be better."""
    _, holders, replicas = leaning
    ideal: list[str] = []
    plain: list[str] = []
    used: list[str] = []
    for name in names:
        if name in replicas:
            used.append(name)
        elif holders and name not in holders:
            plain.append(name)
        else:
            ideal.append(name)
            if len(ideal) == want:
                break
    best = [_member(burden, name, leaning) for name in (*ideal, *plain[: want - len(ideal)])]
    return best if len(best) == want else [*best, *sorted(_member(burden, name, leaning) for name in used)][:want]


def _member(burden: tuple[int, int], name: str, leaning: Leaning) -> Member:
    return Member(name in leaning.failed, *burden, leaning.replicas.get(name, 0), name not in leaning.holders, name)


def _highest(pairs: list[Amount], end: int, keep: Callable[[str], bool] = lambda _: True) -> list[Amount]:
    """Of the first `end` pairs those of the highest amounts, of equal ones the first names: at most `NEAREST_MAX`."""
    found: list[Amount] = []
    while end > 0 and len(found) < NEAREST_MAX:
        amount = pairs[end - 1][0]
        begin = bisect_left(pairs, (amount, ""), 0, end)
        same = (pair for pair in _from(pairs, begin, end) if keep(pair[1]))
        found += islice(same, NEAREST_MAX - len(found))
        end = begin
    return found
