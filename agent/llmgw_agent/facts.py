"""What this machine is, as far as an agent may use it: the record below `node/facts/`.

Reading only, and blocking: the host runs these on threads, each bounded and at most one at a time, and reports as
unknown what does not answer.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from llmgw.config import AgentConfig
from llmgw.core.node import EngineFacts, Fabric, Facts, WeightSet
from llmgw.core.units import gb_to_bytes
from llmgw_agent.cgroup import Cgroups

X86_FLAG_OF_SPEED: Final = "avx2"

VECTOR: Final = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "neon", "sme", "sse4", "sve", "vsx")
"""Beginnings of the flags that are reported: those by which engine builds differ."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The quick facts. `memory_bytes` and `cpus` are within the limits of the control group, before any cap."""

    os: str | None
    arch: str
    cpu_model: str | None
    cpu_flags: tuple[str, ...]
    cpus: float | None
    memory_bytes: int | None


def look_at_machine(root: Path = Path("/")) -> Machine:
    """Look. `root`: where `/proc`, `/sys` and `/etc` are, another place in tests."""
    groups = Cgroups(root)
    model, flags = _cpu(root)
    memory = [limit for limit in (_memory_total(root), groups.memory_bytes()) if limit is not None]
    cpus = [limit for limit in (float(len(os.sched_getaffinity(0))), groups.cpus()) if limit is not None]
    return Machine(
        os=_os_name(root),
        arch=platform.machine(),
        cpu_model=model,
        cpu_flags=flags,
        cpus=min(cpus),
        memory_bytes=min(memory, default=None),
    )


def build_facts(
    config: AgentConfig,
    seen: Machine | None,
    *,
    boot_id: str,
    engines: EngineFacts,
    weights: tuple[WeightSet, ...] | None,
    warnings: Sequence[str] = (),
) -> Facts:
    """The record. `seen` None: the machine did not answer in time, which is unknown and not nothing.

    `warnings`: what else people should know; a warning about the processor is put before them.
    """
    warnings = list(warnings)
    if seen is not None and seen.arch == "x86_64" and seen.cpu_flags and X86_FLAG_OF_SPEED not in seen.cpu_flags:
        warnings.insert(0, "this processor has no AVX2: engines run several times slower than on one that has")
    return Facts(
        node=config.name,
        boot_id=boot_id,
        os=None if seen is None else seen.os,
        arch=None if seen is None else seen.arch,
        cpu_model=None if seen is None else seen.cpu_model,
        cpu_flags=() if seen is None else tuple(flag for flag in seen.cpu_flags if flag.startswith(VECTOR)),
        cpus=None if seen is None else _capped_cpus(config, seen.cpus),
        memory_bytes=None if seen is None else _capped_memory(config, seen.memory_bytes),
        labels=config.labels,
        fabrics=tuple(
            Fabric(name=item.name, rate_gbps=item.rate_gbps, hcas=item.hcas, ifname=item.ifname)
            for item in config.fabrics
        ),
        gang_ports=config.gang_ports,
        engines=engines,
        weights=weights,
        warnings=tuple(warnings),
    )


def threads(config: AgentConfig, seen: Machine | None) -> int:
    """How many threads an engine computes with: the whole CPUs this node may use, at least one."""
    cpus = None if seen is None else _capped_cpus(config, seen.cpus)
    return 1 if cpus is None else max(1, math.floor(cpus))


def _capped_memory(config: AgentConfig, memory_bytes: int | None) -> int | None:
    cap = None if config.memory_gb is None else gb_to_bytes(config.memory_gb)
    if memory_bytes is None:
        return cap
    share = int(memory_bytes * config.share)
    return share if cap is None else min(share, cap)


def _capped_cpus(config: AgentConfig, cpus: float | None) -> float | None:
    if cpus is None:
        return config.cpus
    share = cpus * config.share
    return share if config.cpus is None else min(share, config.cpus)


def _memory_total(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    return None


def _cpu(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """Model and flags of the first processor. On ARM the flags are called Features and there may be no model."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return None, ()
    first = text.partition("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name"), tuple(sorted(set(flags.split())))


def _os_name(root: Path) -> str | None:
    for name in ("etc/os-release", "usr/lib/os-release"):
        try:
            lines = (root / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip('"')
    return None
