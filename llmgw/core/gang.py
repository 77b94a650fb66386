"""Replicas that span nodes: how their shards find each other, who starts when, and for how long that is waited for.

A gang lives and dies as a whole. Its head (rank 0) alone serves; the other ranks are workers, which have no requests
of their own. What follows from that for the life of a replica is said here, and done in `llmgw.core.lifecycle` and
`llmgw.core.model`.

Invariants: no two gangs that could ever meet share a port; a head that its engine's gate holds starts only when every
worker listens; a gang that never got ready is given up after a stated time without a visible step, whatever its nodes
do. What was ready once is never given up for time alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from llmgw.core.catalog import START_S
from llmgw.core.gang_ports import PORTS, common, lowest
from llmgw.core.inventory import node_inventory
from llmgw.core.placement import Placement
from llmgw.core.plan import Forming, View
from llmgw.core.reading import name_of, report_of
from llmgw.core.replica import (
    GONE,
    Assignment,
    Desired,
    Gang,
    Peer,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    ShardPhase,
)
from llmgw.core.snapshot import Index
from llmgw.core.units import Now
from llmgw.errors import InvariantError

HEAD_WAITS: Final[Mapping[str, bool]] = {"llama.cpp": True, "sglang": False, "vllm": False}
"""Whether an engine's head must be held until its workers listen. Source: a llama.cpp head that finds no rpc-server
loads the whole model by itself, or exits (build 10434); the workers of vLLM and SGLang wait at the head's store, and
are never ready before it is up (vllm/v1/executor, sglang/srt/server_args.py)."""

WORD_S: Final = 15.0
"""How much longer than its nodes the leader waits for a gang, seconds: an agent whose engine was too slow says so by
itself, with the engine's last words, once it has ended it."""


# --- how it is made -------------------------------------------------------------------------------------------------


def arrange(index: Index, placement: Placement) -> Gang | None:
    """How the shards of `placement` find each other; None where there is one.

    Raises:
        InvariantError: a node has no address, or they have no block of ports in common: it was no place for a gang.
    """
    if len(placement.shards) == 1:
        return None
    names = [shard.node for shard in placement.shards]
    nodes = [node_inventory(index, name) for name in names]
    start = lowest(common(node.gang_starts for node in nodes))
    if start is None:
        raise InvariantError(3, f"{', '.join(names)} have no ports for a gang in common")
    peers: list[Peer] = []
    for shard, node in zip(placement.shards, nodes, strict=True):
        if node.address is None:
            raise InvariantError(3, f"{node.name} was to take part in a gang, and has no address")
        peers.append(Peer(rank=shard.rank, node=shard.node, address=node.address))
    return Gang(fabric=placement.fabric or "", peers=tuple(peers), ports=tuple(range(start, start + PORTS)))


# --- how it starts --------------------------------------------------------------------------------------------------


def first_wish(gang: Gang | None, *, engine: str, rank: int) -> Desired:
    """What a new shard is ordered to do."""
    held = gang is not None and rank == 0 and HEAD_WAITS.get(engine, False)
    return Desired.HELD if held else Desired.RUNNING


def head_released(index: Index, replica: Replica, *, incarnation: str) -> Assignment | None:
    """The order that ends the hold on the head, once every worker is ready; None while there is nothing to end.

    A worker counts as ready while its node is there and has told so to this incarnation of the store. A head that its
    node says is beyond the hold (a restored store knows no better) is no longer held either.
    """
    head = next((shard for shard in replica.shards if shard.rank == 0), None)
    order = None if head is None else index.assignments.record(name_of(replica, head))
    if head is None or order is None or order.desired is not Desired.HELD:
        return None
    report = report_of(index, replica, head)
    runs = report is not None and report.phase is not ShardPhase.HELD and report.phase not in GONE
    workers = [shard for shard in replica.shards if shard.rank != 0]
    if not runs and not all(_listens(index, replica, shard, incarnation=incarnation) for shard in workers):
        return None
    return msgspec.structs.replace(order, desired=Desired.RUNNING)


def _listens(index: Index, replica: Replica, shard: ReplicaShard, *, incarnation: str) -> bool:
    row, session = index.assignments.get(name_of(replica, shard)), index.sessions.record(shard.node)
    report = report_of(index, replica, shard)
    here = session is not None and session.store == incarnation
    answers = row is not None and report is not None and report.assignment_rev >= row.mod_revision
    return here and answers and report is not None and report.phase is ShardPhase.READY


