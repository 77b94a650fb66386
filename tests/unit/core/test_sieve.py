"""What placement keeps between decisions: when it is used again, when it is not, and that it stays bounded."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core import placement, prospect, sieve
from llmgw.core.candidates import Pool, admit, judge
from llmgw.core.catalog import ModelSpec
from llmgw.core.draft import Draft
from llmgw.core.explain import Constraint
from llmgw.core.inventory import Inventory
from llmgw.core.node import Fabric
from llmgw.core.placement import Placement, Rejection, place
from llmgw.core.plan import Delete, Put
from llmgw.core.sieve import ledger_of
from llmgw.core.snapshot import CHANGED_MIN, Kind, Ref
from llmgw.errors import InvariantError
from llmgw.testing.cluster import Cluster, cpu_profile, gpu, model_spec


class Counted:
    """How often a node was judged, by the filters that look at nodes one by one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes: list[str] = []
        patch.setattr(sieve, "admit", self)

    def __call__(self, node: object, *args: object) -> object:
        self.nodes.append(node.name)  # type: ignore[attr-defined]  # a NodeInventory
        return admit(node, *args)  # type: ignore[arg-type]  # as given

    def since(self) -> list[str]:
        """Those judged since the last call."""
        nodes, self.nodes = self.nodes, []
        return sorted(nodes)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def fleet(count: int = 4) -> Cluster:
    c = Cluster()
    for i in range(1, count + 1):
        c.node(f"n{i}")
    c.settle()
    return c


def where(c: Cluster, spec: ModelSpec) -> str | None:
    outcome = place(Inventory(c.index), spec)
    return outcome.shards[0].node if isinstance(outcome, Placement) else None


def test_only_what_changed_is_judged_again_and_a_claim_changes_no_judgement(counted: Counted) -> None:
    c = fleet()
    assert where(c, model_spec("x")) == "n1"
    assert counted.since() == ["n1", "n2", "n3", "n4"]
    c.spec("n1", cordon=True)
    assert where(c, model_spec("x")) == "n2"
    assert counted.since() == ["n1"]
    c.model("other", cpu_profile(15.5))
    c.settle()
    assert c.one("other").shards[0].node == "n2"
    assert counted.since() == []
    assert where(c, model_spec("x")) == "n3"


def test_models_that_differ_only_in_amounts_share_what_is_kept(counted: Counted) -> None:
    c = fleet()
    for i, spec in enumerate((model_spec("a"), model_spec("b", cpu_profile(8.0, name="large", context=8192)))):
        assert where(c, spec) == "n1"
        assert len(counted.since()) == (0 if i else 4)
    assert where(c, model_spec("c", cpu_profile(node_selector={"a": "b"}))) is None
    assert len(counted.since()) == 4


def test_what_a_draft_takes_back_is_taken_back_here_as_well() -> None:
    c = fleet(2)
    spec = model_spec("x", cpu_profile(10.0))
    assert where(c, spec) == "n1"
    with Draft(c.index) as draft:
        with draft.imagine(Delete(ref=Ref(Kind.SESSION, "n1"))):
            assert where(c, spec) == "n2"
        assert where(c, spec) == "n1"
        facts = c.index.facts.record("n1")
        assert facts is not None
        draft.emit("test", Put(ref=Ref(Kind.FACTS, "n1"), record=msgspec.structs.replace(facts, memory_bytes=1)))
        assert where(c, spec) == "n2"
    assert where(c, spec) == "n1"


def test_a_node_that_is_gone_is_forgotten_with_its_weights() -> None:
    c = fleet(2)
    c.node("n2", weights=("x.gguf",))
    c.settle()
    assert where(c, model_spec("x")) == "n2"
    c.write_all(*((kind, "n2", None) for kind in (Kind.SESSION, Kind.FACTS, Kind.NODE_STATE)))
    assert where(c, model_spec("x")) == "n1"
    assert ledger_of(c.index).holders == {}
    assert list(ledger_of(c.index).nodes) == ["n1"]
    c.write_all(*((kind, "n1", None) for kind in (Kind.SESSION, Kind.FACTS, Kind.NODE_STATE)))
    outcome = place(Inventory(c.index), model_spec("x"))
    assert isinstance(outcome, Rejection)
    assert outcome.refused == {"no_nodes": 1}


def test_after_more_changes_than_are_remembered_everything_is_judged(counted: Counted) -> None:
    c = fleet(2)
    assert where(c, model_spec("x")) == "n1"
    counted.since()
    for i in range(CHANGED_MIN + 10):
        c.index.swap(Ref(Kind.NODE_SPEC, f"z{i}"), None)
    c.spec("n1", cordon=True)
    assert where(c, model_spec("x")) == "n2"
    assert counted.since() == ["n1", "n2"]


