"""What people do while a storm rages, through the commands' own code where there is one. See `llmgw.testing.storm`."""

# ruff: noqa: D103  # a deed's name says what it is

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from llmgw.cli.guard import release_nodes
from llmgw.cli.node import forget_node
from llmgw.cli.recover import recover_store
from llmgw.core.catalog import EngineSpec, NodeSpec
from llmgw.core.record import StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import LlmgwError
from llmgw.store import codec, keys
from llmgw.store.port import PutOp
from llmgw.testing.faults import Link
from llmgw.testing.sim_machine import ENGINE
from llmgw.testing.storm import Storm
from llmgw.testing.storm_models import draw, rolled, scaled

AWAY_S: Final = 40.0
"""After this a machine without power has no session any more."""


# --- models ---------------------------------------------------------------------------------------------------------


async def scale(storm: Storm) -> None:
    """Want more or fewer replicas of some model."""
    name = storm.random.choice(sorted(storm.models))
    storm.models[name] = scaled(storm.models[name], storm.random)
    await storm.apply()


async def model_scaled(storm: Storm) -> None:
    await scale(storm)


async def model_rolled(storm: Storm) -> None:
    name = storm.random.choice(sorted(storm.models))
    storm.models[name] = rolled(storm.models[name], storm.random)
    await storm.apply()


async def model_replaced(storm: Storm) -> None:
    """Another model altogether under the same name."""
    name = storm.random.choice(sorted(storm.models))
    storm.models[name] = draw(storm.random, name, hardware=storm.fleet.sizes.hardware, most=2)
    await storm.apply()


async def model_removed(storm: Storm) -> None:
    if len(storm.models) < 2:
        return
    name = storm.random.choice(sorted(storm.models))
    spec = storm.models.pop(name)
    await storm.apply()
    try:
        await anyio.sleep(storm.some(10, 120))
    finally:
        storm.models[name] = spec
    await storm.apply()


async def engine_wished(storm: Storm) -> None:
    """A version that everybody has; now and then one that does not start."""
    version = storm.random.choice(["b1", "b2"])
    if storm.random.random() < 0.3:
        storm.bad_builds.add(version)
    storm.wish = EngineSpec(name=ENGINE, version=version)
    await storm.apply()
    try:
        await anyio.sleep(storm.some(60, 300))
    finally:
        storm.bad_builds.discard(version)
        storm.wish = storm.random.choice([None, storm.wish])
    await storm.apply()


# --- nodes ----------------------------------------------------------------------------------------------------------


async def node_cordoned(storm: Storm) -> None:
    await _say_of_node(storm, drain=False)


async def node_drained(storm: Storm) -> None:
    await _say_of_node(storm, drain=True)


async def _say_of_node(storm: Storm, *, drain: bool) -> None:
    name = storm.random.choice(storm.fleet.machines).name
    ref = Ref(Kind.NODE_SPEC, name)
    await storm.write((ref, NodeSpec(name=name, cordon=True, drain=drain)))
    await anyio.sleep(storm.some(30, 200))
    await storm.write((ref, NodeSpec(name=name)))


async def machine_forgotten(storm: Storm) -> None:
    """A machine goes for good, people say so, and then it comes back all the same."""
    n = storm.random.randrange(len(storm.fleet.machines))
    name = storm.fleet.machines[n].name
    await storm.fleet.power_off(n)
    await anyio.sleep(AWAY_S + storm.some(0, 100))
    if not storm.fleet.machines[n].on:
        await _command(storm, f"forget {name}", lambda: forget_node(storm.fleet.store, name, timeout_s=60))
    await anyio.sleep(storm.some(10, 200))
    storm.fleet.power_on(n)


async def nodes_released(storm: Storm) -> None:
    """So many machines go at once that the guard doubts it, until people say that it is true."""
    machines = storm.fleet.machines
    gone = storm.random.sample(range(len(machines)), max(2, len(machines) // 3 + 1))
    for n in gone:
        await storm.fleet.power_off(n)
    await anyio.sleep(AWAY_S + storm.some(0, 60))
    names = tuple(machines[n].name for n in gone if not machines[n].on)
    await _command(storm, f"release {names}", lambda: release_nodes(storm.fleet.store, names))
    await anyio.sleep(storm.random.choice([storm.some(0, 60), storm.fleet.sizes.lost_after_s]))
    for n in gone:
        storm.fleet.power_on(n)


async def store_recovered(storm: Storm) -> None:
    """A restore by the book while a machine is away, and people who don't wait for it."""
    if not storm.backups:
        return
    cluster, backup = storm.fleet.cluster, storm.random.choice(storm.backups)
    n = storm.random.randrange(len(storm.fleet.machines))
    with storm.trouble(store=True):
        await storm.fleet.power_off(n)
        cluster.stop()
        await anyio.sleep(storm.some(0, 30))
        cluster.restore(backup)
        cluster.start()
        meta = StoreMeta(incarnation=f"restored-{storm.random.getrandbits(64):x}")
        cluster.commit([], [PutOp(key=keys.key(Ref(Kind.META)), value=codec.encode_stored(meta))], [])
        storm.backups.clear()
        await anyio.sleep(storm.some(20, 60))
        await storm.apply()
        await _command(storm, "recover", lambda: recover_store(storm.fleet.store, yes=True))
        await anyio.sleep(60)
        storm.doubt_gateway()
    await anyio.sleep(storm.some(0, 100))
    storm.fleet.power_on(n)


async def _command(storm: Storm, what: str, run: Callable[[], Awaitable[None]]) -> None:
    """A command as people give it: what it refuses, or can't do now, they read and leave."""
    try:
        await run()
    except LlmgwError as error:
        storm.judge.tell(f"people: {what}: {error}", name="storm")
        storm.judge.totals[f"command refused: {what.partition(' ')[0]}"] += 1
    else:
        storm.judge.tell(f"people: {what}", name="storm")
        storm.judge.totals[f"command: {what.partition(' ')[0]}"] += 1


# --- gateways -------------------------------------------------------------------------------------------------------


async def gateway_killed(storm: Storm) -> None:
    """And with it all that it has told of its load."""
    gateway = storm.fleet.gateway
    with storm.trouble(gateway):
        gateway.faulty.link = Link.UP
        await gateway.kill()
        await anyio.sleep(storm.some(1, 60))
        gateway.start()
        await anyio.sleep(10)
