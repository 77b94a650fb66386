"""One model in one pass: what its replicas are seen doing, which of them go, which come, and what is said about it.

Every step writes whole groups into the draft, so that the next one sees them. Nothing is placed while the model backs
off, and nothing is decided about what can't be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from llmgw.core import gang
from llmgw.core.autoscale import at_least, decide
from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.census import Census, retirements, take_census, tokens
from llmgw.core.draft import Pass
from llmgw.core.explain import Constraint, Refusal, same_but_numbers
from llmgw.core.ids import shard_name
from llmgw.core.inventory import Inventory
from llmgw.core.lifecycle import (
    REASON_LEN_MAX,
    backoff_s,
    failure,
    fresh_id,
    leaving_phase,
    new_replica,
    observed_phase,
    release,
    retired,
    stop_order,
    waits_until,
)
from llmgw.core.placement import Placement, Rejection, place
from llmgw.core.plan import Delete, Put, Wake, Write
from llmgw.core.reading import is_frozen, is_live, order_ref, replicas_of
from llmgw.core.refusal_words import render, summarise
from llmgw.core.replica import (
    GONE,
    Desired,
    EngineSecret,
    ModelState,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    Retire,
    Rollout,
    old_first,
)
from llmgw.core.sieve import ledger_of
from llmgw.core.snapshot import Index, Kind, Ref

FAILED_NODES_MAX: Final = 32
"""Nodes remembered per model as having failed it lately; beyond that the oldest are forgotten."""

JUDGED_PER_TRY: Final = 100
"""Judging so many nodes anew takes as long as placing a replica where they are known, about 1 ms: a pass that has to do
so comes less far."""


@dataclass(kw_only=True)
class Tended:
    """One model on its way through a pass.

    `targets`: what its profiles launch (`llmgw.core.census.tokens`). `counted`: the last census, and of which tick of
    the index and which state it is. `rejected`: the attempt to place it that failed, made when the plan had
    `rejected_after` groups. `short`: the pass reached its bound before everything was tried.
    """

    name: str
    spec: ModelSpec | None
    state: ModelState
    targets: dict[str, str]
    counted: tuple[int, ModelState, Census] | None = None
    rejected: Rejection | None = None
    rejected_after: int = 0
    short: bool = False


def readable_replicas(index: Index, name: str) -> list[Replica]:
    """A model's replicas about which everything can be read, by id."""
    return [replica for replica in replicas_of(index, name) if not is_frozen(index, replica.id)]


def tend_leaving(p: Pass, name: str) -> None:
    """Replicas ordered to stop: claims end as nodes confirm, and shards that waited for it stop as well.

    An order that got lost is given again.
    """
    for replica in readable_replicas(p.index, name):
        if is_live(replica) or p.restoring:
            continue
        if (given_back := release(p.index, replica)) is not None:
            p.draft.emit(given_back[0], *given_back[1])
        left = p.index.replicas.record(replica.id)
        if left is None:
            continue
        lost = [shard for shard in gang.stoppable(p.index, left) if _unordered(p.index, left, shard)]
        if lost:
            orders = [stop_order(p.index, left, shard) for shard in lost]
            refs = [order_ref(order.node, order.replica, order.rank) for order in orders]
            p.draft.emit("stop", *(Put(ref=ref, record=order) for ref, order in zip(refs, orders, strict=True)))
        elif (phase := leaving_phase(p.index, left)) is not left.phase:
            record = msgspec.structs.replace(left, phase=phase, phase_at=p.now.wall_s)
            p.draft.emit("phase", Put(ref=Ref(Kind.REPLICA, left.id), record=record))


def _unordered(index: Index, replica: Replica, shard: ReplicaShard) -> bool:
    """Whether a shard that must stop has no order to. While it runs, its node will say that nothing orders it."""
    name = shard_name(shard.node, replica.id, shard.rank)
    order, report = index.assignments.record(name), index.reports.record(name)
    if order is None:
        return report is None or report.phase in GONE
    return order.desired is not Desired.STOPPED


