"""A word for what runs without an order; and what may not be done after the store was restored."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.adoption import concerned
from llmgw.core.explain import Constraint, Refusal
from llmgw.core.invariants import unanswered
from llmgw.core.inventory import node_inventory
from llmgw.core.node import Fleet, Liveness
from llmgw.core.record import Recover, StoreMeta
from llmgw.core.refusal_words import render
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    Gang,
    GpuClaim,
    Peer,
    Replica,
    ReplicaPhase,
    Retire,
    ShardPhase,
)
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.cluster import Cluster, cpu_profile

P = ReplicaPhase


def serving(memory_gb: float = 4.0, nodes: int = 2) -> Cluster:
    """Nodes, and one replica of `m` ready on one of them."""
    c = Cluster()
    for i in range(1, nodes + 1):
        c.node(f"n{i}", 16)
    c.model("m", cpu_profile(memory_gb))
    c.settle()
    return c


def order(c: Cluster, replica: Replica) -> Assignment:
    found = c.index.assignments.record(c.shard(replica))
    assert found is not None
    return found


def lose(c: Cluster, replica: Replica, *kinds: Kind) -> Assignment:
    """Somebody deletes what the leader wrote of a replica; its node reports it as unassigned."""
    saved = order(c, replica)
    kinds = kinds or (Kind.REPLICA, Kind.SECRET, Kind.ASSIGNMENT)
    names = {Kind.REPLICA: replica.id, Kind.SECRET: replica.id, Kind.ASSIGNMENT: c.shard(replica)}
    c.meddle(*((kind, names[kind], None) for kind in kinds))
    if Kind.ASSIGNMENT in kinds:
        c.report(c.shard(replica), ShardPhase.READY, order=saved)
    return saved


# --- adopt ----------------------------------------------------------------------------------------------------------


def test_inv5_what_runs_unassigned_is_adopted_from_exactly_its_own_order_in_one_pass() -> None:
    c = serving()
    old = c.one("m")
    saved = lose(c, old)
    assert unanswered(c.index) == [c.shard(old)]
    plan = c.step()
    assert plan.counts()["adopt"] == 1
    assert unanswered(c.index) == []
    new = c.one("m")
    assert (new.id, new.phase, new.launch, new.build, new.profile) == (
        old.id, P.READY, old.launch, old.build, old.profile,
    )  # fmt: skip
    assert new.shards == old.shards
    assert order(c, new) == saved
    secret = c.index.secrets.record(new.id)
    assert secret is not None
    assert secret.key == saved.engine_key
    c.settle()
    assert c.one("m") == new


def test_the_catalog_is_not_asked_what_an_adopted_shard_holds() -> None:
    c = serving()
    old = c.one("m")
    c.model("m", cpu_profile(1.0))
    lose(c, old)
    c.step()
    adopted = next(each for each in c.replicas("m") if each.id == old.id)
    assert adopted.shards[0].claim.memory_bytes == 4 * GB


def test_only_the_order_was_lost_and_it_is_written_back_as_the_replica_stands() -> None:
    c = serving()
    old = c.one("m")
    saved = lose(c, old, Kind.ASSIGNMENT, Kind.SECRET)
    assert c.step().counts() == {"adopt": 1}
    assert c.one("m") == old
    assert order(c, old) == saved
    assert old.id in c.index.secrets


def test_an_order_lost_of_a_replica_on_its_way_out_comes_back_as_a_stop() -> None:
    c = serving()
    saved = order(c, c.one("m"))
    c.remove_model("m")
    c.step()
    leaving = c.one("m")
    c.meddle((Kind.ASSIGNMENT, c.shard(leaving), None))
    c.report(c.shard(leaving), ShardPhase.READY, order=saved)
    assert c.step().counts() == {"stop": 1}
    assert order(c, leaving).desired is Desired.STOPPED
    c.settle()
    assert not c.replicas("m")


def test_a_lost_order_that_the_node_does_not_remember_either_becomes_a_stop() -> None:
    c = serving()
    old = c.one("m")
    name, report = c.shard(old), c.index.reports.record(c.shard(old))
    assert report is not None
    c.meddle((Kind.ASSIGNMENT, name, None), (Kind.SECRET, old.id, None))
    c.write(Kind.SHARD, name, msgspec.structs.replace(report, assigned=False, order=None))
    c.step()
    assert order(c, old).desired is Desired.STOPPED
    assert old.id in c.index.secrets


def test_a_shard_nobody_remembers_is_told_to_stop_and_its_order_goes_when_it_has() -> None:
    c = serving()
    old = c.one("m")
    lose(c, old)
    name, report = c.shard(old), c.index.reports.record(c.shard(old))
    assert report is not None
    c.write(Kind.SHARD, name, msgspec.structs.replace(report, order=None))
    assert c.step().counts()["stop"] == 1
    assert c.index.assignments.record(name) is not None
    assert old.id not in c.index.replicas
    c.answer()
    assert c.step().counts()["end"] == 1
    assert name not in c.index.assignments


def test_an_order_without_its_replica_is_taken_as_what_to_adopt() -> None:
    c = serving()
    old = c.one("m")
    lose(c, old, Kind.REPLICA)
    assert c.step().counts()["adopt"] == 1
    assert (c.one("m").id, c.one("m").phase) == (old.id, P.READY)


# --- or stopped -----------------------------------------------------------------------------------------------------


def test_what_is_of_no_model_any_more_is_told_to_stop() -> None:
    c = serving()
    old = c.one("m")
    lose(c, old)
    c.remove_model("m")
    assert c.step().counts()["stop"] == 1
    assert order(c, old).desired is Desired.STOPPED
    c.settle()
    assert not c.index.assignments
    assert not c.index.reports


def test_what_runs_in_a_store_that_nobody_told_what_is_wanted_waits_for_the_catalog() -> None:
    c = serving()
    old = c.one("m")
    lose(c, old)
    spec = c.index.models.record("m")
    assert spec is not None
    c.meddle((Kind.MODEL, "m", None), (Kind.GENERATION, "", None), (Kind.MODEL_STATE, "m", None))
    c.step()
    assert not c.index.assignments
    assert unanswered(c.index) == []
    c.model("m", *spec.profiles)
    c.step()
    assert order(c, old).desired is Desired.RUNNING


def test_what_was_told_to_stop_before_is_told_so_again() -> None:
    c = serving()
    old = c.one("m")
    saved = lose(c, old)
    told = msgspec.structs.replace(saved, desired=Desired.STOPPED)
    c.report(c.shard(old), ShardPhase.STOPPING, order=told)
    c.step()
    assert old.id not in c.index.replicas
    assert order(c, old).desired is Desired.STOPPED


def test_inv1_what_collides_with_a_claim_is_not_adopted() -> None:
    c = serving(memory_gb=10.0, nodes=1)
    old = c.one("m")
    lose(c, old)
    report = c.index.reports.record(c.shard(old))
    c.write(Kind.SHARD, c.shard(old), None)
    c.settle()
    (new,) = c.replicas("m")
    assert new.id != old.id
    c.meddle((Kind.SHARD, c.shard(old), report))
    c.step()
    assert c.replicas("m") == [new]
    assert order(c, old).desired is Desired.STOPPED


def test_one_too_many_is_adopted_and_drained_in_the_same_step() -> None:
    c = serving(memory_gb=1.0)
    old = c.one("m")
    saved = lose(c, old)
    c.write(Kind.SHARD, c.shard(old), None)
    c.settle()
    c.advance(5.0)
    c.report(c.shard(old), ShardPhase.READY, order=saved)
    plan = c.step()
    assert plan.counts() == {"scale_down": 1}
    assert {write.ref.kind for write in plan.groups[0].writes} == {Kind.REPLICA, Kind.SECRET, Kind.ASSIGNMENT}
    back = next(each for each in c.replicas("m") if each.id == old.id)
    assert (back.phase, back.retire) == (P.DRAINING, Retire.SCALE_DOWN)
    c.settle()
    assert c.one("m").id != old.id


def test_the_same_id_on_another_node_is_told_to_stop() -> None:
    c = serving(memory_gb=1.0)
    replica = c.one("m")
    other = "n1" if replica.shards[0].node == "n2" else "n2"
    twin = msgspec.structs.replace(order(c, replica), node=other)
    name = f"{other}/{replica.id}.0"
    c.report(name, ShardPhase.READY, order=twin)
    c.step()
    made = c.index.assignments.record(name)
    assert made is not None
    assert made.desired is Desired.STOPPED
    assert c.one("m") == replica
    c.settle()
    assert name not in c.index.assignments


# --- neither --------------------------------------------------------------------------------------------------------


def test_nothing_is_said_while_nobody_is_there_to_hear_it() -> None:
    c = serving(nodes=4)
    old = c.one("m")
    lose(c, old)
    c.away(old.shards[0].node)
    c.step()
    assert c.shard(old) not in c.index.assignments


def test_nothing_is_said_of_what_has_ended_by_itself() -> None:
    c = serving()
    old = c.one("m")
    saved = lose(c, old)
    c.report(c.shard(old), ShardPhase.FAILED, order=saved)
    c.step()
    assert c.shard(old) not in c.index.assignments


@pytest.mark.parametrize("kind", [Kind.MODEL, Kind.SHARD, Kind.REPLICA])
def test_what_cannot_be_read_is_neither_adopted_nor_stopped(kind: Kind) -> None:
    c = serving()
    old = c.one("m")
    lose(c, old)
    c.spoil(kind, {Kind.MODEL: "m", Kind.SHARD: c.shard(old), Kind.REPLICA: old.id}[kind])
    c.settle()
    assert c.shard(old) not in c.index.assignments


def test_an_unreadable_order_is_left_alone() -> None:
    c = serving()
    old = c.one("m")
    c.meddle((Kind.REPLICA, old.id, None))
    c.spoil(Kind.ASSIGNMENT, c.shard(old))
    c.settle()
    assert old.id not in c.index.replicas


# --- gangs: whole or not at all -------------------------------------------------------------------------------------


def gang(c: Cluster) -> list[Assignment]:
    """The two orders of a replica over n1 and n2, as their nodes would have saved them."""
    replica = c.one("m")
    first = order(c, replica)
    peers = (Peer(rank=0, node="n1", address="h1"), Peer(rank=1, node="n2", address="h2"))
    launch = msgspec.structs.replace(first.launch, nodes=2)
    made = [
        msgspec.structs.replace(first, node=f"n{rank + 1}", rank=rank, replica="m-ggggg", launch=launch,
                                gang=Gang(fabric="ib0", peers=peers, ports=(21000,)))
        for rank in (0, 1)
    ]  # fmt: skip
    c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, c.shard(replica), None),
             (Kind.SHARD, c.shard(replica), None), (Kind.SECRET, replica.id, None))  # fmt: skip
    return made


def test_a_gang_is_adopted_whole() -> None:
    c = serving()
    for each in gang(c):
        c.report(f"{each.node}/m-ggggg.{each.rank}", ShardPhase.READY, order=each)
    plan = c.step()
    (adopted,) = [group for group in plan.groups if group.cause == "adopt"]
    assert len(adopted.writes) == 4
    replica = c.one("m")
    assert [(shard.rank, shard.node) for shard in replica.shards] == [(0, "n1"), (1, "n2")]
    assert replica.fabric == "ib0"


def test_half_a_gang_is_told_to_stop() -> None:
    c = serving()
    _, second = gang(c)
    c.report("n2/m-ggggg.1", ShardPhase.READY, order=second)
    c.step()
    assert "m-ggggg" not in c.index.replicas
    made = c.index.assignments.record("n2/m-ggggg.1")
    assert made is not None
    assert made.desired is Desired.STOPPED


def half_told(c: Cluster) -> list[Assignment]:
    """All the leader wrote of a gang is deleted; n1 has noticed, n2 still reports as ordered."""
    orders = gang(c)
    c.meddle(*((Kind.ASSIGNMENT, f"{each.node}/m-ggggg.{each.rank}", each) for each in orders))
    for each in orders:
        c.report(f"{each.node}/m-ggggg.{each.rank}", ShardPhase.READY)
    c.meddle(*((Kind.ASSIGNMENT, f"{each.node}/m-ggggg.{each.rank}", None) for each in orders))
    c.report("n1/m-ggggg.0", ShardPhase.READY, order=orders[0])
    return orders


def test_inv5_a_gang_whose_nodes_notice_one_after_the_other_is_adopted_whole() -> None:
    c = serving()
    _, second = half_told(c)
    c.step()
    assert "m-ggggg" not in c.index.replicas
    assert not c.index.assignments_of.get("m-ggggg"), "no word while the other member can still speak"
    assert not unanswered(c.index)
    c.report("n2/m-ggggg.1", ShardPhase.READY, order=second)
    c.step()
    assert {each.desired for each in c.index.assignments.records() if each.replica == "m-ggggg"} == {Desired.RUNNING}
    assert [shard.node for shard in c.index.replicas["m-ggggg"].record.shards] == ["n1", "n2"]  # type: ignore[union-attr]


def stops(c: Cluster) -> list[str]:
    rows = c.index.assignments.items()
    return sorted(name for name, row in rows if row.record is not None and row.record.desired is Desired.STOPPED)


def test_inv6_the_word_waits_for_an_unreachable_member_until_it_is_back() -> None:
    c = serving(nodes=4)
    _, second = half_told(c)
    c.away("n2")
    c.step()
    c.advance(200.0)
    c.step()
    assert not stops(c), "what serves is not torn down because a member can't be asked"
    c.meddle((Kind.SESSION, "n2", c.session("n2")))
    c.report("n2/m-ggggg.1", ShardPhase.READY, order=second)
    c.step()
    assert "m-ggggg" in c.index.replicas


def test_inv5_the_word_waits_for_an_unreachable_member_no_longer_than_until_it_is_lost() -> None:
    c = serving(nodes=4)
    half_told(c)
    c.away("n2")
    c.step()
    c.advance(301.0)
    c.step()
    state = c.index.node_states.record("n2")
    assert state is not None
    assert state.liveness is Liveness.LOST
    assert stops(c) == ["n1/m-ggggg.0"], "in the very pass that gives the node up"
    assert c.plan().empty


def test_inv5_the_word_waits_for_no_machine_that_was_declared_gone() -> None:
    c = serving(nodes=4)
    half_told(c)
    c.away("n2")
    c.step()
    c.spec("n2", forget="boot-n2")
    c.step()
    assert stops(c) == ["n1/m-ggggg.0"]
    assert c.plan().empty


@pytest.mark.parametrize("phase", [ShardPhase.FAILED, None])
def test_inv5_half_a_gang_whose_other_half_is_over_is_told_to_stop_at_once(phase: ShardPhase | None) -> None:
    c = serving()
    half_told(c)
    if phase is None:
        c.meddle((Kind.SHARD, "n2/m-ggggg.1", None))
    else:
        report = c.index.reports.record("n2/m-ggggg.1")
        assert report is not None
        c.meddle((Kind.SHARD, "n2/m-ggggg.1", msgspec.structs.replace(report, phase=phase)))
    c.step()
    assert stops(c) == ["n1/m-ggggg.0"]


def test_inv5_a_gang_with_a_member_nobody_remembers_is_told_to_stop_whole() -> None:
    c = serving()
    half_told(c)
    report = c.index.reports.record("n2/m-ggggg.1")
    assert report is not None
    found = msgspec.structs.replace(report, assigned=False, assignment_rev=0, order=None)
    c.meddle((Kind.SHARD, "n2/m-ggggg.1", found))
    c.step()
    assert stops(c) == ["n1/m-ggggg.0", "n2/m-ggggg.1"]


def test_a_gang_that_contradicts_itself_is_told_to_stop() -> None:
    c = serving()
    first, second = gang(c)
    for each in (first, second, msgspec.structs.replace(second, node="n1")):
        c.report(f"{each.node}/m-ggggg.{each.rank}", ShardPhase.READY, order=each)
    c.step()
    assert "m-ggggg" not in c.index.replicas
    assert len([each for each in c.index.assignments.records() if each.desired is Desired.STOPPED]) == 3


def test_a_gang_on_a_gpu_that_is_taken_is_told_to_stop() -> None:
    c = serving()
    taken = Claim(gpus=(GpuClaim(uuid="GPU-1"),))
    orders = [msgspec.structs.replace(each, claim=taken) for each in gang(c)]
    for replica in ("m-aaaaa", "m-bbbbb"):
        made = [msgspec.structs.replace(each, replica=replica) for each in orders]
        c.meddle(*((Kind.ASSIGNMENT, f"{each.node}/{replica}.{each.rank}", each) for each in made))
    c.step()
    assert not {"m-aaaaa", "m-bbbbb"} & set(c.index.replicas), "each stands in the other's way"
    assert {each.desired for each in c.index.assignments.records() if each.rank == 1} == {Desired.STOPPED}


def adopted_gang(c: Cluster) -> Replica:
    for each in gang(c):
        c.report(f"{each.node}/m-ggggg.{each.rank}", ShardPhase.READY, order=each)
    c.step()
    c.answer()
    c.step()
    return c.one("m")


def test_a_gang_gives_back_what_each_node_has_confirmed() -> None:
    c = serving()
    adopted_gang(c)
    c.remove_model("m")
    c.step()
    c.report("n1/m-ggggg.0", ShardPhase.STOPPED)
    assert c.step().counts() == {"release": 1, "stop": 1}
    replica = c.one("m")
    assert [shard.released for shard in replica.shards] == [True, False]
    assert replica.phase is P.DRAINING
    assert c.index.assignments.names() == ["n2/m-ggggg.1"]
    assert node_inventory(c.index, "n1").claimed_bytes == 0
    assert node_inventory(c.index, "n2").claimed_bytes == 4 * GB
    c.report("n2/m-ggggg.1", ShardPhase.STOPPING)
    assert c.step().counts() == {"phase": 1}
    c.report("n2/m-ggggg.1", ShardPhase.STOPPED)
    assert c.step().counts()["end"] == 1


def test_one_failed_shard_fails_the_gang_and_a_node_that_cannot_answer_holds_only_its_own() -> None:
    c = serving(nodes=4)
    adopted_gang(c)
    c.away("n2")
    c.step()
    c.report("n1/m-ggggg.0", ShardPhase.FAILED, reason="exit 1")
    assert c.step().counts()["fail"] == 1
    c.settle()
    replica = next(each for each in c.replicas("m") if each.id == "m-ggggg")
    assert [shard.released for shard in replica.shards] == [True, False]
    c.spec("n2", forget="boot-n2")
    c.settle()
    assert "m-ggggg" not in c.index.replicas
    assert "n2" not in c.index.node_states


def test_a_live_gang_loses_the_shard_of_a_forgotten_machine_and_stops_the_others() -> None:
    c = serving(nodes=4)
    adopted_gang(c)
    c.away("n2")
    c.step()
    c.spec("n2", forget="boot-n2")
    c.step()
    replica = next(each for each in c.replicas("m") if each.id == "m-ggggg")
    assert [shard.released for shard in replica.shards] == [False, True]
    assert c.index.assignments["n1/m-ggggg.0"].record is not None
    assert c.index.assignments["n1/m-ggggg.0"].record.desired is Desired.STOPPED
    c.settle()
    assert "m-ggggg" not in c.index.replicas


def test_inv7_a_forgotten_machine_that_is_back_with_its_shard_is_told_to_stop_in_one_pass() -> None:
    c = serving(nodes=4)
    adopted_gang(c)
    c.away("n2")
    c.step()
    c.spec("n2", forget="boot-n2")
    c.step()
    c.answer("n1")
    report = c.index.reports.record("n2/m-ggggg.1")
    assert report is not None
    unassigned = msgspec.structs.replace(report, assigned=False, assignment_rev=0, order=None)
    c.write_all((Kind.SESSION, "n2", c.session("n2")), (Kind.SHARD, "n2/m-ggggg.1", unassigned))
    c.step()
    assert "m-ggggg" not in c.index.replicas
    order = c.index.assignments.record("n2/m-ggggg.1")
    assert order is not None
    assert order.desired is Desired.STOPPED
    assert c.plan().empty


def test_what_neither_store_nor_node_remembers_is_stopped_and_built_anew() -> None:
    c = serving()
    old = c.one("m")
    report = c.index.reports.record(c.shard(old))
    assert report is not None
    c.saved.pop(c.shard(old))
    found = msgspec.structs.replace(report, assigned=False, assignment_rev=0, order=None)
    c.meddle((Kind.ASSIGNMENT, c.shard(old), None), (Kind.SHARD, c.shard(old), found))
    c.step()
    failed = c.one("m")
    assert (failed.phase, failed.retire) == (P.FAILED, Retire.UNKNOWN)
    c.settle()
    c.advance(10.0)
    c.settle()
    assert c.one("m").id != old.id
    assert c.one("m").phase is P.READY


# --- after a restore ------------------------------------------------------------------------------------------------


def fleet(c: Cluster) -> Fleet:
    assert c.index.fleet is not None
    assert c.index.fleet.record is not None
    return c.index.fleet.record


def restored(c: Cluster) -> None:
    """The store is another incarnation of itself; no node has told it anything yet."""
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")))


def test_the_first_start_is_not_a_restore() -> None:
    c = serving()
    assert fleet(c).incarnation == "store-1"


def test_after_a_restore_nothing_is_stopped_placed_or_pruned_until_every_node_has_reported() -> None:
    c = serving(nodes=3)
    c.model("gone")
    c.settle()
    c.remove_model("gone")
    c.step()
    c.model("leaving")
    c.settle()
    restored(c)
    c.remove_model("leaving")
    c.model("new")
    c.model("m", cpu_profile(context=8192))
    failed = c.shard(c.one("m"))
    c.answer()
    c.report(failed, ShardPhase.FAILED)
    before = dict(c.index.replicas)
    c.step()
    assert dict(c.index.replicas) == before
    assert not c.replicas("new")
    reason = render(Refusal(constraint=Constraint.RESTORING, profile=""))
    state = c.index.model_states.record("new")
    assert state is not None
    assert state.reason == reason
    assert {each.liveness for each in c.index.node_states.records()} == {Liveness.RETURNING}
    c.back("n1")
    c.back("n2")
    c.step()
    assert dict(c.index.replicas) == before
    assert fleet(c).incarnation == "store-1"
    c.back("n3")
    plan = c.step()
    assert fleet(c).incarnation == "store-2"
    assert not plan.left
    assert c.replicas("new")
    assert not c.replicas("gone")
    assert c.one("leaving").phase is P.DRAINING
    assert [each for each in c.replicas("m") if each.phase is P.FAILED]


def test_after_a_restore_what_runs_is_adopted_at_once_and_the_rest_answered_at_the_end() -> None:
    c = serving(nodes=2)
    old = c.one("m")
    node = old.shards[0].node
    other = "n1" if node == "n2" else "n2"
    stray = msgspec.structs.replace(order(c, old), replica="x-aaaaa", model="x")
    lose(c, old)
    c.report(f"{node}/x-aaaaa.0", ShardPhase.READY, order=stray)
    restored(c)
    c.back(node)
    c.step()
    assert c.one("m").id == old.id
    assert f"{node}/x-aaaaa.0" not in c.index.assignments, "not yet stopped"
    c.back(other)
    c.step()
    stop = c.index.assignments.record(f"{node}/x-aaaaa.0")
    assert stop is not None
    assert stop.desired is Desired.STOPPED
    c.settle()


def test_after_a_restore_what_waits_is_asked_about_again_when_its_model_is_there_again() -> None:
    c = serving(nodes=3)
    old = c.one("m")
    restored(c)
    lose(c, old)
    spec = c.index.models.record("m")
    c.meddle((Kind.MODEL, "m", None))
    c.back(old.shards[0].node)
    c.step()
    assert not c.replicas("m"), "nobody wants it, as far as is known"
    c.write(Kind.MODEL, "m", spec)
    plan = c.step()
    assert plan.counts()["adopt"] == 1
    assert c.one("m").id == old.id


def test_what_waits_is_concerned_by_its_node_its_model_and_the_nodes_of_its_gang() -> None:
    c = serving(nodes=3)
    first, second = gang(c)
    for each in (first, second):
        c.report(f"{each.node}/m-ggggg.{each.rank}", ShardPhase.READY, order=each)
    c.meddle((Kind.ASSIGNMENT, "n3/m-ooooo.0", msgspec.structs.replace(first, node="n3", rank=0, replica="m-ooooo")))
    both, other = {"n1/m-ggggg.0", "n2/m-ggggg.1"}, "n3/m-ooooo.0"
    assert c.index.standing.unanswered == {*both, other}
    nobody = set[str]()
    assert concerned(c.index, nodes=nobody, models=nobody) == nobody
    assert concerned(c.index, nodes={"n1"}, models=nobody) == both
    assert concerned(c.index, nodes={"n3"}, models=nobody) == {other}
    assert concerned(c.index, nodes=nobody, models={"m"}) == {*both, other}
    assert concerned(c.index, nodes=nobody, models={"x"}) == nobody


def test_after_a_restore_a_lost_or_forgotten_node_is_not_waited_for() -> None:
    c = serving(nodes=4)
    restored(c)
    for name in ("n1", "n2"):
        c.back(name)
    for name in ("n3", "n4"):
        c.away(name)
    c.step()
    c.spec("n3", forget="boot-n3")
    c.step()
    assert "n3" in c.index.node_states, "pruned only afterwards"
    c.advance(400.0)
    c.step()
    assert fleet(c).incarnation == "store-2"
    assert "n3" not in c.index.node_states


def test_an_operator_may_end_the_waiting_for_this_very_incarnation() -> None:
    c = serving(nodes=3)
    restored(c)
    c.write(Kind.RECOVER, "", Recover(incarnation="store-1"))
    c.step()
    assert fleet(c).incarnation == "store-1"
    c.write(Kind.RECOVER, "", Recover(incarnation="store-2"))
    c.step()
    assert fleet(c).incarnation == "store-2"
    assert {each.liveness for each in c.index.node_states.records()} == {Liveness.RETURNING}
    c.model("m", cpu_profile(1.0), replicas=3)
    c.step()
    assert len(c.replicas("m")) == 1, "no node is placed on before it has reported"


def test_a_fleet_record_that_cannot_be_read_is_no_licence() -> None:
    c = serving()
    c.spoil(Kind.FLEET)
    c.model("new")
    c.remove_model("m")
    c.settle()
    assert not c.replicas("new")
    assert c.one("m").phase is P.READY


def test_an_order_to_stop_that_was_lost_with_the_restore_is_not_given_while_waiting() -> None:
    c = serving(nodes=3)
    c.remove_model("m")
    saved = order(c, c.one("m"))
    c.step()
    leaving = c.one("m")
    c.meddle((Kind.ASSIGNMENT, c.shard(leaving), None))
    restored(c)
    c.back(leaving.shards[0].node)
    c.report(c.shard(leaving), ShardPhase.READY, order=saved)
    c.step()
    assert c.shard(leaving) not in c.index.assignments
    c.write(Kind.RECOVER, "", Recover(incarnation="store-2"))
    c.step()
    assert order(c, leaving).desired is Desired.STOPPED


def test_after_a_restore_a_shard_nobody_remembers_waits_for_its_word() -> None:
    c = serving(nodes=3)
    old = c.one("m")
    lose(c, old)
    report = c.index.reports.record(c.shard(old))
    assert report is not None
    c.write(Kind.SHARD, c.shard(old), msgspec.structs.replace(report, order=None))
    restored(c)
    c.back(old.shards[0].node)
    c.step()
    assert c.shard(old) not in c.index.assignments
    c.write(Kind.RECOVER, "", Recover(incarnation="store-2"))
    c.step()
    assert c.shard(old) in c.index.assignments


def test_after_a_restore_what_its_node_had_stopped_for_good_is_built_anew() -> None:
    c = serving(nodes=3)
    old = c.one("m")
    restored(c)
    for node in c.index.sessions.names():
        c.back(node)
    c.report(c.shard(old), ShardPhase.STOPPED)
    c.settle()
    assert not c.replicas("m")
    c.advance(60.0)  # it counts as a failure, so the model waits
    c.settle()
    new = c.one("m")
    assert new.id != old.id
    assert new.phase is P.READY


def test_after_a_restore_a_confirmed_stray_order_is_pruned_only_at_the_end() -> None:
    c = serving(nodes=3)
    old = c.one("m")
    name = c.shard(old)
    lose(c, old)
    c.remove_model("m")
    c.step()
    c.answer()
    restored(c)
    c.step()
    assert name in c.index.assignments
    c.write(Kind.RECOVER, "", Recover(incarnation="store-2"))
    c.step()
    assert name not in c.index.assignments
