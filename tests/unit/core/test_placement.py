"""Where a replica goes, and why not elsewhere: filters, order, numbers."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.catalog import EngineSpec, ModelSpec
from llmgw.core.explain import Constraint, Refusal
from llmgw.core.inventory import Inventory
from llmgw.core.node import Build, EngineFacts, WeightSet
from llmgw.core.placement import Fit, Placement, Rejection, explain, place
from llmgw.core.refusal_words import render
from llmgw.core.replica import SHARDS_PER_NODE_MAX, ShardPhase
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.cluster import LLAMA, Cluster, cpu_profile, model_spec

B1, B2 = (Build(engine="llama.cpp", version=version) for version in ("b1", "b2"))
WHEEL = Build(engine="llama.cpp", version="0.1", variant="vulkan", named=True)


def judged(c: Cluster) -> Inventory:
    """The cluster's inventory once the leader has judged its nodes."""
    c.settle()
    return Inventory(c.index)


def placed(c: Cluster, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> Placement:
    outcome = place(judged(c), spec, failed=failed)
    assert isinstance(outcome, Placement), outcome
    return outcome


def refused(c: Cluster, spec: ModelSpec) -> list[tuple[str, Constraint]]:
    outcome = place(judged(c), spec)
    assert isinstance(outcome, Rejection), outcome
    found = explain(judged(c), spec)
    return [(each.node, each.constraint) for each in found if isinstance(each, Refusal)]


def said(c: Cluster, spec: ModelSpec) -> dict[str, str]:
    return {each.node: render(each) for each in explain(judged(c), spec) if isinstance(each, Refusal)}


def winner(c: Cluster, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> str:
    return placed(c, spec, failed=failed).shards[0].node


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_what_is_left_after_claims_and_the_refusal_has_the_numbers() -> None:
    c = Cluster()
    c.node("n1", 31)
    c.model("qwen-7b", cpu_profile(16.0))
    c.settle()
    (holder,) = c.replicas("qwen-7b")
    assert said(c, model_spec("x", cpu_profile(15.1))) == {
        "n1": f"needs 15.1 GB; 31 GB in all, 16 GB promised to {holder.id}"
    }
    assert winner(c, model_spec("x", cpu_profile(15.0))) == "n1"


def test_more_than_the_node_has_is_said_apart() -> None:
    c = Cluster()
    c.node("n1", 8)
    assert said(c, model_spec("x", cpu_profile(24.0))) == {"n1": "has 8 GB of memory, needs 24"}


def test_a_profile_that_declares_none_fits_anywhere_and_claims_nothing() -> None:
    c = Cluster()
    c.node("n1", 1)
    c.model("full", cpu_profile(1.0))
    c.settle()
    outcome = placed(c, model_spec("x", cpu_profile(None)))
    assert outcome.shards[0].claim.memory_bytes is None


def test_a_node_that_reports_no_memory_stays_usable_and_comes_last() -> None:
    c = Cluster()
    c.node("n1", None)
    assert winner(c, model_spec("x", cpu_profile(500.0))) == "n1"
    c.node("n2", 600)
    assert winner(c, model_spec("x", cpu_profile(500.0))) == "n2"


def test_negative_memory_is_unknown_memory() -> None:
    c = Cluster()
    c.node("n1", -5)
    assert Inventory(c.index).node("n1").memory_total_bytes is None


def test_what_runs_without_a_claim_takes_its_room() -> None:
    c = Cluster()
    c.node("n1", 10)
    c.model("x", cpu_profile(6.0))
    c.settle()
    replica = c.one("x")
    name, order = c.shard(replica), c.index.assignments.record(c.shard(replica))
    c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, name, None), (Kind.SECRET, replica.id, None))
    c.report(name, ShardPhase.READY, order=order)
    node = Inventory(c.index).node("n1")
    assert (node.claimed_bytes, node.unclaimed_bytes, node.free_bytes) == (0, 6 * GB, 4 * GB)
    outcome = place(Inventory(c.index), model_spec("y", cpu_profile(5.0)))
    assert isinstance(outcome, Rejection)
    assert render(outcome.nearest[0]) == f"needs 5 GB; 10 GB in all, 6 GB used without a claim by {replica.id}"


def test_what_runs_unaccounted_lets_nothing_in_that_needs_memory() -> None:
    c = Cluster()
    c.node("n1", 10)
    c.model("x")
    c.settle()
    replica = c.one("x")
    c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, c.shard(replica), None))
    inventory = Inventory(c.index)
    outcome = place(inventory, model_spec("y"))
    assert isinstance(outcome, Rejection)
    assert [each.constraint for each in outcome.nearest] == [Constraint.UNACCOUNTED]
    assert isinstance(place(inventory, model_spec("y", cpu_profile(None))), Placement)


