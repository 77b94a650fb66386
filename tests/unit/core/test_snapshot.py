"""The index: a fold of changes, with its joins, its dirty set, and what can't be read."""

from __future__ import annotations

from copy import deepcopy

import msgspec

from llmgw.core.catalog import Alias
from llmgw.core.draft import Draft
from llmgw.core.inventory import node_inventory
from llmgw.core.node import Liveness, NodeState
from llmgw.core.plan import Delete
from llmgw.core.record import Generation
from llmgw.core.snapshot import CHANGED_MIN, Change, Dirty, Index, Kind, Ref, Row
from llmgw.testing.cluster import Cluster


def serving() -> Cluster:
    c = Cluster()
    c.node("n1")
    c.node("n2")
    c.model("m", replicas=2)
    c.settle()
    return c


def listing(index: Index) -> list[Change]:
    return [
        Change(ref=ref, mod_revision=row.mod_revision, create_revision=row.create_revision, record=row.record)
        for ref, row in index.rows()
    ]


def joins(index: Index) -> list[dict[str, set[str]]]:
    return [
        dict(each)
        for each in (
            index.replicas_of, index.replicas_on, index.assignments_on, index.assignments_of, index.reports_on,
            index.reports_of,
        )
    ]  # fmt: skip


def test_a_listing_gives_the_same_index_as_the_history_that_led_to_it() -> None:
    c = serving()
    fresh = Index()
    fresh.reset(reversed(listing(c.index)), revision=c.index.revision)
    assert dict(fresh.rows()) == dict(c.index.rows())
    assert joins(fresh) == joins(c.index)
    assert fresh.standing == c.index.standing
    assert fresh.revision == c.index.revision
    assert fresh.take_dirty().everything


def test_a_listing_made_to_be_sure_leaves_alone_what_stands_just_so() -> None:
    c = serving()
    replica, facts = c.replicas("m")[0], c.index.facts.record("n1")
    assert facts is not None
    kept = {name: node_inventory(c.index, name) for name in ("n1", "n2")}
    again = [msgspec.structs.replace(each, record=deepcopy(each.record)) for each in listing(c.index)]
    tick = c.index.tick
    c.index.reset(again, revision=c.index.revision)
    assert c.index.changed_nodes_since(tick) == []
    assert all(node_inventory(c.index, name) is each for name, each in kept.items())
    assert c.index.take_dirty().everything
    other = msgspec.structs.replace(facts, memory_bytes=5)
    changed = [msgspec.structs.replace(each, record=other) if each.record == facts else each for each in again]
    c.index.reset(changed, revision=c.index.revision)
    assert c.index.facts.record("n1") == other, "the same revision may be another store's"
    assert c.index.changed_nodes_since(tick) == ["n1"]
    assert c.replicas("m")[0] == replica


def test_a_reset_drops_what_is_gone_and_goes_back_in_revisions() -> None:
    c = serving()
    c.index.reset([], revision=3)
    assert not list(c.index.rows())
    assert joins(c.index) == [{}] * 6
    assert c.index.revision == 3


def test_a_value_that_cannot_be_read_keeps_the_last_good_one() -> None:
    c = serving()
    model = c.index.models.record("m")
    c.spoil(Kind.MODEL, "m")
    assert c.index.models.record("m") == model
    assert c.index.corrupt() == [(Ref(Kind.MODEL, "m"), "not JSON")]
    bad = Change(ref=Ref(Kind.MODEL, "m"), mod_revision=99, corrupt="not JSON")
    c.index.reset([bad], revision=99)
    assert c.index.models.record("m") == model, "it survives a listing as well"
    fresh = Index()
    fresh.reset([bad], revision=99)
    assert fresh.models.record("m") is None
    assert fresh.models.names() == ["m"]
    assert list(fresh.models.records()) == []
    c.index.apply([Change(ref=Ref(Kind.MODEL, "m"), mod_revision=100)], revision=100)
    assert c.index.corrupt() == []


