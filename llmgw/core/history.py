"""The invariants of what may follow what: a tree watched through its revisions. See `llmgw.core.invariants`.

A `Checker` is fed the changes of one revision at a time, as the store made them, and says what each one broke. It keeps
a tree of its own and trusts nobody's word: every claim that ends is looked up in what its node had reported before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from llmgw.core import handout
from llmgw.core.ids import shard_name
from llmgw.core.invariants import Violation, check, claimed_bytes
from llmgw.core.inventory import node_inventory
from llmgw.core.lately import Lately
from llmgw.core.liveness import LOST_PERIOD_S, LOST_SHARE
from llmgw.core.node import Liveness
from llmgw.core.reading import is_frozen, is_live
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    Replica,
    ReplicaShard,
    ShardPhase,
    ShardReport,
    confirms_stop,
    live_shard,
)
from llmgw.core.retirement import MAY_EMPTY, declared_gone, justified
from llmgw.core.routing import route
from llmgw.core.snapshot import Change, Index, Kind, Ref

LEADERS: Final = frozenset(kind for kind in Kind if kind.value.startswith("plan/"))
"""The kinds only a leader writes."""

HOLDS: Final = frozenset({ShardPhase.STARTING, ShardPhase.READY, ShardPhase.DRAINING, ShardPhase.STOPPING})
"""Phases in which processes may be there, so that memory and GPUs are held."""


@dataclass
class Checker:
    """Follows a tree revision by revision and says what each one broke.

    fenced: every revision that writes under plan/ must carry the head; off for plans applied without a committer.
    stops_on_exit: agents may stop their engines when they end themselves (`on_exit: stop`).
    """

    index: Index = field(default_factory=Index)
    fenced: bool = True
    stops_on_exit: bool = False

    stale: set[str] = field(default_factory=set)
    """Shards whose reports were made in a history that is gone: what their nodes say next may be anything."""

    undone: set[tuple[str, str]] = field(default_factory=set)
    """(node, store) of the sessions of that history: what was sent in it may land late, in the restored store."""

    lately: Lately = field(default_factory=Lately)

    def __post_init__(self) -> None:
        self.lately.late = self.fenced

    def reset(self, changes: Iterable[Change], *, revision: int) -> list[Violation]:
        """Another store, or one whose history is unknown: take it as it is."""
        self.undone = {(session.node, session.store) for session in self.index.sessions.records()}
        self.index = Index()
        self.lately = Lately(late=self.fenced)
        self.index.reset(changes, revision=revision)
        self.index.revision = revision
        self.stale = set(self.index.reports)
        return check(self.index)

    def advance(self, changes: Iterable[Change], *, revision: int) -> list[Violation]:
        """Fold in the changes of one revision; what it broke. The state afterwards is checked as well."""
        happened = list(changes)
        self.lately.note(self.index, happened)
        before = _Before(self.index, happened, self.lately)
        self.index.apply(happened, revision=revision)
        found: list[Violation] = []
        if any(change.ref.kind in LEADERS for change in happened):
            found += before.fence(self.index) if self.fenced else ()
            found += before.restored(self.index, undone=self.undone)
            found += before.claims(self.index)
            found += before.handed_out(self.index, self.lately)
            found += before.retired(self.index, self.lately)
            found += before.liveness(self.index)
        found += before.reports(self.index, stale=self.stale, stops_on_exit=self.stops_on_exit)
        self.stale -= before.reported.keys()
        return [*found, *check(self.index, around=[change.ref for change in happened])]


class _Before:
    """What must be remembered of a tree to judge the changes that are about to be made to it."""

    def __init__(self, index: Index, changes: list[Change], lately: Lately) -> None:
        self.changes, self._lately = changes, lately
        self.head, self.leader = index.head, index.leader
        self.replicas: dict[str, Replica | None] = {}
        self.orders: dict[str, Assignment | None] = {}
        self.fresh: set[str] = set()
        """Ids of replicas that nothing spoke of: no record, no order, no report."""
        self.unordered: set[str] = set()
        """Ids of replicas with a shard that nothing orders to run."""
        self.reported: dict[str, ShardReport | None] = {}
        self.states: dict[str, Liveness | None] = {}
        self.confirmed: set[str] = set()
        """Names of shards whose order to stop was confirmed, or whose machine was declared gone."""
        self.restoring = self._restoring(index)
        self.routes: dict[str, int] = {}
        """Model -> its routable replicas, of the models whose replicas change."""
        for change in changes:
            self._note(index, change.ref)

    @staticmethod
    def _restoring(index: Index) -> bool:
        fleet, meta = index.fleet, index.meta
        if fleet is None or fleet.record is None or meta is None or meta.record is None:
            return False
        return fleet.record.incarnation != meta.record.incarnation

    def _note(self, index: Index, ref: Ref) -> None:
        match ref.kind:
            case Kind.REPLICA:
                replica = self.replicas[ref.name] = index.replicas.record(ref.name)
                if (
                    index.row(ref) is None
                    and not index.assignments_of.get(ref.name)
                    and not index.reports_of.get(ref.name)
                ):
                    self.fresh.add(ref.name)
                if replica is not None:
                    self.routes[replica.model] = _routable(index, replica.model)
                for shard in () if replica is None else replica.shards:
                    name = shard_name(shard.node, ref.name, shard.rank)
                    self._note_shard(index, name)
                    order = index.assignments.record(name)
                    if order is None or order.desired is Desired.STOPPED:
                        self.unordered.add(ref.name)
            case Kind.ASSIGNMENT:
                self.orders[ref.name] = index.assignments.record(ref.name)
                self._note_shard(index, ref.name)
            case Kind.SHARD:
                self.reported[ref.name] = index.reports.record(ref.name)
            case Kind.NODE_STATE:
                state = index.node_states.record(ref.name)
                self.states[ref.name] = None if state is None else state.liveness
            case _:
                pass

    def _note_shard(self, index: Index, name: str) -> None:
        row, reports = index.assignments.get(name), self._lately.reports(index, name)
        stopping = row is not None and row.record is not None and row.record.desired is Desired.STOPPED
        order_rev = 0 if row is None else row.mod_revision
        confirmed = stopping and any(confirms_stop(report, order_rev=order_rev) for report in reports)
        if confirmed or declared_gone(index, name.partition("/")[0]):
            self.confirmed.add(name)

    def fence(self, after: Index) -> Iterator[Violation]:
        """4: the head moves with every write of a leader, by one, in the term of who leads."""
        if not any(change.ref.kind is Kind.HEAD for change in self.changes):
            yield Violation(number=4, what="a write under plan/ left plan/head as it was")
            return
        head = None if after.head is None else after.head.record
        count = 0 if self.head is None or self.head.record is None else self.head.record.commits
        if head is None or head.commits != count + 1:
            yield Violation(number=4, what=f"plan/head went from {count} to {None if head is None else head.commits}")
        term = None if self.leader is None else self.leader.create_revision
        if head is not None and head.term != term:
            yield Violation(number=4, what=f"term {head.term} wrote while term {term} reigned")

    def restored(self, after: Index, *, undone: set[tuple[str, str]]) -> Iterator[Violation]:
        """6: the rule for a restored store ends when every node has reported to it or is Lost, or by an operator."""
        if not self.restoring or self._restoring(after) or after.meta is None or after.meta.record is None:
            return
        incarnation = after.meta.record.incarnation
        recover = after.recover
        if recover is not None and recover.record is not None and recover.record.incarnation == incarnation:
            return
        for name in after.nodes():
            session, state = after.sessions.record(name), after.node_states.record(name)
            here = (session is not None and session.store == incarnation) or (name, incarnation) in undone
            lost = state is not None and state.liveness is Liveness.LOST
            if not here and not lost and not declared_gone(after, name):
                yield Violation(number=6, what=f"the store counts as adopted, and {name} has not reported to it")

    def claims(self, after: Index) -> Iterator[Violation]:
        """1 and 3: claims fit, appear with all their orders, and end confirmed."""
        grown: dict[str, int] = {}
        for name, old in self.replicas.items():
            new = after.replicas.record(name)
            for shard in () if old is None else old.shards:
                where = shard_name(shard.node, name, shard.rank)
                kept = live_shard(new, node=shard.node, rank=shard.rank)
                if not shard.released and kept is None and where not in self.confirmed:
                    what = f"the claim of {name}.{shard.rank} on {shard.node} ended unconfirmed"
                    yield Violation(number=3, what=what)
            for shard in () if new is None else new.shards:
                if live_shard(old, node=shard.node, rank=shard.rank) is None and not shard.released:
                    grown[shard.node] = grown.get(shard.node, 0) + (shard.claim.memory_bytes or 0)
                    yield from self._appeared(after, name, shard)
        for name, order in self.orders.items():
            if order is not None and name not in after.assignments and name not in self.confirmed:
                yield Violation(number=3, what=f"the order for {name} was deleted unconfirmed")
        for node, more in sorted(grown.items()):
            total, now = node_inventory(after, node).memory_total_bytes, claimed_bytes(after, node)
            if total is not None and now > total and more > 0:
                yield Violation(number=1, what=f"{now} bytes are promised on {node}, which has {total}")

    def _appeared(self, after: Index, name: str, shard: ReplicaShard) -> Iterator[Violation]:
        where = shard_name(shard.node, name, shard.rank)
        order = after.assignments.record(where)
        if order is None or order.claim != shard.claim:
            yield Violation(number=3, what=f"{name} appeared without its order for {shard.node}")
        if name not in after.secrets:
            yield Violation(number=3, what=f"{name} appeared without its secret")
        if self.restoring and self._restoring(after) and where in self.orders and where not in after.reports:
            yield Violation(number=3, what=f"{name} was placed before all nodes had reported to the restored store")

    def handed_out(self, after: Index, lately: Lately) -> Iterator[Violation]:
        """1 to 3: what is new was free, and orders stand by their claims."""
        for name in sorted(self.fresh):
            if (replica := after.replicas.record(name)) is not None:
                yield from handout.placed(after, replica, lately)
        for name, old in self.orders.items():
            if (order := after.assignments.record(name)) is not None and order != old:
                yield from handout.ordered(after, name, old=old, order=order, late=lately.late)

    def retired(self, after: Index, lately: Lately) -> Iterator[Violation]:
        """6: whatever leaves routing has a reason that holds, and something else serves."""
        for name, old in self.replicas.items():
            new = after.replicas.record(name)
            if old is None or not is_live(old) or (new is not None and is_live(new)):
                continue
            if self.restoring and self._restoring(after):
                yield Violation(number=6, what=f"{name} was retired before all nodes had reported")
            elif new is not None and not justified(after, lately, new, unordered=name in self.unordered):
                why = "nothing" if new.retire is None else new.retire.value
                yield Violation(number=6, what=f"{name} was retired for {why}, which does not hold")
        for model, count in self.routes.items():
            unwanted = any(spec is None or spec.scaling.min == 0 for spec in lately.models(after, model))
            if count == 0 or _routable(after, model) or unwanted:
                continue
            gone = [after.replicas.record(name) for name, old in self.replicas.items() if old and old.model == model]
            if not any(each is None or each.retire in MAY_EMPTY for each in gone):
                yield Violation(number=6, what=f"a commit left {model} without a route")

    def liveness(self, after: Index) -> Iterator[Violation]:
        """6: nobody is Lost while there, or more of them a minute than allowed."""
        fresh = [
            state
            for name, old in self.states.items()
            if (state := after.node_states.record(name)) is not None
            and state.liveness is Liveness.LOST
            and old is not Liveness.LOST
        ]
        for state in fresh:
            if state.name in after.sessions:
                yield Violation(number=6, what=f"{state.name} was declared Lost while it has a session")
        if fresh:
            at = max(state.since_at for state in fresh)
            lost = [s for s in after.node_states.records() if s.liveness is Liveness.LOST]
            recent = [s for s in lost if at - LOST_PERIOD_S < s.since_at <= at]
            if len(recent) > max(1, int(LOST_SHARE * len(after.node_states))):
                yield Violation(number=6, what=f"{len(recent)} nodes were declared Lost within a minute")

    def reports(self, after: Index, *, stale: set[str], stops_on_exit: bool) -> Iterator[Violation]:
        """3 and 5: nothing starts on what another still holds, nothing stops unasked but by its own failure."""
        for name, was in self.reported.items():
            report = after.reports.record(name)
            if report is None or name in stale:
                continue
            if _holds(report) and (was is None or not _holds(was)):
                yield from _crowded(after, report, known=was is not None)
            if was is None or report.phase is was.phase or stops_on_exit or declared_gone(after, report.node):
                continue
            row = after.assignments.get(name)
            orders = [report.order] if row is None else [row.record]
            ordered = any(order is not None and order.desired is Desired.STOPPED for order in orders)
            ordered = ordered or (row is not None and row.corrupt is not None)
            failing = report.phase is ShardPhase.STOPPING and report.reason
            if report.phase in _ENDS and was.phase not in _ENDS and not ordered and not failing:
                what = f"{name} went from {was.phase.value} to {report.phase.value} without an order"
                yield Violation(number=5, what=what)


_ENDS: Final = frozenset({ShardPhase.DRAINING, ShardPhase.STOPPING, ShardPhase.STOPPED})


def _holds(report: ShardReport) -> bool:
    """Whether processes of the shard may be there. One that is to start, and waits for room or a port, has none yet."""
    return report.phase in HOLDS and (report.phase is not ShardPhase.STARTING or report.pid is not None)


def _routable(index: Index, model: str) -> int:
    """How many replicas of a model a gateway could send requests to."""
    count = 0
    for each in index.replicas_of.get(model, ()):
        replica, secret = index.replicas.record(each), index.secrets.record(each)
        for shard in () if replica is None else replica.shards:
            report = index.reports.record(shard_name(shard.node, each, shard.rank))
            count += route(replica, report, None if secret is None else secret.key) is not None
    return count


def _crowded(index: Index, started: ShardReport, *, known: bool) -> Iterator[Violation]:
    """Whether a shard started on memory or a GPU that another shard of its node still holds.

    What runs by claims and orders alone may exceed a memory that shrank since; it was promised while there was room. So
    was what runs unassigned and was not `known` before, in a history that is gone.
    """
    node, total, held = started.node, node_inventory(index, started.node).memory_total_bytes, 0
    promised = True
    own = _claim_of(index, started)
    uuids = {gpu.uuid for gpu in own.gpus}
    for name in sorted(index.reports_on.get(node, ())):
        report = index.reports.record(name)
        if report is None or not _holds(report) or is_frozen(index, report.replica):
            continue
        claim = _claim_of(index, report)
        held += claim.memory_bytes or 0
        replica = index.replicas.record(report.replica)
        claimed = live_shard(replica, node=node, rank=report.rank) is not None or name in index.assignments
        promised = promised and claimed
        same = report.replica == started.replica and report.rank == started.rank
        if not same and (shared := sorted(uuids & {gpu.uuid for gpu in claim.gpus})):
            yield Violation(number=3, what=f"{started.replica} started on {shared[0]}, which {report.replica} holds")
    if total is not None and held > total and own.memory_bytes and not promised and (known or started.assigned):
        yield Violation(number=3, what=f"{started.replica} started on {node}, where {held} of {total} bytes are held")


def _claim_of(index: Index, report: ShardReport) -> Claim:
    """What a running shard holds: by its replica's record, its order, or what it reports to have been ordered."""
    shard = live_shard(index.replicas.record(report.replica), node=report.node, rank=report.rank)
    if shard is not None:
        return shard.claim
    order = index.assignments.record(shard_name(report.node, report.replica, report.rank)) or report.order
    return Claim() if order is None else order.claim
