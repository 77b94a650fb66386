"""Who is there: the liveness of every node, the guard, machines declared gone, and the rule after a restore.

The steps of a pass that concern nodes rather than models. What a node *is* decides `llmgw.core.liveness`; here it is
asked for every node that may have changed, and written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from llmgw.core import liveness
from llmgw.core.draft import Pass
from llmgw.core.inventory import node_inventory
from llmgw.core.lifecycle import release, retired
from llmgw.core.node import Fleet, Guard, Liveness, NodeState
from llmgw.core.plan import Delete, Wake
from llmgw.core.reading import is_frozen, is_live
from llmgw.core.replica import Retire
from llmgw.core.snapshot import Index, Kind, Ref

MEASURE_MIN_S: Final = 10.0
MEASURE_MAX_S: Final = 50.0
MEASURE_NODES_PER_S: Final = 200.0
"""How often agents should measure: every max(10 s, nodes/200 s), at most 50 s, so that so many nodes a second would
write, however large the fleet. No agent of this version measures anything yet."""


def declared_gone(index: Index) -> frozenset[str]:
    """Nodes whose machine an operator has declared gone for good, and that are indeed not there."""
    found: set[str] = set()
    for name in index.standing.doubted:
        spec = index.node_specs.record(name)
        forget = None if spec is None else spec.forget
        known = {
            each.boot_id for each in (index.node_states.record(name), index.facts.record(name)) if each is not None
        }
        if forget is not None and forget in known and name not in index.sessions:
            found.add(name)
    return frozenset(found)


def forget(p: Pass) -> None:
    """End what the machines that are gone for good hold, then their own records."""
    index = p.index
    for node in sorted(p.gone):
        for each in sorted(index.replicas_on.get(node, ())):
            replica = index.replicas.record(each)
            if replica is None or is_frozen(index, each):
                continue
            if is_live(replica):
                reason = f"its node {node} was declared gone"
                p.draft.emit(
                    "forget", *retired(index, replica, why=Retire.FAILED, reason=reason, now=p.now, profile=None)
                )
                replica = index.replicas.record(each) or replica
            if (given_back := release(index, replica, gone=p.gone)) is not None:
                p.draft.emit("forget", *given_back[1])
        for name in sorted(index.assignments_on.get(node, ())):
            order = index.assignments.record(name)
            if order is not None and order.replica not in index.replicas:
                p.draft.emit("forget", Delete(ref=Ref(Kind.ASSIGNMENT, name)))
        left = index.assignments_on.get(node) or node_inventory(index, node).holdings
        if not left and node in index.node_states:
            p.draft.emit("forget", Delete(ref=Ref(Kind.NODE_STATE, node)))


def judge_nodes(p: Pass, nodes: set[str]) -> None:
    """Write what each of these nodes is now. Time alone changes it for none of them (`judge_fleet`)."""
    index = p.index
    for name in sorted(nodes - p.gone):
        there = name in index.sessions or name in index.facts or name in index.node_states
        if there and not _unreadable(index, name):
            _judge_node(p, name, lose=False)
        node_inventory(index, name)  # placement will ask for it, and then for all of them at once


def judge_fleet(p: Pass) -> bool:
    """The guard, who is Lost, and the fleet's record; whether this ended the after-restore rule.

    Only once every node that changed has been judged: the guard speaks of all of them at once.
    """
    p.guard = _guard(p)
    _lose(p)
    return _write_fleet(p)


def _unreadable(index: Index, name: str) -> bool:
    """Whether it can't be told what the node was, or whether it is there; then it stays what it is."""
    return Ref(Kind.SESSION, name) in index.corrupted or Ref(Kind.NODE_STATE, name) in index.corrupted


def _judge_node(p: Pass, name: str, *, lose: bool) -> None:
    session = p.index.sessions.record(name)
    state = liveness.next_state(
        name,
        state=p.index.node_states.record(name),
        session=session,
        reported=session is not None and session.store == p.incarnation,
        settled=liveness.settled(p.index, name, incarnation=p.incarnation),
        lose=lose,
        now=p.now,
    )
    p.draft.put("liveness", Ref(Kind.NODE_STATE, name), state)


def released_nodes(index: Index) -> frozenset[str]:
    """Nodes whose very absence, that of the last session seen, an operator has judged real."""
    found: set[str] = set()
    for name in index.standing.doubted:
        spec = index.node_specs.record(name)
        release = None if spec is None else spec.release
        state = index.node_states.record(name)
        if release is not None and state is not None and release == state.lease:
            found.add(name)
    return frozenset(found)