def test_shapes_used_last_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    monkeypatch.setattr(sieve, "SIEVES_MAX", 2)
    c = fleet(1)
    one, two, three = (model_spec("x", cpu_profile(node_selector={"a": each})) for each in "abc")
    for spec in (one, two, one, three, one):
        where(c, spec)
    assert len(counted.since()) == 3
    where(c, two)
    assert len(counted.since()) == 1, "it was used longest ago"


def test_shapes_for_which_many_nodes_would_do_count_by_their_nodes(
    monkeypatch: pytest.MonkeyPatch, counted: Counted
) -> None:
    monkeypatch.setattr(sieve, "SEATS_MAX", 3)
    c = Cluster()
    for name in ("n1", "n2"):
        c.node(name, labels={"zone": "x"})
    c.settle()
    everywhere, in_zone, nowhere = (
        model_spec("x", cpu_profile(node_selector=each)) for each in ({}, {"zone": "x"}, {"zone": "y"})
    )
    for spec in (everywhere, nowhere, in_zone, nowhere, in_zone):
        where(c, spec)
    assert len(counted.since()) == 6
    where(c, everywhere)
    assert len(counted.since()) == 2, "there was no room for it beside the other"


def test_what_is_told_again_is_told_of_the_same_state_only(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def counting(node: object, profile: object, *, wish: object) -> object:
        judged.append(node.name)  # type: ignore[attr-defined]  # a NodeInventory
        return judge(node, profile, wish=wish)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(prospect, "judge", counting)
    c = fleet(2)
    spec = model_spec("x", cpu_profile(40.0))
    for _ in range(2):
        assert where(c, spec) is None
    assert judged == ["n1", "n2"]
    c.node("n2", 32)
    c.settle()
    outcome = place(Inventory(c.index), spec)
    assert judged == ["n1", "n2", "n2"]
    assert isinstance(outcome, Rejection)
    assert [(each.node, each.total) for each in outcome.nearest] == [("n2", 32 * 10**9), ("n1", 16 * 10**9)]
    monkeypatch.setattr(prospect, "ASKED_MAX", 0)
    where(c, model_spec("x", cpu_profile(41.0)))
    where(c, spec)
    assert judged[3:] == ["n2", "n1"] * 2, "another amount is another question, and of those few are remembered"


def test_a_kept_judgement_that_is_wrong_ends_the_pass_rather_than_claim_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Cluster()
    c.node("n1", gpus=(gpu(0),))
    c.settle()
    spec = model_spec("x", cpu_profile(gpus_per_node=1))
    assert where(c, spec) == "n1"
    c.model("other", *spec.profiles)
    c.settle()
    monkeypatch.setattr(placement, "judge", lambda node, profile, *, wish: judge(node, cpu_profile(99.0), wish=wish))
    with pytest.raises(InvariantError, match="for which it has no room"):
        place(Inventory(c.index), model_spec("x"))
    node = Inventory(c.index).node("n1")
    with pytest.raises(InvariantError, match="n1 was to give 1 free H100"):
        placement.shard_of(node, spec.profiles[0], Pool(None, "H100", None), rank=0)


def test_memory_promised_beyond_what_there_is_leaves_nothing_and_is_told_so() -> None:
    c = fleet(1)
    c.model("other", cpu_profile(14.0))
    c.settle()
    c.node("n1", 8)
    c.settle()
    outcome = place(Inventory(c.index), model_spec("x", cpu_profile(2.0)))
    assert isinstance(outcome, Rejection)
    (refusal,) = outcome.nearest
    assert (refusal.constraint, refusal.free) == (Constraint.MEMORY, 0)
    assert where(c, model_spec("y", cpu_profile(None))) == "n1"


def test_weights_that_many_nodes_have_are_met_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prospect, "FEW", 2)
    c = Cluster()
    for i in range(1, 6):
        c.node(f"n{i}", weights=("x.gguf",) if i > 1 else (), fabrics=(Fabric(name="ib0"),))
    c.settle()
    spec = model_spec("x")
    outcome = place(Inventory(c.index), spec)
    assert isinstance(outcome, Placement)
    assert outcome.receipt.runner_up is not None
    assert (outcome.shards[0].node, outcome.receipt.runner_up.node) == ("n2", "n3"), "not among the first two in order"
    c.spec("n1", cordon=True)
    outcome = place(Inventory(c.index), spec)
    assert isinstance(outcome, Placement)
    assert outcome.receipt.runner_up is not None
    assert (outcome.shards[0].node, outcome.receipt.runner_up.node) == ("n2", "n3")
    c.spec("n1")
    gang = place(Inventory(c.index), model_spec("x", cpu_profile(nodes=2)))
    assert isinstance(gang, Placement)
    assert [shard.node for shard in gang.shards] == ["n2", "n3"]
