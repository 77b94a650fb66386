"""Everything there is to say of one model at one moment: where it runs, what it waits for, where one more could go.

Pure, and as data; `llmgw explain` renders it. Why a replica is where it is stands in its receipt; where one more could
go is worked out anew by the rules that placement itself goes by.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from llmgw.core.catalog import ModelSpec
from llmgw.core.explain import Refusal
from llmgw.core.fleet import is_restoring, unreported
from llmgw.core.inventory import Inventory
from llmgw.core.launch_diff import why_rolled
from llmgw.core.model_text import why_now
from llmgw.core.node import Guard, Liveness
from llmgw.core.placement import Fit, Placement, place, rank
from llmgw.core.placement import explain as weigh
from llmgw.core.reading import is_frozen, is_live, order_ref, replicas_of, report_of
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    ModelState,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    ShardPhase,
)
from llmgw.core.snapshot import Index, Kind, Ref


class ReplicaExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. `waits_for`: who or what keeps it from its next phase, empty when nothing does.

    `gpus`: indices of the GPUs it holds, by shard, as the nodes count them now. `rolls`: what is wanted otherwise than
    it was launched; empty when nothing is.
    """

    replica: Replica
    waits_for: str = ""
    gpus: tuple[tuple[int, ...], ...] = ()
    rolls: str = ""


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """One profile, for one more replica now: the nodes that fit, best first, and those that do not."""

    profile: str
    priority: int
    fits: tuple[Fit, ...] = ()
    refused: tuple[Refusal, ...] = ()


