"""What the agent makes of its saved state and of what runs, when it comes up."""

import msgspec
import pytest

from llmgw.core.replica import ShardPhase, confirms_stop
from llmgw.testing.node import Bench, assignment, stopped
from llmgw_agent import event as ev
from llmgw_agent.state import Process, SavedState

SHARD = "m-aaaaa.0"


@pytest.fixture
def ready() -> Bench:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()))
    bench.see((7, assignment()))
    bench.run(2)
    return bench


def saved(bench: Bench) -> SavedState:
    assert bench.saved is not None
    return bench.saved


def test_b11_a_restarted_agent_adopts_what_runs(ready: Bench) -> None:
    before = ready.report()
    ready.restart()
    # At once, and without the store: its routes must not flicker.
    assert ready.report() == before
    ready.run(60)
    ready.see((7, assignment()))
    assert ready.report() == before
    assert len(ready.starts) == 1


def test_a_loading_engine_is_adopted_and_becomes_ready(ready: Bench) -> None:
    ready.script.load_s = 20
    ready.see((7, assignment()), (8, assignment("m-bbbbb")))
    ready.run(1)
    ready.restart()
    assert ready.report("m-bbbbb.0").phase is ShardPhase.STARTING
    ready.run(25)
    assert ready.report("m-bbbbb.0").phase is ShardPhase.READY
    assert len(ready.starts) == 2


def test_an_engine_whose_start_was_not_heard_of_is_adopted_by_its_mark() -> None:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()))
    out = bench._step(ev.OrdersSeen(orders={SHARD: ev.Order(rev=7, assignment=assignment())}))
    for instruction in out:
        bench._do(instruction)  # saved and started; the agent dies before it hears so
    bench.restart()
    bench.run(2)
    assert bench.report().phase is ShardPhase.READY
    assert bench.report().pid == bench.engines[SHARD].process.pid
    assert len(bench.starts) == 1


def test_after_a_reboot_it_starts_again_without_the_store(ready: Bench) -> None:
    ready.restart(boot="boot-2")
    ready.run(3)
    report = ready.report()
    assert (report.phase, report.port, report.attempts, report.assigned) == (ShardPhase.READY, 20000, 0, True)
    assert len(ready.starts) == 2


def test_after_a_reboot_saved_orders_that_contradict_one_another_start_no_more_than_fits() -> None:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()), ev.MemoryKnown(memory_bytes=10 * 10**9))
    old, new = assignment(memory_bytes=8 * 10**9), assignment("m-bbbbb", memory_bytes=8 * 10**9)
    bench.see((7, old))
    bench.run(2)
    bench.see((9, new))  # a restored store; it knows nothing of the old one, which runs unassigned
    bench.run(2)
    bench.restart(boot="boot-2")
    bench.run(30)
    assert len(bench.starts) == 2  # before and after the reboot, one each
    assert "still held" in bench.report("m-bbbbb.0").reason
    bench.see((9, new), (11, stopped(old)))
    bench.run(30)
    assert bench.report("m-bbbbb.0").phase is ShardPhase.READY


def test_after_a_reboot_what_was_to_stop_stays_stopped(ready: Bench) -> None:
    ready.engines[SHARD].busy = 1
    ready.see((9, stopped(assignment())))
    ready.run(5)
    ready.restart(boot="boot-2")
    ready.run(10)
    assert confirms_stop(ready.report(), order_rev=9)
    assert len(ready.starts) == 1


def test_an_engine_that_died_with_the_agent_away_counts_as_a_failure(ready: Bench) -> None:
    ready.engines[SHARD].end("exit 1")
    ready.restart()
    assert ready.report().phase is ShardPhase.STARTING
    ready.run(5)
    assert ready.report().phase is ShardPhase.READY
    assert ready.report().attempts == 1


def test_b03_left_overs_found_at_the_start_are_ended_first(ready: Bench) -> None:
    ready.engines[SHARD].left = 2
    ready.engines[SHARD].end("")
    old = ready.engines[SHARD]
    ready.restart()
    ready.run(10)
    assert old.left == 0
    assert ready.report().phase is ShardPhase.READY
    assert len(ready.starts) == 2


