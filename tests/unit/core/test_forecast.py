"""What a change would lead to, told replica by replica, and why."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core import rehearsal
from llmgw.core.catalog import EngineSpec, Profile
from llmgw.core.explain import Constraint
from llmgw.core.forecast import Forecast, ModelForecast, Step, StepAction, forecast
from llmgw.core.ids import CountedIds
from llmgw.core.node import Build, EngineFacts
from llmgw.core.plan import Delete, Put, Write
from llmgw.core.record import Leader, Recover, StoreMeta
from llmgw.core.replica import ReplicaPhase, ShardPhase
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.units import GB, Now
from llmgw.testing.apply import copy_of
from llmgw.testing.cluster import Cluster, cpu_profile, model_spec

TWO_BUILDS = EngineFacts(
    probed=True,
    builds=(Build(engine="llama.cpp", version="b1"), Build(engine="llama.cpp", version="b2")),
)


def model(name: str, *profiles: Profile, replicas: int = 1) -> Write:
    return Put(ref=Ref(Kind.MODEL, name), record=model_spec(name, *profiles, replicas=replicas))


def no_model(name: str) -> Write:
    return Delete(ref=Ref(Kind.MODEL, name))


def foretell(c: Cluster, *change: Write, without: tuple[str, ...] = ()) -> Forecast:
    """A forecast, which must leave everything as it is."""
    before, dirty = dict(c.index.rows()), c.index.dirty
    told = forecast(c.index, change, without=without, now=c.now, settings=c.settings)
    assert dict(c.index.rows()) == before
    assert c.index.dirty is dirty
    return told


def of(told: Forecast, name: str) -> ModelForecast:
    (found,) = (each for each in told.models if each.name == name)
    return found


def only(told: Forecast, name: str) -> Step:
    (step,) = of(told, name).steps
    return step


def cluster(*nodes: str, memory_gb: float = 16.0) -> Cluster:
    c = Cluster()
    for name in nodes:
        c.node(name, memory_gb)
    c.settle()
    return c


def test_a_new_model_is_placed_and_nothing_else_changes() -> None:
    c = cluster("n1", "n2")
    c.model("a")
    c.settle()
    told = foretell(c, model("b", cpu_profile(3.0), replicas=2))
    steps = of(told, "b").steps
    assert [(step.action, step.profile, step.was, step.replica) for step in steps] == [
        (StepAction.PLACE, "cpu", (), None)
    ] * 2
    assert sorted(step.nodes for step in steps) == [("n1",), ("n2",)]
    assert (of(told, "b").wanted, of(told, "b").ready, of(told, "b").under_way) == ((None, 2), (0, 2), False)
    assert only(told, "a").action is StepAction.KEEP
    assert of(told, "a").changes == ()
    assert told.whole
    assert told.settled


def test_what_fits_nowhere_says_why() -> None:
    c = cluster("n1")
    told = foretell(c, model("big", cpu_profile(99.0)))
    big = of(told, "big")
    assert big.steps == ()
    assert big.unplaced is not None
    assert big.unplaced.refused == {Constraint.MEMORY_TOTAL.value: 1}
    assert big.unplaced.nearest[0].needed == 99 * GB
    assert told.settled
    assert not told.whole


def test_another_launch_restarts_and_says_which_field() -> None:
    c = cluster("n1", "n2")
    c.model("a", cpu_profile(9.0, env={"TOKEN": "hunter2"}))
    c.settle()
    told = foretell(c, model("a", cpu_profile(9.0, context=8192, env={"TOKEN": "hunter3"}, priority=5)))
    step = only(told, "a")
    assert (step.action, step.replica, step.old_first) == (StepAction.RESTART, c.one("a").id, False)
    assert step.was != step.nodes
    assert step.why == "context 4096 → 8192, env.TOKEN changed"
    assert not of(told, "a").gap


def test_what_acts_without_a_restart_keeps_every_replica() -> None:
    c = cluster("n1")
    c.model("a")
    c.settle()
    told = foretell(c, model("a", cpu_profile(drain_s=5.0, start_s=9.0, priority=3)))
    assert only(told, "a").action is StepAction.KEEP


def test_a_rollout_without_room_ends_the_old_one_first_and_leaves_a_gap() -> None:
    c = cluster("n1")
    c.model("a", cpu_profile(9.0))
    c.settle()
    told = foretell(c, model("a", cpu_profile(10.0)))
    step = only(told, "a")
    assert (step.action, step.was, step.nodes, step.old_first) == (StepAction.RESTART, ("n1",), ("n1",), True)
    assert step.why == "min_memory_gb 9 → 10"
    assert of(told, "a").gap
    assert of(told, "a").ready == (1, 1)


def test_a_rollout_without_room_leaves_no_gap_while_another_serves() -> None:
    c = cluster("n1", "n2")
    c.model("a", cpu_profile(9.0), replicas=2)
    c.settle()
    told = foretell(c, model("a", cpu_profile(10.0), replicas=2))
    assert [step.old_first for step in of(told, "a").steps] == [True, True]
    assert not of(told, "a").gap


def test_fewer_and_none() -> None:
    c = cluster("n1", "n2", memory_gb=4.0)
    c.model("a", cpu_profile(3.0), replicas=2)
    c.settle()
    c.model("waits", cpu_profile(3.0))
    c.settle()
    fewer = foretell(c, model("a", cpu_profile(3.0)))
    assert sorted(step.action.value for step in of(fewer, "a").steps) == ["keep", "remove"]
    gone = next(step for step in of(fewer, "a").steps if step.action is StepAction.REMOVE)
    assert (gone.why, gone.nodes) == ("fewer replicas are wanted", ())
    # What is given back goes to who waited for it, and that is said as well.
    assert only(fewer, "waits").action is StepAction.PLACE
    assert only(fewer, "waits").nodes == gone.was
    none = foretell(c, no_model("a"))
    assert {step.why for step in of(none, "a").steps} == {"the model was removed"}
    assert (of(none, "a").wanted, of(none, "a").ready, of(none, "a").gap) == ((2, 0), (2, 0), False)


def test_without_a_node_its_replicas_move_and_a_single_one_leaves_a_gap() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("single", cpu_profile(3.0))
    c.settle()
    c.model("double", cpu_profile(3.0), replicas=3)
    c.settle()
    node = c.one("single").shards[0].node
    told = foretell(c, without=(node,))
    step = only(told, "single")
    assert (step.action, step.was, step.why) == (StepAction.MOVE, (node,), f"{node} is gone")
    assert step.nodes != (node,)
    assert of(told, "single").gap
    assert [each.was for each in of(told, "double").changes] == [(node,)]
    assert not of(told, "double").gap
    assert told.without == (node,)
    assert not told.guard_then.on
    assert told.whole


def test_without_its_node_what_fits_nowhere_else_is_stranded() -> None:
    c = cluster("n1")
    c.model("a", cpu_profile(9.0))
    c.settle()
    c.node("small", 4.0)
    c.settle()
    told = foretell(c, without=("n1",))
    step = only(told, "a")
    assert (step.action, step.nodes, step.why) == (
        StepAction.STRAND,
        ("n1",),
        "n1 is not there, and nothing else takes it",
    )
    assert of(told, "a").unplaced is not None
    assert (of(told, "a").ready, of(told, "a").gap) == ((1, 0), True)
    assert not told.whole


def test_without_many_nodes_at_once_the_guard_would_hold() -> None:
    c = cluster("n1", "n2", "n3")
    told = foretell(c, without=("n1", "n2"))
    assert (told.guard_then.on, told.guard_then.unreachable, told.guard_then.nodes) == (True, 2, 3)
    assert not foretell(c, without=("n1",)).guard_then.on
    for name in ("n1", "n2"):
        state = c.index.node_states.record(name)
        assert state is not None
        c.spec(name, release=state.lease)
    assert not foretell(c, without=("n1", "n2")).guard_then.on


def test_a_change_and_missing_nodes_together() -> None:
    c = cluster("n1", "n2")
    c.model("a", cpu_profile(9.0))
    c.settle()
    node = c.one("a").shards[0].node
    told = foretell(c, model("b", cpu_profile(9.0)), without=(node,))
    assert len([each for each in told.models if each.unplaced is not None]) == 1


def test_a_model_that_backs_off_is_placed_when_that_is_over() -> None:
    c = cluster("n1")
    c.model("a")
    c.settle()
    c.report(c.shard(c.one("a")), ShardPhase.FAILED, reason="exit 1")
    c.settle()
    state = c.index.model_states.record("a")
    assert state is not None
    assert state.retry_at is not None
    told = foretell(c)
    step = only(told, "a")
    assert step.action is StepAction.PLACE
    assert step.in_s == pytest.approx(state.retry_at - c.now.wall_s, abs=0.01)
    assert told.whole


def test_a_failed_replica_is_followed_by_another() -> None:
    c = cluster("n1")
    c.model("a")
    c.settle()
    c.report(c.shard(c.one("a")), ShardPhase.FAILED, reason="exit 1")
    step = only(foretell(c), "a")
    assert (step.action, step.was, step.nodes, step.why) == (StepAction.RESTART, ("n1",), ("n1",), "exit 1")
    assert step.in_s > 0


def test_what_is_under_way_already_is_told_apart() -> None:
    c = cluster("n1", "n2")
    c.model("a")
    told = foretell(c, model("b"))
    assert of(told, "a").under_way
    assert only(told, "a").action is StepAction.PLACE
    assert not of(told, "b").under_way


def test_nodes_that_are_away_stay_away_and_are_given_up_in_time() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("a")
    c.settle()
    node = c.one("a").shards[0].node
    c.away(node)
    c.settle()
    told = foretell(c)
    assert told.away == (node,)
    step = only(told, "a")
    assert step.action is StepAction.MOVE
    assert step.in_s == pytest.approx(c.settings.lost_after_s, abs=1.0)


def test_under_the_guard_nothing_moves() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("a", replicas=3)
    c.settle()
    c.away("n1")
    c.away("n2")
    c.settle()
    told = foretell(c)
    assert told.guard.on
    assert told.away == ("n1", "n2")
    assert sorted(step.action.value for step in of(told, "a").steps) == ["keep", "strand", "strand"]
    assert not told.whole


def test_a_drained_node_is_emptied() -> None:
    c = cluster("n1", "n2")
    c.model("a")
    c.settle()
    node = c.one("a").shards[0].node
    c.spec(node, drain=True)
    step = only(foretell(c), "a")
    assert (step.action, step.was, step.why) == (StepAction.MOVE, (node,), "its node is being drained")


def test_a_machine_declared_gone() -> None:
    c = cluster("n1", "n2")
    c.model("a")
    c.settle()
    node = c.one("a").shards[0].node
    c.away(node)
    c.settle()
    c.spec(node, forget=f"boot-{node}")
    step = only(foretell(c), "a")
    assert (step.action, step.was, step.why) == (StepAction.MOVE, (node,), "its node was declared gone for good")


def test_a_restored_store_waits_for_its_nodes() -> None:
    c = cluster("n1", "n2")
    c.model("a")
    c.settle()
    c.report(c.shard(c.one("a")), ShardPhase.FAILED, reason="exit 1")
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")))
    c.back("n1")
    told = foretell(c, model("b"))
    assert told.waiting_for == ("n2",)
    assert of(told, "b").steps == ()
    assert "restored" in of(told, "a").reason
    c.meddle((Kind.RECOVER, "", Recover(incarnation="store-2")))
    assert only(foretell(c, model("b")), "b").action is StepAction.PLACE


def test_what_cannot_be_read_is_left_alone() -> None:
    c = cluster("n1", "n2")
    c.model("a", cpu_profile(9.0))
    c.settle()
    replica = c.one("a").id
    c.spoil(Kind.REPLICA, replica)
    told = foretell(c, model("a", cpu_profile(9.0, context=8192)))
    step = only(told, "a")
    assert (step.action, step.why) == (StepAction.KEEP, "a record of it can't be read, so it is left alone")
    assert told.unreadable == (f"plan/replicas/{replica}",)


def test_an_order_that_cannot_be_read_and_a_shard_without_one_stay_as_they_are() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("a", replicas=3)
    c.settle()
    first, second, third = c.replicas("a")
    c.spoil(Kind.ASSIGNMENT, c.shard(first))
    c.spoil(Kind.SHARD, c.shard(second))
    c.meddle((Kind.ASSIGNMENT, c.shard(third), None))
    told = foretell(c)
    assert [step.action for step in of(told, "a").steps] == [StepAction.KEEP] * 3
    assert of(told, "a").ready == (3, 3)


def test_ids_are_the_same_in_each_rehearsal_and_none_is_in_use() -> None:
    ids = CountedIds(used=frozenset({"aaaab"}))
    assert [ids.suffix(), ids.suffix()] == ["aaaac", "aaaad"]
    assert ids.key().reveal() == f"{3:064x}"
    assert ids.token() == f"{4:032x}"


def test_another_version_of_an_engine_rolls() -> None:
    c = Cluster()
    c.node("n1", engines=TWO_BUILDS)
    c.model("a")
    c.settle()
    engine = EngineSpec(name="llama.cpp", version="b2")
    step = only(foretell(c, Put(ref=Ref(Kind.ENGINE, "llama.cpp"), record=engine)), "a")
    assert (step.action, step.why) == (StepAction.RESTART, "llama.cpp b1 → b2")
    assert (
        only(
            foretell(c, Put(ref=Ref(Kind.ENGINE, "llama.cpp"), record=EngineSpec(name="llama.cpp", version="b3"))), "a"
        ).action
        is StepAction.KEEP
    )


def test_a_replica_on_its_way_out_is_not_told_again() -> None:
    c = cluster("n1")
    c.model("a")
    c.settle()
    c.remove_model("a")
    c.step()
    assert c.one("a").phase is ReplicaPhase.DRAINING
    assert of(foretell(c), "a").steps == ()


def test_passes_that_are_cut_short_are_gone_on_with() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("a", cpu_profile(9.0), replicas=2)
    c.settle()
    c.settings = msgspec.structs.replace(c.settings, placements_max=1, looks_max=1)
    told = foretell(c, model("b", cpu_profile(1.0), replicas=5), model("big", cpu_profile(99.0)), without=("n1",))
    assert told.settled
    assert [step.action for step in of(told, "b").steps] == [StepAction.PLACE] * 5
    assert of(told, "big").unplaced is not None
    assert of(told, "a").ready == (2, 2)


def test_a_forecast_that_does_not_settle_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    c = cluster("n1")
    monkeypatch.setattr(rehearsal, "ROUNDS_MAX", 1)
    told = foretell(c, model("a"))
    assert (told.settled, told.whole, told.rounds) == (False, False, 1)


def test_a_store_that_no_controller_has_seen() -> None:
    told = forecast(Index(), [model("a")], now=Now(wall_s=1.0, mono_s=1.0))
    assert (told.set_up, told.led, told.settled) == (False, False, True)
    assert (of(told, "a").steps, of(told, "a").wanted) == ((), (None, None))
    assert not told.whole


def test_who_leads() -> None:
    c = cluster("n1")
    assert not foretell(c).led
    c.write(Kind.LEADER, "", Leader(id="c", address="a:1", version="1", pid=1))
    assert foretell(c).led


def test_nothing_secret_is_told() -> None:
    c = cluster("n1")
    c.model("a", cpu_profile(1.0, env={"TOKEN": "hunter2"}))
    c.settle()
    told = foretell(c, model("a", cpu_profile(2.0, env={"TOKEN": "hunter3"})), no_model("x"))
    text = msgspec.json.encode(told).decode()  # a Secret inside would be refused here
    secret = c.index.secrets.record(c.one("a").id)
    assert secret is not None
    assert not any(each in text for each in (secret.key.reveal(), "hunter"))


def test_the_same_tree_gives_the_same_forecast() -> None:
    c = cluster("n1", "n2")
    c.model("a", replicas=2)
    c.settle()
    change = model("b", cpu_profile(2.0), replicas=3)
    turned = copy_of(c.index, reversed([ref for ref, _ in c.index.rows()]))
    assert foretell(c, change) == forecast(turned, [change], now=c.now, settings=c.settings)
