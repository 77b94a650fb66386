"""Random clusters and what may happen to them: what holds of every plan, whatever was there before it.

A failing example prints the scene: tapes that the cluster was built from, and the events that followed, by name.
"""

from __future__ import annotations

from copy import deepcopy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.core.catalog import NodeSpec
from llmgw.core.ids import slug
from llmgw.core.invariants import check_explained, require, unanswered, unconverged
from llmgw.core.node import Liveness
from llmgw.core.plan import Plan, Put
from llmgw.core.replica import Replica, Rollout
from llmgw.core.snapshot import Dirty, Index
from llmgw.testing.apply import copy_of
from llmgw.testing.cluster import Cluster
from llmgw.testing.clusters import Scene, build, scenes
from llmgw.testing.happenings import EVERYTHING, USUAL, often, play
from llmgw.testing.seed import stream

FOLDS = (
    "replicas_of", "replicas_on", "assignments_on", "assignments_of", "reports_on", "reports_of",
    "corrupted", "forming", "standing",
)  # fmt: skip
"""What an index keeps up besides its rows, and must come out the same however the rows came to be there."""


def folds(index: Index) -> dict[str, object]:
    return {name: deepcopy(getattr(index, name)) for name in FOLDS}


def state(index: Index) -> tuple[object, ...]:
    return (dict(index.rows()), index.revision, folds(index))


def shuffled(c: Cluster) -> Cluster:
    """The same cluster, its tree read in another order and nothing remembered of how it came to be."""
    refs = [ref for ref, _ in c.index.rows()]
    stream(c.index.revision, "order").shuffle(refs)
    other = c.copy()
    other.index = copy_of(c.index, refs)
    return other


def turn(c: Cluster) -> None:
    """One incremental pass, with everything that must hold of it."""
    dirty = c.dirty()
    before = state(c.index)
    whole = c.plan()
    plan = c.plan(dirty)
    assert state(c.index) == before, "reconcile left the index changed"
    assert not c.index.dirty, "reconcile left marks"
    assert plan.more or whole.more or plan.groups == whole.groups, (plan.groups, whole.groups)
    other = shuffled(c)
    assert folds(other.index) == folds(c.index), "the index is no fold of its rows"
    assert other.plan().groups == whole.groups, "the order of the input matters"
    bounded(plan)
    placed = fresh(c, plan)
    c.apply(plan)  # checks the invariants after every group
    for replica in placed:
        well_placed(c, replica)
    if not plan.more:
        again, looked = c.plan(), c.plan(c.dirty())
        assert not again.groups, again.groups
        assert not looked.groups, looked.groups
        c.apply(looked)  # what it says of when to look again
        require(check_explained(c.index))
        unheard(c)
        unwoken(c)


def unwoken(c: Cluster) -> None:
    """Until the leader is to look again, time alone changes nothing that it decides."""
    now, view = c.now, c.view
    wake_s = min(c.wakes.values(), default=now.mono_s + 10_000.0) - now.mono_s - 0.01
    if wake_s > 0:
        c.advance(wake_s)
        late = c.plan().groups
        assert not late, (wake_s, late)
    c.now, c.view = now, view


def unheard(c: Cluster) -> None:
    """Whoever runs something unordered, and would hear it, has had a word (5), unless it can't be read what of.

    A gang may wait for its other members, whose nodes have not noticed yet.
    """
    meta, fleet = c.index.meta, c.index.fleet
    assert meta is not None
    if c.index.corrupted or meta.record is None or fleet is None or fleet.record is None:
        return
    if fleet.record.incarnation != meta.record.incarnation:
        return
    for name in unanswered(c.index):
        report = c.index.reports.record(name)
        session = None if report is None else c.index.sessions.record(report.node)
        assert report is not None
        assert session is not None
        waits = report.order is not None and report.order.gang is not None
        assert waits or session.store != meta.record.incarnation, name


