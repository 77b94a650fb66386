"""The tree as the core sees it: typed tables folded from the mirror's changes, and which parts are dirty.

The `Index` is a fold: the same changes in any batching give the same tables, and `Index` of a whole listing equals the
`Index` of the history that led to it. It holds no opinion; placement and reconcile read it. A corrupt value is not an
absent one: the row keeps its last good record (None if there never was one) and says why it is corrupt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, cast

import msgspec

from llmgw.core.catalog import Alias, EngineSpec, ModelSpec, NodeSpec
from llmgw.core.ids import split_shard_name
from llmgw.core.node import Facts, Fleet, NodeState, Session
from llmgw.core.record import Generation, Head, Leader, Record, Recover, StoreMeta
from llmgw.core.replica import Assignment, EngineSecret, ModelState, Replica, ShardReport, live_shard
from llmgw.core.standing import Standing
from llmgw.core.tree import RECORDS, Change, Kind, Ref, Row, Table

__all__ = ["CHANGED_MIN", "RECORDS", "Change", "Dirty", "Index", "Kind", "Ref", "Rest", "Row", "Table"]

CHANGED_MIN: Final = 1000
"""The last changes are known of at least so many nodes, and of twice as many as have a state: nodes may come and go."""

_DIRTIES_MODEL = frozenset({Kind.MODEL, Kind.MODEL_STATE})
_DIRTIES_NODE = frozenset({Kind.NODE_SPEC, Kind.NODE_STATE, Kind.SESSION, Kind.FACTS})
_NAMED_BY_SHARD = frozenset({Kind.ASSIGNMENT, Kind.SHARD})
_DIRTIES_EVERYTHING = frozenset({Kind.META, Kind.RECOVER, Kind.ENGINE})


class Rest(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Where a look at everything goes on: after the node of that name, or (`models`: the nodes are done) that model."""

    models: bool = False
    after: str = ""


@dataclass(kw_only=True)
class Dirty:
    """What changed since the last pass: models and nodes by name, `fleet` where it concerns none of them by itself.

    What a node is concerns the models that have replicas there; what it holds, only those that wait for room.
    `short`: models that were looked at, but not all that they lack was tried -> how many passes in a row have not come
    to it. `everything` after a reset or a global change: all is to be looked at, however many passes that takes.
    `rest`: such a look is under way, and this is what it has not come to yet.
    """

    models: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    short: dict[str, int] = field(default_factory=dict)
    fleet: bool = False
    everything: bool = False
    rest: Rest | None = None

    def __bool__(self) -> bool:
        named = self.models or self.nodes or self.short
        return self.everything or self.fleet or self.rest is not None or bool(named)

    def add(self, other: Dirty) -> None:
        """Take in what `other` says is dirty; `other` stays as it is."""
        self.models |= other.models
        self.nodes |= other.nodes
        self.short |= {name: max(waited, self.short.get(name, 0)) for name, waited in other.short.items()}
        self.fleet = self.fleet or other.fleet
        self.everything = self.everything or other.everything
        rests = [rest for rest in (self.rest, other.rest) if rest is not None]
        self.rest = min(rests) if rests else None


