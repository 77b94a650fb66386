"""Stories of gangs and GPUs on the simulated control plane: few faults, exact claims."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from llmgw.core.catalog import EngineSpec, NodeSpec
from llmgw.core.node import Liveness
from llmgw.core.record import StoreMeta
from llmgw.core.replica import Assignment, Claim, Desired, ReplicaPhase, Retire, Rollout
from llmgw.core.snapshot import Kind, Ref
from llmgw.store import codec, keys
from llmgw.store.port import PutOp
from llmgw.testing.scenario import (
    SOON_S,
    always,
    calm,
    engine,
    equipped,
    liveness,
    nodes_of,
    number,
    pids,
    ready,
    replicas,
    routed,
    up,
)
from llmgw.testing.sim_fleet import Sizes
from llmgw.testing.sim_hardware import Hardware
from llmgw.testing.sim_machine import ENGINE, ENGINE_GPU, Temper
from llmgw.testing.simulation import Run, play
from llmgw.testing.storm_models import START_S, gang_model, gpu_model, model


def story(scenario: Callable[[Run], Awaitable[None]], machines: list[Hardware]) -> None:
    play(scenario, sizes=Sizes(nodes=len(machines), machines=tuple(machines)))


def claims(run: Run) -> dict[str, Claim]:
    """What every shard holds, by node and shard."""
    return {
        f"{shard.node}/{replica.id}.{shard.rank}": shard.claim
        for replica in run.judge.checker.index.replicas.records()
        for shard in replica.shards
        if not shard.released
    }


def test_a_gang_that_loses_a_node_is_built_anew_and_what_that_node_holds_stays_held() -> None:
    async def scenario(run: Run) -> None:
        await up(run, gang_model("m", engine=ENGINE_GPU, gpus=2))
        [before] = ready(run, "m")
        head, worker = nodes_of(before)
        index = run.judge.checker.index
        await run.fleet.power_off(number(worker))
        await run.until(lambda: before.id in index.replicas and not _live(run, before.id), within_s=60, what="it fails")
        await run.until(lambda: _released(run, before.id, head), within_s=30, what="the head's claim ends")
        assert not _released(run, before.id, worker), "nobody has confirmed that its process is gone"
        await run.until(lambda: bool(ready(run, "m")), within_s=60, what="another gang is ready")
        [after] = ready(run, "m")
        assert worker not in nodes_of(after)
        assert liveness(run, worker) is not Liveness.LOST, "a failed gang is no reason to give its node up"
        run.fleet.power_on(number(worker))
        await run.settle(within_s=SOON_S)
        assert [replica.id for replica in replicas(run, "m")] == [after.id]
        assert set(claims(run)) == {f"{node}/{after.id}.{rank}" for rank, node in enumerate(nodes_of(after))}

    story(scenario, [equipped(n, gpus=2) for n in range(3)])


def _live(run: Run, replica: str) -> bool:
    record = run.judge.checker.index.replicas.record(replica)
    return record is not None and record.retire is None


def _released(run: Run, replica: str, node: str) -> bool:
    record = run.judge.checker.index.replicas.record(replica)
    return record is None or all(shard.released for shard in record.shards if shard.node == node)


def test_c11_a_rank_that_never_joins_costs_its_gang_one_start_budget_and_all_claims_end() -> None:
    """On one node nothing ever gets ready. The gang is stopped whole, its node remembered, and another one is tried."""

    async def scenario(run: Run) -> None:
        def temper(order: Assignment) -> Temper:
            return Temper(loads_s=1e9 if order.node == "node-1" else 3)

        run.storm.temper = temper  # type: ignore[method-assign]  # engines of this story's making
        run.fleet.start()
        run.storm.models["m"] = gang_model("m", engine=ENGINE_GPU, gpus=2)
        await run.storm.apply()
        await run.until(lambda: bool(replicas(run, "m")), within_s=30, what="a gang is placed")
        [first] = replicas(run, "m")
        assert "node-1" in nodes_of(first)
        began_s = anyio.current_time()
        await run.until(lambda: not _live(run, first.id), within_s=START_S + 30, what="it is given up")
        assert anyio.current_time() - began_s >= START_S - 5
        await run.until(lambda: first.id not in run.judge.checker.index.replicas, within_s=30, what="all claims end")
        await run.until(lambda: bool(ready(run, "m")), within_s=60, what="another gang is ready")
        assert "node-1" not in nodes_of(ready(run, "m")[0])
        state = run.judge.checker.index.model_states.record("m")
        assert state is not None
        assert "node-1" in state.failed_nodes
        assert "node-1" in state.failure

    story(scenario, [equipped(n, gpus=2) for n in range(3)])


def test_a_head_that_waits_for_its_workers_is_held_until_they_listen() -> None:
    """The machines themselves look at it: see `Machine.launch`. Here the worker takes its time."""

    async def scenario(run: Run) -> None:
        def temper(order: Assignment) -> Temper:
            return Temper(loads_s=40 if order.rank else 1)

        run.storm.temper = temper  # type: ignore[method-assign]  # engines of this story's making
        run.fleet.start()
        run.storm.models["m"] = gang_model("m", engine=ENGINE, gpus=1)
        await run.storm.apply()
        await anyio.sleep(30)
        [gang] = replicas(run, "m")
        orders = {rank: _order(run, node, gang.id, rank) for rank, node in enumerate(nodes_of(gang))}
        assert {rank: order.desired for rank, order in orders.items()} == {0: Desired.HELD, 1: Desired.RUNNING}
        await run.until(lambda: bool(ready(run, "m")), within_s=60, what="the gang is ready")
        assert engine(run, gang, 0).started_s >= engine(run, gang, 1).started_s + 40

    story(scenario, [equipped(n, gpus=1) for n in range(2)])


def _order(run: Run, node: str, replica: str, rank: int) -> Assignment:
    order = run.judge.checker.index.assignments.record(f"{node}/{replica}.{rank}")
    assert order is not None
    return order


def test_c08_a_gpu_falls_off_the_bus_and_only_its_replica_fails_over() -> None:
    async def scenario(run: Run) -> None:
        await up(run, gpu_model("m", count=1), gpu_model("n", count=1))
        [before], [neighbour] = ready(run, "m"), ready(run, "n")
        node = nodes_of(before)[0]
        assert nodes_of(neighbour) == [node], "partly used nodes first"
        [uuid] = [gpu.uuid for gpu in before.shards[0].claim.gpus]
        kept = engine(run, neighbour).process.pid
        held = neighbour.shards[0].claim
        run.fleet.world[node].lose_gpu(uuid, hangs=True)
        await run.until(lambda: bool(ready(run, "m")) and ready(run, "m")[0].id != before.id, within_s=90, what="over")
        await run.settle(within_s=SOON_S)
        [after] = ready(run, "m")
        assert uuid not in [gpu.uuid for gpu in after.shards[0].claim.gpus]
        [neighbour] = ready(run, "n")
        assert (engine(run, neighbour).process.pid, neighbour.shards[0].claim) == (kept, held)
        assert run.judge.retirements()[Retire.FAILED] == 1

    story(scenario, [equipped(n, gpus=2) for n in range(2)])


def test_a_restored_store_takes_back_gpus_and_gangs_as_they_run() -> None:
    async def scenario(run: Run) -> None:
        await up(run, model("old", memory_gb=4, replicas=1))
        backup = run.fleet.cluster.snapshot()
        run.storm.models["gpu"] = gpu_model("gpu", count=1, replicas=2)
        run.storm.models["gang"] = gang_model("gang", engine=ENGINE_GPU, gpus=1)
        run.storm.models["held"] = gang_model("held", engine=ENGINE)
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        running, held = pids(run), claims(run)
        cluster = run.fleet.cluster
        cluster.stop()
        await anyio.sleep(20)
        cluster.restore(backup)
        cluster.start()
        meta = StoreMeta(incarnation="restored")
        cluster.commit([], [PutOp(key=keys.key(Ref(Kind.META)), value=codec.encode_stored(meta))], [])
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        assert pids(run) == running
        assert claims(run) == held
        assert run.judge.totals["replica adopted"] == 4
        assert run.judge.totals["gang adopted"] == 2

    story(scenario, [equipped(n, gpus=2) for n in range(3)])


def test_a11_all_sessions_deleted_at_once_restart_nothing_and_move_nothing() -> None:
    """While all agents run: they register again under their names, and nobody was ever given up."""

    async def scenario(run: Run) -> None:
        await up(run, model("m", memory_gb=10, replicas=3), gang_model("g", engine=ENGINE_GPU, gpus=1))
        running, held = pids(run), claims(run)
        index = run.judge.checker.index
        async with anyio.create_task_group() as tasks:
            both = lambda: routed(run, "m") and routed(run, "g")  # noqa: E731  # as short as what it says
            tasks.start_soon(lambda: always(run, both, what="both have routes"))
            for session in list(index.sessions.records()):
                run.fleet.cluster.revoke(session.lease)
            assert not index.sessions
            await anyio.sleep(1)
            await run.settle(within_s=SOON_S)
            await anyio.sleep(run.fleet.sizes.lost_after_s + 60)
            tasks.cancel_scope.cancel()
        assert pids(run) == running
        assert claims(run) == held
        assert run.judge.totals["node lost"] == 0

    story(scenario, [equipped(n, gpus=1) for n in range(6)])


def test_a_drain_lets_a_stream_end_and_its_node_is_empty_only_then() -> None:
    async def scenario(run: Run) -> None:
        def temper(_: Assignment) -> Temper:
            return Temper(loads_s=3, busy_s=15)  # somebody reads an answer for so long

        await up(run, gpu_model("m", count=1), temper=temper)
        [before] = ready(run, "m")
        node, old = nodes_of(before)[0], engine(run, before)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: always(run, lambda: routed(run, "m"), what="m has a route"))
            await run.storm.write((Ref(Kind.NODE_SPEC, node), NodeSpec(name=node, drain=True)))
            await run.until(lambda: not old.alive, within_s=SOON_S, what="the old one has ended")
            tasks.cancel_scope.cancel()
        assert old.exit == "exited with 0"
        assert old.idle_s is not None
        assert old.ends_s >= old.idle_s, "its last answer was cut"
        [after] = ready(run, "m")
        assert nodes_of(after) != [node]
        await run.until(lambda: not run.judge.checker.index.assignments_on.get(node), within_s=30, what="it is empty")

    story(scenario, [equipped(n, gpus=1) for n in range(2)])


def test_a_version_that_does_not_start_stops_its_rollout_and_the_old_one_serves_on() -> None:
    async def scenario(run: Run) -> None:
        run.storm.wish = EngineSpec(name=ENGINE, version="b1")
        await up(run, model("m", memory_gb=10, replicas=2))
        before = {replica.id for replica in ready(run, "m")}

        def broken(order: Assignment) -> Temper:
            return Temper(fails="Illegal instruction") if order.launch.build == f"{ENGINE}@b2" else calm(order)

        run.storm.temper = broken  # type: ignore[method-assign]  # engines of this story's making
        run.storm.wish = EngineSpec(name=ENGINE, version="b2")
        await run.storm.apply()
        await run.until(lambda: _rollout(run) is Rollout.STOPPED, within_s=SOON_S, what="the rollout stops")
        await anyio.sleep(600)
        assert {replica.id for replica in ready(run, "m")} == before
        assert run.judge.retirements()[Retire.FAILED] == 1, "one was tried, and no more"
        state = run.judge.checker.index.model_states.record("m")
        assert state is not None
        assert "Illegal instruction" in state.failure
        run.storm.temper = calm  # type: ignore[method-assign]  # the next version is a good one
        run.storm.wish = EngineSpec(name=ENGINE, version="b1")
        await run.storm.apply()
        await run.until(lambda: _rollout(run) is Rollout.NONE, within_s=SOON_S, what="nothing is to be rolled")
        assert {replica.id for replica in ready(run, "m")} == before

    story(scenario, [equipped(n, gpus=0) for n in range(3)])


def _rollout(run: Run) -> Rollout | None:
    state = run.judge.checker.index.model_states.record("m")
    return None if state is None else state.rollout


def test_while_half_the_fleet_is_gone_the_guard_gives_nobody_up_but_whom_people_release() -> None:
    async def scenario(run: Run) -> None:
        await up(run, gpu_model("m", count=1, replicas=3))
        index = run.judge.checker.index
        gone = sorted({node for replica in ready(run, "m") for node in nodes_of(replica)})[:3]
        for node in gone:
            await run.fleet.power_off(number(node))
        await run.until(lambda: _guarded(run), within_s=60, what="the guard is on")
        await anyio.sleep(2 * run.fleet.sizes.lost_after_s)
        assert [liveness(run, node) for node in gone] == [Liveness.UNREACHABLE] * len(gone)
        placed = set(index.replicas)
        state = index.node_states.record(gone[0])
        assert state is not None
        await run.storm.write((Ref(Kind.NODE_SPEC, gone[0]), NodeSpec(name=gone[0], release=state.lease)))
        await run.until(lambda: liveness(run, gone[0]) is Liveness.LOST, within_s=90, what="it is Lost")
        await run.until(lambda: set(index.replicas) > placed, within_s=10, what="it is replaced")
        assert liveness(run, gone[1]) is Liveness.UNREACHABLE

    story(scenario, [equipped(n, gpus=1) for n in range(6)])


def _guarded(run: Run) -> bool:
    fleet = run.judge.checker.index.fleet
    return fleet is not None and fleet.record is not None and fleet.record.guard.on


def test_a_gang_whose_head_fails_frees_its_workers_before_it_is_tried_again() -> None:
    async def scenario(run: Run) -> None:
        await up(run, gang_model("m", engine=ENGINE, gpus=1))
        [before] = ready(run, "m")
        engine(run, before).end(anyio.current_time(), "killed by SIGSEGV")
        await run.until(lambda: before.id not in run.judge.checker.index.replicas, within_s=30, what="it is gone")
        assert not any(name.partition("/")[2].startswith(before.id) for name in pids(run)), "and so are its workers"
        await run.settle(within_s=SOON_S)
        [after] = ready(run, "m")
        assert after.phase is ReplicaPhase.READY
        assert run.judge.retirements()[Retire.FAILED] == 1

    story(scenario, [equipped(n, gpus=1) for n in range(2)])