def _guard(p: Pass) -> Guard:
    old = _old_fleet(p.index)
    writes_s = liveness.writes_fail_for_s(now=p.now, view=p.view, settings=p.settings)
    if writes_s > 0:
        p.wake_in(Wake.FLEET, "", delay_s=writes_s)
    there, excused = p.index.standing.liveness, released_nodes(p.index) | p.gone
    counted = {each: len(names) - len(names & excused) for each, names in there.items() if each is not Liveness.LOST}
    return liveness.guard_by(
        sum(counted.values()),
        unreachable=counted[Liveness.UNREACHABLE],
        old=Guard() if old is None else old.guard,
        now=p.now,
        view=p.view,
        settings=p.settings,
    )


def _lose(p: Pass) -> None:
    """Declare Lost what has been gone for long enough, as far as the guard and the rate allow."""
    there = p.index.standing.liveness
    if not there[Liveness.UNREACHABLE]:
        return
    released = released_nodes(p.index)
    nodes = sum(len(names) for names in there.values())
    budget, next_s = liveness.losable(nodes, _states(p.index, there[Liveness.LOST]), now=p.now)
    gone = _states(p.index, there[Liveness.UNREACHABLE] - p.gone)
    for state in sorted(gone, key=lambda each: (each.name not in released, each.since_at, each.name)):
        if _unreadable(p.index, state.name):
            continue
        wait_s = liveness.lost_in_s(state, now=p.now, view=p.view, settings=p.settings)
        held = p.guard.on and (state.name not in released or p.guard.reason == liveness.GUARD_WRITES)
        if wait_s > 0:
            p.wake_in(Wake.NODE, state.name, delay_s=wait_s)
        elif held:
            continue  # the guard goes by a change of some node, or by its own wake
        elif budget > 0:
            budget -= 1
            _judge_node(p, state.name, lose=True)
        else:
            p.wake_in(Wake.NODE, state.name, delay_s=next_s)


def _states(index: Index, names: set[str]) -> Iterator[NodeState]:
    return (state for state in map(index.node_states.record, names) if state is not None)


def _old_fleet(index: Index) -> Fleet | None:
    row = index.fleet
    return None if row is None else row.record


def is_restoring(index: Index, incarnation: str) -> bool:
    """Whether the after-restore rule holds. No record is a first start; one that can't be read is no licence."""
    row = index.fleet
    if row is None:
        return False
    return row.record is None or row.corrupt is not None or row.record.incarnation != incarnation


def _write_fleet(p: Pass) -> bool:
    """Write the fleet's record; whether this ended the after-restore rule."""
    index, old = p.index, _old_fleet(p.index)
    if index.fleet is not None and (old is None or index.fleet.corrupt is not None):
        return False
    ended = p.restoring and _all_reported(p)
    if ended:
        p.restoring = False
    count = len(index.node_states) - sum(1 for name in p.gone if name in index.node_states)
    every_s = math.ceil(count / MEASURE_NODES_PER_S)
    incarnation = p.incarnation if old is None or not p.restoring else old.incarnation
    fleet = Fleet(
        measure_every_s=min(MEASURE_MAX_S, max(MEASURE_MIN_S, float(every_s))),
        guard=p.guard,
        incarnation=incarnation,
    )
    p.draft.put("fleet", Ref(Kind.FLEET), fleet)
    return ended


def _all_reported(p: Pass) -> bool:
    """Whether every node has reported to this incarnation of the store or is Lost, or an operator does not wait."""
    recover = p.index.recover
    if recover is not None and recover.record is not None and recover.record.incarnation == p.incarnation:
        return True
    return not unreported(p.index, p.incarnation, gone=p.gone)


def unreported(index: Index, incarnation: str, *, gone: frozenset[str] = frozenset()) -> list[str]:
    """The nodes that a restored store still waits for: neither reported to this incarnation, nor Lost, nor `gone`."""
    found: list[str] = []
    for name in index.nodes():
        session, state = index.sessions.record(name), index.node_states.record(name)
        reported = session is not None and session.store == incarnation
        if not reported and name not in gone and (state is None or state.liveness is not Liveness.LOST):
            found.append(name)
    return found
