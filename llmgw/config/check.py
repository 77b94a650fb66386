"""Whether a config makes sense: ranges, addresses, durations, files. It already has the right types.

Every problem is yielded, with the place it stands at; what is right by itself is judged by the field's name, so that a
new field named as the others is checked like them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from llmgw.config.file import read_secret
from llmgw.config.settings import (
    AgentConfig,
    Config,
    ControllerConfig,
    EtcdConfig,
    FabricConfig,
    GatewayConfig,
    NamedEngine,
)
from llmgw.core.catalog import ENGINES
from llmgw.core.ids import name_problem
from llmgw.core.yaml_tree import Path, nearest, show
from llmgw.errors import Invalid

_ZERO_ALLOWED: Final = frozenset({
    "backoff_base_s", "eject_s", "gateway_wait_s", "pass_interval_s", "port_rest_s", "queue_max", "queue_wait_s",
    "restart_attempts", "restart_backoff_s",
})  # fmt: skip
"""Numbers for which zero means something: no wait, no queue, no further attempt. All others are above zero."""

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"log_format": ("json", "text"), "on_exit": ("keep", "stop")}

ENGINE_IDLE_S: Final = 5.0
"""Idle connections that engines close. Source: llama.cpp's Keep-Alive header; vLLM's and SGLang's defaults."""

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")

Found = Iterator[tuple[Path, str, str | None]]
"""Problems as (where, message, nearest right value)."""


def problems(config: Config, place: Path = ()) -> Found:
    """Everything that makes no sense in `config`, which already has the right types."""
    for field in msgspec.structs.fields(config):
        value, here = getattr(config, field.name), (*place, field.name)
        yield from _value_problems(field.name, value, here)
        if isinstance(value, Config):
            yield from problems(value, here)
        elif isinstance(value, tuple):
            for i, each in enumerate(value):
                if isinstance(each, Config):
                    yield from problems(each, (*here, i))
    for kind, check in _CHECKS.items():
        if isinstance(config, kind):
            for tail, message, near in check(config):
                yield (*place, *tail), message, near


