"""What one node could give to one profile, and why it can't: the filters of placement, each judged on one node alone.

Counted while deciding: what is turned down leaves a `Refusal` with the numbers it was judged by. A profile's needs are
declared, not measured; one that declares no memory fits anywhere and claims nothing.

Invariants: a node offers itself to pools, never to a replica, and a pool is one fabric and one class of GPUs; unknown
is never read as free. Weights are a preference, never a filter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from llmgw.core.cards import Cards, cards_of, fits, named, reasons, shortage
from llmgw.core.catalog import EngineSpec, Profile
from llmgw.core.explain import HOLDERS_MAX, Constraint, Refusal, bounded_holders, clip
from llmgw.core.gang_ports import PORTS, range_of
from llmgw.core.inventory import NodeInventory
from llmgw.core.node import Build, Liveness
from llmgw.core.replica import SHARDS_PER_NODE_MAX
from llmgw.core.units import format_bytes


class Pool(NamedTuple):
    """What a replica may draw from, and nothing else.

    `fabric`: None for a replica on one node. `gpu_class`: None for one without GPUs. `build`: what every shard of a
    gang runs, since builds do not understand one another; None for a replica on one node, which takes the node's best.
    """

    fabric: str | None
    gpu_class: str | None
    build: str | None


class Admission(NamedTuple):
    """What a node has for a profile, before it is asked how much of it is left.

    `builds`: ids of the builds it would run, best first; one None for an agent too old to say. `fabrics`: empty for a
    profile that spans no nodes. `cards`: by class, empty for a profile that takes no GPUs.
    """

    builds: tuple[str | None, ...]
    fabrics: tuple[str, ...] = ()
    cards: tuple[Cards, ...] = ()

    def pools(self, profile: Profile) -> list[Pool]:
        """The pools that a node with room offers itself to."""
        count = profile.gpus_per_node
        classes = [each.gpu_class for each in self.cards if each.free >= count] if count else [None]
        if profile.nodes == 1:
            return [Pool(None, each, None) for each in classes]
        return [Pool(fabric, each, build) for fabric in self.fabrics for each in classes for build in self.builds]


def judge(node: NodeInventory, profile: Profile, *, wish: EngineSpec | None) -> Admission | Refusal:
    """The filters in their order: why the node can't take a shard, or what it has for one.

    That a gang finds companions is judged over all nodes (`lonely`).
    """
    found = admit(node, profile, wish)
    if isinstance(found, Refusal):
        return found
    return _gpus(node, profile, found.cards) or _memory(node, profile) or found


def admit(node: NodeInventory, profile: Profile, wish: EngineSpec | None) -> Admission | Refusal:
    """The filters that ask neither how many GPUs nor how much memory, so that their answers serve many profiles."""
    if (refusal := _standing(node, profile)) is not None:
        return refusal
    builds = _builds(node, profile, wish)
    if isinstance(builds, Refusal):
        return builds
    fabrics: tuple[str, ...] = ()
    if profile.nodes > 1:
        if (refusal := _company(node, profile, builds)) is not None:
            return refusal
        fabrics = tuple(sorted(each.name for each in (node.facts.fabrics if node.facts is not None else ())))
    if profile.gpus_per_node == 0:
        return Admission(builds, fabrics)
    if node.gpus is None:
        return _refusal(node, profile, Constraint.GPU_UNKNOWN, "does not know its GPUs")
    cards = cards_of(node.gpus, profile)
    if profile.gpu_class is not None and not cards:
        has = named(node.gpus) or "no GPU"
        return _refusal(node, profile, Constraint.GPU_CLASS, f"has {has}, needs {profile.gpu_class}")
    return Admission(builds, fabrics, cards)


def alike_but_taken(old: NodeInventory, new: NodeInventory) -> bool:
    """Whether `admit` says the same of both states of a node, except how many of its GPUs are taken, and by what."""
    return (
        old.facts is new.facts
        and old.liveness is new.liveness
        and old.present == new.present
        and old.cordon == new.cordon
        and old.address == new.address
        and bool(old.gang_starts) == bool(new.gang_starts)
        and old.corrupt == new.corrupt
        and (old.shards < SHARDS_PER_NODE_MAX) == (new.shards < SHARDS_PER_NODE_MAX)
        and old.labels == new.labels
    )


def _refusal(node: NodeInventory, profile: Profile, constraint: Constraint, detail: str) -> Refusal:
    return Refusal(constraint=constraint, profile=profile.name, node=node.name, detail=clip(detail))


# --- whether it may take anything, and which engine it would run ----------------------------------------------------


def _standing(node: NodeInventory, profile: Profile) -> Refusal | None:
    """Whether the node may take anything at all, whatever it has."""
    if node.corrupt:
        return _refusal(node, profile, Constraint.RECORD_CORRUPT, f"a record can't be read: {node.corrupt[0]}")
    if node.liveness is not Liveness.READY or not node.present or node.facts is None:
        known = "not known to be ready yet" if node.liveness is None else node.liveness.value
        said = known if node.liveness is not Liveness.READY else "without its facts yet"
        return _refusal(node, profile, Constraint.NOT_READY, said)
    if node.cordon:
        return _refusal(node, profile, Constraint.CORDONED, "is being drained" if node.drain else "is cordoned")
    if node.flaws:
        return _refusal(node, profile, Constraint.FACTS, node.flaws[0])
    for key, wanted in sorted(profile.node_selector.items()):
        has = node.labels.get(key)
        if has != wanted:
            said = f"has the label {key}={has}" if has is not None else f"has no label {key}"
            return _refusal(node, profile, Constraint.SELECTOR, f"{said}, needs {key}={wanted}")
    if node.shards >= SHARDS_PER_NODE_MAX:
        return Refusal(
            constraint=Constraint.SHARDS_MAX,
            profile=profile.name,
            node=node.name,
            total=node.shards,
            needed=1,
            free=max(0, SHARDS_PER_NODE_MAX - node.shards),
        )
    return None


def _builds(node: NodeInventory, profile: Profile, wish: EngineSpec | None) -> tuple[str | None, ...] | Refusal:
    """The engine builds this node would run the profile with, best first; (None,): an agent too old to say.

    Best is the wished version, then what was named on purpose, then what the node lists first: it lists what its
    agent.yaml names before what it found.
    """
    engines = None if node.facts is None else node.facts.engines
    if engines is None:
        return (None,)
    said = engines.notes.get(profile.engine, "")
    if not engines.probed:
        return _refusal(node, profile, Constraint.ENGINE_UNCHECKED, said)
    builds = [build for build in engines.builds if build.engine == profile.engine]
    if not builds:
        return _refusal(node, profile, Constraint.ENGINE_MISSING, said or f"has no {profile.engine}")
    if wish is None:
        return tuple(build.id for build in sorted(builds, key=lambda build: not build.named))
    wished = [build for build in builds if satisfies(build, wish)]
    if not wished:
        has = ", ".join(sorted(build.version for build in builds))
        words = said or f"has {profile.engine} {has}, needs {wish.version}"
        return _refusal(node, profile, Constraint.ENGINE_VERSION, words)
    return tuple(build.id for build in sorted(wished, key=lambda build: build.version != wish.version))


def satisfies(build: Build, wish: EngineSpec) -> bool:
    """Whether a build is what people want: of that version, or named on purpose by whoever runs the node."""
    return build.named or build.version == wish.version


# --- gangs ----------------------------------------------------------------------------------------------------------


def _company(node: NodeInventory, profile: Profile, builds: tuple[str | None, ...]) -> Refusal | None:
    """Whether the node could be a member of a gang at all."""
    if node.facts is None or not node.facts.fabrics:
        said = f"is on no fabric; this profile spans {profile.nodes} nodes"
        return _refusal(node, profile, Constraint.FABRIC, said)
    if not node.address:
        return _refusal(node, profile, Constraint.FACTS, "has no address at which other nodes could reach it")
    if not node.gang_starts:
        said = f"its gang_ports {_range(node)} have no {PORTS} in a row that are free"
        return _refusal(node, profile, Constraint.GANG_PORTS, said)
    if builds == (None,):
        # Shards of different builds do not understand one another, and not known is not the same.
        said = "its agent is too old to say which build it would run, and a gang needs one on all nodes"
        return _refusal(node, profile, Constraint.ENGINE_UNCHECKED, said)
    return None


def lonely(node: NodeInventory, profile: Profile, *, pools: Collection[Pool], sizes: Mapping[Pool, int]) -> Refusal:
    """Why a node that would do by itself is in no gang: its largest pool, and what that one lacks.

    Args:
        node: one that would do.
        profile: spans several nodes.
        pools: those the node offers itself to.
        sizes: how many nodes offer themselves to each pool.
    """
    best = max(sorted(pools, key=_spoken), key=lambda pool: sizes[pool])
    if sizes[best] >= profile.nodes:
        others = "another node" if profile.nodes == 2 else f"{profile.nodes - 1} other nodes"
        said = f"its gang_ports {_range(node)} have no {PORTS} in a row that are free on {others} of {best.fabric} too"
        return _refusal(node, profile, Constraint.GANG_PORTS, said)
    what = f" with {profile.gpus_per_node} free {best.gpu_class}" if best.gpu_class is not None else ""
    if any(each[:2] == best[:2] and each.build != best.build for each in sizes):
        what += f"{' and' if what else ' with'} {best.build}"
    said = f"fabric {best.fabric} has {sizes[best]} of the {profile.nodes} nodes{what} it needs"
    return Refusal(
        constraint=Constraint.GANG,
        profile=profile.name,
        node=node.name,
        needed=profile.nodes,
        free=sizes[best],
        gpu_class=best.gpu_class,
        detail=clip(said),
    )


def _range(node: NodeInventory) -> str:
    return "-".join(str(port) for port in range_of(node.facts))


def _spoken(pool: Pool) -> tuple[str, ...]:
    """A pool as a sort key: no field is None in two pools of which one has it."""
    return tuple(part or "" for part in pool)


# --- GPUs and memory ------------------------------------------------------------------------------------------------


def _gpus(node: NodeInventory, profile: Profile, cards: tuple[Cards, ...]) -> Refusal | None:
    """Whether one class of the node's GPUs has as many free as the profile takes."""
    count = profile.gpus_per_node
    if count == 0 or (short := shortage(cards, count)) is None:
        return None
    slots, holders = node.gpus or (), Counter[str]()
    match short.constraint:
        case Constraint.UNACCOUNTED:
            return _refusal(node, profile, short.constraint, ", ".join(node.unaccounted[:HOLDERS_MAX]))
        case Constraint.GPU_COUNT:
            detail = named(slots)
        case Constraint.GPU_MEMORY:
            detail = f"has {named(slots)}, needs {count} with {format_bytes(profile.gpu_memory_bytes)} each"
        case _:
            alike = [slot for slot in slots if slot.gpu_class == short.cards.gpu_class and fits(slot, profile)]
            holders = Counter(slot.holder for slot in alike if slot.holder)
            detail = reasons(slot for slot in alike if slot.taken is not None)
    return Refusal(
        constraint=short.constraint,
        profile=profile.name,
        node=node.name,
        needed=count,
        total=short.total,
        free=short.free,
        holders=bounded_holders(holders.items()),
        gpu_class=short.cards.gpu_class or None,
        detail=clip(detail),
    )


