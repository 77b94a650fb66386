"""What no node of the fleet could ever give is said, and nothing that is not known is held against a profile."""

from __future__ import annotations

import msgspec

from llmgw.core.catalog import Profile
from llmgw.core.feasible import doubts, lacks
from llmgw.core.inventory import Inventory
from llmgw.core.node import Fabric, Facts, Gpu, GpuHealth
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.cluster import Cluster, cpu_profile, model_spec


def gpus(count: int, *, kind: str = "A100", memory_gb: int | None = 80) -> tuple[Gpu, ...]:
    size = None if memory_gb is None else memory_gb * GB
    return tuple(
        Gpu(uuid=f"{kind}-{i}", index=i, gpu_class=kind, memory_bytes=size, health=GpuHealth.OK, foreign=0)
        for i in range(count)
    )


def cluster(**nodes: dict[str, object]) -> Cluster:
    """Nodes with 64 GB and no GPU, changed as given."""
    made = Cluster()
    for name, fields in nodes.items():
        made.node(name, 64)
        facts = made.index.facts.record(name)
        assert facts is not None
        made.write(Kind.FACTS, name, msgspec.structs.replace(facts, **{"gpus": (), **fields}))
    return made


def said(made: Cluster, profile: Profile) -> list[str]:
    return [str(doubt) for doubt in lacks(Inventory(made.index).nodes(), [model_spec("m", profile)])]


def gpu_profile(count: int, **more: object) -> Profile:
    return cpu_profile(None, name="gpu", gpus_per_node=count, tensor_parallel=count, **more)


def test_a_profile_that_some_node_could_take_is_not_doubted() -> None:
    fleet = cluster(a={"gpus": gpus(2), "labels": {"rack": "7"}}, b={})
    for profile in (
        cpu_profile(64),
        cpu_profile(None, node_selector={"rack": "7"}),
        gpu_profile(2, gpu_class="A100", min_gpu_memory_gb=80.0),
        gpu_profile(1),
    ):
        assert said(fleet, profile) == []


def test_memory_larger_than_any_node() -> None:
    fleet = cluster(a={}, b={"memory_bytes": 16 * GB})
    assert said(fleet, cpu_profile(65)) == ["m (cpu): needs 65 GB of memory, and the largest node has 64 GB"]


def test_unknown_labels_name_the_nearest() -> None:
    fleet = cluster(a={"labels": {"zone": "north"}})
    assert said(fleet, cpu_profile(node_selector={"zine": "x"})) == [
        "m (cpu): no node has the label zine (did you mean 'zone'?)"
    ]
    assert said(fleet, cpu_profile(node_selector={"zone": "nord"})) == [
        "m (cpu): no node has the label zone=nord (did you mean 'north'?)"
    ]


def test_gpus_that_no_node_has() -> None:
    fleet = cluster(a={"gpus": gpus(4)}, b={"gpus": gpus(2, kind="L40S", memory_gb=48)})
    assert said(fleet, gpu_profile(1, gpu_class="A10O")) == [
        "m (gpu): no node has a GPU of class A10O (did you mean 'A100'?)"
    ]
    assert said(fleet, gpu_profile(8, gpu_class="A100")) == ["m (gpu): needs 8 A100 in one node, and the largest has 4"]
    assert said(fleet, gpu_profile(6)) == ["m (gpu): needs 6 equal GPUs in one node, and the largest has 4"]
    assert said(fleet, gpu_profile(1, gpu_class="L40S", min_gpu_memory_gb=80.0)) == [
        "m (gpu): needs GPUs of 80 GB, and the largest has 48 GB"
    ]
    assert said(fleet, gpu_profile(3, min_gpu_memory_gb=40.0)) == []
    assert said(cluster(a={}), gpu_profile(1)) == ["m (gpu): no node has a GPU"]


def test_a_gang_larger_than_any_fabric() -> None:
    ib = (Fabric(name="ib0", hcas=("mlx5_0",)),)
    fleet = cluster(a={"gpus": gpus(8), "fabrics": ib}, b={"gpus": gpus(2), "fabrics": ib}, c={"gpus": gpus(8)})
    assert said(fleet, gpu_profile(2, nodes=2)) == []
    assert said(fleet, gpu_profile(8, nodes=2)) == [
        "m (gpu): spans 2 nodes of one fabric, and the largest, ib0, joins 1 that could"
    ]
    assert said(cluster(a={"gpus": gpus(8)}), gpu_profile(8, nodes=2)) == [
        "m (gpu): spans 2 nodes of one fabric, and no node that could take a part of it is on one"
    ]


def test_what_a_node_does_not_say_is_not_held_against_a_profile() -> None:
    assert said(cluster(a={}, b={"memory_bytes": None}), cpu_profile(1000)) == []
    assert said(cluster(a={}, b={"gpus": None}), gpu_profile(8)) == []
    assert said(cluster(a={"gpus": gpus(1, memory_gb=None)}), gpu_profile(1, min_gpu_memory_gb=80.0)) == []
    assert said(Cluster(), cpu_profile(1000)) == []


def test_a_node_that_contradicts_itself_proves_nothing() -> None:
    fleet = cluster(a={"memory_bytes": -1})
    facts = fleet.index.facts.record("a")
    assert isinstance(facts, Facts)
    assert said(fleet, cpu_profile(1000)) == []


def test_what_no_agent_of_this_version_starts_is_said_of_any_fleet() -> None:
    fits = cluster(a={"gpus": gpus(2)})
    spec = model_spec("m", gpu_profile(2), cpu_profile(None, name="wide", nodes=2), cpu_profile(1))
    for fleet in (fits, Cluster()):
        told = [doubt for doubt in doubts(Inventory(fleet.index).nodes(), [spec]) if "agents" in doubt.why]
        assert [doubt.profile for doubt in told] == ["gpu", "wide"]
        assert told[0].why.startswith("agents of this version start engines on CPUs of one node only, and this asks")
        assert "2 GPUs a node: it may be placed, and does not start" in told[0].why
        assert "2 nodes: " in told[1].why
