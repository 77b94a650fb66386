"""How many replicas load asks for: up at once, down after a window, to zero when idle, and never on what is unknown."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.autoscale import WINDOW_S, decide, observe, target_load, wanted_replicas
from llmgw.core.catalog import ModelSpec, Profile, Scaling
from llmgw.core.invariants import unconverged
from llmgw.core.live import LOAD_STALE_S, NOTHING, GatewayLoad, Heard, LoadView, ModelLoad, Sample, Total
from llmgw.core.record import StoreMeta
from llmgw.core.replica import ModelState, Replica, ReplicaPhase, Retire, ScaleCause, ScaleState, ShardPhase
from llmgw.core.routing import route_table
from llmgw.core.snapshot import Dirty, Index, Kind
from llmgw.core.units import Now
from llmgw.testing.cluster import Cluster, cpu_profile, model_spec
from llmgw.testing.load import SAMPLE_S, Loads

Q = ScaleCause


def world(low: int = 1, high: int = 8, *profiles: Profile, nodes: int = 4, **scaling: float) -> tuple[Cluster, Loads]:
    """Nodes with room, and the model `m` with `low` … `high` replicas of four slots, settled and sampled once."""
    c = Cluster()
    for n in range(nodes):
        c.node(f"n{n}", 16.0)
    want(c, low, high, *profiles, **scaling)
    c.settle()
    loads = Loads(c)
    loads.tell({})
    loads.sample()
    return c, loads


def want(c: Cluster, low: int, high: int, *profiles: Profile, **scaling: float) -> ModelSpec:
    spec = model_spec("m", *profiles)
    spec = msgspec.structs.replace(spec, scaling=Scaling(min=low, max=high, **scaling))
    c.apply_model(spec)
    return spec


def state(c: Cluster) -> ModelState:
    found = c.index.model_states.record("m")
    assert found is not None
    return found


def scale(c: Cluster) -> ScaleState:
    found = state(c).scale
    assert found is not None
    return found


def live(c: Cluster) -> list[Replica]:
    return [each for each in c.replicas("m") if each.phase is ReplicaPhase.READY]


def until(loads: Loads, holds: Callable[[], bool], *, within_s: float = 7200.0) -> float:
    """Samples until `holds`; returns how long that took."""
    c = loads.cluster
    began_s = c.now.mono_s
    while not holds():
        assert c.now.mono_s - began_s < within_s
        loads.run(SAMPLE_S)
    return c.now.mono_s - began_s


def told(c: Cluster) -> tuple[int, ScaleCause, int | None]:
    found = scale(c)
    return found.wanted, found.cause, found.load


# --- up -------------------------------------------------------------------------------------------------------------


def test_a_model_without_a_range_has_what_the_catalog_says_whatever_the_load() -> None:
    c, loads = world(2, 2)
    revision = c.index.revision
    loads.tell({"m": (50, 50)})
    loads.run(3600)
    assert (len(live(c)), state(c).scale, c.index.revision) == (2, None, revision)


def test_replicas_are_added_at_the_first_sample_at_most_twice_as_many_at_a_time() -> None:
    c, loads = world(1, 8)
    assert told(c) == (1, Q.START, None)
    loads.tell({"m": (4, 15)})  # 19 requests, 4 to a replica
    c.step()
    assert scale(c).wanted == 1, "ordinary load waits for the next sample"
    for wanted in (2, 4, 5):
        loads.run(SAMPLE_S)
        assert told(c) == (wanted, Q.LOAD, 19)
        assert len(live(c)) == wanted
    assert scale(c).target == 4.0
    loads.run(600)
    assert scale(c).wanted == 5


def test_the_catalogs_highest_is_the_highest() -> None:
    c, loads = world(1, 3)
    loads.tell({"m": (0, 10**9)})
    loads.run(120)
    assert told(c) == (3, Q.LOAD, 10**9)
    want(c, 1, 2)
    c.settle()
    assert told(c) == (2, Q.BOUNDS, None)
    assert len(live(c)) == 2
    want(c, 4, 8)
    c.step()
    assert told(c) == (4, Q.BOUNDS, None)


def test_all_gateways_count_together() -> None:
    c, loads = world(1, 8)
    loads.tell({"m": (4, 0)}, gateway="one")
    loads.tell({"m": (3, 2)}, gateway="two")
    loads.run(60)
    assert told(c) == (3, Q.LOAD, 9)


@pytest.mark.parametrize(("load", "wanted"), [(4, 1), (5, 2)])
def test_a_little_more_than_a_replica_is_to_have_changes_nothing(load: int, wanted: int) -> None:
    c, loads = world(1, 8)
    loads.tell({"m": (load, 0)})
    loads.run(900)
    assert scale(c).wanted == wanted


def test_load_within_a_tenth_of_what_the_replicas_are_to_have_changes_nothing() -> None:
    c, loads = world(1, 8, target_load=10)
    loads.tell({"m": (23, 0)})
    loads.run(60)
    assert scale(c).wanted == 3
    want(c, 3, 8, target_load=10)
    for load, wanted in [(33, 3), (34, 4), (36, 4), (44, 4), (45, 5)]:
        loads.tell({"m": (load, 0)})
        loads.run(SAMPLE_S)
        assert scale(c).wanted == wanted, load


def test_the_target_is_the_catalogs_or_what_the_smallest_replica_there_is_serves_at_once() -> None:
    large, small = cpu_profile(12.0, name="large", priority=2, slots=64), cpu_profile(2.0, name="small", slots=16)
    c, loads = world(0, 4, small, large, nodes=1)
    spec = c.index.models.record("m")
    assert spec is not None
    assert target_load(c.index, spec) == 64.0, "placement will try the large one first"
    loads.tell({"m": (0, 1)})
    c.settle()
    assert [each.profile for each in live(c)] == ["large"]
    loads.tell({"m": (70, 1)})
    loads.run(SAMPLE_S)
    assert sorted(each.profile for each in live(c)) == ["large", "small"]
    assert target_load(c.index, spec) == 16.0
    assert target_load(c.index, msgspec.structs.replace(spec, scaling=Scaling(max=4, target_load=2.5))) == 2.5
    assert target_load(Index(), msgspec.structs.replace(spec, profiles=())) == 1.0


# --- down -----------------------------------------------------------------------------------------------------------


def test_replicas_go_only_when_the_highest_load_of_a_whole_window_does_without_them() -> None:
    c, loads = world(1, 8)
    loads.tell({"m": (20, 0)})
    loads.run(60)
    assert scale(c).wanted == 5
    began_s = c.now.mono_s
    loads.tell({"m": (0, 0)})
    loads.run(120)
    loads.tell({"m": (11, 0)})  # three replicas' worth, for a moment
    loads.run(SAMPLE_S)
    loads.tell({"m": (1, 0)})
    until(loads, lambda: scale(c).wanted < 5)
    assert c.now.mono_s - began_s >= WINDOW_S
    assert told(c) == (3, Q.LOAD, 1), "the highest of the window counts, not the last"
    until(loads, lambda: scale(c).wanted < 3)
    assert c.now.mono_s - began_s >= 120 + SAMPLE_S + WINDOW_S
    assert scale(c).wanted == 1
    loads.tell({"m": (0, 0)})
    loads.run(7200)
    assert scale(c).wanted == 1, "the lowest holds, however idle"


def test_a_load_just_below_what_the_replicas_are_to_have_takes_none_away() -> None:
    c, loads = world(20, 20, target_load=1)
    want(c, 1, 30, target_load=1)
    c.settle()
    loads.tell({"m": (18, 0)})
    loads.run(900)
    assert scale(c).wanted == 20
    loads.tell({"m": (17, 0)})
    loads.run(900)
    assert scale(c).wanted == 17


def test_a_load_that_comes_and_goes_within_the_window_leaves_the_number_alone() -> None:
    c, loads = world(1, 8)
    loads.tell({"m": (20, 0)})
    loads.run(60)
    revision = c.index.revision
    for n in range(40):
        loads.tell({"m": (20 if n % 2 else 2, 0)})
        loads.run(120)
    assert (scale(c).wanted, c.index.revision) == (5, revision)


def test_inv11_a_steady_load_is_written_once_and_ordinary_samples_never() -> None:
    c, loads = world(0, 8)
    loads.tell({"m": (3, 6)})
    loads.run(120)
    assert scale(c).wanted == 3
    revision, passes = c.index.revision, list[Dirty]()
    for n in range(4 * 60):
        loads.tell({"m": (3 + n % 2, 6 + n % 3)})
        loads.run(60, look=lambda: passes.append(c.index.dirty))
    assert c.index.revision == revision
    assert not any(passes)


# --- unknown is not zero ----------------------------------------------------------------------------------------------


def up(c: Cluster, loads: Loads) -> None:
    loads.tell({"m": (4, 16)})
    loads.run(600)
    assert scale(c).wanted == 5


def test_without_any_gateway_the_number_stays_and_the_catalogs_bounds_hold() -> None:
    c, loads = world(0, 8)
    up(c, loads)
    loads.vanish()
    loads.run(4 * 3600)
    assert scale(c).wanted == 5
    want(c, 0, 2)
    c.settle()
    assert scale(c).wanted == 2
    want(c, 6, 8)
    c.step()
    assert scale(c).wanted == 6


def test_a_gateway_that_tells_nothing_any_more_is_not_one_without_requests() -> None:
    c, loads = world(1, 8)
    up(c, loads)
    loads.tell({"m": (0, 0)})
    loads.run(60)
    for _ in range(100):
        c.advance(SAMPLE_S)
        loads.sample()
        c.settle()
    assert scale(c).wanted == 5
    assert c.view.load.missing == f"gateway g has told nothing for more than {LOAD_STALE_S:g} s"
    loads.run(WINDOW_S)
    assert scale(c).wanted == 5, "what is known again must be known for a whole window"
    loads.run(2 * SAMPLE_S)
    assert scale(c).wanted == 1


def test_a_gateway_that_cant_be_read_is_not_one_without_requests() -> None:
    c, loads = world(1, 8)
    up(c, loads)
    loads.tell({"m": (0, 0)})
    loads.spoil("other")
    loads.run(3600)
    assert scale(c).wanted == 5
    loads.tell({}, gateway="other")
    loads.run(WINDOW_S + 2 * SAMPLE_S)
    assert scale(c).wanted == 1


def test_a_gateway_that_vanished_may_go_on_serving_for_as_long_as_a_node_may() -> None:
    c, loads = world(1, 8)
    loads.tell({"m": (18, 0)}, gateway="cut off")
    loads.tell({"m": (2, 0)})
    loads.run(600)
    assert scale(c).wanted == 5
    loads.vanish("cut off")
    assert until(loads, lambda: scale(c).wanted < 5) >= c.settings.lost_after_s + WINDOW_S
    assert scale(c).wanted == 1


def test_what_is_known_in_part_may_add_replicas() -> None:
    c, loads = world(1, 8)
    loads.spoil("other")
    loads.tell({"m": (9, 0)})
    loads.run(60)
    assert told(c) == (3, Q.LOAD, 9)


def test_a_new_leader_watches_for_a_whole_window_before_it_takes_anything_away() -> None:
    c, loads = world(0, 8, idle_s=60)
    up(c, loads)
    loads.tell({"m": (0, 0)})
    loads.run(45)
    c.new_leader()
    loads.heard.clear()
    c.settle()
    assert scale(c).wanted == 5
    loads.tell({"m": (1, 0)})
    assert until(loads, lambda: scale(c).wanted < 5) >= WINDOW_S


def test_a_state_that_was_lost_is_made_from_what_runs() -> None:
    c, loads = world(1, 8)
    up(c, loads)
    c.new_leader()
    c.meddle((Kind.MODEL_STATE, "m", None))
    c.settle()
    assert (scale(c).wanted, scale(c).cause, len(live(c))) == (5, Q.START, 5)


def test_after_a_restore_what_runs_stays_until_load_says_otherwise() -> None:
    c, loads = world(1, 8)
    up(c, loads)
    running = {each.id for each in live(c)}
    old = msgspec.structs.replace(state(c), scale=msgspec.structs.replace(scale(c), wanted=1), wanted=1)
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")), (Kind.MODEL_STATE, "m", old))
    c.new_leader()
    for n in range(4):
        c.away(f"n{n}")
        c.settle()
        c.back(f"n{n}")
        c.settle()
    assert {each.id for each in live(c)} == running
    assert told(c) == (5, Q.START, None)
    loads.tell({"m": (2, 0)})
    loads.run(WINDOW_S + 3 * SAMPLE_S)
    assert scale(c).wanted == 1


def test_a_range_that_is_new_begins_with_what_there_is() -> None:
    c, _ = world(3, 3)
    want(c, 0, 5)
    c.settle()
    assert (told(c), len(live(c))) == ((3, Q.START, None), 3)
    want(c, 2, 2)
    c.settle()
    assert (state(c).scale, len(live(c))) == (None, 2)


def test_a_removed_model_begins_anew() -> None:
    c, loads = world(1, 8)
    up(c, loads)
    c.remove_model("m")
    c.step()
    assert state(c).scale is None
    loads.sample()
    want(c, 1, 8)
    c.step()
    assert told(c) == (1, Q.START, None)


# --- zero -----------------------------------------------------------------------------------------------------------


def test_a_model_that_nobody_asked_for_begins_at_its_lowest() -> None:
    c, loads = world(0, 4)
    loads.run(3600)
    assert (told(c), c.replicas("m"), state(c).wanted) == ((0, Q.START, None), [], 0)
    assert not unconverged(c.index)
    c, loads = world(2, 4)
    assert (told(c), len(live(c))) == ((2, Q.START, None), 2)


def test_a_request_that_waits_for_a_model_without_replicas_brings_the_first_at_once() -> None:
    c, loads = world(0, 4)
    loads.run(60)
    loads.tell({"m": (0, 9)})
    assert c.index.dirty.models == {"m"}, "no sample is waited for"
    c.step()
    assert told(c) == (1, Q.WAKE, 9)
    assert len(c.replicas("m")) == 1
    c.settle()
    seen = c.view.load
    loads.tell({"m": (0, 10)})
    loads.tell({"m": (0, 11)})
    assert not c.index.dirty.models, "it is awake: more of them wait for the next sample"
    assert c.view.load is seen


def test_a_leader_that_has_seen_nothing_yet_wakes_a_model_as_well() -> None:
    c, loads = world(0, 4)
    c.new_leader()
    c.settle()
    loads.tell({"m": (0, 1)})
    c.step()
    assert told(c) == (1, Q.WAKE, 1)


def test_what_wakes_one_model_takes_no_sample_of_the_others() -> None:
    c, loads = world(0, 4)
    other = msgspec.structs.replace(model_spec("other"), scaling=Scaling(min=1, max=4))
    c.apply_model(other)
    c.settle()
    loads.run(60)
    seen = c.view.load.models["other"]
    c.advance(1.0)
    loads.tell({"other": (50, 0), "m": (0, 1)})
    assert c.index.dirty.models == {"m"}
    assert c.view.load.models["other"] == seen


def test_a_model_sleeps_after_so_long_without_any_request() -> None:
    c, loads = world(0, 4)
    loads.tell({"m": (0, 1)})
    c.settle()
    loads.tell({"m": (0, 0)})
    assert 900 <= until(loads, lambda: not live(c)) <= 900 + 2 * SAMPLE_S
    assert told(c) == (0, Q.IDLE, 0)
    assert not unconverged(c.index)
    revision = c.index.revision
    loads.run(3600)
    assert c.index.revision == revision


def test_idle_is_what_every_gateway_finds_idle() -> None:
    c, loads = world(0, 4)
    loads.tell({"m": (0, 1)})
    c.settle()
    loads.tell({"m": (0, 0)})
    loads.tell({"m": (1, 0)}, gateway="other")
    loads.run(3600)
    assert live(c)
    loads.tell({"m": (0, 0)}, gateway="other")
    loads.run(899)
    assert live(c)
    loads.run(2 * SAMPLE_S)
    assert not live(c)


def test_what_starts_has_not_been_idle_yet() -> None:
    c, loads = world(0, 4, cpu_profile(start_s=600.0), idle_s=60)
    loads.tell({"m": (0, 1)})
    c.step()
    c.answer(ready=False)
    loads.tell({"m": (0, 0)})  # the client gave up
    for _ in range(30):
        c.advance(SAMPLE_S)
        loads.tell_again()
        loads.sample()
        c.step()
        c.answer(ready=False)
    assert scale(c).wanted == 1
    c.settle()
    loads.run(45)
    assert live(c), "and has its time to be asked once it can answer"
    loads.run(45)
    assert not live(c)


def test_a_model_that_never_gets_ready_is_not_tried_for_ever_when_nobody_asks() -> None:
    c, loads = world(0, 4, cpu_profile(start_s=120.0), idle_s=60)
    loads.tell({"m": (0, 1)})
    c.step()
    loads.tell({"m": (0, 0)})
    began_s = c.now.mono_s
    while scale(c).wanted:
        c.advance(SAMPLE_S)
        loads.tell_again()
        loads.sample()
        c.step()
        for each in c.replicas("m"):
            if each.phase is ReplicaPhase.PLACED:
                c.report(c.shard(each), ShardPhase.FAILED, reason="exit 1")
        c.answer()
        assert c.now.mono_s - began_s < 3600
    assert 120 + 60 <= c.now.mono_s - began_s <= 120 + 60 + 3 * SAMPLE_S
    loads.run(60)
    assert not c.replicas("m")


def test_unknown_is_no_time_without_requests() -> None:
    c, loads = world(0, 4)
    loads.tell({"m": (0, 1)})
    c.settle()
    loads.tell({"m": (0, 0)})
    loads.run(800)
    loads.spoil("other")
    loads.run(3600)
    assert live(c)
    loads.tell({}, gateway="other")
    loads.run(850)
    assert live(c), "the time before the gap does not count"
    loads.run(100)
    assert not live(c)


# --- D-21: requests in flight ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["sleep", "fewer", "removed"])
def test_d21_what_goes_leaves_rotation_first_and_ends_only_when_its_node_says_so(why: str) -> None:
    c, loads = world(0, 4, cpu_profile(drain_s=180.0))
    loads.tell({"m": (7, 1)})
    c.settle()
    loads.run(60)
    assert len(live(c)) == 2
    if why == "removed":
        c.remove_model("m")
    loads.tell({"m": (0, 0) if why == "sleep" else (1, 0)})
    plan = c.step()
    for _ in range(100):
        if plan.groups:
            break
        c.answer()
        c.advance(SAMPLE_S)
        loads.tell_again()
        loads.sample()
        plan = c.step()
    going = [each for each in c.replicas("m") if each.phase is ReplicaPhase.DRAINING]
    assert going
    routed = {route.replica for route in route_table(c.index).routes.get("m", ())}
    for each in going:
        assert each.retire in (Retire.SCALE_DOWN, Retire.MODEL_REMOVED)
        assert each.id not in routed
        (group,) = (group for group in plan.groups if any(write.ref.name == each.id for write in group.writes))
        kinds = {write.ref.kind for write in group.writes}
        assert kinds == {Kind.REPLICA, Kind.ASSIGNMENT}, "out of rotation and ordered to stop in one step"
        order = c.index.assignments.record(c.shard(each))
        assert order is not None
        assert order.drain_s == 180.0
    for phase in (ShardPhase.DRAINING, ShardPhase.STOPPING):
        for each in going:
            c.report(c.shard(each), phase)
        c.step()
        assert {each.id for each in going} <= {each.id for each in c.replicas("m")}, "its claim is still held"
    c.settle()
    assert not {each.id for each in going} & {each.id for each in c.replicas("m")}


def test_d21_idle_time_counts_from_the_end_of_the_last_request() -> None:
    c, loads = world(0, 4)
    loads.tell({"m": (0, 1)})
    c.settle()
    loads.tell({"m": (1, 0)})
    loads.run(3 * 900)
    assert live(c), "a long answer is no idle time"
    loads.tell({"m": (0, 0)})
    loads.run(890)
    assert live(c)
    c.advance(4.0)
    loads.tell({"m": (1, 0)})
    c.advance(3.0)
    loads.tell({"m": (0, 0)})  # begun and over between two samples
    assert until(loads, lambda: not live(c)) >= 900


def test_d21_a_request_is_no_idle_time_whatever_its_gateway_says_of_it() -> None:
    c, loads = world(0, 4)
    loads.tell({"m": (0, 1)})
    c.settle()
    for in_flight, samples in ((1, 100), (0, 50)):
        for _ in range(samples):
            c.advance(SAMPLE_S)
            wrong = ModelLoad(in_flight=in_flight, idle_s=c.now.mono_s)
            load = GatewayLoad(gateway="g", models={"m": wrong})
            loads.heard["g"] = Heard(load=load, revision=2, mono_s=c.now.mono_s)
            loads.sample()
            c.settle()
        assert live(c)


def nearly_asleep() -> tuple[Cluster, Loads]:
    """A sample has just said that the model may sleep; no pass has run on it yet."""
    c, loads = world(0, 4)
    loads.tell({"m": (0, 1)})
    c.settle()
    loads.tell({"m": (0, 0)})
    for _ in range(100):
        c.settle()
        c.advance(SAMPLE_S)
        loads.tell_again()
        loads.sample()
        if c.index.dirty.models:
            break
    assert (scale(c).wanted, c.index.dirty.models) == (1, {"m"})
    return c, loads


def test_d21_a_request_between_the_sample_and_the_pass_keeps_the_model_awake() -> None:
    c, loads = nearly_asleep()
    loads.tell({"m": (1, 0)})
    c.settle()
    loads.run(60)
    assert (scale(c).wanted, len(live(c))) == (1, 1)


def test_d21_a_request_after_the_pass_wakes_it_again_and_what_drains_is_left_to_finish() -> None:
    c, loads = nearly_asleep()
    c.step()
    (old,) = c.replicas("m")
    assert old.phase is ReplicaPhase.DRAINING
    loads.tell({"m": (1, 0)})  # reached the old one in the same instant: it is served there
    c.step()
    assert scale(c).wanted == 0
    loads.tell({"m": (1, 1)})
    c.step()
    assert told(c) == (1, Q.WAKE, 2)
    (new,) = (each for each in c.replicas("m") if each.id != old.id)
    assert new.phase is ReplicaPhase.PLACED
    assert next(each for each in c.replicas("m") if each.id == old.id).phase is ReplicaPhase.DRAINING
    c.settle()
    assert [each.id for each in live(c)] == [new.id]


# --- whatever happens -------------------------------------------------------------------------------------------------

Event = tuple[str, int, int]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tell", "tell", "tell", "run", "run", "vanish", "spoil", "leader", "want", "away", "back"]),
        st.integers(0, 11),
        st.integers(0, 60),
    ),
    max_size=40,
)


def happen(c: Cluster, loads: Loads, event: Event) -> None:
    name, a, b = event
    gateway = "gh"[a % 2]
    match name:
        case "tell":
            loads.tell({"m": (b // 2, b - b // 2) if a % 3 else (0, 0)}, gateway=gateway)
        case "vanish" if gateway in loads.heard:
            loads.vanish(gateway)
        case "spoil":
            loads.spoil(gateway)
        case "leader":
            c.new_leader()
        case "want":
            low = a % 4
            want(c, low, low + b % 4 or 1, idle_s=float(60 * b))
        case "away":
            c.away(f"n{a % 4}")
        case "back" if f"n{a % 4}" not in c.index.sessions:
            c.back(f"n{a % 4}")
        case _:
            run(c, loads, passes=1 + b // 3)


def run(c: Cluster, loads: Loads, *, passes: int) -> None:
    """As the loop does it: samples, incremental passes; each must decide what a full one would, and then nothing."""
    for _ in range(passes):
        c.advance(SAMPLE_S)
        loads.tell_again()
        loads.sample()
        dirty = c.dirty()
        whole, plan = c.plan(), c.plan(dirty)
        assert plan.groups == whole.groups
        c.apply(plan)
        assert not c.plan().groups
        c.answer()
        spec, found = c.index.models.record("m"), state(c)
        assert spec is not None
        assert spec.scaling.min <= found.wanted <= spec.scaling.max
        assert (found.scale is None) == (spec.scaling.min == spec.scaling.max)


@given(st.integers(0, 3), st.integers(0, 5), EVENTS)
def test_inv7_whatever_gateways_tell_the_number_is_within_bounds_and_every_pass_decides_the_same(
    low: int, more: int, events: list[Event]
) -> None:
    c, loads = world(low, low + more or 1)
    for event in events:
        happen(c, loads, event)
    run(c, loads, passes=1)


@given(st.integers(0, 3), st.integers(1, 7), EVENTS, st.integers(0, 60))
@settings(max_examples=settings().max_examples // 2)  # each takes an hour of samples
def test_a_constant_load_comes_to_rest_whatever_was_before(low: int, more: int, events: list[Event], load: int) -> None:
    c, loads = world(low, low + more)
    for event in events:
        happen(c, loads, event)
    want(c, low, low + more, idle_s=60)
    for n in range(4):
        if f"n{n}" not in c.index.sessions:
            c.back(f"n{n}")
    loads.tell({"m": (load, 0 if live(c) else load)}, gateway="g")
    loads.tell({"m": (0, 0)}, gateway="h")
    loads.run(1500)
    count, revision = state(c).wanted, c.index.revision
    loads.run(1800)
    assert (state(c).wanted, c.index.revision) == (count, revision)
    assert not unconverged(c.index)


@given(
    st.integers(0, 4), st.integers(1, 30), st.integers(0, 40), st.floats(0.1, 20), st.booleans(),
    st.lists(st.integers(0, 100), max_size=30), st.integers(0, 200), st.integers(0, 200),
)  # fmt: skip
def test_more_load_never_leads_to_fewer_replicas(
    low: int, more: int, wanted: int, target: float, whole: bool, before: list[int], one: int, other: int
) -> None:
    spec = msgspec.structs.replace(model_spec("m"), scaling=Scaling(min=low, max=low + more, target_load=target))
    c = Cluster()
    number = max(low, min(wanted, low + more))
    had = ScaleState(wanted=number, since_at=0.0, cause=Q.LOAD)
    c.apply_model(spec)
    c.write(Kind.MODEL_STATE, "m", ModelState(name="m", wanted=number, placed=number, ready=number, scale=had))
    load, mono_s = LoadView(), 0.0
    for requests in before:
        mono_s += SAMPLE_S
        load = seen(c.index, load, requests, mono_s=mono_s)
    now = Now(wall_s=0.0, mono_s=mono_s + SAMPLE_S)
    numbers = []
    for requests in sorted((one, other)):
        view = seen(c.index, load, requests, mono_s=now.mono_s, missing="" if whole else "in part")
        found = decide(spec, state(c), view, now=now)
        assert found is not None
        assert low <= found.wanted <= min(low + more, max(1, 2 * number))
        assert whole or found.wanted >= number
        numbers.append(found.wanted)
    assert numbers == sorted(numbers)


def seen(index: Index, load: LoadView, requests: int, *, mono_s: float, missing: str = "") -> LoadView:
    total = Total(queued=requests, ended_mono_s=mono_s if requests else 0.0)
    sample = Sample(totals={"m": total} if requests else {}, missing=missing)
    return observe(load, sample, index=index, now=Now(wall_s=0.0, mono_s=mono_s))


def test_bounds_that_contradict_each_other_in_the_store_are_one_number() -> None:
    spec = msgspec.structs.replace(model_spec("m"), scaling=Scaling(min=3, max=1))
    state = ModelState(name="m", wanted=9, placed=0, ready=0)
    assert wanted_replicas(spec, state) == 3
    assert decide(spec, state, LoadView(), now=Now(wall_s=0.0, mono_s=0.0)) is None
    assert NOTHING.requests == 0
    assert Dirty().models == set()
