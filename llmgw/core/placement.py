"""Where a replica can go: filters, order and the explanation of both. Pure; reads an inventory, writes nothing.

Counted while deciding: every candidate that is not taken leaves a `Refusal` with the numbers it was judged by. A
profile's needs are declared, not measured; a profile that declares no memory fits anywhere and claims nothing.

Invariant: no placement promises more memory than a node is known to have, and none uses a node whose records can't be
read. Weights are a preference, never a filter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from llmgw.core.catalog import EngineSpec, ModelSpec, Profile
from llmgw.core.explain import (
    HOLDERS_MAX,
    Constraint,
    Receipt,
    Refusal,
    Score,
    Unplaced,
    bounded_holders,
    clip,
    counted,
    nearest,
)
from llmgw.core.inventory import Inventory, NodeInventory
from llmgw.core.node import Build, Liveness
from llmgw.core.replica import SHARDS_PER_NODE_MAX, Claim, ReplicaShard
from llmgw.core.units import format_bytes


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can take one shard of a profile. `build` None: the node can't say which it has."""

    node: str
    build: str | None
    score: Score


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one replica goes, with what it will hold there, and why there."""

    profile: Profile
    shards: tuple[ReplicaShard, ...]
    build: str | None
    fabric: str | None
    receipt: Receipt


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """Why one replica can go nowhere: for each profile one refusal per node, or one of the profile as a whole."""

    refusals: tuple[Refusal, ...]

    def unplaced(self, revision: int) -> Unplaced:
        """The bounded form that is stored."""
        return Unplaced(revision=revision, refused=counted(self.refusals), nearest=nearest(self.refusals))


def by_priority(spec: ModelSpec) -> list[Profile]:
    """A model's profiles in the order they are tried: priority, then as written."""
    return sorted(spec.profiles, key=lambda profile: -profile.priority)


