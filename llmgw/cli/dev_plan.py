"""What `llmgw dev` runs: the processes, their ports and their configuration files. Decides; starts nothing.

Invariant: two nodes of one machine never offer the same byte of memory or the same engine port, and a data directory
keeps the addresses by which its etcd members know each other.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from llmgw.config import GATEWAY_PORT, PAGE_PORT, ControllerConfig, EtcdConfig, GatewayConfig
from llmgw.errors import Invalid, Problem, Refused

ETCD_PORT: Final = 2379
ENGINE_PORTS: Final = (20000, 20999)
PORTS_TRIED_MAX: Final = 200
HOST: Final = "127.0.0.1"


class DevOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for. `settings`: per process kind (controller, agent, gateway), what to override."""

    data: Path
    controllers: int = 3
    nodes: int = 2
    gateways: int = 1
    etcd_members: int = 1
    model_dirs: tuple[str, ...] = ()
    etcd_bin: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = {}


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the tree. `health`: URL that answers 200 once it works, None where only the store can tell."""

    name: str
    kind: str
    argv: tuple[str, ...]
    config: Path | None = None
    text: str = ""
    health: str | None = None


class DevPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything to start, in the order of starting, and what to tell people."""

    children: tuple[Child, ...]
    etcd_urls: tuple[str, ...]
    gateway_urls: tuple[str, ...]
    page_urls: tuple[str, ...]
    notes: tuple[str, ...]
    peer_ports: tuple[int, ...]


def port_free(port: int) -> bool:
    """Whether `port` can be listened on at loopback right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


class Ports:
    """Hands out ports, each once, and remembers where it had to move on."""

    def __init__(self, free: Callable[[int], bool] = port_free) -> None:
        self._free = free
        self._given: set[int] = set()
        self.notes: list[str] = []

    def take(self, wanted: int, what: str) -> int:
        """`wanted`, or the next free port above it. Raises Refused when none is free nearby."""
        for port in range(wanted, min(wanted + PORTS_TRIED_MAX, 65536)):
            if port in self._given:
                continue
            if self._free(port):
                self._given.add(port)
                if port != wanted:
                    self.notes.append(f"port {wanted} is taken, {what} listens on {port}")
                return port
        raise Refused(f"no free port for {what} between {wanted} and {wanted + PORTS_TRIED_MAX - 1}")

    def keep(self, port: int, what: str) -> int:
        """Exactly `port`, which a data directory already knows. Raises Refused when something else has it."""
        if port in self._given or not self._free(port):
            raise Refused(f"port {port} is in use, and {what} of this data directory can have no other: free it")
        self._given.add(port)
        return port


def start_script() -> Path:
    """deploy/etcd/start of the checkout, or of the installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_deploy" / "etcd" / "start", package.parent / "deploy" / "etcd" / "start"):
        if candidate.is_file():
            return candidate
    raise Refused("deploy/etcd/start is in neither the checkout nor the installed package: reinstall llmgw")


def plan_dev(options: DevOptions, ports: Ports, *, kept_peers: tuple[int, ...] = ()) -> DevPlan:
    """Lay out the tree. `kept_peers`: the members' peer ports from an earlier start of this data directory.

    Raises:
        Refused: no port is free, or the data directory holds another number of etcd members.
        Invalid: `settings` speaks of a process kind that does not exist.
    """
    _check_settings(options.settings)
    etcd, urls, peers = _etcd(options, ports, kept_peers)
    block = EtcdConfig(endpoints=urls)
    controllers = _controllers(options, ports, block)
    gateways = _gateways(options, ports, block)
    agents = _agents(options, block)
    return DevPlan(
        children=(*etcd, *controllers, *gateways, *agents),
        etcd_urls=urls,
        gateway_urls=tuple(_base(child) for child in gateways),
        page_urls=tuple(_base(child) for child in controllers),
        notes=tuple(ports.notes),
        peer_ports=peers,
    )


def _base(child: Child) -> str:
    return (child.health or "").removesuffix("/healthz")


def _check_settings(settings: Mapping[str, Mapping[str, Any]]) -> None:
    known = ("agent", "controller", "gateway")
    problems = tuple(
        Problem(message=f"unknown process kind {kind!r}; settings speak of {', '.join(known)}", path=kind)
        for kind in settings
        if kind not in known
    )
    if problems:
        raise Invalid(problems)


