"""What befalls machines, their agents, engines and GPUs: one function each, which strikes, waits and undoes it.

See `llmgw.testing.storm`.
"""

# ruff: noqa: D103  # a fault's name says what it does

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from llmgw.core.node import Facts, GpuHealth
from llmgw.core.units import GB
from llmgw.testing.storm import Storm

# --- machines and their agents --------------------------------------------------------------------------------------


async def agent_killed(storm: Storm) -> None:
    agent = storm.anyone(storm.fleet.agents)
    if agent is None:
        return
    await agent.kill()
    await anyio.sleep(storm.random.choice([storm.some(0.1, 10), storm.some(30, 90)]))
    restart_agent(storm, agent.name)


async def state_damaged(storm: Storm) -> None:
    """An agent is killed and finds its state file damaged."""
    n = storm.random.randrange(len(storm.fleet.agents))
    await storm.fleet.agents[n].kill()
    storm.fleet.machines[n].disk_damaged = True
    await anyio.sleep(storm.some(0.1, 20))
    restart_agent(storm, storm.fleet.agents[n].name)


async def disk_full(storm: Storm) -> None:
    machine = storm.random.choice(storm.fleet.machines)
    machine.disk_full = True
    await anyio.sleep(storm.some(10, 100))
    machine.disk_full = False


async def machine_rebooted(storm: Storm) -> None:
    n = storm.random.randrange(len(storm.fleet.machines))
    await storm.fleet.power_off(n)
    await anyio.sleep(storm.some(15, 120))
    storm.fleet.power_on(n)


async def machine_gone(storm: Storm) -> None:
    """For longer than it takes to be declared Lost."""
    n = storm.random.randrange(len(storm.fleet.machines))
    await storm.fleet.power_off(n)
    await anyio.sleep(storm.fleet.sizes.lost_after_s + storm.some(50, 200))
    storm.fleet.power_on(n)


def restart_agent(storm: Storm, name: str) -> None:
    """Unless its machine has no power; then it comes up with that."""
    n = next(n for n, agent in enumerate(storm.fleet.agents) if agent.name == name)
    if storm.fleet.machines[n].on:
        storm.fleet.agents[n].start()


# --- engines --------------------------------------------------------------------------------------------------------


async def engine_crashes(storm: Storm) -> None:
    engine = storm.engine()
    if engine is not None:
        storm.judge.tell(f"pid {engine.process.pid} of {engine.shard} crashes", name="storm")
        engine.end(anyio.current_time(), "killed by SIGSEGV")


async def engine_hangs(storm: Storm) -> None:
    engine = storm.engine()
    if engine is not None:
        storm.judge.tell(f"pid {engine.process.pid} of {engine.shard} hangs", name="storm")
        engine.hung = True


async def engines_in_trouble(storm: Storm) -> None:
    with storm.trouble(engines=True):
        engine = storm.engine()
        if engine is not None:
            engine.end(anyio.current_time(), "killed by SIGBUS")
        await anyio.sleep(storm.some(30, 200))


async def engine_fails_on_one_node(storm: Storm) -> None:
    """A node where nothing starts any more, whatever its facts say."""
    engine = storm.engine()
    node = storm.random.choice(storm.fleet.machines).name if engine is None else engine.machine.name
    storm.bad_nodes.add(node)
    if engine is not None:
        engine.end(anyio.current_time(), "killed by SIGKILL")
    await anyio.sleep(storm.some(60, 300))
    storm.bad_nodes.discard(node)


async def clock_steps(storm: Storm) -> None:
    process = storm.random.choice(storm.fleet.processes)
    process.skew_s = storm.random.choice([-600.0, -90.0, -5.0, 5.0, 90.0, 600.0])
    await anyio.sleep(storm.some(30, 200))
    process.skew_s = 0.0


# --- GPUs and facts -------------------------------------------------------------------------------------------------


async def gpu_lost(storm: Storm) -> None:
    """It falls off the bus, and is back after a while."""
    if (found := storm.busy_gpu()) is None:
        return
    machine, uuid = found
    random = storm.random
    machine.lose_gpu(uuid, hangs=random.random() < 0.3, listed=random.random() < 0.5)
    await anyio.sleep(storm.some(30, 300))
    machine.mend()


async def gpu_faulty(storm: Storm) -> None:
    """The driver says that it should take no more work; what runs on it goes on."""
    if (found := storm.busy_gpu()) is None:
        return
    machine, uuid = found
    machine.change_gpu(uuid, health=GpuHealth.FAULT, fault="row remapping failed")
    await anyio.sleep(storm.some(30, 300))
    machine.mend()


async def gpu_used_by_others(storm: Storm) -> None:
    if (found := storm.busy_gpu()) is None:
        return
    machine, uuid = found
    machine.change_gpu(uuid, foreign=1, foreign_bytes=20 * GB)
    await anyio.sleep(storm.some(30, 300))
    machine.mend()


async def fabrics_lost(storm: Storm) -> None:
    machine = storm.random.choice(storm.fleet.machines)
    machine.lose_fabrics()
    await anyio.sleep(storm.some(30, 300))
    machine.mend()


async def facts_contradict(storm: Storm) -> None:
    """A driver gone mad: what the machine says of itself can't be true, or is not known any more."""
    machine = storm.random.choice(storm.fleet.machines)
    machine.lies = storm.random.choice(LIES)
    await anyio.sleep(storm.some(40, 300))
    machine.lies = None


def _counted_twice(facts: Facts) -> Facts:
    gpus = tuple(msgspec.structs.replace(gpu, index=0) for gpu in facts.gpus or ())
    return msgspec.structs.replace(facts, gpus=gpus)


def _listed_twice(facts: Facts) -> Facts:
    return msgspec.structs.replace(facts, gpus=(*(facts.gpus or ()), *(facts.gpus or ())))


def _negative(facts: Facts) -> Facts:
    return msgspec.structs.replace(facts, memory_bytes=-1)


def _shrunk(facts: Facts) -> Facts:
    """Less than is promised, as when a control group's limit is lowered."""
    memory_bytes = None if facts.memory_bytes is None else facts.memory_bytes // 8
    return msgspec.structs.replace(facts, memory_bytes=memory_bytes)


def _unknown(facts: Facts) -> Facts:
    return msgspec.structs.replace(facts, memory_bytes=None, gpus=None, engines=None, weights=None)


def _unhealthy(facts: Facts) -> Facts:
    gpus = tuple(msgspec.structs.replace(gpu, health=GpuHealth.UNKNOWN, foreign=None) for gpu in facts.gpus or ())
    return msgspec.structs.replace(facts, gpus=gpus)


LIES: Final[tuple[Callable[[Facts], Facts], ...]] = (
    _counted_twice,
    _listed_twice,
    _negative,
    _shrunk,
    _unknown,
    _unhealthy,
)
