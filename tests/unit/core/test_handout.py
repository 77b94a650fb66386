"""What must be noticed of what a leader hands out: one small story of a bug for each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from llmgw.core.history import Checker
from llmgw.core.invariants import Violation
from llmgw.core.node import Fabric, Facts, GpuHealth
from llmgw.core.record import Head, Record
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    EngineSecret,
    GpuClaim,
    Replica,
    ReplicaShard,
    ShardPhase,
)
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.apply import changes_for
from llmgw.testing.cluster import Cluster, cpu_profile, gpu

IB = (Fabric(name="ib0", hcas=("mlx5_0",)), Fabric(name="ib1", hcas=("mlx5_1",)))
GPUS = tuple(gpu(i, memory_bytes=80 * GB) for i in range(4))

PORTS = tuple(range(21500, 21516))

Writes = list[tuple[Kind, str, Record | None]]


def cluster(*models: str) -> Cluster:
    """Two nodes with four GPUs each, and these models ready: `one` on a GPU of one node, `gang` on two GPUs of each."""
    c = Cluster()
    for name in ("n1", "n2"):
        c.node(name, 64, gpus=GPUS, fabrics=IB)
    profiles = {
        "one": cpu_profile(4.0, name="gpu", gpus_per_node=1, gpu_class="H100", min_gpu_memory_gb=40.0),
        "gang": cpu_profile(
            4.0, name="gang", nodes=2, gpus_per_node=2, tensor_parallel=2, pipeline_parallel=2, gpu_class="H100"
        ),
    }
    for model in models:
        c.model(model, profiles[model])
    c.settle()
    return c


def orders_of(c: Cluster, replica: Replica) -> list[Assignment]:
    found = [c.index.assignments.record(f"{shard.node}/{replica.id}.{shard.rank}") for shard in replica.shards]
    return [order for order in found if order is not None]


def again(c: Cluster, model: str, *, claims: dict[int, Claim] | None = None, **fields: object) -> Writes:
    """The records of one replica more, as if it were placed like the one there is, but with other claims or fields.

    `claims`: rank -> what it claims instead; where nothing is said, the two GPUs (or the one) after those held already.
    """
    replica, new = c.one(model), f"{model}-zzzzz"
    shards = tuple(
        msgspec.structs.replace(shard, claim=(claims or {}).get(shard.rank, _next(shard))) for shard in replica.shards
    )
    ports = None if replica.ports is None else (PORTS[0], PORTS[-1])
    record = msgspec.structs.replace(replica, id=new, shards=shards, **({"ports": ports} | fields))
    orders = [
        msgspec.structs.replace(order, replica=new, claim=shard.claim, desired=_first(order), gang=_gang(order))
        for order, shard in zip(orders_of(c, replica), shards, strict=True)
    ]
    return [
        (Kind.REPLICA, new, record),
        (Kind.SECRET, new, EngineSecret(replica=new, key=orders[0].engine_key)),
        *((Kind.ASSIGNMENT, f"{order.node}/{new}.{order.rank}", order) for order in orders),
    ]


def _next(shard: ReplicaShard) -> Claim:
    count = len(shard.claim.gpus)
    gpus = tuple(GpuClaim(uuid=f"GPU-{int(each.uuid[-1]) + count}") for each in shard.claim.gpus)
    return msgspec.structs.replace(shard.claim, gpus=gpus)


def _first(order: Assignment) -> Desired:
    return Desired.HELD if order.gang is not None and order.rank == 0 else Desired.RUNNING


def _gang(order: Assignment) -> object:
    return None if order.gang is None else msgspec.structs.replace(order.gang, ports=PORTS)


def changed(writes: Writes, change: Callable[[Assignment], Assignment], *, rank: int) -> Writes:
    """The same writes, with the order of one rank changed."""
    return [
        (kind, name, change(record) if isinstance(record, Assignment) and record.rank == rank else record)
        for kind, name, record in writes
    ]


def said(c: Cluster, *writes: tuple[Kind, str, Record | None]) -> list[str]:
    """What the checker says of one revision with these writes."""
    revision = c.index.revision + 1
    changes = changes_for(c.index, *writes, revision=revision)
    c.index.apply(changes, revision=revision)
    return [str(each) for each in c.checker.advance(changes, revision=revision)]


def facts(c: Cluster, node: str, **fields: object) -> None:
    known = c.index.facts.record(node)
    assert known is not None
    c.write(Kind.FACTS, node, msgspec.structs.replace(known, **fields))


def test_what_is_placed_as_it_should_be_is_no_violation() -> None:
    for model in ("one", "gang"):
        c = cluster(model)
        assert said(c, *again(c, model)) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"health": GpuHealth.FAULT}, "has the health fault"),
        ({"health": GpuHealth.UNKNOWN}, "has the health unknown"),
        ({"foreign": 1}, "others use, or may use"),
        ({"foreign": None}, "others use, or may use"),
        ({"foreign_bytes": GB}, "others use, or may use"),
        ({"index": 0}, "has the index of another"),
        ({"uuid": "GPU-0"}, "it does not list"),
    ],
)
def test_inv1_a_gpu_that_is_not_free(fields: dict[str, object], words: str) -> None:
    c = cluster("one")
    node, writes = c.one("one").shards[0].node, again(c, "one")
    facts(c, node, gpus=(GPUS[0], msgspec.structs.replace(GPUS[1], **fields), *GPUS[2:]))
    assert said(c, *writes) == [f"invariant 1: one-zzzzz claims GPU-1 on {node}, which {words}"]


def test_inv1_a_gpu_that_its_node_lists_twice() -> None:
    c = cluster("one")
    node, writes = c.one("one").shards[0].node, again(c, "one")
    facts(c, node, gpus=(*GPUS, msgspec.structs.replace(GPUS[1], index=7)))
    assert said(c, *writes) == [f"invariant 1: one-zzzzz claims GPU-1 on {node}, which it lists twice"]


def test_inv1_a_gpu_of_a_node_that_never_said_what_it_has() -> None:
    c = cluster("one")
    node, writes = c.one("one").shards[0].node, again(c, "one")
    c.write(Kind.FACTS, node, None)
    assert said(c, *writes) == [
        f"invariant 1: one-zzzzz claims what {node}, which never said what it has, may lack",
    ]


def test_inv1_a_gpu_that_a_replica_or_an_order_without_one_holds() -> None:
    c = cluster("one")
    old = c.one("one")
    node, same = old.shards[0].node, {0: old.shards[0].claim}
    writes = again(c, "one", claims=same)
    found = said(c, *writes)
    assert f"invariant 1: one-zzzzz claims GPU-0 on {node}, which {old.id} holds" in found
    for desired in (Desired.RUNNING, Desired.STOPPED):
        c = cluster("one")
        writes = again(c, "one", claims=same)
        [order] = orders_of(c, c.one("one"))
        left = msgspec.structs.replace(order, desired=desired)
        c.meddle((Kind.REPLICA, old.id, None), (Kind.ASSIGNMENT, f"{node}/{old.id}.0", left))
        assert f"invariant 1: one-zzzzz claims GPU-0 on {node}, which {old.id} holds" in said(c, *writes)


def test_inv3_a_gpu_on_which_something_runs_that_nobody_ordered() -> None:
    c = cluster("one")
    old = c.one("one")
    writes = again(c, "one", claims={0: old.shards[0].claim})
    name = c.shard(old)
    node, report, saved = old.shards[0].node, c.index.reports.record(name), orders_of(c, old)[0]
    assert report is not None
    unassigned = msgspec.structs.replace(report, assigned=False, order=saved)
    gone: Writes = [(Kind.REPLICA, old.id, None), (Kind.SECRET, old.id, None), (Kind.ASSIGNMENT, name, None)]
    c.meddle(*gone, (Kind.SHARD, name, unassigned))
    assert said(c, *writes) == [
        f"invariant 3: one-zzzzz claims GPU-0 on {node}, where {old.id} runs without an order",
    ]


def test_inv2_a_gpu_that_the_profile_does_not_ask_for() -> None:
    for fields in ({"gpu_class": "A100"}, {"memory_bytes": 24 * GB}, {"memory_bytes": None}):
        c = cluster("one")
        node, writes = c.one("one").shards[0].node, again(c, "one")
        facts(c, node, gpus=(GPUS[0], msgspec.structs.replace(GPUS[1], **fields), *GPUS[2:]))
        assert said(c, *writes) == [
            f"invariant 2: one-zzzzz claims GPU-1 on {node}, which is not what its profile asks for"
        ]


def test_inv2_a_gang_of_two_classes_or_with_the_hcas_of_another_fabric() -> None:
    c = cluster("gang")
    node, writes = c.one("gang").shards[1].node, again(c, "gang")
    facts(c, node, gpus=(*GPUS[:2], *(msgspec.structs.replace(each, gpu_class="A100") for each in GPUS[2:])))
    assert "invariant 2: gang-zzzzz mixes GPU classes A100, H100" in said(c, *writes)
    c = cluster("gang")
    claim = msgspec.structs.replace(_next(c.one("gang").shards[1]), hcas=("mlx5_0", "mlx5_1"))
    found = said(c, *again(c, "gang", claims={1: claim}))
    assert found == ["invariant 2: gang-zzzzz uses mlx5_1 outside its fabric"]


def test_inv2_a_gang_in_a_fabric_that_one_of_its_nodes_is_not_on() -> None:
    c = cluster("gang")
    node, writes = c.one("gang").shards[1].node, again(c, "gang")
    facts(c, node, fabrics=IB[1:])
    assert said(c, *writes) == [
        "invariant 2: gang-zzzzz uses mlx5_0 outside its fabric",
        f"invariant 2: gang-zzzzz is in ib0, which {node} is not on",
    ]
    c = cluster("gang")
    assert "invariant 2: gang-zzzzz is in ib1, its gang in ib0" in said(c, *again(c, "gang", fabric="ib1"))


def test_inv3_a_gang_that_is_not_whole() -> None:
    c = cluster("gang")
    writes = again(c, "gang")
    [kind, name, replica], *rest = writes
    assert isinstance(replica, Replica)
    half = [(kind, name, msgspec.structs.replace(replica, shards=replica.shards[:1])), *rest[:-1]]
    assert "invariant 3: gang-zzzzz has 1 of 2 shards" in said(c, *half)
    c = cluster("gang")
    assert "invariant 3: gang-zzzzz appeared without its order for n2" in said(c, *again(c, "gang")[:-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"desired": Desired.HELD}, "invariant 3: gang-zzzzz.1 begins with the order to be held"),
        ({"desired": Desired.STOPPED}, "invariant 3: gang-zzzzz.1 begins with the order to be stopped"),
        ({"gang": None}, "invariant 2: the shards of gang-zzzzz know different gangs"),
    ],
)
def test_inv3_a_gang_whose_orders_differ(change: dict[str, object], words: str) -> None:
    c = cluster("gang")
    writes = changed(again(c, "gang"), lambda order: msgspec.structs.replace(order, **change), rank=1)
    assert words in said(c, *writes)


def test_inv3_a_gang_of_two_builds() -> None:
    c = cluster("gang")

    def other(order: Assignment) -> Assignment:
        return msgspec.structs.replace(order, launch=msgspec.structs.replace(order.launch, build="llama.cpp@b9"))

    assert "invariant 3: the shards of gang-zzzzz are launched differently" in said(
        c, *changed(again(c, "gang"), other, rank=1)
    )


def test_inv1_two_gangs_with_the_same_ports_on_a_node() -> None:
    c = cluster("gang")
    old, saved = c.one("gang"), orders_of(c, c.one("gang"))[0]
    writes = again(c, "gang", ports=old.ports)
    for rank in (0, 1):
        writes = changed(writes, lambda order: msgspec.structs.replace(order, gang=saved.gang), rank=rank)
    found = said(c, *writes)
    assert found == [f"invariant 1: gang-zzzzz and {old.id} share gang ports on {node}" for node in ("n1", "n2")]


def test_inv1_gang_ports_that_are_not_claimed_or_that_a_node_does_not_have() -> None:
    c = cluster("gang")
    writes = again(c, "gang", ports=None)
    facts(c, "n2", gang_ports=(21000, 21499))
    assert said(c, *writes) == [
        f"invariant 1: gang-zzzzz claims the ports None, its gang has {PORTS}",
        "invariant 1: gang-zzzzz has gang ports that n2 does not have",
    ]


def test_inv2_a_gang_of_one_or_with_other_members() -> None:
    c = cluster("one", "gang")
    gang = orders_of(c, c.one("gang"))[0].gang
    writes = changed(again(c, "one", claims={0: Claim(gpus=(GpuClaim(uuid="GPU-3"),))}), lambda order: order, rank=0)
    alone = changed(writes, lambda order: msgspec.structs.replace(order, gang=gang), rank=0)
    found = said(c, *alone)
    assert "invariant 2: one-zzzzz has 1 shards and a gang" in found
    assert "invariant 2: the gang of one-zzzzz has other members than its shards" in found


def test_inv3_fewer_gpus_than_its_launch_asks_for() -> None:
    c = cluster("one")
    assert said(c, *again(c, "one", claims={0: Claim()})) == [
        "invariant 3: one-zzzzz.0 claims 0 GPUs, its launch asks for 1"
    ]


# --- orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"desired": Desired.STOPPED}, {"desired": Desired.RUNNING}, "the order to stop NAME was taken back"),
        ({}, {"desired": Desired.HELD}, "NAME was told to run, and then to hold"),
        ({}, {"claim": Claim()}, "the order for NAME became another launch or claim"),
    ],
)
def test_inv3_an_order_that_is_taken_back(before: dict[str, object], after: dict[str, object], words: str) -> None:
    c = cluster("one")
    replica = c.one("one")
    name, [order] = c.shard(replica), orders_of(c, replica)
    c.meddle((Kind.ASSIGNMENT, name, msgspec.structs.replace(order, **before)))
    found = said(c, (Kind.ASSIGNMENT, name, msgspec.structs.replace(order, **after)))
    assert f"invariant 3: {words.replace('NAME', name)}" in found


def test_inv3_a_head_that_is_to_start_before_its_worker_is_ready() -> None:
    c = cluster("gang")
    replica = c.one("gang")
    head, worker = orders_of(c, replica)
    held, name = msgspec.structs.replace(head, desired=Desired.HELD), f"n1/{replica.id}.0"
    c.meddle((Kind.ASSIGNMENT, name, held), (Kind.SHARD, name, None))
    assert said(c, (Kind.ASSIGNMENT, name, head)) == [], "the worker is ready"
    c.meddle((Kind.ASSIGNMENT, name, held))
    c.report(f"n2/{replica.id}.1", ShardPhase.STARTING)
    assert said(c, (Kind.ASSIGNMENT, name, head)) == [
        f"invariant 3: {replica.id}.0 is to start, and 1 on n2 is not ready"
    ]
    c.meddle((Kind.ASSIGNMENT, name, held))
    c.report(name, ShardPhase.STARTING)
    assert said(c, (Kind.ASSIGNMENT, name, head)) == [], "it runs already"
    assert worker.desired is Desired.RUNNING


def test_inv3_an_order_to_run_for_what_no_replica_claims() -> None:
    c = cluster("one")
    replica = c.one("one")
    name, [order] = c.shard(replica), orders_of(c, replica)
    c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, name, None))
    assert said(c, (Kind.ASSIGNMENT, name, order)) == [
        f"invariant 3: {name} is ordered to be running without that claim"
    ]
    c.meddle((Kind.ASSIGNMENT, name, None))
    stop = msgspec.structs.replace(order, desired=Desired.STOPPED)
    assert said(c, (Kind.ASSIGNMENT, name, stop)) == [], "a stop needs none"


# --- what was said a moment ago -------------------------------------------------------------------------------------


def late(c: Cluster) -> Checker:
    """A checker of a leader whose decisions may be a moment late."""
    c.write(Kind.HEAD, "", Head(commits=1, term=1))
    c.checker = Checker()
    c.meddle()
    return c.checker


def handed_out(found: list[Violation]) -> list[str]:
    return [str(each) for each in found if each.number != 4]


def test_what_a_node_said_a_moment_ago_counts_where_decisions_may_be_late() -> None:
    c = cluster("one")
    checker = late(c)
    node, writes = c.one("one").shards[0].node, again(c, "one")
    facts(c, node, gpus=(GPUS[0], msgspec.structs.replace(GPUS[1], health=GpuHealth.FAULT), *GPUS[2:]))
    revision = c.index.revision + 1
    changes = changes_for(c.index, *writes, revision=revision)
    assert handed_out(checker.advance(changes, revision=revision)) == []


def test_what_a_node_said_long_ago_does_not_count() -> None:
    c = cluster("one")
    checker = late(c)
    node, writes = c.one("one").shards[0].node, again(c, "one")
    known = c.index.facts.record(node)
    assert isinstance(known, Facts)
    worse = msgspec.structs.replace(known, gpus=(GPUS[0], msgspec.structs.replace(GPUS[1], foreign=1), *GPUS[2:]))
    c.write(Kind.FACTS, node, worse)
    for revision in (c.index.revision + 1, c.index.revision + 2):
        head = changes_for(c.index, (Kind.HEAD, "", Head(commits=100 + revision, term=1)), revision=revision)
        checker.advance(head, revision=revision)
    changes = changes_for(c.index, *writes, revision=revision + 1)
    assert "others use" in "".join(handed_out(checker.advance(changes, revision=revision + 1)))


def test_the_shards_of_an_adopted_replica_are_not_judged_by_what_is_free_now() -> None:
    c = cluster("one")
    old = c.one("one")
    name, [saved] = c.shard(old), orders_of(c, old)
    report = c.index.reports.record(name)
    assert report is not None
    gone: Writes = [(Kind.REPLICA, old.id, None), (Kind.SECRET, old.id, None), (Kind.ASSIGNMENT, name, None)]
    c.meddle(*gone, (Kind.SHARD, name, msgspec.structs.replace(report, assigned=False, order=saved)))
    facts(c, old.shards[0].node, gpus=(msgspec.structs.replace(GPUS[0], foreign=None), *GPUS[1:]))
    assert c.step().counts()["adopt"] == 1  # and the checker said nothing
    assert c.index.reports.record(name) is not None
    assert ShardPhase.READY is report.phase
