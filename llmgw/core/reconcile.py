"""The decision: what follows from the tree as it is, at this moment, in the eyes of this leader.

Pure. The order of steps matters: first the unassigned get their word, then it is judged who is there, then claims that
were confirmed end, then each model gets what it lacks. Each step sees what the ones before it decided (`Draft`).

Invariants: the same index, dirty set, `now`, `view` and ids give the same plan; a plan applied is followed by an empty
one at the same `now`; what is dirty plus what time made due is enough: it decides what looking at everything would.
Nothing is kept between calls.
"""

from __future__ import annotations

from llmgw.core import adoption
from llmgw.core.draft import Draft, Pass
from llmgw.core.fleet import declared_gone, forget, is_restoring, judge_nodes, write_fleet
from llmgw.core.ids import Ids
from llmgw.core.inventory import Inventory
from llmgw.core.model import Tended, conclude, tend, tend_leaving
from llmgw.core.node import Liveness
from llmgw.core.plan import Plan, Settings, View
from llmgw.core.snapshot import Dirty, Index
from llmgw.core.units import Now


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
        p.restoring = is_restoring(index, p.incarnation)
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
    everything = dirty.everything or p.restoring  # what then waits for its word may get it by a change of anything
    nodes = _all_nodes(index) if everything else set(dirty.nodes)
    adoption.answer(p.draft, nodes, incarnation=p.incarnation, restoring=p.restoring, now=p.now)
    p.gone = declared_gone(index)
    if not p.restoring:
        forget(p)
    judge_nodes(p, nodes)
    if given_up := _given_up(p):  # whoever waited for a word of these need not wait any more
        adoption.answer(p.draft, given_up, incarnation=p.incarnation, restoring=p.restoring, now=p.now)
    if write_fleet(p):
        everything, nodes = True, _all_nodes(index)
        forget(p)
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


def _given_up(p: Pass) -> set[str]:
    """Nodes that this pass has declared Lost, or forgotten."""
    states = {name: p.index.node_states.record(name) for name in p.draft.touched.nodes}
    return {name for name, state in states.items() if state is None or state.liveness is Liveness.LOST}


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
    there = (p.index.replicas.record(each) for node in nodes for each in p.index.replicas_on.get(node, ()))
    names |= {replica.model for replica in there if replica is not None}
    return names | _pending(p.index) if nodes else names