def test_an_order_speaks_for_a_replica_whose_record_is_gone_or_unreadable() -> None:
    c = Cluster()
    c.node("n1", 10)
    c.model("x", cpu_profile(6.0))
    c.settle()
    replica = c.one("x")
    c.meddle((Kind.REPLICA, replica.id, None))
    assert Inventory(c.index).node("n1").claimed_bytes == 6 * GB
    c.spoil(Kind.REPLICA, replica.id)
    node = Inventory(c.index).node("n1")
    assert node.claimed_bytes == 6 * GB
    assert node.corrupt == (f"plan/replicas/{replica.id}: not JSON",)


# --- the other filters ----------------------------------------------------------------------------------------------


def test_only_ready_nodes_that_are_not_cordoned_take_anything() -> None:
    c = Cluster()
    for name in ("n1", "n2", "n3", "n4"):
        c.node(name)
    c.settle()
    c.away("n1")
    c.spec("n2", cordon=True)
    c.spec("n3", drain=True)
    spec = model_spec("x")
    assert winner(c, spec) == "n4"
    assert said(c, spec) == {"n1": "is unreachable", "n2": "is cordoned", "n3": "is being drained"}


def test_a_node_nobody_has_judged_yet_or_without_facts_takes_nothing() -> None:
    c = Cluster()
    c.node("n1")
    assert isinstance(place(Inventory(c.index), model_spec("x")), Rejection)
    c.settle()
    c.write(Kind.FACTS, "n1", None)
    assert said(c, model_spec("x")) == {"n1": "is without its facts yet"}


def test_labels_of_people_win_over_the_nodes_own() -> None:
    c = Cluster()
    c.node("n1", labels={"zone": "x", "disk": "ssd"})
    c.node("n2")
    c.spec("n1", labels={"zone": "y"})
    assert winner(c, model_spec("m", cpu_profile(node_selector={"zone": "y", "disk": "ssd"}))) == "n1"
    assert said(c, model_spec("m", cpu_profile(node_selector={"zone": "x"}))) == {
        "n1": "has the label zone=y, needs zone=x",
        "n2": "has no label zone, needs zone=x",
    }


@pytest.mark.parametrize(
    ("engines", "wish", "build"),
    [
        (None, None, None),
        (None, "b2", None),
        (EngineFacts(probed=True, builds=(B1, B2)), None, "llama.cpp@b1"),
        (EngineFacts(probed=True, builds=(B1, B2)), "b2", "llama.cpp@b2"),
        (EngineFacts(probed=True, builds=(B2, LLAMA)), None, "llama.cpp@b1"),
        (EngineFacts(probed=True, builds=(LLAMA,)), "b9", "llama.cpp@b1"),
        (EngineFacts(probed=True, builds=(LLAMA, B2)), "b2", "llama.cpp@b2"),
        # Of two named ones the node's first: its own file's, though the wheel's is the lesser word.
        (EngineFacts(probed=True, builds=(LLAMA, WHEEL)), None, "llama.cpp@b1"),
        (EngineFacts(probed=True, builds=(LLAMA, WHEEL)), "b9", "llama.cpp@b1"),
    ],
)
def test_the_build_is_the_wished_one_or_one_named_on_purpose(
    engines: EngineFacts | None, wish: str | None, build: str | None
) -> None:
    c = Cluster()
    c.node("n1", engines=engines)
    if wish is not None:
        c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version=wish))
    assert placed(c, model_spec("x")).build == build


@pytest.mark.parametrize(
    ("engines", "wish", "constraint", "words"),
    [
        (EngineFacts(probed=False), None, Constraint.ENGINE_UNCHECKED, "engines not checked yet"),
        (EngineFacts(probed=True), None, Constraint.ENGINE_MISSING, "has no llama.cpp"),
        (
            EngineFacts(probed=True, builds=(Build(engine="vllm", version="1"),), notes={"llama.cpp": "no AVX-512"}),
            None,
            Constraint.ENGINE_MISSING,
            "no AVX-512",
        ),
        (
            EngineFacts(probed=True, builds=(B2, B1)),
            "b3",
            Constraint.ENGINE_VERSION,
            "has llama.cpp b1, b2, needs b3",
        ),
    ],
)
def test_a_node_without_the_engine_says_so_in_its_own_words(
    engines: EngineFacts, wish: str | None, constraint: Constraint, words: str
) -> None:
    c = Cluster()
    c.node("n1", engines=engines)
    if wish is not None:
        c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version=wish))
    spec = model_spec("x")
    assert refused(c, spec) == [("n1", constraint)]
    assert said(c, spec) == {"n1": words}


def test_a_node_holds_at_most_so_many_shards() -> None:
    c = Cluster()
    c.node("n1", None)
    c.model("many", cpu_profile(None), replicas=SHARDS_PER_NODE_MAX)
    assert refused(c, model_spec("x", cpu_profile(None))) == [("n1", Constraint.SHARDS_MAX)]
    assert len(c.replicas("many")) == SHARDS_PER_NODE_MAX