def test_what_is_dirty_follows_from_what_changed() -> None:
    c = serving()
    replica = c.replicas("m")[0]
    node, name = replica.shards[0].node, c.shard(replica)
    secret = c.index.secrets.record(replica.id)
    cases: list[tuple[Kind, str, set[str], set[str]]] = [
        (Kind.MODEL, "m", {"m"}, set()),
        (Kind.MODEL_STATE, "m", {"m"}, set()),
        (Kind.SESSION, "n1", {"m"}, {"n1"}),
        (Kind.FACTS, "n1", set(), {"n1"}),
        (Kind.NODE_STATE, "n1", {"m"}, {"n1"}),
        (Kind.SECRET, replica.id, {"m"}, {node}),
        (Kind.SHARD, name, {"m"}, {node}),
        (Kind.ASSIGNMENT, name, {"m"}, {node}),
        (Kind.REPLICA, replica.id, {"m"}, {node}),
    ]
    assert secret is not None
    for kind, each, models, nodes in cases:
        row = c.index.row(Ref(kind, each))
        assert row is not None
        c.index.take_dirty()
        c.index.swap(Ref(kind, each), row)
        assert c.index.take_dirty() == Dirty(models=models, nodes=nodes), kind
    for kind, expected in ((Kind.META, Dirty(everything=True)), (Kind.FLEET, Dirty(fleet=True))):
        row = c.index.row(Ref(kind))
        assert row is not None
        c.index.swap(Ref(kind), row)
        assert c.index.take_dirty() == expected, kind


def test_facts_concern_a_nodes_replicas_where_these_depend_on_them_and_always_who_waits_for_room() -> None:
    c = serving()
    facts = c.index.facts.record("n1")
    assert facts is not None
    for changed, models in (
        (msgspec.structs.replace(facts, memory_bytes=1, labels={"a": "b"}, weights=()), set()),
        (msgspec.structs.replace(facts, engines=None), {"m"}),
        (msgspec.structs.replace(facts, gpus=()), {"m"}),
        (None, {"m"}),
    ):
        c.write(Kind.FACTS, "n1", facts)
        c.index.take_dirty()
        c.write(Kind.FACTS, "n1", changed)
        assert c.index.take_dirty() == Dirty(models=models, nodes={"n1"}), changed


def test_what_speaks_of_a_replica_that_is_not_there_still_concerns_its_node() -> None:
    c = serving()
    replica = c.replicas("m")[0]
    node, name = replica.shards[0].node, c.shard(replica)
    c.meddle((Kind.REPLICA, replica.id, None))
    for kind in (Kind.SHARD, Kind.ASSIGNMENT):
        c.index.take_dirty()
        c.index.swap(Ref(kind, name), c.index.row(Ref(kind, name)))
        assert c.index.take_dirty() == Dirty(models={"m"}, nodes={node}), kind


def test_what_decides_nothing_dirties_nothing() -> None:
    index = Index()
    index.apply([Change(ref=Ref(Kind.GENERATION), mod_revision=1, record=Generation(number=0))], revision=1)
    index.take_dirty()
    index.apply(
        [
            Change(ref=Ref(Kind.GENERATION), mod_revision=1, record=Generation(number=1)),
            Change(ref=Ref(Kind.ALIAS, "a"), mod_revision=1, record=Alias(name="a", model="m")),
        ],
        revision=1,
    )
    assert not index.take_dirty()
    assert index.generation == Row(record=Generation(number=1), mod_revision=1, create_revision=0)
    assert index.aliases.record("a") == Alias(name="a", model="m")


def test_a_replica_that_moves_dirties_both_nodes_and_both_models() -> None:
    c = serving()
    replica = c.replicas("m")[0]
    node = replica.shards[0].node
    other = "n1" if node == "n2" else "n2"
    moved = msgspec.structs.replace(
        replica, model="x", shards=(msgspec.structs.replace(replica.shards[0], node=other),)
    )
    c.index.take_dirty()
    c.meddle((Kind.REPLICA, replica.id, moved))
    dirty = c.index.take_dirty()
    assert (dirty.models, dirty.nodes) == ({"m", "x"}, {"n1", "n2"})
    assert replica.id not in c.index.replicas_of["m"]
    assert replica.id in c.index.replicas_on[other]


