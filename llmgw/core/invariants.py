"""What must always hold, as checks that unit tests, properties, the simulation, chaos and benchmarks share.

Numbered as in ARCHITECTURE.md. Here are the checks of one tree; most promises are about what may follow what, and
`llmgw.core.history` follows a tree through its revisions. Neither decides anything; a violation is a bug, never an
input error.

1. No GPU and no gang's port in two live claims; no commit makes the memory claims of a node exceed its known memory.
2. A multi-node replica: one fabric, only its HCAs, one GPU class.
3. A replica's claims appear together; each ends only with a confirmed stop. Nothing starts on what another still holds.
4. Every write under plan/ lies inside its term's reign and extends the head it read.
5. Nothing stops without an explicit order or its own failure; what runs unassigned is answered.
6. Unreachable is never by itself a cause of teardown; no commit empties a route set that is wanted.
7. The same in, the same out; a plan applied is followed by an empty one; incremental = full. (tests/property)
8. Every replica that is not placed has, on demand, a reason for every node.
9. After faults stop, everything converges (`unconverged` says what has not).
10. A request is answered by its own model only. (gateway)
11. Objects are bounded. (Writes: tests that nothing is written again for numbers alone.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from llmgw.core.adoption import awaits_peers, can_be_adopted, catalog_known
from llmgw.core.autoscale import wanted_replicas
from llmgw.core.explain import RECEIPT_BYTES_MAX, Receipt, Refusal, Unplaced
from llmgw.core.fleet import is_restoring
from llmgw.core.inventory import Inventory
from llmgw.core.node import Liveness
from llmgw.core.placement import explain
from llmgw.core.reading import is_live
from llmgw.core.replica import (
    GONE,
    SHARDS_PER_NODE_MAX,
    Claim,
    Desired,
    Replica,
    ReplicaPhase,
    Rollout,
    ShardReport,
    live_shard,
)
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.errors import InvariantError


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One promise that does not hold. `number`: which."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"invariant {self.number}: {self.what}"


def require(violations: Iterable[Violation]) -> None:
    """Nothing, when there are none. Raises: InvariantError, naming all of them."""
    found = list(violations)
    if found:
        raise InvariantError(found[0].number, "; ".join(str(violation) for violation in found))


# --- one tree -------------------------------------------------------------------------------------------------------


def check(index: Index, *, around: Iterable[Ref] | None = None) -> list[Violation]:
    """Everything that can be judged from one tree; `around`: only of what these places concern, None for all of it."""
    replicas, nodes, models = set(index.replicas), set(index.replicas_on), set(index.model_states)
    if around is not None:
        refs = list(around)
        replicas &= {ref.name for ref in refs if ref.kind is Kind.REPLICA}
        models &= {ref.name for ref in refs if ref.kind is Kind.MODEL_STATE}
        nodes &= {ref.name.partition("/")[0] for ref in refs if ref.kind in (Kind.ASSIGNMENT, Kind.FACTS)}
    found: list[Violation] = []
    for replica in (index.replicas.record(each) for each in sorted(replicas)):
        if replica is not None:
            found += _shape(replica)
            found += _bounded(f"the receipt of {replica.id}", replica.receipt)
            nodes |= {shard.node for shard in replica.shards}
    for node in sorted(nodes):
        found += _gpus(index, node)
        if len(index.assignments_on.get(node, ())) > SHARDS_PER_NODE_MAX:
            found.append(Violation(number=11, what=f"{node} has more than {SHARDS_PER_NODE_MAX} orders"))
    for each in sorted(models):
        if (state := index.model_states.record(each)) is not None:
            found += _bounded(f"the refusals of {each}", state.unplaced)
    return found


def _shape(replica: Replica) -> Iterator[Violation]:
    """A replica by itself: its ranks, each on a node of its own, and for a gang a fabric.

    What its claims were good for is judged when they appear (`llmgw.core.handout`): a node may say other things later.
    """
    ranks = sorted(shard.rank for shard in replica.shards)
    if not ranks or ranks != list(range(len(ranks))):
        yield Violation(number=3, what=f"{replica.id} has the ranks {ranks}")
    nodes = [shard.node for shard in replica.shards]
    if len(set(nodes)) != len(nodes):
        yield Violation(number=3, what=f"{replica.id} has two shards on one node")
    if len(replica.shards) > 1 and replica.fabric is None:
        yield Violation(number=2, what=f"{replica.id} spans nodes without a fabric")


def live_claims(index: Index, node: str) -> Iterator[tuple[str, Claim]]:
    """(replica, claim) of every claim on a node that has not ended, by the replicas' records alone."""
    for each in sorted(index.replicas_on.get(node, ())):
        replica = index.replicas.record(each)
        for shard in () if replica is None else replica.shards:
            if shard.node == node and not shard.released:
                yield each, shard.claim