def place(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> Placement | Rejection:
    """The best place for one more replica of `spec`: its profiles by priority, the first that fits.

    Args:
        inventory: everything as it stands, the claims of earlier placements of the same pass included.
        spec: the model.
        failed: nodes where this model failed lately; they come last.
    """
    refusals: list[Refusal] = []
    if not spec.profiles:
        refusals.append(Refusal(constraint=Constraint.NO_PROFILES, profile=""))
    for profile in by_priority(spec):
        fits: list[Fit] = []
        for verdict in judge(inventory, spec, profile, failed=failed):
            match verdict:
                case Fit():
                    fits.append(verdict)
                case Refusal():
                    refusals.append(verdict)
        if fits:
            return _placement(inventory, profile, fits, refusals)
    return Rejection(refusals=tuple(refusals))


def judge(
    inventory: Inventory, spec: ModelSpec, profile: Profile, *, failed: frozenset[str] = frozenset()
) -> Iterator[Fit | Refusal]:
    """What becomes of every node as a candidate for one shard of `profile`, by name: the whole explanation."""
    if profile.nodes > 1 or profile.gpus_per_node > 0:
        what = "several nodes" if profile.nodes > 1 else "GPUs"
        why = f"asks for {what}, which this version does not place"
        yield Refusal(constraint=Constraint.UNSUPPORTED, profile=profile.name, detail=why)
        return
    if inventory.wish_corrupt(profile.engine):
        why = f"the wished version of {profile.engine} can't be read"
        yield Refusal(constraint=Constraint.RECORD_CORRUPT, profile=profile.name, detail=why)
        return
    if not inventory.names:
        yield Refusal(constraint=Constraint.NO_NODES, profile=profile.name)
        return
    wish = inventory.wish(profile.engine)
    for node in inventory.nodes():
        yield _judge(node, spec, profile, wish, failed)


def _judge(
    node: NodeInventory, spec: ModelSpec, profile: Profile, wish: EngineSpec | None, failed: frozenset[str]
) -> Fit | Refusal:
    refusal = _standing(node, profile)
    if refusal is not None:
        return refusal
    build = _build(node, profile, wish)
    if isinstance(build, Refusal):
        return build
    refusal = _memory(node, profile)
    if refusal is not None:
        return refusal
    return Fit(node=node.name, build=None if build is None else build.id, score=_score(node, spec, failed))


def _placement(inventory: Inventory, profile: Profile, fits: list[Fit], refusals: list[Refusal]) -> Placement:
    ranked = sorted(fits, key=lambda fit: rank(fit.score))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    receipt = Receipt(
        revision=inventory.index.revision,
        profile=profile.name,
        winner=(best.score,),
        runner_up=None if second is None else second.score,
        refused=counted(refusals),
        nearest=nearest(refusals),
    )
    shard = ReplicaShard(rank=0, node=best.node, claim=Claim(memory_bytes=profile.memory_bytes))
    return Placement(profile=profile, shards=(shard,), build=best.build, fabric=None, receipt=receipt)


def rank(score: Score) -> tuple[bool, bool, int, bool, float, str]:
    """A score as a sort key: smaller is better, unknown room comes last."""
    free = math.inf if score.free_bytes is None else score.free_bytes
    return (
        score.failed_lately,
        score.weights_missing,
        score.replicas_of_model,
        score.node_empty,
        free,
        score.node,
    )


def _score(node: NodeInventory, spec: ModelSpec, failed: frozenset[str]) -> Score:
    return Score(
        failed_lately=node.name in failed,
        weights_missing=node.weights is None or spec.source not in node.weights,
        replicas_of_model=node.replicas_of(spec.name),
        node_empty=not node.holdings and not node.unclaimed,
        free_bytes=node.free_bytes,
        node=node.name,
    )


def _standing(node: NodeInventory, profile: Profile) -> Refusal | None:
    """Whether the node may take anything at all, whatever it has."""

    def refuse(constraint: Constraint, detail: str) -> Refusal:
        return Refusal(constraint=constraint, profile=profile.name, node=node.name, detail=clip(detail))

    if node.corrupt:
        return refuse(Constraint.RECORD_CORRUPT, f"a record can't be read: {node.corrupt[0]}")
    if node.liveness is not Liveness.READY or not node.present or node.facts is None:
        known = "not known to be ready yet" if node.liveness is None else node.liveness.value
        return refuse(Constraint.NOT_READY, known if node.liveness is not Liveness.READY else "without its facts yet")
    if node.cordon:
        return refuse(Constraint.CORDONED, "is being drained" if node.drain else "is cordoned")
    for key, wanted in sorted(profile.node_selector.items()):
        has = node.labels.get(key)
        if has != wanted:
            said = f"has the label {key}={has}" if has is not None else f"has no label {key}"
            return refuse(Constraint.SELECTOR, f"{said}, needs {key}={wanted}")
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


def _build(node: NodeInventory, profile: Profile, wish: EngineSpec | None) -> Build | Refusal | None:
    """The engine build this node would run the profile with. None: an agent too old to say, so anything may be."""
    engines = None if node.facts is None else node.facts.engines
    if engines is None:
        return None

    def refuse(constraint: Constraint, detail: str) -> Refusal:
        return Refusal(constraint=constraint, profile=profile.name, node=node.name, detail=clip(detail))

    said = engines.notes.get(profile.engine, "")
    if not engines.probed:
        return refuse(Constraint.ENGINE_UNCHECKED, said)
    builds = [build for build in engines.builds if build.engine == profile.engine]
    if not builds:
        return refuse(Constraint.ENGINE_MISSING, said or f"has no {profile.engine}")
    if wish is None:
        return min(builds, key=lambda build: (not build.named, build.id))
    wished = [build for build in builds if satisfies(build, wish)]
    if not wished:
        has = ", ".join(sorted(build.version for build in builds))
        return refuse(Constraint.ENGINE_VERSION, said or f"has {profile.engine} {has}, needs {wish.version}")
    return min(wished, key=lambda build: (build.version != wish.version, build.id))


def satisfies(build: Build, wish: EngineSpec) -> bool:
    """Whether a build is what people want: of that version, or named on purpose by whoever runs the node."""
    return build.named or build.version == wish.version


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
        names = ", ".join(node.unaccounted[:HOLDERS_MAX])
        return Refusal(
            constraint=Constraint.UNACCOUNTED, profile=profile.name, node=node.name, needed=needed, detail=clip(names)
        )
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


def explain(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> list[Fit | Refusal]:
    """Everything placement would weigh for one more replica now: each profile by priority, in it each node by name."""
    if not spec.profiles:
        return [Refusal(constraint=Constraint.NO_PROFILES, profile="")]
    return [verdict for profile in by_priority(spec) for verdict in judge(inventory, spec, profile, failed=failed)]
