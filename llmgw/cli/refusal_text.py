"""Many refusals, and scores, as lines for people: equal reasons together. One in words: `llmgw.core.refusal_words`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from llmgw.core.explain import Refusal, Score, miss
from llmgw.core.refusal_words import remedy, render, turned_down
from llmgw.core.units import format_bytes

NAMES_MAX: Final = 12
"""Names in one enumeration; the others are counted."""

ALIKE_MAX: Final = 5
"""Different reasons of one kind that are told; the nodes of the others are counted."""


def some(names: Sequence[str], *, most: int = NAMES_MAX) -> str:
    """An enumeration that does not run away."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(names: Iterable[str]) -> list[str]:
    """Each once, with how often it occurs."""
    return [name if count == 1 else f"{name} ×{count}" for name, count in sorted(Counter(names).items())]


def refused(refusals: Iterable[Refusal], *, every: bool = False) -> Iterator[tuple[str, str]]:
    """(what is refused and why, what would have to change), nearest misses first; nodes with one reason together.

    `every`: all of them, each node named. Otherwise no kind of reason takes more than `ALIKE_MAX` lines.
    """
    alike: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in sorted(refusals, key=miss):
        alike.setdefault((render(refusal), remedy(refusal)), []).append(refusal)
    told, left = Counter[str](), Counter[str]()
    for (why, todo), same in alike.items():
        kind = same[0].constraint.value
        if not every and told[kind] >= ALIKE_MAX:
            left[kind] += len(same)
            continue
        told[kind] += 1
        names = [refusal.node for refusal in same if refusal.node]
        yield f"{_subject(names, every=every)}{why}", todo
    for kind, count in left.items():
        yield f"and so on: {turned_down(kind, count)} (--all shows each)", ""


def _subject(names: list[str], *, every: bool) -> str:
    if not names:
        return ""
    if len(names) == 1:
        return f"{names[0]}: "
    return f"{len(names)} nodes ({some(names, most=len(names) if every else 4)}): "


def scored(score: Score) -> str:
    """What speaks for a node and against it, in the order in which it counts."""
    parts = ["failed it lately"] if score.failed_lately else []
    if score.claimed_gpus is not None:
        parts.append(f"{score.claimed_gpus} GPUs and {format_bytes(score.claimed_bytes)} taken")
    parts.append("weights not seen there" if score.weights_missing else "has the weights")
    if score.replicas_of_model:
        parts.append(f"{score.replicas_of_model} of this model there")
    parts.append("empty" if score.node_empty else "in use")
    if score.free_gpus is not None:
        parts.append(f"{score.free_gpus} {score.gpu_class or 'GPUs'} free")
    free = format_bytes(score.free_bytes)
    parts.append(f"{free} free" if score.free_bytes is not None else "memory not known")
    return ", ".join(parts)