def fresh(c: Cluster, plan: Plan) -> list[Replica]:
    """The replicas that a plan places, rather than adopts."""
    records = [write.record for group in plan.groups for write in group.writes if isinstance(write, Put)]
    spoken = (c.index.replicas, c.index.assignments_of, c.index.reports_of)
    return [each for each in records if isinstance(each, Replica) and not any(each.id in names for names in spoken)]


def well_placed(c: Cluster, replica: Replica) -> None:
    """It is where it may be: the parts of that which are no invariants, since they may change later."""
    spec = c.index.models.record(replica.model)
    assert spec is not None
    profile = next(each for each in spec.profiles if each.name == replica.profile)
    wished = c.index.engines.record(profile.engine)
    for shard in replica.shards:
        state, facts = c.index.node_states.record(shard.node), c.index.facts.record(shard.node)
        said = c.index.node_specs.record(shard.node) or NodeSpec(name=shard.node)
        assert state is not None, shard
        assert state.liveness is Liveness.READY, shard
        assert shard.node in c.index.sessions, shard
        assert not said.cordon, shard
        assert not said.drain, shard
        assert facts is not None, shard
        labels = facts.labels | said.labels
        assert all(labels.get(key) == value for key, value in profile.node_selector.items()), shard
        if facts.engines is not None:
            has = {each.id: each for each in facts.engines.builds if each.engine == profile.engine}
            assert facts.engines.probed, shard
            assert replica.build is not None, shard
            build = has[replica.build]
            assert wished is None or build.named or build.version == wished.version, shard


def bounded(plan: Plan) -> None:
    refs = [write.ref for group in plan.groups for write in group.writes]
    assert len(refs) == len(set(refs)), "a place is written twice"
    assert all(len(group.writes) <= 100 for group in plan.groups)


def times(factor: float) -> settings:
    """So many clusters as the profile says, times `factor`: CI repeats the same, the others draw ever new ones."""
    assert settings.default is not None
    calm = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=int(factor * settings.default.max_examples), suppress_health_check=calm)


@given(scenes(often(USUAL), events_min=20, events_max=60))
@times(3)
def test_every_plan_keeps_the_invariants_and_incremental_is_full(scene: Scene) -> None:
    c = build(scene)
    play(c, scene.events, turn, theme=scene.theme)
    turn(c)


@given(scenes(often(EVERYTHING), events_min=20, events_max=60))
@times(2)
def test_the_same_with_lost_and_unreadable_records_and_restores(scene: Scene) -> None:
    c = build(scene)
    play(c, scene.events, turn, theme=scene.theme)
    turn(c)


@given(scenes(often(USUAL), events_min=10), st.integers(0, 200))
@times(0.5)
def test_a_new_leader_goes_on_from_any_prefix_of_a_plan(scene: Scene, cut: int) -> None:
    c = build(scene)
    play(c, scene.events, turn, theme=scene.theme)
    plan = c.plan()
    plan.groups = plan.groups[: cut % (len(plan.groups) + 1)]
    c.apply(plan)
    c.new_leader()
    turn(c)


@given(scenes(often(USUAL), events_min=10))
@times(0.5)
def test_after_trouble_everything_converges_and_explains_itself(scene: Scene) -> None:
    c = build(scene)
    play(c, scene.events, turn, theme=scene.theme)
    for name in c.index.facts.names():
        if name not in c.index.sessions:
            c.back(name)
    for name in c.index.node_specs.names():
        c.spec(name)
    for _ in range(6):  # backoffs, rollouts, lost nodes, and until failures are forgotten: each needs some time
        c.advance(700.0)
        c.settle()
    stopped = [each.name for each in c.index.model_states.records() if each.rollout is Rollout.STOPPED]
    names = tuple(f"{name}{end}" for model in stopped for name, end in ((model, " "), (slug(model), "-")))
    left = [each for each in unconverged(c.index) if not each.startswith(names)]
    assert not left, left
    require(check_explained(c.index))
    revision = c.index.revision
    for _ in range(20):  # and then nothing is written any more, however time passes
        c.advance(97.0)
        c.apply(c.plan(c.dirty()))
        c.apply(c.plan(Dirty(everything=True)))
    assert c.index.revision == revision
