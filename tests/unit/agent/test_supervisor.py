"""The supervisor, told as stories: what it sees, and what it does about it."""

import msgspec
import pytest

from llmgw.core.replica import Claim, Desired, Gang, GpuClaim, ShardPhase, confirms_stop
from llmgw.testing.node import Bench, agent_config, assignment, orders, stopped
from llmgw_agent import event as ev
from llmgw_agent.host import Purpose, Wrong
from llmgw_agent.supervisor import SILENT_S

SHARD = "m-aaaaa.0"


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()))
    return bench


@pytest.fixture
def ready(bench: Bench) -> Bench:
    """One engine, ready."""
    bench.see((7, assignment()))
    bench.run(2)
    assert bench.report().phase is ShardPhase.READY
    return bench


def test_an_order_is_started_and_becomes_ready(bench: Bench) -> None:
    bench.see((7, assignment()))
    starting = bench.report()
    assert (starting.phase, starting.port, starting.assignment_rev) == (ShardPhase.STARTING, 20000, 7)
    bench.run(2)
    report = bench.report()
    assert (report.phase, report.port, report.address) == (ShardPhase.READY, 20000, "127.0.0.1")
    assert (report.context, report.slots, report.build) == (512, 2, "llama.cpp@1")
    assert report.incarnation is not None
    assert report.pid == bench.engines[SHARD].process.pid
    assert bench.story() == [
        "held -> waiting: ordered to run",
        "waiting -> launching: on port 20000",
        "launching -> loading: its process is there",
        "loading -> ready: did real work",
    ]


def test_what_is_started_is_saved_first(bench: Bench) -> None:
    bench.see((7, assignment()))
    kinds = [type(instruction) for instruction in bench.done]
    assert kinds.index(ev.SaveState) < kinds.index(ev.StartEngine)
    [start] = [item for item in bench.done if isinstance(item, ev.StartEngine)]
    save = next(item for item in bench.done[1:] if isinstance(item, ev.SaveState))
    [shard] = save.state.shards
    assert (shard.port, shard.incarnation, shard.order) == (start.port, start.incarnation, assignment())


def test_a_stop_waits_for_gateways_then_for_idleness(ready: Bench) -> None:
    ready.engines[SHARD].busy = 1
    ready.see((9, stopped(assignment())))
    assert ready.report().phase is ShardPhase.DRAINING
    ready.run(10)
    assert ready.runs()
    assert ready.report().phase is ShardPhase.DRAINING
    ready.engines[SHARD].busy = 0
    ready.run(2)
    assert not ready.runs()
    assert ready.report().phase is ShardPhase.STOPPED
    assert confirms_stop(ready.report(), order_rev=9)
    assert ready.story()[-4:] == [
        "ready -> leaving: ordered to stop",
        "leaving -> draining: gateways had time to see it",
        "draining -> terminating: idle",
        "terminating -> stopped: exit 0",
    ]


def test_an_idle_engine_still_gets_the_gateways_time(ready: Bench) -> None:
    ready.see((9, stopped(assignment())))
    ready.run(1.9)
    assert ready.runs()
    ready.run(1)
    assert not ready.runs()


def test_a_drain_ends_with_its_time(ready: Bench) -> None:
    ready.engines[SHARD].busy = 3
    ready.see((9, stopped(assignment())))
    ready.run(2 + 29)
    assert ready.runs()
    ready.run(2)
    assert not ready.runs()
    assert "draining -> terminating: still busy at the end of its drain" in ready.story()


def test_what_ignores_sigterm_is_killed_and_only_then_reported_stopped(ready: Bench) -> None:
    ready.engines[SHARD].obeys_term = False
    ready.see((9, stopped(assignment())))
    ready.run(2.6)
    assert ready.report().phase is ShardPhase.STOPPING
    ready.run(4)
    assert ready.report().phase is ShardPhase.STOPPING
    assert ready.runs()
    ready.run(2)
    assert not ready.runs()
    assert ready.report().phase is ShardPhase.STOPPED


