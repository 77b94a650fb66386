"""The decision: what follows from the tree as it is, at this moment, in the eyes of this leader.

Pure. The order of steps matters: first the unassigned get their word, then it is judged who is there, then claims that
were confirmed end, then each model gets what it lacks. Each step sees what the ones before it decided (`Draft`).

Bounded: a pass tries so many placements and looks at so much (`Settings`), what changed first; what it did not come to
is in `Plan.left`. As long as a node that changed has not been judged, nothing is decided about the fleet or any model.

Invariants: the same index, dirty set, `now`, `view` and ids give the same plan; a plan applied is followed by an empty
one at the same `now`; what is dirty plus what time made due is enough: it decides what looking at everything would,
whole or in parts. What is kept with the index between calls saves time, and never changes a decision.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from llmgw.core import adoption
from llmgw.core.draft import Draft, Pass
from llmgw.core.fleet import declared_gone, forget, is_restoring, judge_fleet, judge_nodes
from llmgw.core.ids import Ids
from llmgw.core.inventory import Inventory
from llmgw.core.model import Tended, conclude, tend, tend_leaving
from llmgw.core.node import Liveness
from llmgw.core.plan import Plan, Settings, View, Wake, WakeKey
from llmgw.core.snapshot import Dirty, Index, Rest
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
        p.tries, p.looks = p.settings.placements_max, p.settings.looks_max
        p.restoring = is_restoring(index, p.incarnation)
        _run(p, dirty)
        p.plan.groups = draft.groups
    return p.plan


def due(wakes: dict[WakeKey, float], *, now: Now) -> Dirty:
    """What time alone has made worth a look, from the wakes of earlier plans. It is taken out of `wakes`."""
    found = Dirty()
    for what, name in [key for key, at in wakes.items() if at <= now.mono_s]:
        match what:
            case Wake.MODEL:
                found.models.add(name)
            case Wake.NODE:
                found.nodes.add(name)
            case Wake.FLEET:
                found.fleet = True
        del wakes[what, name]
    return found


def _run(p: Pass, dirty: Dirty) -> None:
    index, left = p.index, p.plan.left
    rest = Rest() if dirty.everything else dirty.rest
    # Of nodes, everything is no more than that; what changed of models still comes first.
    nodes = set() if dirty.everything else set(_share(p, sorted(dirty.nodes), left.nodes))
    swept: list[str] = []
    if rest is not None and not rest.models:
        swept, rest = _next_nodes(p, rest)
    p.gone = declared_gone(index)
    _answer(p, nodes.union(swept), dirty.models)
    if not p.restoring:
        forget(p)
    judge_nodes(p, nodes.union(swept, p.draft.touched.nodes))
    judged = not left.nodes and (rest is None or rest.models)
    ended = judged and judge_fleet(p)
    if ended:
        forget(p)
        rest = Rest(models=True)
    given_up = _given_up(p)
    if ended or given_up:  # whoever waited for these need not wait any more
        _answer(p, nodes | given_up, dirty.models)
    if rest is not None and not rest.models:
        p.tries = 0  # no replica goes anywhere while there are nodes that nobody has looked at
    names = dirty.models | p.draft.touched.models
    waiting = dict.fromkeys(index.standing.pending if nodes or p.draft.touched.nodes else (), 0) | dirty.short
    if left.nodes:
        left.models |= names
        left.short |= waiting
    else:
        names = set(_share(p, sorted(names), left.models))
        if rest is not None and rest.models:
            swept, rest = _next_models(p, rest)
            names.update(swept)
        _models(p, names, waiting)
    left.rest = rest


def _answer(p: Pass, nodes: set[str], models: set[str]) -> None:
    """Give the unassigned their word; what had to wait for another pass, waits with its node."""
    waiting = p.index.standing.unanswered
    if waiting and p.restoring:  # many can't be answered yet, and need not be asked about in each pass
        waiting = adoption.concerned(p.index, nodes=nodes, models=models)
    later = adoption.answer(p.draft, waiting, incarnation=p.incarnation, restoring=p.restoring, now=p.now)
    p.plan.left.nodes.update(name.partition("/")[0] for name in later)


def _models(p: Pass, names: set[str], waiting: Mapping[str, int]) -> None:
    """Tend the named models, and as many of those that lack only placements as may be tried.

    Models with something that fits nowhere come last, so that trying them in vain keeps nobody else from a place.

    `waiting`: models to come back to -> for how many passes nobody has. The longest first, so that each has its turn.
    """
    left, pending = p.plan.left, frozenset(p.index.standing.pending)
    for name in sorted(names):
        tend_leaving(p, name)
    inventory = Inventory(p.index)
    done: list[Tended | None] = []

    def order(name: str) -> tuple[bool, bool, int, str]:
        waited = waiting.get(name, 0)
        return (name in pending, waited > 0 and name not in pending, -waited, name)

    def visit(name: str) -> None:
        if name in names or (p.tries > 0 and p.looks > 0):
            p.looks -= 0 if name in names else _cost(p.index, name)
            done.append(tend(p, name, inventory))
        elif name not in left.models:
            left.short[name] = waiting.get(name, 0) + 1

    for name in sorted(names | waiting.keys(), key=order):
        visit(name)
    if p.draft.touched.nodes and not p.restoring:  # this very pass may have made room
        for name in sorted(p.index.standing.pending - names - waiting.keys()):
            visit(name)
    tended = [each for each in done if each is not None]
    for model in sorted(tended, key=lambda each: each.name):  # whichever were looked at first
        conclude(p, model, inventory)
        if model.short:
            left.short[model.name] = waiting.get(model.name, 0) + 1


def _given_up(p: Pass) -> set[str]:
    """Nodes that this pass has declared Lost, or forgotten."""
    states = {name: p.index.node_states.record(name) for name in p.draft.touched.nodes}
    return {name for name, state in states.items() if state is None or state.liveness is Liveness.LOST}


def _cost(index: Index, name: str) -> int:
    """How much there is to look at in a model, or in a node."""
    return 1 + len(index.replicas_of.get(name, ()))


def _share(p: Pass, names: Iterable[str], left: set[str]) -> list[str]:
    """As many as this pass may still look at, in their order; the others are `left`."""
    taken: list[str] = []
    for name in names:
        if p.looks > 0:
            p.looks -= _cost(p.index, name)
            taken.append(name)
        else:
            left.add(name)
    return taken


def _next_nodes(p: Pass, rest: Rest) -> tuple[list[str], Rest]:
    """The next nodes of a look at everything, and what is then left of it. Half of a pass stays for what changed."""
    names = p.index.standing.nodes
    first = bisect_right(names, rest.after)
    taken = names[first : first + max(0, min(p.looks, (p.settings.looks_max + 1) // 2))]
    p.looks -= len(taken)
    if first + len(taken) == len(names):
        return taken, Rest(models=True)
    return taken, Rest(after=taken[-1]) if taken else rest


def _next_models(p: Pass, rest: Rest) -> tuple[list[str], Rest | None]:
    """The next models of a look at everything, and what is then left of it."""
    names = sorted({*p.index.models, *p.index.model_states, *p.index.replicas_of})
    later: set[str] = set()
    taken = _share(p, names[bisect_right(names, rest.after) :], later)
    if not later:
        return taken, None
    return taken, Rest(models=True, after=taken[-1]) if taken else rest
