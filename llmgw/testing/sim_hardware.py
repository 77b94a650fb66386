"""What the machines of a simulated fleet are made of, drawn from its seed: memory, GPUs, fabrics, labels, weights.

About half of them have GPUs: two to eight, of one class or of two, in NVLink domains or without. There are two fabrics;
the first machines with GPUs share one, so that every fleet of three or more could hold a gang of two.
"""

from __future__ import annotations

from typing import Final

import msgspec

from llmgw.core.node import Fabric, Gpu, GpuHealth
from llmgw.core.units import GB
from llmgw.testing.seed import Random

CLASSES: Final = {"a100": 80 * GB, "l4": 24 * GB}
"""GPU class -> memory of one."""

FABRICS: Final = {
    "ib": Fabric(name="ib", rate_gbps=400.0, hcas=("mlx5_0", "mlx5_1"), ifname="ib0"),
    "roce": Fabric(name="roce", rate_gbps=100.0, hcas=("mlx5_4",), ifname="ens5"),
}
CERTAIN: Final = 3
"""So many machines have GPUs and the first fabric for certain, where there are as many."""

WEIGHTS_N: Final = 4
"""Models whose weights some machines have."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One machine."""

    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    labels: dict[str, str] = {}
    weights: tuple[str, ...] | None = ()


def plain(memory_bytes: int) -> Hardware:
    """A machine with processors and memory only."""
    return Hardware(memory_bytes=memory_bytes)


def draw(random: Random, *, name: str, number: int, memory_bytes: int) -> Hardware:
    """The machine of that name and number."""
    certain = number < CERTAIN
    fabrics = ["ib"] if certain else random.choice([["ib"], ["roce"], ["ib", "roce"], []])
    sets = tuple(f"{n}.gguf" for n in range(WEIGHTS_N) if random.random() < 0.5)
    return Hardware(
        memory_bytes=memory_bytes * random.choice([1, 1, 2]),
        gpus=gpus(random, name) if certain or random.random() < 0.5 else (),
        fabrics=tuple(FABRICS[each] for each in fabrics),
        labels=random.choice([{}, {"zone": "x"}, {"zone": "y"}]),
        weights=random.choice([sets, sets, None]),
    )


def gpus(random: Random, name: str) -> tuple[Gpu, ...]:
    """The GPUs of one machine, all well."""
    count = random.choice([2, 2, 4, 8])
    classes = random.choice([["a100"], ["a100"], ["l4"], ["a100", "l4"]])
    domains = random.choice([0, 1, 2])
    kinds = sorted(classes[n % len(classes)] for n in range(count))
    return tuple(
        Gpu(
            uuid=f"GPU-{name}-{n}",
            index=n,
            gpu_class=kind,
            memory_bytes=CLASSES[kind],
            nvlink_domain=n * domains // count if domains else None,
            health=GpuHealth.OK,
            foreign=0,
            foreign_bytes=0,
        )
        for n, kind in enumerate(kinds)
    )
