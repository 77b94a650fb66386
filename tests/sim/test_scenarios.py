"""Named stories on the simulated control plane: few faults, exact claims."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from llmgw.core.explain import Constraint
from llmgw.core.node import Liveness
from llmgw.core.record import StoreMeta
from llmgw.core.replica import ReplicaPhase, ReplicaShard
from llmgw.core.snapshot import Kind, Ref
from llmgw.store import codec, keys
from llmgw.store.port import PutOp
from llmgw.testing.faults import Fate, Link, Operations, TxnFault, once
from llmgw.testing.scenario import SOON_S, always, calm, liveness, pids, routed
from llmgw.testing.sim_fleet import Process, Sizes
from llmgw.testing.sim_machine import Temper
from llmgw.testing.simulation import Run, play
from llmgw.testing.storm_faults import plans
from llmgw.testing.storm_models import model


async def up(run: Run, *specs: tuple[str, float, int]) -> None:
    """Everything runs, and so many replicas of each model (name, GB, replicas) are ready."""
    run.storm.temper = calm  # type: ignore[method-assign]  # engines without tempers
    run.fleet.start()
    for name, memory_gb, replicas in specs:
        run.storm.models[name] = model(name, memory_gb=memory_gb, replicas=replicas)
    await run.storm.apply()
    await run.settle(within_s=SOON_S)


def story(scenario: Callable[[Run], Awaitable[None]], **sizes: float) -> None:
    play(scenario, sizes=Sizes(**{"nodes": 3, **sizes}))  # type: ignore[arg-type]  # numbers, as each field wants


async def leader_of(run: Run) -> Process:
    return await run.storm.leader()


def test_the_replicas_of_a_lost_node_move_and_the_router_never_runs_empty() -> None:
    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2))
        index = run.judge.checker.index
        where = {shard.node for replica in index.replicas.records() for shard in replica.shards}
        lost = int(min(where).removeprefix("node-"))
        name = f"node-{lost}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: always(run, lambda: routed(run, "m"), what="m has a route"))
            went_s = anyio.current_time()
            await run.fleet.power_off(lost)
            await run.until(lambda: liveness(run, name) is Liveness.UNREACHABLE, within_s=40, what="seen to be away")
            replicas = set(index.replicas)
            await run.until(lambda: liveness(run, name) is Liveness.LOST, within_s=400, what="declared Lost")
            assert anyio.current_time() - went_s >= run.fleet.sizes.lost_after_s
            await run.until(lambda: set(index.replicas) > replicas, within_s=5, what="a replacement is placed")
            await run.settle(within_s=SOON_S)
            tasks.cancel_scope.cancel()
        ready = [replica for replica in index.replicas.records() if replica.phase is ReplicaPhase.READY]
        assert len(ready) == 2
        assert all(shard.node != name for replica in ready for shard in replica.shards)
        run.fleet.power_on(lost)
        await run.settle(within_s=SOON_S)
        assert len(index.replicas) == 2
        assert len(pids(run)) == 2

    story(scenario)


def test_a_node_that_comes_back_in_time_keeps_its_replicas_and_a_replacement_under_way_is_cancelled() -> None:
    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 1))
        index = run.judge.checker.index
        (before,) = index.replicas
        node = next(shard.node for shard in _shards(run, before))
        n = int(node.removeprefix("node-"))
        running = pids(run)
        run.storm.temper = lambda _: Temper(loads_s=100)  # type: ignore[method-assign]  # a slow replacement
        run.fleet.agents[n].faulty.link = Link.SILENT
        await run.until(lambda: len(index.replicas) == 2, within_s=500, what="a replacement is placed")
        assert routed(run, "m")
        run.fleet.agents[n].faulty.heal()
        await run.settle(within_s=SOON_S)
        assert list(index.replicas) == [before]
        assert pids(run) == running

    story(scenario)


def _shards(run: Run, replica: str) -> tuple[ReplicaShard, ...]:
    record = run.judge.checker.index.replicas.record(replica)
    assert record is not None
    return record.shards


def test_a04_a_timed_out_commit_that_lands_late_claims_nothing_twice() -> None:
    """The room is for one. Its claim is sent, times out, and lands when its leader has long decided again."""

    async def scenario(run: Run) -> None:
        await up(run, ("old", 10, 1))
        leader = await leader_of(run)
        terms = run.judge.terms
        late = TxnFault(fate=Fate.LATE, delay_s=20)
        leader.faulty.judges.append(once(late, where=places))
        run.storm.models["m"] = model("m", memory_gb=40, replicas=1)
        await run.storm.apply()
        await run.until(lambda: not leader.faulty.judges or routed(run, "m"), within_s=SOON_S, what="m is placed")
        await anyio.sleep(40)
        index = run.judge.checker.index
        assert len(index.replicas_of["m"]) == 1
        assert run.judge.terms == terms  # it was the same leader all the time
        await run.settle(within_s=SOON_S)
        assert sum(name.partition("/")[2].startswith("m-") for name in pids(run)) == 1

    story(scenario, nodes=1)


def places(operations: Operations) -> bool:
    """Whether a commit brings a replica into being."""
    at = keys.prefix(Kind.REPLICA)
    return plans(operations) and any(isinstance(op, PutOp) and op.key.startswith(at) for op in operations)


def test_a04_a_leader_that_was_replaced_commits_nothing_more() -> None:
    """Its commit is on the way while its lease lapses and another reigns: it must find itself fenced."""

    async def scenario(run: Run) -> None:
        await up(run, ("old", 10, 1))
        leader = await leader_of(run)
        leader.faulty.judges.append(once(TxnFault(fate=Fate.LATE, delay_s=60), where=places))
        run.storm.models["m"] = model("m", memory_gb=40, replicas=1)
        await run.storm.apply()
        await anyio.sleep(1)
        leader.faulty.link = Link.SILENT
        await run.until(lambda: run.judge.terms == 2, within_s=SOON_S, what="another leads")
        await run.until(lambda: routed(run, "m"), within_s=SOON_S, what="and has placed m")
        (placed,) = run.judge.checker.index.replicas_of["m"]
        await anyio.sleep(90)
        assert run.judge.checker.index.replicas_of["m"] == {placed}
        leader.faulty.heal()
        await run.settle(within_s=SOON_S)
        assert run.judge.terms == 2

    story(scenario, nodes=1)


def test_a_mirror_that_lags_at_take_over_never_claims_twice() -> None:
    """The old leader fills the node and dies; the next one's mirror has not heard of that yet."""

    async def scenario(run: Run) -> None:
        await up(run, ("old", 10, 1))
        leader = await leader_of(run)
        for other in run.fleet.controllers:
            if other is not leader:
                other.faulty.watch_lag_s = 30
        for name in ("a", "b"):
            run.storm.models[name] = model(name, memory_gb=25, replicas=1)
        await run.storm.apply()
        index = run.judge.checker.index
        await run.until(lambda: bool(index.replicas_of.get("b")), within_s=5, what="both are placed")
        await leader.kill()
        run.storm.models["c"] = model("c", memory_gb=25, replicas=1)  # there is no room for it
        await run.storm.apply()
        await run.until(lambda: run.judge.terms == 2, within_s=SOON_S, what="another leads")
        await anyio.sleep(90)
        assert not index.replicas_of.get("c")
        state = index.model_states.record("c")
        assert state is not None
        assert state.unplaced is not None
        assert [each.constraint for each in state.unplaced.nearest] == [Constraint.MEMORY]
        leader.start()

    story(scenario, nodes=1)