def test_b03_stopped_means_that_no_process_of_the_tree_is_left(ready: Bench) -> None:
    engine = ready.engines[SHARD]
    engine.left = 2  # they ignore SIGTERM; the main process obeys it
    ready.see((9, stopped(assignment())))
    ready.run(4)
    assert not ready.runs()
    assert ready.report().phase is ShardPhase.STOPPING
    assert not confirms_stop(ready.report(), order_rev=9)
    ready.run(5)
    assert engine.left == 0
    assert ready.report().phase is ShardPhase.STOPPED


def test_b03_left_overs_of_a_crash_are_ended_before_the_next_start(ready: Bench) -> None:
    engine = ready.engines[SHARD]
    engine.left = 2
    engine.end("SIGSEGV: it crashed")
    ready.run(30)  # the bench would refuse a start beside them
    assert engine.left == 0
    assert ready.report().phase is ShardPhase.READY
    assert ready.engines[SHARD] is not engine


def test_the_absence_of_an_order_stops_nothing(ready: Bench) -> None:
    ready.see()
    ready.run(600)
    report = ready.report()
    assert ready.runs()
    assert report.phase is ShardPhase.READY
    assert (report.assigned, report.assignment_rev, report.order) == (False, 0, assignment())
    assert len(ready.starts) == 1


def test_an_unassigned_shard_is_adopted_by_an_order(ready: Bench) -> None:
    ready.see()
    ready.see((20, assignment()))
    report = ready.report()
    assert (report.assigned, report.assignment_rev, report.order) == (True, 20, None)
    assert len(ready.starts) == 1


def test_an_unassigned_shard_can_be_told_to_stop(ready: Bench) -> None:
    ready.see()
    ready.see((20, stopped(assignment())))
    ready.run(10)
    assert confirms_stop(ready.report(), order_rev=20)


def test_an_order_that_cannot_be_read_stops_nothing_and_is_not_absent(ready: Bench) -> None:
    ready.tell(
        ev.OrdersSeen(orders={SHARD: ev.Order(rev=30, assignment=None), "x-bbbbb.0": ev.Order(rev=31, assignment=None)})
    )
    ready.run(60)
    report = ready.report()
    assert (report.phase, report.assigned, report.assignment_rev) == (ShardPhase.READY, True, 7)
    assert list(ready.reports) == [SHARD]


def test_a_stop_is_final(ready: Bench) -> None:
    ready.see((9, stopped(assignment())))
    ready.see((11, assignment()))
    ready.run(20)
    assert ready.report().phase is ShardPhase.STOPPED
    assert len(ready.starts) == 1
    ready.restart()
    ready.see((11, assignment()))
    ready.run(20)
    assert len(ready.starts) == 1


def test_a_stop_of_what_never_ran_is_confirmed(bench: Bench) -> None:
    bench.see((9, stopped(assignment())))
    report = bench.report()
    assert confirms_stop(report, order_rev=9)
    assert report.reason == "never ran on this node"


def test_a_record_goes_only_after_its_order(ready: Bench) -> None:
    ready.see((9, stopped(assignment())))
    ready.run(60)
    assert list(ready.reports) == [SHARD]
    ready.see()
    assert not ready.reports


def test_a_held_order_waits_for_the_word(bench: Bench) -> None:
    bench.see((7, assignment(desired=Desired.HELD)))
    bench.run(60)
    assert bench.report().phase is ShardPhase.HELD
    assert not bench.starts
    bench.see((8, assignment()))
    bench.run(2)
    assert bench.report().phase is ShardPhase.READY