def _memory(node: NodeInventory, profile: Profile) -> Refusal | None:
    """Whether the memory the profile declares can still be promised here."""
    needed, total, free = profile.memory_bytes, node.memory_total_bytes, node.free_bytes
    if needed is None or total is None or free is None:
        return None
    if needed > total:
        return Refusal(
            constraint=Constraint.MEMORY_TOTAL, profile=profile.name, node=node.name, needed=needed, total=total
        )
    if node.unaccounted:
        return _refusal(node, profile, Constraint.UNACCOUNTED, ", ".join(node.unaccounted[:HOLDERS_MAX]))
    if needed <= free:
        return None
    holders = [(each.replica, each.claim.memory_bytes or 0) for each in node.holdings]
    running = sorted(each.replica for each in node.unclaimed)
    said = f"{format_bytes(node.unclaimed_bytes)} used without a claim by {', '.join(running)}" if running else ""
    return Refusal(
        constraint=Constraint.MEMORY,
        profile=profile.name,
        node=node.name,
        needed=needed,
        total=total,
        free=max(0, free),
        holders=bounded_holders((name, size) for name, size in holders if size > 0),
        detail=clip(said),
    )


# --- amounts that rank a node ---------------------------------------------------------------------------------------


def free_bytes(node: NodeInventory) -> float:
    """Memory that may still be promised: none where more is promised than there is, infinity where it is not known."""
    total, free = node.memory_total_bytes, node.free_bytes
    return math.inf if total is None or free is None else max(0, min(total, free))


def claimed_gpus(node: NodeInventory) -> int:
    """How many of a node's GPUs somebody holds."""
    return sum(1 for slot in node.gpus or () if slot.holder)


def claimed_bytes(node: NodeInventory) -> int:
    """How much of a node's memory is promised, or used without a claim."""
    return node.claimed_bytes + node.unclaimed_bytes


def rate_gbps(node: NodeInventory, fabric: str | None) -> float:
    """The rate at which a node is on a fabric; zero, so worst, where it is not known."""
    fabrics = () if node.facts is None else node.facts.fabrics
    return max((each.rate_gbps or 0.0 for each in fabrics if each.name == fabric), default=0.0)