def test_a01_without_any_store_and_without_controllers_everything_serves() -> None:
    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2), ("n", 20, 1))
        running = pids(run)
        async with anyio.create_task_group() as tasks:
            both = lambda: routed(run, "m") and routed(run, "n")  # noqa: E731  # said twice below
            tasks.start_soon(lambda: always(run, both, what="both have routes"))
            run.fleet.cluster.stop()
            await anyio.sleep(3 * 30)
            for controller in run.fleet.controllers:
                await controller.kill()
            await anyio.sleep(600)
            assert pids(run) == running
            run.fleet.cluster.start()
            await anyio.sleep(60)
            run.fleet.start()
            await run.settle(within_s=SOON_S)
            tasks.cancel_scope.cancel()
        assert pids(run) == running

    story(scenario)


def test_a_store_restored_by_the_book_stops_no_engine() -> None:
    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2))
        backup = run.fleet.cluster.snapshot()
        run.storm.models["later"] = model("later", memory_gb=10, replicas=2)
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        running = pids(run)
        cluster = run.fleet.cluster
        cluster.stop()
        await anyio.sleep(20)
        cluster.restore(backup)
        cluster.start()
        meta = StoreMeta(incarnation="restored")
        cluster.commit([], [PutOp(key=keys.key(Ref(Kind.META)), value=codec.encode_stored(meta))], [])
        await run.storm.apply()  # the catalog of today
        await run.settle(within_s=SOON_S)
        assert pids(run) == running
        assert run.judge.totals["replica adopted"] == 2

    story(scenario)