def test_a_crash_restarts_in_place_on_the_same_port_then_fails(ready: Bench) -> None:
    for attempt in (1, 2, 3):
        first = ready.engines[SHARD]
        first.end(f"exit 1: crash {attempt}")
        ready.run(1.1)
        assert ready.report().phase is ShardPhase.STARTING
        assert ready.report().attempts == attempt
        assert ready.report().reason == f"exit 1: crash {attempt} (attempt {attempt})"
        ready.run(2 * 2 ** (attempt - 1) + 2)
        assert ready.report().phase is ShardPhase.READY
        assert ready.report().attempts == attempt
        assert ready.report().incarnation not in (None, first.process.mark.rpartition("/")[2])
    ready.engines[SHARD].end("exit 1: crash 4")
    ready.run(60)
    assert ready.report().phase is ShardPhase.FAILED
    assert ready.report().reason == "exit 1: crash 4 (attempt 4, the last)"
    assert {port for _, port in ready.starts} == {20000}
    assert len(ready.starts) == 4


def test_the_count_of_attempts_falls_after_a_stable_run(ready: Bench) -> None:
    ready.engines[SHARD].end("exit 1")
    ready.run(10)
    assert ready.report().attempts == 1
    ready.run(1800)
    assert ready.report().attempts == 0


def test_a_gang_is_not_restarted_in_place(bench: Bench) -> None:
    gang = Gang(fabric="ib", peers=(), ports=())
    bench.see((7, assignment(gang=gang)))
    bench.run(2)
    bench.engines[SHARD].end("exit 1")
    bench.run(30)
    assert bench.report().phase is ShardPhase.FAILED


def test_a_start_that_takes_too_long_fails_with_the_engines_words(bench: Bench) -> None:
    bench.script.load_s = 1000
    bench.see((7, assignment()))
    bench.run(59)
    assert bench.report().phase is ShardPhase.STARTING
    bench.run(3)
    assert bench.report().phase is ShardPhase.FAILED
    assert bench.report().reason == "not ready within 60 s: Loading model"
    assert not bench.runs()


def test_an_engine_that_is_not_what_was_ordered_fails(bench: Bench) -> None:
    bench.see((7, assignment()))
    bench.engines[SHARD].result = Wrong(reason="2 slots were ordered, the engine has 1")
    bench.run(5)
    assert bench.report().phase is ShardPhase.FAILED
    assert bench.report().reason == "2 slots were ordered, the engine has 1"
    assert not bench.runs()


def test_a_start_that_is_refused_fails_with_the_reason(bench: Bench) -> None:
    bench.script.refusals.append(("there is no 'tiny.gguf' in /models", False))
    bench.see((7, assignment()))
    assert bench.report().phase is ShardPhase.FAILED
    assert bench.report().reason == "there is no 'tiny.gguf' in /models"


def test_a_failed_shard_confirms_a_stop_and_keeps_its_reason(bench: Bench) -> None:
    bench.script.refusals.append(("broken", False))
    bench.see((7, assignment()))
    bench.see((9, stopped(assignment())))
    assert confirms_stop(bench.report(), order_rev=9)
    assert bench.report().reason == "broken"


def test_a_taken_port_is_left_alone_and_another_one_used(bench: Bench) -> None:
    bench.script.refusals.append(("port 20000 is taken by another process", True))
    bench.see((7, assignment()))
    bench.run(2)
    assert bench.starts == [(SHARD, 20001)]
    assert bench.report().phase is ShardPhase.READY


def test_a_silent_engine_is_restarted_after_a_long_while_and_not_before(ready: Bench) -> None:
    ready.engines[SHARD].answers = False
    ready.run(SILENT_S - 10)
    assert ready.runs()
    ready.engines[SHARD].answers = True
    ready.run(20)
    ready.engines[SHARD].answers = False
    ready.run(SILENT_S - 10)
    assert len(ready.starts) == 1
    ready.run(30)
    assert len(ready.starts) == 2
    assert ready.report().phase is ShardPhase.READY