# --- how long that may take -----------------------------------------------------------------------------------------


def observe(view: View, index: Index, *, now: Now) -> View:
    """`view` with `forming` brought up to date: the last visible step of every gang that never was ready.

    By this leader's monotonic clock, so that no wall clock can end a load; the next leader counts anew.
    """
    there = (index.replicas.record(each) for each in index.forming)
    seen = {replica.id: _seen(view, index, replica, now) for replica in there if replica is not None}
    return view if seen == view.forming else msgspec.structs.replace(view, forming=seen)


def _seen(view: View, index: Index, replica: Replica, now: Now) -> Forming:
    step, known = _step(index, replica), view.forming.get(replica.id)
    return known if known is not None and known.step == step else Forming(step=step, mono_s=now.mono_s)


def _step(index: Index, replica: Replica) -> tuple[object, ...]:
    """How far a gang has visibly come. An agent bounds what a rank may take, so this changes a bounded number of times.

    Its parts: for each rank the wish, the phase, whether there is a process, and the budgets added for its progress.
    Before them the store that counts as adopted: no hold ends until a restored one does.
    """
    fleet = None if index.fleet is None else index.fleet.record
    found: list[object] = [None if fleet is None else fleet.incarnation]
    for shard in replica.shards:
        order, report = index.assignments.record(name_of(replica, shard)), report_of(index, replica, shard)
        found.append(None if order is None else order.desired)
        found.append(None if report is None else (report.phase, report.pid is not None, report.extended))
    return tuple(found)


def late_in_s(index: Index, replica: Replica, *, now: Now, view: View) -> float | None:
    """Seconds until a gang on its way to ready is given up; zero or less when that is due, None when it never is."""
    seen = view.forming.get(replica.id)
    if seen is None or replica.id not in index.forming:
        return None
    orders = [index.assignments.record(name_of(replica, shard)) for shard in replica.shards]
    budget_s = max((order.start_s for order in orders if order is not None), default=START_S)
    reports = [report_of(index, replica, shard) for shard in replica.shards]
    if any(report is not None and report.extended for report in reports):
        # Its node says so when a budget begins, and grants it from the progress seen last: at most two from now.
        budget_s *= 2
    since_s = now.mono_s - seen.mono_s if seen.step == _step(index, replica) else 0.0  # this very pass may be a step
    return budget_s + WORD_S - since_s


def late_ranks(index: Index, replica: Replica) -> tuple[tuple[str, ...], str]:
    """Who keeps a gang from getting ready: (nodes, what is said of them). The head only when no worker does."""
    shards = sorted(replica.shards, key=lambda shard: shard.rank)
    said = {shard.rank: (shard.node, _lacks(index, replica, shard)) for shard in shards}
    late = {rank: (node, why) for rank, (node, why) in said.items() if why}
    workers = {rank: each for rank, each in late.items() if rank > 0}
    named = workers or late
    text = ", ".join(f"rank {rank} on {node} ({why})" for rank, (node, why) in named.items())
    return tuple(node for node, _ in named.values()), f"did not get ready in time: {text}"


def _lacks(index: Index, replica: Replica, shard: ReplicaShard) -> str:
    """What is missing of a shard, empty when nothing is."""
    report = report_of(index, replica, shard)
    if shard.node not in index.sessions:
        return "its node does not answer"
    if report is None:
        return "its node says nothing of it"
    if report.phase is ShardPhase.READY:
        return ""
    return f"{report.phase.value}: {report.reason}" if report.reason else report.phase.value


# --- how it ends ----------------------------------------------------------------------------------------------------


def stoppable(index: Index, replica: Replica) -> tuple[ReplicaShard, ...]:
    """The shards of a replica on its way out that are to stop now: all, but the workers only when the head is done.

    What the head still answers it computes on its workers; its node sees when it is idle, theirs can't. Nobody waits
    for a head that has failed, serves nothing or can't be asked, nor for one that has lost a worker.
    """
    left = tuple(shard for shard in replica.shards if not shard.released)
    head = next((shard for shard in left if shard.rank == 0), None)
    if head is None or replica.phase is ReplicaPhase.FAILED or head.node not in index.sessions:
        return left
    reports = [report_of(index, replica, shard) for shard in replica.shards]
    whole = all(report is not None and report.phase not in GONE for report in reports)
    report = report_of(index, replica, head)
    finishing = report is not None and report.phase in (ShardPhase.READY, ShardPhase.DRAINING)
    return (head,) if whole and finishing else left
