"""What the leader assigned and what really runs: replicas, claims, assignments, shard reports.

Assigned (`Replica`, `Assignment`) has one writer, the leader; observed (`ShardReport`) has one, the node's agent.
Invariants: a replica's claims appear together and each ends only with a confirmed stop (`confirms_stop`); the absence
of an assignment never stops anything.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from llmgw.core.catalog import DRAIN_S, START_S, Task
from llmgw.core.explain import Receipt, Unplaced
from llmgw.core.ids import Secret
from llmgw.core.record import Record

SHARDS_PER_NODE_MAX: Final = 60
"""So that a node's session, facts and full report fit one etcd transaction of 128 operations."""


class ReplicaPhase(enum.Enum):
    """Where a replica is in its life. Written by the leader."""

    PLACED = "placed"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


ROUTABLE: Final = frozenset({ReplicaPhase.PLACED, ReplicaPhase.STARTING, ReplicaPhase.READY})
"""The phases in which a replica may get requests, once its rank-0 shard says ready."""


class Desired(enum.Enum):
    """What an order asks of a node. `STOPPED` is final for that replica id."""

    HELD = "held"
    RUNNING = "running"
    STOPPED = "stopped"


class ShardPhase(enum.Enum):
    """What the agent sees of a shard. `STOPPED` and `FAILED` mean that the whole process tree is gone."""

    HELD = "held"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


GONE: Final = frozenset({ShardPhase.STOPPED, ShardPhase.FAILED})


class Retire(enum.Enum):
    """Why the leader takes a replica down."""

    SCALE_DOWN = "scale_down"
    MODEL_REMOVED = "model_removed"
    ROLLED = "rolled"
    DRAINED = "drained"
    REPLACED = "replaced"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNKNOWN = "unknown"


class GpuClaim(Record, frozen=True, kw_only=True):
    """One GPU held by a shard, whole, by uuid."""

    uuid: str


class Claim(Record, frozen=True, kw_only=True):
    """What one shard holds of its node. `memory_bytes` None: it declared none, and so claims none."""

    memory_bytes: int | None = None
    gpus: tuple[GpuClaim, ...] = ()
    hcas: tuple[str, ...] = ()


class Launch(Record, frozen=True, kw_only=True):
    """Everything an engine is started from, frozen at placement; the agent never asks the catalog.

    `build` None: any build of `engine` that the node reports. Sizes in tokens. `digest`: the `launch_hash` this was
    made from, so that an adopted shard is known for what it is; empty in orders older than this field.
    """

    source: str
    task: Task
    profile: str
    engine: str
    build: str | None = None
    context: int
    slots: int
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    nodes: int = 1
    gpus_per_node: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    digest: str = ""


class Peer(Record, frozen=True, kw_only=True):
    """One member of a gang, as its other members must know it."""

    rank: int
    node: str
    address: str


class Gang(Record, frozen=True, kw_only=True):
    """How the shards of a multi-node replica find each other. `ports` are fixed by the leader, from `gang_ports`."""

    fabric: str
    peers: tuple[Peer, ...]
    ports: tuple[int, ...]

    @property
    def block(self) -> tuple[int, int] | None:
        """First and last of its ports; None where it has none."""
        return (min(self.ports), max(self.ports)) if self.ports else None


class Assignment(Record, frozen=True, kw_only=True):
    """`plan/assignments/<node>/<replica>.<rank>`: the leader's order to one node. Also the order an agent saves."""

    node: str
    replica: str
    rank: int
    model: str
    desired: Desired
    launch: Launch
    claim: Claim
    engine_key: Secret
    start_s: float = START_S
    drain_s: float = DRAIN_S
    gang: Gang | None = None


class ShardReport(Record, frozen=True, kw_only=True):
    """`node/shards/<node>/<replica>.<rank>`: what really runs there. Written by the node's agent only.

    `assigned` false: nothing in the store orders this shard; then `order` is the whole saved assignment.
    `assignment_rev`: mod_revision of the order this report answers, 0 for an unassigned shard. `incarnation`: one start
    of the engine. `attempts`: starts that failed since it last ran stably. Times are Unix seconds by the node's clock.
    `context` and `slots` are read back from the running engine, None until then. `address` and `port`: where gateways
    reach it (rank 0 only). `extended`: start budgets it was granted beyond its first, because its load made progress.
    """

    node: str
    replica: str
    rank: int
    model: str
    phase: ShardPhase
    phase_at: float
    assigned: bool = True
    assignment_rev: int = 0
    order: Assignment | None = None
    incarnation: str | None = None
    address: str | None = None
    port: int | None = None
    pid: int | None = None
    build: str | None = None
    context: int | None = None
    slots: int | None = None
    attempts: int = 0
    extended: int = 0
    reason: str = ""


