"""Random machines and models, made from tapes of bytes: of every sort and shape that a tree may hold.

A tape is a list of choices. So Hypothesis can draw, shrink and print it, a seed can make it as well, and what one tape
gives does not depend on the others. A tape of zeros makes the plainest choice everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from llmgw.core.catalog import EngineSpec, ModelSpec, NodeSpec, Profile, Scaling
from llmgw.core.node import Build, EngineFacts, Fabric, Facts, Gpu, GpuHealth, Liveness, NodeState, WeightSet
from llmgw.core.record import Record
from llmgw.core.snapshot import Kind
from llmgw.core.units import GB
from llmgw.testing.cluster import LLAMA, Cluster

T = TypeVar("T")

TAPE_LEN: Final = 24
"""Bytes of one tape. More than anything here reads; what is read beyond the end is zero."""

MEMORY_GB: Final = (64.0, 16.0, 32.0, 8.0, 256.0, 4.0, None, 64.0, 16.0, 32.0, 8.0, None, -1.0)
NEED_GB: Final = (1.0, 3.0, 6.0, None, 12.0, 40.0, 600.0)
LLAMA_2: Final = Build(engine="llama.cpp", version="b2")
VLLM: Final = Build(engine="vllm", version="v1", named=True)
VLLM_2: Final = Build(engine="vllm", version="v2", variant="cu12")
ENGINES: Final[tuple[EngineFacts | None, ...]] = (
    EngineFacts(probed=True, builds=(LLAMA, VLLM)),
    EngineFacts(probed=True, builds=(LLAMA_2, VLLM_2)),
    EngineFacts(probed=True, builds=(LLAMA, LLAMA_2, VLLM, VLLM_2)),
    None,
    EngineFacts(probed=True, builds=(VLLM,), notes={"llama.cpp": "no build for this processor"}),
    EngineFacts(probed=False),
)
"""The three states of what a node knows of its engines, and some shades of them."""

GPU_CLASSES: Final = ("h100", "a100")
ASKED_CLASSES: Final = (None, "h100", None, "h100", "a100", "tpu")
GPU_GB: Final = (80.0, 40.0, 24.0, None)
FABRICS: Final[tuple[tuple[Fabric, ...], ...]] = (
    (Fabric(name="ib0", rate_gbps=400.0, hcas=("mlx5_0", "mlx5_1"), ifname="ib0"),),
    (),
    (Fabric(name="ib0", hcas=("mlx5_0",)), Fabric(name="roce", hcas=("mlx5_3",))),
    (Fabric(name="ib1", hcas=("mlx5_2",)),),
    (Fabric(name="ib0"),),
    (Fabric(name="roce", hcas=("mlx5_3",)), Fabric(name="ib0", hcas=("mlx5_1",)), Fabric(name="ib1")),
)
GANG_PORTS: Final[tuple[tuple[int, int] | None, ...]] = (
    (21000, 21999), (21000, 21999), None, (21000, 21009), (21990, 22050), None, (21000, 21999), None, (21009, 21000),
)  # fmt: skip


class Theme(NamedTuple):
    """What a cluster is mostly made of, so that what it has little of is asked for by many. The first is the plainest.

    `shapes`: of a machine's GPUs, `counts`: how many of them, `troubles`: how many things are the matter with them.
    `gang_nodes`: how many nodes a gang spans. `kinds`: the profiles of a model, by the function that makes each.
    """

    name: str
    memory_gb: tuple[float | None, ...]
    engines: tuple[EngineFacts | None, ...]
    shapes: tuple[str, ...]
    counts: tuple[int, ...]
    troubles: tuple[int, ...]
    fabrics: tuple[tuple[Fabric, ...], ...]
    gang_ports: tuple[tuple[int, int] | None, ...]
    gang_nodes: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]


class Dice:
    """Choices read from a tape of bytes. A tape of zeros makes the plainest choice everywhere."""

    def __init__(self, tape: bytes, theme: Theme | None = None) -> None:
        self._tape = iter(tape)
        self.theme = GENERAL if theme is None else theme

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        return next(self._tape, 0) % count

    def pick(self, items: Sequence[T]) -> T:
        """One of them, the first being the plainest."""
        return items[self.below(len(items))]

    def one_in(self, count: int) -> bool:
        """True once in so many times."""
        return self.below(count) == count - 1


GENERAL: Final = Theme(
    name="general",
    memory_gb=MEMORY_GB,
    engines=ENGINES,
    shapes=("one class", "none", "one class", "two classes", "unknown", "none"),
    counts=(2, 4, 8, 1, 8, 3),
    troubles=(0, 0, 1, 3),
    fabrics=FABRICS,
    gang_ports=GANG_PORTS,
    gang_nodes=(2, 2, 3, 2, 3, 4),
    kinds=(
        ("cpu",), ("gpu",), ("gang",), ("gpu", "cpu"), ("gang", "gpu"), ("gang", "gpu", "cpu"), ("gang", "cpu"),
        ("cpu",), ("gpu",), (),
    ),
)  # fmt: skip
THEMES: Final = {
    theme.name: theme
    for theme in (
        GENERAL,
        GENERAL._replace(  # memory is short
            name="memory",
            memory_gb=(16.0, 8.0, 16.0, 4.0, None),
            engines=ENGINES[:3],
            shapes=("none",),
            kinds=(("cpu",),),
        ),
        GENERAL._replace(  # few GPUs, many of them not well
            name="gpus",
            memory_gb=(64.0, 16.0, None),
            engines=ENGINES[:3],
            shapes=("one class", "one class", "two classes", "unknown"),
            counts=(1, 2, 4, 2),
            troubles=(1, 0, 1, 2),
            kinds=(("gpu",), ("gpu", "cpu"), ("gpu",), ("gang", "gpu")),
        ),
        GENERAL._replace(  # gangs that meet
            name="gangs",
            memory_gb=(64.0, 16.0, None),
            engines=ENGINES[:3],
            shapes=("none", "one class", "one class", "two classes"),
            counts=(4, 2, 8),
            troubles=(0, 0, 1),
            fabrics=(*FABRICS[:1], *FABRICS[2:3], *FABRICS),
            gang_ports=((21000, 21031), (21000, 21047), (21010, 21070), None),
            gang_nodes=(3, 2, 3, 2),
            kinds=(("gang",), ("gang",), ("gang", "cpu"), ("gang", "gpu")),
        ),
    )
}


# --- machines -------------------------------------------------------------------------------------------------------


def facts_of(name: str, dice: Dice) -> Facts:
    """What a machine says of itself: with or without GPUs, known or not, now and then impossible."""
    memory_gb, engines = dice.pick(dice.theme.memory_gb), dice.pick(dice.theme.engines)
    return Facts(
        node=name,
        boot_id=f"boot-{name}",
        memory_bytes=None if memory_gb is None else round(memory_gb * GB),
        gpus=gpus_of(name, dice),
        fabrics=dice.pick(dice.theme.fabrics),
        gang_ports=dice.pick(dice.theme.gang_ports),
        labels=dice.pick(({}, {"zone": "x"}, {"zone": "y", "rack": "1"})),
        engines=engines,
        weights=dice.pick((None, (), tuple(WeightSet(source=f"{each}.gguf", complete=each != "b") for each in "abd"))),
    )


def gpus_of(name: str, dice: Dice) -> tuple[Gpu, ...] | None:
    """The GPUs of a machine: none, some of one class or of two, all well or one of them not; None: it can't tell."""
    shape = dice.pick(dice.theme.shapes)
    if shape == "unknown":
        return None
    count = 0 if shape == "none" else dice.pick(dice.theme.counts)
    first, memory_gb, domains = dice.pick((*GPU_CLASSES, "h100")), dice.pick(GPU_GB), dice.pick((1, 0, 2))
    other = GPU_CLASSES[1 - GPU_CLASSES.index(first)]
    made = [
        Gpu(
            uuid=f"GPU-{name}-{i}",
            index=i,
            gpu_class=other if shape == "two classes" and i % 2 else first,
            memory_bytes=None if memory_gb is None else round(memory_gb * GB),
            nvlink_domain=i * domains // count if domains else None,
            health=GpuHealth.OK,
            foreign=0,
        )
        for i in range(count)
    ]
    for _ in range(dice.pick(dice.theme.troubles)):
        made = spoilt(made, dice)
    return tuple(made)


