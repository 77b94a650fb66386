"""What follows from what: the life of replicas, told step by step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.core.catalog import EngineSpec, NodeSpec
from llmgw.core.draft import Draft
from llmgw.core.fleet import MEASURE_MAX_S, MEASURE_MIN_S
from llmgw.core.ids import Secret
from llmgw.core.lifecycle import JITTER, backoff_s, fresh_id
from llmgw.core.node import Build, EngineFacts, Fleet, Liveness, NodeState
from llmgw.core.plan import Put, Settings, Wake
from llmgw.core.reconcile import due, reconcile
from llmgw.core.replica import (
    Assignment,
    Desired,
    EngineSecret,
    ModelState,
    Replica,
    ReplicaPhase,
    Retire,
    Rollout,
    ShardPhase,
)
from llmgw.core.routing import route_table
from llmgw.core.snapshot import Dirty, Index, Kind, Ref
from llmgw.core.units import GB
from llmgw.errors import InvariantError
from llmgw.testing.cluster import Cluster, cpu_profile, gpu, model_spec

P = ReplicaPhase


def cluster(*nodes: str, memory_gb: float = 16.0) -> Cluster:
    c = Cluster()
    for name in nodes:
        c.node(name, memory_gb)
    c.settle()
    return c


def state(c: Cluster, model: str) -> ModelState:
    found = c.index.model_states.record(model)
    assert found is not None
    return found


def order(c: Cluster, replica: Replica) -> Assignment:
    found = c.index.assignments.record(c.shard(replica))
    assert found is not None
    return found


def causes(c: Cluster) -> dict[str, int]:
    return c.step().counts()


def by_phase(c: Cluster, model: str) -> dict[ReplicaPhase, list[Replica]]:
    found: dict[ReplicaPhase, list[Replica]] = {}
    for replica in c.replicas(model):
        found.setdefault(replica.phase, []).append(replica)
    return found


# --- birth and death ------------------------------------------------------------------------------------------------


def test_a_replica_is_placed_with_everything_an_engine_is_started_from() -> None:
    c = cluster("n1")
    profile = cpu_profile(2.0, context=8192, slots=2, args=("--x",), env={"A": "1"}, start_s=30.0, drain_s=7.0)
    spec = c.model("org/Qwen 7B", profile)
    plan = c.step()
    assert [group.cause for group in plan.groups] == ["place", "state"]
    assert [write.ref.kind for write in plan.groups[0].writes] == [Kind.REPLICA, Kind.SECRET, Kind.ASSIGNMENT]
    replica = c.one("org/Qwen 7B")
    assert replica.id.startswith("org-qwen-7b-")
    assert (replica.phase, replica.profile, replica.build) == (P.PLACED, "cpu", "llama.cpp@b1")
    assert replica.receipt is not None
    assert replica.receipt.winner[0].node == "n1"
    made = order(c, replica)
    assert (made.node, made.rank, made.desired, made.start_s, made.drain_s) == ("n1", 0, Desired.RUNNING, 30.0, 7.0)
    assert made.claim == replica.shards[0].claim
    assert made.claim.memory_bytes == 2 * GB
    launch = made.launch
    assert (launch.source, launch.context, launch.slots, launch.args, launch.env) == (
        spec.source, 8192, 2, ("--x",), {"A": "1"},
    )  # fmt: skip
    assert launch.digest == replica.launch
    secret = c.index.secrets.record(replica.id)
    assert secret is not None
    assert secret.key == made.engine_key


def test_phases_follow_the_nodes_reports() -> None:
    c = cluster("n1")
    c.model("m")
    c.step()
    name = c.shard(c.one("m"))
    for phase, seen in [
        (ShardPhase.HELD, P.PLACED),
        (ShardPhase.STARTING, P.STARTING),
        (ShardPhase.READY, P.READY),
        (ShardPhase.STARTING, P.STARTING),
        (ShardPhase.READY, P.READY),
    ]:
        c.meddle((Kind.SHARD, name, None))
        c.report(name, phase)
        c.step()
        assert c.one("m").phase is seen, phase
    assert (state(c, "m").wanted, state(c, "m").placed, state(c, "m").ready) == (1, 1, 1)


def test_a_removed_model_drains_stops_and_is_gone_with_all_it_had() -> None:
    c = cluster("n1")
    c.model("m", cpu_profile(drain_s=33.0))
    c.settle()
    c.remove_model("m")
    assert causes(c) == {"model_removed": 1, "state": 1}
    replica = c.one("m")
    assert (replica.phase, replica.retire) == (P.DRAINING, Retire.MODEL_REMOVED)
    assert (order(c, replica).desired, order(c, replica).drain_s) == (Desired.STOPPED, 33.0)
    name = c.shard(replica)
    c.report(name, ShardPhase.DRAINING)
    assert causes(c) == {}
    c.report(name, ShardPhase.STOPPING)
    assert causes(c) == {"phase": 1}
    assert c.one("m").phase is P.STOPPING
    c.report(name, ShardPhase.STOPPED)
    assert causes(c) == {"end": 1, "state": 1}
    for kind in (Kind.REPLICA, Kind.SECRET, Kind.ASSIGNMENT, Kind.MODEL_STATE):
        assert not [ref for ref, _ in c.index.rows() if ref.kind is kind]
    c.answer()
    assert not c.index.reports
    assert causes(c) == {}


def test_a_stop_is_confirmed_only_by_an_answer_to_the_order_itself() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    c.remove_model("m")
    c.step()
    replica = c.one("m")
    name, report = c.shard(replica), c.index.reports.record(c.shard(replica))
    assert report is not None
    old = msgspec.structs.replace(report, phase=ShardPhase.STOPPED)
    for stale in (old, msgspec.structs.replace(old, assigned=False, assignment_rev=10**6)):
        c.write(Kind.SHARD, name, stale)
        assert "end" not in causes(c)
    c.write(Kind.SHARD, name, None)
    assert causes(c) == {}, "a missing report confirms nothing"
    c.report(name, ShardPhase.STOPPED)
    assert causes(c)["end"] == 1


def test_scaling_goes_up_at_once_and_down_by_draining_the_newest() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m")
    c.settle()
    first = c.one("m")
    c.advance(10.0)
    c.model("m", replicas=3)
    assert causes(c)["place"] == 2
    c.settle()
    c.model("m", replicas=1)
    assert causes(c)["scale_down"] == 2
    assert by_phase(c, "m")[P.READY] == [first]
    c.settle()
    assert c.one("m") == first
    c.model("m", replicas=0)
    c.settle()
    assert not c.replicas("m")
    assert state(c, "m").wanted == 0


def test_what_does_not_serve_is_scaled_down_first() -> None:
    c = cluster("n1", "n2")
    c.model("m", replicas=2)
    c.step()
    old, new = c.replicas("m")
    c.report(c.shard(new), ShardPhase.READY)
    c.step()
    c.model("m", replicas=1)
    c.step()
    assert {each.id: each.phase for each in c.replicas("m")} == {old.id: P.DRAINING, new.id: P.READY}


def test_one_that_may_still_serve_out_of_sight_is_scaled_down_only_when_another_serves() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m", replicas=2)
    c.settle()
    hidden, young = c.replicas("m")
    c.away(hidden.shards[0].node)
    c.report(c.shard(young), ShardPhase.STARTING)
    c.model("m", replicas=1)
    c.step()
    phases = {each.id: each.phase for each in c.replicas("m")}
    assert phases[hidden.id] is P.READY
    c.report(c.shard(young), ShardPhase.READY)
    c.step()
    phases = {each.id: each.phase for each in c.replicas("m")}
    assert phases == {hidden.id: P.DRAINING, young.id: P.READY}


def test_c03_two_models_for_one_nodes_memory_give_one_claim_and_both_numbers() -> None:
    c = Cluster()
    c.node("n1", 24)
    c.model("a", cpu_profile(14.0))
    c.model("b", cpu_profile(14.0))
    assert causes(c)["place"] == 1
    holder = c.one("a")
    assert not c.replicas("b")
    assert state(c, "b").reason == (
        f"does not fit on the only node: n1 (cpu): needs 14 GB; 24 GB in all, 14 GB promised to {holder.id}"
    )
    c.new_leader()
    c.settle()
    assert not c.replicas("b")
    c.remove_model("a")
    c.settle()
    assert c.one("b").phase is P.READY
    assert state(c, "b").unplaced is None
    assert state(c, "b").reason == ""


def test_b01_a_replica_deleted_while_its_node_was_away_holds_its_memory_until_the_stop_is_confirmed() -> None:
    c = cluster("n1", memory_gb=8.0)
    c.model("old", cpu_profile(8.0))
    c.settle()
    c.away("n1")
    c.step()
    c.remove_model("old")
    c.model("new", cpu_profile(8.0))
    c.settle()
    assert c.one("old").phase is P.DRAINING
    assert not c.replicas("new")
    c.back("n1")
    c.step()
    assert not c.replicas("new"), "the node is back, the old engine not confirmed gone"
    name = c.shard(c.one("old"))
    c.report(name, ShardPhase.STOPPING)
    c.step()
    assert not c.replicas("new")
    c.report(name, ShardPhase.STOPPED)
    c.step()
    assert not c.replicas("old")
    assert c.one("new").phase is P.PLACED


def test_b01_a_node_lost_and_replaced_stops_its_old_engine_when_it_is_back() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m")
    c.settle()
    old = c.one("m")
    node = old.shards[0].node
    c.away(node)
    c.settle()
    c.advance(301.0)
    c.settle()
    assert {each.id: each.phase for each in c.replicas("m")}[old.id] is P.DRAINING
    assert len(c.replicas("m")) == 2, "the claim stays with the node that can't answer"
    c.back(node)
    c.settle()
    (new,) = c.replicas("m")
    assert new.id != old.id
    assert new.phase is P.READY


# --- failure --------------------------------------------------------------------------------------------------------


def test_a_failed_replica_is_stopped_confirmed_waited_for_and_replaced_elsewhere() -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    old = c.one("m")
    node = old.shards[0].node
    c.report(c.shard(old), ShardPhase.FAILED, reason="exit 139: out of memory")
    assert causes(c) == {"fail": 1, "state": 1}
    failed = c.one("m")
    assert (failed.phase, failed.retire, failed.reason) == (P.FAILED, Retire.FAILED, "exit 139: out of memory")
    assert order(c, failed).desired is Desired.STOPPED
    after = state(c, "m")
    wait_s = backoff_s("m", 1, Settings())
    assert (after.attempt, after.retry_at) == (1, c.now.wall_s + wait_s)
    assert after.reason == f"{old.id} on {node}: exit 139: out of memory"
    assert after.failed_nodes == {node: c.now.wall_s + wait_s + 300.0}
    c.settle()
    assert not c.replicas("m"), "confirmed, and its claim ended"
    assert c.wakes[Wake.MODEL, "m"] == pytest.approx(c.now.mono_s + wait_s)
    c.advance(wait_s + 0.001)
    c.settle()
    new = c.one("m")
    assert new.shards[0].node != node
    assert new.receipt is not None
    assert new.receipt.winner[0].failed_lately is False
    assert new.receipt.runner_up is not None
    assert new.receipt.runner_up.failed_lately is True


def test_a_replica_that_this_leader_could_never_read_still_counts() -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    old = c.one("m")
    c.meddle((Kind.REPLICA, old.id, None))
    c.spoil(Kind.REPLICA, old.id)
    assert c.index.replicas.record(old.id) is None
    c.index.dirty.everything = True
    c.settle()
    assert list(c.index.replicas) == [old.id], "none is placed beside it"
    assert state(c, "m").placed == 1


def test_a_clock_that_stepped_back_makes_nobody_wait_longer_than_any_backoff() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    c.report(c.shard(c.one("m")), ShardPhase.FAILED, reason="exit 1")
    c.settle()
    c.advance(1.0)
    c.step()
    assert not c.replicas("m"), "it waits"
    c.advance(0.0, step_wall_s=-900.0)
    c.index.dirty.everything = True  # as the loop does
    c.settle()
    assert c.one("m").phase is P.READY


def test_inv7_what_a_clock_said_that_stepped_back_does_not_hold_again_when_that_moment_comes_near() -> None:
    c = cluster("n1", memory_gb=8.0)
    c.model("m", cpu_profile(4.0))
    c.settle()
    c.report(c.shard(c.one("m")), ShardPhase.FAILED, reason="exit 1")
    c.settle()
    c.spec("n1", cordon=True)
    c.advance(0.0, step_wall_s=-900.0)
    c.index.dirty.everything = True  # as the loop does
    c.settle()
    assert state(c, "m").unplaced is not None
    c.advance(800.0)
    assert c.plan().empty


def test_inv7_what_is_said_of_models_comes_in_one_order_whichever_were_looked_at_first() -> None:
    c = Cluster()
    c.node("n1", 16, gpus=(gpu(0), gpu(1)))
    c.model("x", cpu_profile(10.0))
    c.settle()
    c.model("a", cpu_profile(8.0, gpus_per_node=2, tensor_parallel=2))
    c.model("z", cpu_profile(None, gpus_per_node=1, gpu_class="A100"))
    c.settle()
    c.model("z", cpu_profile(None, gpus_per_node=1))
    dirty = c.dirty()
    assert dirty.models == {"z"}
    some = c.plan(dirty)
    assert [group.cause for group in some.groups] == ["place", "state", "state"], (
        "what keeps `a` out is another thing now"
    )
    assert some.groups == c.plan().groups


def test_inv3_a_failed_engines_memory_is_free_only_when_its_stop_is_confirmed() -> None:
    c = cluster("n1", memory_gb=8.0)
    c.model("m", cpu_profile(8.0))
    c.settle()
    c.report(c.shard(c.one("m")), ShardPhase.FAILED, reason="exit 1")
    c.step()
    c.remove_model("m")
    c.model("other", cpu_profile(8.0))
    c.step()
    assert not c.replicas("other")
    c.answer()
    c.step()
    assert c.one("other").phase is P.PLACED


def test_backoff_doubles_is_capped_spread_and_always_the_same() -> None:
    settings = Settings()
    for attempt, middle in [(1, 5.0), (2, 10.0), (4, 40.0), (7, 300.0), (60, 300.0), (10**6, 300.0)]:
        wait_s = backoff_s("m", attempt, settings)
        assert middle * (1 - JITTER) <= wait_s <= middle * (1 + JITTER)
        assert wait_s == backoff_s("m", attempt, settings)
    assert len({backoff_s(f"m{i}", 1, settings) for i in range(50)}) == 50


def test_failures_add_up_and_are_forgotten_after_running_stably() -> None:
    c = cluster("n1", "n2")
    c.model("m")
    for attempt in (1, 2, 3):
        c.settle()
        c.report(c.shard(c.one("m")), ShardPhase.FAILED)
        c.settle()
        assert state(c, "m").attempt == attempt
        assert "gave no reason" in state(c, "m").reason
        c.advance(400.0)
    c.settle()
    assert state(c, "m").attempt == 3
    c.advance(1799.0)
    assert causes(c) == {}
    c.advance(1.0)
    assert causes(c) == {"state": 1}
    assert (state(c, "m").attempt, state(c, "m").retry_at, state(c, "m").failed_nodes) == (0, None, {})
    assert (state(c, "m").reason, state(c, "m").failure) == ("", "")


def test_two_failures_in_one_pass_count_twice_and_both_nodes_are_remembered() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m", replicas=2)
    c.settle()
    for replica in c.replicas("m"):
        c.report(c.shard(replica), ShardPhase.FAILED)
    plan = c.step()
    assert [group.cause for group in plan.groups] == ["state", "fail", "fail"]
    assert state(c, "m").attempt == 2
    assert len(state(c, "m").failed_nodes) == 2


def test_a_failure_on_an_unreachable_node_is_acted_on_and_its_claim_stays() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m")
    c.settle()
    old = c.one("m")
    c.report(c.shard(old), ShardPhase.FAILED)
    c.away(old.shards[0].node)
    c.settle()
    c.advance(10.0)
    c.settle()
    assert [each.phase for each in c.replicas("m")] == [P.FAILED, P.READY]


# --- lost nodes -----------------------------------------------------------------------------------------------------


def lost(c: Cluster) -> Replica:
    """The one replica of `m`, its node gone for long enough."""
    replica = c.one("m")
    c.away(replica.shards[0].node)
    c.step()
    c.advance(300.0)
    c.step()
    return replica


def test_inv6_unreachable_alone_changes_nothing_of_what_serves() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m")
    c.settle()
    replica = c.one("m")
    c.away(replica.shards[0].node)
    assert causes(c) == {"liveness": 1}
    c.advance(299.0)
    assert causes(c) == {}
    assert c.replicas("m") == [replica]
    assert [each.replica for each in route_table(c.index).routes["m"]] == [replica.id]


def test_a_lost_nodes_replica_is_replaced_before_it_leaves_routing() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m")
    c.settle()
    old = lost(c)
    new = next(each for each in c.replicas("m") if each.id != old.id)
    assert new.replaces == old.id
    assert route_table(c.index).routes["m"][0].replica == old.id
    c.answer(ready=False)
    c.step()
    assert next(each for each in c.replicas("m") if each.id == old.id).phase is P.READY
    c.answer()
    assert causes(c) == {"phase": 1, "replaced": 1, "state": 1}
    gone = next(each for each in c.replicas("m") if each.id == old.id)
    assert (gone.phase, gone.retire) == (P.DRAINING, Retire.REPLACED)
    assert [each.replica for each in route_table(c.index).routes["m"]] == [new.id]


def test_a_lost_node_that_returns_first_keeps_its_replica_and_the_replacement_is_cancelled() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m")
    c.settle()
    old = lost(c)
    c.answer(ready=False)
    c.step()
    c.back(old.shards[0].node)
    assert causes(c)["cancelled"] == 1
    c.settle()
    assert c.replicas("m") == [old]


def test_a_lost_replica_stays_with_the_reason_when_nothing_else_fits() -> None:
    c = cluster("n1", "n2", "n3", memory_gb=4.0)
    c.node("n1", 16)
    c.model("m", cpu_profile(8.0))
    c.settle()
    old = lost(c)
    assert c.replicas("m") == [old]
    assert "2 have too little memory, 1 is not ready (n1 (cpu): is lost)" in state(c, "m").reason
    assert state(c, "m").ready == 0
    assert route_table(c.index).routes["m"][0].replica == old.id
    c.back("n1")
    c.settle()
    assert c.replicas("m") == [old]
    assert state(c, "m").reason == ""


def test_of_several_lost_replicas_each_goes_when_its_own_stand_in_serves() -> None:
    c = cluster("n1", "n2", "n3", "n4", "n5", "n6", "n7")
    c.model("m", replicas=2)
    c.settle()
    first, second = c.replicas("m")
    for replica in (first, second):
        c.away(replica.shards[0].node)
    c.step()
    for _ in range(2):
        c.advance(400.0)
        c.step()
    stand_ins = {each.replaces: each for each in c.replicas("m") if each.replaces}
    assert set(stand_ins) == {first.id, second.id}
    c.report(c.shard(stand_ins[second.id]), ShardPhase.READY)
    c.step()
    phases = {each.id: each.phase for each in c.replicas("m")}
    assert (phases[first.id], phases[second.id]) == (P.READY, P.DRAINING)


# --- cordon and drain -----------------------------------------------------------------------------------------------


def test_a_cordoned_node_keeps_what_it_has() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    c.spec("n1", cordon=True)
    assert causes(c) == {}
    c.node("n1")
    c.settle()
    assert c.index.node_specs.record("n1") == NodeSpec(name="n1", cordon=True), "registering clears no cordon"


def test_a_drained_node_is_emptied_by_moving_first() -> None:
    c = cluster("n1", "n2")
    c.model("m", replicas=2)
    c.model("other")
    c.settle()
    c.spec("n1", drain=True)
    c.step()
    assert not by_phase(c, "m").get(P.DRAINING), "the new one is not ready yet"
    c.settle()
    assert {each.shards[0].node for each in (*c.replicas("m"), *c.replicas("other"))} == {"n2"}
    assert len(c.replicas("m")) == 2


def test_a_drain_with_no_other_place_keeps_serving_and_says_why() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    c.spec("n1", drain=True)
    c.settle()
    assert c.one("m").phase is P.READY
    assert "is being drained" in state(c, "m").reason
    c.spec("n1")
    c.settle()
    assert state(c, "m").reason == ""
    assert c.one("m").phase is P.READY


def test_scaling_down_while_draining_takes_the_drained_ones() -> None:
    c = cluster("n1", "n2")
    c.model("m", replicas=2)
    c.settle()
    c.spec("n1", drain=True)
    c.model("m", replicas=1)
    c.step()
    c.settle()
    assert c.one("m").shards[0].node == "n2"


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_a_rollout_goes_one_at_a_time_and_never_below_what_is_wanted() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m", replicas=3)
    c.settle()
    before = {each.id for each in c.replicas("m")}
    c.model("m", cpu_profile(context=8192), replicas=3)
    seen = 0
    for _ in range(30):
        c.step()
        live = [each for each in c.replicas("m") if each.phase in (P.PLACED, P.STARTING, P.READY)]
        assert len(live) <= 4
        assert sum(each.phase is P.READY for each in live) >= 3
        seen += state(c, "m").rollout is Rollout.ROLLING
        c.answer()
    assert seen
    assert not before & {each.id for each in c.replicas("m")}
    assert len(c.replicas("m")) == 3
    assert state(c, "m").rollout is Rollout.NONE


def test_a_rollout_without_room_for_two_lets_the_old_one_go_first() -> None:
    c = cluster("n1", "n2", memory_gb=8.0)
    c.model("m", cpu_profile(8.0), replicas=2)
    c.settle()
    c.model("m", cpu_profile(8.0, context=8192), replicas=2)
    assert causes(c)["rolled"] == 1
    assert "memory" in state(c, "m").reason, "it waits for the room"
    c.answer()
    c.step()
    assert {phase: len(found) for phase, found in by_phase(c, "m").items()} == {P.READY: 1, P.PLACED: 1}
    c.settle()
    assert {order(c, each).launch.context for each in c.replicas("m")} == {8192}
    assert len(c.replicas("m")) == 2


def test_a_rollout_that_fits_nowhere_even_so_keeps_the_old_one() -> None:
    c = cluster("n1", memory_gb=8.0)
    c.model("m", cpu_profile(8.0))
    c.settle()
    old = c.one("m")
    c.model("m", cpu_profile(9.0))
    c.settle()
    assert c.one("m") == old
    assert "has 8 GB of memory, needs 9" in state(c, "m").reason


def test_a_failed_rollout_stops_keeps_the_old_ones_and_says_why() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m", replicas=2)
    c.settle()
    before = c.replicas("m")
    c.model("m", cpu_profile(args=("--bad",)), replicas=2)
    c.step()
    (new,) = (each for each in c.replicas("m") if each not in before)
    c.report(c.shard(new), ShardPhase.FAILED, reason="unknown argument --bad")
    c.settle()
    c.advance(4000.0)
    c.settle()
    assert c.replicas("m") == before
    assert state(c, "m").rollout is Rollout.STOPPED
    assert state(c, "m").reason == f"rollout stopped: {new.id} on {new.shards[0].node}: unknown argument --bad"
    c.model("m", cpu_profile(args=("--good",)), replicas=2)
    for _ in range(3):
        c.advance(4000.0)
        c.settle()
    assert state(c, "m").rollout is Rollout.NONE
    assert not {each.id for each in before} & {each.id for each in c.replicas("m")}


def test_going_back_to_the_old_spec_ends_a_stopped_rollout() -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    old = c.one("m")
    c.model("m", cpu_profile(args=("--bad",)))
    c.step()
    (new,) = (each for each in c.replicas("m") if each != old)
    c.report(c.shard(new), ShardPhase.FAILED)
    c.settle()
    assert state(c, "m").launch_failed is not None
    c.model("m")
    c.settle()
    assert c.replicas("m") == [old]
    assert (state(c, "m").rollout, state(c, "m").launch_failed) == (Rollout.NONE, None)


def test_an_old_replica_that_fails_during_a_rollout_does_not_stop_it() -> None:
    c = cluster("n1", "n2", "n3")
    c.model("m", replicas=2)
    c.settle()
    before = c.replicas("m")
    c.model("m", cpu_profile(context=8192), replicas=2)
    c.step()
    c.report(c.shard(before[0]), ShardPhase.FAILED)
    c.step()
    assert state(c, "m").rollout is Rollout.ROLLING


@pytest.mark.parametrize(
    "change",
    [{"start_s": 900.0}, {"drain_s": 5.0}, {"priority": 9}, {"node_selector": {"a": "b"}}],
)
def test_what_needs_no_restart_restarts_nothing(change: dict[str, Any]) -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    old = c.one("m")
    c.model("m", cpu_profile(**change))
    c.settle()
    assert c.one("m") == old
    assert order(c, old).start_s == change.get("start_s", 600.0)
    assert order(c, old).drain_s == change.get("drain_s", 60.0)


def test_another_wished_build_rolls_and_a_named_one_does_not() -> None:
    b1, b2 = (Build(engine="llama.cpp", version=version) for version in ("b1", "b2"))
    c = Cluster()
    c.node("n1", engines=EngineFacts(probed=True, builds=(b1,)))
    c.model("m")
    c.settle()
    assert c.one("m").build == "llama.cpp@b1"
    c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version="b2"))
    c.settle()
    assert c.one("m").build == "llama.cpp@b1", "nobody has it yet"
    assert state(c, "m").rollout is Rollout.ROLLING
    assert "has llama.cpp b1, needs b2" in state(c, "m").reason
    c.node("n1", engines=EngineFacts(probed=True, builds=(b1, b2)))
    c.settle()
    assert c.one("m").build == "llama.cpp@b2"
    c.node("n1", engines=EngineFacts(probed=True, builds=()))
    c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version="b3"))
    c.settle()
    assert state(c, "m").rollout is Rollout.ROLLING, "judged by its name where the node lists it no longer"
    c.node("n1", engines=EngineFacts(probed=True, builds=(msgspec.structs.replace(b2, named=True),)))
    c.settle()
    assert state(c, "m").rollout is Rollout.NONE


def test_a_replica_whose_build_is_not_known_is_not_outdated() -> None:
    c = Cluster()
    c.node("n1", engines=None)
    c.model("m")
    c.settle()
    old = c.one("m")
    c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version="b2"))
    c.settle()
    assert c.one("m") == old


# --- repairs --------------------------------------------------------------------------------------------------------


def test_a_secret_that_was_deleted_is_written_back() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    replica = c.one("m")
    c.meddle((Kind.SECRET, replica.id, None))
    assert causes(c) == {"repair": 1}
    assert c.index.secrets.record(replica.id) == EngineSecret(replica=replica.id, key=order(c, replica).engine_key)


def test_a_replica_whose_order_is_gone_and_that_runs_nowhere_is_rebuilt() -> None:
    c = cluster("n1")
    c.model("m")
    c.step()
    old = c.one("m")
    c.meddle((Kind.ASSIGNMENT, c.shard(old), None))
    c.step()
    failed = c.one("m")
    assert (failed.phase, failed.retire) == (P.FAILED, Retire.UNKNOWN)
    made = order(c, failed)
    assert (made.desired, made.launch.source, made.claim) == (Desired.STOPPED, "", old.shards[0].claim)
    assert (state(c, "m").attempt, state(c, "m").failed_nodes) == (1, {}), "its node is not to blame"
    c.settle()
    c.advance(10.0)
    c.settle()
    assert c.one("m").id != old.id
    assert c.one("m").phase is P.READY


def test_a_stop_order_that_was_deleted_is_given_again() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    c.remove_model("m")
    c.step()
    replica = c.one("m")
    name = c.shard(replica)
    c.meddle((Kind.ASSIGNMENT, name, None), (Kind.SECRET, replica.id, None))
    assert causes(c) == {}, "its node still says that it runs as ordered"
    c.meddle((Kind.SHARD, name, None))
    assert causes(c) == {"stop": 1}
    assert order(c, replica).engine_key == Secret("")
    c.settle()
    assert not c.replicas("m")


def test_an_order_to_run_for_a_replica_on_its_way_out_is_taken_back() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    running = order(c, c.one("m"))
    c.remove_model("m")
    c.step()
    c.meddle((Kind.ASSIGNMENT, c.shard(c.one("m")), running))
    assert causes(c) == {"stop": 1}
    assert order(c, c.one("m")).desired is Desired.STOPPED


# --- what can't be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.MODEL, Kind.MODEL_STATE])
def test_a_model_that_cannot_be_read_is_left_alone(kind: Kind) -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    before = c.replicas("m")
    c.model("m", cpu_profile(context=8192), replicas=2)
    c.spoil(kind, "m")
    assert causes(c) == {}
    c.new_leader()
    assert c.replicas("m") == before


@pytest.mark.parametrize("kind", [Kind.REPLICA, Kind.ASSIGNMENT, Kind.SHARD, Kind.SECRET])
def test_a_replica_that_cannot_be_read_counts_and_is_left_alone(kind: Kind) -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    replica = c.one("m")
    c.report(c.shard(replica), ShardPhase.FAILED)
    c.spoil(kind, replica.id if kind in (Kind.REPLICA, Kind.SECRET) else c.shard(replica))
    c.settle()
    assert c.replicas("m") == [replica]
    assert (state(c, "m").placed, state(c, "m").wanted) == (1, 1)
    c.remove_model("m")
    c.settle()
    assert c.replicas("m") == [replica]


def test_a_replica_that_was_never_readable_here_still_counts_for_its_model() -> None:
    c = cluster("n1", "n2")
    c.model("m")
    c.settle()
    replica = c.one("m")
    c.meddle((Kind.REPLICA, replica.id, None))
    c.spoil(Kind.REPLICA, replica.id)
    assert c.index.replicas.record(replica.id) is None
    c.settle()
    assert not [group for group in c.plan().groups if group.cause == "place"]
    assert state(c, "m").placed == 1


def test_inv6_one_that_cannot_be_read_is_not_known_to_serve_so_the_one_that_does_stays() -> None:
    c = cluster("n1", "n2")
    c.model("m", replicas=2)
    c.step()
    one, two = c.replicas("m")
    c.report(c.shard(one), ShardPhase.READY)
    c.report(c.shard(two), ShardPhase.STARTING)
    c.step()
    c.spoil(Kind.REPLICA, two.id)
    c.model("m", replicas=1)
    c.step()
    assert {each.phase for each in c.replicas("m")} == {P.READY, P.STARTING}
    c.meddle((Kind.REPLICA, two.id, two))
    c.settle()
    assert c.one("m").id == one.id


def test_inv6_one_whose_key_is_lost_does_not_serve_so_the_one_that_does_stays() -> None:
    c = cluster("n1", "n2")
    c.model("m", replicas=2)
    c.settle()
    one, two = c.replicas("m")
    c.meddle((Kind.SECRET, two.id, None), (Kind.ASSIGNMENT, c.shard(two), None))
    c.model("m", replicas=1)
    c.step()
    assert next(each for each in c.replicas("m") if each.id == one.id).phase is P.READY
    c.settle()
    assert c.one("m").id == one.id


def test_inv6_the_only_one_known_to_serve_stays_on_a_node_that_is_lost_or_drained_or_to_be_rolled() -> None:
    for trouble in ("lost", "drained", "outdated"):
        c = cluster("n1", "n2", "n3", "n4", memory_gb=4.0)
        c.model("m", cpu_profile(3.0), replicas=2)
        c.step()
        one, two = c.replicas("m")
        c.report(c.shard(one), ShardPhase.READY)
        c.report(c.shard(two), ShardPhase.STARTING)
        c.step()
        c.spoil(Kind.REPLICA, two.id)
        c.model("m", cpu_profile(3.0, context=2048 if trouble == "outdated" else 4096), replicas=1)
        node = one.shards[0].node
        if trouble == "lost":
            c.away(node)
            c.step()
            c.advance(400.0)
        elif trouble == "drained":
            c.spec(node, drain=True)
        c.step()
        assert next(each for each in c.replicas("m") if each.id == one.id).phase is P.READY, trouble
        assert c.plan().empty


def test_a_wish_that_cannot_be_read_rolls_nothing() -> None:
    c = cluster("n1")
    c.model("m")
    c.settle()
    old = c.one("m")
    c.spoil(Kind.ENGINE, "llama.cpp")
    c.settle()
    assert c.one("m") == old


# --- the pass itself ------------------------------------------------------------------------------------------------


def test_nothing_is_decided_before_the_store_is_known() -> None:
    c = Cluster(index=Index())
    meta = c.index.meta
    assert meta is not None
    c.node("n1")
    c.model("m")
    c.meddle((Kind.META, "", None))
    c.view = msgspec.structs.replace(c.view)
    plan = reconcile(c.index, Dirty(everything=True), now=c.now, view=c.view, ids=c.ids)
    assert plan.empty
    c.meddle((Kind.META, "", meta.record))
    c.spoil(Kind.META)
    assert reconcile(c.index, Dirty(everything=True), now=c.now, view=c.view, ids=c.ids).empty


def test_a_pass_is_cut_at_its_bound_and_what_is_left_stays_dirty() -> None:
    c = Cluster(settings=Settings(placements_max=3))
    c.node("n1", 64)
    for name in "abcde":
        c.model(name, replicas=2)
    plan = c.step()
    assert plan.counts()["place"] == 3
    assert plan.more
    assert plan.left == Dirty(short=dict.fromkeys("bcde", 1))
    for left in (2, 1, 0):
        assert c.step().more is (left > 0)
    assert sum(len(c.replicas(name)) for name in "abcde") == 10
    assert not c.step().groups


def test_a12_three_hundred_models_with_four_replicas_each_in_whole_replicas() -> None:
    c = Cluster()
    for i in range(25):
        c.node(f"n{i}", 128)
    for i in range(300):
        c.model(f"m{i}", cpu_profile(1.0), replicas=4)
    passes = 0
    while True:
        plan = c.step()  # every group is checked as it lands: whole replicas, or InvariantError
        passes += 1
        assert plan.counts().get("place", 0) <= 100
        assert all(len(group.writes) <= 3 for group in plan.groups)
        if not plan.more:
            break
    assert passes == 12
    assert all(len(c.replicas(f"m{i}")) == 4 for i in range(300))


def test_a_model_that_waits_for_room_is_placed_by_the_change_of_any_node() -> None:
    c = cluster("n1", memory_gb=1.0)
    c.model("m", cpu_profile(8.0))
    c.step()
    assert not c.step().groups
    c.node("n2", 16)
    assert causes(c)["place"] == 1


def test_why_something_fits_nowhere_is_not_rewritten_for_numbers() -> None:
    c = cluster("n1", memory_gb=4.0)
    c.model("m", cpu_profile(8.0))
    c.step()
    first = state(c, "m")
    c.node("n1", 5)
    c.node("n2", 5)
    assert causes(c) == {"liveness": 2}
    assert state(c, "m") == first
    c.spec("n1", cordon=True)
    assert causes(c) == {"state": 1}
    assert state(c, "m").unplaced != first.unplaced


def test_measuring_slows_down_with_the_number_of_nodes() -> None:
    c = cluster("n1")

    def every_s() -> float:
        assert c.index.fleet is not None
        assert c.index.fleet.record is not None
        return c.index.fleet.record.measure_every_s

    assert every_s() == MEASURE_MIN_S
    for count, expected_s in [(2400, 13.0), (20_000, MEASURE_MAX_S)]:
        names = [f"x{i}" for i in range(count)]
        states = [NodeState(name=name, liveness=Liveness.UNREACHABLE, since_at=c.now.wall_s) for name in names]
        c.meddle(*((Kind.NODE_STATE, each.name, each) for each in states))
        writes = [write for group in c.plan(Dirty()).groups for write in group.writes]
        fleet = next(write.record for write in writes if isinstance(write, Put) and write.ref.kind is Kind.FLEET)
        assert isinstance(fleet, Fleet)
        assert fleet.measure_every_s == expected_s


def test_due_gives_what_time_made_due_and_takes_it_out() -> None:
    c = Cluster()
    wakes = {(Wake.MODEL, "m"): 50.0, (Wake.NODE, "n"): 100.0, (Wake.MODEL, "later"): 101.0}
    found = due(wakes, now=c.now)
    assert (found.models, found.nodes, found.everything) == ({"m"}, {"n"}, False)
    assert wakes == {(Wake.MODEL, "later"): 101.0}
    assert due({(Wake.FLEET, ""): 1.0}, now=c.now) == Dirty(fleet=True)


def test_ids_are_fresh_or_it_is_a_bug() -> None:
    class Stuck:
        def suffix(self) -> str:
            return "aaaaa"

        def key(self) -> Secret:
            return Secret("k")

        def token(self) -> str:
            return "t"

    c = cluster("n1")
    assert fresh_id(c.index, "m", Stuck()) == "m-aaaaa"
    c.index.reports_of["m-aaaaa"].add("n1/m-aaaaa.0")
    with pytest.raises(InvariantError, match="fresh"):
        fresh_id(c.index, "m", Stuck())


def test_a_draft_takes_everything_back_even_after_an_error() -> None:
    c = cluster("n1")
    rows = dict(c.index.rows())
    spec = model_spec("m")

    def break_off() -> None:
        with Draft(c.index) as draft:
            draft.emit("x", Put(ref=Ref(Kind.MODEL, "m"), record=spec))
            draft.emit("nothing")
            assert c.index.models.record("m") == spec
            with draft.imagine(Put(ref=Ref(Kind.MODEL, "m2"), record=spec)):
                assert "m2" in c.index.models
            assert "m2" not in c.index.models
            assert len(draft.groups) == 1
            raise KeyError("m")

    with pytest.raises(KeyError):
        break_off()
    assert dict(c.index.rows()) == rows
    assert not c.index.dirty


def test_groups_that_write_one_place_become_one() -> None:
    c = cluster("n1")
    a, b, other = (Put(ref=Ref(Kind.MODEL, name), record=model_spec(name)) for name in "abc")
    with Draft(c.index) as draft:
        draft.emit("one", a, b)
        draft.emit("two", other)
        draft.emit("three", msgspec.structs.replace(b, record=model_spec("b", replicas=5)))
        assert [group.cause for group in draft.groups] == ["two", "three"]
        assert [write.ref.name for write in draft.groups[1].writes] == ["a", "b"]
        draft.put("four", Ref(Kind.MODEL, "c"), model_spec("c", replicas=2), first=True)
        assert [group.cause for group in draft.groups] == ["four", "three"]
