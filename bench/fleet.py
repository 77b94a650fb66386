"""A made-up fleet and a catalog for it, the same for the same size: what `bench/placement.py` places on what.

Half of the nodes have CPUs only, half eight GPUs of one of three classes. One fabric for every 250 GPU nodes, at least
one. As many replicas as nodes: half on CPUs, about 45 % on 1, 2, 4 or 8 GPUs, 5 % gangs of 2 or 4 whole nodes.
"""

import random
from collections.abc import Iterator

import msgspec

from llmgw.core.catalog import ModelSpec, Profile, Scaling
from llmgw.core.node import Build, EngineFacts, Fabric, Facts, Gpu, GpuHealth, Session, WeightSet
from llmgw.core.record import Record
from llmgw.core.snapshot import Kind, Ref

GIB = 2**30
STORE = "bench"
NODES_PER_FABRIC = 250
REPLICAS_PER_MODEL = 33
GPUS = {"h100-80gb": 80 * GIB, "a100-80gb": 80 * GIB, "l40s-48gb": 48 * GIB}
CPU_FLAGS = ("avx", "avx2", "avx512f", "avx512_vnni", "bmi2", "f16c", "fma", "sse4_2")
LLAMA = Build(engine="llama.cpp", version="b10991", variant="cpu-avx512", named=True)
LLAMA_CUDA = Build(engine="llama.cpp", version="b10991", variant="cuda12", named=True)
VLLM = Build(engine="vllm", version="0.17.1", variant="cu128", named=True)

SHAPES: list[tuple[float, Profile]] = [
    (0.20, Profile(name="cpu", engine="llama.cpp", min_memory_gb=3)),
    (0.20, Profile(name="cpu", engine="llama.cpp", min_memory_gb=14, slots=8)),
    (0.10, Profile(name="cpu", engine="llama.cpp", min_memory_gb=48, context=32768)),
    (0.15, Profile(name="gpu", engine="llama.cpp", gpus_per_node=1, min_gpu_memory_gb=40, min_memory_gb=20)),
    (0.13, Profile(name="gpu2", engine="vllm", gpus_per_node=2, gpu_class="l40s-48gb", min_memory_gb=60)),
    (0.10, Profile(name="gpu4", engine="vllm", gpus_per_node=4, gpu_class="h100-80gb", min_memory_gb=120)),
    (0.07, Profile(name="gpu8", engine="vllm", gpus_per_node=8, min_gpu_memory_gb=70, min_memory_gb=300)),
    (0.03, Profile(name="gang2", engine="vllm", nodes=2, gpus_per_node=8, gpu_class="h100-80gb", min_memory_gb=400)),
    (0.02, Profile(name="gang4", engine="vllm", nodes=4, gpus_per_node=8, gpu_class="a100-80gb", min_memory_gb=400)),
]
"""Share of the replicas, and the profile they are wanted with."""