def test_a_store_restored_without_notice_stops_no_engine() -> None:
    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2))
        backup = run.fleet.cluster.snapshot()
        run.storm.models["later"] = model("later", memory_gb=10, replicas=2)
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        running = pids(run)
        run.fleet.cluster.restore(backup)
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        assert pids(run) == running
        meta = run.judge.checker.index.meta
        assert meta is not None
        assert run.judge.totals["replica adopted"] == 2

    story(scenario)


def test_a_wiped_store_stops_no_engine_and_takes_all_back_with_the_catalog() -> None:
    """An empty store knows no model: that is not a wish to have none. People apply the catalog again when they can."""

    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2), ("n", 20, 1))
        running = pids(run)
        run.fleet.cluster.restore(None)
        await anyio.sleep(300)
        assert pids(run) == running
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        assert pids(run) == running
        assert run.judge.totals["replica adopted"] == 3

    story(scenario)


def test_a_store_wiped_while_nobody_leads_is_set_up_by_those_who_stand_by() -> None:
    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2))
        running = pids(run)
        leader = await leader_of(run)
        await leader.kill()
        run.fleet.cluster.restore(None)
        await run.storm.apply()
        await run.until(lambda: run.fleet.leader is not None, within_s=SOON_S, what="another leads")
        await run.settle(within_s=SOON_S)
        assert pids(run) == running

    story(scenario)


def test_a_node_whose_return_the_leaders_watch_has_lost_is_not_given_up() -> None:
    """The leader believes that it is away. The commit that would declare it Lost finds its session, and all is read."""

    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 2))
        index = run.judge.checker.index
        before = set(index.replicas)
        leader = await leader_of(run)
        agent = run.fleet.agents[0]
        await agent.kill()
        await run.until(lambda: liveness(run, "node-0") is Liveness.UNREACHABLE, within_s=40, what="seen to be away")
        leader.faulty.watches_lose = True
        agent.start()
        await run.until(lambda: "node-0" in index.sessions, within_s=5, what="it is back")
        leader.faulty.watches_lose = False
        assert liveness(run, "node-0") is Liveness.UNREACHABLE, "nobody has told the leader"
        await run.until(lambda: liveness(run, "node-0") is Liveness.READY, within_s=400, what="it is seen")
        await run.settle(within_s=SOON_S)
        assert set(index.replicas) == before
        assert run.judge.totals["node lost"] == 0

    story(scenario, relist_s=10_000.0)


def test_a_leader_whose_watch_has_lost_its_own_commit_is_not_blind_until_the_next_listing() -> None:
    """It may decide on nothing that lacks its last commit; so it must find out that it will never come."""

    async def scenario(run: Run) -> None:
        await up(run, ("m", 10, 1))
        leader = await leader_of(run)

        def deaf(operations: Operations) -> None:
            leader.faulty.watches_lose = leader.faulty.watches_lose or plans(operations)

        leader.faulty.judges.append(deaf)
        run.storm.models["n"] = model("n", memory_gb=10, replicas=1)
        await run.storm.apply()
        await run.until(lambda: leader.faulty.watches_lose, within_s=5, what="a commit that it does not hear of")
        await anyio.sleep(1)
        leader.faulty.heal()
        run.storm.models["o"] = model("o", memory_gb=10, replicas=1)
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        assert run.judge.terms == 1

    story(scenario, relist_s=10_000.0)
