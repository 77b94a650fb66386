"""GPUs from a node's facts to a claim and back: what the leader does, pass after pass, and what it says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.core.catalog import Profile
from llmgw.core.explain import Refusal
from llmgw.core.inventory import Inventory
from llmgw.core.node import Build, EngineFacts, Gpu, GpuHealth
from llmgw.core.placement import explain
from llmgw.core.refusal_words import render
from llmgw.core.replica import ReplicaPhase, Retire
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.cluster import Cluster, gpu, model_spec

VLLM = EngineFacts(probed=True, builds=(Build(engine="vllm", version="1", named=True),))


def gpu_profile(count: int = 1, **more: Any) -> Profile:
    profile = Profile(name="gpu", engine="vllm", gpus_per_node=count, tensor_parallel=count)
    return msgspec.structs.replace(profile, **more)


def node(c: Cluster, name: str, *gpus: Gpu) -> None:
    c.node(name, gpus=gpus, engines=VLLM)


def held(c: Cluster, model: str) -> list[str]:
    """The GPUs that the replicas of a model claim."""
    return sorted(each.uuid for one in c.replicas(model) for shard in one.shards for each in shard.claim.gpus)


def said(c: Cluster, profile: Profile) -> dict[str, str]:
    """Why no node takes one more."""
    verdicts = explain(Inventory(c.index), model_spec("other", profile))
    return {each.node: render(each) for each in verdicts if isinstance(each, Refusal)}


def test_c01_a_replica_goes_to_the_gpu_that_nobody_uses_and_waits_where_there_is_none() -> None:
    c = Cluster()
    node(c, "n1", gpu(0, foreign=2, foreign_bytes=79 * GB), gpu(1))
    c.model("m", gpu_profile())
    c.settle()
    assert held(c, "m") == ["GPU-1"]
    c.model("other", gpu_profile())
    c.settle()
    assert c.replicas("other") == []
    words = f"GPU 0: 79 GB used outside llmgw; GPU 1 is claimed by {c.one('m').id}"
    assert said(c, gpu_profile())["n1"].endswith(words)
    node(c, "n1", gpu(0), gpu(1))
    c.settle()
    assert held(c, "other") == ["GPU-0"]


def test_c03_two_models_for_one_nodes_gpu_give_one_claim_and_both_are_told() -> None:
    c = Cluster()
    node(c, "n1", gpu(0))
    c.model("a", gpu_profile())
    c.model("b", gpu_profile())
    assert c.step().counts()["place"] == 1
    holder = c.one("a")
    assert held(c, "a") == ["GPU-0"]
    state = c.index.model_states.record("b")
    assert state is not None
    assert state.reason == (
        f"does not fit on the only node: n1 (gpu): needs 1 H100; 0 of 1 free: GPU 0 is claimed by {holder.id}"
    )
    c.new_leader()
    c.settle()
    assert held(c, "b") == []
    c.remove_model("a")
    c.settle()
    assert held(c, "b") == ["GPU-0"]


@pytest.mark.parametrize(
    "half",
    [
        {"args": ("--gpu-memory-utilization=0.5",)},
        {"args": ("--gpu-memory-utilization=0.5", "--gpu-memory-utilization=0.5")},
        {"env": {"VLLM_GPU_MEMORY_UTILIZATION": "0.5"}},
    ],
)
def test_c06_half_a_card_in_the_engines_arguments_is_a_whole_card_in_the_claim(half: dict[str, Any]) -> None:
    c = Cluster()
    node(c, "n1", gpu(0, memory_bytes=80 * GB))
    c.model("m", gpu_profile(**half), replicas=2)
    c.settle()
    (replica,) = c.replicas("m")
    assert held(c, "m") == ["GPU-0"]
    assert said(c, gpu_profile(**half))["n1"].endswith(f"GPU 0 is claimed by {replica.id}")


def test_c08_a_replica_whose_gpu_is_gone_is_built_anew_elsewhere_and_its_neighbour_is_left_alone() -> None:
    c = Cluster()
    node(c, "n1", gpu(0), gpu(1), gpu(2), gpu(3))
    c.model("m", gpu_profile(2))
    c.settle()
    c.model("neighbour", gpu_profile(2))
    c.settle()
    assert (held(c, "m"), held(c, "neighbour")) == (["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"])
    first, neighbour = c.one("m"), c.one("neighbour")
    node(c, "n1", *(gpu(i - 1, uuid=f"GPU-{i}") for i in (1, 2, 3)))
    c.step()
    gone = c.index.replicas.record(first.id)
    assert gone is not None
    assert (gone.phase, gone.retire) == (ReplicaPhase.FAILED, Retire.FAILED)
    assert gone.reason == "GPU GPU-0 is gone: the driver does not see it any more"
    c.settle()
    assert c.replicas("m") == [], "there is no room, and the model waits"
    assert [c.one("neighbour")] == [neighbour]
    node(c, "n2", *(gpu(i, uuid=f"GPU-n2-{i}") for i in range(2)))
    c.advance(60.0)
    c.settle()
    assert held(c, "m") == ["GPU-n2-0", "GPU-n2-1"]
    assert c.one("neighbour").shards == neighbour.shards


def test_c08_where_the_driver_does_not_answer_nothing_ends_and_nothing_new_begins() -> None:
    c = Cluster()
    node(c, "n1", gpu(0), gpu(1))
    c.model("m", gpu_profile())
    c.settle()
    before = c.one("m")
    c.node("n1", engines=VLLM)
    c.model("other", gpu_profile())
    c.settle()
    assert (c.one("m"), c.replicas("other")) == (before, [])
    assert said(c, gpu_profile()) == {"n1": "does not know its GPUs"}
    node(c, "n1", gpu(0), gpu(1, health=GpuHealth.UNKNOWN, foreign=None))
    c.settle()
    assert (c.one("m"), c.replicas("other")) == (before, [])
    node(c, "n1", gpu(0), gpu(1))
    c.settle()
    assert (c.one("m"), held(c, "other")) == (before, ["GPU-1"])


def test_c09_a_replica_is_not_split_over_unequal_cards_and_the_refusal_names_them() -> None:
    c = Cluster()
    cards = (("A", 24), ("B", 12), ("B", 12))
    node(c, "n1", *(gpu(i, kind, memory_bytes=gb * GB) for i, (kind, gb) in enumerate(cards)))
    c.model("m", gpu_profile(3))
    c.settle()
    assert c.replicas("m") == []
    assert "1 × A (24 GB), 2 × B (12 GB)" in said(c, gpu_profile(3))["n1"]
    c.model("small", gpu_profile(2))
    c.settle()
    assert held(c, "small") == ["GPU-1", "GPU-2"]


def test_facts_that_cannot_be_true_keep_everything_new_away_until_they_are_mended() -> None:
    c = Cluster()
    node(c, "n1", gpu(0), gpu(0, uuid="GPU-1"))
    c.model("m", gpu_profile())
    c.settle()
    assert c.replicas("m") == []
    assert "lists GPU 0 twice" in said(c, gpu_profile())["n1"]
    state = c.index.model_states.record("m")
    assert state is not None
    assert "lists GPU 0 twice" in state.reason
    node(c, "n1", gpu(0), gpu(1))
    c.settle()
    assert held(c, "m") == ["GPU-0"]


def test_a_cordon_outlasts_the_agents_next_start() -> None:
    c = Cluster()
    node(c, "n1", gpu(0))
    c.spec("n1", cordon=True)
    c.settle()
    node(c, "n1", gpu(0))
    c.model("m", gpu_profile())
    c.settle()
    assert c.replicas("m") == []
    c.write(Kind.NODE_SPEC, "n1", None)
    c.settle()
    assert held(c, "m") == ["GPU-0"]