def held_claims(index: Index, node: str, *, stopping: bool) -> Iterator[tuple[str, Claim]]:
    """As `live_claims`, and of every order that no replica's record speaks of; `stopping`: orders to stop as well."""
    yield from live_claims(index, node)
    for name in sorted(index.assignments_on.get(node, ())):
        order = index.assignments.record(name)
        if order is None or (order.desired is Desired.STOPPED and not stopping):
            continue
        replica = index.replicas.record(order.replica)
        spoken = () if replica is None else ((shard.node, shard.rank) for shard in replica.shards)
        if (node, order.rank) not in spoken:
            yield order.replica, order.claim


def claimed_bytes(index: Index, node: str) -> int:
    """The memory promised on a node."""
    return sum(claim.memory_bytes or 0 for _, claim in live_claims(index, node))


def _gpus(index: Index, node: str) -> Iterator[Violation]:
    holder: dict[str, str] = {}
    for replica, claim in held_claims(index, node, stopping=False):
        for gpu in claim.gpus:
            if (other := holder.setdefault(gpu.uuid, replica)) != replica:
                yield Violation(number=1, what=f"{gpu.uuid} on {node} is claimed by {other} and {replica}")


def _bounded(what: str, record: Receipt | Unplaced | None) -> Iterator[Violation]:
    if (size := len(msgspec.json.encode(record))) > RECEIPT_BYTES_MAX:
        yield Violation(number=11, what=f"{what} has {size} bytes")


def check_explained(index: Index) -> list[Violation]:
    """Invariant 8, for a settled tree: what is not placed says why, for every node and profile."""
    found: list[Violation] = []
    inventory = Inventory(index)
    for state in index.model_states.records():
        spec = index.models.record(state.name)
        if spec is None or state.placed >= state.wanted:
            continue
        if state.unplaced is None and not state.reason and state.retry_at is None:
            found.append(Violation(number=8, what=f"{state.name} lacks a replica and nothing says why"))
        for profile in spec.profiles:
            verdicts = [each for each in explain(inventory, spec) if each.profile == profile.name]
            whole = any(isinstance(verdict, Refusal) and not verdict.node for verdict in verdicts)
            if not whole and {verdict.node for verdict in verdicts} != set(inventory.names):
                found.append(Violation(number=8, what=f"{state.name}: a node is not explained for {profile.name}"))
    return found


def unanswered(index: Index) -> list[str]:
    """Names of shards that run unassigned and have no order yet. Invariant 5: for 30 s at most, of a healthy leader.

    Those of a gang whose other members can't tell their orders yet are left out: one word is for all of them. So are
    those that can only be told to stop, while a restored store waits for all nodes. None in a store that nobody ever
    told what is wanted: there they wait for the catalog.
    """
    if not catalog_known(index):
        return []
    meta = None if index.meta is None else index.meta.record
    restoring = meta is not None and is_restoring(index, meta.incarnation)
    return [
        name
        for name in index.reports.names()
        if (report := index.reports.record(name)) is not None
        and not report.assigned
        and report.phase not in GONE
        and name not in index.assignments
        and report.node in index.sessions
        and (report.order is None or not awaits_peers(index, report.order))
        and (not restoring or _may_go_on(index, report))
    ]


def _may_go_on(index: Index, report: ShardReport) -> bool:
    """Whether the word for what runs unassigned would be to go on."""
    replica = index.replicas.record(report.replica)
    if live_shard(replica, node=report.node, rank=report.rank) is not None:
        return replica is not None and is_live(replica) and report.order is not None
    return report.order is not None and can_be_adopted(index, report.order)


def unconverged(index: Index) -> list[str]:
    """What is not yet as it should be, for people; empty once everything has settled. Invariant 9 bounds the time."""
    found = [f"{name} runs unassigned" for name in unanswered(index)]
    for node in index.sessions.names():
        state = index.node_states.record(node)
        if state is None or state.liveness is not Liveness.READY:
            found.append(f"{node} is {'not judged' if state is None else state.liveness.value}")
    serving: dict[str, int] = {}
    for replica in index.replicas.records():
        there = [shard.node in index.sessions for shard in replica.shards if not shard.released]
        if replica.phase is not ReplicaPhase.READY and any(there):
            found.append(f"{replica.id} is {replica.phase.value}")
        if replica.phase is ReplicaPhase.READY and all(there):
            serving[replica.model] = serving.get(replica.model, 0) + 1
    for spec in index.models.records():
        ready, model = serving.get(spec.name, 0), index.model_states.record(spec.name)
        wanted = wanted_replicas(spec, model)
        explained = model is not None and model.unplaced is not None and ready < wanted
        if ready != wanted and not explained:
            found.append(f"{spec.name} has {ready} of {wanted} replicas ready")
        if model is not None and model.rollout is Rollout.ROLLING and model.unplaced is None:
            found.append(f"{spec.name} is being rolled")
    return found
