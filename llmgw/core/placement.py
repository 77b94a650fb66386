"""Where a replica can go: the order among the nodes that could take it, and the explanation of both. Pure.

Reads an inventory, writes nothing. What a node could give is judged by `llmgw.core.candidates`; here pools are made of
what they offer, and a replica is drawn from one pool: one fabric, one class of GPUs, one build for a gang.

Invariants: no placement promises more memory than a node is known to have or a GPU that is not free, and none uses a
node whose records can't be read; a gang's members are picked with one pool in sight, so that nothing could combine two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from llmgw.core.candidates import (
    Admission,
    Pool,
    claimed_bytes,
    claimed_gpus,
    free_bytes,
    judge,
    lonely,
    rate_gbps,
)
from llmgw.core.cards import fits
from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.explain import Constraint, Receipt, Refusal, Score, Unplaced, counted, most, nearest
from llmgw.core.gang_ports import meet
from llmgw.core.gpu import choose
from llmgw.core.inventory import Inventory, NodeInventory
from llmgw.core.prospect import Leaning, Prospect
from llmgw.core.replica import Claim, GpuClaim, ReplicaShard
from llmgw.core.sieve import ledger_of
from llmgw.errors import InvariantError


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


# --- the order ------------------------------------------------------------------------------------------------------


class Seeker(msgspec.Struct, frozen=True, kw_only=True):
    """The model that one more replica is placed for, as far as it ranks nodes. `failed`: where it failed lately."""

    model: str
    source: str
    failed: frozenset[str]


Rank = tuple[object, ...]
"""A sort key, smaller is better, with the node's name in it, so that no two are equal: last of a gang's member."""


def score(node: NodeInventory, pool: Pool, *, found: Admission, seeker: Seeker) -> Score:
    """Why a node ranks where it does, for people to read."""
    gang, room = pool.fabric is not None, free_bytes(node)
    return Score(
        failed_lately=node.name in seeker.failed,
        weights_missing=node.weights is None or seeker.source not in node.weights,
        replicas_of_model=node.live_replicas.get(seeker.model, 0),
        node_empty=not node.holdings and not node.unclaimed,
        free_bytes=None if math.isinf(room) else int(room),
        node=node.name,
        gpu_class=pool.gpu_class,
        free_gpus=next((cards.free for cards in found.cards if cards.gpu_class == pool.gpu_class), None),
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
    parts = (score.failed_lately, score.weights_missing, score.replicas_of_model, *tightness)
    return (*parts, score.node, score.gpu_class or "")


def quality(pool: Pool, members: Sequence[Rank], *, preference: int, rate_gbps: float) -> Rank:
    """What makes one gang better than another: its worst member, then the next; the better build, the faster fabric.

    Args:
        pool: what it is drawn from.
        members: their ranks, best first.
        preference: how far from the best build of each member its build is.
        rate_gbps: the slowest member's.
    """
    worst_first = [each[:-1] for each in reversed(members)]  # without the name, which says nothing of how good it is
    return (worst_first, preference, -rate_gbps, pool)


# --- the choice -----------------------------------------------------------------------------------------------------


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool gives: nodes, best first; and the best node not taken, with the pool it would be taken from."""

    pool: Pool
    nodes: tuple[str, ...]
    runner_up: tuple[Pool, str] | None