class Next(msgspec.Struct, frozen=True, kw_only=True):
    """Where one more replica would go: nodes and claims by rank."""

    profile: str
    nodes: tuple[str, ...]
    claims: tuple[Claim, ...]
    build: str | None
    fabric: str | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One model at one moment.

    `asked`: the name it was asked for by, its own or an alias. `spec` None: not in the catalog (any more), or never
    readable. `why`: what keeps it from being as it should, in one sentence. `unreadable`: places that can't be read.
    `led`: somebody leads. `guard`: None while it is off. `waiting_for`: the store was restored, and nothing is decided
    before these nodes have reported; None where that is over. `next`: None where one more fits nowhere. `refused`: why
    the shards of a gang that fit one by one do not fit together.
    """

    name: str
    asked: str
    revision: int
    spec: ModelSpec | None
    state: ModelState | None
    why: str = ""
    unreadable: tuple[str, ...] = ()
    led: bool = True
    guard: Guard | None = None
    waiting_for: tuple[str, ...] | None = None
    replicas: tuple[ReplicaExplanation, ...] = ()
    profiles: tuple[Verdicts, ...] = ()
    next: Next | None = None
    refused: tuple[Refusal, ...] = ()


def known_models(index: Index) -> list[str]:
    """Every model that anything speaks of, sorted."""
    return sorted({*index.models, *index.model_states, *index.replicas_of})


def explain_model(index: Index, name: str, *, wall_s: float, asked: str = "") -> Explanation:
    """All that is to be said of one of `known_models`, as of `wall_s`, Unix seconds."""
    spec, state = index.models.record(name), index.model_states.record(name)
    refs = (Ref(Kind.MODEL, name), Ref(Kind.MODEL_STATE, name))
    meta, fleet = index.meta, None if index.fleet is None else index.fleet.record
    incarnation = None if meta is None or meta.record is None else meta.record.incarnation
    restoring = incarnation is not None and is_restoring(index, incarnation)
    said = Explanation(
        name=name,
        asked=asked or name,
        revision=index.revision,
        spec=spec,
        state=state,
        why="" if state is None else why_now(state, wall_s),
        unreadable=tuple(f"{ref.kind.value}{ref.name}" for ref in refs if ref in index.corrupted),
        led=index.leader is not None,
        guard=fleet.guard if fleet is not None and fleet.guard.on else None,
        waiting_for=tuple(unreported(index, incarnation)) if incarnation is not None and restoring else None,
        replicas=tuple(_explained(index, replica) for replica in replicas_of(index, name)),
    )
    return said if spec is None else _with_verdicts(said, index, spec, state, wall_s)


def _with_verdicts(
    said: Explanation, index: Index, spec: ModelSpec, state: ModelState | None, wall_s: float
) -> Explanation:
    failed = {} if state is None else state.failed_nodes
    lately = frozenset(node for node, until in failed.items() if until > wall_s)
    inventory = Inventory(index)
    verdicts = weigh(inventory, spec, failed=lately)
    profiles = [
        Verdicts(
            profile=profile.name,
            priority=profile.priority,
            fits=tuple(sorted(_fits(verdicts, profile.name), key=lambda fit: rank(fit.score))),
            refused=tuple(_refused(verdicts, profile.name)),
        )
        for profile in spec.by_priority
    ]
    placement, following = place(inventory, spec, failed=lately), None
    if isinstance(placement, Placement):
        following = Next(
            profile=placement.profile.name,
            nodes=tuple(shard.node for shard in placement.shards),
            claims=tuple(shard.claim for shard in placement.shards),
            build=placement.build,
            fabric=placement.fabric,
        )
    refused = tuple(_refused(verdicts, ""))
    return msgspec.structs.replace(said, profiles=tuple(profiles), next=following, refused=refused)


def _fits(verdicts: list[Fit | Refusal], profile: str) -> Iterator[Fit]:
    return (each for each in verdicts if isinstance(each, Fit) and each.profile == profile)


def _refused(verdicts: list[Fit | Refusal], profile: str) -> Iterator[Refusal]:
    return (each for each in verdicts if isinstance(each, Refusal) and each.profile == profile)


# --- one replica ----------------------------------------------------------------------------------------------------


def _explained(index: Index, replica: Replica) -> ReplicaExplanation:
    return ReplicaExplanation(
        replica=replica,
        waits_for=waits_for(index, replica),
        gpus=tuple(_indices(index, shard) for shard in replica.shards),
        rolls=why_rolled(index, index, replica) if is_live(replica) else "",
    )


def _indices(index: Index, shard: ReplicaShard) -> tuple[int, ...]:
    facts = index.facts.record(shard.node)
    known = {} if facts is None else {gpu.uuid: gpu.index for gpu in facts.gpus or ()}
    return tuple(sorted(known[gpu.uuid] for gpu in shard.claim.gpus if gpu.uuid in known))


def waits_for(index: Index, replica: Replica) -> str:
    """Who or what keeps a replica from its next phase; empty when it is ready and all its nodes are there."""
    if is_frozen(index, replica.id):
        return "a record of it can't be read: nothing about it is decided before that is written anew"
    told = [text for shard in replica.shards if not shard.released and (text := _lacks(index, replica, shard))]
    return "; ".join(told)


def _lacks(index: Index, replica: Replica, shard: ReplicaShard) -> str:
    rank = f"rank {shard.rank} on " if len(replica.shards) > 1 else ""
    where, report = f"{rank}{shard.node}", report_of(index, replica, shard)
    phase = "nothing reported yet" if report is None else report.phase.value
    if report is not None and report.reason:
        phase = f"{phase}: {report.reason}"
    if report is not None and report.attempts:
        phase = f"{phase}, {report.attempts} failed {'start' if report.attempts == 1 else 'starts'} so far"
    if shard.node not in index.sessions:
        state = index.node_states.record(shard.node)
        gone = "not there" if state is None or state.liveness is Liveness.READY else state.liveness.value
        return f"{where}, which is {gone}" + ("" if is_live(replica) else ", to confirm that nothing of it runs there")
    if not is_live(replica):
        return f"{where} to confirm that nothing of it runs there ({phase})"
    if replica.phase is ReplicaPhase.READY or (report is not None and report.phase is ShardPhase.READY):
        return ""
    row = index.row(order_ref(shard.node, replica.id, shard.rank))
    if row is not None and isinstance(row.record, Assignment) and row.record.desired is Desired.HELD:
        return f"{where}, held until all the others listen ({phase})"
    return f"{where} to get its engine ready ({phase})"
