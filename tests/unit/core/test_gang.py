"""Replicas that span nodes: made whole, started in order, given up whole, and ended whole."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.catalog import ENGINES, NodeSpec, Profile
from llmgw.core.explain import Refusal
from llmgw.core.gang import HEAD_WAITS, WORD_S, arrange
from llmgw.core.gang_ports import GANG_PORTS, PORTS
from llmgw.core.ids import shard_name
from llmgw.core.inventory import Inventory, node_inventory
from llmgw.core.node import Build, EngineFacts, Fabric, GpuHealth, Liveness
from llmgw.core.placement import Placement, explain, place
from llmgw.core.plan import Put, Wake
from llmgw.core.record import StoreMeta
from llmgw.core.refusal_words import render
from llmgw.core.replica import (
    Assignment,
    Desired,
    ModelState,
    Replica,
    ReplicaPhase,
    Retire,
    Rollout,
    ShardPhase,
    ShardReport,
)
from llmgw.core.routing import route_table
from llmgw.core.snapshot import Kind
from llmgw.core.units import format_bytes
from llmgw.errors import InvariantError
from llmgw.testing.cluster import Cluster, cpu_profile, gpu, model_spec

P, S = ReplicaPhase, ShardPhase
IB = (Fabric(name="ib0", hcas=("mlx5_0",)),)
ALL = EngineFacts(probed=True, builds=tuple(Build(engine=each, version="1", named=True) for each in ENGINES))


def node(c: Cluster, name: str, *, gang_ports: tuple[int, int] | None = None, fabrics: tuple[Fabric, ...] = IB) -> None:
    c.node(name, 64, engines=ALL, gpus=(gpu(0), gpu(1)), fabrics=fabrics, gang_ports=gang_ports)


def fleet(count: int) -> Cluster:
    """So many nodes with two GPUs each, all on one fabric."""
    c = Cluster()
    for i in range(1, count + 1):
        node(c, f"n{i}")
    c.settle()
    return c


def over(nodes: int = 2, **more: object) -> Profile:
    """A profile that takes both GPUs of each of its nodes."""
    shape = {"nodes": nodes, "gpus_per_node": 2, "tensor_parallel": 2, "pipeline_parallel": nodes, "engine": "vllm"}
    return cpu_profile(8.0, name="gang", **shape | more)


def ready_gang(c: Cluster, nodes: int = 2, **more: object) -> Replica:
    c.model("m", over(nodes, **more))
    c.settle()
    assert c.one("m").phase is P.READY
    return c.one("m")


def where(replica: Replica, rank: int) -> str:
    return next(shard.node for shard in replica.shards if shard.rank == rank)


def name(replica: Replica, rank: int) -> str:
    return shard_name(where(replica, rank), replica.id, rank)


def order(c: Cluster, replica: Replica, rank: int) -> Assignment:
    found = c.index.assignments.record(name(replica, rank))
    assert found is not None
    return found


def orders(c: Cluster, replica: Replica) -> list[Assignment]:
    return [order(c, replica, shard.rank) for shard in replica.shards]


def report(c: Cluster, replica: Replica, rank: int) -> ShardReport:
    found = c.index.reports.record(name(replica, rank))
    assert found is not None
    return found


def state(c: Cluster) -> ModelState:
    found = c.index.model_states.record("m")
    assert found is not None
    return found


def by_id(c: Cluster, replica: Replica) -> Replica:
    found = c.index.replicas.record(replica.id)
    assert found is not None
    return found


# --- made whole -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "first"), [("llama.cpp", Desired.HELD), ("vllm", None), ("sglang", None)])
def test_a_gang_appears_with_all_its_orders_in_one_group(engine: str, first: Desired | None) -> None:
    c = fleet(3)
    c.model("m", over(3, engine=engine))
    plan = c.step()
    (group,) = [group for group in plan.groups if group.cause == "place"]
    assert [write.ref.kind for write in group.writes] == [Kind.REPLICA, Kind.SECRET, *3 * [Kind.ASSIGNMENT]]
    replica = c.one("m")
    made = orders(c, replica)
    assert [each.desired for each in made] == [first or Desired.RUNNING, Desired.RUNNING, Desired.RUNNING]
    assert {each.launch.build for each in made} == {f"{engine}@1"}
    gang = made[0].gang
    assert gang is not None
    assert all(each.gang == gang for each in made), "all members are told the same"
    assert gang.fabric == replica.fabric == "ib0"
    assert [(peer.rank, peer.node, peer.address) for peer in gang.peers] == [
        (shard.rank, shard.node, "127.0.0.1") for shard in replica.shards
    ]
    assert gang.ports == tuple(range(GANG_PORTS[0], GANG_PORTS[0] + PORTS))
    assert [(len(each.claim.gpus), each.claim.hcas) for each in made] == 3 * [(2, ("mlx5_0",))]


def test_every_engine_says_whether_its_head_waits() -> None:
    assert set(HEAD_WAITS) == set(ENGINES)


def test_a_replica_on_one_node_is_no_gang() -> None:
    c = fleet(1)
    c.model("m", over(1, engine="llama.cpp"))
    c.step()
    assert order(c, c.one("m"), 0).gang is None
    assert order(c, c.one("m"), 0).desired is Desired.RUNNING


def test_a_replica_says_since_when_it_was_ready_for_the_first_time() -> None:
    c = fleet(2)
    c.model("m", over())
    c.step()
    replica = c.one("m")
    assert replica.ready_at is None
    c.answer()
    c.step()
    first_at = c.now.wall_s
    assert c.one("m").ready_at == first_at
    c.advance(60.0)
    for phase in (S.STARTING, S.READY):
        c.report(name(replica, 0), phase)
        c.step()
    assert c.one("m").ready_at == first_at


# --- ports ----------------------------------------------------------------------------------------------------------


def small() -> Profile:
    """Two nodes, one GPU of each: so that two gangs can share their nodes."""
    return over(gpus_per_node=1, tensor_parallel=1)


def ports(c: Cluster, model: str) -> tuple[int, ...]:
    gang = order(c, c.one(model), 0).gang
    assert gang is not None
    return gang.ports


def test_gangs_that_share_a_node_share_no_port_and_others_may() -> None:
    c = fleet(4)
    c.model("a", small())
    c.settle()
    c.spec("n3", cordon=True)
    c.spec("n4", cordon=True)
    c.model("b", small())
    c.settle()
    for each, cordon in (("n1", True), ("n2", True), ("n3", False), ("n4", False)):
        c.spec(each, cordon=cordon)
    c.model("elsewhere", over())
    c.settle()
    low = GANG_PORTS[0]
    assert {each.node for each in c.one("b").shards} == {each.node for each in c.one("a").shards} == {"n1", "n2"}
    assert ports(c, "a")[0] == ports(c, "elsewhere")[0] == low
    assert ports(c, "b") == tuple(range(low + PORTS, low + 2 * PORTS))
    c.remove_model("a")
    c.settle()
    for each in ("n1", "n2"):
        c.spec(each)
    c.model("c", small(), source="c")
    c.spec("n3", cordon=True)
    c.spec("n4", cordon=True)
    c.settle()
    assert ports(c, "c")[0] == low, "the lowest that is free again"


def test_a_block_lies_in_what_all_its_nodes_have() -> None:
    c = Cluster()
    node(c, "n1", gang_ports=(30000, 30999))
    node(c, "n2", gang_ports=(30990, 31100))
    c.settle()
    c.model("m", over())
    c.settle()
    assert not c.replicas("m")
    assert "n1 (gang): its gang_ports 30000-30999 have no 16 in a row that are free on another" in state(c).reason
    found = explain(Inventory(c.index), model_spec("m", over()))
    said = [render(each) for each in found if isinstance(each, Refusal)]
    assert said[1] == "its gang_ports 30990-31100 have no 16 in a row that are free on another node of ib0 too"
    node(c, "n2", gang_ports=(30984, 31100))
    c.settle()
    assert ports(c, "m") == tuple(range(30984, 31000))


def test_without_a_free_block_a_gang_is_not_placed_and_says_so_until_there_is_one() -> None:
    c = Cluster()
    for each in ("n1", "n2"):
        node(c, each, gang_ports=(30000, 30020))
    c.settle()
    c.model("first", small())
    c.settle()
    c.model("m", small())
    c.settle()
    assert not c.replicas("m")
    assert state(c).unplaced is not None
    assert state(c).unplaced.refused == {"gang_ports": 2}  # type: ignore[union-attr]  # seen above
    assert "n1 (gang): its gang_ports 30000-30020 have no 16 in a row that are free" in state(c).reason
    assert not c.step().groups, "and it stays at that"
    c.remove_model("first")
    c.settle()
    assert c.one("m").phase is P.READY


def test_the_ports_of_a_gang_are_taken_until_its_last_member_is_gone() -> None:
    """A node that can't answer may still have a worker that calls the head's old address."""
    c = fleet(4)
    old = ready_gang(c)
    dead = where(old, 1)
    c.away(dead)
    c.remove_model("m")
    c.settle()
    assert [shard.released for shard in by_id(c, old).shards] == [True, False]
    for each in ("n1", "n2", "n3", "n4"):
        c.spec(each, cordon=each not in (where(old, 0), "n3"))
    c.model("next", over())
    c.settle()
    assert where(old, 0) in {shard.node for shard in c.one("next").shards}
    assert ports(c, "next")[0] == GANG_PORTS[0] + PORTS
    c.back(dead)
    c.settle()
    assert old.id not in c.index.replicas


def test_a_gang_that_runs_unassigned_keeps_its_ports() -> None:
    c = fleet(2)
    c.model("m", small())
    c.settle()
    replica = c.one("m")
    saved = orders(c, replica)
    c.meddle(*((Kind.ASSIGNMENT, name(replica, each.rank), None) for each in saved),
             (Kind.REPLICA, replica.id, None), (Kind.SECRET, replica.id, None))  # fmt: skip
    for each in saved:
        c.report(name(replica, each.rank), S.READY, order=each)
    placement = place(Inventory(c.index), model_spec("x", small()))
    assert isinstance(placement, Placement)
    gang = arrange(c.index, placement)
    assert gang is not None
    assert gang.ports[0] == GANG_PORTS[0] + PORTS


def test_nodes_that_cannot_meet_are_no_place_for_a_gang() -> None:
    c = fleet(2)
    placement = place(Inventory(c.index), model_spec("m", over()))
    assert isinstance(placement, Placement)
    c.away("n2")
    with pytest.raises(InvariantError, match="n2 was to take part in a gang, and has no address"):
        arrange(c.index, placement)
    node(c, "n2", gang_ports=(30000, 30999))
    with pytest.raises(InvariantError, match="n1, n2 have no ports for a gang in common"):
        arrange(c.index, placement)


# --- started in order -----------------------------------------------------------------------------------------------


def held_gang(c: Cluster, nodes: int = 3) -> Replica:
    """A llama.cpp gang just placed; its head is held and says so."""
    c.model("m", over(nodes, engine="llama.cpp"))
    c.step()
    replica = c.one("m")
    c.report(name(replica, 0), S.HELD)
    return replica


def test_the_hold_ends_in_one_write_when_every_worker_listens() -> None:
    c = fleet(3)
    replica = held_gang(c)
    c.step()
    assert c.one("m").phase is P.PLACED
    c.report(name(replica, 1), S.READY)
    c.report(name(replica, 2), S.STARTING)
    c.step()
    assert order(c, replica, 0).desired is Desired.HELD
    assert c.one("m").phase is P.STARTING
    c.report(name(replica, 2), S.READY)
    plan = c.step()
    (group,) = [group for group in plan.groups if group.cause == "start"]
    before = order(c, replica, 1)
    assert group.writes == (Put(ref=group.writes[0].ref, record=order(c, replica, 0)),)
    assert order(c, replica, 0) == msgspec.structs.replace(before, node=where(replica, 0), rank=0,
                                                           claim=order(c, replica, 0).claim)  # fmt: skip
    assert c.one("m").phase is P.STARTING
    c.report(name(replica, 0), S.READY)
    c.step()
    assert c.one("m").phase is P.READY


@pytest.mark.parametrize("why", ["away", "stale", "restored"])
def test_the_hold_does_not_end_on_hearsay(why: str) -> None:
    c = fleet(4)
    replica = held_gang(c, nodes=2)
    row = c.index.assignments[name(replica, 1)]
    if why == "away":
        c.report(name(replica, 1), S.READY)
        c.away(where(replica, 1))
    elif why == "stale":
        c.report(name(replica, 1), S.READY)
        old = msgspec.structs.replace(report(c, replica, 1), assignment_rev=row.mod_revision - 1)
        c.meddle((Kind.SHARD, name(replica, 1), old))
    else:
        session = c.index.sessions.record(where(replica, 1))
        assert session is not None
        c.report(name(replica, 1), S.READY)
        c.meddle((Kind.SESSION, where(replica, 1), msgspec.structs.replace(session, store="store-0")))
    c.step()
    assert order(c, replica, 0).desired is Desired.HELD
    if why == "away":
        c.back(where(replica, 1))
        c.step()
        assert order(c, replica, 0).desired is Desired.RUNNING


def test_a_head_that_runs_in_spite_of_its_order_is_held_no_longer() -> None:
    """As after a restore to a time at which it was still held."""
    c = fleet(2)
    replica = held_gang(c, nodes=2)
    c.meddle((Kind.SHARD, name(replica, 0), msgspec.structs.replace(report(c, replica, 0), phase=S.READY)))
    c.step()
    assert order(c, replica, 0).desired is Desired.RUNNING
    assert c.one("m").phase is P.READY


def test_only_the_head_makes_a_gang_ready() -> None:
    c = fleet(2)
    c.model("m", over())
    c.step()
    replica = c.one("m")
    c.report(name(replica, 0), S.STARTING)
    c.report(name(replica, 1), S.READY)
    c.step()
    assert c.one("m").phase is P.STARTING
    assert "m" not in route_table(c.index).routes
    c.report(name(replica, 0), S.READY)
    c.step()
    assert c.one("m").phase is P.READY
    assert [each.replica for each in route_table(c.index).routes["m"]] == [replica.id]


# --- given up whole -------------------------------------------------------------------------------------------------


def claims(c: Cluster) -> int:
    return sum(len(node_inventory(c.index, each).holdings) for each in c.index.nodes())


def test_c11_a_gang_whose_worker_never_joins_is_stopped_whole_and_all_its_claims_end() -> None:
    c = fleet(4)
    c.model("m", over(start_s=60.0))
    c.step()
    replica = c.one("m")
    c.report(name(replica, 0), S.STARTING)
    c.report(name(replica, 1), S.STARTING, reason="waits for the head")
    c.step()
    assert c.wakes[Wake.MODEL, "m"] == c.now.mono_s + 60.0 + WORD_S
    c.advance(60.0 + WORD_S - 0.1)
    assert c.step().empty
    c.advance(0.1)
    plan = c.step()
    assert [group.cause for group in plan.groups] == ["state", "fail"]
    failed = by_id(c, replica)
    assert (failed.phase, failed.retire) == (P.FAILED, Retire.FAILED)
    assert failed.reason == f"did not get ready in time: rank 1 on {where(replica, 1)} (starting: waits for the head)"
    assert {each.desired for each in orders(c, replica)} == {Desired.STOPPED}, "never half a gang"
    assert set(state(c).failed_nodes) == {where(replica, 1)}
    c.settle()
    assert not c.replicas("m")
    assert claims(c) == 0
    c.advance(10.0)
    c.step()
    assert where(replica, 1) not in {shard.node for shard in c.one("m").shards}, "elsewhere, since there is room"


def test_c11_nodes_on_different_fabrics_make_no_gang_and_say_so() -> None:
    c = Cluster()
    node(c, "n1")
    node(c, "n2", fabrics=())
    c.settle()
    c.model("m", over())
    c.settle()
    assert not c.replicas("m")
    assert "fabric" in state(c).reason


def test_the_head_alone_is_named_when_no_worker_is_late() -> None:
    c = fleet(4)
    c.model("m", over(start_s=60.0))
    c.step()
    replica = c.one("m")
    c.report(name(replica, 0), S.STARTING)
    c.report(name(replica, 1), S.READY)
    c.step()
    c.advance(60.0 + WORD_S)
    c.step()
    head = where(replica, 0)
    assert state(c).failure == f"{replica.id} on {head}: did not get ready in time: rank 0 on {head} (starting)"
    assert set(state(c).failed_nodes) == {head}


def test_a_member_that_cannot_answer_counts_against_a_gang_that_never_was_ready() -> None:
    c = fleet(5)
    c.model("m", over(start_s=60.0))
    c.step()
    replica = c.one("m")
    c.report(name(replica, 0), S.STARTING)
    c.report(name(replica, 1), S.READY)
    c.away(where(replica, 1))
    c.step()
    c.advance(60.0 + WORD_S)
    c.step()
    failed = by_id(c, replica)
    assert failed.phase is P.FAILED
    assert failed.reason.endswith(f"rank 1 on {where(replica, 1)} (its node does not answer)")
    c.settle()
    assert [shard.released for shard in by_id(c, replica).shards] == [True, False]


def test_a_worker_of_which_nothing_is_heard_is_named() -> None:
    c = fleet(2)
    c.model("m", over(start_s=60.0))
    c.step()
    replica = c.one("m")
    c.report(name(replica, 0), S.STARTING)
    c.step()
    c.advance(60.0 + WORD_S)
    c.step()
    assert by_id(c, replica).reason.endswith(f"rank 1 on {where(replica, 1)} (its node says nothing of it)")


def test_the_time_counts_anew_at_every_visible_step() -> None:
    c = fleet(2)
    c.model("m", over(engine="llama.cpp", start_s=60.0))
    c.step()
    replica = c.one("m")
    for rank, phase in ((0, S.HELD), (1, S.STARTING), (1, S.READY), (0, S.STARTING)):
        c.advance(70.0)
        c.report(name(replica, rank), phase)
        c.step()
        assert by_id(c, replica).phase in (P.PLACED, P.STARTING), (rank, phase)
    assert order(c, replica, 0).desired is Desired.RUNNING
    c.advance(70.0)
    c.step()
    assert by_id(c, replica).phase is P.STARTING
    c.advance(5.0)
    c.step()
    assert by_id(c, replica).phase is P.FAILED


def test_b13_a_gang_whose_node_sees_progress_gets_the_time_its_node_gives_it() -> None:
    c = fleet(2)
    c.model("m", over(start_s=60.0))
    c.step()
    replica = c.one("m")
    c.report(name(replica, 1), S.READY)
    c.report(name(replica, 0), S.STARTING)
    for extended in range(1, 6):
        c.write(Kind.SHARD, name(replica, 0), msgspec.structs.replace(report(c, replica, 0), extended=extended))
        c.step()
        c.advance(2 * 60.0)  # published when a budget begins, and granted from its end
        c.step()
        assert c.one("m").phase is P.STARTING, extended
    c.advance(WORD_S)
    c.step()
    assert by_id(c, replica).phase is P.FAILED


@pytest.mark.parametrize("step_wall_s", [7200.0, -7200.0])
def test_no_wall_clock_ends_a_load_or_keeps_one_alive(step_wall_s: float) -> None:
    c = fleet(2)
    c.model("m", over(start_s=60.0))
    c.step()
    c.report(name(c.one("m"), 0), S.STARTING)
    c.step()
    c.advance(30.0, step_wall_s=step_wall_s)
    c.index.dirty.everything = True
    c.step()
    assert c.one("m").phase is P.STARTING
    c.advance(30.0 + WORD_S)
    c.step()
    assert c.one("m").phase is P.FAILED


def test_a_new_leader_counts_anew() -> None:
    c = fleet(2)
    c.model("m", over(start_s=60.0))
    c.step()
    c.report(name(c.one("m"), 0), S.STARTING)
    c.step()
    c.advance(70.0)
    c.new_leader()
    c.step()
    c.advance(60.0 + WORD_S - 1)
    c.step()
    assert c.one("m").phase is P.STARTING
    c.advance(1.0)
    c.step()
    assert c.one("m").phase is P.FAILED


def test_a_gang_that_had_to_wait_for_a_restored_store_has_its_time_afterwards() -> None:
    c = fleet(3)
    replica = held_gang(c, nodes=2)
    c.report(name(replica, 1), S.READY)
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")))
    for each in ("n1", "n2"):
        c.meddle((Kind.SESSION, each, c.session(each)))
    c.step()
    c.advance(4000.0)
    c.step()
    assert by_id(c, replica).phase is P.STARTING
    assert order(c, replica, 0).desired is Desired.HELD, "nothing is started before every node has reported"
    c.meddle((Kind.SESSION, "n3", c.session("n3")))
    c.step()
    c.step()
    assert by_id(c, replica).phase is P.STARTING
    assert order(c, replica, 0).desired is Desired.RUNNING
    c.settle()
    assert by_id(c, replica).phase is P.READY


def test_inv6_what_was_ready_once_is_never_given_up_for_time() -> None:
    c = fleet(4)
    replica = ready_gang(c, start_s=60.0)
    c.report(name(replica, 0), S.STARTING)  # an agent that lost its state, and then its session
    c.step()
    assert c.one("m").phase is P.STARTING
    c.away(where(replica, 0))
    for _ in range(4):
        c.advance(70.0)
        c.step()
        assert c.one("m").phase is P.STARTING


def test_inv6_an_unreachable_member_changes_nothing_of_what_serves() -> None:
    c = fleet(4)
    replica = ready_gang(c, start_s=60.0)
    c.away(where(replica, 1))
    assert c.step().counts() == {"liveness": 1}
    c.advance(299.0)
    assert c.step().empty
    assert c.one("m").phase is P.READY
    assert [each.replica for each in route_table(c.index).routes["m"]] == [replica.id]
    c.back(where(replica, 1))
    c.settle()
    assert c.replicas("m") == [replica], "it keeps its shard"
    states = [c.index.node_states.record(each) for each in ("n1", "n2", "n3", "n4")]
    assert {each.liveness for each in states if each is not None} == {Liveness.READY}


# --- failed whole ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_failed_shard_fails_the_gang_and_its_node_is_remembered(rank: int) -> None:
    c = fleet(6)
    replica = ready_gang(c, nodes=3)
    c.report(name(replica, rank), S.FAILED, reason="exit 1")
    plan = c.step()
    (group,) = [group for group in plan.groups if group.cause == "fail"]
    assert len(group.writes) == 4, "the record and three orders, at once"
    assert {each.desired for each in orders(c, replica)} == {Desired.STOPPED}
    assert {each.drain_s for each in orders(c, replica)} == {0.0}, "what it was answering can't be finished"
    assert set(state(c).failed_nodes) == {where(replica, rank)}
    assert state(c).attempt == 1
    assert state(c).failure == f"{replica.id} on {where(replica, rank)}: exit 1"
    c.settle()
    assert not c.replicas("m")
    assert claims(c) == 0
    c.advance(10.0)
    c.settle()
    assert c.one("m").phase is P.READY
    assert where(replica, rank) not in {shard.node for shard in c.one("m").shards}


def test_a_gang_with_a_lost_gpu_is_stopped_whole_at_once_although_its_engines_run() -> None:
    c = fleet(4)
    replica = ready_gang(c)
    bad = where(replica, 1)
    c.node(bad, 64, engines=ALL, gpus=(gpu(0), gpu(1, health=GpuHealth.LOST)), fabrics=IB)
    assert c.step().counts()["fail"] == 1
    assert {each.desired for each in orders(c, replica)} == {Desired.STOPPED}
    assert set(state(c).failed_nodes) == {bad}
    c.settle()
    assert not c.replicas("m")


def test_of_several_failed_shards_the_first_is_to_blame_and_of_equals_the_worker() -> None:
    c = fleet(3)
    replica = ready_gang(c, nodes=3)
    c.advance(5.0)
    c.report(name(replica, 0), S.FAILED, reason="lost its worker")
    c.report(name(replica, 1), S.FAILED, reason="lost its head")
    early = msgspec.structs.replace(report(c, replica, 2), phase=S.FAILED, phase_at=c.now.wall_s - 3, reason="Xid 79")
    c.meddle((Kind.SHARD, name(replica, 2), early))
    c.step()
    assert state(c).failure == f"{replica.id} on {where(replica, 2)}: Xid 79"
    c.settle()
    c.advance(10.0)
    c.settle()
    replica = c.one("m")
    for rank in (0, 1):
        c.report(name(replica, rank), S.FAILED, reason=f"rank {rank}")
    c.step()
    assert state(c).failure.endswith(": rank 1")


def test_a_shard_stopped_in_a_lost_history_fails_the_gang_and_blames_no_node() -> None:
    c = fleet(4)
    replica = ready_gang(c)
    c.meddle((Kind.SHARD, name(replica, 1), msgspec.structs.replace(report(c, replica, 1), phase=S.STOPPED)))
    c.step()
    failed = by_id(c, replica)
    assert (failed.phase, failed.retire) == (P.FAILED, Retire.UNKNOWN)
    assert {each.desired for each in orders(c, replica)} == {Desired.STOPPED}
    assert state(c).failed_nodes == {}


def test_an_order_that_is_gone_fails_the_gang_once_its_node_can_tell_that_nothing_runs() -> None:
    c = fleet(4)
    replica = ready_gang(c)
    away = where(replica, 1)
    c.away(away)
    c.meddle((Kind.ASSIGNMENT, name(replica, 1), None), (Kind.SHARD, name(replica, 1), None))
    c.step()
    assert by_id(c, replica).phase is P.READY
    c.back(away)
    c.step()
    failed = by_id(c, replica)
    assert (failed.phase, failed.retire) == (P.FAILED, Retire.UNKNOWN)
    assert {each.desired for each in orders(c, replica)} == {Desired.STOPPED}


def test_a_claim_on_a_node_that_cannot_answer_stays_and_holds_nobody_else() -> None:
    c = fleet(4)
    old = ready_gang(c)
    dead = where(old, 1)
    c.away(dead)
    c.report(name(old, 0), S.FAILED, reason="its worker is gone")
    c.settle()
    assert [shard.released for shard in by_id(c, old).shards] == [True, False]
    assert [each.replica for each in node_inventory(c.index, dead).holdings] == [old.id]
    assert node_inventory(c.index, where(old, 0)).holdings == ()
    c.advance(10.0)
    c.settle()
    (new,) = [each for each in c.replicas("m") if each.id != old.id]
    assert new.phase is P.READY
    assert dead not in {shard.node for shard in new.shards}
    c.back(dead)
    c.step()
    assert order(c, old, 1).desired is Desired.STOPPED
    assert by_id(c, old).phase is P.FAILED, "back, and not confirmed"
    c.settle()
    assert c.replicas("m") == [new]
    assert node_inventory(c.index, dead).holdings == ()


# --- ended in order -------------------------------------------------------------------------------------------------


def test_the_workers_of_a_gang_stop_when_its_head_has_finished() -> None:
    c = fleet(3)
    replica = ready_gang(c, nodes=3, drain_s=33.0)
    c.remove_model("m")
    plan = c.step()
    (group,) = [group for group in plan.groups if group.cause == "model_removed"]
    assert len(group.writes) == 2
    assert [each.desired for each in orders(c, replica)] == [Desired.STOPPED, Desired.RUNNING, Desired.RUNNING]
    assert order(c, replica, 0).drain_s == 33.0
    c.report(name(replica, 0), S.DRAINING)
    assert c.step().empty
    assert by_id(c, replica).phase is P.DRAINING
    c.report(name(replica, 0), S.STOPPING)
    assert c.step().counts() == {"stop": 1}
    assert {each.desired for each in orders(c, replica)} == {Desired.STOPPED}
    assert [each.drain_s for each in orders(c, replica)] == [33.0, 0.0, 0.0]
    assert by_id(c, replica).phase is P.DRAINING
    for rank in (1, 2):
        c.report(name(replica, rank), S.STOPPING)
    assert c.step().counts() == {"phase": 1}
    assert by_id(c, replica).phase is P.STOPPING
    c.settle()
    assert not c.index.assignments
    assert not c.index.replicas


@pytest.mark.parametrize("why", ["head away", "head gone", "worker failed", "head loads"])
def test_nobody_waits_for_a_head_that_finishes_nothing(why: str) -> None:
    c = fleet(4)
    replica = ready_gang(c)
    if why == "head loads":
        c.report(name(replica, 0), S.STARTING)
    c.remove_model("m")
    if why == "head away":
        c.away(where(replica, 0))
    c.step()
    if why == "head gone":
        c.report(name(replica, 0), S.STOPPED)
        assert c.step().counts() == {"release": 1, "stop": 1}
    elif why == "worker failed":
        assert order(c, replica, 1).desired is Desired.RUNNING
        c.report(name(replica, 1), S.FAILED)
        c.step()
    assert order(c, replica, 1).desired is Desired.STOPPED
    c.settle()
    assert [each.node for each in c.index.assignments.records()] == ([where(replica, 0)] if why == "head away" else [])


def test_a_stop_of_a_worker_that_was_deleted_is_given_again() -> None:
    c = fleet(2)
    replica = ready_gang(c)
    c.remove_model("m")
    c.step()
    c.report(name(replica, 0), S.STOPPING)
    c.step()
    c.meddle((Kind.ASSIGNMENT, name(replica, 1), None), (Kind.SHARD, name(replica, 1), None))
    assert c.step().counts() == {"stop": 1}
    assert (order(c, replica, 1).desired, order(c, replica, 1).claim) == (Desired.STOPPED, replica.shards[1].claim)


# --- as one: scaling, rollouts, moves -------------------------------------------------------------------------------


def test_gangs_are_scaled_whole() -> None:
    c = fleet(4)
    c.model("m", over(), replicas=2)
    c.settle()
    old, young = c.replicas("m")
    assert {each.phase for each in (old, young)} == {P.READY}
    c.model("m", over(), replicas=1)
    assert c.step().counts()["scale_down"] == 1
    c.settle()
    assert len(c.replicas("m")) == 1
    assert claims(c) == 2


def test_a_rollout_of_a_gang_surges_where_there_is_room() -> None:
    c = fleet(4)
    old = ready_gang(c)
    c.model("m", over(context=8192))
    for _ in range(20):
        c.step()
        assert any(each.phase is P.READY for each in c.replicas("m")), "never without one that serves"
        c.answer()
    c.settle()
    new = c.one("m")
    assert new.id != old.id
    assert order(c, new, 1).launch.context == 8192
    assert not {shard.node for shard in new.shards} & {shard.node for shard in old.shards}
    assert state(c).rollout is Rollout.NONE


def test_a_rollout_of_a_gang_without_room_lets_the_whole_old_one_go_first() -> None:
    c = fleet(3)
    old = ready_gang(c)
    c.model("m", over(context=8192))
    assert c.step().counts()["rolled"] == 1
    assert by_id(c, old).retire is Retire.ROLLED
    assert "gang" in state(c).reason, "it waits for the room"
    c.settle()
    new = c.one("m")
    assert new.id != old.id
    assert (new.phase, order(c, new, 0).launch.context) == (P.READY, 8192)


def test_a_gang_that_never_comes_together_stops_its_rollout_and_the_old_one_stays() -> None:
    c = fleet(4)
    old = ready_gang(c, start_s=60.0)
    c.model("m", over(start_s=60.0, args=("--bad",)))
    c.step()
    (new,) = [each for each in c.replicas("m") if each.id != old.id]
    c.report(name(new, 0), S.STARTING)
    c.step()
    c.advance(60.0 + WORD_S)
    c.step()
    c.settle()
    c.advance(4000.0)
    c.settle()
    assert c.replicas("m") == [old]
    assert state(c).rollout is Rollout.STOPPED
    assert "did not get ready in time" in state(c).reason


def lose_one(c: Cluster, replica: Replica, rank: int) -> str:
    """The node of a rank is gone for so long that it is lost."""
    away = where(replica, rank)
    c.away(away)
    c.step()
    c.advance(301.0)
    c.step()
    found = c.index.node_states.record(away)
    assert found is not None
    assert found.liveness is Liveness.LOST
    return away


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gang_with_one_lost_node_is_replaced_before_it_leaves_routing(rank: int) -> None:
    c = fleet(5)
    old = ready_gang(c)
    away = lose_one(c, old, rank)
    (new,) = [each for each in c.replicas("m") if each.id != old.id]
    assert new.replaces == old.id
    assert by_id(c, old).phase is P.READY
    assert [each.replica for each in route_table(c.index).routes["m"]] == [old.id]
    c.settle()
    gone = by_id(c, old)
    assert gone.retire is Retire.REPLACED
    assert {shard.node for shard in gone.shards if not shard.released} == {away}
    assert [each.replica for each in route_table(c.index).routes["m"]] == [new.id]
    c.back(away)
    c.settle()
    assert c.replicas("m") == [by_id(c, new)]


def test_a_lost_member_that_returns_first_keeps_its_shard_and_the_stand_in_is_cancelled() -> None:
    c = fleet(5)
    old = ready_gang(c)
    away = lose_one(c, old, 1)
    c.answer(ready=False)
    c.step()
    c.back(away)
    assert c.step().counts()["cancelled"] == 1
    c.settle()
    assert c.replicas("m") == [old]
    assert report(c, old, 1).phase is S.READY


def test_a_drained_node_moves_the_whole_gang() -> None:
    c = fleet(4)
    old = ready_gang(c)
    c.spec(where(old, 1), drain=True)
    c.step()
    assert by_id(c, old).phase is P.READY, "the new one is not ready yet"
    c.settle()
    new = c.one("m")
    assert new.id != old.id
    assert where(old, 1) not in {shard.node for shard in new.shards}
    assert node_inventory(c.index, where(old, 1)).holdings == ()
    assert c.index.node_specs.record(where(old, 1)) == NodeSpec(name=where(old, 1), drain=True)


def test_b01_gpus_of_a_replica_deleted_while_its_node_was_away_are_free_only_when_the_stop_is_confirmed() -> None:
    c = fleet(1)
    c.model("old", over(1))
    c.settle()
    holder = c.one("old")
    c.away("n1")
    c.step()
    c.remove_model("old")
    c.model("m", over(1))
    c.settle()
    assert by_id(c, holder).phase is P.DRAINING
    assert not c.replicas("m")
    c.back("n1")
    c.step()
    assert not c.replicas("m"), "the node is back, the old engine not confirmed gone"
    assert order(c, holder, 0).desired is Desired.STOPPED
    c.report(name(holder, 0), S.STOPPING)
    c.step()
    assert not c.replicas("m")
    slots = node_inventory(c.index, "n1").gpus
    assert slots is not None
    assert {slot.holder for slot in slots} == {holder.id}
    c.report(name(holder, 0), S.STOPPED)
    c.step()
    assert {each.uuid for each in c.one("m").shards[0].claim.gpus} == {"GPU-0", "GPU-1"}
    assert format_bytes(c.one("m").shards[0].claim.memory_bytes) == "8 GB"
