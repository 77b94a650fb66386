"""Whether what a leader takes out of routing went for a reason that holds, judged by what was there to be seen.

Part of `llmgw.core.history`, as `llmgw.core.handout` is: it trusts no decision, only what the records say.
"""

from __future__ import annotations

from typing import Final

from llmgw.core.catalog import launch_hash
from llmgw.core.gpu import lost_gpus
from llmgw.core.ids import shard_name
from llmgw.core.lately import Lately
from llmgw.core.node import Liveness
from llmgw.core.reading import is_live
from llmgw.core.replica import GONE, Replica, ReplicaShard, Retire, ShardPhase
from llmgw.core.snapshot import Index

MAY_EMPTY: Final = frozenset({Retire.ROLLED, Retire.FAILED, Retire.UNKNOWN})
"""Why the last route of a wanted model may go: it failed, or a rollout has no room for two."""


def justified(index: Index, lately: Lately, replica: Replica, *, unordered: bool) -> bool:
    """Whether the reason a replica was retired for is true of the tree."""
    states = [index.node_states.record(shard.node) for shard in replica.shards]
    names = [shard_name(shard.node, replica.id, shard.rank) for shard in replica.shards]
    match replica.retire:
        case Retire.FAILED:
            reports = [index.reports.record(name) for name in names]
            failed = any(report is not None and report.phase is ShardPhase.FAILED for report in reports)
            failed = failed or (len(replica.shards) > 1 and replica.ready_at is None)  # it never came together in time
            return failed or any(
                declared_gone(index, each.node) or _lost_gpu(index, lately, each) for each in replica.shards
            )
        case Retire.UNKNOWN:
            reports = [index.reports.record(name) for name in names]
            return unordered or any(report is not None and report.phase in GONE for report in reports)
        case Retire.ROLLED:
            return _outdated(index, lately, replica)
        case Retire.REPLACED:
            return any(state is not None and state.liveness is Liveness.LOST for state in states)
        case Retire.DRAINED:
            return any(lately.drains(index, shard.node) for shard in replica.shards)
        case Retire.MODEL_REMOVED:
            return None in lately.models(index, replica.model)
        case None:
            return False
        case _:  # scale_down, cancelled: enough others are left
            live = [index.replicas.record(each) for each in index.replicas_of.get(replica.model, ())]
            left = sum(1 for each in live if each is not None and is_live(each))
            return any(spec is not None and left >= spec.scaling.min for spec in lately.models(index, replica.model))


def declared_gone(index: Index, node: str) -> bool:
    """Whether an operator has declared the node's machine gone, and it is indeed not there."""
    spec, state, facts = index.node_specs.record(node), index.node_states.record(node), index.facts.record(node)
    known = {each.boot_id for each in (state, facts) if each is not None}
    return spec is not None and spec.forget is not None and node not in index.sessions and spec.forget in known


def _outdated(index: Index, lately: Lately, replica: Replica) -> bool:
    """Whether another launch is wanted than the replica's, or another version of its engine."""
    specs = [spec for spec in lately.models(index, replica.model) if spec is not None]
    if any(all(launch_hash(spec, each) != replica.launch for each in spec.profiles) for spec in specs):
        return True
    version = None if replica.build is None else replica.build.partition("@")[2].partition("+")[0]
    return any(wish is not None and wish.version != version for wish in lately.engines(index, replica.engine))


def _lost_gpu(index: Index, lately: Lately, shard: ReplicaShard) -> bool:
    """Whether its node said that a GPU the shard holds is gone."""
    return any(lost_gpus(facts, shard.claim) for facts in lately.facts(index, shard.node))
