"""What a profile asks for that no node of the fleet could give, full or empty: said when it is applied, not at night.

Pure. Only what nodes are known to have is held against a profile: one node that does not say whether it has the thing,
and nothing is said. It never refuses: the machines may be bought tomorrow, and newer agents be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.inventory import NodeInventory
from llmgw.core.startable import unstartable
from llmgw.core.units import format_bytes
from llmgw.core.yaml_tree import nearest


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that nothing in the fleet can give. `nearest`: the nearest name there is, None where none is near."""

    model: str
    profile: str
    why: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest is not None else ""
        return f"{self.model} ({self.profile}): {self.why}{hint}"


def doubts(nodes: Iterable[NodeInventory], specs: Sequence[ModelSpec]) -> Iterator[Doubt]:
    """Everything that can be said against profiles of `specs`: what no agent starts, and what no node has."""
    for spec in specs:
        for profile in spec.profiles:
            if (why := unstartable(nodes=profile.nodes, gpus_per_node=profile.gpus_per_node)) is not None:
                yield Doubt(model=spec.name, profile=profile.name, why=f"{why}: it may be placed, and does not start")
    yield from lacks(nodes, specs)


def lacks(nodes: Iterable[NodeInventory], specs: Iterable[ModelSpec]) -> Iterator[Doubt]:
    """Everything that profiles of `specs` ask for and none of `nodes` has, whatever is free; nothing without nodes."""
    known = [node for node in nodes if node.facts is not None and not node.flaws]
    if not known:
        return
    for spec in specs:
        for profile in spec.profiles:
            for why, near in _lacks(known, profile):
                yield Doubt(model=spec.name, profile=profile.name, why=why, nearest=near)


Lack = tuple[str, str | None]


def _lacks(nodes: Sequence[NodeInventory], profile: Profile) -> Iterator[Lack]:
    """The first thing that leaves no node over, of each independent kind; then, of what is left, the company."""
    yield from _labels(nodes, profile)
    yield from _memory(nodes, profile)
    if profile.gpus_per_node > 0:
        yield from _gpus(nodes, profile)
    if profile.nodes > 1:
        yield from _company(nodes, profile)


def _labels(nodes: Sequence[NodeInventory], profile: Profile) -> Iterator[Lack]:
    for key, wanted in sorted(profile.node_selector.items()):
        values = {node.labels[key] for node in nodes if key in node.labels}
        if not values:
            keys = {each for node in nodes for each in node.labels}
            yield f"no node has the label {key}", nearest(key, keys)
        elif wanted not in values:
            yield f"no node has the label {key}={wanted}", nearest(wanted, values)


def _memory(nodes: Sequence[NodeInventory], profile: Profile) -> Iterator[Lack]:
    needed, totals = profile.memory_bytes, [node.memory_total_bytes for node in nodes]
    known = [total for total in totals if total is not None]
    if needed is not None and len(known) == len(totals) and max(known) < needed:
        yield f"needs {format_bytes(needed)} of memory, and the largest node has {format_bytes(max(known))}", None


def _gpus(nodes: Sequence[NodeInventory], profile: Profile) -> Iterator[Lack]:
    if any(node.gpus is None for node in nodes):
        return
    cards = [slot for node in nodes for slot in node.gpus or ()]
    kind = profile.gpu_class
    alike = [slot for slot in cards if kind is None or slot.gpu_class == kind]
    if not alike:
        near = None if kind is None else nearest(kind, {slot.gpu_class for slot in cards})
        yield ("no node has a GPU" if kind is None else f"no node has a GPU of class {kind}"), near
        return
    if (needed := profile.gpu_memory_bytes) is not None:
        sizes = [slot.memory_bytes for slot in alike]
        if None not in sizes and (largest := max(size or 0 for size in sizes)) < needed:
            yield f"needs GPUs of {format_bytes(needed)}, and the largest has {format_bytes(largest)}", None
            return
    most = max(_most_alike(node, profile) for node in nodes)
    if most < profile.gpus_per_node:
        what = kind or "equal GPUs"
        yield f"needs {profile.gpus_per_node} {what} in one node, and the largest has {most}", None


def _most_alike(node: NodeInventory, profile: Profile) -> int:
    """How many GPUs of one class, and large enough as far as that is known, a node has at most."""
    counts: dict[str, int] = {}
    floor = profile.gpu_memory_bytes or 0
    for slot in node.gpus or ():
        fits = slot.memory_bytes is None or slot.memory_bytes >= floor
        if fits and profile.gpu_class in (None, slot.gpu_class):
            counts[slot.gpu_class] = counts.get(slot.gpu_class, 0) + 1
    return max(counts.values(), default=0)


def _company(nodes: Sequence[NodeInventory], profile: Profile) -> Iterator[Lack]:
    """Whether any one fabric joins enough nodes that could each take a shard."""
    sizes: dict[str, int] = {}
    for node in nodes:
        could = node.gpus is None or _most_alike(node, profile) >= profile.gpus_per_node
        if could and node.facts is not None:
            for fabric in node.facts.fabrics:
                sizes[fabric.name] = sizes.get(fabric.name, 0) + 1
    if not sizes:
        yield f"spans {profile.nodes} nodes of one fabric, and no node that could take a part of it is on one", None
    elif (most := max(sizes.values())) < profile.nodes:
        name = min(name for name, size in sizes.items() if size == most)
        yield f"spans {profile.nodes} nodes of one fabric, and the largest, {name}, joins {most} that could", None
