"""What named stories on the simulated control plane are told with: begin calmly, look at engines, routes and records.

See `llmgw.testing.simulation`; a story is a function of its `Run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from llmgw.core.catalog import ModelSpec
from llmgw.core.node import Fabric, Gpu, GpuHealth, Liveness
from llmgw.core.replica import Assignment, Replica, ReplicaPhase
from llmgw.core.routing import route_table
from llmgw.core.units import GB
from llmgw.testing.sim_hardware import Hardware
from llmgw.testing.sim_machine import Engine, Temper
from llmgw.testing.simulation import Run

SOON_S: Final = 60.0
"""Within this a fleet without faults is as it should be."""


def equipped(number: int, *, gpus: int, fabric: str | None = "ib", memory_gb: int = 64) -> Hardware:
    """The machine of that number with so many GPUs of one class, on a fabric or on none."""
    return Hardware(
        memory_bytes=memory_gb * GB,
        gpus=tuple(
            Gpu(
                uuid=f"GPU-{number}-{n}",
                index=n,
                gpu_class="a100",
                memory_bytes=80 * GB,
                health=GpuHealth.OK,
                foreign=0,
                foreign_bytes=0,
            )
            for n in range(gpus)
        ),
        fabrics=() if fabric is None else (Fabric(name=fabric, hcas=("mlx5_0",)),),
    )


def calm(order: Assignment) -> Temper:  # noqa: ARG001  # as every temper is asked
    """Engines without tempers."""
    return Temper(loads_s=3)


async def up(run: Run, *specs: ModelSpec, temper: Callable[[Assignment], Temper] = calm) -> None:
    """Everything runs, and all replicas of these models are ready."""
    run.storm.temper = temper  # type: ignore[method-assign]  # engines of this story's making
    run.fleet.start()
    run.storm.models.update({spec.name: spec for spec in specs})
    await run.storm.apply()
    await run.settle(within_s=SOON_S)


def pids(run: Run) -> dict[str, int]:
    """Every engine that lives: its shard and process."""
    return {
        f"{machine.name}/{engine.shard}": engine.process.pid
        for machine in run.fleet.machines
        for engine in machine.running()
    }


def routed(run: Run, name: str) -> bool:
    """Whether the gateway has a route to the model."""
    view = run.fleet.gateway.view
    return view is not None and bool(route_table(view.index).routes.get(name))


def replicas(run: Run, name: str) -> list[Replica]:
    """Every replica of a model, by id."""
    index = run.judge.checker.index
    found = (index.replicas.record(each) for each in sorted(index.replicas_of.get(name, ())))
    return [replica for replica in found if replica is not None]


def ready(run: Run, name: str) -> list[Replica]:
    """Those that are ready."""
    return [replica for replica in replicas(run, name) if replica.phase is ReplicaPhase.READY]


def nodes_of(replica: Replica) -> list[str]:
    """Where its shards are, by rank."""
    return [shard.node for shard in sorted(replica.shards, key=lambda shard: shard.rank)]


def number(node: str) -> int:
    """Which of the fleet's machines a node is."""
    return int(node.removeprefix("node-"))


def engine(run: Run, replica: Replica, rank: int = 0) -> Engine:
    """The living engine of one of its shards."""
    node = nodes_of(replica)[rank]
    found = run.fleet.world[node].engine_of(f"{replica.id}.{rank}")
    assert found is not None, f"{replica.id}.{rank} does not run on {node}"
    return found


def liveness(run: Run, node: str) -> Liveness | None:
    """What the leader makes of a node."""
    state = run.judge.checker.index.node_states.record(node)
    return None if state is None else state.liveness


async def always(run: Run, holds: Callable[[], bool], *, what: str) -> None:
    """Run beside a story: the condition must hold at every tenth of a second."""
    while True:
        if not holds():
            run.judge.wrong(f"not always: {what}")
        await anyio.sleep(0.1)
