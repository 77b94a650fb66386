"""A rehearsal: passes run on a copy of the tree while healthy agents answer them, until nothing is left to do.

The passes are the leader's own (`llmgw.core.reconcile`), so what is rehearsed is what would be decided. The agents are
better than real ones: every engine gets ready, every stop is confirmed, nothing takes time. Nodes without a session
stay away, and what can't be read stays unreadable. Where only time helps (a backoff, a node that is to be given up) the
clock is moved on to that moment.

Invariant: the tree that is handed in is only read. A rehearsal ends after a bounded number of rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec

from llmgw.core.census import take_census
from llmgw.core.ids import CountedIds, Ids
from llmgw.core.liveness import observe
from llmgw.core.plan import Delete, Put, Settings, View, WakeKey, Write
from llmgw.core.reading import is_live, report_of
from llmgw.core.reconcile import due, reconcile
from llmgw.core.record import Record
from llmgw.core.replica import GONE, Desired, Replica, Retire, ShardPhase, ShardReport
from llmgw.core.snapshot import Dirty, Index, Kind, Ref, Row
from llmgw.core.units import Now

ROUNDS_MAX: Final = 5000
"""Most rounds of a rehearsal, each a pass and its answers: a rollout takes about three a replica, a hundred new
replicas take one."""

TICK_S: Final = 0.001
"""How far the clock is moved beyond the moment that was waited for, so that no rounding leaves it just before."""


def copied(index: Index) -> Index:
    """Another index with the same rows, everything dirty and nothing kept."""
    copy = Index()
    for ref, row in index.rows():
        copy.swap(ref, row)
    copy.revision = index.revision
    copy.dirty = Dirty(everything=True)
    return copy


def serves(index: Index, replica: Replica | None) -> bool:
    """Whether a replica answers requests: it is in routing, its first shard is ready, and all its nodes are there."""
    if replica is None or not is_live(replica) or any(shard.node not in index.sessions for shard in replica.shards):
        return False
    reports = [report_of(index, replica, shard) for shard in replica.shards if shard.rank == 0]
    return any(report is not None and report.phase is ShardPhase.READY for report in reports)


class Rehearsal:
    """One rehearsal: `write` what is imagined, `run` it, then look at `index` and at what was seen on the way.

    Args:
        index: the tree as it is.
        now: this moment.
        ids: None for `CountedIds`.
        settings: of the leader; None for the defaults.
    """

    def __init__(self, index: Index, *, now: Now, ids: Ids | None = None, settings: Settings | None = None) -> None:
        self.index = copied(index)
        """The tree as far as it has come."""
        self.placed: dict[str, Replica] = {}
        """Id -> each replica that was placed on the way, as it was placed."""
        self.placed_in_s: dict[str, float] = {}
        """Id -> how many seconds of waiting had passed by then."""
        self.retired: dict[str, Replica] = {}
        """Id -> each replica that was taken down on the way, with why."""
        self.went_first: set[str] = set()
        """Ids of replicas that a rollout took down before what was to follow them was placed: there was no room."""
        self.dark: set[str] = set()
        """Models that served and at some moment did not."""
        self.rounds = 0
        self._start, self._now = now, now
        used = {*self.index.replicas, *self.index.assignments_of, *self.index.reports_of}
        self._ids = ids or CountedIds(used=frozenset(name.rpartition("-")[2] for name in used))
        self._settings = settings or Settings()
        self._view = View()
        self._wakes: dict[WakeKey, float] = {}
        self._asked = {*self.index.assignments, *self.index.reports}
        self._up: defaultdict[str, set[str]] = defaultdict(set)
        for replica in self.index.replicas.records():
            self._look(replica.model, replica.id)

    def write(self, writes: Iterable[Write]) -> None:
        """One revision, by whoever."""
        revision = self.index.revision + 1
        touched: set[tuple[str, str]] = set()
        for write in writes:
            before, record = self.index.row(write.ref), write.record if isinstance(write, Put) else None
            created = revision if before is None else before.create_revision
            row = None if record is None else Row(record=record, mod_revision=revision, create_revision=created)
            self.index.swap(write.ref, row)
            touched |= self._note(write.ref, record, None if before is None else before.record)
        self.index.revision = revision
        for model, replica in touched:
            self._look(model, replica)

    def run(self) -> bool:
        """Passes and answers until neither has anything to do and time changes nothing; False at `ROUNDS_MAX`."""
        for replica in list(self.index.replicas.records()):  # sessions may have gone
            self._look(replica.model, replica.id)
        while self.rounds < ROUNDS_MAX:
            self.rounds += 1
            self._pass()
            self._answer()
            if not self.index.dirty and not self._wait():
                return True
        return False

    def _pass(self) -> None:
        dirty = self.index.take_dirty()
        dirty.add(due(self._wakes, now=self._now))
        self._view = observe(self._view, self.index, now=self._now)
        plan = reconcile(self.index, dirty, now=self._now, view=self._view, ids=self._ids, settings=self._settings)
        before = set(self.retired)
        for group in plan.groups:
            self.write(group.writes)
        self._wakes |= plan.wake_mono_s
        self.index.dirty.add(plan.left)
        for replica in (self.retired[each] for each in sorted(self.retired.keys() - before)):
            if replica.retire is Retire.ROLLED and self._lacks(replica.model):
                self.went_first.add(replica.id)

    def _lacks(self, model: str) -> bool:
        census = take_census(
            self.index, model, spec=self.index.models.record(model), state=self.index.model_states.record(model)
        )
        return len(census.steady) < census.target

    def _wait(self) -> bool:
        """Move the clock to the next moment at which time alone may change something; False when there is none."""
        if not self._wakes:
            return False
        mono_s = max(self._now.mono_s, min(self._wakes.values())) + TICK_S
        self._now = Now(wall_s=self._now.wall_s + mono_s - self._now.mono_s, mono_s=mono_s)
        return True

    # --- agents

    def _answer(self) -> None:
        """Every agent that is there does what its orders say, at once."""
        asked, self._asked = self._asked, set()
        for name in sorted(asked):
            ref, node = Ref(Kind.SHARD, name), name.partition("/")[0]
            if node in self.index.sessions and ref not in self.index.corrupted:
                report, answer = self.index.reports.record(name), self._report(name)
                if answer is not None and answer != report:
                    self.write([Put(ref=ref, record=answer)])
                elif answer is None and report is not None:
                    self.write([Delete(ref=ref)])

    def _report(self, name: str) -> ShardReport | None:
        """What its node reports of a shard now; None: nothing (any more)."""
        row, report = self.index.assignments.get(name), self.index.reports.record(name)
        if row is None:
            # What ran without an order goes on doing so; what is over is forgotten with its order.
            return None if report is None or report.phase in GONE else report
        order = row.record
        if order is None or row.corrupt is not None:
            return report
        over = report is not None and report.phase in GONE
        if order.desired is Desired.STOPPED:
            phase = report.phase if report is not None and over else ShardPhase.STOPPED
        elif report is not None and over:
            return report  # final for this replica: what follows is the leader's to say
        else:
            phase = ShardPhase.HELD if order.desired is Desired.HELD else ShardPhase.READY
        if report is None:
            report = ShardReport(
                node=order.node,
                replica=order.replica,
                rank=order.rank,
                model=order.model,
                phase=phase,
                phase_at=self._now.wall_s,
            )
        at = report.phase_at if report.phase is phase else self._now.wall_s
        return msgspec.structs.replace(
            report, phase=phase, phase_at=at, assigned=True, assignment_rev=row.mod_revision, order=None
        )

    # --- what is seen on the way

    def _note(self, ref: Ref, record: Record | None, before: Record | None) -> set[tuple[str, str]]:
        """Keep what a change tells; returns (model, id) of the replicas whose service it may concern."""
        if ref.kind is Kind.ASSIGNMENT:
            self._asked.add(ref.name)
        if isinstance(record, Replica):
            if before is None:
                self.placed[record.id] = record
                self.placed_in_s[record.id] = self._now.mono_s - self._start.mono_s
            if record.retire is not None:
                self.retired.setdefault(record.id, record)
        replicas = {(each.model, each.id) for each in (record, before) if isinstance(each, Replica)}
        return replicas | {(each.model, each.replica) for each in (record, before) if isinstance(each, ShardReport)}

    def _look(self, model: str, replica: str) -> None:
        """Note whether a replica serves, and whether its model has stopped to. Asked after each revision."""
        up = self._up[model]
        if serves(self.index, self.index.replicas.record(replica)):
            up.add(replica)
        elif replica in up:
            up.discard(replica)
            if not up:
                self.dark.add(model)