class Index:
    """The decoded tree below `/llmgw/` at `revision`, with the few joins that placement and reconcile need.

    Not thread-safe; owned by one task. `dirty` collects until `take_dirty`.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.dirty = Dirty(everything=True)
        self._tables: dict[Kind, Table[Record]] = {kind: Table() for kind in Kind}
        # Typed views of the tables. One cast each, in one place: RECORDS says which type a kind holds.
        self.models: Final = cast("Table[ModelSpec]", self._tables[Kind.MODEL])
        self.aliases: Final = cast("Table[Alias]", self._tables[Kind.ALIAS])
        self.engines: Final = cast("Table[EngineSpec]", self._tables[Kind.ENGINE])
        self.node_specs: Final = cast("Table[NodeSpec]", self._tables[Kind.NODE_SPEC])
        self.replicas: Final = cast("Table[Replica]", self._tables[Kind.REPLICA])
        self.assignments: Final = cast("Table[Assignment]", self._tables[Kind.ASSIGNMENT])
        self.secrets: Final = cast("Table[EngineSecret]", self._tables[Kind.SECRET])
        self.node_states: Final = cast("Table[NodeState]", self._tables[Kind.NODE_STATE])
        self.model_states: Final = cast("Table[ModelState]", self._tables[Kind.MODEL_STATE])
        self.sessions: Final = cast("Table[Session]", self._tables[Kind.SESSION])
        self.facts: Final = cast("Table[Facts]", self._tables[Kind.FACTS])
        self.reports: Final = cast("Table[ShardReport]", self._tables[Kind.SHARD])
        self.corrupted: set[Ref] = set()
        """Every place whose present value can't be read."""
        self.standing = Standing()
        """What concerns more than one node or model."""
        self.memo: dict[str, object] = {}
        """Node -> what `llmgw.core.inventory` derived from that node alone; dropped with whatever dirties the node."""
        self.memo_before: dict[str, object] | None = None
        """While a `Draft` is under way: what `memo` held of the nodes it has touched, to hold again when it is over."""
        self.kept: dict[str, object] = {}
        """What placement derived from many nodes at once, by whatever name it gives it; see `changed_nodes_since`."""
        self.tick = 0
        """Counts changes of nodes, those taken back included: where `changed_nodes_since` goes on from."""
        self._changed: dict[str, int] = {}
        """Node -> the tick of its last change; the latest change stands last."""
        self._forgotten = 0
        """Of changes up to this tick some nodes are no longer known."""
        self.replicas_of: defaultdict[str, set[str]] = defaultdict(set)
        """Model name -> ids of its replicas."""
        self.replicas_on: defaultdict[str, set[str]] = defaultdict(set)
        """Node -> ids of the replicas with a shard there, released ones included."""
        self.assignments_on: defaultdict[str, set[str]] = defaultdict(set)
        """Node -> names of its assignments."""
        self.assignments_of: defaultdict[str, set[str]] = defaultdict(set)
        """Replica id -> names of its assignments."""
        self.reports_on: defaultdict[str, set[str]] = defaultdict(set)
        """Node -> names of its shard reports."""
        self.reports_of: defaultdict[str, set[str]] = defaultdict(set)
        """Replica id -> names of its shard reports."""
        self.forming: set[str] = set()
        """Ids of the replicas that span nodes and are on their way to being ready for the first time."""

    @property
    def meta(self) -> Row[StoreMeta] | None:
        return cast("Row[StoreMeta] | None", self._tables[Kind.META].get(""))

    @property
    def leader(self) -> Row[Leader] | None:
        return cast("Row[Leader] | None", self._tables[Kind.LEADER].get(""))

    @property
    def head(self) -> Row[Head] | None:
        return cast("Row[Head] | None", self._tables[Kind.HEAD].get(""))

    @property
    def fleet(self) -> Row[Fleet] | None:
        return cast("Row[Fleet] | None", self._tables[Kind.FLEET].get(""))

    @property
    def recover(self) -> Row[Recover] | None:
        return cast("Row[Recover] | None", self._tables[Kind.RECOVER].get(""))

    @property
    def generation(self) -> Row[Generation] | None:
        return cast("Row[Generation] | None", self._tables[Kind.GENERATION].get(""))

    def row(self, ref: Ref) -> Row[Record] | None:
        """The row at `ref`, None when the key is absent."""
        return self._tables[ref.kind].get(ref.name)

    def rows(self) -> Iterator[tuple[Ref, Row[Record]]]:
        """Every row, by kind and name."""
        for kind in Kind:
            for name in self._tables[kind].names():
                yield Ref(kind, name), self._tables[kind][name]

    def nodes(self) -> list[str]:
        """Every node that has a session, facts or a state, sorted. A mere `spec/nodes` entry is not a node."""
        return list(self.standing.nodes)

    def changed_nodes_since(self, tick: int) -> list[str] | None:
        """Nodes of which anything changed after `tick`, each once, the latest first; None: too long ago, so all.

        Whoever keeps something derived from nodes notes `Index.tick` with it. A change that a `Draft` takes back counts
        once more, so what was derived in between is found stale. A node may be there no longer.
        """
        if tick < self._forgotten:
            return None
        return list(takewhile(lambda name: self._changed[name] > tick, reversed(self._changed)))

    def corrupt(self) -> list[tuple[Ref, str]]:
        """Every place whose present value can't be read, with the reason."""
        found = sorted(self.corrupted, key=lambda ref: (ref.kind.value, ref.name))
        return [(ref, self._tables[ref.kind][ref.name].corrupt or "") for ref in found]

    def reset(self, changes: Iterable[Change], *, revision: int) -> None:
        """Start over from a whole listing at `revision`. Last good records survive where the key is corrupt now.

        What stands there just so is left alone, and with it all that was derived from it: a listing is made now and
        then merely to be sure.
        """
        present = list(changes)
        kept = {change.ref for change in present}
        gone = [Change(ref=ref, mod_revision=revision) for ref, _ in self.rows() if ref not in kept]
        new = [change for change in present if self._row(change) != self.row(change.ref)]
        self.apply([*gone, *new], revision=revision)
        self.revision = revision
        self.dirty.everything = True

    def apply(self, changes: Iterable[Change], *, revision: int) -> None:
        """Fold in changes in the order they happened, up to `revision`."""
        for change in changes:
            self._set(change)
        self.revision = max(self.revision, revision)

    def take_dirty(self) -> Dirty:
        """What is dirty since the last call; starts a new, clean set."""
        dirty, self.dirty = self.dirty, Dirty()
        return dirty

    def _set(self, change: Change) -> None:
        self.swap(change.ref, None if change.deleted else self._row(change))

    def _row(self, change: Change) -> Row[Record]:
        """The row that a change which is no deletion leaves."""
        before = self.row(change.ref)
        kept = None if before is None else before.record
        return Row(
            record=kept if change.corrupt is not None else change.record,
            mod_revision=change.mod_revision,
            create_revision=change.create_revision,
            corrupt=change.corrupt,
        )

    def swap(self, ref: Ref, row: Row[Record] | None) -> Row[Record] | None:
        """Put `row` at `ref` (None: remove what is there) and return what it replaces; marks and joins follow."""
        table = self._tables[ref.kind]
        before = table.get(ref.name)
        if row is not None:
            table[ref.name] = row
        elif before is not None:
            del table[ref.name]
        old, new = (None if each is None else each.record for each in (before, row))
        unreadable = row is not None and row.corrupt is not None
        if unreadable or ref in self.corrupted:
            (self.corrupted.add if unreadable else self.corrupted.discard)(ref)
            if ref.kind in _DIRTIES_NODE:
                self.dirty.models |= self._models_on(ref.name)
            else:  # concerns more than the last good record tells, if there ever was one
                self.dirty.everything = True
        self._mark(ref, old, new)
        self._join(ref, old, new, present=row is not None)
        self._stand(ref, old, new)
        return before

    def _mark(self, ref: Ref, *records: Record | None) -> None:
        dirty, nodes = self.dirty, set[str]()
        if ref.kind in _DIRTIES_MODEL:
            dirty.models.add(ref.name)
        elif ref.kind in _DIRTIES_NODE:
            nodes.add(ref.name)
            dirty.models |= set() if _same_to_models(records) else self._models_on(ref.name)
        elif ref.kind in _DIRTIES_EVERYTHING or (ref.kind is Kind.GENERATION and records[0] is None):
            dirty.everything = True
        elif ref.kind is Kind.FLEET:
            dirty.fleet = True
            own = "" if self.meta is None or self.meta.record is None else self.meta.record.incarnation
            stores = {record.incarnation if isinstance(record, Fleet) else own for record in records}
            dirty.everything = dirty.everything or len(stores) > 1
        elif ref.kind is Kind.SECRET:
            records = (self.replicas.record(ref.name),)
        elif ref.kind in _NAMED_BY_SHARD and (parts := split_shard_name(ref.name)) is not None:
            nodes.add(parts[0])
            records = (*records, self.replicas.record(parts[1]))
        elif ref.kind is Kind.REPLICA:
            # What nobody can read still concerns the nodes and the model that its orders and reports speak of.
            names = {*self.assignments_of.get(ref.name, ()), *self.reports_of.get(ref.name, ())}
            nodes.update(name.partition("/")[0] for name in names)
            records = (*records, *(self.assignments.record(name) for name in names))
        for record in records:
            if isinstance(record, Replica):
                nodes.update(shard.node for shard in record.shards)
            if isinstance(record, (Replica, Assignment, ShardReport)):
                dirty.models.add(record.model)
        dirty.nodes |= nodes
        for node in nodes:
            self._touch(node)

    def _models_on(self, node: str) -> set[str]:
        """Models with a replica on a node."""
        there = (self.replicas.record(each) for each in self.replicas_on.get(node, ()))
        return {replica.model for replica in there if replica is not None}

    def _touch(self, node: str) -> None:
        """Something of the node changed: what was derived from it is stale."""
        dropped = self.memo.pop(node, None)
        if self.memo_before is not None:
            self.memo_before.setdefault(node, dropped)
        self._changed.pop(node, None)
        self.tick += 1
        self._changed[node] = self.tick
        if len(self._changed) > CHANGED_MIN + 2 * len(self.node_states):
            name = next(iter(self._changed))
            self._forgotten = self._changed.pop(name)

    def _join(self, ref: Ref, old: Record | None, new: Record | None, *, present: bool) -> None:
        match ref.kind:
            case Kind.REPLICA:
                for record, keep in ((old, False), (new if present else None, True)):
                    if isinstance(record, Replica):
                        _link(self.replicas_of, record.model, ref.name, keep=keep)
                        for shard in record.shards:
                            _link(self.replicas_on, shard.node, ref.name, keep=keep)
                self.forming.discard(ref.name)
                if isinstance(new, Replica) and present and new.is_forming:
                    self.forming.add(ref.name)
            case Kind.ASSIGNMENT | Kind.SHARD:
                parts = split_shard_name(ref.name)
                if parts is None:
                    return
                orders = ref.kind is Kind.ASSIGNMENT
                _link(self.assignments_on if orders else self.reports_on, parts[0], ref.name, keep=present)
                _link(self.assignments_of if orders else self.reports_of, parts[1], ref.name, keep=present)
            case _:
                pass

    def _stand(self, ref: Ref, old: Record | None, new: Record | None) -> None:
        """Bring `standing` up to date; the tables and joins are."""
        name, standing = ref.name, self.standing
        match ref.kind:
            case Kind.SESSION | Kind.FACTS | Kind.NODE_STATE:
                known = name in self.facts or name in self.node_states
                standing.node(name, known=known, session=name in self.sessions)
                if ref.kind is Kind.NODE_STATE:
                    standing.node_state(name, cast("NodeState | None", old), cast("NodeState | None", new))
            case Kind.NODE_SPEC:
                standing.node_spec(name, cast("NodeSpec | None", new))
            case Kind.MODEL_STATE:
                standing.model_state(name, cast("ModelState | None", new))
            case Kind.SHARD:
                standing.report(name, cast("ShardReport | None", new))
            case Kind.ASSIGNMENT:
                standing.order(name, orphan=self._is_orphan(name))
            case Kind.REPLICA:
                standing.replica(name, unread=name in self.replicas and new is None)
                for each in self.assignments_of.get(name, ()):
                    standing.order(each, orphan=self._is_orphan(each))
            case _:
                pass

    def _is_orphan(self, name: str) -> bool:
        """Whether an order is there, readable, and its replica's record does not say that it holds anything there."""
        order = self.assignments.record(name)
        if order is None:
            return False
        return live_shard(self.replicas.record(order.replica), node=order.node, rank=order.rank) is None


def _same_to_models(records: tuple[Record | None, ...]) -> bool:
    """Whether a node's old and new record say the same of what its replicas depend on: its engines and GPUs.

    The rest of its facts (memory, labels, weights …) matters to what may come there, not to what is.
    """
    facts = [record for record in records if isinstance(record, Facts)]
    return len(facts) == 2 and facts[0].engines == facts[1].engines and facts[0].gpus == facts[1].gpus


def _link(joins: defaultdict[str, set[str]], key: str, name: str, *, keep: bool) -> None:
    """Add or drop `name` under `key`; an empty set leaves no key behind, so that two folds compare equal."""
    if keep:
        joins[key].add(name)
    elif key in joins:
        joins[key].discard(name)
        if not joins[key]:
            del joins[key]
