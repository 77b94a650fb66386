"""What operators say of nodes, through the commands' own code, to a control plane that acts on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from llmgw.cli.drain import drain_nodes
from llmgw.cli.guard import release_nodes
from llmgw.cli.node import forget_node
from llmgw.cli.node_write import edit_nodes
from llmgw.cli.recover import recover_store
from llmgw.core.catalog import NodeSpec
from llmgw.core.node import Liveness
from llmgw.core.record import StoreMeta
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.errors import NotFound, Partial, Refused
from llmgw.store import codec, keys
from llmgw.store.port import PutOp
from llmgw.testing.sim_fleet import Sizes
from llmgw.testing.sim_machine import Temper
from llmgw.testing.simulation import Run, play
from llmgw.testing.storm_models import model

SOON_S = 60.0


def story(scenario: Callable[[Run], Awaitable[None]], *, nodes: int = 3) -> None:
    play(scenario, sizes=Sizes(nodes=nodes))


async def up(run: Run, *specs: tuple[str, float, int]) -> Index:
    """Everything runs, and so many replicas of each model (name, GB, replicas) are ready."""
    run.storm.temper = lambda _: Temper(loads_s=3)  # type: ignore[method-assign]  # engines without tempers
    run.fleet.start()
    for name, memory_gb, replicas in specs:
        run.storm.models[name] = model(name, memory_gb=memory_gb, replicas=replicas)
    await run.storm.apply()
    await run.settle(within_s=SOON_S)
    return run.judge.checker.index


def spec(index: Index, name: str) -> NodeSpec:
    return index.node_specs.record(name) or NodeSpec(name=name)


def liveness(index: Index, name: str) -> Liveness | None:
    state = index.node_states.record(name)
    return None if state is None else state.liveness


def nodes_of(index: Index, name: str) -> set[str]:
    replicas = (index.replicas.record(each) for each in index.replicas_of.get(name, ()))
    return {shard.node for replica in replicas if replica is not None for shard in replica.shards if not shard.released}


def test_a_drain_waits_until_the_last_replica_has_moved_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 2))
        (first, *_) = sorted(nodes_of(index, "m"))
        await drain_nodes(run.fleet.store, (first,), wait=True, timeout_s=None)
        assert first not in nodes_of(index, "m")
        assert not index.assignments_on.get(first)
        await run.settle(within_s=SOON_S)
        assert len(nodes_of(index, "m")) == 2

    story(scenario)
    told = capsys.readouterr()
    assert "draining" in told.out
    assert "nothing is left on" in told.out
    assert "serves until" in told.err


def test_a_drain_that_has_nowhere_to_go_says_why_and_ends_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 40, 2))  # one on each node, and no room for a second one
        with pytest.raises(Partial, match=r"not empty within 30 s.*too little memory") as told:
            await drain_nodes(run.fleet.store, ("node-0",), wait=True, timeout_s=30)
        assert (told.value.done, told.value.total) == (0, 1)
        assert nodes_of(index, "m") == {"node-0", "node-1"}
        await edit_nodes(run.fleet.store, ["node-0"], lambda _, old: NodeSpec(name=old.name))
        await run.settle(within_s=SOON_S)

    story(scenario, nodes=2)
    assert "stays until there is room" in capsys.readouterr().err


def test_a_cordon_outlives_the_agent_and_keeps_what_else_was_said() -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 1))
        await run.storm.write((Ref(Kind.NODE_SPEC, "node-0"), NodeSpec(name="node-0", labels={"rack": "7"})))
        changed = await edit_nodes(
            run.fleet.store,
            ["node-0", "node-1"],
            lambda _, old: NodeSpec(name=old.name, labels=old.labels, cordon=True),
        )
        assert changed == {"node-0": True, "node-1": True}
        await run.fleet.agents[0].kill()
        run.fleet.agents[0].start()
        await run.settle(within_s=SOON_S)
        assert spec(index, "node-0") == NodeSpec(name="node-0", labels={"rack": "7"}, cordon=True)
        run.storm.models["n"] = model("n", memory_gb=10, replicas=1)
        await run.storm.apply()
        await run.settle(within_s=SOON_S)
        assert nodes_of(index, "n") == {"node-2"}

    story(scenario)


def test_an_unknown_node_refuses_the_whole_command_by_its_nearest_name() -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 1))
        with pytest.raises(NotFound, match="node-0"):
            await drain_nodes(run.fleet.store, ("node-1", "nod-0"), wait=False, timeout_s=None)
        await anyio.sleep(5)
        assert not index.node_specs

    story(scenario)


def test_a_release_lets_go_of_those_that_are_gone_and_of_nobody_else() -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 3))
        with pytest.raises(Refused, match="is there"):
            await release_nodes(run.fleet.store, ("node-0",))
        for n in (0, 1):
            await run.fleet.power_off(n)
        await run.until(lambda: liveness(index, "node-1") is Liveness.UNREACHABLE, within_s=60, what="seen to be away")
        await anyio.sleep(400)
        assert liveness(index, "node-0") is liveness(index, "node-1") is Liveness.UNREACHABLE  # the guard
        with pytest.raises(Refused, match="is there"):
            await release_nodes(run.fleet.store, ("node-0", "node-2"))
        assert spec(index, "node-0").release is None
        await release_nodes(run.fleet.store, ("node-0",))
        await run.until(lambda: liveness(index, "node-0") is Liveness.LOST, within_s=30, what="declared Lost")
        for n in (0, 1):
            run.fleet.power_on(n)
        await run.settle(within_s=SOON_S)

    story(scenario)


def test_a_machine_is_forgotten_only_when_it_is_gone_and_then_holds_nothing() -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 3))
        with pytest.raises(Refused, match="has a session"):
            await forget_node(run.fleet.store, "node-0", timeout_s=30)
        await run.fleet.power_off(0)
        await run.until(lambda: liveness(index, "node-0") is Liveness.UNREACHABLE, within_s=60, what="seen to be away")
        await forget_node(run.fleet.store, "node-0", timeout_s=30)
        await anyio.sleep(2)
        assert "node-0" not in index.nodes()
        assert not index.node_specs
        assert not index.reports_on.get("node-0")
        assert not index.replicas_on.get("node-0")
        run.fleet.power_on(0)  # the same machine after all: it is a new node
        await run.settle(within_s=SOON_S)
        assert liveness(index, "node-0") is Liveness.READY

    story(scenario)


def test_without_a_leader_forgetting_says_so_and_a_rerun_ends_it() -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 3))
        await run.fleet.power_off(0)
        await run.until(lambda: liveness(index, "node-0") is Liveness.UNREACHABLE, within_s=60, what="seen to be away")
        for controller in run.fleet.controllers:
            await controller.kill()
        await anyio.sleep(15)
        with pytest.raises(Partial, match="no controller leads"):
            await forget_node(run.fleet.store, "node-0", timeout_s=10)
        assert "node-0" in index.facts
        for controller in run.fleet.controllers:
            controller.start()
        await forget_node(run.fleet.store, "node-0", timeout_s=60)
        await run.until(lambda: "node-0" not in index.nodes(), within_s=5, what="it is gone")
        run.fleet.power_on(0)
        await run.settle(within_s=SOON_S)

    story(scenario)


def test_recover_ends_the_wait_of_a_restored_store_and_only_that(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(run: Run) -> None:
        index = await up(run, ("m", 10, 2))
        await recover_store(run.fleet.store, yes=True)
        assert index.recover is None
        await run.fleet.power_off(0)
        cluster, backup = run.fleet.cluster, run.fleet.cluster.snapshot()
        cluster.stop()
        cluster.restore(backup)
        cluster.start()
        meta = StoreMeta(incarnation="restored")
        cluster.commit([], [PutOp(key=keys.key(Ref(Kind.META)), value=codec.encode_stored(meta))], [])
        await anyio.sleep(60)
        run.storm.models["n"] = model("n", memory_gb=10, replicas=1)
        await run.storm.apply()
        await anyio.sleep(30)
        index = run.judge.checker.index  # another one, of the restored store
        assert not index.replicas_of.get("n")  # it waits for node-0
        await recover_store(run.fleet.store, yes=True)
        await run.until(lambda: bool(index.replicas_of.get("n")), within_s=30, what="n is placed")
        run.fleet.power_on(0)
        await run.settle(within_s=400)

    story(scenario)
    told = capsys.readouterr()
    assert "nothing waits" in told.out
    assert "1 of 3 nodes have not reported since the restore: node-0" in told.err
