"""Whether what a leader hands out was there to be handed out: new replicas and orders, judged by what nodes had said.

Part of `llmgw.core.history`. It shares no code with placement, inventory and gangs on purpose: they decide, and this
says from the raw records whether that kept the promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from llmgw.core.catalog import Profile, launch_hash
from llmgw.core.ids import shard_name
from llmgw.core.invariants import Violation, held_claims
from llmgw.core.lately import Lately
from llmgw.core.node import Facts, Gpu, GpuHealth
from llmgw.core.reading import is_live
from llmgw.core.replica import GONE, Assignment, Claim, Desired, Gang, Replica, ReplicaShard, ShardPhase
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.units import gb_to_bytes

GANG_PORTS: Final = (21000, 21999)
"""The range of a node whose agent is too old to say one. Source: the default of agent.yaml."""


def placed(index: Index, replica: Replica, lately: Lately) -> Iterator[Violation]:
    """1 to 3, of a replica that nothing spoke of before: it is whole, and all that it claims was free.

    `index`: the tree with the replica in it, and with all its orders.
    """
    found = [index.assignments.record(shard_name(each.node, replica.id, each.rank)) for each in replica.shards]
    orders = [order for order in found if order is not None]
    if len(orders) < len(found) or not orders:
        return  # `history` says so
    yield from _whole(replica, orders)
    yield from _gang(index, replica, orders, lately)
    specs = [spec for spec in lately.models(index, replica.model) if spec is not None]
    profiles = [each for spec in specs for each in spec.profiles if launch_hash(spec, each) == replica.launch]
    classes: set[str] = set()
    for shard in replica.shards:
        said = lately.facts(index, shard.node)
        problems = [list(_unfit(replica, shard, facts, profiles)) for facts in said]
        # Right by anything the node said lately; what is wrong is told by what it says now.
        if all(problems) or not said:
            yield from problems[0] if problems else _unknown(replica, shard)
        facts = next(
            (facts for facts, wrong in zip(said, problems, strict=True) if not wrong), said[0] if said else None
        )
        classes |= {gpu.gpu_class for gpu in _claimed(facts, shard.claim)}
        yield from _crowded(index, replica, shard, late=lately.late)
    if len(classes) > 1:
        yield Violation(number=2, what=f"{replica.id} mixes GPU classes {', '.join(sorted(classes))}")


def _whole(replica: Replica, orders: list[Assignment]) -> Iterator[Violation]:
    """Its shards are as many, and hold as many GPUs each, as its launch says; only a gang's head may be held."""
    launch = orders[0].launch
    if any(order.launch != launch for order in orders):
        yield Violation(number=3, what=f"the shards of {replica.id} are launched differently")
    if len(orders) != launch.nodes:
        yield Violation(number=3, what=f"{replica.id} has {len(orders)} of {launch.nodes} shards")
    for shard in replica.shards:
        count = len({gpu.uuid for gpu in shard.claim.gpus})
        if count != launch.gpus_per_node:
            what = f"{replica.id}.{shard.rank} claims {count} GPUs, its launch asks for {launch.gpus_per_node}"
            yield Violation(number=3, what=what)
    for order in orders:
        held = len(orders) > 1 and order.rank == 0 and order.desired is Desired.HELD
        # What is adopted in one pass and not wanted may be taken down in the same one; it was never in routing.
        leaves = not is_live(replica) and order.desired is Desired.STOPPED
        if order.desired is not Desired.RUNNING and not held and not leaves:
            what = f"{replica.id}.{order.rank} begins with the order to be {order.desired.value}"
            yield Violation(number=3, what=what)


