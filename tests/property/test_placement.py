"""What placement answers from what it kept is what judging and sorting every node afresh would answer.

The reference below is the meaning of placement written down once more, without anything kept and without any order but
`sorted`: slow, and short enough to be seen to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import and_

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from llmgw.core import prospect
from llmgw.core.candidates import Admission, Pool, rate_gbps
from llmgw.core.catalog import ModelSpec, NodeSpec, Profile
from llmgw.core.draft import Draft
from llmgw.core.explain import Refusal, Score, counted, nearest
from llmgw.core.inventory import Inventory
from llmgw.core.node import Liveness, NodeState
from llmgw.core.placement import Placement, Rejection, Seeker, place, quality, rank, score, survey
from llmgw.core.plan import Put
from llmgw.core.record import Record
from llmgw.core.replica import Replica, ReplicaPhase
from llmgw.core.snapshot import Change, Index, Kind, Ref
from llmgw.testing.apply import changes_for, copy_of
from llmgw.testing.clusters import NODES, Scene, build, scenes
from llmgw.testing.machines import Dice, node_records, wish_of

EVENTS = (
    "placed", "placed", "placed", "taken back", "ended", "wish",
    "machine", "gone", "said", "said", "away", "back", "judged", "spoilt",
)  # fmt: skip


# --- the reference --------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """One node taken from one pool."""

    score: Score
    preference: int
    rate_gbps: float
    ports: int


def reference(index: Index, spec: ModelSpec, failed: frozenset[str]) -> dict[str, object]:
    """What `place` should decide and tell."""
    inventory, seeker = Inventory(index), Seeker(model=spec.name, source=spec.source, failed=failed)
    refusals: list[Refusal] = []
    for profile in spec.by_priority:
        judged = survey(inventory, profile).judged
        refusals += [each for each in judged.values() if isinstance(each, Refusal)]
        pools: dict[Pool, list[Way]] = {}
        fitting = {name: each for name, each in judged.items() if isinstance(each, Admission)}
        for name, each in fitting.items():
            for pool in each.pools(profile):
                node = inventory.node(name)
                preference = each.builds.index(pool.build) if pool.build is not None else 0
                made = score(node, pool, found=each, seeker=seeker)
                way = Way(made, preference, rate_gbps(node, pool.fabric), node.gang_starts)
                pools.setdefault(pool, []).append(way)
        drawn = {pool: together(sorted(ways, key=lambda way: rank(way.score)), profile) for pool, ways in pools.items()}
        drawn = {pool: members for pool, members in drawn.items() if members}
        if not drawn:
            continue

        def goodness(pool: Pool, ways: list[Way]) -> tuple[object, ...]:
            return quality(
                pool,
                [rank(way.score) for way in ways],
                preference=sum(way.preference for way in ways),
                rate_gbps=min(way.rate_gbps for way in ways),
            )

        if profile.nodes == 1:
            best = min(drawn, key=lambda pool: rank(drawn[pool][0].score))
        else:
            best = min(drawn, key=lambda pool: goodness(pool, drawn[pool]))
        winner = [way.score for way in drawn[best]]
        taken = {each.node for each in winner}
        others = [
            (rank(way.score), pool, way.score)
            for pool in drawn
            for way in pools[pool]
            if (way.score.node not in taken if profile.nodes > 1 else way.score != winner[0])
        ]
        return {
            "profile": profile.name,
            "winner": winner,
            "runner up": min(others)[2] if others else None,
            "fabric": best.fabric,
            "build": best.build or fitting[winner[0].node].builds[0],
            "refused": counted(refusals),
            "nearest": nearest(refusals),
        }
    return {"refused": counted(refusals), "nearest": nearest(refusals), "nodes": len({r.node for r in refusals} - {""})}


def together(ranked: list[Way], profile: Profile) -> list[Way]:
    """The best that can be taken together: of those with ports in common the ones whose worst member is best."""
    if profile.nodes == 1:
        return ranked[:1]
    able = [
        places
        for places in combinations(range(len(ranked)), profile.nodes)
        if reduce(and_, (ranked[i].ports for i in places))
    ]
    return [ranked[i] for i in min(able, key=lambda places: places[::-1], default=())]


def told(outcome: Placement | Rejection) -> dict[str, object]:
    """The same of an outcome."""
    if isinstance(outcome, Rejection):
        return {"refused": outcome.refused, "nearest": outcome.nearest, "nodes": outcome.nodes}
    receipt = outcome.receipt
    assert [shard.node for shard in outcome.shards] == [each.node for each in receipt.winner]
    return {
        "profile": outcome.profile.name,
        "winner": list(receipt.winner),
        "runner up": receipt.runner_up,
        "fabric": outcome.fabric,
        "build": outcome.build,
        "refused": receipt.refused,
        "nearest": receipt.nearest,
    }


# --- what happens in between ----------------------------------------------------------------------------------------


class World:
    """A cluster's index that lives on, models to place on it, and whatever happens to it."""

    def __init__(self, scene: Scene) -> None:
        self.cluster = build(scene)
        self.index = self.cluster.index
        self.models = [spec for spec in self.index.models.records() if spec.profiles]
        self.made = 0

    def compare(self, failed: frozenset[str]) -> None:
        """Every model, from what is kept and from nothing kept. Raises AssertionError where they differ."""
        fresh = copy_of(self.index)
        for spec in self.models:
            outcome = place(Inventory(self.index), spec, failed=failed)
            assert told(outcome) == reference(fresh, spec, failed)
            event("placed" if isinstance(outcome, Placement) else "refused")
            event(f"{len(outcome.shards)} shards" if isinstance(outcome, Placement) else "none")

    def happen(self, name: str, dice: Dice) -> None:
        """One event."""
        match name:
            case "placed" | "taken back":
                writes = self._placed(dice)
                if name == "placed":
                    self.write(*((write.ref.kind, write.ref.name, write.record) for write in writes))
                    return
                with Draft(self.index) as draft, draft.imagine(*writes):
                    self.compare(frozenset())
            case "ended" if self.index.replicas:
                self.write((Kind.REPLICA, dice.pick(self.index.replicas.names()), None))
            case "wish":
                wish = wish_of(dice)
                self.write((Kind.ENGINE, wish.name, None if dice.one_in(2) else wish))
            case _:
                self._happen_to_a_node(name, dice)

    def _happen_to_a_node(self, name: str, dice: Dice) -> None:
        match name:
            case "machine":
                self.write(*node_records(self.cluster, dice.pick(NODES), dice))
            case "gone":
                kinds, node = (Kind.SESSION, Kind.FACTS, Kind.NODE_STATE), dice.pick(NODES)
                self.write(*((kind, node, None) for kind in kinds))
            case "said":
                node = dice.pick(NODES)
                said = self.index.node_specs.record(node) or NodeSpec(name=node)
                if dice.one_in(2):
                    said = msgspec.structs.replace(said, labels=dice.pick(({"zone": "x"}, {"zone": "y"}, {})))
                else:
                    said = msgspec.structs.replace(said, cordon=not said.cordon)
                self.write((Kind.NODE_SPEC, node, said))
            case "away" if self.index.sessions:
                self.write((Kind.SESSION, dice.pick(self.index.sessions.names()), None))
            case "back" if self.index.facts:
                node = dice.pick(self.index.facts.names())
                session = msgspec.structs.replace(self.cluster.session(node), address="" if dice.one_in(4) else "::1")
                self.write((Kind.SESSION, node, session))
            case "judged" if self.index.facts:
                node = dice.pick(self.index.facts.names())
                liveness = Liveness.RETURNING if dice.one_in(2) else Liveness.READY
                self.write((Kind.NODE_STATE, node, NodeState(name=node, liveness=liveness, since_at=0.0)))
            case "spoilt" if self.index.facts:
                ref, at = Ref(Kind.FACTS, dice.pick(self.index.facts.names())), self.index.revision + 1
                self.index.apply([Change(ref=ref, mod_revision=at, corrupt="not JSON")], revision=at)
            case _:
                pass

    def write(self, *records: tuple[Kind, str, Record | None]) -> None:
        """One revision, by whomever."""
        revision = self.index.revision + 1
        self.index.apply(changes_for(self.index, *records, revision=revision), revision=revision)

    def _placed(self, dice: Dice) -> list[Put]:
        if not self.models:
            return []
        spec = dice.pick(self.models)
        outcome = place(Inventory(self.index), spec)
        if isinstance(outcome, Rejection):
            return []
        self.made += 1
        replica = Replica(
            id=f"r-{self.made}",
            model=spec.name,
            profile=outcome.profile.name,
            engine=outcome.profile.engine,
            launch="",
            phase=ReplicaPhase.PLACED,
            shards=outcome.shards,
            created_at=0.0,
            phase_at=0.0,
            fabric=outcome.fabric,
        )
        return [Put(ref=Ref(Kind.REPLICA, replica.id), record=replica)]


SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("few", [2, 256])
@SLOW
@given(scenes(EVENTS, events_min=6, events_max=16), st.frozensets(st.sampled_from(NODES), max_size=3))
def test_what_is_kept_changes_no_answer(few: int, scene: Scene, failed: frozenset[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prospect, "FEW", few)  # both ways of finding nodes with weights, whatever the size of the fleet
        world = World(scene)
        world.compare(failed)
        for name, tape in scene.events:
            world.happen(name, Dice(tape))
            world.compare(failed if len(tape) % 2 else frozenset())
