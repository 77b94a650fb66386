"""Why: explanations as data, counted while deciding and rendered only when somebody asks.

Invariant: for every replica that is not placed there is, on demand, one `Refusal` per node. Nothing here decides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from llmgw.core.record import Record
from llmgw.core.units import GB, format_bytes

NEAREST_MAX: Final = 5
"""Refusals kept with a receipt: the nearest misses. The whole list is computed again on demand."""

HOLDERS_MAX: Final = 5
"""Holders named in one refusal, the largest first; the others are summed up under an empty name."""

DETAIL_LEN_MAX: Final = 240
"""Longest text of a node's own words in a refusal, in characters."""

RECEIPT_BYTES_MAX: Final = 16 * 1024
"""Largest receipt once encoded; follows from the limits above and that of names, and is asserted by the tests."""


class Constraint(enum.Enum):
    """Which rule turned a node (or a whole profile) down."""

    NOT_READY = "not_ready"
    CORDONED = "cordoned"
    SELECTOR = "selector"
    ENGINE_UNCHECKED = "engine_unchecked"
    ENGINE_MISSING = "engine_missing"
    ENGINE_VERSION = "engine_version"
    MEMORY = "memory"
    MEMORY_TOTAL = "memory_total"
    UNACCOUNTED = "unaccounted"
    SHARDS_MAX = "shards_max"
    RECORD_CORRUPT = "record_corrupt"
    GPU_COUNT = "gpu_count"
    GPU_CLASS = "gpu_class"
    GPU_MEMORY = "gpu_memory"
    GPU_CLAIMED = "gpu_claimed"
    GPU_FAULT = "gpu_fault"
    GPU_IN_USE = "gpu_in_use"
    GPU_UNKNOWN = "gpu_unknown"
    FABRIC = "fabric"
    GANG = "gang"
    FACTS = "facts"
    NO_NODES = "no_nodes"
    NO_PROFILES = "no_profiles"
    RESTORING = "restoring"
    UNSUPPORTED = "unsupported"


class Refusal(Record, frozen=True, kw_only=True):
    """One candidate that was not taken, with the numbers it was judged by.

    `node` is empty when the refusal speaks of the profile as a whole. Sizes are bytes; None means unknown or not
    applicable. `holders`: what claims the thing that lacked, as (name, bytes), at most `HOLDERS_MAX` and one for the
    rest, whose name is empty. `detail`: the node's own words.
    """

    constraint: Constraint
    profile: str
    node: str = ""
    needed: int | None = None
    total: int | None = None
    free: int | None = None
    holders: tuple[tuple[str, int], ...] = ()
    detail: str = ""


class Score(Record, frozen=True, kw_only=True):
    """Why a candidate ranked where it did. Compared field by field in this order, smaller first.

    `replicas_of_model` stands before `node_empty`: two copies of one model on one machine die together, so keeping
    machines empty is worth less than spreading them. `free_bytes` None (a node that reports no memory) comes last.
    """

    failed_lately: bool
    weights_missing: bool
    replicas_of_model: int
    node_empty: bool
    free_bytes: int | None
    node: str


class Receipt(Record, frozen=True, kw_only=True):
    """What a placement was decided from; stays with the replica after success. At most `RECEIPT_BYTES_MAX` encoded.

    `revision`: the newest revision the decision had seen. `refused`: how many nodes each constraint turned down.
    `nearest`: at most five of the refusals that missed by least.
    """

    revision: int
    profile: str
    winner: tuple[Score, ...] = ()
    runner_up: Score | None = None
    refused: dict[str, int] = {}
    nearest: tuple[Refusal, ...] = ()


class Unplaced(Record, frozen=True, kw_only=True):
    """Why a wanted replica runs nowhere, bounded as a `Receipt` is.

    `refused`: how many nodes each constraint turned down, a node once for all profiles. `nodes`: how many were judged.
    """

    revision: int
    nodes: int = 0
    refused: dict[str, int] = {}
    nearest: tuple[Refusal, ...] = ()


def clip(text: str) -> str:
    """A node's own words on one line, cut to `DETAIL_LEN_MAX`."""
    flat = " ".join(text.split())
    return flat if len(flat) <= DETAIL_LEN_MAX else flat[: DETAIL_LEN_MAX - 1] + "…"