def models(replicas: int) -> list[ModelSpec]:
    """A catalog that wants so many replicas in all, of at most a few hundred models."""
    draw = random.Random(2)  # noqa: S311  # the same fleet each time, nothing secret
    counts = [round(replicas * share) for share, _ in SHAPES]
    counts[0] += replicas - sum(counts)
    found: list[ModelSpec] = []
    for shape, (count, (_, profile)) in enumerate(zip(counts, SHAPES, strict=True)):
        left, number = count, 0
        while left:
            wanted = min(left, draw.randint(1, max(1, min(2 * REPLICAS_PER_MODEL, count // 2))))
            name = f"{('acme', 'org', 'lab')[number % 3]}/{profile.name}-{shape}{number:03}"
            found.append(
                ModelSpec(
                    name=name,
                    source=f"{name}/weights.gguf",
                    profiles=_profiles(profile, number),
                    scaling=Scaling(min=wanted, max=wanted),
                )
            )
            left, number = left - wanted, number + 1
    return found


def _profiles(profile: Profile, number: int) -> tuple[Profile, ...]:
    """Every third has two ways to run, every fifth must be in one zone of three, every fourth has its own arguments."""
    parallel = {"tensor_parallel": max(1, profile.gpus_per_node), "pipeline_parallel": profile.nodes}
    own = msgspec.structs.replace(
        profile,
        tensor_parallel=parallel["tensor_parallel"],
        pipeline_parallel=parallel["pipeline_parallel"],
        node_selector={"zone": "abc"[number % 3]} if number % 5 == 0 and profile.gpus_per_node < 2 else {},
        args=("--no-warmup",) if number % 4 == 0 else (),
    )
    if number % 3:
        return (own,)
    first = msgspec.structs.replace(own, name=f"{own.name}-long", priority=10, context=131072, min_memory_gb=2500)
    return (first, own)  # the first fits nowhere, so that there is something to refuse


def nodes(count: int, catalog: list[ModelSpec]) -> Iterator[tuple[Ref, Record]]:
    """Facts and session of so many nodes. On every fifth lie the weights of up to eight models."""
    draw = random.Random(1)  # noqa: S311  # as above
    gpu_nodes = count // 2
    fabrics = max(1, gpu_nodes // NODES_PER_FABRIC)
    for number in range(count):
        name = f"{'gpu' if number % 2 else 'cpu'}-{number:05}.dc{number % 4}.example"
        machine = _gpu_machine(number, fabrics) if number % 2 else _cpu_machine(draw)
        here = draw.sample(catalog, min(8, len(catalog))) if number % 5 == 0 else []
        facts = Facts(
            node=name,
            boot_id=f"{draw.getrandbits(128):032x}",
            os="Debian GNU/Linux 13 (trixie)",
            arch="x86_64",
            cpu_model="AMD EPYC 9554 64-Core Processor",
            cpu_flags=CPU_FLAGS,
            labels={"zone": "abc"[number // 6 % 3], "rack": f"r{number // 40}"},
            weights=tuple(WeightSet(source=each.source, bytes=5 * GIB) for each in here),
            **machine,
        )
        session = Session(
            node=name,
            boot_id=facts.boot_id,
            data=f"8:{number}",
            lease=number + 1,
            store=STORE,
            address=f"10.{number // 65536}.{number // 256 % 256}.{number % 256}",
            version="0.1.0",
            pid=4711,
            started_at=1_000_000.0,
        )
        yield Ref(Kind.FACTS, name), facts
        yield Ref(Kind.SESSION, name), session


def _cpu_machine(draw: random.Random) -> dict[str, object]:
    return {
        "cpus": 64.0,
        "memory_bytes": draw.choice((64, 128, 256)) * GIB,
        "gpus": (),
        "engines": EngineFacts(probed=True, builds=(LLAMA,)),
    }


def _gpu_machine(number: int, fabrics: int) -> dict[str, object]:
    """Fabrics have every class on them, so that a gang has to find its own."""
    gpu_class = list(GPUS)[number // 2 % 3]
    gpus = tuple(
        Gpu(
            uuid=f"GPU-{number:08x}-{index:04x}-4000-8000-{number * 8 + index:012x}",
            index=index,
            gpu_class=gpu_class,
            memory_bytes=GPUS[gpu_class],
            nvlink_domain=index // 4 if gpu_class == "l40s-48gb" else 0,
            health=GpuHealth.OK,
            foreign=0,
            foreign_bytes=0,
        )
        for index in range(8)
    )
    fabric = Fabric(
        name=f"ib-{number // 2 % fabrics}",
        rate_gbps=400.0,
        hcas=tuple(f"mlx5_{index}" for index in range(8)),
        ifname="ib0",
    )
    return {
        "cpus": 192.0,
        "memory_bytes": 2000 * GIB,
        "gpus": gpus,
        "fabrics": (fabric,),
        "gang_ports": (21000, 21999),
        "engines": EngineFacts(probed=True, builds=(LLAMA_CUDA, VLLM)),
    }
