"""Where a replica can go: the order among the nodes that could take it, and the explanation of both. Pure.

Reads an inventory, writes nothing. What a node could give is judged by `llmgw.core.candidates`; here pools are made of
what they offer, and a replica is drawn from one pool: one fabric, one class of GPUs, one build for a gang.

Invariants: no placement promises more memory than a node is known to have or a GPU that is not free, and none uses a
node whose records can't be read; `draw` sees one pool, so that nothing could combine two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from llmgw.core.candidates import (
    Admission,
    Pool,
    claimed_bytes,
    claimed_gpus,
    fits,
    judge,
    lonely,
    rate_gbps,
    satisfies,
)
from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.explain import Constraint, Receipt, Refusal, Score, Unplaced, counted, nearest
from llmgw.core.gpu import choose
from llmgw.core.inventory import Inventory, NodeInventory
from llmgw.core.replica import Claim, GpuClaim, ReplicaShard
from llmgw.errors import InvariantError

__all__ = ["Fit", "Placement", "Rejection", "by_priority", "explain", "place", "satisfies"]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can take one shard of a profile, and the best pool it could do so in.

    `build` None: the node can't say which it has.
    """

    node: str
    profile: str
    build: str | None
    score: Score
    fabric: str | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one replica goes, with what it will hold there, and why there. `shards` and the scores are by rank."""

    profile: Profile
    shards: tuple[ReplicaShard, ...]
    build: str | None
    fabric: str | None
    receipt: Receipt


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """Why one replica can go nowhere, as far as it is stored; the whole list of refusals is `explain`'s.

    `refused`, `nearest`: as in `Unplaced`. `nodes`: how many were judged.
    """

    refused: dict[str, int]
    nearest: tuple[Refusal, ...]
    nodes: int = 0

    def unplaced(self, revision: int) -> Unplaced:
        """The form that is stored."""
        return Unplaced(revision=revision, nodes=self.nodes, refused=self.refused, nearest=self.nearest)


def rejected(refusals: Iterable[Refusal]) -> Rejection:
    """A rejection for these reasons."""
    given = list(refusals)
    nodes = {refusal.node for refusal in given if refusal.node}
    return Rejection(refused=counted(given), nearest=nearest(given), nodes=len(nodes))


def by_priority(spec: ModelSpec) -> list[Profile]:
    """A model's profiles in the order they are tried: priority, then as written."""
    return sorted(spec.profiles, key=lambda profile: -profile.priority)


# --- the order ------------------------------------------------------------------------------------------------------


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks a node for one more replica of a model, besides what the node is. `failed`: where it failed lately."""

    model: str
    source: str
    failed: frozenset[str]


Rank = tuple[object, ...]
"""A sort key, smaller is better; the last part is the node's name, so that no two are equal."""


def score(node: NodeInventory, pool: Pool, found: Admission, standing: Standing) -> Score:
    """Why a node ranks where it does, for people to read."""
    free = next((cards.free for cards in found.cards if cards.gpu_class == pool.gpu_class), None)
    gang = pool.fabric is not None
    return Score(
        failed_lately=node.name in standing.failed,
        weights_missing=node.weights is None or standing.source not in node.weights,
        replicas_of_model=node.live_replicas.get(standing.model, 0),
        node_empty=not node.holdings and not node.unclaimed,
        free_bytes=node.free_bytes,
        node=node.name,
        gpu_class=pool.gpu_class,
        free_gpus=free,
        claimed_gpus=claimed_gpus(node) if gang else None,
        claimed_bytes=claimed_bytes(node) if gang else None,
    )


def rank(score: Score) -> Rank:
    """A score as a sort key: one order for replicas on one node, another for members of a gang.

    On one node: weights here first, then partly used machines so that whole ones stay free, then the fullest that fits.
    A gang: the emptiest machines, then weights. Where the model failed lately comes last in both.
    """
    if score.claimed_gpus is not None:
        amounts = (score.claimed_gpus, score.claimed_bytes or 0)
        return (score.failed_lately, *amounts, score.replicas_of_model, score.weights_missing, score.node)
    room = math.inf if score.free_bytes is None else score.free_bytes
    tightness = (score.node_empty, score.free_gpus or 0, room)
    return (score.failed_lately, score.weights_missing, score.replicas_of_model, *tightness, score.node)


def quality(pool: Pool, members: Sequence[tuple[Score, NodeInventory, Admission]]) -> Rank:
    """What makes one gang better than another: its worst member, then the next; the better build, the faster fabric."""
    ranks = [rank(each)[:-1] for each, _, _ in members]
    preference = sum(found.builds.index(pool.build) for _, _, found in members)
    rate = min(rate_gbps(node, pool.fabric) for _, node, _ in members)
    return (ranks[::-1], preference, -rate, pool)


# --- the choice -----------------------------------------------------------------------------------------------------


