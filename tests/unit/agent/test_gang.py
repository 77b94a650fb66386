"""A node's part of a replica that spans nodes: held until it may start, and never started twice."""

import msgspec
import pytest

from llmgw.core.node import EngineFacts
from llmgw.core.replica import Assignment, Desired, Gang, Peer, ShardPhase, confirms_stop
from llmgw.testing.node import Bench, agent_config, assignment, stopped
from llmgw_agent import event as ev
from llmgw_agent.facts import build_facts

HEAD, WORKER = "m-aaaaa.0", "m-aaaaa.1"
GANG = Gang(
    fabric="ib0",
    peers=(Peer(rank=0, node="n1", address="10.0.0.1"), Peer(rank=1, node="n2", address="10.0.0.2")),
    ports=tuple(range(21000, 21016)),
)


def part(rank: int = 0, desired: Desired = Desired.RUNNING) -> Assignment:
    return assignment(gang=GANG, rank=rank, desired=desired, launch={"nodes": 2})


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.tell(ev.Restored(saved=None, found=()))
    return bench


@pytest.fixture
def held(bench: Bench) -> Bench:
    """A head that waits for its workers."""
    bench.see((7, part(desired=Desired.HELD)))
    assert bench.report().phase is ShardPhase.HELD
    return bench


@pytest.fixture
def ready(bench: Bench) -> Bench:
    bench.see((7, part()))
    bench.run(2)
    assert bench.report().phase is ShardPhase.READY
    return bench


# --- held -----------------------------------------------------------------------------------------------------------


def test_a_held_shard_is_reported_and_starts_when_released(held: Bench) -> None:
    held.run(600)
    report = held.report()
    assert (report.phase, report.assignment_rev, report.pid, report.port) == (ShardPhase.HELD, 7, None, None)
    assert not held.starts
    held.see((8, part()))
    held.run(2)
    assert (held.report().phase, held.report().assignment_rev) == (ShardPhase.READY, 8)


@pytest.mark.parametrize("boot", [None, "boot-2"], ids=["agent", "machine"])
@pytest.mark.parametrize("lost", [False, True], ids=["state", "no state"])
def test_a_held_shard_is_held_after_a_restart(held: Bench, boot: str | None, lost: bool) -> None:
    held.restart(boot=boot, lost=lost)
    if not lost:
        assert held.report().phase is ShardPhase.HELD, "at once, and without the store"
    held.run(60)
    held.see((7, part(desired=Desired.HELD)))
    held.run(60)
    assert (held.report().phase, held.report().assigned) == (ShardPhase.HELD, True)
    assert not held.starts
    held.see((8, part()))
    held.run(70)  # ports rest where the state was lost
    assert held.report().phase is ShardPhase.READY


def test_a_hold_that_ended_while_the_machine_was_down_starts_by_the_stores_word(held: Bench) -> None:
    held.restart(boot="boot-2")
    held.run(60)
    assert not held.starts
    held.see((8, part()))
    held.run(2)
    assert held.report().phase is ShardPhase.READY


def test_an_order_that_was_only_read_ends_no_hold(held: Bench) -> None:
    held.tell(ev.OrdersRead(orders={HEAD: ev.Order(rev=8, assignment=part())}))
    held.run(60)
    assert held.report().phase is ShardPhase.HELD
    held.restart()
    held.run(60)
    assert (held.report().phase, held.starts) == (ShardPhase.HELD, [])


def test_a_held_shard_stops_at_once_and_cleanly(held: Bench) -> None:
    held.see((9, stopped(part())))
    assert confirms_stop(held.report(), order_rev=9)
    assert held.report().phase is ShardPhase.STOPPED
    held.see((10, part()))
    held.run(60)
    assert not held.starts, "a stop is final"
    held.see()
    assert not held.reports


def test_a_held_shard_whose_order_is_gone_is_forgotten(held: Bench) -> None:
    held.see()
    assert not held.reports
    held.run(60)
    assert not held.starts


def test_an_agent_that_takes_its_engines_along_leaves_a_hold_as_it_is(held: Bench) -> None:
    held.tell(ev.ExitRequested())
    assert held.supervisor.quiet
    assert held.report().phase is ShardPhase.HELD


def test_a_hold_ordered_for_what_runs_stops_nothing(ready: Bench) -> None:
    ready.see((9, part(desired=Desired.HELD)))
    ready.run(600)
    assert ready.runs()
    assert (ready.report().phase, ready.report().assignment_rev) == (ShardPhase.READY, 9)


# --- never twice ----------------------------------------------------------------------------------------------------


def test_a_workers_report_names_no_address(bench: Bench) -> None:
    bench.see((7, part(rank=1)))
    bench.run(2)
    report = bench.report(WORKER)
    assert (report.phase, report.address, report.port) == (ShardPhase.READY, None, None)