def test_d23_a_port_rests_before_another_replica_gets_it() -> None:
    bench = Bench(agent_config(engine_ports=(20000, 20001), port_rest_s=60.0))
    bench.tell(ev.Restored(saved=None, found=()))
    bench.see((7, assignment()))
    bench.run(2)
    bench.see((9, stopped(assignment())), (9, assignment("m-bbbbb")))
    bench.run(10)
    bench.see((9, assignment("m-bbbbb")), (12, assignment("m-ccccc")))
    assert bench.report("m-bbbbb.0").port == 20001
    bench.run(30)
    waiting = bench.report("m-ccccc.0")
    assert (waiting.phase, waiting.port) == (ShardPhase.STARTING, None)
    assert waiting.reason == "no free port in 20000-20001: 1 in use, 1 at rest"
    bench.run(40)
    assert bench.report("m-ccccc.0").port == 20000


def test_d23_a_port_rests_across_a_restart_of_the_agent() -> None:
    bench = Bench(agent_config(engine_ports=(20000, 20000)))
    bench.tell(ev.Restored(saved=None, found=()))
    bench.see((7, assignment()))
    bench.run(2)
    bench.see((9, stopped(assignment())))
    bench.run(10)
    bench.restart()
    bench.see((11, assignment("m-bbbbb")))
    bench.run(40)
    assert bench.report("m-bbbbb.0").port is None
    bench.run(20)
    assert bench.report("m-bbbbb.0").port == 20000


def test_b01_the_next_holder_waits_until_the_last_one_is_gone() -> None:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()), ev.MemoryKnown(memory_bytes=10 * 10**9))
    old, new = assignment(memory_bytes=8 * 10**9), assignment("m-bbbbb", memory_bytes=8 * 10**9)
    bench.see((7, old))
    bench.run(2)
    bench.engines[SHARD].obeys_term = False
    bench.engines[SHARD].left = 1
    # What the agent finds when it is back: the old replica was deleted meanwhile, another was placed.
    bench.see((9, stopped(old)), (9, new))
    bench.run(4)
    assert [shard for shard, _ in bench.starts] == [SHARD]
    waiting = bench.report("m-bbbbb.0")
    assert waiting.phase is ShardPhase.STARTING
    assert waiting.reason == "needs 8 GB of 10 GB; 8 GB still held, waits for m-aaaaa.0 to end"
    bench.run(10)
    assert bench.report().phase is ShardPhase.STOPPED
    assert bench.report("m-bbbbb.0").phase is ShardPhase.READY
    assert bench.engines[SHARD].left == 0


def test_b01_the_next_holder_of_a_gpu_waits_until_the_last_one_is_gone() -> None:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()))
    both = Claim(gpus=(GpuClaim(uuid="GPU-0"), GpuClaim(uuid="GPU-1")))
    old, new = assignment(claim=both), assignment("m-bbbbb", claim=Claim(gpus=(GpuClaim(uuid="GPU-1"),)))
    elsewhere = assignment("m-ccccc", claim=Claim(gpus=(GpuClaim(uuid="GPU-2"),)))
    bench.see((7, old))
    bench.run(2)
    bench.engines[SHARD].obeys_term = False
    bench.engines[SHARD].left = 1
    bench.see((9, stopped(old)), (9, new), (9, elsewhere))
    bench.run(4)
    assert [shard for shard, _ in bench.starts] == [SHARD, "m-ccccc.0"]
    assert bench.report("m-bbbbb.0").reason == "waits for GPU GPU-1, which m-aaaaa.0 still holds"
    bench.run(10)
    assert confirms_stop(bench.report(), order_rev=9)
    assert bench.engines[SHARD].left == 0
    assert bench.report("m-bbbbb.0").phase is ShardPhase.READY


