"""The life of one replica: placed, starting, ready, draining, stopping, gone; and what each step writes.

Builders of whole groups, each of which leaves the tree valid: a replica appears with its secret and all its orders, is
taken out of routing and ordered to stop in one step, and disappears with them.

Invariant: a claim ends only when the shard's node has confirmed the stop (`llmgw.core.replica.confirms_stop`), or when
an operator has declared the machine gone. Absence of a report, a session or an order ends nothing.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from llmgw.core import gang as gangs
from llmgw.core.catalog import DRAIN_S, ModelSpec, Profile, Task, launch_hash
from llmgw.core.gpu import lost_gpus
from llmgw.core.ids import Ids, Secret, replica_id, shard_name
from llmgw.core.placement import Placement
from llmgw.core.plan import Delete, Put, Settings, Write
from llmgw.core.reading import name_of, order_ref, report_of
from llmgw.core.replica import (
    GONE,
    Assignment,
    Claim,
    Desired,
    EngineSecret,
    Gang,
    Launch,
    ModelState,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    Retire,
    ShardPhase,
    confirms_stop,
)
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.units import Now
from llmgw.errors import InvariantError

REASON_LEN_MAX: Final = 400
"""Longest reason kept in a record, in characters: a node's last words may be a whole stack trace."""

JITTER: Final = 0.2
"""A backoff is spread by ± this share, so that what failed together does not come back together."""


def fresh_id(index: Index, model: str, ids: Ids) -> str:
    """An id for a new replica that nothing in the tree speaks of.

    Raises:
        InvariantError: the source gives the same ids again and again.
    """
    for _ in range(1000):
        made = replica_id(model, ids.suffix())
        if made not in index.replicas and made not in index.assignments_of and made not in index.reports_of:
            return made
    raise InvariantError(7, f"the source of ids gives no fresh one for {model!r}")


def new_replica(
    spec: ModelSpec,
    placement: Placement,
    *,
    replica: str,
    key: Secret,
    replaces: str | None,
    now: Now,
    gang: Gang | None = None,
) -> tuple[Write, ...]:
    """The group that brings a replica into being: its record with all claims, its secret, an order for each shard.

    `gang`: how its shards find each other (`llmgw.core.gang.arrange`), None where there is one.
    """
    profile = placement.profile
    launch = Launch(
        source=spec.source,
        task=spec.task,
        profile=profile.name,
        engine=profile.engine,
        build=placement.build,
        context=profile.context,
        slots=profile.slots,
        args=profile.args,
        env=profile.env,
        nodes=profile.nodes,
        gpus_per_node=profile.gpus_per_node,
        tensor_parallel=profile.tensor_parallel,
        pipeline_parallel=profile.pipeline_parallel,
        digest=launch_hash(spec, profile),
    )
    record = Replica(
        id=replica,
        model=spec.name,
        profile=profile.name,
        engine=profile.engine,
        launch=launch.digest,
        phase=ReplicaPhase.PLACED,
        shards=placement.shards,
        created_at=now.wall_s,
        phase_at=now.wall_s,
        build=placement.build,
        fabric=placement.fabric,
        ports=None if gang is None else gang.block,
        replaces=replaces,
        receipt=placement.receipt,
    )
    orders = [
        Assignment(
            node=shard.node,
            replica=replica,
            rank=shard.rank,
            model=spec.name,
            desired=gangs.first_wish(gang, engine=profile.engine, rank=shard.rank),
            launch=launch,
            claim=shard.claim,
            engine_key=key,
            start_s=profile.start_s,
            drain_s=profile.drain_s,
            gang=gang,
        )
        for shard in placement.shards
    ]
    return (
        Put(ref=Ref(Kind.REPLICA, replica), record=record),
        Put(ref=Ref(Kind.SECRET, replica), record=EngineSecret(replica=replica, key=key)),
        *(Put(ref=order_ref(order.node, replica, order.rank), record=order) for order in orders),
    )