def place(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> Placement | Rejection:
    """The best place for one more replica of `spec`: its profiles by priority, the first that fits.

    Args:
        inventory: everything as it stands, the claims of earlier placements of the same pass included.
        spec: the model.
        failed: nodes where this model failed lately; they come last.
    """
    ledger = ledger_of(inventory.index)
    seeker = Seeker(model=spec.name, source=spec.source, failed=failed)
    leaning = Leaning(failed, ledger.holders.get(spec.source, frozenset()), ledger.replicas.get(spec.name, {}))
    counts: dict[tuple[str, Constraint], int] = {}
    near: list[Refusal] = []
    if not spec.profiles:
        return rejected([Refusal(constraint=Constraint.NO_PROFILES, profile="")])
    for profile in spec.by_priority:
        whole = _whole(inventory, profile, nodes=len(ledger.nodes))
        if whole is not None:
            counts[profile.name, whole.constraint] = 1
            near.append(whole)
            continue
        wish = inventory.wish(profile.engine)
        prospect = Prospect(ledger.sieve(profile, wish), profile)
        counts |= {(profile.name, constraint): count for constraint, count in prospect.counts.items()}
        near += prospect.refusals(inventory.node)
        drawn = _draw_one(prospect, leaning) if profile.nodes == 1 else _draw_gang(inventory, prospect, leaning)
        if drawn is not None:
            return _placement(inventory, profile, drawn, seeker, refused=most(counts), near=near)
    judged = len(ledger.nodes) if any(refusal.node for refusal in near) else 0
    return Rejection(refused=most(counts), nearest=nearest(near), nodes=judged)


def _draw_one(prospect: Prospect, leaning: Leaning) -> Draw | None:
    ways = [(Pool(None, gpu_class, None), node) for node, gpu_class in prospect.best(leaning, 2)]
    if not ways:
        return None
    pool, node = ways[0]
    return Draw(pool=pool, nodes=(node,), runner_up=ways[1] if len(ways) > 1 else None)


def _draw_gang(inventory: Inventory, prospect: Prospect, leaning: Leaning) -> Draw | None:
    """The best gang that any one pool gives."""
    drawn = {pool: prospect.gang(pool, leaning) for pool in prospect.pools}
    if not drawn:
        return None

    def goodness(pool: Pool) -> Rank:
        members, _ = drawn[pool]
        rate = min(rate_gbps(inventory.node(each.node), pool.fabric) for each in members)
        return quality(pool, members, preference=prospect.preference(pool, members), rate_gbps=rate)

    worst = {pool: [each[:-1] for each in reversed(members)] for pool, (members, _) in drawn.items()}
    least = min(worst.values())
    best = min((pool for pool in drawn if worst[pool] == least), key=goodness)  # most are out before they are looked at
    nodes = tuple(each.node for each in drawn[best][0])
    others = [(each, pool) for pool, ways in drawn.items() for way in ways for each in way if each.node not in nodes]
    other = min(others, default=None)
    return Draw(pool=best, nodes=nodes, runner_up=None if other is None else (other[1], other[0].node))


def _placement(
    inventory: Inventory,
    profile: Profile,
    drawn: Draw,
    seeker: Seeker,
    *,
    refused: dict[str, int],
    near: list[Refusal],
) -> Placement:
    """What is drawn, as what is claimed and told. Each node is judged once more, by itself.

    Raises:
        InvariantError: one of them would be refused, so what was kept of it was not what it is.
    """
    shards: list[ReplicaShard] = []
    scores: list[Score] = []
    builds: list[str | None] = []
    ways = [(drawn.pool, name) for name in drawn.nodes]
    for pool, name in ways if drawn.runner_up is None else [*ways, drawn.runner_up]:
        node = inventory.node(name)
        found = judge(node, profile, wish=inventory.wish(profile.engine))
        if isinstance(found, Refusal) or pool not in found.pools(profile):
            raise InvariantError(1, f"{name} was to take a shard of {profile.name}, for which it has no room")
        scores.append(score(node, pool, found=found, seeker=seeker))
        builds.append(pool.build or found.builds[0])
        if len(shards) < profile.nodes:
            shards.append(shard_of(node, profile, pool, rank=len(shards)))
    receipt = Receipt(
        revision=inventory.index.revision,
        profile=profile.name,
        winner=tuple(scores[: profile.nodes]),
        runner_up=scores[-1] if len(scores) > profile.nodes else None,
        refused=refused,
        nearest=nearest(near),
    )
    fabric = drawn.pool.fabric
    return Placement(profile=profile, shards=tuple(shards), build=builds[0], fabric=fabric, receipt=receipt)


def shard_of(node: NodeInventory, profile: Profile, pool: Pool, *, rank: int) -> ReplicaShard:
    """What one shard holds: of the pool's class its GPUs, of the pool's fabric its HCAs, and the declared memory.

    Raises:
        InvariantError: the node has not enough free GPUs of the class.
    """
    alike = (slot for slot in node.gpus or () if slot.taken is None and slot.gpu_class == pool.gpu_class)
    gpus = choose([slot for slot in alike if fits(slot, profile)], profile.gpus_per_node)
    if gpus is None:
        raise InvariantError(1, f"{node.name} was to give {profile.gpus_per_node} free {pool.gpu_class}")
    fabrics = () if node.facts is None else node.facts.fabrics
    claim = Claim(
        memory_bytes=profile.memory_bytes,
        gpus=tuple(GpuClaim(uuid=slot.uuid) for slot in gpus),
        hcas=tuple(hca for fabric in fabrics if fabric.name == pool.fabric for hca in fabric.hcas),
    )
    return ReplicaShard(rank=rank, node=node.name, claim=claim)


def _whole(inventory: Inventory, profile: Profile, *, nodes: int) -> Refusal | None:
    """Why no node at all can take the profile."""
    if inventory.wish_corrupt(profile.engine):
        said = f"the wished version of {profile.engine} can't be read"
        return Refusal(constraint=Constraint.RECORD_CORRUPT, profile=profile.name, detail=said)
    return None if nodes else Refusal(constraint=Constraint.NO_NODES, profile=profile.name)


# --- the explanation, node by node ----------------------------------------------------------------------------------


def explain(inventory: Inventory, spec: ModelSpec, *, failed: frozenset[str] = frozenset()) -> list[Fit | Refusal]:
    """Everything placement would weigh for one more replica now: each profile by priority, in it each node by name."""
    if not spec.profiles:
        return [Refusal(constraint=Constraint.NO_PROFILES, profile="")]
    seeker = Seeker(model=spec.name, source=spec.source, failed=failed)
    said: list[Fit | Refusal] = []
    for profile in spec.by_priority:
        found = survey(inventory, profile)
        for name, each in found.judged.items():
            if isinstance(each, Refusal):
                said.append(each)
            else:
                said.append(_fit(inventory.node(name), profile, each, found.pools, seeker))
    return said


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Every node by name, judged for one shard of a profile; or, without a name, why no node at all can take it.

    `pools`: those a replica can be drawn from, and how many nodes offer themselves to each.
    """

    judged: dict[str, Admission | Refusal]
    pools: dict[Pool, int]


def survey(inventory: Inventory, profile: Profile) -> Survey:
    """Judge every node for one shard of a profile, one after the other."""
    whole = _whole(inventory, profile, nodes=len(inventory.names))
    if whole is not None:
        return Survey(judged={"": whole}, pools={})
    wish = inventory.wish(profile.engine)
    judged = {node.name: judge(node, profile, wish=wish) for node in inventory.nodes()}
    offers = {name: each.pools(profile) for name, each in judged.items() if isinstance(each, Admission)}
    members: dict[Pool, list[int]] = {}
    for name, pools in offers.items():
        for pool in pools:
            members.setdefault(pool, []).append(inventory.node(name).gang_starts)
    sizes = {pool: len(ports) for pool, ports in members.items()}
    if profile.nodes > 1:
        sizes_of_gangs = {pool: sizes[pool] for pool, ports in members.items() if meet(ports, profile.nodes)}
        judged |= {
            name: lonely(inventory.node(name), profile, pools=pools, sizes=sizes)
            for name, pools in offers.items()
            if sizes_of_gangs.keys().isdisjoint(pools)
        }
        sizes = sizes_of_gangs
    return Survey(judged=judged, pools=sizes)


def _fit(node: NodeInventory, profile: Profile, found: Admission, sizes: Mapping[Pool, int], seeker: Seeker) -> Fit:
    """The best of the ways in which a node would be taken: by its score, then from the largest pool."""
    pools = [pool for pool in found.pools(profile) if pool in sizes]
    scores = {pool: score(node, pool, found=found, seeker=seeker) for pool in pools}
    best = min(pools, key=lambda pool: (rank(scores[pool]), -sizes[pool], pool))
    build = best.build or found.builds[0]
    return Fit(node=node.name, profile=profile.name, build=build, score=scores[best], fabric=best.fabric)