def test_what_runs_unassigned_holds_its_memory_until_the_leader_has_said_what_it_is() -> None:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()), ev.MemoryKnown(memory_bytes=10 * 10**9))
    old, new = assignment(memory_bytes=8 * 10**9), assignment("m-bbbbb", memory_bytes=8 * 10**9)
    bench.see((7, old))
    bench.run(2)
    bench.see((9, new))  # a restored store, which never heard of the old one
    bench.run(30)
    assert len(bench.starts) == 1
    assert "waits for m-aaaaa.0" in bench.report("m-bbbbb.0").reason
    bench.see((9, new), (11, stopped(old)))
    bench.run(30)
    assert bench.report("m-bbbbb.0").phase is ShardPhase.READY


def test_memory_in_excess_of_a_shrunken_node_keeps_nobody_waiting_for_ever() -> None:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()), ev.MemoryKnown(memory_bytes=20 * 10**9))
    first, second = assignment(memory_bytes=8 * 10**9), assignment("m-bbbbb", memory_bytes=8 * 10**9)
    bench.see((7, first), (7, second))
    bench.run(2)
    bench.tell(ev.MemoryKnown(memory_bytes=10 * 10**9))
    bench.engines[SHARD].end("exit 1")
    bench.run(10)
    assert bench.report().phase is ShardPhase.READY


def test_a_state_that_cannot_be_saved_is_tried_again(bench: Bench) -> None:
    saves = sum(isinstance(item, ev.SaveState) for item in bench.done)
    bench.tell(ev.StateNotSaved(reason="No space left on device"))
    bench.run(4)
    assert sum(isinstance(item, ev.SaveState) for item in bench.done) == saves
    bench.run(2)
    assert sum(isinstance(item, ev.SaveState) for item in bench.done) == saves + 1


def test_on_exit_stop_ends_engines_but_forgets_no_order(ready: Bench) -> None:
    ready.tell(ev.ExitRequested())
    ready.run(3)
    assert not ready.runs()
    assert ready.supervisor.quiet
    assert ready.supervisor.wake_mono_s() is None
    ready.restart()
    ready.run(2)
    assert ready.report().phase is ShardPhase.READY
    assert ready.report().attempts == 0


def test_orders_that_are_only_read_start_and_stop_nothing(ready: Bench) -> None:
    ready.tell(ev.OrdersRead(orders=orders([(9, stopped(assignment())), (9, assignment("m-bbbbb"))])))
    ready.run(10)
    assert ready.runs()
    assert list(ready.reports) == [SHARD]
    assert ready.report().assignment_rev == 9
    assert not confirms_stop(ready.report(), order_rev=9)


def test_a_stop_while_its_engine_is_being_started(bench: Bench) -> None:
    # The stop arrives between the instruction to start and its outcome.
    out = bench._step(ev.OrdersSeen(orders=orders([(7, assignment())])))
    [start] = [item for item in out if isinstance(item, ev.StartEngine)]
    bench._step(ev.OrdersSeen(orders=orders([(9, stopped(assignment()))])))
    assert bench.report().phase is ShardPhase.STARTING
    answer = bench._do(start)
    assert answer is not None
    bench.tell(answer)
    bench.run(2)
    assert not bench.runs()
    assert confirms_stop(bench.report(), order_rev=9)


def test_news_of_an_engine_that_is_gone_changes_nothing(ready: Bench) -> None:
    old = ready.report().incarnation
    assert old is not None
    ready.engines[SHARD].end("exit 1")
    ready.run(10)
    before = ready.report()
    ready.tell(ev.EngineProbed(shard=SHARD, incarnation=old, purpose=Purpose.READY, result=Wrong(reason="late")))
    ready.tell(ev.StartRefused(shard=SHARD, incarnation=old, reason="late"))
    assert ready.report() == before


def test_an_order_whose_limits_change_acts_without_a_restart(ready: Bench) -> None:
    ready.see((8, msgspec.structs.replace(assignment(), drain_s=1.0)))
    ready.engines[SHARD].busy = 1
    ready.see((9, stopped(msgspec.structs.replace(assignment(), drain_s=1.0))))
    ready.run(2 + 1 + 1)
    assert not ready.runs()
    assert len(ready.starts) == 1
