"""What nodes say of themselves and what the leader makes of it: session, facts, liveness, the fleet.

Unknown is not zero: a field that was never reported is None, and None is never read as empty, full or healthy.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from llmgw.core.record import Record

N = TypeVar("N", int, float)


def credible(amount: N | None) -> N | None:
    """An amount that a node reported; None, so unknown, where it is below zero, as no amount is."""
    return None if amount is None or amount < 0 else amount


class Session(Record, frozen=True, kw_only=True):
    """`node/session/<node>`, leased: the agent is there. Its expiry is the signal; its full report came in one txn.

    `boot_id`: the kernel's. `data`: device:inode of the agent's locked lock file, so that a copied data directory is
    another agent. `store`: the store incarnation the report was made for. `lease`: the lease it hangs on. `ttl_s`: how
    long that lives unrenewed, as the agent was told; None in sessions older than this field.
    """

    node: str
    boot_id: str
    data: str
    lease: int
    store: str
    address: str
    version: str
    pid: int
    started_at: float
    ttl_s: int | None = None


class GpuHealth(enum.Enum):
    """Whether a GPU can take work, as far as the driver tells."""

    OK = "ok"
    FAULT = "fault"
    LOST = "lost"
    UNKNOWN = "unknown"


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU as the driver names it.

    `foreign`: processes on it that are not ours, `foreign_bytes` what of its memory is used outside our engines, less
    what the driver keeps for itself; None when that can't be told. `fault`: what is the matter, in the driver's words.
    """

    uuid: str
    index: int
    gpu_class: str
    memory_bytes: int | None = None
    nvlink_domain: int | None = None
    health: GpuHealth = GpuHealth.UNKNOWN
    fault: str = ""
    foreign: int | None = None
    foreign_bytes: int | None = None


class Fabric(Record, frozen=True, kw_only=True):
    """A high-speed network this node is on. Fabrics are not connected to one another."""

    name: str
    rate_gbps: float | None = None
    hcas: tuple[str, ...] = ()
    ifname: str | None = None


class Build(Record, frozen=True, kw_only=True):
    """One engine build a node can run.

    `named`: written in agent.yaml or found in the engine wheel, so it satisfies any wished version; otherwise it was
    installed and seen to run.
    """

    engine: str
    version: str
    variant: str = ""
    named: bool = False

    @property
    def id(self) -> str:
        """`<engine>@<version>`, with `+<variant>` where there is one."""
        return f"{self.engine}@{self.version}" + (f"+{self.variant}" if self.variant else "")


class EngineFacts(Record, frozen=True, kw_only=True):
    """What a node knows of engines. `probed` false: not looked yet. `notes`: engine -> the node's own words on it.

    `builds`: best first.
    """

    probed: bool
    builds: tuple[Build, ...] = ()
    notes: dict[str, str] = {}


class WeightSet(Record, frozen=True, kw_only=True):
    """Weights found on a node, by the path a model's `source` would name. `why` says what is missing."""

    source: str
    bytes: int | None = None
    complete: bool = True
    why: str = ""


class Facts(Record, frozen=True, kw_only=True):
    """`node/facts/<node>`: what the machine is; written on change, kept when the session ends.

    `memory_bytes` and `cpus` are within the cgroup's limits and agent.yaml's caps. `engines` None: an agent too old to
    say. `gpus`, `weights` None: not known. `gang_ports`: first and last port that the members of a gang may use among
    each other here, None where the agent is too old to say.
    """

    node: str
    boot_id: str
    os: str | None = None
    arch: str | None = None
    cpu_model: str | None = None
    cpu_flags: tuple[str, ...] = ()
    cpus: float | None = None
    memory_bytes: int | None = None
    labels: dict[str, str] = {}
    gpus: tuple[Gpu, ...] | None = None
    fabrics: tuple[Fabric, ...] = ()
    gang_ports: tuple[int, int] | None = None
    engines: EngineFacts | None = None
    weights: tuple[WeightSet, ...] | None = None
    warnings: tuple[str, ...] = ()


class Liveness(enum.Enum):
    """What the leader makes of a node."""

    READY = "ready"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    RETURNING = "returning"


class NodeState(Record, frozen=True, kw_only=True):
    """`plan/nodes/<name>`: a node's liveness. `since_at`: Unix seconds by the leader's clock.

    `boot_id` and `lease` are those of the last session seen: what `forget` and `release` speak of.
    """

    name: str
    liveness: Liveness
    since_at: float
    reason: str = ""
    boot_id: str | None = None
    lease: int | None = None


class Guard(Record, frozen=True, kw_only=True):
    """Whether mass loss is being doubted: while on, nobody is declared Lost.

    `unreachable`, `nodes`: the numbers it went on by (nodes not Lost in all), None when it is not about them.
    """

    on: bool = False
    reason: str = ""
    since_at: float | None = None
    unreachable: int | None = None
    nodes: int | None = None


class Fleet(Record, frozen=True, kw_only=True):
    """`plan/fleet`: what concerns all nodes at once.

    `measure_every_s`: how often agents should measure, which none does yet. `incarnation`: the store incarnation whose
    adoption is finished; while it differs from `meta/store`'s nothing is stopped, placed or pruned.
    """

    measure_every_s: float = 10.0
    guard: Guard = Guard()
    incarnation: str