def _gang(index: Index, replica: Replica, orders: list[Assignment], lately: Lately) -> Iterator[Violation]:
    """Its shards know one another, in one fabric, on ports that no other gang has on any of their nodes."""
    gang = orders[0].gang
    if any(order.gang != gang for order in orders):
        yield Violation(number=2, what=f"the shards of {replica.id} know different gangs")
    if (gang is not None) != (len(orders) > 1):
        yield Violation(
            number=2, what=f"{replica.id} has {len(orders)} shards and {'no' if gang is None else 'a'} gang"
        )
    if gang is None:
        return
    if gang.fabric != replica.fabric:
        yield Violation(number=2, what=f"{replica.id} is in {replica.fabric}, its gang in {gang.fabric}")
    if [(peer.rank, peer.node) for peer in gang.peers] != [(shard.rank, shard.node) for shard in replica.shards]:
        yield Violation(number=2, what=f"the gang of {replica.id} has other members than its shards")
    yield from _ports(index, replica, gang, lately)


def _ports(index: Index, replica: Replica, gang: Gang, lately: Lately) -> Iterator[Violation]:
    """1, of the ports of a gang: its record claims them, each of its nodes has them, and no gang there has one too.

    Whoever has a member there still has its ports when that one is released, until the last of them is gone.
    """
    if not gang.ports or replica.ports != (min(gang.ports), max(gang.ports)):
        yield Violation(number=1, what=f"{replica.id} claims the ports {replica.ports}, its gang has {gang.ports}")
    for node in (shard.node for shard in replica.shards):
        ranges = [facts.gang_ports or GANG_PORTS for facts in lately.facts(index, node)]
        if not any(low <= min(gang.ports) and max(gang.ports) <= high for low, high in ranges):
            yield Violation(number=1, what=f"{replica.id} has gang ports that {node} does not have")
        there = {name: index.replicas.record(name) for name in index.replicas_on.get(node, ()) if name != replica.id}
        taken = {name: range(each.ports[0], each.ports[1] + 1) for name, each in there.items() if each and each.ports}
        for name in sorted(name for name, ports in taken.items() if not set(ports).isdisjoint(gang.ports)):
            yield Violation(number=1, what=f"{replica.id} and {name} share gang ports on {node}")


def _unknown(replica: Replica, shard: ReplicaShard) -> Iterator[Violation]:
    if shard.claim != Claim(memory_bytes=shard.claim.memory_bytes):
        yield Violation(number=1, what=f"{replica.id} claims what {shard.node}, which never said what it has, may lack")


def _unfit(replica: Replica, shard: ReplicaShard, facts: Facts, profiles: list[Profile]) -> Iterator[Violation]:
    """What is wrong with a shard on a node that says this of itself."""
    for claim in shard.claim.gpus:
        if (why := _not_free(facts, claim.uuid)) is not None:
            yield Violation(number=1, what=f"{replica.id} claims {claim.uuid} on {shard.node}, which {why}")
    for gpu in _claimed(facts, shard.claim):
        if profiles and not any(_suits(gpu, profile) for profile in profiles):
            what = f"{replica.id} claims {gpu.uuid} on {shard.node}, which is not what its profile asks for"
            yield Violation(number=2, what=what)
    own = {hca for fabric in facts.fabrics if fabric.name == replica.fabric for hca in fabric.hcas}
    if stray := sorted(set(shard.claim.hcas) - own):
        yield Violation(number=2, what=f"{replica.id} uses {', '.join(stray)} outside its fabric")
    if replica.fabric is not None and all(fabric.name != replica.fabric for fabric in facts.fabrics):
        yield Violation(number=2, what=f"{replica.id} is in {replica.fabric}, which {shard.node} is not on")


def _claimed(facts: Facts | None, claim: Claim) -> list[Gpu]:
    uuids = {gpu.uuid for gpu in claim.gpus}
    return [gpu for gpu in (facts.gpus or () if facts is not None else ()) if gpu.uuid in uuids]


def _not_free(facts: Facts, uuid: str) -> str | None:
    """What keeps a GPU, apart from claims; None when nothing does. What is not known keeps it."""
    listed = [gpu for gpu in facts.gpus or () if gpu.uuid == uuid]
    if len(listed) != 1:
        return "it lists twice" if listed else "it does not list"
    [gpu] = listed
    if sum(1 for other in facts.gpus or () if other.index == gpu.index) > 1:
        return "has the index of another"
    if gpu.health is not GpuHealth.OK:
        return f"has the health {gpu.health.value}"
    if gpu.foreign != 0 or (gpu.foreign_bytes or 0) > 0:
        return "others use, or may use"
    return None


