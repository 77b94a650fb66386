"""Where a replica can go: filters, order and the explanation of both. Pure; reads an inventory, writes nothing.

Counted while deciding: every candidate that is not taken leaves a `Refusal` with the numbers it was judged by. A
profile's needs are declared, not measured; a profile that declares no memory fits anywhere and claims nothing.

Invariant: no placement promises more memory than a node is known to have, and none uses a node whose records can't be
read. Weights are a preference, never a filter.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import cast

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
    profile: str
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
        each = {(refusal.constraint, refusal.node): refusal for refusal in self.refusals}
        return Unplaced(
            revision=revision,
            nodes=len({node for _, node in each if node}),
            refused=counted(each.values()),
            nearest=nearest(self.refusals),
        )


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
        sieve = sift(inventory, profile)
        if not sieve.builds:
            refusals += sieve.refusals.values()
            continue
        ranked = heapq.nsmallest(2, (_rank(sieve.nodes[name], spec, failed) for name in sieve.builds))
        scores = [_score(sieve.nodes[each[-1]], spec, failed) for each in ranked]
        receipt = Receipt(
            revision=inventory.index.revision,
            profile=profile.name,
            winner=(scores[0],),
            runner_up=scores[1] if len(scores) > 1 else None,
            refused=counted(refusals) if not sieve.refusals else counted([*refusals, *sieve.refusals.values()]),
            nearest=nearest([*nearest(refusals), *sieve.nearest()]),
        )
        best = scores[0].node
        shard = ReplicaShard(rank=0, node=best, claim=Claim(memory_bytes=profile.memory_bytes))
        return Placement(profile=profile, shards=(shard,), build=sieve.builds[best], fabric=None, receipt=receipt)
    return Rejection(refusals=tuple(refusals))


def explain(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> list[Fit | Refusal]:
    """Everything placement would weigh for one more replica now: each profile by priority, in it each node by name."""
    if not spec.profiles:
        return [Refusal(constraint=Constraint.NO_PROFILES, profile="")]
    found: list[Fit | Refusal] = []
    for profile in by_priority(spec):
        sieve = sift(inventory, profile)
        found += (refusal for name, refusal in sieve.refusals.items() if not name)
        for name in inventory.names if sieve.nodes else ():
            if (refusal := sieve.refusals.get(name)) is not None:
                found.append(refusal)
            else:
                score = _score(sieve.nodes[name], spec, failed)
                found.append(Fit(node=name, profile=profile.name, build=sieve.builds[name], score=score))
    return found


@dataclass
class Sieve:
    """Every node judged for one shard of a profile, whatever the model.

    `builds`: node that fits -> the build it would run (None: it can't say). `refusals`: node that does not -> why; the
    name is empty where the profile as a whole is refused. `nodes`: what each was judged by.
    """

    nodes: dict[str, NodeInventory] = field(default_factory=dict)
    builds: dict[str, str | None] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    _nearest: tuple[Refusal, ...] | None = None

    def nearest(self) -> tuple[Refusal, ...]:
        """The nearest misses among the refusals."""
        if self._nearest is None:
            self._nearest = nearest(self.refusals.values())
        return self._nearest

    def judge(self, node: NodeInventory, profile: Profile, wish: EngineSpec | None) -> None:
        """Judge one node, or judge it anew because it changed."""
        self.nodes[node.name] = node
        verdict = _judge(node, profile, wish)
        if isinstance(verdict, Refusal):
            self.builds.pop(node.name, None)
            self.refusals[node.name] = verdict
            self._nearest = None
        else:
            self.builds[node.name] = None if verdict is None else verdict.id
            if self.refusals.pop(node.name, None) is not None:
                self._nearest = None


def sift(inventory: Inventory, profile: Profile) -> Sieve:
    """All nodes judged for `profile`. Kept with the inventory: only nodes that changed since are judged again."""
    whole = _whole(inventory, profile)
    if whole is not None:
        return Sieve(refusals={"": whole})
    key = (profile.name, profile.engine, profile.memory_bytes, tuple(sorted(profile.node_selector.items())))
    sieve = cast("Sieve", inventory.kept.setdefault(key, Sieve()))
    wish, nodes = inventory.wish(profile.engine), sieve.nodes
    for node in inventory.nodes():
        if nodes.get(node.name) is not node:
            sieve.judge(node, profile, wish)
    return sieve


def _whole(inventory: Inventory, profile: Profile) -> Refusal | None:
    """Why no node at all can take the profile."""

    def refuse(constraint: Constraint, detail: str = "") -> Refusal:
        return Refusal(constraint=constraint, profile=profile.name, detail=detail)

    if profile.nodes > 1 or profile.gpus_per_node > 0:
        what = "several nodes" if profile.nodes > 1 else "GPUs"
        return refuse(Constraint.UNSUPPORTED, f"asks for {what}, which this version does not place")
    if inventory.wish_corrupt(profile.engine):
        return refuse(Constraint.RECORD_CORRUPT, f"the wished version of {profile.engine} can't be read")
    return refuse(Constraint.NO_NODES) if not inventory.names else None


def _judge(node: NodeInventory, profile: Profile, wish: EngineSpec | None) -> Build | Refusal | None:
    """The filters in their order: why the node can't take a shard, or the build it would run."""
    refusal = _standing(node, profile)
    if refusal is not None:
        return refusal
    build = _build(node, profile, wish)
    return build if isinstance(build, Refusal) else _memory(node, profile) or build


def _rank(node: NodeInventory, spec: ModelSpec, failed: frozenset[str]) -> tuple[bool, bool, int, bool, float, str]:
    """A node's score as a sort key: smaller is better, unknown room comes last."""
    free = node.free_bytes
    return (
        node.name in failed,
        node.weights is None or spec.source not in node.weights,
        node.live_replicas.get(spec.name, 0),
        not node.holdings and not node.unclaimed,
        math.inf if free is None else free,
        node.name,
    )


def _score(node: NodeInventory, spec: ModelSpec, failed: frozenset[str]) -> Score:
    """The same for people to read."""
    lately, missing, replicas, empty, _, name = _rank(node, spec, failed)
    return Score(
        failed_lately=lately,
        weights_missing=missing,
        replicas_of_model=replicas,
        node_empty=empty,
        free_bytes=node.free_bytes,
        node=name,
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
    """The engine build this node would run the profile with. None: an agent too old to say, so anything may be.

    Among equals it is the node's first: it lists what its agent.yaml names before what it found.
    """
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
        return min(builds, key=lambda build: not build.named)
    wished = [build for build in builds if satisfies(build, wish)]
    if not wished:
        has = ", ".join(sorted(build.version for build in builds))
        return refuse(Constraint.ENGINE_VERSION, said or f"has {profile.engine} {has}, needs {wish.version}")
    return min(wished, key=lambda build: build.version != wish.version)


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
