"""One refusal in words: what is said of its node, what would have to change, and why nothing fits in one line.

Pure, and as short as a log line or a table needs it. Lists of many refusals for a terminal are `llmgw.cli`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llmgw.core.explain import GPUS_TAKEN, Constraint, Refusal, Unplaced
from llmgw.core.units import GB, format_bytes


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
        case Constraint.GPU_COUNT:
            of_one_class = " of one class" if (refusal.needed or 0) > 1 else ""
            return f"has {refusal.detail or 'no GPU'}, needs {refusal.needed}{of_one_class}"
        case constraint if constraint in GPUS_TAKEN and refusal.needed is not None and refusal.total is not None:
            numbers = f"needs {_gpus(refusal.needed, refusal.gpu_class)}; {refusal.free or 0} of {refusal.total} free"
            return f"{numbers}: {refusal.detail}" if refusal.detail else numbers
        case _:
            return refusal.detail or _FIXED.get(refusal.constraint, refusal.constraint.value.replace("_", " "))


_FIXED: Final = {
    Constraint.NO_NODES: "there is no node yet",
    Constraint.NO_PROFILES: "the model has no profile",
    Constraint.RESTORING: "the store was restored: waiting until every node has reported",
}
"""Constraints that need no numbers and no node's words."""


def remedy(refusal: Refusal) -> str:
    """What would have to change for this node to be taken: "free 4 GB there, or ask for at most 12 GB"."""
    lacking = max(0, (refusal.needed or 0) - (refusal.free or 0))
    match refusal.constraint:
        case Constraint.MEMORY:
            less = f", or ask for at most {format_bytes(refusal.free)}" if refusal.free else ""
            return f"free {format_bytes(lacking)} there{less}"
        case Constraint.MEMORY_TOTAL:
            return f"ask for at most {format_bytes(refusal.total)}"
        case Constraint.CORDONED:
            return "uncordon it"
        case Constraint.GPU_COUNT:
            return f"ask for at most {refusal.total} a node" if refusal.total else "a GPU, or a profile that needs none"
        case constraint if constraint in GPUS_TAKEN and refusal.needed is not None:
            return f"{lacking} more free {refusal.gpu_class or ('GPU' if lacking == 1 else 'GPUs')} there"
        case Constraint.GANG:
            return f"{lacking} more such {'node' if lacking == 1 else 'nodes'} on the same fabric"
        case _:
            return _REMEDIES.get(refusal.constraint, "")


_REMEDIES: Final = {
    Constraint.NOT_READY: "wait until its agent is back and has reported",
    Constraint.SELECTOR: "give it that label, or ask for another one",
    Constraint.ENGINE_UNCHECKED: "wait until it has checked its engines",
    Constraint.ENGINE_MISSING: "install the engine there, or name it in its agent.yaml",
    Constraint.ENGINE_VERSION: "install that version there, or wish for the one it has",
    Constraint.UNACCOUNTED: "wait until that is adopted, or confirmed gone",
    Constraint.SHARDS_MAX: "end a replica there",
    Constraint.RECORD_CORRUPT: "write or delete that record anew",
    Constraint.GPU_CLASS: "ask for a class that it has, or for none in particular",
    Constraint.GPU_MEMORY: "ask for less memory a GPU, or for fewer GPUs",
    Constraint.GPU_UNKNOWN: "find out why its agent can't read its GPUs",
    Constraint.FABRIC: "name its fabric in its agent.yaml, or use one node",
    Constraint.FACTS: "correct what its agent reports",
    Constraint.GANG_PORTS: "give its nodes more gang_ports, or end a replica that spans nodes there",
    Constraint.NO_NODES: "start an agent",
    Constraint.NO_PROFILES: "give the model a profile",
    Constraint.RESTORING: "wait, or `llmgw recover` if some nodes will not come back",
}
"""What would have to change where no number says it better."""


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
    counts = ", ".join(turned_down(name, count) for name, count in unplaced.refused.items())
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
    Constraint.GPU_CLASS: ("has no GPU of the class", "have no GPU of the class"),
    Constraint.GPU_COUNT: ("has too few GPUs", "have too few GPUs"),
    Constraint.GPU_MEMORY: ("has GPUs with too little memory", "have GPUs with too little memory"),
    Constraint.GPU_CLAIMED: ("has too few unclaimed GPUs", "have too few unclaimed GPUs"),
    Constraint.GPU_FAULT: ("has faulty GPUs", "have faulty GPUs"),
    Constraint.GPU_IN_USE: ("has GPUs in use outside llmgw", "have GPUs in use outside llmgw"),
    Constraint.GPU_UNKNOWN: ("has GPUs in an unknown state", "have GPUs in an unknown state"),
    Constraint.FABRIC: ("is on no fabric", "are on no fabric"),
    Constraint.GANG: ("has too few companions", "have too few companions"),
    Constraint.GANG_PORTS: ("finds no ports free on all its nodes", "find no ports free on all their nodes"),
    Constraint.FACTS: ("reports what can't be true", "report what can't be true"),
}
"""What is said of one node and of several that a constraint turned down; of any other, its name."""


def turned_down(name: str, count: int) -> str:
    """How many nodes a constraint turned down. It may be the name of one that only a newer leader knows."""
    known = next((words for constraint, words in _LACKS.items() if constraint.value == name), None)
    return f"{count} × {name.replace('_', ' ')}" if known is None else f"{count} {known[count != 1]}"


def _same_unit(size: int | None, beside: int | None) -> str:
    """`size` without its unit where that is the unit of `beside`."""
    text = format_bytes(size)
    return text.removesuffix(" GB") if format_bytes(beside).endswith(" GB") and (size or 0) >= GB // 10 else text


def _gpus(count: int | None, gpu_class: str | None) -> str:
    """So many GPUs, of a class where it is known."""
    what = gpu_class or ("GPU" if count in (None, 1) else "GPUs")
    return what if count is None else f"{count} {what}"


def _promises(holders: Iterable[tuple[str, int]]) -> list[str]:
    """Who holds what: the first as "16 GB promised to a", further ones shorter."""
    parts: list[str] = []
    for name, size in holders:
        verb = "" if parts else "promised "
        parts.append(f"{format_bytes(size)} {verb}to {name or 'others'}")
    return parts