def retired(
    index: Index, replica: Replica, *, why: Retire, reason: str, now: Now, profile: Profile | None
) -> tuple[Write, ...]:
    """The group that takes a replica out of routing and orders its shards to stop, in one step.

    All of them, but workers of a gang that still answers requests: they follow when its head is done.

    `profile`: what people say now of how long its requests may take to finish; None when they say nothing any more.
    """
    phase = ReplicaPhase.FAILED if why in (Retire.FAILED, Retire.UNKNOWN) else ReplicaPhase.DRAINING
    record = msgspec.structs.replace(
        replica, phase=phase, phase_at=now.wall_s, retire=why, reason=reason[:REASON_LEN_MAX]
    )
    drain_s = None if profile is None else profile.drain_s
    if phase is ReplicaPhase.FAILED and len(replica.shards) > 1:
        drain_s = 0.0  # what is left of a gang answers nothing any more
    orders = [stop_order(index, replica, shard, drain_s=drain_s) for shard in gangs.stoppable(index, record)]
    return (
        Put(ref=Ref(Kind.REPLICA, replica.id), record=record),
        *(
            Put(ref=order_ref(order.node, replica.id, order.rank), record=order)
            for order in orders
            if order != index.assignments.record(shard_name(order.node, replica.id, order.rank))
        ),
    )


def stop_order(index: Index, replica: Replica, shard: ReplicaShard, *, drain_s: float | None = None) -> Assignment:
    """The order to stop one shard: its present order with another wish, or one made up where that is gone.

    A worker of a gang gets no time to finish: requests are its head's, which comes first.
    """
    drain_s = 0.0 if shard.rank > 0 else drain_s
    order = index.assignments.record(name_of(replica, shard))
    if order is None:
        secret = index.secrets.record(replica.id)
        return bare_stop(
            node=shard.node,
            replica=replica.id,
            rank=shard.rank,
            model=replica.model,
            claim=shard.claim,
            key=Secret("") if secret is None else secret.key,
        )
    return msgspec.structs.replace(
        order, desired=Desired.STOPPED, drain_s=order.drain_s if drain_s is None else drain_s
    )


def bare_stop(*, node: str, replica: str, rank: int, model: str, claim: Claim, key: Secret) -> Assignment:
    """An order to stop a shard whose launch nobody remembers; nothing is ever started from it."""
    launch = Launch(source="", task=Task.GENERATE, profile="", engine="", context=0, slots=0)
    return Assignment(
        node=node,
        replica=replica,
        rank=rank,
        model=model,
        desired=Desired.STOPPED,
        launch=launch,
        claim=claim,
        engine_key=key,
        drain_s=DRAIN_S,
    )


def observed_phase(index: Index, replica: Replica) -> ReplicaPhase:
    """The phase that a replica in routing is seen in; readiness comes from rank 0 alone, failure is judged apart."""
    reports = [report_of(index, replica, shard) for shard in replica.shards]
    if any(report is not None and report.phase is ShardPhase.FAILED for report in reports):
        return replica.phase
    head = next((report for shard, report in zip(replica.shards, reports, strict=True) if shard.rank == 0), None)
    if head is not None and head.phase is ShardPhase.READY:
        return ReplicaPhase.READY
    started = any(report is not None and report.phase is not ShardPhase.HELD for report in reports)
    return ReplicaPhase.STARTING if started or replica.phase is not ReplicaPhase.PLACED else ReplicaPhase.PLACED


def failure(index: Index, replica: Replica, *, incarnation: str) -> tuple[str, str, Retire] | None:
    """(node, what happened, kind) when a replica in routing has failed beyond what its node mends by itself.

    Of several shards the one that failed first is named; where their nodes can't tell, a worker before its head, which
    falls with its workers.
    """
    found: list[tuple[tuple[bool, float, bool, int], tuple[str, str, Retire]]] = []
    for shard in replica.shards:
        if (what := _shard_failure(index, replica, shard, incarnation=incarnation)) is not None:
            report = report_of(index, replica, shard)
            failed_at = report.phase_at if report is not None and report.phase is ShardPhase.FAILED else 0.0
            found.append(((what[2] is not Retire.FAILED, failed_at, shard.rank == 0, shard.rank), what))
    return min(found, key=lambda each: each[0])[1] if found else None


