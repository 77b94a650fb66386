"""The GPUs of one node as one profile sees them: how many of each class would do, and why too few of them are free.

Pure. Classes are told apart from the start and never added up: unequal cards in one split end with the smallest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from llmgw.core.catalog import Profile
from llmgw.core.explain import GPUS_TAKEN, Constraint
from llmgw.core.gpu import GpuSlot
from llmgw.core.units import format_bytes

_KEEPERS: Final = (*GPUS_TAKEN, Constraint.UNACCOUNTED)
"""What may keep a GPU, the one to speak of first where they keep equally many."""


class Cards(NamedTuple):
    """One class of GPUs on one node. `total`: of that class; `fitting`: of these with memory enough; `free`: of those.

    `keeper`: what keeps most of the fitting ones that are not free, None when all are free.
    """

    gpu_class: str
    total: int
    fitting: int
    free: int
    keeper: Constraint | None


def cards_of(slots: Iterable[GpuSlot], profile: Profile) -> tuple[Cards, ...]:
    """The GPUs that count for a profile, by class."""
    of_class: dict[str, list[GpuSlot]] = {}
    for slot in slots:
        if profile.gpu_class is None or slot.gpu_class == profile.gpu_class:
            of_class.setdefault(slot.gpu_class, []).append(slot)
    return tuple(_cards(gpu_class, of_class[gpu_class], profile) for gpu_class in sorted(of_class))


def _cards(gpu_class: str, slots: list[GpuSlot], profile: Profile) -> Cards:
    fitting = slots if profile.min_gpu_memory_gb is None else [slot for slot in slots if fits(slot, profile)]
    kept = [slot.taken for slot in fitting if slot.taken is not None]
    keeper = max(_KEEPERS, key=kept.count) if kept else None
    return Cards(gpu_class, len(slots), len(fitting), len(fitting) - len(kept), keeper)


def fits(slot: GpuSlot, profile: Profile) -> bool:
    """Whether a GPU has the memory that is asked for.

    Not known is not enough; of one that can't be had anyway it is not asked, so that what is wrong with it is said.
    """
    least = profile.gpu_memory_bytes
    if least is None or (slot.memory_bytes is None and slot.taken is not None):
        return True
    return slot.memory_bytes is not None and slot.memory_bytes >= least


class Shortage(NamedTuple):
    """Why a node has too few free GPUs. `cards`: the class nearest it; `total`, `free`: of it, where that tells."""

    constraint: Constraint
    cards: Cards
    total: int | None = None
    free: int | None = None


def shortage(cards: tuple[Cards, ...], count: int) -> Shortage | None:
    """Why no class of a node has `count` free GPUs; None when one has."""
    if any(each.free >= count for each in cards):
        return None
    if all(each.total < count for each in cards):
        most = max(cards, key=lambda each: each.total, default=Cards("", 0, 0, 0, None))
        return Shortage(Constraint.GPU_COUNT, most, total=most.total)
    best = max(cards, key=lambda each: (each.fitting, each.free))
    if best.fitting < count or best.keeper is None:
        return Shortage(Constraint.GPU_MEMORY, best, total=best.fitting)
    if best.keeper is Constraint.UNACCOUNTED:
        return Shortage(best.keeper, best)
    return Shortage(best.keeper, best, total=best.fitting, free=best.free)


def named(slots: Iterable[GpuSlot]) -> str:
    """Which GPUs there are, for people: "1 × rtx-3090 (25.8 GB), 2 × rtx-3060 (12.9 GB)"; empty for none."""
    kinds = Counter((slot.gpu_class, slot.memory_bytes) for slot in slots)
    ranked = sorted(kinds.items(), key=lambda kind: (-(kind[0][1] or 0), kind[0][0]))
    return ", ".join(
        f"{count} × {gpu_class}" + ("" if memory is None else f" ({format_bytes(memory)})")
        for (gpu_class, memory), count in ranked
    )


def reasons(slots: Iterable[GpuSlot]) -> str:
    """What keeps each GPU: "GPUs 0, 1 are claimed by x-ab12c; GPU 3: ECC fault"."""
    told: dict[str, list[GpuSlot]] = {}
    for slot in slots:
        told.setdefault(slot.why, []).append(slot)
    parts: list[str] = []
    for why, alike in told.items():
        names = f"GPU{'s' if len(alike) > 1 else ''} {', '.join(str(slot.index) for slot in alike)}"
        verb = f" {'are' if len(alike) > 1 else 'is'} " if alike[0].taken is Constraint.GPU_CLAIMED else ": "
        parts.append(f"{names}{verb}{why}")
    return "; ".join(parts)