def _value_problems(name: str, value: Any, place: Path) -> Found:
    """What is wrong with one value by itself, judged by its name."""
    if name in _CHOICES and value not in _CHOICES[name]:
        yield place, f"{show(value)} is not one of {', '.join(_CHOICES[name])}", nearest(value, _CHOICES[name])
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < 0 or (value == 0 and name not in _ZERO_ALLOWED):
            yield place, f"{value:g} must be {'zero or more' if name in _ZERO_ALLOWED else 'more than zero'}", None
    elif name in ("listen", "metrics_listen") and value:
        try:
            split_listen(value)
        except ValueError as error:
            yield place, str(error), None
    elif name in ("engine_ports", "gang_ports"):
        low, high = value
        if not 1 <= low <= high <= 65535:
            yield place, f"[{low}, {high}] is not a range of ports in 1 to 65535", None
    elif name in ("ca", "cert", "key", "password_file") and value is not None:
        try:
            read_secret(value)
        except Invalid as error:
            yield place, str(error), None


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:8800`, `[::1]:8800`, `name:8800`; port 0 is any free one. Raises: ValueError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"{show(listen)} is not host:port")
    if int(port) > 65535:
        raise ValueError(f"port {port} is not in 0 to 65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (problem := _host_problem(bare)) is not None or (":" in bare) != (bare != host):
        raise ValueError(f"the host {show(host)} {problem or 'is an IPv6 address, which goes in [brackets]'}")
    return bare, int(port)


def _etcd(config: EtcdConfig) -> Found:
    if not config.endpoints:
        yield ("endpoints",), "names no endpoint", None
    for i, url in enumerate(config.endpoints):
        message, near = _url_problem(url)
        if message is not None:
            yield ("endpoints", i), message, near
        elif (config.ca or config.cert) and url.startswith("http:"):
            yield ("endpoints", i), f"{show(url)} is not encrypted, although ca or cert is set", "https" + url[4:]
    for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")):
        if getattr(config, one) is not None and getattr(config, other) is None:
            yield (one,), f"needs {other} as well", None


def _url_problem(url: str) -> tuple[str | None, str | None]:
    """What is wrong with an endpoint, and the nearest right one. Never repeats a password."""
    if not url:
        return "an endpoint is empty", None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"is not a URL: {error}", None
    if parts.username is not None or parts.password is not None:
        return "holds a user or password: use `user` and `password_file`", None
    if parts.scheme not in ("http", "https") or not host:
        near = f"http://{url}" if re.fullmatch(r"[A-Za-z0-9.-]+:[0-9]+", url) else None
        return f"{show(url)} is not a URL such as http://127.0.0.1:2379", near
    if port is None:
        return f"{show(url)} names no port", f"{url.rstrip('/')}:2379"
    if parts.path or parts.query or parts.fragment:
        return f"{show(url)} has something after the port", f"{parts.scheme}://{parts.netloc}"
    return None, None


def _controller(config: ControllerConfig) -> Found:
    call_s = config.etcd.connect_timeout_s + config.etcd.read_timeout_s
    if config.margin_s < call_s:
        yield ("margin_s",), f"{config.margin_s:g} must be at least the store's call time-out, {call_s:g} s", None
    if 2 * config.keepalive_s > config.ttl_s - config.margin_s:
        limit_s = (config.ttl_s - config.margin_s) / 2
        yield ("keepalive_s",), f"{config.keepalive_s:g} must be at most (ttl_s - margin_s) / 2 = {limit_s:g}", None
    if config.address:
        try:
            split_listen(config.address)
        except ValueError as error:
            yield ("address",), str(error), None


def _agent(config: AgentConfig) -> Found:
    if (why := name_problem(config.name)) is not None:
        yield ("name",), f"{show(config.name)} {why}", None
    if not config.data_dir:
        yield ("data_dir",), "is empty", None
    if (why := _host_problem(config.address)) is not None:
        yield ("address",), f"{show(config.address)} {why}", None
    elif config.address in ("0.0.0.0", "::"):  # noqa: S104  # refused, not bound
        yield ("address",), f"{config.address} is no address that gateways could reach", None
    if config.share > 1:
        yield ("share",), f"{config.share:g} must be at most 1", None
    (low, high), (gang_low, gang_high) = config.engine_ports, config.gang_ports
    if low <= gang_high and gang_low <= high:
        yield ("gang_ports",), f"[{gang_low}, {gang_high}] overlaps engine_ports [{low}, {high}]", None
    yield from _fabrics(config.fabrics)
    yield from _engines(config.engines)


def _gateway(config: GatewayConfig) -> Found:
    with suppress(ValueError):  # judged by its name already
        host, port = split_listen(config.listen)
        if not _loopback(host):
            why = "without API keys the gateway listens on loopback only, or it would answer anybody"
            yield ("listen",), f"{show(config.listen)} is not a loopback address: {why}", f"127.0.0.1:{port}"
    if not 0 < config.upstream_idle_s < ENGINE_IDLE_S:
        why = f"must be above 0 and below {ENGINE_IDLE_S:g}, after which engines close idle connections"
        yield ("upstream_idle_s",), f"{config.upstream_idle_s:g} {why}", None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fabrics(fabrics: tuple[FabricConfig, ...]) -> Found:
    names = [fabric.name for fabric in fabrics]
    for i, name in enumerate(names):
        if (why := name_problem(name)) is not None:
            yield ("fabrics", i, "name"), f"{show(name)} {why}", None
        elif name in names[:i]:
            yield ("fabrics", i, "name"), f"{show(name)} is here a second time", None


def _engines(engines: tuple[NamedEngine, ...]) -> Found:
    for i, engine in enumerate(engines):
        if engine.engine not in ENGINES:
            known = f"unknown engine {show(engine.engine)}; known are {', '.join(ENGINES)}"
            yield ("engines", i, "engine"), known, nearest(engine.engine, ENGINES)
        if not engine.version or not engine.binary:
            yield ("engines", i, "binary" if engine.version else "version"), "is empty", None


_CHECKS: Final[Mapping[type[Config], Callable[[Any], Found]]] = {
    EtcdConfig: _etcd,
    ControllerConfig: _controller,
    AgentConfig: _agent,
    GatewayConfig: _gateway,
}


def _host_problem(host: str) -> str | None:
    """Why `host` is neither an IP address nor a name; None when it is one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None if _HOST.fullmatch(host) else "is neither an IP address nor a host's name"
    return None