def spoilt(gpus: Sequence[Gpu], dice: Dice) -> list[Gpu]:
    """The same GPUs after something has happened to one of them, or to how the driver lists it."""
    if not gpus:
        return []
    at = dice.below(len(gpus))
    gpu, others = gpus[at], [*gpus[:at], *gpus[at + 1 :]]
    fields: dict[str, object] = dice.pick(
        (
            {"foreign": 1, "foreign_bytes": 3 * GB},
            {"health": GpuHealth.UNKNOWN},
            {"foreign": None, "foreign_bytes": None},
            {"health": GpuHealth.FAULT, "fault": "row remap failed"},
            {"foreign": 1},
            {"memory_bytes": 16 * GB},
            {"health": GpuHealth.LOST, "memory_bytes": None},
            {"memory_bytes": None},
            {"health": GpuHealth.UNKNOWN, "foreign": None},
            dice.pick(({"index": gpus[at - 1].index}, {"uuid": gpus[at - 1].uuid}, {"memory_bytes": -GB})),
        )
    )
    return sorted([*others, msgspec.structs.replace(gpu, **fields)], key=lambda each: each.index)


def node_records(c: Cluster, name: str, dice: Dice) -> list[tuple[Kind, str, Record | None]]:
    """A machine in one of the ways in which a tree may know it."""
    standing = dice.pick((*["ready"] * 9, "new", "away", "lost", "returning", "no facts", "ready"))
    since_s = dice.pick((5000.0, 100.0, 400.0, 10.0, -50.0))
    facts, said = facts_of(name, dice), dice.below(16)
    session = c.session(name)
    state = NodeState(
        name=name,
        liveness=Liveness.READY,
        since_at=c.now.wall_s - since_s,
        boot_id=session.boot_id,
        lease=session.lease,
    )
    liveness = {"away": Liveness.UNREACHABLE, "lost": Liveness.LOST, "returning": Liveness.RETURNING}
    state = msgspec.structs.replace(state, liveness=liveness.get(standing, Liveness.READY))
    records: list[tuple[Kind, str, Record | None]] = []
    if standing not in ("away", "lost"):
        records.append((Kind.SESSION, name, session))
    if standing != "no facts":
        records.append((Kind.FACTS, name, facts))
    if standing not in ("new", "no facts"):
        records.append((Kind.NODE_STATE, name, state))
    if said > 12:  # people have said something
        labels = {"zone": "x"} if said == 15 else {}
        records.append((Kind.NODE_SPEC, name, NodeSpec(name=name, cordon=said == 13, drain=said == 14, labels=labels)))
    return records


