"""How long a load may take, and how often a start may fail: told as stories."""

import os
from pathlib import Path

import msgspec
import pytest

from llmgw.core.replica import Desired, ShardPhase
from llmgw.testing.node import Bench, assignment
from llmgw_agent import enginelog, proc
from llmgw_agent import event as ev
from llmgw_agent.host import Loading, Silent
from llmgw_agent.machine import BUDGETS_MAX
from llmgw_agent.progress import MEMORY_STEP_BYTES, Progress

SHARD = "m-aaaaa.0"
BUDGET_S = assignment().start_s


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()))
    return bench


def loads(bench: Bench, load_s: float, *, gets_on_s: float) -> None:
    bench.script.load_s, bench.script.gets_on_s = load_s, gets_on_s
    bench.see((7, assignment()))


# --- slow is not failed ---------------------------------------------------------------------------------------------


def test_b13_a_load_that_visibly_gets_on_may_take_longer_than_its_budget(bench: Bench) -> None:
    loads(bench, 4.5 * BUDGET_S, gets_on_s=4.5 * BUDGET_S)
    seen: list[int] = []
    while bench.report().phase is ShardPhase.STARTING:
        bench.run(5)
        if not seen or seen[-1] != bench.report().extended:
            seen.append(bench.report().extended)
    assert bench.report().phase is ShardPhase.READY
    assert len(bench.starts) == 1, "never begun again from zero"
    assert seen == [0, 1, 2, 3, 4, 5, 0], "published once a budget, and over when it is ready"
    assert bench.report().attempts == 0


def test_b13_a_load_that_stops_getting_on_fails_a_budget_later(bench: Bench) -> None:
    loads(bench, 1000, gets_on_s=100)
    bench.run(100 + BUDGET_S - 1)
    assert bench.report().phase is ShardPhase.STARTING
    bench.run(12)
    assert bench.report().phase is ShardPhase.FAILED
    assert bench.report().reason == "stopped loading: nothing new for 60 s: Loading model"
    assert not bench.runs()


def test_b13_a_load_that_gets_on_for_ever_ends_at_the_cap(bench: Bench) -> None:
    loads(bench, 10_000, gets_on_s=10_000)
    bench.run(BUDGETS_MAX * BUDGET_S - 1)
    assert bench.report().phase is ShardPhase.STARTING
    assert bench.report().extended == BUDGETS_MAX - 1
    bench.run(3)
    assert bench.report().phase is ShardPhase.FAILED
    assert bench.report().reason == "not ready within 6 times 60 s, although it went on loading: Loading model"


def test_b13_saying_the_same_again_shows_nothing_and_saying_something_new_does(bench: Bench) -> None:
    loads(bench, 10_000, gets_on_s=0)
    engine = bench.engines[SHARD]
    for percent in (10, 20, 30):
        engine.result = Loading(detail=f"Loading model: {percent} %")
        bench.run(40)
        assert bench.report().phase is ShardPhase.STARTING, percent
    engine.result = Silent(why="no answer in time")
    bench.run(10)
    engine.result = Loading(detail="Loading model: 30 %")
    bench.run(25)
    assert bench.report().phase is ShardPhase.FAILED
    assert bench.report().reason == "stopped loading: nothing new for 60 s: Loading model: 30 %"


def test_b13_another_budget_counts_for_a_load_under_way(bench: Bench) -> None:
    loads(bench, 200, gets_on_s=0)
    bench.run(50)
    bench.see((8, msgspec.structs.replace(assignment(), start_s=300.0)))
    bench.run(160)
    assert bench.report().phase is ShardPhase.READY
    assert len(bench.starts) == 1


def test_b13_an_agent_that_takes_over_a_load_goes_on_watching_it(bench: Bench) -> None:
    loads(bench, 150, gets_on_s=150)
    bench.run(40)
    bench.restart()
    bench.run(115)
    assert bench.report().phase is ShardPhase.READY
    assert len(bench.starts) == 1


def test_b13_an_engine_that_ends_at_once_is_started_later_and_later_and_the_count_is_seen(bench: Bench) -> None:
    bench.script.load_s = 1000
    bench.see((7, assignment()))
    began: list[float] = []
    for attempt in (1, 2, 3):
        bench.engines[SHARD].end("exit 1: no such tensor")
        ended_s = bench.now_s
        starts = len(bench.starts)
        while len(bench.starts) == starts:
            bench.run(0.25)
        began.append(bench.now_s - ended_s)
        assert (bench.report().attempts, bench.report().phase) == (attempt, ShardPhase.STARTING)
        assert bench.report().reason == f"exit 1: no such tensor (attempt {attempt})"
    assert began[2] - began[1] > began[1] - began[0] > 0


def test_b13_half_an_hour_of_stable_running_sets_the_count_to_zero(bench: Bench) -> None:
    bench.see((7, assignment()))
    bench.run(2)
    bench.engines[SHARD].end("exit 1")
    bench.run(10)
    bench.run(1780)
    assert (bench.report().phase, bench.report().attempts) == (ShardPhase.READY, 1)
    bench.run(25)
    assert bench.report().attempts == 0


def test_a_held_order_has_no_budget(bench: Bench) -> None:
    bench.see((7, assignment(desired=Desired.HELD)))
    bench.run(10 * BUDGET_S)
    assert bench.report().phase is ShardPhase.HELD


# --- what counts as getting on --------------------------------------------------------------------------------------


def write(directory: Path, text: str) -> None:
    with (directory / enginelog.CURRENT).open("a") as file:
        file.write(text)


def test_a_new_line_in_the_log_is_a_step_and_an_answer_to_a_probe_is_none(tmp_path: Path) -> None:
    progress = Progress()
    assert progress.look(tmp_path, []) == 0, "no log yet"
    write(tmp_path, "loading tensors\n")
    assert progress.look(tmp_path, []) == 1
    assert progress.look(tmp_path, []) == 1
    write(tmp_path, 'INFO: "GET /health HTTP/1.1" 503\n\n')
    assert progress.look(tmp_path, []) == 1
    write(tmp_path, "shards: 10%\rshards: 20%\r")
    assert progress.look(tmp_path, []) == 2


def test_a_log_that_was_cut_or_is_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    write(tmp_path, "x" * 20_000)
    end, wrote = enginelog.read_on(tmp_path, 0)
    assert (end, wrote) == (20_000, True)
    (tmp_path / enginelog.CURRENT).write_text("anew\n")
    assert enginelog.read_on(tmp_path, end) == (5, True)
    assert enginelog.read_on(tmp_path, 5) == (5, False)


def test_memory_that_grows_is_a_step(tmp_path: Path) -> None:
    progress = Progress()
    assert progress.look(tmp_path, [os.getpid()]) == 1
    assert progress.look(tmp_path, [os.getpid()]) == 1
    taken = bytearray(b"x" * (2 * MEMORY_STEP_BYTES))
    assert progress.look(tmp_path, [os.getpid()]) == 2
    assert len(taken) == 2 * MEMORY_STEP_BYTES


def test_a_process_that_is_gone_holds_no_memory() -> None:
    assert proc.memory_bytes(os.getpid()) > 0
    assert proc.memory_bytes(2**22 + 1) == 0
