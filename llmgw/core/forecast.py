"""What would happen: the tree as it is beside the tree that a change would lead to, told replica by replica.

Both ends are real trees; between them lies a `Rehearsal`, made by the leader's own passes. It is made twice, with the
change and without it, so that what is under way already is not put down to the change.

Invariant: the given tree is only read, and nothing in a `Forecast` is secret.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from llmgw.core.apply import ApplyPlan
from llmgw.core.explain import Unplaced
from llmgw.core.fleet import declared_gone, is_restoring, released_nodes, unreported
from llmgw.core.ids import Ids
from llmgw.core.launch_diff import why_rolled
from llmgw.core.liveness import guard_by
from llmgw.core.node import Guard, Liveness, NodeState
from llmgw.core.plan import Delete, Put, Settings, View, Write
from llmgw.core.reading import is_frozen, is_live, replicas_of
from llmgw.core.record import Generation
from llmgw.core.rehearsal import Rehearsal, serves
from llmgw.core.replica import ModelState, Replica, Retire, Rollout, old_first
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.units import Now


class StepAction(enum.Enum):
    """What becomes of one replica.

    `RESTART`: a new launch takes its place, be it on another node. `STRAND`: it stays on record on a node that is not
    there, because nothing else takes it.
    """

    PLACE = "place"
    MOVE = "move"
    RESTART = "restart"
    KEEP = "keep"
    REMOVE = "remove"
    STRAND = "strand"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one replica. `replica`: its present id, None for a new one.

    `profile`, `nodes`: where it would be, empty when nowhere. `was`: the nodes it is on now. `old_first`: it ends
    before what follows it is placed. `in_s`: after how many seconds of waiting (backoff, a node to be given up).
    """

    action: StepAction
    replica: str | None = None
    profile: str = ""
    nodes: tuple[str, ...] = ()
    was: tuple[str, ...] = ()
    why: str = ""
    old_first: bool = False
    in_s: float = 0.0


class ModelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One model, now and then.

    `wanted`, `ready`: how many replicas, (now, then); None where nobody has counted. `gap`: it serves now, stays
    wanted, and at some moment nothing of it would serve. `under_way`: the same would happen without the change.
    `unplaced`: why what is still wanted then fits nowhere; `reason`: what is said of the model then.
    """

    name: str
    wanted: tuple[int | None, int | None]
    ready: tuple[int, int]
    steps: tuple[Step, ...] = ()
    gap: bool = False
    under_way: bool = False
    unplaced: Unplaced | None = None
    rollout: Rollout = Rollout.NONE
    reason: str = ""

    @property
    def changes(self) -> tuple[Step, ...]:
        """The steps worth a word: all but plain staying."""
        return tuple(step for step in self.steps if step.action is not StepAction.KEEP or step.why)

    @property
    def whole(self) -> bool:
        """Whether it then runs as it is wanted."""
        wanted, ready = self.wanted[1], self.ready[1]
        return self.unplaced is None and self.rollout is Rollout.NONE and wanted is not None and ready >= wanted


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What would happen, and what the forecast rests on.

    `settled`: everything came to rest; otherwise it tells how far things had come after `rounds`. `without`: nodes
    imagined gone. `away`: other nodes that are not there now and are taken to stay away. `led`: somebody leads, so that
    it would happen at all. `set_up`: a controller has been here. `waiting_for`: the store was restored, and nothing is
    decided before these nodes have reported. `guard`: as it is; `guard_then`: as it would be if the nodes imagined gone
    were to vanish together; while it is on, nothing is moved off them. `unreadable`: places that can't be read.
    """

    settled: bool
    rounds: int
    revision: int
    models: tuple[ModelForecast, ...]
    without: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    led: bool = True
    set_up: bool = True
    waiting_for: tuple[str, ...] = ()
    guard: Guard = Guard()
    guard_then: Guard = Guard()
    unreadable: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether everything came to rest and every model then runs as it is wanted."""
        return self.settled and all(model.whole for model in self.models)


def forecast(
    index: Index,
    change: Sequence[Write] = (),
    *,
    without: Iterable[str] = (),
    now: Now,
    ids: Ids | None = None,
    settings: Settings | None = None,
) -> Forecast:
    """What `change` would lead to, if the nodes `without` were gone for good as well.

    Args:
        index: everything as it is; left exactly so.
        change: what people would write.
        without: names of nodes.
        now: this moment.
        ids: for the replicas to come; None for such as mean nothing outside.
        settings: the leader's, None for the defaults.
    """
    gone = tuple(sorted(set(without)))
    then = Rehearsal(index, now=now, ids=ids, settings=settings)
    then.write([*change, *(write for name in gone for write in _lost(index, name, now))])
    settled = then.run()
    else_ = Rehearsal(index, now=now, ids=ids, settings=settings)
    if change or gone:
        else_.run()
    names = sorted({*index.models, *then.index.models, *index.replicas_of, *then.index.replicas_of})
    meta = index.meta
    restoring = meta is not None and meta.record is not None and is_restoring(index, meta.record.incarnation)
    fleet = None if index.fleet is None else index.fleet.record
    return Forecast(
        settled=settled,
        rounds=then.rounds,
        revision=index.revision,
        models=tuple(_model(index, then, else_ if change or gone else then, name) for name in names),
        without=gone,
        away=tuple(name for name in index.nodes() if name not in index.sessions and name not in gone),
        led=index.leader is not None,
        set_up=meta is not None,
        waiting_for=tuple(unreported(index, meta.record.incarnation)) if restoring and meta and meta.record else (),
        guard=Guard() if fleet is None else fleet.guard,
        guard_then=_guard_then(index, gone, now=now, settings=settings or Settings()),
        unreadable=tuple(f"{ref.kind.value}{ref.name}" for ref, _ in index.corrupt()),
    )


def writes_of(plan: ApplyPlan, index: Index) -> tuple[Write, ...]:
    """What an apply would write, its generation included."""
    if not plan.edits:
        return ()
    row = index.generation
    number = 0 if row is None or row.record is None else row.record.number
    edits = [
        Delete(ref=edit.ref) if edit.record is None else Put(ref=edit.ref, record=edit.record) for edit in plan.edits
    ]
    return (Put(ref=Ref(Kind.GENERATION), record=Generation(number=number + 1)), *edits)


def _lost(index: Index, name: str, now: Now) -> Iterator[Write]:
    """The node's session is gone and everybody has given it up."""
    state, session = index.node_states.record(name), index.sessions.record(name)
    yield Delete(ref=Ref(Kind.SESSION, name))
    record = NodeState(
        name=name,
        liveness=Liveness.LOST,
        since_at=now.wall_s,
        reason="imagined gone",
        boot_id=session.boot_id if session is not None else None if state is None else state.boot_id,
        lease=session.lease if session is not None else None if state is None else state.lease,
    )
    yield Put(ref=Ref(Kind.NODE_STATE, name), record=record)


