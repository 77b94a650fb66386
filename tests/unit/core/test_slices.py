"""A pass that can't look at everything at once: what comes first, what waits, and what is not decided meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core import adoption
from llmgw.core.invariants import unanswered
from llmgw.core.node import Liveness
from llmgw.core.plan import Plan, Settings
from llmgw.core.replica import ReplicaPhase, ShardPhase
from llmgw.core.snapshot import Dirty, Kind, Rest
from llmgw.core.units import GB
from llmgw.testing.cluster import Cluster, cpu_profile


def fleet(nodes: int, **models: int) -> Cluster:
    """So many settled nodes, and models with so many replicas ready."""
    c = Cluster()
    for number in range(1, nodes + 1):
        c.node(f"n{number}")
    for name, replicas in models.items():
        c.model(name, replicas=replicas)
    c.settle()
    return c


def liveness(c: Cluster) -> dict[str, Liveness]:
    return {state.name: state.liveness for state in c.index.node_states.records()}


def slices(c: Cluster) -> list[Plan]:
    """Passes until nothing is left."""
    plans = [c.step()]
    while plans[-1].more:
        plans.append(c.step())
        assert len(plans) < 100
    return plans


def test_everything_is_looked_at_in_slices_nodes_before_models_and_each_once() -> None:
    c = fleet(5, a=2, b=1, d=1)
    c.settings = Settings(looks_max=4)
    c.index.dirty.everything = True
    plans = slices(c)
    assert [plan.left.rest for plan in plans] == [
        Rest(after="n2"),
        Rest(after="n4"),
        Rest(models=True, after="a"),
        None,
    ]
    assert not any(plan.groups for plan in plans)


def test_what_changed_comes_before_what_is_merely_to_be_looked_at() -> None:
    c = fleet(5, a=1)
    c.settings = Settings(looks_max=4)
    c.index.dirty.rest = Rest(after="n1")
    c.model("z", replicas=1)
    c.spec("n5", cordon=True)
    assert c.step().left == Dirty(rest=Rest(after="n3"), short={"z": 1})
    plan = c.step()
    assert plan.counts()["place"] == 1
    assert not plan.left.short


def test_a_model_waits_until_every_node_that_changed_has_been_judged() -> None:
    c = fleet(4, a=0)
    c.settings = Settings(looks_max=2)
    for name in ("n1", "n2", "n3"):
        c.away(name)
    c.model("m")
    plan = c.step()
    assert plan.left == Dirty(nodes={"n3"}, models={"m"})
    assert not c.replicas("m")
    slices(c)
    assert c.one("m").shards[0].node == "n4"


def test_a11_nobody_is_declared_lost_before_all_that_went_away_at_once_is_known() -> None:
    c = fleet(9)
    c.away("n1")
    c.step()
    c.advance(299.0)
    c.step()
    for number in range(2, 8):
        c.away(f"n{number}")
    c.advance(2.0)
    c.settings = Settings(looks_max=2)
    plans = slices(c)
    assert len(plans) > 2
    assert Liveness.LOST not in liveness(c).values(), "seven of nine are gone: that is doubted"
    assert c.index.fleet is not None
    assert c.index.fleet.record is not None
    assert c.index.fleet.record.guard.on


def test_no_replica_goes_anywhere_while_there_are_nodes_that_nobody_has_looked_at() -> None:
    c = fleet(4, a=0)
    c.settings = Settings(looks_max=2)
    c.model("m")
    c.index.dirty.everything = True
    plan = c.step()
    assert plan.left.rest == Rest(after="n1")
    assert plan.left.short == {"m": 1}
    assert not c.replicas("m")
    slices(c)
    assert len(c.replicas("m")) == 1


def test_a_model_that_lacks_nothing_but_placements_is_not_looked_at_until_its_turn() -> None:
    c = fleet(3)
    c.settings = Settings(placements_max=2)
    for name in "abc":
        c.model(name, replicas=2)
    c.step()
    plan = c.plan(Dirty(short={"b": 1, "c": 1}))
    assert {
        write.ref.name for group in plan.groups for write in group.writes if write.ref.kind is Kind.MODEL_STATE
    } == {"b"}
    assert plan.left == Dirty(short={"c": 2})


def test_a_model_larger_than_a_slice_is_looked_at_whole() -> None:
    c = fleet(1, m=6)
    c.settings = Settings(looks_max=2)
    name = c.shard(c.replicas("m")[0])
    c.report(name, ShardPhase.FAILED, reason="exit 1")
    plans = slices(c)
    assert sum(plan.counts().get("fail", 0) for plan in plans) == 1


def test_words_are_given_so_many_at_a_time_and_no_model_is_tended_before_all_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adoption, "ANSWERS_MAX", 2)
    c = fleet(5, m=5)
    for replica in c.replicas("m"):
        name, order = c.shard(replica), c.index.assignments.record(c.shard(replica))
        c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, name, None), (Kind.SECRET, replica.id, None))
        c.report(name, ShardPhase.READY, order=order)
    waiting = unanswered(c.index)
    plan = c.step()
    assert plan.counts() == {"adopt": 2}
    assert plan.left.nodes == {name.partition("/")[0] for name in waiting[2:]}
    assert "m" in plan.left.models
    slices(c)
    assert unanswered(c.index) == []
    assert [replica.phase for replica in c.replicas("m")] == [ReplicaPhase.READY] * 5, "none was placed in its stead"


def test_the_fleet_is_judged_by_a_pass_that_has_nothing_else_to_look_at() -> None:
    c = fleet(3)
    fleet_row = c.index.fleet
    assert fleet_row is not None
    assert fleet_row.record is not None
    c.meddle((Kind.FLEET, "", None))
    c.index.take_dirty()
    plan = c.plan(Dirty(fleet=True))
    assert plan.counts() == {"fleet": 1}


def test_who_waits_for_room_is_looked_at_when_a_node_changes_and_nothing_is_written_of_it() -> None:
    c = fleet(1)
    c.model("m", cpu_profile(64.0))
    c.settle()
    facts = c.index.facts.record("n1")
    assert facts is not None
    c.write(Kind.FACTS, "n1", msgspec.structs.replace(facts, memory_bytes=128 * GB))
    assert c.step().counts()["place"] == 1


def test_who_waits_for_room_has_its_turn_however_many_wait_and_however_often_nodes_change() -> None:
    c = fleet(1)
    for name in "abcde":
        c.model(name, cpu_profile(500.0))
    c.model("z", cpu_profile(64.0))
    c.settle()
    assert c.index.standing.pending == set("abcdez")
    c.settings = Settings(placements_max=2)
    facts = c.index.facts.record("n1")
    assert facts is not None
    for passes in range(3):
        c.write(Kind.FACTS, "n1", msgspec.structs.replace(facts, memory_bytes=(128 + passes) * GB))
        plan = c.step()
        assert plan.more
    assert len(c.replicas("z")) == 1


def test_who_has_a_place_waits_for_none_of_those_who_find_none() -> None:
    c = fleet(1)
    for name in "abcde":
        c.model(name, cpu_profile(500.0))
    c.settle()
    c.settings = Settings(placements_max=2)
    c.model("z")
    c.spec("n1", labels={"a": "b"})
    assert c.step().counts()["place"] == 1


def test_a_memory_of_what_is_pending_follows_what_is_said_of_the_model() -> None:
    c = fleet(1)
    c.model("m", cpu_profile(64.0))
    c.settle()
    assert c.index.standing.pending == {"m"}
    c.node("n2", 128)
    c.settle()
    assert c.index.standing.pending == set()
    assert c.one("m").shards[0].node == "n2"
