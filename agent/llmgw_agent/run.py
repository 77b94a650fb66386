"""The agent as a process: `llmgw-agent --config FILE`.

It wires together what the others own. Exit codes: 0 told to end, 1 failed, 2 a configuration that can't be used, 4 the
data directory is another agent's. A store that is not there, or denies us, ends nothing: engines are looked after.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import trio

from llmgw.config import AgentConfig, load_config
from llmgw.errors import Invalid, Refused
from llmgw.obs import logs
from llmgw.obs.clock import SystemIds, system_jitter, system_wall
from llmgw.store.etcd import open_etcd
from llmgw.store.follow import ungrouped
from llmgw_agent.agent import run_agent
from llmgw_agent.linux import open_host

PR_SET_CHILD_SUBREAPER: Final = 36
"""Source: linux/prctl.h; prctl(2)."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    options = _parser().parse_args(argv)
    overrides = {} if options.etcd is None else {"etcd.endpoints": tuple(options.etcd.split(","))}
    try:
        config = load_config(options.config, AgentConfig, env=os.environ, overrides=overrides)
        logs.configure(config.log_format)
        become_subreaper()
        trio.run(run, config)
    except Invalid as error:
        for problem in error.problems:
            sys.stderr.write(f"llmgw-agent: {problem}\n")
        sys.exit(2)
    except Refused as error:
        sys.stderr.write(f"llmgw-agent: {error}\n")
        sys.exit(4)
    except Exception:
        # The supervisor of last resort: whatever is left is a bug. Engines go on without an agent.
        log.exception("the agent failed")
        sys.exit(1)


async def run(config: AgentConfig) -> None:
    """Until SIGTERM or SIGINT. Raises: Invalid, Refused."""
    async with open_host(config, subreaper=True) as host, open_etcd(config.etcd, jitter=system_jitter) as store:
        with ungrouped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
                fields = {"node": config.name, "data": config.data_dir, "etcd": ",".join(config.etcd.endpoints)}
                log.info("agent up", extra={"fields": fields})
                await run_agent(store, host, config, wall=system_wall, ids=SystemIds())


def become_subreaper() -> None:
    """Have orphans of our engines' trees become our children, so that they are seen and buried.

    Raises:
        OSError: the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmgw-agent",
        description="Start, watch and stop engines on this node, as its assignments say.",
        epilog="Runs until SIGTERM or SIGINT; engines outlive it unless agent.yaml says `on_exit: stop`. Exit codes: "
        "0 told to end, 1 failed, 2 a configuration that can't be used, 4 the data directory is another agent's.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="agent.yaml")
    parser.add_argument(
        "--etcd", metavar="URLS", help="etcd endpoints, comma-separated; wins over LLMGW_ETCD and the file"
    )
    version = importlib.metadata.version("llmgw")
    parser.add_argument("--version", action="version", version=f"llmgw-agent, version {version}")
    return parser


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    """End on the first SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("told to end", extra={"fields": {"signal": signal.Signals(number).name}})
            scope.cancel()
            return
