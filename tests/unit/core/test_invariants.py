"""Each invariant notices when it is broken: one small story of a bug for each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from llmgw.core.explain import Constraint, Receipt, Refusal, Unplaced
from llmgw.core.history import Checker
from llmgw.core.invariants import Violation, check, check_explained, require, unconverged
from llmgw.core.inventory import Inventory
from llmgw.core.node import Facts, Fleet, Liveness, NodeState
from llmgw.core.placement import explain
from llmgw.core.record import Head, Leader, Record, StoreMeta
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    GpuClaim,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    Retire,
    ShardPhase,
)
from llmgw.core.snapshot import Change, Index, Kind, Ref
from llmgw.core.units import GB
from llmgw.errors import InvariantError
from llmgw.testing.apply import changes_for
from llmgw.testing.cluster import Cluster, cpu_profile, model_spec

P = ReplicaPhase


def serving(memory_gb: float = 4.0, replicas: int = 1, nodes: int = 2) -> Cluster:
    c = Cluster()
    for i in range(1, nodes + 1):
        c.node(f"n{i}", 16)
    c.model("m", cpu_profile(memory_gb), replicas=replicas)
    c.settle()
    return c


def order(c: Cluster, replica: Replica) -> Assignment:
    found = c.index.assignments.record(c.shard(replica))
    assert found is not None
    return found


def broken(c: Cluster, *records: tuple[Kind, str, Record | None]) -> list[Violation]:
    """What the checker says of one revision in which these records are written."""
    revision = c.index.revision + 1
    changes = changes_for(c.index, *records, revision=revision)
    c.index.apply(changes, revision=revision)
    return c.checker.advance(changes, revision=revision)


def said(violations: list[Violation]) -> str:
    return "; ".join(map(str, violations))


def copy_of(c: Cluster, replica: Replica, new: str, **fields: object) -> list[tuple[Kind, str, Record | None]]:
    """The records of a second replica like `replica`."""
    secret = c.index.secrets.record(replica.id)
    assert secret is not None
    made = msgspec.structs.replace(replica, id=new, **fields)
    orders = [
        msgspec.structs.replace(order(c, replica), replica=new, node=shard.node, rank=shard.rank, claim=shard.claim)
        for shard in made.shards
    ]
    return [
        (Kind.REPLICA, new, made),
        (Kind.SECRET, new, msgspec.structs.replace(secret, replica=new)),
        *((Kind.ASSIGNMENT, f"{each.node}/{new}.{each.rank}", each) for each in orders),
    ]


def shards(*claims: tuple[str, Claim]) -> tuple[ReplicaShard, ...]:
    return tuple(ReplicaShard(rank=rank, node=node, claim=claim) for rank, (node, claim) in enumerate(claims))


# --- one tree -------------------------------------------------------------------------------------------------------


def test_inv1_a_gpu_in_two_live_claims() -> None:
    c = serving()
    gpu = Claim(gpus=(GpuClaim(uuid="GPU-1"),))
    one = copy_of(c, c.one("m"), "m-aaaaa", shards=shards(("n1", gpu)))
    two = copy_of(c, c.one("m"), "m-bbbbb", shards=shards(("n1", gpu)))
    assert "invariant 1: GPU-1 on n1 is claimed by m-aaaaa and m-bbbbb" in said(broken(c, *one, *two))
    c.meddle((Kind.REPLICA, "m-ccccc", None))
    c.spoil(Kind.REPLICA, "m-ccccc")
    c.spoil(Kind.MODEL_STATE, "never-read")
    assert said(check(c.index)) == "invariant 1: GPU-1 on n1 is claimed by m-aaaaa and m-bbbbb"
    c.meddle((Kind.REPLICA, "m-bbbbb", None))
    assert said(check(c.index)) == "invariant 1: GPU-1 on n1 is claimed by m-aaaaa and m-bbbbb", "its order is a claim"
    c.meddle((Kind.ASSIGNMENT, "n1/m-bbbbb.0", None))
    assert check(c.index) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((), "has the ranks []"),
        ((ReplicaShard(rank=1, node="n1", claim=Claim()),), "has the ranks [1]"),
        (shards(("n1", Claim()), ("n1", Claim())), "has two shards on one node"),
    ],
)
def test_inv3_the_shards_of_a_replica_are_numbered_and_apart(bad: tuple[ReplicaShard, ...], words: str) -> None:
    c = serving()
    found = broken(c, *copy_of(c, c.one("m"), "m-aaaaa", shards=bad, fabric="ib0"))
    assert f"m-aaaaa {words}" in said(found)


def test_inv2_several_nodes_without_a_fabric() -> None:
    c = serving()
    loose = {"shards": shards(("n1", Claim()), ("n2", Claim()))}
    assert "invariant 2: m-aaaaa spans nodes without a fabric" in said(
        broken(c, *copy_of(c, c.one("m"), "m-aaaaa", **loose))
    )


def test_inv11_what_is_stored_is_bounded() -> None:
    c = serving()
    long = Refusal(constraint=Constraint.MEMORY, profile="cpu", detail="x" * 20_000)
    replica, state = c.one("m"), c.index.model_states.record("m")
    assert state is not None
    fat = msgspec.structs.replace(replica, receipt=Receipt(revision=1, profile="cpu", nearest=(long,)))
    assert "the receipt of" in said(broken(c, (Kind.REPLICA, replica.id, fat)))
    fat_state = msgspec.structs.replace(state, unplaced=Unplaced(revision=1, nearest=(long,)))
    assert "the refusals of m have" in said(broken(c, (Kind.MODEL_STATE, "m", fat_state))).replace(" has ", " have ")
    orders = [(Kind.ASSIGNMENT, f"n1/m-{i:05d}.0", order(c, replica)) for i in range(61)]
    assert "n1 has more than 60 orders" in said(broken(c, *orders))


def test_violations_become_one_error() -> None:
    require([])
    with pytest.raises(InvariantError, match="invariant 3: a; invariant 5: b") as caught:
        require([Violation(number=3, what="a"), Violation(number=5, what="b")])
    assert caught.value.number == 3


def test_inv8_a_missing_replica_without_a_reason() -> None:
    c = serving()
    c.model("big", cpu_profile(400.0))
    c.settle()
    assert check_explained(c.index) == []
    state = c.index.model_states.record("big")
    assert state is not None
    c.write(Kind.MODEL_STATE, "big", msgspec.structs.replace(state, unplaced=None, reason=""))
    assert said(check_explained(c.index)) == "invariant 8: big lacks a replica and nothing says why"
    c.remove_model("big")
    assert check_explained(c.index) == []


def test_inv8_a_node_that_nobody_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    c = serving()
    c.model("big", cpu_profile(400.0))
    c.settle()
    verdicts = explain(Inventory(c.index), model_spec("big", cpu_profile(400.0)))
    monkeypatch.setattr("llmgw.core.invariants.explain", lambda inventory, spec: verdicts[1:])
    assert said(check_explained(c.index)) == "invariant 8: big: a node is not explained for cpu"


def test_inv9_what_has_not_converged_is_named() -> None:
    c = serving()
    assert unconverged(c.index) == []
    c.model("m", cpu_profile(4.0), replicas=2)
    c.step()
    starting, lacking = unconverged(c.index)
    assert starting.endswith(" is placed")
    assert lacking == "m has 1 of 2 replicas ready"
    c.settle()
    c.remove_model("m")
    c.step()
    assert len(unconverged(c.index)) == 2
    c.settle()
    assert unconverged(c.index) == []
    c.node("n3")
    assert unconverged(c.index) == ["n3 is not judged"]
    c.step()
    c.model("m")
    c.settle()
    replica = c.one("m")
    saved = order(c, replica)
    c.meddle((Kind.ASSIGNMENT, c.shard(replica), None))
    c.report(c.shard(replica), ShardPhase.READY, order=saved)
    assert unconverged(c.index) == [f"{c.shard(replica)} runs unassigned"]
    c.model("big", cpu_profile(400.0))
    c.settle()
    assert unconverged(c.index) == [], "what fits nowhere and says so is as it should be"
    c.away(replica.shards[0].node)
    c.back(replica.shards[0].node)
    c.spec("n1")
    c.write(Kind.NODE_STATE, "n1", NodeState(name="n1", liveness=Liveness.RETURNING, since_at=1.0))
    assert unconverged(c.index) == ["n1 is returning"]


# --- a history ------------------------------------------------------------------------------------------------------


def test_inv1_more_memory_promised_than_there_is() -> None:
    c = serving(memory_gb=10.0, nodes=1)
    twin = copy_of(c, c.one("m"), "m-aaaaa")
    assert said(broken(c, *twin)) == f"invariant 1: {20 * GB} bytes are promised on n1, which has {16 * GB}"


def test_inv1_a_memory_that_shrank_is_no_broken_promise() -> None:
    c = serving(memory_gb=10.0, nodes=1)
    c.node("n1", 8)
    none = copy_of(c, c.one("m"), "m-aaaaa", shards=shards(("n1", Claim())))
    assert broken(c, *none) == []


def test_inv3_a_claim_that_ends_unconfirmed() -> None:
    c = serving()
    replica = c.one("m")
    c.remove_model("m")
    c.step()
    gone = [(Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, c.shard(replica), None)]
    found = said(broken(c, *gone))
    assert f"the claim of {replica.id}.0 on {replica.shards[0].node} ended unconfirmed" in found
    assert f"the order for {c.shard(replica)} was deleted unconfirmed" in found


def test_inv3_a_claim_that_is_released_unconfirmed() -> None:
    c = serving()
    replica = c.one("m")
    released = msgspec.structs.replace(replica, shards=(msgspec.structs.replace(replica.shards[0], released=True),))
    assert "ended unconfirmed" in said(broken(c, (Kind.REPLICA, replica.id, released)))


@pytest.mark.parametrize(("left_out", "words"), [(Kind.SECRET, "its secret"), (Kind.ASSIGNMENT, "its order for n")])
def test_inv3_a_replica_that_appears_in_part(left_out: Kind, words: str) -> None:
    c = serving()
    records = [each for each in copy_of(c, c.one("m"), "m-aaaaa") if each[0] is not left_out]
    assert f"m-aaaaa appeared without {words}" in said(broken(c, *records))


def test_inv3_an_order_that_claims_something_else_than_the_replica() -> None:
    c = serving()
    records = copy_of(c, c.one("m"), "m-aaaaa")
    kind, name, made = records[-1]
    assert isinstance(made, Assignment)
    records[-1] = (kind, name, msgspec.structs.replace(made, claim=Claim()))
    assert "appeared without its order" in said(broken(c, *records))


def restoring(c: Cluster) -> None:
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")))


def test_inv3_a_placement_before_all_nodes_reported_to_a_restored_store() -> None:
    c = serving()
    records = copy_of(c, c.one("m"), "m-aaaaa")
    restoring(c)
    assert "m-aaaaa was placed before all nodes had reported" in said(broken(c, *records))


def test_inv6_a_retirement_before_all_nodes_reported_to_a_restored_store() -> None:
    c = serving()
    replica = c.one("m")
    c.remove_model("m")
    restoring(c)
    leaving = msgspec.structs.replace(replica, phase=P.DRAINING, retire=Retire.MODEL_REMOVED)
    assert "was retired before all nodes had reported" in said(broken(c, (Kind.REPLICA, replica.id, leaving)))


def test_inv6_the_rule_after_a_restore_ends_before_everybody_has_reported() -> None:
    c = serving()
    restoring(c)
    c.back("n1")
    found = said(broken(c, (Kind.FLEET, "", Fleet(incarnation="store-2"))))
    assert found == "invariant 6: the store counts as adopted, and n2 has not reported to it"


def test_inv3_an_engine_that_starts_on_what_another_still_holds() -> None:
    c = serving(memory_gb=10.0, nodes=1)
    replica = c.one("m")
    report = c.index.reports.record(c.shard(replica))
    assert report is not None
    stray = msgspec.structs.replace(order(c, replica), replica="x-aaaaa")
    other = msgspec.structs.replace(report, replica="x-aaaaa", assigned=False, order=stray, phase=ShardPhase.STARTING)
    waiting = msgspec.structs.replace(other, pid=None)
    assert broken(c, (Kind.SHARD, "n1/x-aaaaa.0", waiting)) == [], "it has no process yet"
    assert f"x-aaaaa started on n1, where {20 * GB} of {16 * GB} bytes are held" in said(
        broken(c, (Kind.SHARD, "n1/x-aaaaa.0", other))
    )


def test_inv3_an_engine_that_starts_on_a_gpu_another_still_holds() -> None:
    c = serving(nodes=1)
    replica = c.one("m")
    report = c.index.reports.record(c.shard(replica))
    assert report is not None
    gpu = Claim(gpus=(GpuClaim(uuid="GPU-1"),))
    saved = msgspec.structs.replace(order(c, replica), claim=gpu)
    reports = [
        msgspec.structs.replace(
            report, replica=name, assigned=False, order=msgspec.structs.replace(saved, replica=name)
        )
        for name in ("x-aaaaa", "x-bbbbb")
    ]
    assert broken(c, (Kind.SHARD, "n1/x-aaaaa.0", reports[0])) == []
    assert said(broken(c, (Kind.SHARD, "n1/x-bbbbb.0", reports[1]))) == (
        "invariant 3: x-bbbbb started on GPU-1, which x-aaaaa holds"
    )


def test_inv3_running_by_claims_alone_is_no_crowd_even_if_memory_shrank() -> None:
    c = Cluster()
    c.node("n1", 16)
    c.model("m", cpu_profile(8.0), replicas=2)
    c.step()
    c.node("n1", 8)
    c.answer()  # checked as it happens


@pytest.mark.parametrize("phase", [ShardPhase.DRAINING, ShardPhase.STOPPING, ShardPhase.STOPPED])
def test_inv5_a_shard_that_stops_unasked(phase: ShardPhase) -> None:
    c = serving()
    name, report = c.shard(c.one("m")), c.index.reports.record(c.shard(c.one("m")))
    assert report is not None
    stopped = msgspec.structs.replace(report, phase=phase)
    c.checker.stops_on_exit = True
    assert broken(c, (Kind.SHARD, name, stopped)) == []
    c.checker.stops_on_exit = False
    assert broken(c, (Kind.SHARD, name, report)) == []
    assert "without an order" in said(broken(c, (Kind.SHARD, name, stopped)))


def test_inv5_a_shard_may_fail_by_itself_or_stop_as_its_node_was_told_before() -> None:
    c = serving(replicas=2)
    one, two = c.replicas("m")
    report = c.index.reports.record(c.shard(two))
    assert report is not None
    told = msgspec.structs.replace(order(c, two), desired=Desired.STOPPED)
    c.meddle((Kind.ASSIGNMENT, c.shard(two), None))
    stopping = msgspec.structs.replace(report, phase=ShardPhase.STOPPING, assigned=False, order=told)
    assert broken(c, (Kind.SHARD, c.shard(two), stopping)) == []
    failed = msgspec.structs.replace(report, replica=one.id, node=one.shards[0].node, phase=ShardPhase.FAILED)
    assert broken(c, (Kind.SHARD, c.shard(one), failed)) == []


Retired = Callable[[Cluster, Replica], None]


def nothing(c: Cluster, replica: Replica) -> None:
    pass


@pytest.mark.parametrize("why", [None, *(each for each in Retire if each not in (Retire.UNKNOWN, Retire.ROLLED))])
def test_inv6_a_retirement_for_a_reason_that_does_not_hold(why: Retire | None) -> None:
    c = serving()
    replica = c.one("m")
    c.away(replica.shards[0].node)
    c.step()
    phase = P.FAILED if why is Retire.FAILED else P.DRAINING
    leaving = msgspec.structs.replace(replica, phase=phase, retire=why)
    found = said(broken(c, (Kind.REPLICA, replica.id, leaving)))
    name = "nothing" if why is None else why.value
    assert f"{replica.id} was retired for {name}, which does not hold" in found


def test_inv6_the_last_route_of_a_wanted_model_goes() -> None:
    c = serving()
    replica = c.one("m")
    node = replica.shards[0].node
    c.spec(node, drain=True)
    leaving = msgspec.structs.replace(replica, phase=P.DRAINING, retire=Retire.DRAINED)
    assert said(broken(c, (Kind.REPLICA, replica.id, leaving))) == "invariant 6: a commit left m without a route"


def test_inv6_a_node_that_is_there_is_declared_lost() -> None:
    c = serving()
    lost = NodeState(name="n1", liveness=Liveness.LOST, since_at=c.now.wall_s)
    assert said(broken(c, (Kind.NODE_STATE, "n1", lost))) == "invariant 6: n1 was declared Lost while it has a session"


def test_inv6_too_many_nodes_are_declared_lost_at_once() -> None:
    c = serving(nodes=5)
    for name in ("n3", "n4"):
        c.away(name)
    c.step()
    lost = [NodeState(name=name, liveness=Liveness.LOST, since_at=c.now.wall_s) for name in ("n3", "n4")]
    found = broken(c, *((Kind.NODE_STATE, each.name, each) for each in lost))
    assert said(found) == "invariant 6: 2 nodes were declared Lost within a minute"


# --- the fence ------------------------------------------------------------------------------------------------------


def fenced() -> tuple[Index, Checker]:
    checker = Checker()
    index = checker.index
    leader = Leader(id="c1", address="a", version="1", pid=1)
    index.apply(
        [
            Change(ref=Ref(Kind.META), mod_revision=1, create_revision=1, record=StoreMeta(incarnation="s")),
            Change(ref=Ref(Kind.LEADER), mod_revision=5, create_revision=5, record=leader),
            Change(ref=Ref(Kind.HEAD), mod_revision=6, create_revision=6, record=Head(commits=7, term=5)),
        ],
        revision=6,
    )
    return index, checker


def wrote(*records: Record, revision: int = 8) -> list[Change]:
    kinds = {Head: Kind.HEAD, Fleet: Kind.FLEET, Facts: Kind.FACTS}
    return [
        Change(
            ref=Ref(kinds[type(record)], "n1" if isinstance(record, Facts) else ""),
            mod_revision=revision,
            create_revision=1,
            record=record,
        )
        for record in records
    ]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((Fleet(incarnation="s"), Head(commits=8, term=5)), ""),
        ((Facts(node="n1", boot_id="b"),), ""),
        ((Fleet(incarnation="s"),), "a write under plan/ left plan/head as it was"),
        ((Fleet(incarnation="s"), Head(commits=9, term=5)), "plan/head went from 7 to 9"),
        ((Head(commits=7, term=5),), "plan/head went from 7 to 7"),
        ((Fleet(incarnation="s"), Head(commits=8, term=4)), "term 4 wrote while term 5 reigned"),
    ],
)
def test_inv4_every_write_of_a_leader_extends_the_head_in_its_own_term(records: tuple[Record, ...], words: str) -> None:
    _, checker = fenced()
    found = said(checker.advance(wrote(*records), revision=8))
    assert found == (f"invariant 4: {words}" if words else "")


def test_inv4_nobody_leads_and_somebody_writes() -> None:
    index, checker = fenced()
    index.apply([Change(ref=Ref(Kind.LEADER), mod_revision=7)], revision=7)
    found = said(checker.advance(wrote(Fleet(incarnation="s"), Head(commits=8, term=5)), revision=8))
    assert found == "invariant 4: term 5 wrote while term None reigned"