def tend_live(p: Pass, name: str, spec: ModelSpec | None) -> None:
    """Replicas in routing: their phase as their nodes report it, and what the catalog may change without a restart."""
    profiles = {profile.name: profile for profile in spec.profiles} if spec is not None else {}
    for replica in readable_replicas(p.index, name):
        if not is_live(replica):
            continue
        if (phase := observed_phase(p.index, replica)) is not replica.phase:
            was_ready = ReplicaPhase.READY in (phase, replica.phase)
            ready_at = p.now.wall_s if was_ready and replica.ready_at is None else replica.ready_at
            record = msgspec.structs.replace(replica, phase=phase, phase_at=p.now.wall_s, ready_at=ready_at)
            p.draft.emit("phase", Put(ref=Ref(Kind.REPLICA, replica.id), record=record))
        if not p.restoring and (head := gang.head_released(p.index, replica, incarnation=p.incarnation)) is not None:
            p.draft.emit("start", Put(ref=order_ref(head.node, replica.id, head.rank), record=head))
        profile = profiles.get(replica.profile)
        for shard in replica.shards:
            ref = order_ref(shard.node, replica.id, shard.rank)
            order = p.index.assignments.record(ref.name)
            if order is None:
                continue
            if replica.id not in p.index.secrets:
                secret = EngineSecret(replica=replica.id, key=order.engine_key)
                p.draft.emit("repair", Put(ref=Ref(Kind.SECRET, replica.id), record=secret))
            if profile is not None and (order.start_s, order.drain_s) != (profile.start_s, profile.drain_s):
                again = msgspec.structs.replace(order, start_s=profile.start_s, drain_s=profile.drain_s)
                p.draft.emit("update", Put(ref=ref, record=again))


def tend(p: Pass, name: str, inventory: Inventory) -> Tended | None:
    """Decide everything about one model but what is said of it (`conclude`); None where nothing may be decided."""
    index = p.index
    spec = index.models.record(name)
    tend_live(p, name, spec)
    if Ref(Kind.MODEL, name) in index.corrupted or Ref(Kind.MODEL_STATE, name) in index.corrupted:
        return None
    state = index.model_states.record(name) or _first_state(index, name)
    model = Tended(name=name, spec=spec, state=state, targets={} if spec is None else tokens(index, spec))
    if p.restoring:
        if spec is not None:
            scale = at_least(spec, state, _live(index, name), now=p.now)
            model.state = msgspec.structs.replace(state, scale=scale)
        return model
    _scale(p, model)
    _fail(p, model)
    _retire(p, model)
    if spec is not None:
        _settle_backoff(p, model)
        _place(p, model, spec, inventory)
    return model


def _census(p: Pass, model: Tended) -> Census:
    """How the model stands now. Counted anew only when something of any node, or its state, has changed since.

    Within a pass nothing else matters to it: the pass writes no spec and no wish, and every replica is on some node.
    """
    tick, known = p.index.tick, model.counted
    if known is not None and known[0] == tick and known[1] is model.state:
        return known[2]
    census = take_census(p.index, model.name, spec=model.spec, state=model.state, targets=model.targets)
    model.counted = (tick, model.state, census)
    return census


def _first_state(index: Index, name: str) -> ModelState:
    """Of a model that has none: what runs already, after its state was lost, is as many as are wanted."""
    return ModelState(name=name, wanted=_live(index, name), placed=0, ready=0)


def _live(index: Index, name: str) -> int:
    return sum(1 for replica in replicas_of(index, name) if is_live(replica))


def _scale(p: Pass, model: Tended) -> None:
    """Take over what load has led to. Before anything follows from it: between groups the process may die."""
    scale = None if model.spec is None else decide(model.spec, model.state, p.view.load, now=p.now)
    if scale is not model.state.scale:
        model.state = msgspec.structs.replace(model.state, scale=scale)
        p.draft.put("state", Ref(Kind.MODEL_STATE, model.name), model.state)


def _profile(model: Tended, replica: Replica) -> Profile | None:
    profiles = () if model.spec is None else model.spec.profiles
    return next((profile for profile in profiles if profile.name == replica.profile), None)


