"""The decision: what follows from the tree as it is, at this moment, in the eyes of this leader.

Pure. The order of steps matters: first the unassigned get their word, then it is judged who is there, then claims that
were confirmed end, then each model gets what it lacks. Each step sees what the ones before it decided (`Draft`).

Invariants: the same index, dirty set, `now`, `view` and ids give the same plan; a plan applied is followed by an empty
one at the same `now`; what is dirty plus what time made due is enough: it decides what looking at everything would.
Nothing is kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmgw.core import adoption, liveness
from llmgw.core.draft import Draft, Pass
from llmgw.core.ids import Ids
from llmgw.core.inventory import Inventory
from llmgw.core.lifecycle import is_frozen, is_live, release, retired
from llmgw.core.model import Tended, conclude, tend, tend_leaving
from llmgw.core.node import Fleet, Guard, Liveness, NodeState
from llmgw.core.plan import Delete, Plan, Settings, View
from llmgw.core.replica import Retire
from llmgw.core.snapshot import Dirty, Index, Kind, Ref
from llmgw.core.units import Now

MEASURE_MIN_S = 10.0
MEASURE_MAX_S = 50.0
MEASURE_NODES_PER_S = 200.0
"""Agents measure every max(10 s, nodes/200 s), at most 50 s: so many nodes a second write, however large the fleet."""


def reconcile(index: Index, dirty: Dirty, *, now: Now, view: View, ids: Ids, settings: Settings | None = None) -> Plan:
    """Decide what is to be written now.

    Args:
        index: the tree. Used as scratch paper during the call and left exactly as it was.
        dirty: what changed since the last pass, with what `Plan.wake_mono_s` says is due by now; see `due`.
        now: this moment.
        view: what this leader has seen by itself (`llmgw.core.liveness.observe`).
        ids: fresh ids and engine keys.
        settings: None for the defaults.
    """
    meta = index.meta
    if meta is None or meta.record is None or meta.corrupt is not None:
        return Plan()  # nothing can be judged before it is known which store this is
    with Draft(index) as draft:
        p = Pass(
            draft=draft,
            now=now,
            view=view,
            ids=ids,
            settings=settings or Settings(),
            incarnation=meta.record.incarnation,
        )
        p.tries = p.settings.placements_max
        p.restoring = _restoring(index, p.incarnation)
        _run(p, dirty)
        p.plan.groups = draft.groups
    return p.plan


def due(wakes: dict[tuple[str, str], float], *, now: Now) -> Dirty:
    """What time alone has made worth a look, from the wakes of earlier plans. It is taken out of `wakes`."""
    found = Dirty()
    for kind, name in [key for key, at in wakes.items() if at <= now.mono_s]:
        if kind == "model":
            found.models.add(name)
        elif kind == "node":
            found.nodes.add(name)
        else:
            found.everything = True
        del wakes[kind, name]
    return found


def _run(p: Pass, dirty: Dirty) -> None:
    index = p.index
    everything = dirty.everything
    nodes = _all_nodes(index) if everything else set(dirty.nodes)
    adoption.answer(p.draft, nodes, incarnation=p.incarnation, restoring=p.restoring, now=p.now)
    if not p.restoring:
        _forget(p, _forgotten(index, nodes))
    _judge_nodes(p, nodes)
    if _fleet(p):
        everything, nodes = True, _all_nodes(index)
        _forget(p, _forgotten(index, nodes))
        adoption.answer(p.draft, nodes, incarnation=p.incarnation, restoring=False, now=p.now)
    names = _all_models(index) if everything else _touched_models(p, dirty)
    for name in sorted(names):
        tend_leaving(p, name)
    _models(p, names)


def _models(p: Pass, names: set[str]) -> None:
    """Tend the named models, then those that wait for room if anything about any node changed."""
    inventory = Inventory(p.index)
    done: list[Tended | None] = [tend(p, name, inventory) for name in sorted(names)]
    if p.draft.touched.nodes and not p.restoring:
        done += [tend(p, name, inventory) for name in sorted(_pending(p.index) - names)]
    for model in (each for each in done if each is not None):
        conclude(p, model, inventory)
        if model.short:
            p.plan.more = True
            p.plan.left.models.add(model.name)


def _all_nodes(index: Index) -> set[str]:
    return {*index.nodes(), *index.assignments_on, *index.reports_on, *index.replicas_on}


def _all_models(index: Index) -> set[str]:
    return {*index.models, *index.model_states, *index.replicas_of}


def _pending(index: Index) -> set[str]:
    """Models with something that fits nowhere: any change of any node may change that."""
    return {
        name for name, row in index.model_states.items() if row.record is not None and row.record.unplaced is not None
    }


def _touched_models(p: Pass, dirty: Dirty) -> set[str]:
    """Models that the changes since the last pass, and what this one has done so far, may concern."""
    names, nodes = dirty.models | p.draft.touched.models, dirty.nodes | p.draft.touched.nodes
    for node in nodes:
        for each in p.index.replicas_on.get(node, ()):
            replica = p.index.replicas.record(each)
            if replica is not None:
                names.add(replica.model)
    return names | _pending(p.index) if nodes else names


# --- nodes ----------------------------------------------------------------------------------------------------------


def _forgotten(index: Index, nodes: Iterable[str]) -> set[str]:
    """Nodes whose machine an operator has declared gone for good, and that are indeed not there."""
    found: set[str] = set()
    for name in nodes:
        spec, state, facts = index.node_specs.record(name), index.node_states.record(name), index.facts.record(name)
        known = {each.boot_id for each in (state, facts) if each is not None}
        if spec is not None and spec.forget is not None and name not in index.sessions and spec.forget in known:
            found.add(name)
    return found


def _forget(p: Pass, gone: set[str]) -> None:
    """End what the machines that are gone for good hold, then their own records."""
    index, lost = p.index, frozenset(gone)
    for node in sorted(gone):
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
            if (given_back := release(index, replica, gone=lost)) is not None:
                p.draft.emit("forget", *given_back[1])
        for name in sorted(index.assignments_on.get(node, ())):
            order = index.assignments.record(name)
            if order is not None and order.replica not in index.replicas:
                p.draft.emit("forget", Delete(ref=Ref(Kind.ASSIGNMENT, name)))
        left = index.assignments_on.get(node) or any(
            shard.node == node and not shard.released
            for each in index.replicas_on.get(node, ())
            if (replica := index.replicas.record(each)) is not None
            for shard in replica.shards
        )
        if not left and node in index.node_states:
            p.draft.emit("forget", Delete(ref=Ref(Kind.NODE_STATE, node)))


def _judge_nodes(p: Pass, nodes: set[str]) -> None:
    """Write what each node is now: those that changed, and all that are not Ready, since time alone may change them."""
    index = p.index
    away = {name for name, row in index.node_states.items() if row.record and row.record.liveness is not Liveness.READY}
    for name in sorted((nodes | away) - _forgotten(index, nodes | away)):
        there = name in index.sessions or name in index.facts or name in index.node_states
        unreadable = any(Ref(kind, name) in index.corrupted for kind in (Kind.SESSION, Kind.NODE_STATE))
        if there and not unreadable:
            _judge_node(p, name, lose=False)
    p.guard = _guard(p)
    _lose(p)


def _judge_node(p: Pass, name: str, *, lose: bool) -> None:
    session = p.index.sessions.record(name)
    state = liveness.next_state(
        name,
        p.index.node_states.record(name),
        session,
        reported=session is not None and session.store == p.incarnation,
        settled=liveness.settled(p.index, name, incarnation=p.incarnation),
        lose=lose,
        now=p.now,
    )
    p.draft.put("liveness", Ref(Kind.NODE_STATE, name), state)


def _states(index: Index) -> list[NodeState]:
    return [row.record for row in index.node_states.values() if row.record is not None]


def _released(index: Index) -> frozenset[str]:
    """Nodes whose very absence, that of the last session seen, an operator has judged real; and those declared gone."""
    found = _forgotten(index, index.node_specs)
    for name, row in index.node_specs.items():
        release = None if row.record is None else row.record.release
        state = index.node_states.record(name)
        if release is not None and state is not None and release == state.lease:
            found.add(name)
    return frozenset(found)


def _guard(p: Pass) -> Guard:
    old = _old_fleet(p.index)
    writes_s = liveness.writes_fail_for_s(now=p.now, view=p.view, settings=p.settings)
    if writes_s > 0:
        p.wake_in("fleet", "", writes_s)
    return liveness.judge_guard(
        _states(p.index),
        released=_released(p.index),
        old=Guard() if old is None else old.guard,
        now=p.now,
        view=p.view,
        settings=p.settings,
    )


def _lose(p: Pass) -> None:
    """Declare Lost what has been gone for long enough, as far as the guard and the rate allow."""
    states = _states(p.index)
    released = _released(p.index)
    budget, next_s = liveness.losable(states, now=p.now)
    for state in sorted(states, key=lambda each: (each.since_at, each.name)):
        if state.liveness is not Liveness.UNREACHABLE or Ref(Kind.NODE_STATE, state.name) in p.index.corrupted:
            continue
        wait_s = liveness.lost_in_s(state, now=p.now, view=p.view, settings=p.settings)
        held = p.guard.on and (state.name not in released or p.guard.reason == liveness.GUARD_WRITES)
        if wait_s > 0:
            p.wake_in("node", state.name, wait_s)
        elif held or Ref(Kind.SESSION, state.name) in p.index.corrupted:
            continue  # the guard goes by a change of some node, or by its own wake
        elif budget > 0:
            budget -= 1
            _judge_node(p, state.name, lose=True)
        else:
            p.wake_in("node", state.name, next_s)


# --- the fleet ------------------------------------------------------------------------------------------------------


def _old_fleet(index: Index) -> Fleet | None:
    row = index.fleet
    return None if row is None else row.record


def _restoring(index: Index, incarnation: str) -> bool:
    """Whether the after-restore rule holds. No record is a first start; one that can't be read is no licence."""
    row = index.fleet
    if row is None:
        return False
    return row.record is None or row.corrupt is not None or row.record.incarnation != incarnation


def _fleet(p: Pass) -> bool:
    """Write the fleet's record; whether this ended the after-restore rule."""
    index, old = p.index, _old_fleet(p.index)
    if index.fleet is not None and (old is None or index.fleet.corrupt is not None):
        return False
    ended = p.restoring and _all_reported(p)
    if ended:
        p.restoring = False
    count = len(index.node_states.keys() - _forgotten(index, index.node_specs))
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
    names = p.index.nodes()
    gone = _forgotten(p.index, names)
    for name in names:
        session, state = p.index.sessions.record(name), p.index.node_states.record(name)
        reported = session is not None and session.store == p.incarnation
        if not reported and name not in gone and (state is None or state.liveness is not Liveness.LOST):
            return False
    return True
