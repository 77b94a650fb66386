"""The models of a storm: for processors, for GPUs, in gangs of two, with or without a range of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from llmgw.core.catalog import ModelSpec, Profile, Scaling
from llmgw.testing.seed import Random
from llmgw.testing.sim_hardware import CLASSES, WEIGHTS_N
from llmgw.testing.sim_machine import ENGINE, ENGINE_GPU

START_S: Final = 120.0
"""Start budget of every model here."""

DRAIN_S: Final = 20.0
IDLE_S: Final = 60.0
"""How long without a request until a model that may sleep does."""


def model(name: str, *, memory_gb: float, replicas: int, context: int = 4096) -> ModelSpec:
    """A model of one profile, for processors. Another `context` is another launch, so it rolls."""
    return _model(name, cpu(memory_gb, context=context), low=replicas, high=replicas)


def cpu(memory_gb: float, *, context: int = 4096, priority: int = 0) -> Profile:
    """A profile for machines of any sort."""
    return Profile(
        name="cpu",
        engine=ENGINE,
        priority=priority,
        min_memory_gb=memory_gb,
        context=context,
        start_s=START_S,
        drain_s=DRAIN_S,
    )


def gpu(count: int, *, gpu_class: str | None = None, memory_gb: float = 4) -> Profile:
    """A profile for some GPUs of one machine."""
    return Profile(
        name="gpu",
        engine=ENGINE_GPU,
        priority=10,
        min_memory_gb=memory_gb,
        gpus_per_node=count,
        gpu_class=gpu_class,
        tensor_parallel=count,
        start_s=START_S,
        drain_s=DRAIN_S,
    )


def gang(*, engine: str, gpus: int, nodes: int = 2, gpu_class: str | None = None) -> Profile:
    """A profile for several machines of one fabric; llama.cpp's heads are held until their workers listen."""
    return Profile(
        name="gang",
        engine=engine,
        priority=20,
        min_memory_gb=8,
        nodes=nodes,
        gpus_per_node=gpus,
        gpu_class=gpu_class,
        tensor_parallel=gpus or 1,
        pipeline_parallel=nodes if gpus else 1,
        start_s=START_S,
        drain_s=DRAIN_S,
    )


def _model(name: str, *profiles: Profile, low: int = 1, high: int = 1, source: str = "") -> ModelSpec:
    scaling = Scaling(min=low, max=high, target_load=4, idle_s=IDLE_S)
    return ModelSpec(name=name, source=source or f"{name}.gguf", profiles=profiles, scaling=scaling)


def gpu_model(name: str, *, count: int, replicas: int = 1) -> ModelSpec:
    """A model for GPUs of any class."""
    return _model(name, gpu(count), low=replicas, high=replicas)


def gang_model(name: str, *, engine: str = ENGINE, gpus: int = 0, replicas: int = 1) -> ModelSpec:
    """A model that spans two machines."""
    return _model(name, gang(engine=engine, gpus=gpus), low=replicas, high=replicas)


def ranged_model(name: str, *, memory_gb: float = 4, low: int = 0, high: int = 3) -> ModelSpec:
    """A model that follows its load."""
    return _model(name, cpu(memory_gb), low=low, high=high)


def draw(random: Random, name: str, *, hardware: bool, most: int) -> ModelSpec:
    """Some model; `hardware`: it may want GPUs and fabrics; `most`: replicas."""
    kind: Callable[[Random], tuple[Profile, ...]] = _cpus
    if hardware:
        kind = random.choice([_cpus, _gpus, _gpus, _gangs, _gangs, _either])
    profiles = kind(random)
    fixed = random.randint(1, 1 if kind is _gangs else most)
    low, high = random.choice([(fixed, fixed), (fixed, fixed), (0, 2), (1, 3)])
    return _model(name, *profiles, low=low, high=high, source=f"{random.randrange(2 * WEIGHTS_N)}.gguf")


def _cpus(random: Random) -> tuple[Profile, ...]:
    return (cpu(random.choice([4, 10, 20])),)


def _gpus(random: Random) -> tuple[Profile, ...]:
    return (gpu(random.choice([1, 1, 2]), gpu_class=random.choice([None, None, *CLASSES])),)


def _gangs(random: Random) -> tuple[Profile, ...]:
    engine, gpus = random.choice([(ENGINE, 0), (ENGINE, 1), (ENGINE_GPU, 1), (ENGINE_GPU, 2)])
    return (gang(engine=engine, gpus=gpus, gpu_class=random.choice([None, "a100"]) if gpus else None),)


def _either(random: Random) -> tuple[Profile, ...]:
    """GPUs where there are some, else processors; a priority alone decides, and never moves what runs."""
    return (*_gpus(random), cpu(random.choice([4, 10])))


def rolled(spec: ModelSpec, random: Random) -> ModelSpec:
    """The same with another launch."""
    context = random.choice([2048, 8192, 16384])
    profiles = tuple(msgspec.structs.replace(profile, context=context) for profile in spec.profiles)
    return msgspec.structs.replace(spec, profiles=profiles)


def scaled(spec: ModelSpec, random: Random) -> ModelSpec:
    """The same with another number of replicas, or another range."""
    low, high = random.randint(1, 3), random.choice([0, 0, 2])
    return msgspec.structs.replace(spec, scaling=msgspec.structs.replace(spec.scaling, min=low, max=low + high))