def _guard_then(index: Index, gone: tuple[str, ...], *, now: Now, settings: Settings) -> Guard:
    """The guard at the moment when nodes have vanished and nobody has judged that yet."""
    if not gone:
        return Guard()
    excused = released_nodes(index) | declared_gone(index)
    states = [state for state in index.node_states.records() if state.liveness is not Liveness.LOST]
    counted = [state for state in states if state.name not in excused]
    away = sum(1 for state in counted if state.name in gone or state.liveness is Liveness.UNREACHABLE)
    return guard_by(len(counted), unreachable=away, old=Guard(), now=now, view=View(), settings=settings)


# --- one model ------------------------------------------------------------------------------------------------------


def _model(index: Index, then: Rehearsal, otherwise: Rehearsal, name: str) -> ModelForecast:
    before, after = index.model_states.record(name), then.index.model_states.record(name)
    ready = tuple(sum(serves(each, replica) for replica in replicas_of(each, name)) for each in (index, then.index))
    steps = _steps(index, then, name)
    spec = then.index.models.record(name)
    wanted = None if after is None else after.wanted
    same = then is otherwise or (
        _essence(steps) == _essence(_steps(index, otherwise, name))
        and _short(after) == _short(otherwise.index.model_states.record(name))
    )
    return ModelForecast(
        name=name,
        wanted=(None if before is None else before.wanted, 0 if spec is None and after is None else wanted),
        ready=(ready[0], ready[1]),
        steps=steps,
        gap=name in then.dark and bool(wanted),
        under_way=same,
        unplaced=None if after is None or after.unplaced is None else _told(after.unplaced, then),
        rollout=Rollout.NONE if after is None else after.rollout,
        reason="" if after is None else after.reason,
    )


def _told(unplaced: Unplaced, then: Rehearsal) -> Unplaced:
    """The refusals with replicas that do not exist yet named for what they are: their ids will be others."""

    def known(text: str) -> str:
        for replica in then.placed.values() if text else ():
            text = text.replace(replica.id, f"a new {replica.model}")
        return text

    nearest = tuple(
        msgspec.structs.replace(
            refusal,
            holders=tuple((known(name), amount) for name, amount in refusal.holders),
            detail=known(refusal.detail),
        )
        for refusal in unplaced.nearest
    )
    return msgspec.structs.replace(unplaced, nearest=nearest)


def _short(state: ModelState | None) -> bool:
    return state is not None and state.unplaced is not None