# --- models ---------------------------------------------------------------------------------------------------------


def cpu(dice: Dice) -> Profile:
    """A profile for machines without GPUs."""
    return Profile(
        name="cpu",
        engine="llama.cpp",
        min_memory_gb=dice.pick(NEED_GB),
        context=dice.pick((4096, 8192)),
        drain_s=dice.pick((60.0, 5.0)),
    )


def gpu(dice: Dice) -> Profile:
    """A profile for some GPUs of one machine."""
    count = dice.pick((1, 2, 1, 4, 8, 3, 16))
    return Profile(
        name="gpu",
        engine=dice.pick(("vllm", "llama.cpp")),
        gpus_per_node=count,
        gpu_class=dice.pick(ASKED_CLASSES),
        min_gpu_memory_gb=dice.pick((None, 20.0, None, 80.0)),
        min_memory_gb=dice.pick((None, 2.0, 20.0)),
        tensor_parallel=count,
        context=dice.pick((4096, 8192)),
    )


def gang(dice: Dice) -> Profile:
    """A profile for several machines of one fabric, with or without GPUs."""
    nodes, gpus = dice.pick(dice.theme.gang_nodes), dice.pick((0, 1, 2, 0, 1, 4))
    return Profile(
        name="gang",
        engine=dice.pick(("llama.cpp", "vllm")),
        nodes=nodes,
        gpus_per_node=gpus,
        gpu_class=dice.pick(ASKED_CLASSES) if gpus else None,
        min_gpu_memory_gb=dice.pick((None, 40.0)) if gpus else None,
        min_memory_gb=dice.pick((4.0, None, 20.0)),
        tensor_parallel=gpus or 1,
        pipeline_parallel=nodes if gpus else 1,
        context=dice.pick((4096, 8192)),
    )


KINDS: Final = {"cpu": cpu, "gpu": gpu, "gang": gang}


def spec_of(name: str, dice: Dice) -> ModelSpec:
    """A model with up to three profiles of different priorities, selectors and needs."""
    kinds = dice.pick(dice.theme.kinds)
    profiles = tuple(
        msgspec.structs.replace(
            KINDS[kind](dice),
            priority=dice.pick((0, 10, 10, -10)),
            node_selector=dice.pick(({}, {}, {}, {}, {}, {}, {"zone": "x"}, {"zone": "y"})),
        )
        for kind in kinds
    )
    low = dice.pick((1, 2, 3, 0, 1, 2))
    return ModelSpec(
        name=name,
        source=f"{name.rpartition('/')[2]}.gguf",
        profiles=profiles,
        scaling=Scaling(min=low, max=max(1, low + dice.pick((0, 2)))),
    )


def wish_of(dice: Dice) -> EngineSpec:
    """A version of an engine that people want everywhere."""
    name, version = dice.pick((("llama.cpp", "b1"), ("llama.cpp", "b2"), ("vllm", "v1"), ("vllm", "v2")))
    return EngineSpec(name=name, version=version)
