"""Which GPUs a replica takes, on which node, and how a node without them says so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.explain import Constraint, Refusal
from llmgw.core.inventory import Inventory
from llmgw.core.node import Build, EngineFacts, Gpu, GpuHealth
from llmgw.core.placement import Placement, Rejection, explain, place
from llmgw.core.refusal_words import remedy, render
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.cluster import LLAMA, Cluster, cpu_profile, gpu, model_spec

VLLM = Build(engine="vllm", version="v1", named=True)
BOTH = EngineFacts(probed=True, builds=(VLLM, LLAMA))


def cards(node: str, count: int, gpu_class: str = "A100", memory_gb: int = 80, **fields: Any) -> tuple[Gpu, ...]:
    """Healthy GPUs of one class."""
    return tuple(gpu(i, gpu_class, uuid=f"{node}-{i}", memory_bytes=memory_gb * GB, **fields) for i in range(count))


def node(c: Cluster, name: str, *gpus: Gpu, memory_gb: float = 100.0, **fields: Any) -> None:
    c.node(name, memory_gb, engines=BOTH, gpus=gpus, **fields)


def model(count: int = 1, **fields: Any) -> ModelSpec:
    """A model that takes so many GPUs of one node."""
    profile = Profile(name="gpu", engine="vllm", gpus_per_node=count, tensor_parallel=count, min_memory_gb=1.0)
    return model_spec("x", msgspec.structs.replace(profile, **fields))


def judged(c: Cluster) -> Inventory:
    c.settle()
    return Inventory(c.index)


def taken(c: Cluster, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> tuple[str, list[str]]:
    """(node, GPUs) that the next replica would take."""
    outcome = place(judged(c), spec, failed=failed)
    assert isinstance(outcome, Placement), outcome
    (shard,) = outcome.shards
    return shard.node, [each.uuid for each in shard.claim.gpus]


def refusals(c: Cluster, spec: ModelSpec) -> dict[str, Refusal]:
    assert isinstance(place(judged(c), spec), Rejection)
    return {each.node: each for each in explain(Inventory(c.index), spec) if isinstance(each, Refusal)}


def occupy(c: Cluster, name: str, count: int, on: str) -> None:
    """A replica with so many GPUs runs on that node and no other."""
    others = [each for each in c.index.nodes() if each != on]
    for each in others:
        c.spec(each, cordon=True)
    c.model(name, *model(count).profiles)
    c.settle()
    assert [replica.shards[0].node for replica in c.replicas(name)] == [on]
    for each in others:
        c.spec(each)


# --- order ----------------------------------------------------------------------------------------------------------


def test_a_replica_takes_the_node_with_the_fewest_free_gpus_so_that_large_ones_stay_whole() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 8))
    node(c, "n2", *cards("n2", 4))
    assert taken(c, model(2)) == ("n2", ["n2-0", "n2-1"])
    assert taken(c, model(8))[0] == "n1"
    occupy(c, "other", 5, "n1")
    assert taken(c, model(2)) == ("n1", ["n1-5", "n1-6"]), "partly used comes before empty"
    assert taken(c, model(4))[0] == "n2"


def test_of_equally_many_free_gpus_the_one_with_least_memory_is_taken() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 2), memory_gb=200)
    node(c, "n2", *cards("n2", 2), memory_gb=50)
    assert taken(c, model())[0] == "n2"


def test_weights_then_fewer_replicas_come_before_the_tightest_gpus_and_failed_nodes_last() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 1))
    node(c, "n2", *cards("n2", 8), weights=("x.gguf",))
    node(c, "n3", *cards("n3", 4))
    assert taken(c, model())[0] == "n2"
    assert taken(c, model(), failed=frozenset({"n2"}))[0] == "n1"
    assert taken(c, model(), failed=frozenset({"n1", "n2", "n3"}))[0] == "n2"
    occupy(c, "x", 1, "n3")
    assert taken(c, model(), failed=frozenset({"n2"}))[0] == "n1"
    occupy(c, "y", 1, "n1")
    assert taken(c, model(), failed=frozenset({"n2"}))[0] == "n3", "a second one here is better than none"


def test_a_profile_without_gpus_takes_none_and_fits_on_any_machine() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 1))
    assert taken(c, model_spec("x", cpu_profile())) == ("n1", [])


# --- one class ------------------------------------------------------------------------------------------------------


def test_c09_of_unequal_cards_only_those_of_one_class_go_together() -> None:
    c = Cluster()
    large, small = gpu(0, "rtx-3090", memory_bytes=24 * GB), cards("s", 2, "rtx-3060", 12)
    node(c, "n1", large, *(msgspec.structs.replace(each, index=each.index + 1) for each in small))
    assert taken(c, model(2)) == ("n1", ["s-0", "s-1"])
    assert taken(c, model(1, min_gpu_memory_gb=20)) == ("n1", ["GPU-0"])
    three = refusals(c, model(3))["n1"]
    assert render(three) == "has 1 × rtx-3090 (24 GB), 2 × rtx-3060 (12 GB), needs 3 of one class"
    assert (three.constraint, three.needed, three.total, three.unit) == (Constraint.GPU_COUNT, 3, 2, "GPUs")
    assert remedy(three) == "ask for at most 2 a node"


def test_without_a_class_each_class_is_a_pool_of_its_own_and_the_tightest_is_taken() -> None:
    c = Cluster()
    first = cards("a", 4)
    second = (msgspec.structs.replace(each, index=each.index + 4) for each in cards("b", 2, "L40"))
    node(c, "n1", *first, *second)
    assert taken(c, model(2)) == ("n1", ["b-0", "b-1"])
    assert taken(c, model(2, gpu_class="A100")) == ("n1", ["a-0", "a-1"])
    assert taken(c, model(3)) == ("n1", ["a-0", "a-1", "a-2"])
    outcome = place(judged(c), model(2))
    assert isinstance(outcome, Placement)
    (winner,), second_best = outcome.receipt.winner, outcome.receipt.runner_up
    assert second_best is not None
    assert [(each.gpu_class, each.free_gpus) for each in (winner, second_best)] == [("L40", 2), ("A100", 4)]


def test_memory_is_asked_of_each_card() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 2, memory_gb=40))
    node(c, "n2", *cards("n2", 1, memory_gb=80), gpu(1, "A100", uuid="odd", memory_bytes=40 * GB))
    assert taken(c, model(1, min_gpu_memory_gb=80)) == ("n2", ["n2-0"])
    two = refusals(c, model(2, min_gpu_memory_gb=80))
    assert {each: (one.constraint, one.total) for each, one in two.items()} == {
        "n1": (Constraint.GPU_MEMORY, 0),
        "n2": (Constraint.GPU_MEMORY, 1),
    }
    assert render(two["n2"]) == "has 1 × A100 (80 GB), 1 × A100 (40 GB), needs 2 with 80 GB each"


def test_a_card_whose_memory_is_not_known_is_not_taken_for_large() -> None:
    c = Cluster()
    node(c, "n1", gpu(0, "A100"))
    assert taken(c, model())[0] == "n1"
    assert render(refusals(c, model(1, min_gpu_memory_gb=1))["n1"]) == "has 1 × A100, needs 1 with 1 GB each"
    node(c, "n1", gpu(0, "A100", health=GpuHealth.LOST, fault="fell off the bus"))
    lost = refusals(c, model(1, min_gpu_memory_gb=1))["n1"]
    assert lost.constraint is Constraint.GPU_FAULT, "what is wrong with it says more"


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "fields", "constraint", "words"),
    [
        (cards("n", 2), {"gpu_class": "H100"}, Constraint.GPU_CLASS, "has 2 × A100 (80 GB), needs H100"),
        ((), {"gpu_class": "H100"}, Constraint.GPU_CLASS, "has no GPU, needs H100"),
        ((), {}, Constraint.GPU_COUNT, "has no GPU, needs 2 of one class"),
        (cards("n", 1), {}, Constraint.GPU_COUNT, "has 1 × A100 (80 GB), needs 2 of one class"),
        (
            (*cards("n", 1), gpu(1, "A100", health=GpuHealth.FAULT, fault="ECC fault")),
            {},
            Constraint.GPU_FAULT,
            "needs 2 A100; 1 of 2 free: GPU 1: ECC fault",
        ),
        (
            (*cards("n", 1), gpu(1, "A100", foreign=3, foreign_bytes=79 * GB)),
            {},
            Constraint.GPU_IN_USE,
            "needs 2 A100; 1 of 2 free: GPU 1: 79 GB used outside llmgw",
        ),
        (
            (*cards("n", 1), gpu(1, "A100", health=GpuHealth.UNKNOWN)),
            {},
            Constraint.GPU_UNKNOWN,
            "needs 2 A100; 1 of 2 free: GPU 1: its state is not known",
        ),
        (
            (*cards("n", 1), *(gpu(i, "A100", uuid=f"f{i}", foreign=1, foreign_bytes=0) for i in (1, 2))),
            {},
            Constraint.GPU_IN_USE,
            "needs 2 A100; 1 of 3 free: GPUs 1, 2: in use by another process",
        ),
    ],
)
def test_each_lack_of_gpus_has_its_own_reason(
    gpus: tuple[Gpu, ...], fields: dict[str, Any], constraint: Constraint, words: str
) -> None:
    c = Cluster()
    node(c, "n1", *gpus)
    refusal = refusals(c, model(2, **fields))["n1"]
    assert (refusal.constraint, render(refusal)) == (constraint, words)
    assert remedy(refusal)


def test_one_refusal_names_what_keeps_each_gpu_and_who_holds_how_many() -> None:
    c = Cluster()
    faulty = gpu(3, "A100", uuid="n1-3", health=GpuHealth.FAULT, fault="row remap failed")
    node(c, "n1", *cards("n1", 3), faulty)
    occupy(c, "other", 2, "n1")
    (holder,) = c.replicas("other")
    refusal = refusals(c, model(2))["n1"]
    assert refusal.constraint is Constraint.GPU_CLAIMED, "the reason of most"
    assert (refusal.needed, refusal.total, refusal.free, refusal.gpu_class) == (2, 4, 1, "A100")
    assert refusal.holders == ((holder.id, 2),)
    assert render(refusal) == (
        f"needs 2 A100; 1 of 4 free: GPUs 0, 1 are claimed by {holder.id}; GPU 3: row remap failed"
    )
    assert remedy(refusal) == "1 more free A100 there"


def test_what_runs_unaccounted_may_hold_any_gpu() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 2))
    c.model("other", *model(1).profiles)
    c.settle()
    replica = c.one("other")
    c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, c.shard(replica), None))
    spec = model(1, min_memory_gb=None)
    outcome = place(Inventory(c.index), spec)
    assert isinstance(outcome, Rejection)
    (refusal,) = outcome.nearest
    assert (refusal.constraint, refusal.detail) == (Constraint.UNACCOUNTED, replica.id)


def test_facts_that_contradict_themselves_are_told_before_gpus_are_counted() -> None:
    c = Cluster()
    node(c, "n1", gpu(0), gpu(0, uuid="GPU-1"))
    refusal = refusals(c, model())["n1"]
    assert (refusal.constraint, render(refusal)) == (Constraint.FACTS, "lists GPU 0 twice")


def test_the_receipt_counts_nodes_by_what_they_lack_and_keeps_the_nearest() -> None:
    c = Cluster()
    node(c, "n1", *cards("n1", 2))
    node(c, "n2", *cards("n2", 2), memory_gb=0.5)
    node(c, "n3")
    node(c, "n4", *cards("n4", 1, "H100"))
    node(c, "n5", gpu(0, "A100", uuid="n5-0", health=GpuHealth.FAULT))
    outcome = place(judged(c), model(1, gpu_class="A100"))
    assert isinstance(outcome, Placement)
    assert outcome.receipt.refused == {"gpu_class": 2, "gpu_fault": 1, "memory_total": 1}
    assert [each.node for each in outcome.receipt.nearest] == ["n5", "n2", "n3", "n4"]
    assert outcome.receipt.runner_up is None
