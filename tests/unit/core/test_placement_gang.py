"""Where a replica that spans nodes goes: one fabric, one class of GPUs, one build; and what each node lacks for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.core.catalog import EngineSpec, ModelSpec, Profile
from llmgw.core.explain import Constraint, Refusal
from llmgw.core.invariants import check, require
from llmgw.core.inventory import Inventory
from llmgw.core.node import Build, EngineFacts, Fabric, GpuHealth
from llmgw.core.placement import Fit, Placement, Rejection, explain, place
from llmgw.core.refusal_words import remedy, render
from llmgw.core.snapshot import Kind
from llmgw.testing.cluster import LLAMA, Cluster, cpu_profile, gpu, model_spec

V1, V2 = (Build(engine="vllm", version=version, named=True) for version in ("v1", "v2"))
IB0 = Fabric(name="ib0", rate_gbps=400.0, hcas=("mlx5_0", "mlx5_1"))
IB1 = Fabric(name="ib1", rate_gbps=400.0, hcas=("mlx5_2",))
ETH = Fabric(name="eth", rate_gbps=25.0, ifname="eth0")


def node(
    c: Cluster,
    name: str,
    gpus: int = 8,
    gpu_class: str = "A100",
    *,
    fabrics: tuple[Fabric, ...] = (IB0,),
    builds: tuple[Build, ...] = (V1, LLAMA),
    **fields: Any,
) -> None:
    made = tuple(gpu(i, gpu_class, uuid=f"{name}-{i}") for i in range(gpus))
    engines = EngineFacts(probed=True, builds=builds)
    c.node(name, 100.0, engines=engines, gpus=made, fabrics=fabrics, **fields)


def gang(nodes: int = 2, gpus: int = 8, **fields: Any) -> ModelSpec:
    """A model whose replicas span so many nodes."""
    profile = Profile(name="gang", engine="vllm", nodes=nodes, gpus_per_node=gpus, tensor_parallel=max(1, gpus))
    return model_spec("x", msgspec.structs.replace(profile, pipeline_parallel=nodes if gpus else 1, **fields))


def judged(c: Cluster) -> Inventory:
    c.settle()
    return Inventory(c.index)


def placed(c: Cluster, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> Placement:
    outcome = place(judged(c), spec, failed=failed)
    assert isinstance(outcome, Placement), outcome
    return outcome


def members(c: Cluster, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> list[str]:
    """The nodes of the next replica, by rank."""
    return [shard.node for shard in placed(c, spec, failed=failed).shards]


def said(c: Cluster, spec: ModelSpec) -> dict[str, str]:
    assert isinstance(place(judged(c), spec), Rejection)
    return {each.node: render(each) for each in explain(Inventory(c.index), spec) if isinstance(each, Refusal)}


# --- one fabric, one class, one build -------------------------------------------------------------------------------


def test_inv2_a_gang_holds_whole_gpus_of_one_class_and_the_hcas_of_its_fabric_alone() -> None:
    c = Cluster()
    node(c, "n1", fabrics=(IB0, IB1))
    node(c, "n2", fabrics=(ETH, IB0))
    outcome = placed(c, gang(min_memory_gb=10))
    assert (outcome.fabric, outcome.build) == ("ib0", "vllm@v1")
    assert [shard.rank for shard in outcome.shards] == [0, 1]
    for shard in outcome.shards:
        assert [each.uuid for each in shard.claim.gpus] == [f"{shard.node}-{i}" for i in range(8)]
        assert shard.claim.hcas == ("mlx5_0", "mlx5_1")
        assert shard.claim.memory_bytes == 10 * 10**9


def test_inv2_two_gangs_share_hcas_but_no_gpu() -> None:
    c = Cluster()
    node(c, "n1")
    node(c, "n2")
    c.model("a", *gang(gpus=4).profiles)
    c.model("b", *gang(gpus=4).profiles)
    c.settle()
    shards = [shard for name in "ab" for shard in c.one(name).shards]
    assert {shard.claim.hcas for shard in shards} == {IB0.hcas}
    assert len({each.uuid for shard in shards for each in shard.claim.gpus}) == 16
    require(check(c.index))


def test_c11_a_node_on_a_fabric_and_one_without_are_never_placed_together() -> None:
    c = Cluster()
    node(c, "n1")
    node(c, "n2", fabrics=())
    assert said(c, gang()) == {
        "n1": "fabric ib0 has 1 of the 2 nodes with 8 free A100 it needs",
        "n2": "is on no fabric; this profile spans 2 nodes",
    }
    node(c, "n3")
    assert members(c, gang()) == ["n1", "n3"]


def test_c11_nodes_of_two_fabrics_are_never_placed_together() -> None:
    c = Cluster()
    node(c, "n1")
    node(c, "n2", fabrics=(IB1,))
    node(c, "n3", fabrics=(IB1,))
    assert members(c, gang()) == ["n2", "n3"]
    assert said(c, gang(3)) == {
        "n1": "fabric ib0 has 1 of the 3 nodes with 8 free A100 it needs",
        "n2": "fabric ib1 has 2 of the 3 nodes with 8 free A100 it needs",
        "n3": "fabric ib1 has 2 of the 3 nodes with 8 free A100 it needs",
    }


def test_c09_classes_are_never_mixed_over_nodes_either() -> None:
    c = Cluster()
    node(c, "n1")
    node(c, "n2", gpu_class="H100")
    assert said(c, gang()) == {
        "n1": "fabric ib0 has 1 of the 2 nodes with 8 free A100 it needs",
        "n2": "fabric ib0 has 1 of the 2 nodes with 8 free H100 it needs",
    }
    node(c, "n3", gpu_class="H100")
    assert members(c, gang()) == ["n2", "n3"]


def test_all_shards_run_one_build_the_best_that_enough_nodes_have() -> None:
    c = Cluster()
    node(c, "n1", builds=(V1,))
    node(c, "n2", builds=(V2,))
    assert said(c, gang()) == {
        "n1": "fabric ib0 has 1 of the 2 nodes with 8 free A100 and vllm@v1 it needs",
        "n2": "fabric ib0 has 1 of the 2 nodes with 8 free A100 and vllm@v2 it needs",
    }
    node(c, "n3", builds=(V1, V2))
    node(c, "n4", builds=(V1, V2))
    assert placed(c, gang()).build == "vllm@v1"
    c.spec("n1", cordon=True)
    c.spec("n4", cordon=True)
    assert (members(c, gang()), placed(c, gang()).build) == (["n2", "n3"], "vllm@v2")


def test_the_wished_build_is_preferred_to_one_named_on_purpose() -> None:
    c = Cluster()
    old, new = (Build(engine="vllm", version=version, named=version == "v1") for version in ("v1", "v2"))
    for each in ("n1", "n2"):
        node(c, each, builds=(old, new))
    assert placed(c, gang()).build == "vllm@v1"
    c.write(Kind.ENGINE, "vllm", EngineSpec(name="vllm", version="v2"))
    assert placed(c, gang()).build == "vllm@v2"


def test_who_cannot_say_its_build_or_where_it_is_joins_no_gang() -> None:
    c = Cluster()
    c.node("n1", engines=None, fabrics=(IB0,))
    node(c, "n2")
    c.settle()
    session = c.index.sessions.record("n2")
    assert session is not None
    c.write(Kind.SESSION, "n2", msgspec.structs.replace(session, address=""))
    refused = [each for each in explain(Inventory(c.index), gang(gpus=0)) if isinstance(each, Refusal)]
    assert [(each.node, each.constraint) for each in refused] == [
        ("n1", Constraint.ENGINE_UNCHECKED),
        ("n2", Constraint.FACTS),
    ]


# --- order ----------------------------------------------------------------------------------------------------------


def test_the_emptiest_machines_come_first_and_then_those_with_weights() -> None:
    c = Cluster()
    for i in range(1, 5):
        node(c, f"n{i}", weights=("x.gguf",) if i in (1, 3) else ())
    assert members(c, gang(gpus=2)) == ["n1", "n3"]
    c.spec("n2", cordon=True)
    c.spec("n3", cordon=True)
    c.spec("n4", cordon=True)
    c.model("other", *gang(nodes=1, gpus=1).profiles)
    c.settle()
    for each in ("n2", "n3", "n4"):
        c.spec(each)
    assert members(c, gang(gpus=2)) == ["n3", "n2"], "n1 has the weights, and a GPU less"
    assert members(c, gang(nodes=4, gpus=2)) == ["n3", "n2", "n4", "n1"]
    assert members(c, gang(gpus=2), failed=frozenset({"n3", "n2", "n4"})) == ["n1", "n3"]


def test_promised_memory_makes_a_machine_less_empty_and_replicas_of_the_model_are_spread() -> None:
    c = Cluster()
    for i in range(1, 5):
        node(c, f"n{i}", 0)
    c.spec("n1", cordon=True)
    c.model("other", cpu_profile(5.0), source="other")
    c.settle()
    c.spec("n1")
    (other,) = c.replicas("other")
    assert other.shards[0].node == "n2"
    assert members(c, gang(gpus=0)) == ["n1", "n3"]
    c.model("x", *gang(gpus=0).profiles)
    c.settle()
    assert members(c, gang(gpus=0)) == ["n4", "n1"]


def test_of_equal_fabrics_the_faster_is_taken() -> None:
    c = Cluster()
    for each in ("n1", "n2"):
        node(c, each, fabrics=(ETH, IB1))
    assert placed(c, gang()).fabric == "ib1"
    c.model("other", *gang(nodes=1, gpus=1).profiles)
    node(c, "n3", fabrics=(ETH,))
    assert (placed(c, gang(gpus=2)).fabric, members(c, gang(gpus=2))) == ("eth", ["n2", "n3"]), "emptier counts more"


def test_the_receipt_has_a_score_for_each_shard_and_the_best_that_was_left() -> None:
    c = Cluster()
    for i in range(1, 5):
        node(c, f"n{i}", fabrics=(IB0, IB1) if i < 4 else ())
    receipt = placed(c, gang()).receipt
    assert [each.node for each in receipt.winner] == ["n1", "n2"]
    assert receipt.runner_up is not None
    assert receipt.runner_up.node == "n3", "not one that was taken, from another fabric"
    assert (receipt.runner_up.claimed_gpus, receipt.runner_up.claimed_bytes) == (0, 0)
    assert receipt.refused == {"fabric": 1}


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_node_that_would_do_but_lacks_companions_says_how_many_are_missing() -> None:
    c = Cluster()
    for i in range(1, 4):
        node(c, f"n{i}")
    broken = tuple(gpu(i, "A100", uuid=f"n4-{i}", health=GpuHealth.FAULT if i else GpuHealth.OK) for i in range(8))
    c.node("n4", 100.0, engines=EngineFacts(probed=True, builds=(V1,)), gpus=broken, fabrics=(IB0,))
    spec = gang(4)
    found = {each.node: each for each in explain(judged(c), spec) if isinstance(each, Refusal)}
    assert (found["n1"].constraint, found["n1"].needed, found["n1"].free) == (Constraint.GANG, 4, 3)
    assert found["n1"].unit == "nodes"
    assert remedy(found["n1"]) == "1 more such node on the same fabric"
    assert found["n4"].constraint is Constraint.GPU_FAULT
    outcome = place(judged(c), spec)
    assert isinstance(outcome, Rejection)
    assert outcome.refused == {"gang": 3, "gpu_fault": 1}
    assert [each.node for each in outcome.nearest] == ["n1", "n2", "n3", "n4"]


def test_without_gpus_the_refusal_speaks_of_nodes_alone() -> None:
    c = Cluster()
    node(c, "n1")
    assert said(c, gang(3, 0)) == {"n1": "fabric ib0 has 1 of the 3 nodes it needs"}
    node(c, "n2", builds=(V2,))
    assert said(c, gang(3, 0))["n1"] == "fabric ib0 has 1 of the 3 nodes with vllm@v1 it needs"


def test_an_explanation_names_the_pool_that_a_node_would_be_taken_from() -> None:
    c = Cluster()
    node(c, "n1", fabrics=(ETH, IB0), builds=(V1, V2))
    node(c, "n2", fabrics=(ETH,), builds=(V2,))
    node(c, "n3", fabrics=(IB0,), builds=(V1,))
    node(c, "n4", fabrics=(ETH,), builds=(V2,))
    fits = [each for each in explain(judged(c), gang()) if isinstance(each, Fit)]
    assert [(each.node, each.fabric, each.build) for each in fits] == [
        ("n1", "eth", "vllm@v2"),
        ("n2", "eth", "vllm@v2"),
        ("n3", "ib0", "vllm@v1"),
        ("n4", "eth", "vllm@v2"),
    ]


# --- ports ----------------------------------------------------------------------------------------------------------


def test_members_have_gang_ports_in_common_though_others_rank_before_them() -> None:
    c = Cluster()
    node(c, "n1", gang_ports=(30000, 30099))
    node(c, "n2", gang_ports=(31000, 31099))
    node(c, "n3", gang_ports=(31050, 31149))
    outcome = placed(c, gang())
    assert [shard.node for shard in outcome.shards] == ["n2", "n3"]
    assert outcome.receipt.runner_up is not None
    assert outcome.receipt.runner_up.node == "n1"


@pytest.mark.parametrize(("nodes", "others"), [(2, "another node"), (3, "2 other nodes")])
def test_a_pool_whose_nodes_share_no_ports_is_none(nodes: int, others: str) -> None:
    c = Cluster()
    for i in range(nodes):
        node(c, f"n{i}", gang_ports=(30000 + 100 * i, 30099 + 100 * i))
    words = said(c, gang(nodes))["n0"]
    assert words == f"its gang_ports 30000-30099 have no 16 in a row that are free on {others} of ib0 too"
    node(c, "n0", gang_ports=(30000, 30001))
    assert said(c, gang(nodes))["n0"] == "its gang_ports 30000-30001 have no 16 in a row that are free"
