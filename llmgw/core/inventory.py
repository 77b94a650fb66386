"""What each node has, what of it is promised, and what runs there that nobody promised: the ground of placement.

Claims in `plan/replicas` are the truth. Where a replica's record can't be read or is gone, its assignment speaks for
it; what a node reports beyond both is counted as well, so that nothing is handed out twice.

Invariant: an entry depends on one node's records alone, so that the index can keep it until one of them changes
(`Index.memo`); the same index gives the same inventory whether or not anything was kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import msgspec

from llmgw.core.catalog import EngineSpec
from llmgw.core.gang_ports import Block, starts
from llmgw.core.gpu import GpuSlot, flaws, slots
from llmgw.core.ids import split_shard_name
from llmgw.core.node import Facts, Liveness, credible
from llmgw.core.replica import GONE, ROUTABLE, Assignment, Claim, Replica
from llmgw.core.snapshot import Index, Kind, Ref


class Holding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One shard's claim on a node. `model` and `live` (in routing, or about to be) serve ranking only."""

    replica: str
    rank: int
    claim: Claim
    model: str = ""
    live: bool = False


class Unclaimed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something the node reports as running that no claim covers. `claim` None: what it holds is not known."""

    replica: str
    rank: int
    claim: Claim | None


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node as placement sees it. `memory_total_bytes` None: never reported, so unknown.

    `claimed_bytes` is what the holdings declare, `unclaimed_bytes` what is known of the unclaimed, `unaccounted` what
    runs here without anybody knowing what it holds. `free_bytes`: memory that may still be promised, below zero after
    facts shrank, None when the total is unknown. `live_replicas`: model -> its live replicas here. `shards`: names that
    stand in its orders or reports. `corrupt`: why its records can't all be read; then it takes nothing new. `present`:
    there is a session. `gpus`: by index, None when the node does not know them. `flaws`: what its facts say that can't
    be true; then it takes nothing new. `gang_starts`: at which ports a gang's block could begin here
    (`llmgw.core.gang_ports`).
    """

    name: str
    liveness: Liveness | None
    present: bool
    cordon: bool
    drain: bool
    labels: dict[str, str]
    facts: Facts | None
    address: str | None
    memory_total_bytes: int | None
    claimed_bytes: int
    unclaimed_bytes: int
    holdings: tuple[Holding, ...]
    live_replicas: dict[str, int]
    unclaimed: tuple[Unclaimed, ...]
    unaccounted: tuple[str, ...]
    free_bytes: int | None
    shards: int
    corrupt: tuple[str, ...]
    weights: frozenset[str] | None
    gpus: tuple[GpuSlot, ...] | None
    flaws: tuple[str, ...]
    gang_starts: int


def node_inventory(index: Index, name: str) -> NodeInventory:
    """The inventory of one node, kept with the index until a record that concerns the node changes."""
    kept = index.memo.get(name)
    if kept is not None:
        return cast("NodeInventory", kept)
    made = index.memo[name] = _node_inventory(index, name)
    return made


def _node_inventory(index: Index, name: str) -> NodeInventory:
    spec, facts, session = index.node_specs.record(name), index.facts.record(name), index.sessions.record(name)
    state = index.node_states.record(name)
    holdings = tuple(sorted(_holdings(index, name), key=lambda holding: (holding.replica, holding.rank)))
    unclaimed = tuple(_unclaimed(index, name, {(holding.replica, holding.rank) for holding in holdings}))
    total = None if facts is None else credible(facts.memory_bytes)
    claimed = sum(holding.claim.memory_bytes or 0 for holding in holdings)
    running = sum((each.claim.memory_bytes or 0) for each in unclaimed if each.claim is not None)
    live = Counter(holding.model for holding in holdings if holding.live)
    sets = None if facts is None else facts.weights
    unaccounted = tuple(each.replica for each in unclaimed if each.claim is None)
    return NodeInventory(
        name=name,
        liveness=None if state is None else state.liveness,
        present=name in index.sessions,
        cordon=spec is not None and (spec.cordon or spec.drain),
        drain=spec is not None and spec.drain,
        labels={**(facts.labels if facts else {}), **(spec.labels if spec else {})},
        facts=facts,
        address=None if session is None else session.address,
        memory_total_bytes=total,
        claimed_bytes=claimed,
        unclaimed_bytes=running,
        holdings=holdings,
        live_replicas=dict(live),
        unclaimed=unclaimed,
        unaccounted=unaccounted,
        free_bytes=None if total is None else total - claimed - running,
        shards=len(index.assignments_on.get(name, set()) | index.reports_on.get(name, set())),
        corrupt=tuple(_corrupt(index, name)) if index.corrupted else (),
        weights=None if sets is None else frozenset(each.source for each in sets if each.complete),
        gpus=slots(facts, claims=_gpu_claims(holdings, unclaimed), unaccounted=unaccounted),
        flaws=() if facts is None else flaws(facts),
        gang_starts=starts(facts, _gang_blocks(index, name)),
    )


