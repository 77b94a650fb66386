"""Which nodes are there, and when so many are gone that it is doubted."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.liveness import GUARD_NODES, GUARD_WRITES, losable, observe
from llmgw.core.node import Guard, Liveness, NodeState
from llmgw.core.plan import View, Wake
from llmgw.core.snapshot import Kind
from llmgw.core.units import Now
from llmgw.testing.cluster import Cluster

READY, UNREACHABLE, LOST, RETURNING = Liveness.READY, Liveness.UNREACHABLE, Liveness.LOST, Liveness.RETURNING


def cluster(nodes: int) -> Cluster:
    c = Cluster()
    for i in range(1, nodes + 1):
        c.node(f"n{i}")
    c.settle()
    return c


def state(c: Cluster, name: str) -> NodeState:
    found = c.index.node_states.record(name)
    assert found is not None
    return found


def liveness(c: Cluster) -> dict[str, Liveness]:
    return {each.name: each.liveness for each in c.index.node_states.records()}


def guard(c: Cluster) -> Guard:
    assert c.index.fleet is not None
    assert c.index.fleet.record is not None
    return c.index.fleet.record.guard


def test_a_new_node_is_ready_with_its_session_and_remembered_by_boot_and_lease() -> None:
    c = cluster(1)
    session = c.index.sessions.record("n1")
    assert session is not None
    assert state(c, "n1") == NodeState(
        name="n1", liveness=READY, since_at=c.now.wall_s, boot_id="boot-n1", lease=session.lease
    )


def test_a_session_that_ends_makes_unreachable_then_lost_after_its_time() -> None:
    c = cluster(4)
    c.away("n1")
    c.step()
    gone = state(c, "n1")
    assert (gone.liveness, gone.since_at, gone.boot_id) == (UNREACHABLE, c.now.wall_s, "boot-n1")
    assert c.wakes[Wake.NODE, "n1"] == c.now.mono_s + 300.0
    c.advance(299.0)
    c.step()
    assert state(c, "n1") == gone
    c.advance(1.0)
    c.step()
    assert state(c, "n1").liveness is LOST
    c.advance(10_000.0)
    assert not c.plan().groups


def test_a_node_known_by_its_facts_alone_is_unreachable() -> None:
    c = cluster(3)
    c.node("n4")
    c.away("n4")
    c.step()
    assert state(c, "n4").liveness is UNREACHABLE
    assert state(c, "n4").lease is None


def test_a_new_leader_watches_for_two_ttls_before_it_declares_anybody_lost() -> None:
    c = cluster(4)
    c.away("n1")
    c.step()
    c.advance(1000.0)
    c.new_leader()
    c.step()
    assert state(c, "n1").liveness is UNREACHABLE
    c.advance(59.0)
    c.step()
    assert state(c, "n1").liveness is UNREACHABLE
    c.advance(1.0)
    c.step()
    assert state(c, "n1").liveness is LOST


@pytest.mark.parametrize(("jump_s", "after_s"), [(86_400.0, 60.0), (-86_400.0, 300.0)])
def test_a_wall_clock_that_steps_neither_hurries_past_the_grace_nor_blocks(jump_s: float, after_s: float) -> None:
    c = cluster(4)
    c.away("n1")
    c.step()
    c.advance(0.0, step_wall_s=jump_s)
    c.advance(after_s - 1.0)
    c.step()
    assert state(c, "n1").liveness is UNREACHABLE
    c.advance(1.0)
    c.step()
    assert state(c, "n1").liveness is LOST


@pytest.mark.parametrize("lost", [False, True])
def test_a_node_that_is_back_is_returning_until_its_stop_orders_are_confirmed(lost: bool) -> None:
    c = cluster(4)
    c.model("m")
    c.settle()
    node = c.one("m").shards[0].node
    c.away(node)
    c.step()
    c.remove_model("m")
    c.step()
    if lost:
        c.advance(300.0)
        c.step()
    c.back(node)
    c.step()
    assert state(c, node).liveness is RETURNING
    assert not c.plan().groups
    c.answer(node)
    c.step()
    assert state(c, node).liveness is READY
    assert not c.replicas("m")


def test_a_node_that_is_back_is_ready_at_once_when_nothing_is_open() -> None:
    c = cluster(4)
    c.away("n1")
    c.step()
    c.advance(5.0)
    c.back("n1")
    c.step()
    assert (state(c, "n1").liveness, state(c, "n1").since_at) == (READY, c.now.wall_s)


def test_a_ready_node_stays_ready_while_it_carries_out_stop_orders() -> None:
    c = cluster(1)
    c.model("m")
    c.settle()
    c.remove_model("m")
    c.step()
    c.step()
    assert state(c, "n1").liveness is READY


def test_a_new_session_without_a_gap_is_a_return_as_well() -> None:
    c = cluster(1)
    c.model("m")
    c.settle()
    c.remove_model("m")
    c.step()
    c.back("n1")
    c.step()
    assert state(c, "n1").liveness is RETURNING


def test_a_report_for_another_incarnation_of_the_store_is_no_report() -> None:
    c = cluster(1)
    session = c.index.sessions.record("n1")
    assert session is not None
    c.write(Kind.SESSION, "n1", msgspec.structs.replace(session, store="store-0"))
    c.step()
    assert state(c, "n1").liveness is RETURNING


def test_a_returning_node_with_something_unanswered_or_unreadable_is_not_ready() -> None:
    c = cluster(4)
    c.model("m")
    c.settle()
    replica = c.one("m")
    node, name = replica.shards[0].node, c.shard(replica)
    for kind in (Kind.SHARD, Kind.ASSIGNMENT):
        row = c.index.row(next(ref for ref, _ in c.index.rows() if (ref.kind, ref.name) == (kind, name)))
        assert row is not None
        c.away(node)
        c.step()
        c.meddle((kind, name, None))
        c.spoil(kind, name)
        c.back(node)
        c.step()
        assert state(c, node).liveness is RETURNING, kind
        c.meddle((kind, name, row.record))
        c.answer(node)
        c.settle()
        assert state(c, node).liveness is READY, kind


@pytest.mark.parametrize("kind", [Kind.SESSION, Kind.NODE_STATE])
def test_an_unreadable_session_or_state_changes_nothing(kind: Kind) -> None:
    c = cluster(3)
    c.spoil(kind, "n1")
    c.settle()
    c.advance(10_000.0)
    c.settle()
    assert liveness(c)["n1"] is READY
    c.meddle((Kind.SESSION, "n1", None))
    c.settle()
    c.advance(10_000.0)
    c.settle()
    assert liveness(c)["n1"] is (READY if kind is Kind.NODE_STATE else LOST)


# --- the guard ------------------------------------------------------------------------------------------------------


def test_a11_all_sessions_gone_at_once_lose_nobody_and_move_nothing() -> None:
    c = cluster(6)
    c.model("m", replicas=4)
    c.settle()
    before = c.replicas("m")
    for i in range(1, 7):
        c.away(f"n{i}")
    c.step()
    assert guard(c) == Guard(on=True, reason=GUARD_NODES, since_at=c.now.wall_s, unreachable=6, nodes=6)
    c.advance(3600.0)
    c.step()
    assert set(liveness(c).values()) == {UNREACHABLE}
    for i in range(1, 7):
        c.back(f"n{i}")
    c.settle()
    assert guard(c) == Guard()
    assert set(liveness(c).values()) == {READY}
    assert c.replicas("m") == before


@pytest.mark.parametrize(("nodes", "away", "on"), [(2, 1, False), (2, 2, True), (6, 2, False), (6, 3, True)])
def test_the_guard_is_on_beyond_a_third_and_from_two(nodes: int, away: int, on: bool) -> None:
    c = cluster(nodes)
    for i in range(1, away + 1):
        c.away(f"n{i}")
    c.step()
    assert guard(c).on is on


def test_lost_nodes_do_not_count_for_the_guard() -> None:
    c = cluster(6)
    c.away("n1")
    c.step()
    c.advance(400.0)
    c.step()
    assert liveness(c)["n1"] is LOST
    c.away("n2")
    c.step()
    assert not guard(c).on, "one of five"
    c.away("n3")
    c.step()
    assert guard(c).on, "two of five"


def test_the_guards_record_is_not_rewritten_for_its_numbers_alone() -> None:
    c = cluster(6)
    for i in range(1, 4):
        c.away(f"n{i}")
    c.step()
    first = guard(c)
    c.advance(1.0)
    c.away("n4")
    plan = c.step()
    assert plan.counts() == {"liveness": 1}
    assert guard(c) == first


def test_an_operator_releases_nodes_from_the_guard_by_the_session_that_ended() -> None:
    c = cluster(3)
    lease = state(c, "n1").lease
    c.away("n1")
    c.away("n2")
    c.step()
    c.advance(400.0)
    c.spec("n1", release=(lease or 0) + 1)
    c.step()
    assert guard(c).on, "a release that speaks of another session"
    assert liveness(c)["n1"] is UNREACHABLE
    c.spec("n1", release=lease)
    c.step()
    assert not guard(c).on, "one of the two that are left"
    assert liveness(c)["n1"] is LOST


def test_a_released_node_is_lost_even_while_the_guard_doubts_the_others() -> None:
    c = cluster(7)
    lease = state(c, "n1").lease
    for i in range(1, 6):
        c.away(f"n{i}")
    c.step()
    c.advance(400.0)
    c.spec("n1", release=lease)
    c.step()
    assert guard(c).on
    assert [name for name, each in liveness(c).items() if each is LOST] == ["n1"]


def test_a_leader_whose_own_writes_fail_declares_nobody_lost() -> None:
    c = cluster(4)
    c.away("n1")
    c.spec("n1", release=state(c, "n1").lease)
    c.step()
    c.advance(290.0)
    c.view = msgspec.structs.replace(c.view, write_failed_mono_s=c.now.mono_s)
    c.advance(20.0)
    c.step()
    assert guard(c).reason == GUARD_WRITES
    assert liveness(c)["n1"] is UNREACHABLE, "whoever released it"
    c.advance(39.0)
    assert not c.step().groups
    c.advance(1.0)
    plan = c.step()
    assert plan.counts() == {"liveness": 1, "fleet": 1}, "its own wake was enough"
    assert not guard(c).on
    assert liveness(c)["n1"] is LOST


@pytest.mark.parametrize(("nodes", "away", "per_minute"), [(20, 3, 1), (200, 5, 2)])
def test_only_so_many_are_lost_a_minute_and_the_longest_gone_first(nodes: int, away: int, per_minute: int) -> None:
    c = cluster(nodes)
    gone = [f"n{i}" for i in range(away, 0, -1)]
    for name in gone:
        c.away(name)
        c.step()
        c.advance(1.0)
    c.advance(400.0)
    lost: list[str] = []
    for _ in range(away):
        c.step()
        c.step()
        fresh = [name for name, each in liveness(c).items() if each is LOST and name not in lost]
        assert len(fresh) <= per_minute
        lost += sorted(fresh, key=gone.index)
        c.advance(60.0)
    assert lost == gone


def test_a_node_whose_session_cannot_be_read_is_not_declared_lost() -> None:
    c = cluster(4)
    c.away("n1")
    c.step()
    c.spoil(Kind.SESSION, "n1")
    c.advance(2000.0)
    c.step()
    assert state(c, "n1").liveness is UNREACHABLE, "it may well be there"


def test_a_clock_that_stepped_back_does_not_stop_the_counting() -> None:
    lost = NodeState(name="n1", liveness=LOST, since_at=5000.0)
    assert losable(1, [lost], now=Now(wall_s=5010.0, mono_s=0.0)) == (0, 50.0)
    assert losable(1, [lost], now=Now(wall_s=5061.0, mono_s=0.0)) == (1, 0.0)
    assert losable(1, [lost], now=Now(wall_s=1000.0, mono_s=0.0)) == (1, 0.0)


def test_observing_keeps_the_first_sight_and_forgets_who_is_back() -> None:
    c = cluster(2)
    c.away("n1")
    seen = observe(View(), c.index, now=c.now)
    assert seen.absent_since == {"n1": c.now.mono_s}
    c.advance(10.0)
    assert observe(seen, c.index, now=c.now) is seen
    c.back("n1")
    assert observe(seen, c.index, now=c.now).absent_since == {}


# --- forgetting -----------------------------------------------------------------------------------------------------


def test_a_forgotten_machines_claims_end_and_its_plan_goes() -> None:
    c = cluster(3)
    c.model("m")
    c.settle()
    old = c.one("m")
    node = old.shards[0].node
    c.away(node)
    c.step()
    c.advance(10.0)
    c.spec(node, forget="boot-other")
    c.step()
    assert c.one("m") == old, "another boot was spoken of"
    c.spec(node, forget=f"boot-{node}")
    plan = c.step()
    assert plan.counts()["forget"] == 2
    assert node not in c.index.node_states
    assert not c.index.assignments_on.get(node)
    (new,) = c.replicas("m")
    assert new.shards[0].node != node
    c.settle()
    c.meddle((Kind.FACTS, node, None), *((Kind.SHARD, name, None) for name in c.index.reports_on[node]))
    assert not c.plan().groups


def test_forgetting_is_void_while_there_is_a_session() -> None:
    c = cluster(2)
    c.model("m")
    c.settle()
    old = c.one("m")
    c.spec(old.shards[0].node, forget=f"boot-{old.shards[0].node}")
    assert not c.step().groups
    assert c.one("m") == old


def test_forgetting_ends_what_was_ordered_to_stop_and_stray_orders() -> None:
    c = cluster(3)
    c.model("m")
    c.settle()
    old = c.one("m")
    node, name = old.shards[0].node, c.shard(old)
    c.remove_model("m")
    c.step()
    c.away(node)
    c.step()
    stray = c.index.assignments.record(name)
    assert stray is not None
    other = msgspec.structs.replace(stray, replica="m-zzzzz")
    c.meddle((Kind.ASSIGNMENT, f"{node}/m-zzzzz.0", other))
    c.spec(node, forget=f"boot-{node}")
    c.step()
    assert not c.replicas("m")
    assert not c.index.assignments_on.get(node)
    assert node not in c.index.node_states


def test_what_cannot_be_read_of_a_forgotten_node_keeps_its_state() -> None:
    c = cluster(3)
    c.model("m")
    c.settle()
    old = c.one("m")
    node = old.shards[0].node
    c.away(node)
    c.step()
    c.spoil(Kind.REPLICA, old.id)
    c.spec(node, forget=f"boot-{node}")
    c.step()
    assert node in c.index.node_states
    assert old.id in c.index.replicas