def bounded_holders(holders: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The largest holders, and the sum of the others under an empty name."""
    ranked = sorted(holders, key=lambda holder: (-holder[1], holder[0]))
    rest = sum(size for _, size in ranked[HOLDERS_MAX:])
    return (*ranked[:HOLDERS_MAX], *((("", rest),) if rest else ()))


_DISTANCE: Final = {
    constraint: rank
    for rank, constraint in enumerate((
        Constraint.MEMORY,
        Constraint.UNACCOUNTED,
        Constraint.SHARDS_MAX,
        Constraint.ENGINE_UNCHECKED,
        Constraint.ENGINE_VERSION,
        Constraint.ENGINE_MISSING,
        Constraint.CORDONED,
        Constraint.NOT_READY,
        Constraint.MEMORY_TOTAL,
    ))
}  # fmt: skip
"""How far a refusal is from fitting, nearest first: what passes by itself, what a person can change, what can't be."""


def nearest(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """The `NEAREST_MAX` refusals that missed by least."""
    return tuple(sorted(refusals, key=_miss)[:NEAREST_MAX])


def _miss(refusal: Refusal) -> tuple[int, int, str, str]:
    missing = (refusal.needed or 0) - (refusal.free or 0)
    return (_DISTANCE.get(refusal.constraint, len(_DISTANCE)), missing, refusal.node, refusal.profile)


def counted(refusals: Iterable[Refusal]) -> dict[str, int]:
    """How many refusals there are of each constraint, by its name."""
    counts: dict[str, int] = {}
    for refusal in refusals:
        counts[refusal.constraint.value] = counts.get(refusal.constraint.value, 0) + 1
    return dict(sorted(counts.items()))


def same_but_numbers(old: Unplaced | None, new: Unplaced | None) -> bool:
    """Whether nothing but numbers differs: the same constraints refuse. Only then is the stored one left as it is."""
    return old is not None and new is not None and old.refused.keys() == new.refused.keys()


def render(refusal: Refusal) -> str:
    """A refusal as what can be said of its node: "has 8 GB of memory, needs 24"."""
    match refusal.constraint:
        case Constraint.NOT_READY:
            return f"is {refusal.detail}"
        case Constraint.ENGINE_UNCHECKED:
            return ": ".join(part for part in ("engines not checked yet", refusal.detail) if part)
        case Constraint.MEMORY_TOTAL:
            return f"has {format_bytes(refusal.total)} of memory, needs {_same_unit(refusal.needed, refusal.total)}"
        case Constraint.MEMORY:
            parts = [f"{format_bytes(refusal.total)} in all", *_promises(refusal.holders), refusal.detail]
            return f"needs {format_bytes(refusal.needed)}; {', '.join(part for part in parts if part)}"
        case Constraint.UNACCOUNTED:
            return f"runs {refusal.detail}, and what that holds is not known yet"
        case Constraint.SHARDS_MAX:
            return f"holds {refusal.total} shards, and no node takes more"
        case _:
            return refusal.detail or _FIXED.get(refusal.constraint, refusal.constraint.value.replace("_", " "))


_FIXED: Final = {
    Constraint.NO_NODES: "there is no node yet",
    Constraint.NO_PROFILES: "the model has no profile",
    Constraint.RESTORING: "the store was restored: waiting until every node has reported",
}
"""Constraints that need no numbers and no node's words."""


def render_at(refusal: Refusal) -> str:
    """A refusal as a whole sentence, naming its node and profile: "n1 (cpu): has 8 GB of memory, needs 24"."""
    place = f"{refusal.node} ({refusal.profile})" if refusal.node and refusal.profile else refusal.node
    subject = "" if refusal.constraint is Constraint.NO_NODES else place or refusal.profile
    return f"{subject}: {render(refusal)}" if subject else render(refusal)


def summarise(unplaced: Unplaced) -> str:
    """Why nothing fits, in one line: how many nodes lack what, and the nearest miss."""
    near = render_at(unplaced.nearest[0]) if unplaced.nearest else ""
    if Constraint.NO_NODES.value in unplaced.refused:
        return _FIXED[Constraint.NO_NODES]
    counts = ", ".join(_count(name, count) for name, count in unplaced.refused.items())
    if unplaced.nodes <= 1:
        return f"{'does not fit on the only node' if unplaced.nodes else 'fits nowhere'}: {near or counts}"
    return f"fits on none of {unplaced.nodes} nodes: {counts}" + (f" ({near})" if near else "")


_LACKS: Final = {
    Constraint.NOT_READY: ("is not ready", "are not ready"),
    Constraint.CORDONED: ("is cordoned", "are cordoned"),
    Constraint.SELECTOR: ("lacks a label", "lack a label"),
    Constraint.ENGINE_UNCHECKED: ("has not checked its engines yet", "have not checked their engines yet"),
    Constraint.ENGINE_MISSING: ("lacks the engine", "lack the engine"),
    Constraint.ENGINE_VERSION: ("has another version of the engine", "have another version of the engine"),
    Constraint.MEMORY: ("has too little memory left", "have too little memory left"),
    Constraint.MEMORY_TOTAL: ("has too little memory", "have too little memory"),
    Constraint.UNACCOUNTED: ("runs what is not accounted for", "run what is not accounted for"),
    Constraint.SHARDS_MAX: ("is full", "are full"),
    Constraint.RECORD_CORRUPT: ("has a record that can't be read", "have a record that can't be read"),
    Constraint.UNSUPPORTED: ("profile is not supported", "profiles are not supported"),
}
"""What is said of one node and of several that a constraint turned down; of any other, its name."""


def _count(name: str, count: int) -> str:
    """How many nodes a constraint turned down. It may be the name of one that only a newer leader knows."""
    known = next((words for constraint, words in _LACKS.items() if constraint.value == name), None)
    return f"{count} × {name.replace('_', ' ')}" if known is None else f"{count} {known[count != 1]}"


def _same_unit(size: int | None, beside: int | None) -> str:
    """`size` without its unit where that is the unit of `beside`."""
    text = format_bytes(size)
    return text.removesuffix(" GB") if format_bytes(beside).endswith(" GB") and (size or 0) >= GB // 10 else text


def _promises(holders: Iterable[tuple[str, int]]) -> list[str]:
    """Who holds what: the first as "16 GB promised to a", further ones shorter."""
    parts: list[str] = []
    for name, size in holders:
        verb = "" if parts else "promised "
        parts.append(f"{format_bytes(size)} {verb}to {name or 'others'}")
    return parts