def _fail(p: Pass, model: Tended) -> None:
    """Take down what has failed, and let the model wait before it is built anew; a rollout that failed stops."""
    index, census, known = p.index, _census(p, model), model.targets
    failed: list[tuple[Replica, str, Retire]] = []
    for replica in readable_replicas(index, model.name):
        found = _failure(p, replica) if is_live(replica) else None
        if found is None:
            continue
        nodes, reason, why = found
        attempt = model.state.attempt + 1
        retry_at = p.now.wall_s + backoff_s(model.name, attempt, p.settings)
        until = {each: at for each, at in model.state.failed_nodes.items() if at > p.now.wall_s}
        if why is Retire.FAILED:  # what merely lost its order says nothing of its node, nor of the launch
            until |= dict.fromkeys(nodes, retry_at + p.settings.backoff_max_s)
        young = why is Retire.FAILED and replica.phase is not ReplicaPhase.READY
        spoils = young and replica in census.current and bool(census.outdated)
        model.state = msgspec.structs.replace(
            model.state,
            attempt=attempt,
            retry_at=retry_at,
            failed_nodes=dict(sorted(until.items(), key=lambda item: (item[1], item[0]))[-FAILED_NODES_MAX:]),
            failure=f"{replica.id} on {', '.join(nodes)}: {reason}"[:REASON_LEN_MAX],
            launch_failed=known[replica.launch] if spoils else model.state.launch_failed,
        )
        failed.append((replica, reason, why))
    if failed:  # first what must not be forgotten: between these groups the process may die
        p.draft.put("state", Ref(Kind.MODEL_STATE, model.name), model.state)
    for replica, reason, why in failed:
        profile = _profile(model, replica)
        p.draft.emit("fail", *retired(index, replica, why=why, reason=reason, now=p.now, profile=profile))


def _failure(p: Pass, replica: Replica) -> tuple[tuple[str, ...], str, Retire] | None:
    """(nodes to blame, what happened, kind) when a replica in routing has failed, or never came together in time."""
    if (found := failure(p.index, replica, incarnation=p.incarnation)) is not None:
        node, reason, why = found
        return (node,), reason, why
    wait_s = gang.late_in_s(p.index, replica, now=p.now, view=p.view)
    if wait_s is None or wait_s > 0:
        if wait_s is not None:
            p.wake_in(Wake.MODEL, replica.model, delay_s=wait_s)
        return None
    nodes, reason = gang.late_ranks(p.index, replica)
    return nodes, reason, Retire.FAILED


def _retire(p: Pass, model: Tended) -> None:
    """Take down what is not needed any more."""
    for replica, why, reason in retirements(_census(p, model)):
        profile = _profile(model, replica)
        p.draft.emit(why.value, *retired(p.index, replica, why=why, reason=reason, now=p.now, profile=profile))


def _settle_backoff(p: Pass, model: Tended) -> None:
    """Forget past failures once everything wanted has been ready for long enough; say when to look again."""
    state, census = model.state, _census(p, model)
    if state.attempt == 0:
        return
    ready = [replica for replica in census.steady if replica.id in census.ready]
    if ready and len(ready) >= census.target:
        since = max(replica.phase_at for replica in ready)
        if p.now.wall_s - since >= p.settings.stable_s:
            clean = msgspec.structs.replace(state, attempt=0, retry_at=None, failed_nodes={})
            model.state = clean if census.stopped and census.outdated else msgspec.structs.replace(clean, failure="")
        else:
            p.wake_at(Wake.MODEL, model.name, wall_s=since + p.settings.stable_s)


def _place(p: Pass, model: Tended, spec: ModelSpec, inventory: Inventory) -> None:
    """Place what is missing, and the next replica of a rollout."""
    retry_at = waits_until(model.state, now=p.now, settings=p.settings)
    if retry_at is None and (model.state.retry_at or 0.0) > p.now.wall_s:
        # What a clock said that has stepped back is forgotten, or it would hold again once that moment comes near.
        model.state = msgspec.structs.replace(model.state, retry_at=None)
    failed = frozenset(node for node, until in model.state.failed_nodes.items() if until > p.now.wall_s)
    while True:
        census = _census(p, model)
        if census.need == 0 and not census.may_surge:
            return
        if retry_at is not None:
            p.wake_at(Wake.MODEL, model.name, wall_s=retry_at)
            return
        if p.tries <= 0:
            model.short = True
            return
        outcome = _try(p, spec, inventory, failed=failed)
        if isinstance(outcome, Rejection):
            model.rejected, model.rejected_after = outcome, len(p.draft.groups)
            if census.need == 0:
                _make_room(p, model, spec, census, inventory)
            return
        stands_for = next(iter(census.replaceable), None)
        writes = new_replica(
            spec,
            outcome,
            replica=fresh_id(p.index, spec.name, p.ids),
            key=p.ids.key(),
            replaces=None if stands_for is None else stands_for.id,
            now=p.now,
            gang=gang.arrange(p.index, outcome),
        )
        p.draft.emit("place", *writes)
        placed = tuple(write.record for write in writes if isinstance(write, Put) and isinstance(write.record, Replica))
        grown = msgspec.structs.replace(census, current=(*census.current, *placed))
        model.counted = (p.index.tick, model.state, grown)