def _shard_failure(
    index: Index, replica: Replica, shard: ReplicaShard, *, incarnation: str
) -> tuple[str, str, Retire] | None:
    name = name_of(replica, shard)
    report, session = index.reports.record(name), index.sessions.record(shard.node)
    here = session is not None and session.store == incarnation
    if here and (lost := lost_gpus(index.facts.record(shard.node), shard.claim)):
        return shard.node, "; ".join(lost), Retire.FAILED
    if report is not None and report.phase is ShardPhase.FAILED:
        return shard.node, report.reason or "the engine failed and the node gave no reason", Retire.FAILED
    if name not in index.assignments and here and (report is None or report.phase in GONE):
        return shard.node, "its order is gone and nothing runs", Retire.UNKNOWN
    row = index.assignments.get(name)
    if row is None or row.record is None:
        return None
    if row.record.desired is Desired.STOPPED:
        # Nobody remembers how it was launched, so it could only be told to stop (`llmgw.core.adoption`).
        return shard.node, "its order was lost, and its node does not know it either", Retire.UNKNOWN
    if confirms_stop(report, order_rev=row.mod_revision):
        # A stop is final: it was ordered before, in a history that a restore has undone.
        return shard.node, "its node had stopped it for good before this order", Retire.UNKNOWN
    return None


def release(
    index: Index, replica: Replica, *, gone: frozenset[str] = frozenset()
) -> tuple[str, tuple[Write, ...]] | None:
    """What a replica on its way out gives back now: (cause, writes), None when nothing.

    `gone`: nodes that an operator has declared gone for good. Whole when the last shard is confirmed, so that a single
    one disappears in one step; else what a node confirmed is released and the others' claims stay where they are.
    """
    ended: list[ReplicaShard] = []
    writes: list[Write] = []
    for shard in replica.shards:
        name = name_of(replica, shard)
        row = index.assignments.get(name)
        confirmed = (
            row is not None
            and row.record is not None
            and row.record.desired is Desired.STOPPED
            and confirms_stop(index.reports.record(name), order_rev=row.mod_revision)
        )
        if shard.released or confirmed or shard.node in gone:
            ended.append(shard)
            if row is not None and (confirmed or shard.node in gone):
                # What a machine that was declared gone still runs when it is back is told to stop; that order stays.
                writes.append(Delete(ref=Ref(Kind.ASSIGNMENT, name)))
    if len(ended) == len(replica.shards):
        return "end", (
            Delete(ref=Ref(Kind.REPLICA, replica.id)),
            Delete(ref=Ref(Kind.SECRET, replica.id)),
            *writes,
        )
    if not any(not shard.released for shard in ended):
        return None
    shards = tuple(
        msgspec.structs.replace(shard, released=True) if shard in ended else shard for shard in replica.shards
    )
    record = msgspec.structs.replace(replica, shards=shards)
    return "release", (Put(ref=Ref(Kind.REPLICA, replica.id), record=record), *writes)


def leaving_phase(index: Index, replica: Replica) -> ReplicaPhase:
    """The phase of a replica on its way out: stopping once no shard of it, as ordered, finishes requests any more."""
    if replica.phase is not ReplicaPhase.DRAINING:
        return replica.phase
    for shard in replica.shards:
        row = index.assignments.get(name_of(replica, shard))
        report = report_of(index, replica, shard)
        answers = report is not None and row is not None and report.assignment_rev >= row.mod_revision
        if not shard.released and not (answers and report is not None and report.phase in _PAST_DRAINING):
            return ReplicaPhase.DRAINING
    return ReplicaPhase.STOPPING


_PAST_DRAINING: Final = frozenset({ShardPhase.STOPPING, *GONE})


def backoff_s(model: str, attempt: int, settings: Settings) -> float:
    """How long a model waits after its `attempt`-th failed replica in a row, seconds.

    Base × 2ⁿ up to the maximum, spread by a hash of model and attempt: the core draws no random numbers.
    """
    doubled = settings.backoff_base_s * 2.0 ** min(attempt - 1, 30)
    digest = hashlib.sha256(f"{model}\0{attempt}".encode()).digest()
    share = int.from_bytes(digest[:8]) / 2**64
    return min(settings.backoff_max_s, doubled) * (1 - JITTER + 2 * JITTER * share)


def waits_until(state: ModelState, *, now: Now, settings: Settings) -> float | None:
    """Until when (Unix seconds) a model still waits after failed replicas; None when it does not.

    What lies further ahead than any backoff was said by a clock that has stepped back since; it holds nobody up.
    """
    retry_at = state.retry_at
    if retry_at is None or not 0 < retry_at - now.wall_s <= settings.backoff_max_s * (1 + JITTER):
        return None
    return retry_at
