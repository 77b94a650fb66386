"""The gateway as a process: `llmgw-gateway --config FILE`.

It wires together what the others own. Exit codes: 0 told to end, 1 failed, 2 a configuration that can't be used.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import Final

import click
import uvloop

from llmgw.config import GatewayConfig, load_config, split_listen
from llmgw.errors import Invalid, Problem
from llmgw.gateway.hub import Hub
from llmgw.gateway.metrics import Exposition, Figures
from llmgw.gateway.routes import Routes, snapshot_file
from llmgw.gateway.server import Client
from llmgw.obs import logs
from llmgw.obs.clock import system_jitter, system_wall
from llmgw.obs.metrics import store as store_metrics
from llmgw.store.etcd import open_etcd

BACKLOG: Final = 4096
"""Connections the kernel keeps for us; also bounded by net.core.somaxconn."""

DRAIN_S: Final = 30.0
"""How long requests in flight get after SIGTERM; a second signal ends them at once."""

log = logging.getLogger(__name__)


@click.command(name="llmgw-gateway", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", metavar="FILE", help="gateway.yaml; without it, every default holds.")
@click.option("--etcd", metavar="URLS", help="etcd endpoints, comma-separated; wins over LLMGW_ETCD and the file.")
@click.version_option(package_name="llmgw")
def main(path: str | None, etcd: str | None) -> None:
    """Answer the OpenAI API from the replicas that are ready: one of any number of gateways."""
    overrides = {} if etcd is None else {"etcd.endpoints": tuple(etcd.split(","))}
    try:
        config = load_config(path, GatewayConfig, env=os.environ, overrides=overrides)
        logs.configure(config.log_format)
        uvloop.run(run(config))
    except Invalid as error:
        for problem in error.problems:
            click.echo(f"llmgw-gateway: {problem}", err=True)
        sys.exit(2)
    except Exception:
        # The supervisor of last resort: whatever is left is a bug.
        log.exception("the gateway failed")
        sys.exit(1)


async def run(config: GatewayConfig) -> None:
    """Follow the store and serve until SIGTERM or SIGINT; then let requests in flight end.

    Raises:
        Invalid: the configuration can't work here.
    """
    loop = asyncio.get_running_loop()
    signals = Signals(loop)
    hub = Hub(config, Figures(), loop=loop)
    exposition = Exposition(hub.figures, hub.gauges)
    routes = Routes(hub, file=snapshot_file(config.snapshot), wall=system_wall, jitter=system_jitter)
    async with open_etcd(config.etcd, jitter=system_jitter) as store:
        exposition.extra += [routes.metrics, lambda: store_metrics(store.stats())]
        following = loop.create_task(routes.run(store, relist_s=config.etcd.relist_s))
        servers = [await listen(hub, exposition, config.listen, api=True, metrics=not config.metrics_listen)]
        if config.metrics_listen:
            servers.append(await listen(hub, exposition, config.metrics_listen, api=False, metrics=True))
        hub.start()
        gc.collect()
        gc.freeze()  # what is there by now stays; no collection has to look at it again
        told = loop.create_task(signals.first.wait())
        await asyncio.wait((told, following), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()  # it never ends by itself, only with an error
        await drain(hub, servers, signals)
        following.cancel()
        await asyncio.wait((following,))


class Signals:
    """SIGTERM and SIGINT: `first` asks for an end, `second` for one at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came, number)

    def _came(self, number: signal.Signals) -> None:
        log.info("told to end", extra={"fields": {"signal": number.name}})
        (self.second if self.first.is_set() else self.first).set()


async def listen(hub: Hub, exposition: Exposition, address: str, *, api: bool, metrics: bool) -> asyncio.AbstractServer:
    """Serve on `address`. Raises Invalid when that is not to be had."""
    host, port = split_listen(address)
    try:
        server = await hub.loop.create_server(
            lambda: Client(hub, exposition, api=api, metrics=metrics), host, port, backlog=BACKLOG
        )
    except OSError as error:
        name = "listen" if api else "metrics_listen"
        raise Invalid((Problem(message=f"can't listen on {address}: {error.strerror}", path=name),)) from error
    bound = server.sockets[0].getsockname()
    shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    log.info("serving", extra={"fields": {"url": f"http://{shown}:{bound[1]}", "metrics": metrics}})
    return server


async def drain(hub: Hub, servers: list[asyncio.AbstractServer], signals: Signals) -> None:
    """Take no new connections, let what is under way end, and drop the rest at the dead-line or a second signal."""
    for server in servers:
        server.close()
    hub.drain()
    emptied = hub.loop.create_task(hub.wait_empty())
    hurried = hub.loop.create_task(signals.second.wait())
    await asyncio.wait((emptied, hurried), timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
    if hub.clients:
        log.warning("requests were cut off", extra={"fields": {"connections": len(hub.clients)}})
    emptied.cancel()
    hurried.cancel()
    hub.stop()