class ReplicaShard(Record, frozen=True, kw_only=True):
    """One shard of a replica: its node and what it holds there. `released`: its stop is confirmed, its claim ended."""

    rank: int
    node: str
    claim: Claim
    released: bool = False


class Replica(Record, frozen=True, kw_only=True):
    """`plan/replicas/<id>`: one placed copy of a model; its claims are the truth about what is taken.

    `launch`: `launch_hash` of what it was placed from. `replaces`: the replica it stands in for, which stays in routing
    until this one is ready. `ready_at`: when it was first seen ready, None: never yet. `ports`: first and last of those
    that its members have on each of its nodes, None where there is one. Times are Unix seconds by the writing leader's
    clock.
    """

    id: str
    model: str
    profile: str
    engine: str
    launch: str
    phase: ReplicaPhase
    shards: tuple[ReplicaShard, ...]
    created_at: float
    phase_at: float
    build: str | None = None
    fabric: str | None = None
    ports: tuple[int, int] | None = None
    ready_at: float | None = None
    retire: Retire | None = None
    replaces: str | None = None
    reason: str = ""
    receipt: Receipt | None = None

    @property
    def is_forming(self) -> bool:
        """Whether it spans nodes and is on its way to being ready for the first time."""
        starting = self.phase in (ReplicaPhase.PLACED, ReplicaPhase.STARTING)
        return starting and self.ready_at is None and len(self.shards) > 1


def old_first(replicas: Iterable[Replica]) -> list[Replica]:
    """The oldest first, and by id what was placed at one moment."""
    return sorted(replicas, key=lambda replica: (replica.created_at, replica.id))


def live_shard(replica: Replica | None, *, node: str, rank: int) -> ReplicaShard | None:
    """The shard of `replica` with that rank on that node, if its claim has not ended."""
    if replica is None:
        return None
    found = (shard for shard in replica.shards if shard.rank == rank and shard.node == node and not shard.released)
    return next(found, None)


class EngineSecret(Record, frozen=True, kw_only=True):
    """`plan/secrets/<replica>`: the engine's key, for gateways."""

    replica: str
    key: Secret


class Rollout(enum.Enum):
    """How a model's rolling update stands."""

    NONE = "none"
    ROLLING = "rolling"
    STOPPED = "stopped"


class ScaleCause(enum.Enum):
    """Why a model has the number of replicas wanted that it has.

    `start`: what there was, or the lowest allowed, before any load was known. `load`: requests to a replica. `idle`: no
    request for long enough. `wake`: a request waited and there was no replica. `bounds`: the catalog's `min` or `max`.
    """

    START = "start"
    LOAD = "load"
    IDLE = "idle"
    WAKE = "wake"
    BOUNDS = "bounds"


class ScaleState(Record, frozen=True, kw_only=True):
    """How many replicas of a model are wanted by load. Written only when that number changes.

    `since_at`: Unix seconds. `load`: requests in flight and queued at all gateways then, `target`: those that each
    replica was to have; None where no load had a part in it.
    """

    wanted: int
    since_at: float
    cause: ScaleCause
    load: int | None = None
    target: float | None = None


class ModelState(Record, frozen=True, kw_only=True):
    """`plan/models/<name>`: how the leader sees a model.

    `wanted`: replicas it should have; `placed`: live ones that are not on their way out; `ready`: those serving.
    `attempt`, `retry_at`: the backoff after failed replicas (a count, Unix seconds). `failed_nodes`: node -> until when
    (Unix seconds) it ranks last for this model. `launch_failed`: the launch (hash, and wished engine version) whose
    rollout failed. `failure`: what the last failed replica died of, kept while `attempt` is above zero or the rollout
    is stopped. `unplaced`: present while a replica that is wanted, or is to be moved, fits nowhere. `scale`: where the
    catalog leaves a range, the number that load has led to.
    """

    name: str
    wanted: int
    placed: int
    ready: int
    attempt: int = 0
    retry_at: float | None = None
    failed_nodes: dict[str, float] = {}
    rollout: Rollout = Rollout.NONE
    launch_failed: str | None = None
    failure: str = ""
    reason: str = ""
    unplaced: Unplaced | None = None
    scale: ScaleState | None = None


def confirms_stop(report: ShardReport | None, *, order_rev: int) -> bool:
    """Whether `report` proves that the order of mod_revision `order_rev` to stop was carried out.

    A missing record confirms nothing: an agent ordered to stop what it never ran writes `stopped` as well.
    """
    return report is not None and report.assigned and report.phase in GONE and report.assignment_rev >= order_rev
