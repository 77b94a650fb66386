"""Which nodes are there: Ready, Unreachable, Lost, Returning; and when to doubt that so many are gone at once.

Pure and memoryless: what it knows of the past stands in `plan/nodes` (kept by whoever leads) and in the `View` (this
leader's own observations, which the next one starts anew).

Invariant: a node is Lost only when its session has been gone for `lost_after_s` *and* this leader itself has seen it
gone for a grace of two session TTLs, outside the guard, and at most one in a hundred a minute. Unreachable by itself
changes nothing but where new replicas may go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from llmgw.core import gang
from llmgw.core.node import Guard, Liveness, NodeState, Session
from llmgw.core.plan import Settings, View
from llmgw.core.replica import GONE, Desired, confirms_stop
from llmgw.core.snapshot import Index
from llmgw.core.units import Now

GRACE_TTLS: Final = 2
"""How many session TTLs a leader watches by itself before it doubts or declares anything: one for a session to lapse,
one for its agent to come back."""

LOST_PERIOD_S: Final = 60.0
LOST_SHARE: Final = 0.01
"""At most max(1, this share) of the nodes are declared Lost in any `LOST_PERIOD_S`."""

GUARD_SHARE: Final = 1 / 3
GUARD_NODES_MIN: Final = 2
"""The guard is on while more than this share of the nodes not Lost, and at least so many, are Unreachable."""

GUARD_NODES: Final = "too many nodes went away at once"
GUARD_WRITES: Final = "this leader's own writes fail or are refused"


def observe(view: View, index: Index, *, now: Now) -> View:
    """`view` brought up to date: since when each known node is seen without a session, and how far gangs have come."""
    absent = index.standing.absent
    if absent != view.absent_since.keys():
        since = {name: view.absent_since.get(name, now.mono_s) for name in absent}
        view = msgspec.structs.replace(view, absent_since=since)
    return gang.observe(view, index, now=now)


def settled(index: Index, node: str, *, incarnation: str) -> bool:
    """Whether a node that was away may take work again.

    Its full report, written in one transaction with a session for this store's incarnation, is here; every order to
    stop is confirmed; and nothing runs there that nobody has answered yet.
    """
    session = index.sessions.record(node)
    if session is None or session.store != incarnation:
        return False
    for name in index.assignments_on.get(node, ()):
        row = index.assignments[name]
        if row.record is None:
            return False
        report = index.reports.record(name)
        if row.record.desired is Desired.STOPPED and not confirms_stop(report, order_rev=row.mod_revision):
            return False
    for name in index.reports_on.get(node, ()):
        report = index.reports.record(name)
        if report is None or (not report.assigned and report.phase not in GONE and name not in index.assignments):
            return False
    return True


def next_state(
    name: str,
    *,
    state: NodeState | None,
    session: Session | None,
    reported: bool,
    settled: bool,
    lose: bool,
    now: Now,
) -> NodeState:
    """What a node is now.

    Args:
        name: the node.
        state: what it was; None for one never seen before.
        session: its session; None when there is none.
        reported: its session's full report was made for this incarnation of the store.
        settled: it may take work again (`settled`).
        lose: it may be declared Lost now, if it is Unreachable.
        now: this moment.
    """
    was = None if state is None else state.liveness
    liveness: Liveness
    if session is None:
        if was is Liveness.LOST or (was is Liveness.UNREACHABLE and not lose):
            liveness = was
        else:
            liveness = Liveness.LOST if was is Liveness.UNREACHABLE else Liveness.UNREACHABLE
    else:
        stayed = state is not None and (state.lease, state.boot_id) == (session.lease, session.boot_id)
        ready = settled or (was is Liveness.READY and stayed and reported)
        liveness = Liveness.READY if ready else Liveness.RETURNING
    fresh = state is None or liveness is not was
    return NodeState(
        name=name,
        liveness=liveness,
        since_at=now.wall_s if fresh or state is None else state.since_at,
        reason=_REASONS[liveness],
        boot_id=session.boot_id if session is not None else (None if state is None else state.boot_id),
        lease=session.lease if session is not None else (None if state is None else state.lease),
    )


_REASONS: Final = {
    Liveness.READY: "",
    Liveness.UNREACHABLE: "its session ended",
    Liveness.LOST: "its session ended and did not come back in time",
    Liveness.RETURNING: "back, but its full report or the confirmation of a stop order is missing",
}


def lost_in_s(state: NodeState, *, now: Now, view: View, settings: Settings) -> float:
    """Seconds until an Unreachable node is due to be Lost; zero or less when it is.

    Wall time since it was first missed carries over from leader to leader, but may step; so this leader must have seen
    it gone for the grace itself, and its own observation alone is enough once it lasted `lost_after_s`.
    """
    own_s = now.mono_s - view.absent_since.get(state.name, now.mono_s)
    grace_s = GRACE_TTLS * settings.session_ttl_s - own_s
    after_s = settings.lost_after_s - max(own_s, now.wall_s - state.since_at)
    return max(grace_s, after_s)


def guard_by(nodes: int, *, unreachable: int, old: Guard, now: Now, view: View, settings: Settings) -> Guard:
    """The guard by how many nodes count (not Lost, not released), and how many of these are Unreachable."""
    if writes_fail_for_s(now=now, view=view, settings=settings) > 0:
        return _guard(old, reason=GUARD_WRITES, now=now)
    if unreachable >= GUARD_NODES_MIN and unreachable > GUARD_SHARE * nodes:
        return _guard(old, reason=GUARD_NODES, now=now, unreachable=unreachable, nodes=nodes)
    return Guard()


def _guard(old: Guard, *, reason: str, now: Now, unreachable: int | None = None, nodes: int | None = None) -> Guard:
    """The guard on for `reason`; the old record as it is when it was on for that already, whatever its numbers."""
    if old.on and old.reason == reason:
        return old
    return Guard(on=True, reason=reason, since_at=now.wall_s, unreachable=unreachable, nodes=nodes)


def writes_fail_for_s(*, now: Now, view: View, settings: Settings) -> float:
    """For how many seconds more a failed write of our own keeps the guard on; zero or less when it does not."""
    if view.write_failed_mono_s is None:
        return 0.0
    return view.write_failed_mono_s + GRACE_TTLS * settings.session_ttl_s - now.mono_s


def losable(nodes: int, lost: Iterable[NodeState], *, now: Now) -> tuple[int, float]:
    """How many of so many nodes may be declared Lost at this moment, and in how many seconds one more may.

    `lost`: those that are.
    """
    ages = [now.wall_s - state.since_at for state in lost]
    recent = [age for age in ages if abs(age) < LOST_PERIOD_S]  # a clock that stepped back must not block for ever
    budget = max(1, int(LOST_SHARE * nodes)) - len(recent)
    return max(0, budget), min((LOST_PERIOD_S - age for age in recent), default=0.0)
