"""What may happen to a cluster on a bare index: nodes, GPUs, engines, people, leaders, the store, and time.

Each happening reads its choices from a tape (`llmgw.testing.machines.Dice`), so that a history can be drawn, shrunk and
printed as names with bytes. Agents do at once what they are ordered to, right or wrong: whether that was right to order
is judged by the cluster's checker as it happens.
"""

# ruff: noqa: ARG001, D103  # all happenings take the same, and few need all of it; the name says what each is

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from llmgw.core import autoscale
from llmgw.core.catalog import ModelSpec
from llmgw.core.live import Sample, Total
from llmgw.core.node import Facts, GpuHealth
from llmgw.core.plan import Wake
from llmgw.core.record import Recover, StoreMeta
from llmgw.core.replica import GONE, ShardPhase
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB, stepped_s
from llmgw.testing.cluster import Cluster
from llmgw.testing.clusters import MODELS, NODES, move_in
from llmgw.testing.machines import THEMES, Dice, facts_of, gpus_of, spec_of, spoilt, wish_of

SECONDS: Final = (1.0, 6.0, 45.0, 70.0, 350.0, 2000.0)

Turn = Callable[[Cluster], None]
"""One pass of the leader, with everything that must hold of it."""

Happening = Callable[[Cluster, Dice, Turn], None]


def running(c: Cluster) -> list[str]:
    """Names of shards that may run, by what their nodes reported last."""
    rows = c.index.reports.items()
    return sorted(name for name, row in rows if row.record is not None and row.record.phase not in GONE)


def _some(names: Sequence[str], dice: Dice) -> str | None:
    return dice.pick(names) if names else None


def _here(c: Cluster, dice: Dice) -> Facts | None:
    """The facts of some node."""
    name = _some(sorted(c.index.facts), dice)
    return None if name is None else c.index.facts.record(name)


# --- nodes ----------------------------------------------------------------------------------------------------------


