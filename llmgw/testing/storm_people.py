"""What people do while a storm rages: scale, roll, remove, cordon, drain. See `llmgw.testing.storm_faults`."""

# ruff: noqa: D103  # a deed's name says what it is

from __future__ import annotations

import anyio
import msgspec

from llmgw.core.catalog import NodeSpec
from llmgw.core.snapshot import Kind, Ref
from llmgw.testing.storm import Storm


async def scale(storm: Storm) -> None:
    """Want more or fewer replicas of some model."""
    name = storm.random.choice(sorted(storm.models))
    spec = storm.models[name]
    replicas = storm.random.randint(1, 3)
    scaling = msgspec.structs.replace(spec.scaling, min=replicas, max=max(replicas, spec.scaling.max))
    storm.models[name] = msgspec.structs.replace(spec, scaling=scaling)
    await storm.apply()


async def model_scaled(storm: Storm) -> None:
    await scale(storm)


async def model_rolled(storm: Storm) -> None:
    name = storm.random.choice(sorted(storm.models))
    spec = storm.models[name]
    profile = msgspec.structs.replace(spec.profiles[0], context=storm.random.choice([2048, 8192, 16384]))
    storm.models[name] = msgspec.structs.replace(spec, profiles=(profile,))
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