def place(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> Placement | Rejection:
    """The best place for one more replica of `spec`: its profiles by priority, the first that fits.

    Args:
        inventory: everything as it stands, the claims of earlier placements of the same pass included.
        spec: the model.
        failed: nodes where this model failed lately; they come last.
    """
    standing = Standing(model=spec.name, source=spec.source, failed=failed)
    refused: list[Refusal] = []
    if not spec.profiles:
        refused.append(Refusal(constraint=Constraint.NO_PROFILES, profile=""))
    for profile in by_priority(spec):
        found = survey(inventory, profile)
        refused += (each for each in found.values() if isinstance(each, Refusal))
        pools = pools_of(inventory, profile, found, standing)
        if not pools:
            continue
        drawn = [(pool, sorted(of, key=lambda each: rank(each[0]))) for pool, of in pools.items()]
        if profile.nodes == 1:
            pool, best = min(drawn, key=lambda each: (rank(each[1][0][0]), each[0][1] or ""))
        else:
            pool, best = min(drawn, key=lambda each: quality(each[0], each[1][: profile.nodes]))
        taken, others = best[: profile.nodes], list(best[profile.nodes :])
        others += [of[0] for other, of in drawn if other != pool]
        receipt = Receipt(
            revision=inventory.index.revision,
            profile=profile.name,
            winner=tuple(each for each, _, _ in taken),
            runner_up=min((each for each, _, _ in others), key=rank, default=None),
            refused=counted(refused),
            nearest=nearest(refused),
        )
        shards = tuple(shard_of(node, profile, pool, rank=i) for i, (_, node, _) in enumerate(taken))
        build = pool.build if profile.nodes > 1 else taken[0][2].builds[0]
        return Placement(profile=profile, shards=shards, build=build, fabric=pool.fabric, receipt=receipt)
    return rejected(refused)


def survey(inventory: Inventory, profile: Profile) -> dict[str, Admission | Refusal]:
    """Every node judged for one shard of a profile; or, under an empty name, why no node at all can take it."""
    whole = _whole(inventory, profile)
    if whole is not None:
        return {"": whole}
    wish = inventory.wish(profile.engine)
    found = {node.name: judge(node, profile, wish) for node in inventory.nodes()}
    if profile.nodes > 1:
        offers = {name: each.pools(profile) for name, each in found.items() if isinstance(each, Admission)}
        sizes = Counter(pool for pools in offers.values() for pool in pools)
        for name, pools in offers.items():
            if all(sizes[pool] < profile.nodes for pool in pools):
                found[name] = lonely(name, profile, pools, sizes)
    return found


def pools_of(
    inventory: Inventory, profile: Profile, found: Mapping[str, Admission | Refusal], standing: Standing
) -> dict[Pool, list[tuple[Score, NodeInventory, Admission]]]:
    pools: dict[Pool, list[tuple[Score, NodeInventory, Admission]]] = {}
    for name, each in found.items():
        if isinstance(each, Admission):
            node = inventory.node(name)
            for pool in each.pools(profile):
                pools.setdefault(pool, []).append((score(node, pool, each, standing), node, each))
    return {pool: members for pool, members in pools.items() if len(members) >= profile.nodes}


def _whole(inventory: Inventory, profile: Profile) -> Refusal | None:
    """Why no node at all can take the profile."""
    if inventory.wish_corrupt(profile.engine):
        said = f"the wished version of {profile.engine} can't be read"
        return Refusal(constraint=Constraint.RECORD_CORRUPT, profile=profile.name, detail=said)
    return Refusal(constraint=Constraint.NO_NODES, profile=profile.name) if not inventory.names else None


def explain(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> list[Fit | Refusal]:
    """Everything placement would weigh for one more replica now: each profile by priority, in it each node by name."""
    if not spec.profiles:
        return [Refusal(constraint=Constraint.NO_PROFILES, profile="")]
    standing = Standing(model=spec.name, source=spec.source, failed=failed)
    said: list[Fit | Refusal] = []
    for profile in by_priority(spec):
        found = survey(inventory, profile)
        pools = pools_of(inventory, profile, found, standing)
        for name, each in sorted(found.items()):
            if isinstance(each, Refusal):
                said.append(each)
                continue
            mine = [(pool, s) for pool, of in pools.items() for s, node, _ in of if node.name == name]
            pool, best = min(mine, key=lambda one: (rank(one[1]), -len(pools[one[0]]), one[0]))
            build = pool.build if profile.nodes > 1 else each.builds[0]
            said.append(Fit(node=name, profile=profile.name, build=build, score=best, fabric=pool.fabric))
    return said


def shard_of(node: NodeInventory, profile: Profile, pool: Pool, *, rank: int) -> ReplicaShard:
    """What one shard holds: of the pool's class its GPUs, of the pool's fabric its HCAs, and the declared memory.

    Raises:
        InvariantError: the node has not enough free GPUs of the class, though it was judged to have them.
    """
    free = [
        slot
        for slot in node.gpus or ()
        if slot.taken is None and slot.gpu_class == pool.gpu_class and fits(slot, profile)
    ]
    gpus = choose(free, profile.gpus_per_node) if profile.gpus_per_node else ()
    if gpus is None:
        raise InvariantError(1, f"{node.name} was taken to have {profile.gpus_per_node} free {pool.gpu_class}")
    fabrics = () if node.facts is None else node.facts.fabrics
    claim = Claim(
        memory_bytes=profile.memory_bytes,
        gpus=tuple(GpuClaim(uuid=slot.uuid) for slot in gpus),
        hcas=tuple(hca for fabric in fabrics if fabric.name == pool.fabric for hca in fabric.hcas),
    )
    return ReplicaShard(rank=rank, node=node.name, claim=claim)
