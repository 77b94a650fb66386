"""A word for what nobody ordered: shards that run without an assignment, and orders that have lost their replica.

The absence of a key never stops anything, so an agent keeps such a shard running and reports it with the whole order it
saved; the leader answers in its next pass: adopted under the same id from exactly that order, or told to stop.

A gang is adopted whole or told to stop whole: half of one would hold claims without serving, and the claims of a member
are known only from its own saved order. Nodes notice that an order is gone at different moments, and one that is
Unreachable can't say so at all; so the word waits for a member that may still speak, until it does or its node is Lost.

Invariant: an adopted claim collides with no other, and the catalog is never asked what an adopted shard holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from llmgw.core.draft import Draft
from llmgw.core.ids import Secret, shard_name, split_shard_name
from llmgw.core.inventory import node_inventory
from llmgw.core.lifecycle import bare_stop, observed_phase
from llmgw.core.node import Liveness
from llmgw.core.plan import Delete, Put, Write
from llmgw.core.reading import is_frozen, is_live, order_ref
from llmgw.core.replica import (
    GONE,
    Assignment,
    Claim,
    Desired,
    EngineSecret,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    confirms_stop,
    live_shard,
)
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.units import Now

ANSWERS_MAX: Final = 300
"""Words given in one pass, so that a whole fleet's do not hold up the loop; about 0.1 ms each."""


def answer(draft: Draft, names: Iterable[str], *, incarnation: str, restoring: bool, now: Now) -> list[str]:
    """Give every unassigned shard, and every order without a replica, among `names` its word.

    `restoring`: the store was restored and not every node has reported, so that nothing may be stopped yet; what can't
    be adopted then stays unanswered. Returns those that it did not come to, after `ANSWERS_MAX` words.
    """
    index, names, full = draft.index, sorted(names), len(draft.groups) + ANSWERS_MAX
    for at, name in enumerate(names):
        if len(draft.groups) >= full:
            return names[at:]
        parts = split_shard_name(name)
        if parts is None or is_frozen(index, parts[1]):
            continue
        if name in index.assignments:
            _orphan(draft, name, restoring=restoring, now=now)
        else:
            _unassigned(draft, name, incarnation=incarnation, restoring=restoring, now=now)
    return []


def concerned(index: Index, *, nodes: set[str], models: set[str]) -> set[str]:
    """Of all that may need a word: what a change of these nodes or models may let have it.

    A shard's word depends on its own node, on its model, and on the nodes of the other shards of its gang.
    """
    return {name for name in index.standing.unanswered if _concerned(index, name, nodes, models)}


def _concerned(index: Index, name: str, nodes: set[str], models: set[str]) -> bool:
    node, replica, _ = split_shard_name(name) or ("", "", 0)
    if node in nodes:
        return True
    order, report = index.assignments.record(name), index.reports.record(name)
    if any(each is not None and each.model in models for each in (order, report)):
        return True
    others = index.assignments_of.get(replica, set()) | index.reports_of.get(replica, set())
    return any(other.partition("/")[0] in nodes for other in others)


def catalog_known(index: Index) -> bool:
    """Whether anybody ever told this store what is wanted. An empty store (a wiped one) is no wish to have nothing."""
    return index.generation is not None or bool(index.models)


def _orphan(draft: Draft, name: str, *, restoring: bool, now: Now) -> None:
    """An order whose replica does not speak of it: confirmed and deleted, or taken as what to adopt."""
    index = draft.index
    row = index.assignments[name]
    order = row.record
    replica = None if order is None else index.replicas.record(order.replica)
    if order is None or live_shard(replica, node=order.node, rank=order.rank) is not None:
        return
    if order.desired is Desired.STOPPED:
        if confirms_stop(index.reports.record(name), order_rev=row.mod_revision) and not restoring:
            draft.emit("end", Delete(ref=Ref(Kind.ASSIGNMENT, name)))
        return
    _adopt_or_stop(draft, order, restoring=restoring, now=now)


def _unassigned(draft: Draft, name: str, *, incarnation: str, restoring: bool, now: Now) -> None:
    """A shard that its node runs without an order."""
    index = draft.index
    report = index.reports.record(name)
    session = None if report is None else index.sessions.record(report.node)
    if report is None or report.assigned or report.phase in GONE:
        return
    if session is None or session.store != incarnation:
        return  # nobody is there to hear the answer, or it was said to another store
    order, replica = report.order, index.replicas.record(report.replica)
    if replica is not None and (shard := live_shard(replica, node=report.node, rank=report.rank)) is not None:
        _reissue(draft, replica, shard, order, restoring=restoring)
    elif order is not None:
        _adopt_or_stop(draft, order, restoring=restoring, now=now)
    elif not restoring and catalog_known(index):
        made = bare_stop(
            node=report.node,
            replica=report.replica,
            rank=report.rank,
            model=report.model,
            claim=Claim(),
            key=Secret(""),
        )
        draft.emit("stop", Put(ref=Ref(Kind.ASSIGNMENT, name), record=made))


