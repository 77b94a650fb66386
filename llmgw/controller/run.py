"""The controller as a process: `llmgw-controller --config FILE`.

It wires together what the others own: configuration, store, page, loop, signals. Its exit codes: 0 told to end, 1
failed, 2 a configuration that can't be used, 5 a store that refuses us.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Final

import click
import trio

from llmgw.config import ControllerConfig, load_config, split_listen
from llmgw.controller.loop import control
from llmgw.core.record import Leader
from llmgw.errors import Denied, Invalid
from llmgw.obs import logs
from llmgw.obs.clock import SystemIds, system_jitter, system_wall
from llmgw.obs.metrics import registry
from llmgw.obs.status import ControllerStatus
from llmgw.store.etcd import open_etcd, wait_until_reachable
from llmgw.store.follow import ungrouped
from llmgw.web.app import build_app
from llmgw.web.serve import serve

EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104  # recognised, not bound

log = logging.getLogger(__name__)


@click.command(name="llmgw-controller", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", metavar="FILE", help="controller.yaml; without it, every default holds.")
@click.option("--etcd", metavar="URLS", help="etcd endpoints, comma-separated; wins over LLMGW_ETCD and the file.")
@click.version_option(package_name="llmgw")
def main(path: str | None, etcd: str | None) -> None:
    """Decide which node runs what, and keep it so: one of several controllers, of which one leads."""
    overrides = {} if etcd is None else {"etcd.endpoints": tuple(etcd.split(","))}
    try:
        config = load_config(path, ControllerConfig, env=os.environ, overrides=overrides)
        logs.configure(config.log_format)
        trio.run(run, config)
    except Invalid as error:
        for problem in error.problems:
            click.echo(f"llmgw-controller: {problem}", err=True)
        sys.exit(2)
    except Denied as error:
        click.echo(f"llmgw-controller: the store refuses us: {error}", err=True)
        sys.exit(5)
    except Exception:
        # The supervisor of last resort: whatever is left is a bug. The lease was given up on the way here.
        log.exception("the controller failed")
        sys.exit(1)


async def run(config: ControllerConfig) -> None:
    """Serve the page, wait for the store, control; until SIGTERM or SIGINT, which hand over at once.

    Raises:
        Invalid: the configuration can't work here.
        Denied: the store refuses us at the start.
    """
    host, port = split_listen(config.listen)
    status = ControllerStatus(leader=_identity(config, host, port), renew_within_s=2 * config.keepalive_s)
    async with open_etcd(config.etcd, jitter=system_jitter) as store:
        status.store = store.stats
        with ungrouped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
                app = build_app(status, registry(status), wall=system_wall)
                urls = await nursery.start(partial(serve, app, host=host, port=port))
                bound = int(urls[0].rpartition(":")[2])
                status.leader = _identity(config, host, bound)
                log.info("serving", extra={"fields": {"url": urls[0], "id": status.leader.id}})
                await wait_until_reachable(store, log.warning)
                await control(
                    store,
                    config,
                    identity=status.leader,
                    wall=system_wall,
                    ids=SystemIds(),
                    jitter=system_jitter,
                    status=status,
                )


def _identity(config: ControllerConfig, host: str, port: int) -> Leader:
    """Who this controller is to the others. An address that means every interface is no address: the host's name is."""
    name = socket.gethostname()
    reachable = name if host in EVERY_ADDRESS else host
    shown = f"[{reachable}]" if ":" in reachable else reachable
    return Leader(
        id=config.id or f"{name}:{port}",
        address=config.address or f"{shown}:{port}",
        version=importlib.metadata.version("llmgw"),
        pid=os.getpid(),
    )


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    """End everything on the first SIGTERM or SIGINT; leading ends by revoking the lease."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("told to end", extra={"fields": {"signal": signal.Signals(number).name}})
            scope.cancel()
            return
