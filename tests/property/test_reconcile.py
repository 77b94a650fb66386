"""Random histories of random clusters of CPU nodes: what holds of every plan, whatever happened before it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.core.catalog import EngineSpec
from llmgw.core.invariants import check_explained, require, unconverged
from llmgw.core.node import Build, EngineFacts
from llmgw.core.plan import Plan
from llmgw.core.record import Recover, StoreMeta
from llmgw.core.replica import GONE, ShardPhase
from llmgw.core.snapshot import Index, Kind
from llmgw.core.units import stepped_s
from llmgw.testing.apply import copy_of
from llmgw.testing.cluster import LLAMA, Cluster, cpu_profile

NODES = [f"n{i}" for i in range(6)]
MODELS = ["a", "b", "org/c", "d"]
MEMORY_GB: list[float | None] = [16.0, 8.0, 4.0, 32.0, None]
NEED_GB: list[float | None] = [1.0, 3.0, 6.0, 12.0, 40.0, None]
ENGINES: list[EngineFacts | None] = [
    EngineFacts(probed=True, builds=(LLAMA,)),
    EngineFacts(probed=True, builds=(Build(engine="llama.cpp", version="b2"),)),
    EngineFacts(probed=True, builds=(LLAMA, Build(engine="llama.cpp", version="b2"))),
    None,
    EngineFacts(probed=True, notes={"llama.cpp": "no build for this processor"}),
    EngineFacts(probed=False),
]
SECONDS = [1.0, 6.0, 45.0, 70.0, 350.0, 2000.0]

Op = tuple[str, int, int, int]


def pick(items: list[str], number: int) -> str | None:
    return items[number % len(items)] if items else None


def running(c: Cluster) -> list[str]:
    rows = c.index.reports.items()
    return sorted(n for n, row in rows if row.record is not None and row.record.phase not in GONE)


# --- what may happen ------------------------------------------------------------------------------------------------


def node(c: Cluster, a: int, b: int, e: int) -> None:
    c.node(
        NODES[a % len(NODES)],
        MEMORY_GB[b % len(MEMORY_GB)],
        engines=ENGINES[e % len(ENGINES)],
        weights=(None, ("a.gguf", "b.gguf"), ("d.gguf",))[b % 3],
        labels={"zone": "xy"[e % 2]},
    )


def away(c: Cluster, a: int, b: int, e: int) -> None:
    c.away(NODES[a % len(NODES)])


def back(c: Cluster, a: int, b: int, e: int) -> None:
    name = NODES[a % len(NODES)]
    if name in c.index.facts and name not in c.index.sessions:
        c.back(name)


def model(c: Cluster, a: int, b: int, e: int) -> None:
    selector = {"zone": "x"} if e % 5 == 4 else {}
    profile = cpu_profile(NEED_GB[b % len(NEED_GB)], context=(4096, 8192)[e // 2 % 2], node_selector=selector)
    spare = (cpu_profile(1.0, name="small", priority=-1, drain_s=5.0),) if e % 7 == 6 else ()
    c.model(MODELS[a % len(MODELS)], profile, *spare, replicas=e % 4)


def scale(c: Cluster, a: int, b: int, e: int) -> None:
    spec = c.index.models.record(MODELS[a % len(MODELS)])
    if spec is not None:
        scaling = msgspec.structs.replace(spec.scaling, min=b % 5, max=max(1, b % 5))
        c.write(Kind.MODEL, spec.name, msgspec.structs.replace(spec, scaling=scaling))


def remove(c: Cluster, a: int, b: int, e: int) -> None:
    c.remove_model(MODELS[a % len(MODELS)])


def say(c: Cluster, a: int, b: int, e: int) -> None:
    name = NODES[a % len(NODES)]
    state = c.index.node_states.record(name)
    lease = None if state is None else state.lease
    forget = f"boot-{name}" if b % 6 == 5 and name not in c.index.sessions else None
    c.spec(name, cordon=b % 6 == 1, drain=b % 6 == 2, release=lease if b % 6 == 3 else None, forget=forget)


def wish(c: Cluster, a: int, b: int, e: int) -> None:
    spec = None if a % 3 == 0 else EngineSpec(name="llama.cpp", version=("b1", "b2")[a % 2])
    c.write(Kind.ENGINE, "llama.cpp", spec)


def answer(c: Cluster, a: int, b: int, e: int) -> None:
    c.answer(*(NODES if a % 2 else [NODES[b % len(NODES)]]), ready=e % 4 != 0)


def fail(c: Cluster, a: int, b: int, e: int) -> None:
    live = [name for name in running(c) if name in c.index.assignments and name.partition("/")[0] in c.index.sessions]
    if (name := pick(live, a)) is not None:
        c.saved.pop(name, None)
        c.report(name, ShardPhase.FAILED, reason="exit 1")


def lose_order(c: Cluster, a: int, b: int, e: int) -> None:
    """Somebody deletes an order, with its replica or its secret, or all of it."""
    name = pick(c.index.assignments.names(), a)
    row = None if name is None else c.index.assignments[name]
    if name is None or row is None or row.record is None:
        return
    gone = [(Kind.ASSIGNMENT, name, None)] if e % 4 != 3 else []
    gone += [(Kind.REPLICA, row.record.replica, None)] if b % 3 == 1 or e % 4 == 3 else []
    gone += [(Kind.SECRET, row.record.replica, None)] if b % 2 == 1 else []
    c.meddle(*gone)


SPOILT = [
    Kind.REPLICA, Kind.ASSIGNMENT, Kind.SHARD, Kind.FACTS, Kind.SESSION, Kind.NODE_STATE, Kind.NODE_SPEC, Kind.MODEL,
    Kind.MODEL_STATE, Kind.ENGINE, Kind.FLEET, Kind.SECRET,
]  # fmt: skip


def spoil(c: Cluster, a: int, b: int, e: int) -> None:
    kind = SPOILT[a % len(SPOILT)]
    names = [ref.name for ref, row in c.index.rows() if ref.kind is kind and row.corrupt is None]
    if (name := pick(names, b)) is not None:
        c.spoil(kind, name)


def mend(c: Cluster, a: int, b: int, e: int) -> None:
    """What could not be read is deleted, or written again as it was."""
    if not c.index.corrupted:
        return
    ref = sorted(c.index.corrupted, key=lambda each: (each.kind.value, each.name))[a % len(c.index.corrupted)]
    row = c.index.row(ref)
    assert row is not None
    c.meddle((ref.kind, ref.name, row.record if b % 2 else None))


def wait(c: Cluster, a: int, b: int, e: int) -> None:
    before = c.now
    c.advance(SECONDS[a % len(SECONDS)], step_wall_s=(0.0, 0.0, 0.0, 900.0, -900.0)[b % 5])
    if abs(stepped_s(before, c.now)) > 1.0:
        c.index.dirty.everything = True  # as the loop does


def vanish(c: Cluster, a: int, b: int, e: int) -> None:
    """A node is gone for so long that it is lost, unless the guard doubts it; the leader looks at it all the while."""
    c.away(NODES[a % len(NODES)])
    turn(c)
    c.advance(301.0)
    turn(c)
    if b % 2:
        c.answer(ready=e % 3 != 0)


def leader(c: Cluster, a: int, b: int, e: int) -> None:
    c.new_leader()


def trouble(c: Cluster, a: int, b: int, e: int) -> None:
    c.view = msgspec.structs.replace(c.view, write_failed_mono_s=c.now.mono_s)
    c.wakes["fleet", ""] = c.now.mono_s  # as the loop does: a pass is due after a failed write


def restore(c: Cluster, a: int, b: int, e: int) -> None:
    """The store comes back as another incarnation; some agents have told it all they run, some have not."""
    meta = StoreMeta(incarnation=f"store-{c.index.revision}")
    c.meddle((Kind.META, "", meta))
    if a % 3 == 0:
        c.meddle((Kind.RECOVER, "", Recover(incarnation=meta.incarnation)))


def run(c: Cluster, a: int, b: int, e: int) -> None:
    turn(c)


OPS: dict[str, Callable[[Cluster, int, int, int], None]] = {
    each.__name__: each
    for each in (
        node, away, back, model, scale, remove, say, wish, answer, fail, lose_order, spoil, mend, wait, vanish, leader,
        trouble, restore, run,
    )
}  # fmt: skip

USUAL = [name for name in OPS if name not in ("lose_order", "spoil", "mend", "restore", "trouble")]


def ops(names: list[str]) -> st.SearchStrategy[list[Op]]:
    """Histories, long enough to get somewhere; passes, answers, nodes and models happen more often than the rest."""
    number = st.integers(0, 11)
    name = st.sampled_from([*names, "run", "run", "run", "answer", "answer", "node", "model"])
    return st.lists(st.tuples(name, number, number, number), min_size=25, max_size=80)


# --- what must hold -------------------------------------------------------------------------------------------------


def same(one: Plan, other: Plan) -> bool:
    return one.groups == other.groups


def state(index: Index) -> tuple[object, ...]:
    joins = [index.replicas_of, index.replicas_on, index.assignments_on, index.assignments_of]
    joins += [index.reports_on, index.reports_of]
    copies = [{key: frozenset(names) for key, names in join.items()} for join in joins]
    return (dict(index.rows()), index.revision, set(index.corrupted), copies)


def turn(c: Cluster) -> None:
    """One incremental pass, with everything that must hold of it."""
    dirty = c.dirty()
    before = state(c.index)
    whole = c.plan()
    plan = c.plan(dirty)
    assert state(c.index) == before, "reconcile left the index changed"
    assert not c.index.dirty, "reconcile left marks"
    assert plan.more or whole.more or same(plan, whole), (plan.groups, whole.groups)
    refs = [write.ref for group in plan.groups for write in group.writes]
    assert len(refs) == len(set(refs)), "a place is written twice"
    assert all(len(group.writes) <= 100 for group in plan.groups)
    c.apply(plan)  # checks the invariants after every group
    if not plan.more:
        again = c.plan()
        assert not again.groups, again.groups


def play(c: Cluster, history: list[Op]) -> None:
    for name, a, b, e in history:
        OPS[name](c, a, b, e)


CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def times(factor: float) -> settings:
    """So many histories as the profile says, times `factor`: CI repeats the same, `explore` draws ever new ones."""
    assert settings.default is not None
    return settings(max_examples=int(factor * settings.default.max_examples), suppress_health_check=CALM)


@given(ops(USUAL))
@times(2)
def test_every_plan_keeps_the_invariants_and_incremental_is_full(history: list[Op]) -> None:
    play(Cluster(), history)


@given(ops(list(OPS)))
@times(2)
def test_the_same_with_lost_and_unreadable_records_and_restores(history: list[Op]) -> None:
    play(Cluster(), history)


@given(ops(USUAL), st.data())
@times(0.5)
def test_the_order_of_the_input_does_not_matter(history: list[Op], data: st.DataObject) -> None:
    c = Cluster()
    play(c, history)
    refs = data.draw(st.permutations([ref for ref, _ in c.index.rows()]))
    other = c.copy()
    other.index = copy_of(c.index, refs)
    assert same(c.plan(), other.plan())


@given(ops(USUAL), st.integers(0, 200))
@times(0.5)
def test_a_new_leader_goes_on_from_any_prefix_of_a_plan(history: list[Op], cut: int) -> None:
    c = Cluster()
    play(c, history)
    plan = c.plan()
    plan.groups = plan.groups[: cut % (len(plan.groups) + 1)]
    c.apply(plan)
    c.new_leader()
    turn(c)


@given(ops(USUAL))
@times(0.5)
def test_after_trouble_everything_converges_and_explains_itself(history: list[Op]) -> None:
    c = Cluster()
    play(c, history)
    for name in NODES:
        if name in c.index.facts and name not in c.index.sessions:
            c.back(name)
        if name in c.index.node_specs:
            c.spec(name)
    for _ in range(4):  # backoffs, rollouts, lost nodes: each of them needs some time
        c.advance(700.0)
        c.settle()
    rolling = [each for each in c.index.model_states.records() if each.reason.startswith("rollout")]
    assert not unconverged(c.index) or rolling, unconverged(c.index)
    require(check_explained(c.index))
