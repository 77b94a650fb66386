"""What is forecast is what happens: the same change, really made, decided and answered, ends on the same nodes."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.core.catalog import EngineSpec
from llmgw.core.forecast import Forecast, StepAction, forecast
from llmgw.core.ids import CountedIds
from llmgw.core.node import Liveness, NodeState
from llmgw.core.plan import Delete, Put, Write
from llmgw.core.reading import is_live
from llmgw.core.record import Record
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.testing.cluster import Cluster
from llmgw.testing.clusters import MODELS, NODES, Scene, build, scenes
from llmgw.testing.machines import TAPE_LEN, Dice, spec_of

ROUNDS_MAX = 3000


def contents(index: Index) -> tuple[object, ...]:
    """Everything an index holds, and what it would tell a pass."""
    joins = [index.replicas_of, index.replicas_on, index.assignments_on, index.assignments_of]
    joins += [index.reports_on, index.reports_of]
    copies = [{key: frozenset(names) for key, names in join.items()} for join in joins]
    dirty = index.dirty
    marks = (frozenset(dirty.models), frozenset(dirty.nodes), dirty.everything)
    return (dict(index.rows()), index.revision, set(index.corrupted), copies, marks)


def changed(c: Cluster, tape: bytes) -> list[Write]:
    """What people might write: models new, changed, scaled or removed, and another version of an engine."""
    dice = Dice(tape)
    writes: list[Write] = []
    for name in MODELS:
        ref, spec = Ref(Kind.MODEL, name), c.index.models.record(name)
        what = dice.pick(("nothing", "context", "scale", "new", "remove", "context"))
        if what == "new":
            made = spec_of(name, Dice(bytes(dice.below(256) for _ in range(4))))
            writes.append(Put(ref=ref, record=made))
        elif what == "remove":
            writes.append(Delete(ref=ref))
        elif spec is not None and what == "scale":
            count = dice.below(5)
            scaling = msgspec.structs.replace(spec.scaling, min=count, max=max(count, spec.scaling.max, 1))
            writes.append(Put(ref=ref, record=msgspec.structs.replace(spec, scaling=scaling)))
        elif spec is not None and what == "context":
            profiles = tuple(msgspec.structs.replace(each, context=each.context + 1) for each in spec.profiles)
            writes.append(Put(ref=ref, record=msgspec.structs.replace(spec, profiles=profiles)))
    if dice.one_in(4):
        engine = EngineSpec(name="llama.cpp", version=dice.pick(("b2", "b1")))
        writes.append(Put(ref=Ref(Kind.ENGINE, engine.name), record=engine))
    return writes


def happen(c: Cluster, change: list[Write], without: set[str]) -> bool:
    """The change is made and everything takes its course, nodes that are away staying so; whether it came to rest."""
    records: list[tuple[Kind, str, Record | None]] = [
        (write.ref.kind, write.ref.name, write.record if isinstance(write, Put) else None) for write in change
    ]
    for name in sorted(without):
        session = c.index.sessions.record(name)
        state = c.index.node_states.record(name)
        seen = session or state
        lost = NodeState(
            name=name,
            liveness=Liveness.LOST,
            since_at=c.now.wall_s,
            boot_id=None if seen is None else seen.boot_id,
            lease=None if seen is None else seen.lease,
        )
        records += [(Kind.SESSION, name, None), (Kind.NODE_STATE, name, lost)]
    c.meddle(*records)
    for _ in range(ROUNDS_MAX):
        revision = c.index.revision
        c.step()
        c.answer()
        if c.index.revision > revision or c.index.dirty:
            continue
        if not c.wakes:
            return True
        c.advance(max(0.0, min(c.wakes.values()) - c.now.mono_s) + 0.001)
    return False


Places = Counter[tuple[str, str, tuple[str, ...]]]


def really(c: Cluster) -> Places:
    """Where everything is, by model, profile and nodes."""
    live = [replica for replica in c.index.replicas.records() if is_live(replica)]
    return Counter((each.model, each.profile, tuple(shard.node for shard in each.shards)) for each in live)


def foretold(told: Forecast) -> Places:
    return Counter(
        (model.name, step.profile, step.nodes)
        for model in told.models
        for step in model.steps
        if step.action is not StepAction.REMOVE
    )


CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much]


@given(
    scenes(["nothing"], events_max=0),
    st.binary(max_size=TAPE_LEN),
    st.sets(st.sampled_from(NODES), max_size=3),
    st.booleans(),
)
@settings(suppress_health_check=CALM)
def test_what_is_forecast_is_what_happens(scene: Scene, tape: bytes, without: set[str], begun: bool) -> None:
    c = build(scene)
    if begun:
        c.settle()
    c.answer()  # agents have told everything they run
    c.new_leader()
    gone = {name for name in without if name in c.index.nodes()}
    change = changed(c, tape)
    before = contents(c.index)
    told = forecast(c.index, change, without=gone, now=c.now, ids=CountedIds(count=c.ids.count), settings=c.settings)
    assert contents(c.index) == before
    here = {replica.id for replica in c.index.replicas.records() if is_live(replica)}
    assert happen(c, change, gone) == told.settled
    assert foretold(told) == really(c)
    kept = {
        step.replica
        for model in told.models
        for step in model.steps
        if step.action in (StepAction.KEEP, StepAction.STRAND)
    }
    assert kept == {replica.id for replica in c.index.replicas.records() if is_live(replica)} & here
    short = {model.name for model in told.models if model.unplaced is not None}
    assert short == {state.name for state in c.index.model_states.records() if state.unplaced is not None}