def test_an_unreadable_record_coming_or_going_concerns_everything_and_one_of_a_node_who_is_there() -> None:
    c = serving()
    replica = c.replicas("m")[0]
    for kind, name, expected in (
        (Kind.FACTS, "n1", Dirty(models={"m"}, nodes={"n1"})),
        (Kind.SESSION, "n1", Dirty(models={"m"}, nodes={"n1"})),
        (Kind.MODEL, "m", Dirty(models={"m"}, everything=True)),
        (Kind.REPLICA, replica.id, Dirty(models={"m"}, nodes={replica.shards[0].node}, everything=True)),
    ):
        c.index.take_dirty()
        c.spoil(kind, name)
        assert c.index.take_dirty() == expected, kind
        c.meddle((kind, name, None))
        assert c.index.take_dirty() == expected, kind
        assert not c.index.corrupted


def test_what_was_worked_out_for_a_node_is_dropped_with_any_record_of_it() -> None:
    c = serving()
    replica = c.replicas("m")[0]
    node = replica.shards[0].node
    for ref in (
        Ref(Kind.FACTS, node), Ref(Kind.SESSION, node), Ref(Kind.NODE_STATE, node), Ref(Kind.REPLICA, replica.id),
        Ref(Kind.ASSIGNMENT, c.shard(replica)), Ref(Kind.SHARD, c.shard(replica)),
    ):  # fmt: skip
        kept = node_inventory(c.index, node)
        assert node_inventory(c.index, node) is kept
        row = c.index.row(ref)
        c.index.swap(ref, row)
        assert node_inventory(c.index, node) is not kept, ref
        assert node_inventory(c.index, node) == kept


def test_a_name_that_no_shard_has_joins_nothing() -> None:
    index = Index()
    index.swap(Ref(Kind.SHARD, "odd"), Row(record=None, mod_revision=1, create_revision=1, corrupt="odd"))
    assert joins(index) == [{}] * 6
    assert index.row(Ref(Kind.SHARD, "odd")) is not None
    index.swap(Ref(Kind.SHARD, "odd"), None)
    assert index.swap(Ref(Kind.SHARD, "odd"), None) is None


def test_nodes_are_those_with_a_session_facts_or_a_state() -> None:
    c = Cluster()
    c.node("n2")
    c.spec("n3", cordon=True)
    c.write(Kind.NODE_STATE, "n1", NodeState(name="n1", liveness=Liveness.LOST, since_at=1.0))
    assert c.index.nodes() == ["n1", "n2"]
    assert Kind.META.many is False
    assert Kind.FACTS.many is True


def test_whoever_derives_something_learns_which_nodes_changed() -> None:
    c = serving()
    replica = c.replicas("m")[0]
    node = replica.shards[0].node
    tick = c.index.tick
    assert c.index.changed_nodes_since(tick) == []
    c.spec("n1", cordon=True)
    c.spec("n2", cordon=True)
    c.spec("n1", cordon=False)
    assert c.index.changed_nodes_since(tick) == ["n1", "n2"], "each once, the latest first"
    tick = c.index.tick
    with Draft(c.index) as draft:
        draft.emit("end", Delete(ref=Ref(Kind.REPLICA, replica.id)))
        assert c.index.changed_nodes_since(tick) == [node]
        tick = c.index.tick
    assert c.index.changed_nodes_since(tick) == [node], "what is taken back has changed once more"


def test_of_how_many_nodes_the_last_change_is_known_is_bounded() -> None:
    index = Index()
    for number in range(CHANGED_MIN + 3):
        index.swap(Ref(Kind.FACTS, f"n{number}"), None)
    assert index.changed_nodes_since(0) is None
    assert index.changed_nodes_since(2) is None
    known = index.changed_nodes_since(3)
    assert known is not None
    assert len(known) == CHANGED_MIN
    assert known[-1] == "n3"