def _etcd(
    options: DevOptions, ports: Ports, kept: tuple[int, ...]
) -> tuple[list[Child], tuple[str, ...], tuple[int, ...]]:
    count = options.etcd_members
    if kept and len(kept) != count:
        raise Refused(
            f"{options.data} holds an etcd of {len(kept)} members; start it with --etcd-members {len(kept)}, "
            "or choose another --data"
        )
    names = [f"etcd-{n + 1}" for n in range(count)]
    clients = tuple(f"http://{HOST}:{ports.take(ETCD_PORT + 10 * n, name)}" for n, name in enumerate(names))
    if kept and count > 1:
        peers = tuple(ports.keep(port, name) for name, port in zip(names, kept, strict=True))
    else:
        peers = tuple(ports.take(ETCD_PORT + 1 + 10 * n, f"{name} (peers)") for n, name in enumerate(names))
    cluster = ",".join(f"{name}=http://{HOST}:{port}" for name, port in zip(names, peers, strict=True))
    script = str(start_script())
    children = [
        Child(
            name=name,
            kind="etcd",
            argv=(
                script,
                *("--name", name, "--data", str(options.data / name)),
                *("--client-url", client, "--peer-url", f"http://{HOST}:{peer}", "--cluster", cluster),
                *(("--etcd-bin", options.etcd_bin) if options.etcd_bin else ()),
            ),
            health=f"{client}/health",
        )
        for name, client, peer in zip(names, clients, peers, strict=True)
    ]
    return children, clients, peers


def _process(options: DevOptions, *, name: str, kind: str, config: dict[str, Any], health: str | None) -> Child:
    path = options.data / "config" / f"{name}.yaml"
    merged = {**config, **options.settings.get(kind, {})}
    module = {"controller": "llmgw.controller", "gateway": "llmgw.gateway", "agent": "llmgw_agent"}[kind]
    return Child(
        name=name,
        kind=kind,
        argv=(sys.executable, "-m", module, "--config", str(path)),
        config=path,
        text=yaml.safe_dump(merged, sort_keys=False),
        health=health,
    )


def _controllers(options: DevOptions, ports: Ports, etcd: EtcdConfig) -> list[Child]:
    out = []
    for n in range(options.controllers):
        name = f"controller-{n + 1}"
        listen = f"{HOST}:{ports.take(PAGE_PORT + n, name)}"
        config = _written(ControllerConfig(etcd=etcd, id=name, listen=listen))
        out.append(_process(options, name=name, kind="controller", config=config, health=f"http://{listen}/healthz"))
    return out


def _gateways(options: DevOptions, ports: Ports, etcd: EtcdConfig) -> list[Child]:
    out = []
    for n in range(options.gateways):
        name = f"gateway-{n + 1}"
        listen = f"{HOST}:{ports.take(GATEWAY_PORT + n, name)}"
        snapshot = str(options.data / name / "routes.json")
        config = _written(GatewayConfig(etcd=etcd, id=name, listen=listen, snapshot=snapshot))
        out.append(_process(options, name=name, kind="gateway", config=config, health=f"http://{listen}/healthz"))
    return out


def _agents(options: DevOptions, etcd: EtcdConfig) -> list[Child]:
    models = [str(options.data / "models"), *options.model_dirs]
    out = []
    for n in range(options.nodes):
        name = f"node-{n + 1}"
        config = {
            "name": name,
            "data_dir": str(options.data / name),
            "etcd": {"endpoints": list(etcd.endpoints)},
            "model_dirs": models,
            "share": round(1 / options.nodes, 6),
            "engine_ports": _slice(ENGINE_PORTS, n, options.nodes),
            "on_exit": "stop",
        }
        out.append(_process(options, name=name, kind="agent", config=config, health=None))
    return out


def _slice(ports: tuple[int, int], n: int, parts: int) -> list[int]:
    """The `n`th of `parts` equal, disjoint pieces of an inclusive range."""
    low, high = ports
    size = (high - low + 1) // parts
    return [low + n * size, low + (n + 1) * size - 1]


def _written(config: ControllerConfig | GatewayConfig) -> dict[str, Any]:
    """A config as people would write it: only what differs from the defaults."""
    whole = msgspec.to_builtins(config)
    bare = msgspec.to_builtins(type(config)())
    out = {key: value for key, value in whole.items() if value != bare.get(key)}
    out["etcd"] = {"endpoints": list(config.etcd.endpoints)}
    return out