def _reissue(draft: Draft, replica: Replica, shard: ReplicaShard, order: Assignment | None, *, restoring: bool) -> None:
    """The replica is on record and only its order is gone: write that back, as the replica stands."""
    index = draft.index
    live = is_live(replica) and order is not None
    if not live and restoring:
        return
    if order is None:
        secret = index.secrets.record(replica.id)
        key = Secret("") if secret is None else secret.key
        order = bare_stop(
            node=shard.node, replica=replica.id, rank=shard.rank, model=replica.model, claim=shard.claim, key=key
        )
    again = msgspec.structs.replace(order, desired=Desired.RUNNING if live else Desired.STOPPED, claim=shard.claim)
    writes: list[Write] = [Put(ref=order_ref(shard.node, replica.id, shard.rank), record=again)]
    if replica.id not in index.secrets:
        secret = EngineSecret(replica=replica.id, key=order.engine_key)
        writes.append(Put(ref=Ref(Kind.SECRET, replica.id), record=secret))
    draft.emit("adopt" if live else "stop", *writes)


def _adopt_or_stop(draft: Draft, order: Assignment, *, restoring: bool, now: Now) -> None:
    """An order without a replica: adopt it whole where nothing collides, otherwise tell its shards to stop."""
    index = draft.index
    if Ref(Kind.MODEL, order.model) in index.corrupted:
        return  # whether the model is still wanted can't be read, so it goes on
    orders = _gang(index, order)
    if orders is not None and _adoptable(index, orders):
        draft.emit("adopt", *_adopted(index, orders, now))
    elif not restoring and catalog_known(index) and not (orders is None and awaits_peers(index, order)):
        stopped = msgspec.structs.replace(order, desired=Desired.STOPPED)
        draft.put("stop", order_ref(order.node, order.replica, order.rank), stopped)


def can_be_adopted(index: Index, order: Assignment) -> bool:
    """Whether what runs by this order could be taken as it is, now."""
    orders = _gang(index, order)
    return orders is not None and _adoptable(index, orders)


def awaits_peers(index: Index, order: Assignment) -> bool:
    """Whether a gang could still be adopted whole: all members are known to run, and some have not told their orders.

    They report as if they were ordered: their nodes have not noticed yet, or are away and not given up.
    """
    waiting = False
    for peer in () if order.gang is None else order.gang.peers:
        name = shard_name(peer.node, order.replica, peer.rank)
        report, each = index.reports.record(name), index.assignments.record(name)
        runs = report is not None and report.phase not in GONE
        if each is None and runs and report is not None and not report.assigned:
            each = report.order
        state = index.node_states.record(peer.node)
        lost = state is None or state.liveness is Liveness.LOST
        silent = each is None and runs and report is not None and report.assigned and not lost
        if not silent and (each is None or each.desired is Desired.STOPPED):
            return False
        waiting = waiting or silent
    return waiting


def _gang(index: Index, order: Assignment) -> list[Assignment] | None:
    """The orders of all ranks of a replica, from the store or as its nodes saved them; None while one is missing."""
    found: dict[int, Assignment] = {}
    for name in sorted(index.reports_of.get(order.replica, set()) | index.assignments_of.get(order.replica, set())):
        report, each = index.reports.record(name), index.assignments.record(name)
        if each is None and report is not None and report.phase not in GONE and not report.assigned:
            each = report.order
        if each is not None and (each.rank not in found or each == order):
            found[each.rank] = each
    orders = [found[rank] for rank in sorted(found)]
    whole = [each.rank for each in orders] == list(range(order.launch.nodes)) and order in orders
    apart = len({each.node for each in orders}) == len(orders)
    return orders if whole and apart else None


def _adoptable(index: Index, orders: list[Assignment]) -> bool:
    return orders[0].replica not in index.replicas and _wanted(index, orders) and _fits(index, orders)


def _wanted(index: Index, orders: list[Assignment]) -> bool:
    return orders[0].model in index.models and all(order.desired is not Desired.STOPPED for order in orders)


def _fits(index: Index, orders: list[Assignment]) -> bool:
    """Whether nothing else claims what these shards hold."""
    for order in orders:
        node = node_inventory(index, order.node)
        others = [each for each in node.holdings if each.replica != order.replica]
        claimed = sum(each.claim.memory_bytes or 0 for each in others) + (order.claim.memory_bytes or 0)
        total = node.memory_total_bytes
        if total is not None and order.claim.memory_bytes is not None and claimed > total:
            return False
        taken = {gpu.uuid for each in others for gpu in each.claim.gpus}
        if any(gpu.uuid in taken for gpu in order.claim.gpus):
            return False
    return True


def _adopted(index: Index, orders: list[Assignment], now: Now) -> tuple[Write, ...]:
    """The group that writes a replica back from the orders its nodes saved."""
    first = orders[0]
    record = Replica(
        id=first.replica,
        model=first.model,
        profile=first.launch.profile,
        engine=first.launch.engine,
        launch=first.launch.digest,
        phase=ReplicaPhase.PLACED,
        shards=tuple(ReplicaShard(rank=order.rank, node=order.node, claim=order.claim) for order in orders),
        created_at=now.wall_s,
        phase_at=now.wall_s,
        build=first.launch.build,
        fabric=None if first.gang is None else first.gang.fabric,
        ports=None if first.gang is None else first.gang.block,
        reason="adopted: it ran without an order",
    )
    record = msgspec.structs.replace(record, phase=observed_phase(index, record))
    return (
        Put(ref=Ref(Kind.REPLICA, record.id), record=record),
        Put(ref=Ref(Kind.SECRET, record.id), record=EngineSecret(replica=record.id, key=first.engine_key)),
        *(
            Put(ref=order_ref(order.node, order.replica, order.rank), record=order)
            for order in orders
            if index.assignments.record(shard_name(order.node, order.replica, order.rank)) != order
        ),
    )