def node(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A node joins, or registers again and says other things of itself."""
    name = dice.pick(NODES)
    facts = facts_of(name, dice)
    known = c.index.facts.record(name)
    if known is not None:  # the same machine: what is in it does not change with each start of its agent
        facts = msgspec.structs.replace(known, memory_bytes=facts.memory_bytes, engines=facts.engines)
    c.write_all((Kind.FACTS, name, facts), (Kind.SESSION, name, c.session(name)))


def away(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (name := _some(c.index.sessions.names(), dice)) is not None:
        c.away(name)


def back(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (name := _some([each for each in c.index.facts.names() if each not in c.index.sessions], dice)) is not None:
        c.back(name)


def reboot(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A machine starts again: its agent starts what it had been told to run before anybody tells it anything."""
    if (name := _some(c.index.facts.names(), dice)) is None:
        return
    reports = [c.index.reports.record(each) for each in sorted(c.index.reports_on.get(name, ()))]
    again = [
        msgspec.structs.replace(report, phase=ShardPhase.STARTING, incarnation="i2", phase_at=c.now.wall_s)
        for report in reports
        if report is not None and report.phase in (ShardPhase.STARTING, ShardPhase.READY)
    ]
    records = [(Kind.SHARD, f"{name}/{report.replica}.{report.rank}", report) for report in again]
    c.write_all((Kind.SESSION, name, c.session(name)), *records)


def vanish(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A node is gone for so long that it is lost, unless the guard doubts it; the leader looks at it all the while."""
    away(c, dice, turn)
    turn(c)
    c.advance(301.0)
    turn(c)
    if dice.one_in(2):
        c.answer(ready=not dice.one_in(3))


def memory(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (facts := _here(c, dice)) is not None:
        gb = dice.pick(dice.theme.memory_gb)
        changed = msgspec.structs.replace(facts, memory_bytes=None if gb is None else round(gb * GB))
        c.write(Kind.FACTS, facts.node, changed)


def engines(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (facts := _here(c, dice)) is not None:
        c.write(Kind.FACTS, facts.node, msgspec.structs.replace(facts, engines=dice.pick(dice.theme.engines)))


def fabrics(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (facts := _here(c, dice)) is not None:
        c.write(Kind.FACTS, facts.node, msgspec.structs.replace(facts, fabrics=dice.pick(dice.theme.fabrics)))


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpu_trouble(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A GPU gets a fault or a guest, or the driver says odd things of it; or it is gone; or the driver hangs."""
    facts = _here(c, dice)
    if facts is None or not facts.gpus:
        return
    how = dice.below(6)
    if how == 5:
        gpus = None
    elif how == 4:
        gpus = facts.gpus[1:]
    else:
        gpus = tuple(spoilt(facts.gpus, dice))
    c.write(Kind.FACTS, facts.node, msgspec.structs.replace(facts, gpus=gpus))


def gpus_mended(c: Cluster, dice: Dice, turn: Turn) -> None:
    """The driver sees all GPUs and all of them are well; now and then they have been counted anew."""
    facts = _here(c, dice)
    if facts is None:
        return
    gpus = facts.gpus or gpus_of(facts.node, dice) or ()
    mended = [
        msgspec.structs.replace(gpu, health=GpuHealth.OK, fault="", foreign=0, foreign_bytes=0)
        for gpu in {gpu.uuid: gpu for gpu in gpus}.values()
    ]
    order = reversed(mended) if dice.one_in(3) else mended
    counted = tuple(msgspec.structs.replace(gpu, index=i) for i, gpu in enumerate(order))
    c.write(Kind.FACTS, facts.node, msgspec.structs.replace(facts, gpus=counted))


# --- engines --------------------------------------------------------------------------------------------------------


def answer(c: Cluster, dice: Dice, turn: Turn) -> None:
    """All agents do what they are ordered to, or some of them; engines may still be loading."""
    mask, ready = dice.pick((255, 255, dice.below(256))), not dice.one_in(4)
    names = [name for i, name in enumerate(c.index.sessions.names()) if mask >> i % 8 & 1]
    if names:
        c.answer(*names, ready=ready)


def fail(c: Cluster, dice: Dice, turn: Turn) -> None:
    live = [name for name in running(c) if name in c.index.assignments and name.partition("/")[0] in c.index.sessions]
    if (name := _some(live, dice)) is not None:
        c.saved.pop(name, None)
        c.report(name, ShardPhase.FAILED, reason="exit 1")


# --- people ---------------------------------------------------------------------------------------------------------


def _model(c: Cluster, dice: Dice) -> ModelSpec | None:
    name = _some(c.index.models.names(), dice)
    return None if name is None else c.index.models.record(name)


def model(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A model is applied, new or otherwise than before."""
    name = dice.pick(MODELS)
    c.apply_model(spec_of(name, dice))


def scale(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (spec := _model(c, dice)) is not None:
        low = dice.below(5)
        scaling = msgspec.structs.replace(spec.scaling, min=low, max=max(1, low + dice.pick((0, 2))))
        c.apply_model(msgspec.structs.replace(spec, scaling=scaling))


def relaunch(c: Cluster, dice: Dice, turn: Turn) -> None:
    """Another context is wanted, so that all replicas are to be rolled; or only what acts without a restart."""
    if (spec := _model(c, dice)) is not None and spec.profiles:
        fields: dict[str, object] = dice.pick(
            ({"context": 8192}, {"context": 4096}, {"drain_s": 5.0}, {"priority": 20}, {"node_selector": {"zone": "x"}})
        )
        at = dice.below(len(spec.profiles))
        changed = msgspec.structs.replace(spec.profiles[at], **fields)
        profiles = (*spec.profiles[:at], changed, *spec.profiles[at + 1 :])
        c.apply_model(msgspec.structs.replace(spec, profiles=profiles))


def remove(c: Cluster, dice: Dice, turn: Turn) -> None:
    if (spec := _model(c, dice)) is not None:
        c.remove_model(spec.name)


def say(c: Cluster, dice: Dice, turn: Turn) -> None:
    """People say something of a node: cordon, drain, release it, label it, forget it; or take all of that back."""
    name, said = dice.pick(c.index.nodes() or NODES), dice.below(7)
    state = c.index.node_states.record(name)
    c.spec(
        name,
        cordon=said == 1,
        drain=said == 2,
        release=state.lease if said == 3 and state is not None else None,
        labels={"zone": "x"} if said == 4 else {},
        forget=f"boot-{name}" if said == 5 and name not in c.index.sessions else None,
    )


def wish(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A version of an engine is wished, another one, or none any more."""
    wanted = wish_of(dice)
    c.write(Kind.ENGINE, wanted.name, None if dice.one_in(3) else wanted)


def load(c: Cluster, dice: Dice, turn: Turn) -> None:
    """Load is sampled a few times; now and then a gateway says nothing."""
    missing = "" if not dice.one_in(4) else "gateway g1 has not told its load lately"
    for _ in range(dice.pick((1, 3))):
        requests = {name: dice.pick((0, 1, 9, 40)) for name in c.index.models.names()}
        totals = {name: Total(queued=count, ended_mono_s=c.now.mono_s - 5.0) for name, count in requests.items()}
        seen = autoscale.observe(c.view.load, Sample(totals=totals, missing=missing), index=c.index, now=c.now)
        c.view = msgspec.structs.replace(c.view, load=seen)
        c.index.dirty.models |= autoscale.moved(c.index, seen, now=c.now)  # as the loop does
        c.advance(10.0)


# --- leaders and time -----------------------------------------------------------------------------------------------


def wait(c: Cluster, dice: Dice, turn: Turn) -> None:
    before = c.now
    c.advance(dice.pick(SECONDS), step_wall_s=dice.pick((0.0, 0.0, 0.0, 900.0, -900.0)))
    if abs(stepped_s(before, c.now)) > 1.0:
        c.index.dirty.everything = True  # as the loop does


def leader(c: Cluster, dice: Dice, turn: Turn) -> None:
    c.new_leader()


def run(c: Cluster, dice: Dice, turn: Turn) -> None:
    turn(c)


# --- what only trouble brings ---------------------------------------------------------------------------------------


def write_trouble(c: Cluster, dice: Dice, turn: Turn) -> None:
    c.view = msgspec.structs.replace(c.view, write_failed_mono_s=c.now.mono_s)
    c.wakes[Wake.FLEET, ""] = c.now.mono_s  # as the loop does: a pass is due after a failed write


def lose_order(c: Cluster, dice: Dice, turn: Turn) -> None:
    """Somebody deletes an order, with its replica or its secret, or all of it."""
    name = _some(c.index.assignments.names(), dice)
    row = None if name is None else c.index.assignments[name]
    if name is None or row is None or row.record is None:
        return
    what = dice.pick(("order", "replica", "order and replica", "order and secret", "replica", "all"))
    gone = [(Kind.ASSIGNMENT, name, None)] if what != "replica" else []
    gone += [(Kind.REPLICA, row.record.replica, None)] if "replica" in what or what == "all" else []
    gone += [(Kind.SECRET, row.record.replica, None)] if "secret" in what or what == "all" else []
    c.meddle(*gone)


def newcomer(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A replica that nobody here has placed is in the tree, or runs without being in it."""
    move_in(c, dice)


SPOILT: Final = (
    Kind.REPLICA, Kind.ASSIGNMENT, Kind.SHARD, Kind.FACTS, Kind.SESSION, Kind.NODE_STATE, Kind.NODE_SPEC, Kind.MODEL,
    Kind.MODEL_STATE, Kind.ENGINE, Kind.FLEET, Kind.SECRET,
)  # fmt: skip


def spoil(c: Cluster, dice: Dice, turn: Turn) -> None:
    """A record becomes unreadable."""
    kind = dice.pick(SPOILT)
    names = [ref.name for ref, row in c.index.rows() if ref.kind is kind and row.corrupt is None]
    if names:
        c.spoil(kind, dice.pick(names))


def mend(c: Cluster, dice: Dice, turn: Turn) -> None:
    """What could not be read is deleted, or written again as it was."""
    if not c.index.corrupted:
        return
    ref = dice.pick(sorted(c.index.corrupted, key=lambda each: (each.kind.value, each.name)))
    row = c.index.row(ref)
    assert row is not None
    c.meddle((ref.kind, ref.name, row.record if dice.one_in(2) else None))


def restore(c: Cluster, dice: Dice, turn: Turn) -> None:
    """The store comes back as another incarnation; an operator waits for all nodes, or does not."""
    meta = StoreMeta(incarnation=f"store-{c.index.revision}")
    c.meddle((Kind.META, "", meta))
    if dice.one_in(3):
        c.meddle((Kind.RECOVER, "", Recover(incarnation=meta.incarnation)))


def return_all(c: Cluster, dice: Dice, turn: Turn) -> None:
    """Every agent registers again, as after a restore or an outage."""
    for name in c.index.facts.names():
        c.back(name)


USUAL: Final[dict[str, Happening]] = {
    each.__name__: each
    for each in (
        run, answer, node, model, away, back, reboot, vanish, memory, engines, fabrics, gpu_trouble, gpus_mended, fail,
        scale, relaunch, remove, say, wish, load, wait, leader,
    )
}  # fmt: skip
"""What a healthy store and honest people bring about."""

TROUBLE: Final[dict[str, Happening]] = {
    each.__name__: each
    for each in (write_trouble, lose_order, newcomer, spoil, mend, restore, return_all)
}  # fmt: skip

EVERYTHING: Final = USUAL | TROUBLE


def often(happenings: dict[str, Happening]) -> list[str]:
    """Names to draw from: passes and answers more often than the rest, so that histories get somewhere."""
    more = [name for name in ("newcomer", "lose_order") if name in happenings]
    return [*happenings, *["run"] * 4, *["answer"] * 4, "model", "wait", "vanish", *more]


def play(c: Cluster, events: Sequence[tuple[str, bytes]], turn: Turn, *, theme: str = "general") -> None:
    """These things happen, one after the other. `theme`: the scene's."""
    for name, tape in events:
        EVERYTHING[name](c, Dice(tape, THEMES[theme]), turn)
