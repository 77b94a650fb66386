"""Where one model stands: which of its replicas count, which are to be moved or rolled, and what follows for each.

Pure: a census is taken from the index, and retirements and needs follow from the census alone.

Invariant: nothing is retired that leaves fewer serving than wanted while a replacement could still come, except to make
room for a rollout that has none; Unreachable is never a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from llmgw.core.autoscale import wanted_replicas
from llmgw.core.candidates import satisfies
from llmgw.core.catalog import EngineSpec, ModelSpec, launch_hash
from llmgw.core.inventory import NodeInventory, node_inventory
from llmgw.core.node import Liveness
from llmgw.core.reading import is_frozen, is_live, replicas_of
from llmgw.core.replica import ModelState, Replica, ReplicaPhase, Retire, old_first
from llmgw.core.snapshot import Index


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """A model's replicas by where they stand. Each is in one list.

    `removed`: people no longer want the model at all. `lost`: on a node that is Lost. `drained`: on one that people
    drain. `outdated`: launched from another spec or build than is wanted now. `current`: as they should be. `leaving`:
    ordered to stop. `frozen`: how many live ones can't be read, which count and are left alone. `ready`: ids of those
    that serve on a node that answers. `stopped`: the rollout to the wanted launch failed, so the outdated ones stay.
    """

    wanted: int
    removed: bool = False
    lost: tuple[Replica, ...] = ()
    drained: tuple[Replica, ...] = ()
    outdated: tuple[Replica, ...] = ()
    current: tuple[Replica, ...] = ()
    leaving: tuple[Replica, ...] = ()
    frozen: int = 0
    ready: frozenset[str] = frozenset()
    stopped: bool = False

    @property
    def steady(self) -> tuple[Replica, ...]:
        """The replicas that count towards what is wanted."""
        return (*self.outdated, *self.current)

    @property
    def target(self) -> int:
        """How many readable replicas are wanted."""
        return max(0, self.wanted - self.frozen)

    @property
    def floor(self) -> int:
        """How many must be known to serve before another one goes: whether one that can't be read serves is not."""
        return max(self.target, min(1, self.wanted))

    @property
    def rolling(self) -> bool:
        """Whether there is something to roll, and rolling has not failed."""
        return bool(self.outdated) and not self.stopped

    @property
    def need(self) -> int:
        """How many replicas must still be placed."""
        return max(0, self.target - len(self.steady))

    @property
    def may_surge(self) -> bool:
        """Whether a rollout may place its next replica: one at a time, and the one before it is done."""
        return (
            self.rolling
            and len(self.steady) == self.target
            and all(replica.id in self.ready for replica in self.current)
            and not any(replica.retire is Retire.ROLLED for replica in self.leaving)
        )

    @property
    def replaceable(self) -> list[Replica]:
        """Those that the next replicas stand in for, in order; what has a stand-in already is left out."""
        done = {replica.replaces for replica in self.steady}
        moving = [*self.lost, *self.drained, *(old_first(self.outdated) if self.may_surge else ())]
        return [replica for replica in moving if replica.id not in done]


def launch_token(digest: str, wish: EngineSpec | None) -> str:
    """What a rollout goes to: a launch, and the engine version wished with it."""
    return digest if wish is None else f"{digest}@{wish.version}"


def tokens(index: Index, spec: ModelSpec) -> dict[str, str]:
    """`launch_hash` of each profile -> `launch_token`."""
    found: dict[str, str] = {}
    for profile in spec.profiles:
        digest = launch_hash(spec, profile)
        found[digest] = launch_token(digest, index.engines.record(profile.engine))
    return found


def take_census(
    index: Index,
    name: str,
    *,
    spec: ModelSpec | None,
    state: ModelState | None,
    targets: dict[str, str] | None = None,
) -> Census:
    """Count the replicas of one model. `spec` None: it was removed, so nothing of it is wanted.

    `targets`: the spec's `tokens`, where somebody has them already.
    """
    if targets is None:
        targets = {} if spec is None else tokens(index, spec)
    lists: dict[str, list[Replica]] = {key: [] for key in ("lost", "drained", "outdated", "current", "leaving")}
    frozen, ready = _unreadable(index, name), set[str]()
    for replica in replicas_of(index, name):
        if is_frozen(index, replica.id):
            frozen += is_live(replica)
            continue
        nodes = [node_inventory(index, shard.node) for shard in replica.shards if not shard.released]
        lists[_standing(index, replica, nodes, targets)].append(replica)
        known = replica.id in index.secrets  # without its key no gateway can ask it
        if replica.phase is ReplicaPhase.READY and known and all(_answers(node) for node in nodes):
            ready.add(replica.id)
    return Census(
        wanted=0 if spec is None else wanted_replicas(spec, state),
        removed=spec is None,
        lost=tuple(lists["lost"]),
        drained=tuple(lists["drained"]),
        outdated=tuple(lists["outdated"]),
        current=tuple(lists["current"]),
        leaving=tuple(lists["leaving"]),
        frozen=frozen,
        ready=frozenset(ready),
        stopped=state is not None and state.launch_failed is not None and state.launch_failed in targets.values(),
    )