def _essence(steps: tuple[Step, ...]) -> list[tuple[str, str | None, str, tuple[str, ...]]]:
    """Steps without their words and times, which may differ where the outcome does not."""
    return [(step.action.value, step.replica, step.profile, step.nodes) for step in steps]


def _steps(index: Index, then: Rehearsal, name: str) -> tuple[Step, ...]:
    """What becomes of each of a model's replicas: those there are by age, then the new ones."""
    now_live = {replica.id: replica for replica in replicas_of(index, name) if is_live(replica)}
    then_live = {replica.id: replica for replica in replicas_of(then.index, name) if is_live(replica)}
    new = [then_live[each] for each in sorted(then_live.keys() - now_live.keys())]
    follows = _successors([replica for each, replica in now_live.items() if each not in then_live], new, then)
    steps: list[Step] = []
    for replica in old_first(now_live.values()):
        if replica.id in then_live:
            steps.append(_stays(index, then, replica))
        else:
            steps.append(_goes(index, then, replica, follows.get(replica.id)))
    taken = {replica.id for replica in follows.values()}
    return (*steps, *(_comes(then, replica) for replica in new if replica.id not in taken))


_NOT_FOLLOWED = (Retire.SCALE_DOWN, Retire.CANCELLED, Retire.MODEL_REMOVED)
"""Why replicas go that nothing takes the place of."""


def _successors(gone: list[Replica], new: list[Replica], then: Rehearsal) -> dict[str, Replica]:
    """Id of a replica that goes -> the new one in its place: the one that says so, else the next that is left."""
    found: dict[str, Replica] = {}
    left = {replica.id: replica for replica in new}
    wanting = [
        replica
        for replica in old_first(gone)
        if replica.id not in then.retired or then.retired[replica.id].retire not in _NOT_FOLLOWED
    ]
    for replica in wanting:
        named = next((each for each in left.values() if _stands_for(each, replica.id, then)), None)
        if named is not None:
            found[replica.id] = left.pop(named.id)
    for replica in wanting:
        if replica.id not in found and left:
            found[replica.id] = left.pop(next(iter(left)))
    return found


def _stands_for(replica: Replica, old: str, then: Rehearsal) -> bool:
    """Whether a replica came in the place of `old`, be it through others that came and went on the way."""
    seen: set[str] = set()
    each: Replica | None = replica
    while each is not None and each.replaces is not None and each.id not in seen:
        if each.replaces == old:
            return True
        seen.add(each.id)
        each = then.placed.get(each.replaces)
    return False


def _comes(then: Rehearsal, replica: Replica) -> Step:
    return Step(
        action=StepAction.PLACE,
        profile=replica.profile,
        nodes=_nodes(replica),
        why=replica.reason,
        in_s=then.placed_in_s.get(replica.id, 0.0),
    )


def _stays(index: Index, then: Rehearsal, replica: Replica) -> Step:
    away = [shard.node for shard in replica.shards if shard.node not in then.index.sessions]
    why, nodes = "", _nodes(replica)
    if is_frozen(index, replica.id):
        why = "a record of it can't be read, so it is left alone"
    elif away:
        why = f"{', '.join(away)} is not there, and nothing else takes it"
    elif rolls := why_rolled(index, then.index, replica):
        why = f"it goes on as it was launched: {rolls}"
    return Step(
        action=StepAction.STRAND if away else StepAction.KEEP,
        replica=replica.id,
        profile=replica.profile,
        nodes=nodes,
        was=nodes,
        why=why,
    )


def _goes(index: Index, then: Rehearsal, replica: Replica, successor: Replica | None) -> Step:
    end = then.retired.get(replica.id)
    rolled = end is not None and end.retire is Retire.ROLLED
    action = StepAction.REMOVE
    if successor is not None:
        same_place = _nodes(successor) == _nodes(replica)
        action = StepAction.RESTART if rolled or same_place else StepAction.MOVE
    why = "its node was declared gone for good" if end is None else end.reason
    if end is not None and end.retire is Retire.REPLACED:
        why = f"{', '.join(each for each in _nodes(replica) if each not in then.index.sessions)} is gone"
    if rolled:
        why = why_rolled(index, then.index, replica) or why
    return Step(
        action=action,
        replica=replica.id,
        profile="" if successor is None else successor.profile,
        nodes=() if successor is None else _nodes(successor),
        was=_nodes(replica),
        why=why,
        old_first=replica.id in then.went_first,
        in_s=0.0 if successor is None else then.placed_in_s.get(successor.id, 0.0),
    )


def _nodes(replica: Replica) -> tuple[str, ...]:
    return tuple(shard.node for shard in replica.shards)