def _gang_blocks(index: Index, name: str) -> Iterator[Block]:
    """The ports of every gang that has a member here, or had one: they are its own until its last member is gone.

    A node that can't answer may still have an engine that calls the others at these ports, and would reach whoever took
    them over.
    """
    for each in index.replicas_on.get(name, ()):
        replica = index.replicas.record(each)
        if replica is not None and replica.ports is not None:
            yield replica.ports
    orders = [index.assignments.record(each) for each in index.assignments_on.get(name, ())]
    for each in index.reports_on.get(name, ()):
        report = index.reports.record(each)
        orders.append(None if report is None or report.phase in GONE else report.order)
    for order in orders:
        if order is not None and order.gang is not None and order.gang.block is not None:
            yield order.gang.block


def _gpu_claims(holdings: Iterable[Holding], unclaimed: Iterable[Unclaimed]) -> dict[str, str]:
    """Uuid -> who holds that GPU; where two records name one, the claim that is on record."""
    held = {gpu.uuid: each.replica for each in unclaimed if each.claim is not None for gpu in each.claim.gpus}
    held.update((gpu.uuid, each.replica) for each in holdings for gpu in each.claim.gpus)
    return held


def _holdings(index: Index, name: str) -> Iterator[Holding]:
    for replica_id in index.replicas_on.get(name, ()):
        replica = index.replicas.record(replica_id)
        for shard in () if replica is None else replica.shards:
            if replica is not None and shard.node == name and not shard.released:
                live = replica.phase in ROUTABLE
                yield Holding(replica=replica_id, rank=shard.rank, claim=shard.claim, model=replica.model, live=live)
    for each in index.assignments_on.get(name, ()):
        order = index.assignments.record(each)
        if order is None or _covered(index.replicas.record(order.replica), node=name, rank=order.rank):
            continue
        if (claim := _remembered(order)) is not None:
            yield Holding(replica=order.replica, rank=order.rank, claim=claim, model=order.model)


def _remembered(order: Assignment) -> Claim | None:
    """What an order says its shard holds; None for the order to stop what nobody remembers, which does not know."""
    return None if not order.launch.engine and order.claim == Claim() else order.claim


def _covered(replica: Replica | None, *, node: str, rank: int) -> bool:
    """Whether the replica's own record says what that shard holds there, be it nothing any more."""
    return replica is not None and any(shard.rank == rank and shard.node == node for shard in replica.shards)


def _unclaimed(index: Index, name: str, held: set[tuple[str, int]]) -> Iterator[Unclaimed]:
    for each in sorted(index.reports_on.get(name, ())):
        parts = split_shard_name(each)
        report = index.reports.record(each)
        if parts is None or parts[1:] in held or (report is not None and report.phase in GONE):
            continue
        claim = None if report is None or report.order is None else _remembered(report.order)
        yield Unclaimed(replica=parts[1], rank=parts[2], claim=claim)


def _corrupt(index: Index, name: str) -> Iterator[str]:
    """Which of the node's records can't be read, and why."""
    refs = [Ref(kind, name) for kind in (Kind.SESSION, Kind.FACTS, Kind.NODE_SPEC, Kind.NODE_STATE)]
    orders, reports = index.assignments_on.get(name, set()), index.reports_on.get(name, set())
    refs += [Ref(Kind.ASSIGNMENT, each) for each in orders] + [Ref(Kind.SHARD, each) for each in reports]
    ids = set(index.replicas_on.get(name, ()))
    ids |= {parts[1] for each in orders | reports if (parts := split_shard_name(each)) is not None}
    refs += [Ref(Kind.REPLICA, each) for each in ids]
    for ref in sorted(refs, key=lambda ref: (ref.kind.value, ref.name)):
        if ref in index.corrupted:
            row = index.row(ref)
            yield f"{ref.kind.value}{ref.name}: {row.corrupt if row else ''}"


@dataclass
class Inventory:
    """All nodes, as of the index's present state; the list of names is drawn up once."""

    index: Index
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = self.index.nodes()

    def node(self, name: str) -> NodeInventory:
        """One node, present or not."""
        return node_inventory(self.index, name)

    def nodes(self) -> Iterator[NodeInventory]:
        """All nodes by name."""
        return (node_inventory(self.index, name) for name in self.names)

    def wish(self, engine: str) -> EngineSpec | None:
        """The version of `engine` that people want everywhere; None when they have not said."""
        return self.index.engines.record(engine)

    def wish_corrupt(self, engine: str) -> bool:
        """Whether what people want of `engine` can't be read."""
        return Ref(Kind.ENGINE, engine) in self.index.corrupted