def test_c11_a_part_of_a_gang_that_crashes_is_not_started_again(ready: Bench) -> None:
    ready.engines[HEAD].end("exit 1: NCCL error")
    ready.run(60)
    assert ready.report().phase is ShardPhase.FAILED
    assert ready.report().reason == "exit 1: NCCL error (attempt 1, the last)"
    assert len(ready.starts) == 1


def test_a_part_of_a_gang_is_not_started_again_after_a_reboot(ready: Bench) -> None:
    ready.restart(boot="boot-2")
    ready.run(60)
    assert (ready.report().phase, ready.report().reason) == (ShardPhase.FAILED, "the machine was restarted")
    ready.see((7, part()))
    ready.run(60)
    assert ready.report().phase is ShardPhase.FAILED
    assert len(ready.starts) == 1
    ready.see((9, stopped(part())))
    assert confirms_stop(ready.report(), order_rev=9)


@pytest.mark.parametrize("left", [0, 1])
def test_a_part_of_a_gang_that_ended_while_no_agent_watched_has_failed(ready: Bench, left: int) -> None:
    ready.engines[HEAD].end("exit 1")
    ready.engines[HEAD].left = left
    ready.restart()
    ready.run(60)
    assert (ready.report().phase, ready.report().reason) == (ShardPhase.FAILED, "ended while no agent watched")
    assert len(ready.starts) == 1


@pytest.mark.parametrize(("alive", "left"), [(True, 0), (False, 1), (False, 0)])
def test_a_part_of_a_gang_that_was_being_ended_when_the_agent_died_has_failed(
    ready: Bench,
    alive: bool,
    left: int,
) -> None:
    assert ready.saved is not None
    [shard] = ready.saved.shards
    killing = msgspec.structs.replace(shard, stage="killing")
    ready.engines[HEAD].alive, ready.engines[HEAD].left = alive, left
    ready.restart(saved=msgspec.structs.replace(ready.saved, shards=(killing,)))
    ready.run(60)
    assert ready.report().phase is ShardPhase.FAILED
    assert not ready.runs()
    assert len(ready.starts) == 1


def test_a_part_of_a_gang_from_an_older_copy_is_not_started_again(ready: Bench) -> None:
    older = ready.saved
    ready.engines[HEAD].end("exit 1")
    ready.restart(saved=older, lost=True)
    ready.see((7, part()))
    ready.run(120)
    assert ready.report().phase is ShardPhase.FAILED
    assert len(ready.starts) == 1


def test_a_part_of_a_gang_that_never_began_starts_after_a_restart() -> None:
    bench = Bench(agent_config(engine_ports=(20000, 20000)))
    bench.tell(ev.Restored(saved=None, found=()))
    bench.see((7, assignment("a-zzzzz")), (8, part()))
    bench.run(2)
    assert bench.report().phase is ShardPhase.STARTING
    bench.restart(boot="boot-2")
    assert bench.report().phase is ShardPhase.STARTING
    bench.see((9, stopped(assignment("a-zzzzz"))), (8, part()))
    bench.run(80)
    assert bench.report().phase is ShardPhase.READY


def test_an_agent_that_takes_its_engines_along_breaks_their_gangs(ready: Bench) -> None:
    ready.tell(ev.ExitRequested())
    ready.run(10)
    assert ready.supervisor.quiet
    assert ready.report().phase is ShardPhase.FAILED
    assert ready.report().reason == "the agent exits and takes its engines along"
    ready.restart()
    ready.see((7, part()))
    ready.run(60)
    assert len(ready.starts) == 1


def test_a_start_that_was_under_way_at_the_exit_breaks_its_gang(bench: Bench) -> None:
    out = bench._step(ev.OrdersSeen(orders={HEAD: ev.Order(rev=7, assignment=part())}))
    [start] = [item for item in out if isinstance(item, ev.StartEngine)]
    bench._step(ev.ExitRequested())
    answer = bench._do(start)
    assert answer is not None
    bench.tell(answer)
    bench.run(10)
    assert bench.report().phase is ShardPhase.FAILED


def test_a_part_of_a_gang_found_on_a_port_nobody_knows_has_failed(ready: Bench) -> None:
    found = tuple(msgspec.structs.replace(each, port=None) for each in ready.found())
    ready.supervisor = ready._fresh()
    ready.tell(ev.Restored(saved=None, found=found, lost=True))
    ready.see((7, part()))
    ready.run(80)
    assert ready.report().phase is ShardPhase.FAILED
    assert len(ready.starts) == 1


# --- what the leader must know --------------------------------------------------------------------------------------


def test_a_node_says_which_ports_gangs_may_use() -> None:
    config = agent_config(gang_ports=(30000, 30099))
    facts = build_facts(config, None, boot_id="b", engines=EngineFacts(probed=True), weights=None)
    assert facts.gang_ports == (30000, 30099)