@pytest.mark.parametrize(
    "process",
    [
        Process(pid=1001, started=1, boot_id="boot-1", mark="64:1000/n1/m-aaaaa.0/x"),
        Process(pid=1001, started=10000, boot_id="boot-0", mark="64:1000/n1/m-aaaaa.0/x"),
    ],
    ids=["another start time", "another boot"],
)
def test_b07_a_recorded_number_that_is_somebody_elses_is_never_signalled(ready: Bench, process: Process) -> None:
    state = saved(ready)
    [shard] = state.shards
    forged = msgspec.structs.replace(state, shards=(msgspec.structs.replace(shard, process=process),))
    ready.engines.clear()  # nothing that bears our mark runs; pid 1001 is somebody else's
    ready.done.clear()
    ready.restart(saved=forged)
    ready.run(10)
    assert not [item for item in ready.done if isinstance(item, ev.SignalTree)]
    assert ready.report().phase is ShardPhase.READY
    assert ready.report().pid != 1001


def test_b14_without_a_state_engines_are_found_by_their_marks_and_wait_for_an_order(ready: Bench) -> None:
    pid = ready.report().pid
    ready.restart(lost=True)
    ready.run(600)
    report = ready.report()
    assert ready.runs()
    assert (report.assigned, report.order, report.pid, report.model) == (False, None, pid, "")
    ready.see((7, assignment()))
    ready.run(2)
    report = ready.report()
    assert (report.phase, report.pid, report.port, report.assigned) == (ShardPhase.READY, pid, 20000, True)
    assert len(ready.starts) == 1


def test_b14_a_found_engine_that_is_gone_after_a_reboot_starts_again_by_its_order(ready: Bench) -> None:
    ready.restart(lost=True)
    ready.run(5)
    ready.restart(boot="boot-2")
    ready.run(5)
    assert ready.report().phase is ShardPhase.HELD  # not stopped: nobody ever ordered that
    ready.see((7, assignment()))
    ready.run(2)
    assert ready.report().phase is ShardPhase.READY
    assert len(ready.starts) == 2


def test_b14_a_found_engine_that_dies_is_not_taken_for_stopped(ready: Bench) -> None:
    ready.restart(lost=True)
    ready.engines[SHARD].alive = False
    ready.run(5)
    ready.see((7, assignment()))
    ready.run(70)  # ports rest after a loss
    assert ready.report().phase is ShardPhase.READY
    assert len(ready.starts) == 2


def test_b14_a_found_engine_can_be_told_to_stop(ready: Bench) -> None:
    ready.restart(lost=True)
    ready.see((9, stopped(assignment())))
    ready.run(10)
    assert confirms_stop(ready.report(), order_rev=9)
    assert not ready.runs()


def test_b14_an_older_copy_is_good_for_orders_but_not_for_what_became_of_them(ready: Bench) -> None:
    older = saved(ready)
    ready.engines[SHARD].end("exit 1")
    ready.run(10)  # another incarnation runs than the one in the copy
    pid = ready.report().pid
    ready.restart(saved=older, lost=True)
    ready.run(2)
    report = ready.report()
    assert (report.phase, report.pid) == (ShardPhase.READY, pid)
    assert len(ready.starts) == 2
    ready.see()
    assert ready.report().order == assignment()


def test_b14_from_an_older_copy_nothing_is_started_before_the_store_says_so(ready: Bench) -> None:
    older = saved(ready)
    ready.see((9, stopped(assignment())))
    ready.run(10)
    ready.restart(saved=older, lost=True)
    ready.run(600)
    assert len(ready.starts) == 1
    ready.see((9, stopped(assignment())))
    assert confirms_stop(ready.report(), order_rev=9)


def test_b14_ports_rest_when_it_is_not_known_which_were_in_use(ready: Bench) -> None:
    ready.see((9, stopped(assignment())))
    ready.run(10)
    ready.restart(lost=True)
    ready.see((9, stopped(assignment())), (12, assignment("m-bbbbb")))
    ready.run(30)
    assert ready.report("m-bbbbb.0").port is None
    ready.run(31)
    assert ready.report("m-bbbbb.0").phase is ShardPhase.READY


def test_engines_of_another_name_are_left_alone(ready: Bench) -> None:
    found = tuple(msgspec.structs.replace(item, node="n2") for item in ready.found())
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=found))
    assert not bench.reports


def test_a_draining_engine_goes_on_draining(ready: Bench) -> None:
    ready.engines[SHARD].busy = 1
    ready.see((9, stopped(assignment())))
    ready.run(5)
    ready.restart()
    assert ready.report().phase is ShardPhase.DRAINING
    ready.run(10)
    assert ready.runs()
    ready.engines[SHARD].busy = 0
    ready.run(2)
    assert confirms_stop(ready.report(), order_rev=9)


def test_what_was_being_killed_is_killed(ready: Bench) -> None:
    ready.engines[SHARD].obeys_term = False
    ready.see((9, stopped(assignment())))
    ready.run(4)
    ready.restart()
    ready.run(1)
    assert confirms_stop(ready.report(), order_rev=9)
    assert not ready.runs()
