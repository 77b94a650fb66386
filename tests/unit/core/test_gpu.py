"""Which GPUs are free, which are taken together, what in a node's facts can't be true, and what follows a lost GPU."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.core.catalog import Task
from llmgw.core.explain import Constraint
from llmgw.core.gpu import GpuSlot, choose, flaws, lost_gpus, slots
from llmgw.core.ids import Secret
from llmgw.core.inventory import NodeInventory, node_inventory
from llmgw.core.node import Fabric, Facts, Gpu, GpuHealth, WeightSet
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    GpuClaim,
    Launch,
    Replica,
    ReplicaPhase,
    Retire,
    ShardPhase,
)
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.errors import InvariantError
from llmgw.testing.cluster import Cluster, cpu_profile, gpu

X = "x-aaaaa"


def claim(*uuids: str) -> Claim:
    return Claim(gpus=tuple(GpuClaim(uuid=uuid) for uuid in uuids))


def saved(replica: str, held: Claim, *, node: str = "n1", **launch: Any) -> Assignment:
    """The order for the only shard of a replica of `x`, as an agent keeps it."""
    start = Launch(source="x", task=Task.GENERATE, profile="gpu", engine="vllm", context=4096, slots=1)
    return Assignment(
        node=node,
        replica=replica,
        rank=0,
        model="x",
        desired=Desired.RUNNING,
        launch=msgspec.structs.replace(start, **launch),
        claim=held,
        engine_key=Secret("k" * 64),
    )


def cluster(*gpus: Gpu) -> Cluster:
    """One node, and a model that has as many replicas as run: GPUs get into claims by adoption."""
    c = Cluster()
    c.node("n1", gpus=gpus)
    c.settle()
    return c


def run(c: Cluster, replica: str, held: Claim, phase: ShardPhase = ShardPhase.READY, **launch: Any) -> None:
    """An engine that the node has without an order; the leader adopts it from what the agent saved, if it may."""
    order = saved(replica, held, **launch)
    c.report(f"n1/{replica}.0", phase, order=order)
    c.saved[f"n1/{replica}.0"] = order
    count = len(c.replicas("x")) + 1
    c.model("x", cpu_profile(None, name="gpu", node_selector={"never": "here"}), replicas=count)
    c.settle()


def node(c: Cluster) -> NodeInventory:
    return node_inventory(c.index, "n1")


def taken(found: NodeInventory) -> list[tuple[int, Constraint | None, str]]:
    assert found.gpus is not None
    return [(slot.index, slot.taken, slot.why) for slot in found.gpus]


def facts(*gpus: Gpu, **more: Any) -> Facts:
    return msgspec.structs.replace(Facts(node="n1", boot_id="b", gpus=gpus), **more)


def judged(*gpus: Gpu, **claims: str) -> tuple[GpuSlot, ...]:
    found = slots(facts(*gpus), claims={f"GPU-{name[1:]}": holder for name, holder in claims.items()})
    assert found is not None
    return found


# --- which are free -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "constraint", "why"),
    [
        ({}, None, ""),
        ({"foreign_bytes": None}, None, ""),
        ({"health": GpuHealth.FAULT, "fault": "row remap failed"}, Constraint.GPU_FAULT, "row remap failed"),
        ({"health": GpuHealth.FAULT}, Constraint.GPU_FAULT, "has a fault"),
        ({"health": GpuHealth.LOST}, Constraint.GPU_FAULT, "the driver does not see it any more"),
        ({"health": GpuHealth.LOST, "fault": "fell off the bus"}, Constraint.GPU_FAULT, "fell off the bus"),
        ({"foreign": 2}, Constraint.GPU_IN_USE, "in use by another process"),
        ({"foreign": None, "foreign_bytes": 79 * GB}, Constraint.GPU_IN_USE, "79 GB used outside llmgw"),
        ({"health": GpuHealth.UNKNOWN}, Constraint.GPU_UNKNOWN, "its state is not known"),
        ({"health": GpuHealth.UNKNOWN, "fault": "no answer in 5 s"}, Constraint.GPU_UNKNOWN, "no answer in 5 s"),
        ({"foreign": None}, Constraint.GPU_UNKNOWN, "whether another process uses it is not known"),
        ({"foreign": -1}, Constraint.GPU_UNKNOWN, "whether another process uses it is not known"),
        # What helps most comes first: a fault is there whoever uses it, and use is more than not knowing.
        ({"health": GpuHealth.FAULT, "fault": "MIG is on", "foreign": 1}, Constraint.GPU_FAULT, "MIG is on"),
        ({"health": GpuHealth.UNKNOWN, "foreign": 1}, Constraint.GPU_IN_USE, "in use by another process"),
    ],
)
def test_each_gpu_that_is_not_free_has_one_reason(
    changes: dict[str, Any], constraint: Constraint | None, why: str
) -> None:
    (free,) = judged(gpu(0, **changes))
    assert (free.taken, free.why, free.holder) == (constraint, why, "")
    (held,) = judged(gpu(0, **changes), _0=X)
    assert (held.taken, held.why, held.holder) == (Constraint.GPU_CLAIMED, f"claimed by {X}", X)


def test_a_node_that_does_not_know_its_gpus_is_not_one_that_has_none() -> None:
    assert slots(None, claims={}) is None
    assert slots(facts(gpus=None), claims={}) is None
    assert slots(facts(), claims={}) == ()


def test_gpus_are_listed_by_index_with_what_is_known_of_them() -> None:
    second, first = judged(gpu(3, "L4", memory_bytes=24 * GB, nvlink_domain=1), gpu(1, "L4", memory_bytes=-1))[::-1]
    assert (first.index, first.memory_bytes, first.nvlink_domain) == (1, None, None)
    assert (second.index, second.memory_bytes, second.nvlink_domain) == (3, 24 * GB, 1)


def test_c01_a_gpu_full_of_other_work_is_not_free_and_our_own_use_is_not_counted_again() -> None:
    c = cluster(gpu(0, foreign=3, foreign_bytes=79 * GB), gpu(1), gpu(2))
    run(c, X, claim("GPU-2"))
    assert taken(node(c)) == [
        (0, Constraint.GPU_IN_USE, "79 GB used outside llmgw"),
        (1, None, ""),
        (2, Constraint.GPU_CLAIMED, f"claimed by {X}"),
    ]


@pytest.mark.parametrize(
    "launch",
    [
        {"args": ("--gpu-memory-utilization=0.5",)},
        {"args": ("--gpu-memory-utilization=0.5", "--gpu-memory-utilization=0.5")},
        {"env": {"VLLM_GPU_MEMORY_UTILIZATION": "0.5"}},
    ],
)
def test_c06_a_gpu_is_claimed_whole_whatever_the_engines_arguments_say(launch: dict[str, Any]) -> None:
    c = cluster(gpu(0, memory_bytes=80 * GB))
    run(c, X, Claim(gpus=(GpuClaim(uuid="GPU-0"),)), **launch)
    assert taken(node(c)) == [(0, Constraint.GPU_CLAIMED, f"claimed by {X}")]
    run(c, "x-bbbbb", Claim(gpus=(GpuClaim(uuid="GPU-0"),)), ShardPhase.HELD, **launch)
    assert [replica.id for replica in c.replicas("x")] == [X], "the second is not adopted onto a GPU that is claimed"


def test_claims_follow_uuids_when_indices_shift_and_the_agent_registers_again() -> None:
    c = cluster(gpu(0), gpu(1), gpu(2))
    run(c, X, claim("GPU-2"))
    c.node("n1", gpus=(gpu(0, uuid="GPU-1"), gpu(1, uuid="GPU-2")))
    c.settle()
    assert taken(node(c)) == [(0, None, ""), (1, Constraint.GPU_CLAIMED, f"claimed by {X}")]
    assert c.one("x").shards[0].claim == claim("GPU-2")


def test_orders_and_what_runs_without_one_claim_gpus_as_well() -> None:
    c = cluster(gpu(0), gpu(1))
    run(c, X, claim("GPU-0"))
    c.meddle((Kind.REPLICA, X, None))
    assert [slot.holder for slot in node(c).gpus or ()] == [X, ""]
    c.meddle((Kind.ASSIGNMENT, f"n1/{X}.0", None))
    assert [slot.holder for slot in node(c).gpus or ()] == ["", ""], "a report without the saved order names no GPU"
    c.answer()
    assert [slot.holder for slot in node(c).gpus or ()] == [X, ""]


def test_what_runs_unaccounted_may_hold_any_gpu_until_its_stop_is_confirmed() -> None:
    c = cluster(gpu(0), gpu(1))
    run(c, X, claim("GPU-0"))
    c.meddle((Kind.REPLICA, X, None), (Kind.ASSIGNMENT, f"n1/{X}.0", None), (Kind.SECRET, X, None))
    del c.saved[f"n1/{X}.0"]
    c.answer()
    words = f"{X} runs here, and what that holds is not known yet"
    assert taken(node(c)) == [(0, Constraint.UNACCOUNTED, words), (1, Constraint.UNACCOUNTED, words)]
    c.step()
    order = c.index.assignments.record(f"n1/{X}.0")
    assert order is not None
    assert order.desired is Desired.STOPPED
    assert taken(node(c)) == [(0, Constraint.UNACCOUNTED, words), (1, Constraint.UNACCOUNTED, words)]
    assert node(c).unaccounted == (X,)
    c.answer()
    assert taken(node(c)) == [(0, None, ""), (1, None, "")]


def test_c09_cards_of_unequal_classes_stand_apart_with_their_sizes() -> None:
    c = cluster(*(gpu(i, kind, memory_bytes=gb * GB) for i, kind, gb in ((0, "A", 24), (1, "B", 12), (2, "B", 12))))
    found = node(c).gpus or ()
    assert [(slot.gpu_class, slot.memory_bytes) for slot in found] == [("A", 24 * GB), ("B", 12 * GB), ("B", 12 * GB)]
    with pytest.raises(InvariantError, match="do not go together"):
        choose(found, 2)


# --- which are taken together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domains", "count", "chosen"),
    [
        ({0: None, 2: None, 5: None}, 2, [0, 2]),
        ({0: None}, 2, None),
        ({}, 1, None),
        ({0: 0, 1: 0, 2: 1, 3: 1}, 2, [0, 1]),
        ({1: 0, 2: 1, 3: 1}, 2, [2, 3]),
        ({0: 0, 1: 0, 2: 0, 3: 1, 4: 1}, 2, [3, 4]),  # fits tightly, and leaves three together
        ({0: 7, 1: 3, 2: 7, 3: 3}, 2, [1, 3]),
        ({0: 0, 1: 0, 2: 1, 3: 1}, 3, [0, 1, 2]),
        ({0: None, 1: 0, 2: 0}, 2, [1, 2]),
        ({0: None, 1: 0}, 2, [0, 1]),
        ({0: 0, 1: 0, 2: 1}, 1, [2]),
    ],
)
def test_gpus_are_taken_inside_one_nvlink_domain_else_by_index(
    domains: dict[int, int | None], count: int, chosen: list[int] | None
) -> None:
    free = judged(*(gpu(index, nvlink_domain=domain) for index, domain in domains.items()))
    made = choose(free[::-1], count)
    assert (None if made is None else [slot.index for slot in made]) == chosen


def test_nothing_taken_is_ever_chosen() -> None:
    with pytest.raises(InvariantError, match="GPU-1"):
        choose(judged(gpu(0), gpu(1), _1=X), 1)


# --- what can't be true ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (facts(), ()),
        (facts(gpu(0), gpu(1), cpus=0.0, memory_bytes=0, fabrics=(Fabric(name="a", hcas=("h0", "h1")),)), ()),
        (facts(memory_bytes=-5), ("has -5 bytes of memory",)),
        (facts(cpus=-0.5), ("has -0.5 CPUs",)),
        (facts(gpu(0), gpu(0, uuid="GPU-1")), ("lists GPU 0 twice",)),
        (facts(gpu(0), gpu(1, uuid="GPU-0"), gpu(2, uuid="GPU-0")), ("lists the GPU 'GPU-0' twice",)),
        (facts(gpu(-1)), ("lists a GPU of index -1 and uuid 'GPU--1'",)),
        (facts(gpu(0, uuid="")), ("lists a GPU of index 0 and uuid ''",)),
        (facts(gpu(0, memory_bytes=-1)), ("has -1 bytes of memory on GPU 0",)),
        (facts(gpu(0, foreign=-2)), ("has -2 processes of others on GPU 0",)),
        (facts(gpu(0, foreign_bytes=-3)), ("has -3 bytes used outside llmgw on GPU 0",)),
        (facts(fabrics=(Fabric(name="a"), Fabric(name="a"))), ("lists the fabric a twice",)),
        (
            facts(fabrics=(Fabric(name="a", hcas=("h0",)), Fabric(name="b", hcas=("h1", "h0")))),
            ("lists the HCA h0 twice",),
        ),
        (facts(fabrics=(Fabric(name="a", rate_gbps=-1.0),)), ("has -1.0 Gbit/s on the fabric a",)),
        (facts(gang_ports=(21000, 20000)), ("has the gang ports 21000 to 20000",)),
        (facts(gang_ports=(0, 5)), ("has the gang ports 0 to 5",)),
        (facts(gang_ports=(1, 65536)), ("has the gang ports 1 to 65536",)),
        (facts(gang_ports=(65535, 65535)), ()),
        (facts(weights=(WeightSet(source="w", bytes=-9),)), ("has -9 bytes of the weights w",)),
        (
            facts(gpu(0), gpu(0), memory_bytes=-1),
            ("lists GPU 0 twice", "lists the GPU 'GPU-0' twice", "has -1 bytes of memory"),
        ),
    ],
)
def test_facts_that_contradict_themselves_are_said(wrong: Facts, said: tuple[str, ...]) -> None:
    assert flaws(wrong) == said


def test_a_node_with_flaws_is_flagged_and_the_loop_goes_on() -> None:
    c = cluster(gpu(0), gpu(1), gpu(2))
    run(c, X, claim("GPU-2"))
    c.node("n1", -1.0, gpus=(gpu(0), gpu(3, uuid="GPU-0"), gpu(2, uuid="GPU-1"), gpu(2)))
    c.settle()
    assert node(c).flaws == ("lists GPU 2 twice", "lists the GPU 'GPU-0' twice", "has -1000000000 bytes of memory")
    assert (node(c).memory_total_bytes, node(c).free_bytes) == (None, None)
    assert {slot.why for slot in node(c).gpus or ()} == {"its node lists it twice", f"claimed by {X}"}
    assert c.one("x").phase is ReplicaPhase.READY, "what runs there goes on"


# --- what is lost ---------------------------------------------------------------------------------------------------


def failed(c: Cluster, replica: str) -> Replica:
    found = c.index.replicas.record(replica)
    assert found is not None
    assert found.retire is Retire.FAILED
    return found


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ((gpu(0), gpu(1), gpu(2, uuid="GPU-3")), "GPU GPU-2 is gone: the driver does not see it any more"),
        (
            (gpu(0), gpu(1), gpu(2, health=GpuHealth.LOST, fault="fell off the bus (Xid 79)"), gpu(3)),
            "GPU GPU-2 is gone: fell off the bus (Xid 79)",
        ),
    ],
)
def test_c08_the_replica_of_a_lost_gpu_fails_over_and_other_claims_keep_their_gpus(
    seen: tuple[Gpu, ...], reason: str
) -> None:
    c = cluster(*(gpu(index) for index in range(4)))
    run(c, X, claim("GPU-2"))
    run(c, "x-bbbbb", claim("GPU-3"))
    before = c.index.replicas.record("x-bbbbb")
    c.node("n1", gpus=seen)
    c.step()
    assert failed(c, X).reason == reason
    assert failed(c, X).shards[0].claim == claim("GPU-2"), "until its stop is confirmed"
    c.settle()
    assert c.one("x") == before
    assert [(slot.uuid, slot.holder) for slot in node(c).gpus or () if slot.holder] == [("GPU-3", "x-bbbbb")]


@pytest.mark.parametrize(
    "seen",
    [
        None,  # the driver does not answer
        (gpu(2, health=GpuHealth.FAULT, fault="row remap failed"),),
        (gpu(2, health=GpuHealth.UNKNOWN, foreign=None),),
        (gpu(0), gpu(0)),  # a list that contradicts itself
        (gpu(0), gpu(0, uuid="GPU-1")),
    ],
)
def test_c08_what_is_not_known_to_be_gone_tears_nothing_down(seen: tuple[Gpu, ...] | None) -> None:
    c = cluster(*(gpu(index) for index in range(4)))
    run(c, X, claim("GPU-2"))
    c.node("n1", gpus=seen)
    c.settle()
    assert c.one("x").phase is ReplicaPhase.READY
    assert not [slot for slot in node(c).gpus or () if slot.uuid == "GPU-2" and slot.taken is None]


def test_c08_a_node_that_is_away_has_lost_nothing_by_what_it_said_before() -> None:
    c = cluster(gpu(0), gpu(1))
    run(c, X, claim("GPU-1"))
    known = c.index.facts.record("n1")
    assert known is not None
    c.away("n1")
    c.write(Kind.FACTS, "n1", msgspec.structs.replace(known, gpus=(gpu(0),)))
    c.settle()
    assert c.one("x").phase is ReplicaPhase.READY


def test_a_claim_without_gpus_loses_none() -> None:
    assert lost_gpus(facts(), Claim(memory_bytes=5)) == ()
    assert lost_gpus(None, claim("GPU-0")) == ()
    assert len(lost_gpus(facts(), claim("GPU-0", "GPU-1"))) == 2