def _suits(gpu: Gpu, profile: Profile) -> bool:
    """Whether a GPU has the class and the memory that a profile asks for. Unknown memory is not enough."""
    if profile.gpu_class is not None and gpu.gpu_class != profile.gpu_class:
        return False
    needed = profile.min_gpu_memory_gb
    return needed is None or (gpu.memory_bytes is not None and gpu.memory_bytes >= gb_to_bytes(needed))


def _crowded(index: Index, replica: Replica, shard: ReplicaShard, *, late: bool) -> Iterator[Violation]:
    """Whether anybody else holds a GPU that a new shard claims: by a record, or because it runs there.

    late: a node may have said a moment ago that something runs there, which the decision did not see yet.
    """
    uuids = {gpu.uuid for gpu in shard.claim.gpus}
    for other, claim in held_claims(index, shard.node, stopping=True):
        if other != replica.id and (shared := sorted(uuids & {gpu.uuid for gpu in claim.gpus})):
            yield Violation(number=1, what=f"{replica.id} claims {shared[0]} on {shard.node}, which {other} holds")
    for name in sorted(index.reports_on.get(shard.node, ())) if not late else ():
        report = index.reports.record(name)
        if report is None or report.phase in GONE or report.order is None or report.replica == replica.id:
            continue
        if shared := sorted(uuids & {gpu.uuid for gpu in report.order.claim.gpus}):
            what = f"{replica.id} claims {shared[0]} on {shard.node}, where {report.replica} runs without an order"
            yield Violation(number=3, what=what)


def _released(index: Index, order: Assignment) -> Iterator[Violation]:
    """Whether a head is to start before its workers are ready. It may run already, told so in a lost history."""
    head = index.reports.record(shard_name(order.node, order.replica, order.rank))
    if head is not None and head.phase is not ShardPhase.HELD and head.phase not in GONE:
        return
    for peer in order.gang.peers if order.gang is not None else ():
        report = index.reports.record(shard_name(peer.node, order.replica, peer.rank))
        if peer.rank > 0 and (report is None or report.phase is not ShardPhase.READY):
            yield Violation(
                number=3, what=f"{order.replica}.0 is to start, and {peer.rank} on {peer.node} is not ready"
            )


def ordered(index: Index, name: str, *, old: Assignment | None, order: Assignment, late: bool) -> Iterator[Violation]:
    """3, of an order that was written: what runs has a claim, a stop is final, and a start is never taken back.

    `old`: what stood there before. `late`: as in `placed`; a worker that listened may be gone since.
    """
    if old is not None and old.desired is Desired.HELD and order.desired is Desired.RUNNING and not late:
        yield from _released(index, order)
    if old is not None:
        frozen = (order.launch, order.claim, order.engine_key, order.gang)
        if (old.launch, old.claim, old.engine_key, old.gang) != frozen:
            yield Violation(number=3, what=f"the order for {name} became another launch or claim")
        if old.desired is Desired.STOPPED and order.desired is not Desired.STOPPED:
            yield Violation(number=3, what=f"the order to stop {name} was taken back")
        if old.desired is Desired.RUNNING and order.desired is Desired.HELD:
            yield Violation(number=3, what=f"{name} was told to run, and then to hold")
    if order.desired is Desired.STOPPED or Ref(Kind.REPLICA, order.replica) in index.corrupted:
        return
    replica = index.replicas.record(order.replica)
    shards = () if replica is None else replica.shards
    own = [each for each in shards if (each.node, each.rank) == (order.node, order.rank) and not each.released]
    if not own or own[0].claim != order.claim:
        yield Violation(number=3, what=f"{name} is ordered to be {order.desired.value} without that claim")
