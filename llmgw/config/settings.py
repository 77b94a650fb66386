"""What each process can be told: one frozen Struct a process, its defaults and their reasons. Types only."""

from __future__ import annotations

from typing import Final

import msgspec

from llmgw.core.gang_ports import GANG_PORTS

PAGE_PORT: Final = 8800
GATEWAY_PORT: Final = 8880
AGENT_PORT: Final = 8890


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything people write for a process."""


class EtcdConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach the store. The same `etcd:` block in every process.

    endpoints: URLs; also from LLMGW_ETCD (comma-separated) or `--etcd`, which win in that order.
    ca, cert, key: PEM files. A client certificate must have an empty CN, or etcd's gateway refuses it.
    user, password_file: for etcd's own authentication; the file's trailing newline is dropped.
    connect_timeout_s, read_timeout_s: one call's dead-line is their sum.
    watch_silence_s: a watch without any word for this long is dead. Three times the server's progress interval of 2 s.
    relist_s: how often a followed prefix is listed again and compared, since some etcd releases lose events.
    """

    endpoints: tuple[str, ...] = ("http://127.0.0.1:2379",)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    connect_timeout_s: float = 1.0
    read_timeout_s: float = 2.0
    watch_silence_s: float = 6.0
    relist_s: float = 420.0


class ClientConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the command `llmgw` needs to reach the store. It has no file: options and LLMGW_ETCD only."""

    etcd: EtcdConfig = EtcdConfig()


class ControllerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """controller.yaml.

    id: this controller's name in the election record; the host's name and the port when empty.
    listen: where page, health and metrics are served; loopback by default.
    address: what others are told to reach it by; `listen` when empty.
    ttl_s … margin_s: leading (refused at start unless margin ≥ call time-out and 2 × keepalive ≤ ttl - margin).
    session_ttl_s: of the agents' sessions, to be what their agent.yaml says: twice as long a leader watches by itself
    before it gives up a node or ends the guard for failed writes. An agent with another one is warned of in the log.
    lost_after_s: how long a node stays Unreachable before a replacement is asked for. Five minutes outlast a reboot and
    most outages of a switch; loading big weights elsewhere would hardly be faster.
    pass_interval_s: least time between two passes; changes are coalesced for so long.
    full_pass_s: how often everything is looked at, dirty or not.
    scale_every_s: how often the models' load is sampled. Source: 15 s is the period of Kubernetes' HPA.
    backoff_base_s, backoff_max_s: how long a model waits before it is placed again after its n-th failed replica in a
    row: base × 2ⁿ⁻¹, at most max, ± 20 %; zero for base means at once. Thirty minutes of all replicas ready end the
    count. For another max placement prefers nodes where it did not fail. Source: 300 s is the most that Kubernetes'
    CrashLoopBackOff waits.
    log_format: `text` for people, `json` for one object a line, to stderr.
    """

    etcd: EtcdConfig = EtcdConfig()
    id: str = ""
    listen: str = f"127.0.0.1:{PAGE_PORT}"
    address: str = ""
    ttl_s: float = 10.0
    keepalive_s: float = 2.5
    margin_s: float = 3.0
    session_ttl_s: float = 30.0
    lost_after_s: float = 300.0
    pass_interval_s: float = 0.1
    full_pass_s: float = 600.0
    scale_every_s: float = 15.0
    backoff_base_s: float = 5.0
    backoff_max_s: float = 300.0
    log_format: str = "text"


class NamedEngine(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine that a person names on purpose: `version` is what is reported, `binary` what is run."""

    engine: str
    version: str
    binary: str


class FabricConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fast network of this node. Nodes that name the same `name` can be in one replica.

    rate_gbps: decides between fabrics whose nodes are equally good; unknown counts as slowest.
    hcas, ifname: of this node; a replica on this fabric may use these HCAs and no other's.
    """

    name: str
    rate_gbps: float | None = None
    hcas: tuple[str, ...] = ()
    ifname: str | None = None


class AgentConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """agent.yaml.

    name: the node's name, one agent each.
    data_dir: state, logs, lock; what runs is taken up from there after a restart.
    address: where gateways reach this node's engines, and the other members of a replica that spans nodes its own.
    listen: accepted and judged, and not used yet: the agent serves nothing.
    labels: what a catalog's `node_selector` may ask for. Those set by people in the store (`spec/nodes/<name>`) win.
    model_dirs: where weights are looked for, in this order, and listed for placement, which prefers nodes that have
    them; a catalog's relative `source` is below one of them. None: absolute sources only.
    memory_gb, cpus: caps below what the machine has; all of it when absent.
    share: the part of the machine's (or cgroup's) memory and CPUs that is this node's; `llmgw dev` gives each of its N
    nodes 1/N, so that nothing is handed out twice.
    fabrics: the fast networks of this node; without one it takes no part in a replica that spans nodes.
    engine_ports: an inclusive range, outside the ephemeral range.
    gang_ports: an inclusive range for what the members of a replica that spans nodes open to each other; each such
    replica takes 16 in a row, the same on all its nodes, so nodes of one fabric should name the same range.
    port_rest_s: how long a freed port rests before another replica gets it.
    on_exit: `keep` lets engines outlive the agent, `stop` ends them with it (for `llmgw dev`).
    engines: builds of one's own, beside those that are found installed.
    session_ttl_s: how long after its last renewal the store lets the node's session end; rounded to whole seconds, and
    renewed every third. To be the controllers' `session_ttl_s`, who judge a missing session by it and warn of another.
    30 s outlast an election of etcd's and a busy machine; no engine stops when it ends.
    facts_interval_s: how often the machine is looked at (memory, weights, engines); written when it changed, so that a
    quiet fleet writes nothing.
    gateway_wait_s: after a stop order, how long gateways get to see it before the engine may be stopped.
    restart_attempts: how often an engine that crashed is started again in place, also without etcd, before its replica
    counts as failed and is placed anew. A member of a replica that spans nodes has none: it fails as a whole.
    restart_backoff_s: the wait before the n-th of them is this × 2ⁿ⁻¹; 2, 4 and 8 s give a port or a device time to be
    free again.
    stable_s: how long an engine must be ready for its count of restarts to fall back to zero.
    log_format: `text` for people, `json` for one object a line, to stderr.
    """

    name: str
    data_dir: str
    etcd: EtcdConfig = EtcdConfig()
    address: str = "127.0.0.1"
    listen: str = f"127.0.0.1:{AGENT_PORT}"
    labels: dict[str, str] = {}
    model_dirs: tuple[str, ...] = ()
    memory_gb: float | None = None
    cpus: float | None = None
    share: float = 1.0
    fabrics: tuple[FabricConfig, ...] = ()
    engine_ports: tuple[int, int] = (20000, 20999)
    gang_ports: tuple[int, int] = GANG_PORTS
    port_rest_s: float = 60.0
    on_exit: str = "keep"
    engines: tuple[NamedEngine, ...] = ()
    session_ttl_s: float = 30.0
    facts_interval_s: float = 30.0
    gateway_wait_s: float = 2.0
    restart_attempts: int = 3
    restart_backoff_s: float = 2.0
    stable_s: float = 1800.0
    log_format: str = "text"


class GatewayConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """gateway.yaml.

    id: its name among gateways; not told to anybody by this version.
    listen: loopback by default; without API keys nothing else is allowed. snapshot: file of the last known routes
    (0600), loaded at start when etcd is away; empty for none.
    metrics_listen: where metrics and health alone are served; empty: metrics are on `listen` too.
    body_max_bytes, header_max_bytes: largest request body and head. attempts_max: engines of one model tried before the
    first byte (each of its fallbacks gets as many). connect_timeout_s: per try. first_byte_timeout_s: longest silence
    of an engine, before the first byte and between two.
    in_flight_max: requests at once per replica. queue_max, queue_wait_s: waiting requests per model and for how long.
    write_timeout_s: a client that takes nothing for so long is dropped. line_max_bytes: longest SSE line of an engine.
    upstream_idle_s: idle engine connections are dropped before the engine's own 5 s.
    eject_s: how long a replica that failed is left alone.
    log_format: `text` for people, `json` for one object a line, to stderr.
    """

    etcd: EtcdConfig = EtcdConfig()
    id: str = ""
    listen: str = f"127.0.0.1:{GATEWAY_PORT}"
    metrics_listen: str = ""
    snapshot: str = ""
    body_max_bytes: int = 64 * 2**20
    header_max_bytes: int = 64 * 2**10
    attempts_max: int = 3
    connect_timeout_s: float = 1.0
    first_byte_timeout_s: float = 600.0
    in_flight_max: int = 256
    queue_max: int = 1024
    queue_wait_s: float = 30.0
    write_timeout_s: float = 30.0
    line_max_bytes: int = 16 * 2**20
    upstream_idle_s: float = 4.0
    eject_s: float = 10.0
    log_format: str = "text"
