"""What the tree says of a replica and its shards: readings that every decision about replicas shares. Decides nothing.

Of what can't be read now these give the last good record; `is_frozen` says that it is so.
"""

from __future__ import annotations

from llmgw.core.ids import shard_name
from llmgw.core.replica import ROUTABLE, Replica, ReplicaShard, ShardReport
from llmgw.core.snapshot import Index, Kind, Ref


def replicas_of(index: Index, model: str) -> list[Replica]:
    """A model's replicas, by id. Of those that can't be read now, the last good record."""
    found = (index.replicas.record(each) for each in sorted(index.replicas_of.get(model, ())))
    return [replica for replica in found if replica is not None]


def is_live(replica: Replica) -> bool:
    """Whether a replica counts towards what is wanted: it serves, or is about to."""
    return replica.phase in ROUTABLE


def is_frozen(index: Index, replica: str) -> bool:
    """Whether something about the replica can't be read, so that nothing about it is decided."""
    if not index.corrupted:
        return False
    names = {*index.assignments_of.get(replica, ()), *index.reports_of.get(replica, ())}
    refs = [Ref(Kind.REPLICA, replica), Ref(Kind.SECRET, replica)]
    refs += [Ref(kind, name) for name in names for kind in (Kind.ASSIGNMENT, Kind.SHARD)]
    return any(ref in index.corrupted for ref in refs)


def name_of(replica: Replica, shard: ReplicaShard) -> str:
    """How a shard of a replica and its order are named."""
    return shard_name(shard.node, replica.id, shard.rank)


def report_of(index: Index, replica: Replica, shard: ReplicaShard) -> ShardReport | None:
    """What the shard's node reports of it, None when nothing."""
    return index.reports.record(name_of(replica, shard))


def order_ref(node: str, replica: str, rank: int) -> Ref:
    """Where the order for a shard stands."""
    return Ref(Kind.ASSIGNMENT, shard_name(node, replica, rank))