def _standing(index: Index, replica: Replica, nodes: list[NodeInventory], targets: dict[str, str]) -> str:
    if not is_live(replica):
        return "leaving"
    if any(node.liveness is Liveness.LOST for node in nodes):
        return "lost"
    if any(node.drain for node in nodes):
        return "drained"
    if replica.launch not in targets or _build_outdated(index, replica, nodes):
        return "outdated"
    return "current"


def _answers(node: NodeInventory) -> bool:
    return node.present and node.liveness in (Liveness.READY, Liveness.RETURNING)


def _build_outdated(index: Index, replica: Replica, nodes: list[NodeInventory]) -> bool:
    """Whether another version of the engine is wished than the replica runs. Unknown is not outdated."""
    wish = index.engines.record(replica.engine)
    if wish is None or replica.build is None:
        return False
    for node in nodes:
        engines = None if node.facts is None else node.facts.engines
        for build in () if engines is None else engines.builds:
            if build.id == replica.build:
                return not satisfies(build, wish)
    return replica.build.partition("@")[2].partition("+")[0] != wish.version


def _unreadable(index: Index, name: str) -> int:
    """How many replicas of the model have never been readable here, so that only their orders or reports name it."""
    count = 0
    for replica in index.standing.unread:
        orders = (index.assignments.record(each) for each in index.assignments_of.get(replica, ()))
        reports = (index.reports.record(each) for each in index.reports_of.get(replica, ()))
        count += any(each is not None and each.model == name for each in (*orders, *reports))
    return count


Retirement = tuple[Replica, Retire, str]
"""A replica to take down, the kind of reason, and the reason for people."""


def retirements(census: Census) -> list[Retirement]:
    """Which live replicas go now."""
    if census.removed:
        live = (*census.lost, *census.drained, *census.steady)
        return [(replica, Retire.MODEL_REMOVED, "the model was removed") for replica in live]
    found = list(_moved(census))
    if census.rolling:
        found += _rolled(census)
        found += _surplus(census, census.current)
    else:
        found += _surplus(census, census.steady)
    return found


def _moved(census: Census) -> Iterator[Retirement]:
    """Replicas on lost or drained nodes that are no longer needed: enough others serve, or the stand-in does."""
    serving = sum(1 for replica in census.steady if replica.id in census.ready)
    enough = serving >= census.floor
    done = {replica.replaces for replica in census.steady if replica.id in census.ready}
    for replica in census.lost:
        if enough or replica.id in done:
            yield replica, Retire.REPLACED, "its node is lost and enough others serve"
    staying = sum(1 for replica in census.drained if replica.id in census.ready)
    for replica in census.drained:
        surplus = replica.id in census.ready and serving + staying > census.floor
        if enough or replica.id in done or surplus:
            staying -= replica.id in census.ready
            yield replica, Retire.DRAINED, "its node is being drained"


def _rolled(census: Census) -> Iterator[Retirement]:
    """Outdated replicas that a rollout needs no longer: as many serve without them as are wanted."""
    left = len(census.steady)
    serving = sum(1 for replica in census.steady if replica.id in census.ready)
    for replica in sorted(old_first(census.outdated), key=lambda each: each.id in census.ready):
        after = serving - (replica.id in census.ready)
        if left > census.target and after >= census.floor:
            left, serving = left - 1, after
            yield replica, Retire.ROLLED, "another launch is wanted"


def _surplus(census: Census, among: tuple[Replica, ...]) -> Iterator[Retirement]:
    """Replicas beyond what is wanted: those that do not serve before those that do, and of these the newest first.

    So a stand-in goes before what it stood in for, when that came back first. One that may still serve, on a node that
    does not answer, waits until another does; whether one that can't be read serves is not known.
    """
    here = {replica.id for replica in census.steady}
    ranked = sorted(among, key=lambda each: (each.id in census.ready, -each.created_at, each.id))
    surplus = max(0, len(among) - census.target)
    covered = census.floor == 0 or any(replica.id in census.ready for replica in ranked[surplus:])
    for replica in ranked[:surplus]:
        if replica.phase is ReplicaPhase.READY and not covered:
            continue
        if replica.replaces in here:
            yield replica, Retire.CANCELLED, "what it was to replace is there again"
        else:
            yield replica, Retire.SCALE_DOWN, "fewer replicas are wanted"