def _try(p: Pass, spec: ModelSpec, inventory: Inventory, *, failed: frozenset[str]) -> Placement | Rejection:
    """Where one more replica goes. Whatever that costs is taken off what the pass may still try."""
    ledger = ledger_of(p.index)
    judged = ledger.judged
    outcome = place(inventory, spec, failed=failed)
    p.tries -= 1 + (ledger.judged - judged) // JUDGED_PER_TRY
    return outcome


def _make_room(p: Pass, model: Tended, spec: ModelSpec, census: Census, inventory: Inventory) -> None:
    """A rollout that has no room for two: the old replica goes first, if that is what makes room."""
    for old in old_first(census.outdated):
        names = [shard_name(shard.node, old.id, shard.rank) for shard in old.shards]
        without: list[Write] = [Delete(ref=Ref(Kind.REPLICA, old.id))]
        without += [Delete(ref=Ref(kind, name)) for name in names for kind in (Kind.ASSIGNMENT, Kind.SHARD)]
        with p.draft.imagine(*without):
            fits = isinstance(place(inventory, spec), Placement)
        if fits:
            why, reason = Retire.ROLLED, "another launch is wanted, and there is no room for both"
            profile = _profile(model, old)
            p.draft.emit(why.value, *retired(p.index, old, why=why, reason=reason, now=p.now, profile=profile))
            return


def conclude(p: Pass, model: Tended, inventory: Inventory) -> None:
    """Write what is to be said of the model, from where the whole pass has left it."""
    ref = Ref(Kind.MODEL_STATE, model.name)
    census = _census(p, model)
    if model.spec is None and not p.index.replicas_of.get(model.name):
        if ref.name in p.index.model_states and not p.restoring:
            p.draft.emit("state", Delete(ref=ref))
        return
    live = (*census.lost, *census.drained, *census.steady)
    state = msgspec.structs.replace(
        model.state,
        wanted=census.wanted,
        placed=len(live) + census.frozen,
        ready=sum(1 for replica in live if replica.phase is ReplicaPhase.READY and replica not in census.lost),
        rollout=_rollout(census),
        launch_failed=model.state.launch_failed if census.outdated else None,
    )
    if not model.short:
        state = _explained(p, model, state, inventory)
    p.draft.put("state", ref, msgspec.structs.replace(state, reason=_reason(p, state, census)), first=True)


def _rollout(census: Census) -> Rollout:
    if not census.outdated:
        return Rollout.NONE
    return Rollout.STOPPED if census.stopped else Rollout.ROLLING


def _explained(p: Pass, model: Tended, state: ModelState, inventory: Inventory) -> ModelState:
    """`state` with why nothing fits, judged by what the whole pass leaves; as stored when only numbers differ."""
    if model.rejected is None or model.spec is None:
        return msgspec.structs.replace(state, unplaced=None)
    again = model.rejected if model.rejected_after == len(p.draft.groups) else place(inventory, model.spec)
    rejected = again if isinstance(again, Rejection) else model.rejected  # a pass only takes room away, so it is one
    unplaced = rejected.unplaced(p.index.revision)
    return state if same_but_numbers(state.unplaced, unplaced) else msgspec.structs.replace(state, unplaced=unplaced)


def _reason(p: Pass, state: ModelState, census: Census) -> str:
    """One sentence for people: what keeps the model from being as it should, the most pressing first."""
    if p.restoring:
        return render(Refusal(constraint=Constraint.RESTORING, profile=""))
    if state.rollout is Rollout.STOPPED:
        return f"rollout stopped: {state.failure}"
    lacking = len(census.ready) < census.target
    if state.unplaced is not None:
        return summarise(state.unplaced)[:REASON_LEN_MAX]
    return state.failure if state.attempt > 0 and lacking else ""