@pytest.mark.parametrize("kind", [Kind.FACTS, Kind.SESSION, Kind.NODE_SPEC, Kind.NODE_STATE])
def test_a_node_whose_record_cannot_be_read_takes_nothing_new(kind: Kind) -> None:
    c = Cluster()
    c.node("n1")
    c.spec("n1")
    c.settle()
    c.spoil(kind, "n1")
    assert said(c, model_spec("x")) == {"n1": f"a record can't be read: {kind.value}n1: not JSON"}


def test_whole_profiles_are_refused_in_one_sentence() -> None:
    c = Cluster()
    assert refused(c, model_spec("x")) == [("", Constraint.NO_NODES)]
    c.node("n1")
    assert refused(c, ModelSpec(name="x", source="x")) == [("", Constraint.NO_PROFILES)]
    assert explain(Inventory(c.index), ModelSpec(name="x", source="x")) == [
        Refusal(constraint=Constraint.NO_PROFILES, profile="")
    ]
    c.spoil(Kind.ENGINE, "llama.cpp")
    assert refused(c, model_spec("x")) == [("", Constraint.RECORD_CORRUPT)]


# --- order ----------------------------------------------------------------------------------------------------------


def test_profiles_are_tried_by_priority_and_the_receipt_keeps_the_refusals_of_all() -> None:
    c = Cluster()
    c.node("n1", 8)
    low, high = cpu_profile(1.0, name="low", priority=1), cpu_profile(20.0, name="high", priority=2)
    outcome = placed(c, model_spec("x", low, high))
    assert outcome.profile == low
    assert outcome.receipt.refused == {"memory_total": 1}
    assert [each.profile for each in outcome.receipt.nearest] == ["high"]
    c.node("n2", 32)
    assert placed(c, model_spec("x", low, high)).profile == high


def test_weights_are_preferred_but_never_required() -> None:
    c = Cluster()
    c.node("n1", weights=None)
    c.node("n2", weights=())
    c.node("n3", weights=("x.gguf",))
    spec = model_spec("x")
    assert winner(c, spec) == "n3"
    c.spec("n3", cordon=True)
    outcome = placed(c, spec)
    assert outcome.shards[0].node == "n1", "never asked ranks with has nothing"
    facts = c.index.facts.record("n2")
    assert facts is not None
    half = WeightSet(source="x.gguf", complete=False, why="part 2 is missing")
    c.write(Kind.FACTS, "n2", msgspec.structs.replace(facts, weights=(half,)))
    assert winner(c, spec) == "n1", "an incomplete set is none"


def test_partly_used_nodes_come_first_so_that_whole_ones_stay_free() -> None:
    c = Cluster()
    c.node("n1")
    c.node("n2")
    c.spec("n1", cordon=True)
    c.model("other")
    c.settle()
    c.spec("n1")
    assert winner(c, model_spec("x")) == "n2"


def test_replicas_of_one_model_are_spread() -> None:
    c = Cluster()
    for name in ("n1", "n2", "n3"):
        c.node(name)
    c.model("x", replicas=3)
    c.settle()
    assert sorted(replica.shards[0].node for replica in c.replicas("x")) == ["n1", "n2", "n3"]


def test_of_equal_nodes_the_fullest_that_fits_is_taken() -> None:
    c = Cluster()
    c.node("n1", 32)
    c.node("n2", 8)
    c.node("n3", 16)
    outcome = placed(c, model_spec("x"))
    assert outcome.receipt.winner[0].node == "n2"
    assert outcome.receipt.runner_up is not None
    assert outcome.receipt.runner_up.node == "n3"


def test_a_node_where_the_model_failed_lately_comes_last_even_with_its_weights() -> None:
    c = Cluster()
    c.node("n1", weights=("x.gguf",))
    assert winner(c, model_spec("x"), failed=frozenset({"n1"})) == "n1"
    c.node("n2")
    assert winner(c, model_spec("x"), failed=frozenset({"n1"})) == "n2"


def test_inv8_every_node_is_explained_for_every_profile() -> None:
    c = Cluster()
    for name, memory in (("n1", 8), ("n2", 64), ("n3", 1)):
        c.node(name, memory)
    c.spec("n3", cordon=True)
    spec = model_spec("x", cpu_profile(20.0, name="large", priority=5), cpu_profile(2.0, name="small"))
    verdicts = explain(judged(c), spec)
    assert [(each.profile, each.node, isinstance(each, Fit)) for each in verdicts] == [
        ("large", "n1", False),
        ("large", "n2", True),
        ("large", "n3", False),
        ("small", "n1", True),
        ("small", "n2", True),
        ("small", "n3", False),
    ]


def test_nodes_are_judged_again_only_when_they_change() -> None:
    c = Cluster()
    c.node("n1", 8)
    c.node("n2", 16)
    inventory = judged(c)
    first = inventory.node("n1")
    assert inventory.node("n1") is first
    c.spec("n1", cordon=True)
    assert inventory.node("n1") is not first
    outcome = place(inventory, model_spec("x"))
    assert isinstance(outcome, Placement)
    assert outcome.shards[0].node == "n2"
