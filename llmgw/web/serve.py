"""The one place that knows which server runs the page: Hypercorn on trio."""

from __future__ import annotations

import logging
import socket
from typing import Final, cast

import hypercorn.trio
import trio
from hypercorn.config import Config
from hypercorn.typing import Framework
from starlette.types import ASGIApp

from llmgw.errors import Invalid, Problem

GRACE_S: Final = 1.0
"""How long requests in flight may still take once the server is told to end. Pages take milliseconds."""

READ_TIMEOUT_S: Final = 30
"""A connection that sends nothing for so long is closed."""


async def serve(
    app: ASGIApp, *, host: str, port: int, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve `app` until cancelled. Started once it listens, with its URLs; port 0 takes any free one.

    Raises:
        Invalid: the address can't be bound.
    """
    config = Config()
    config.bind = [f"fd://{_bound(host, port)}"]
    config.graceful_timeout = GRACE_S
    config.read_timeout = READ_TIMEOUT_S
    config.include_server_header = False
    config.errorlog = logging.getLogger("hypercorn.error")
    await hypercorn.trio.serve(cast("Framework", app), config, task_status=task_status)


def _bound(host: str, port: int) -> int:
    """A bound socket's descriptor, which the server takes over. Bound here so that failing is an error of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family).detach()
    except OSError as error:
        raise Invalid(
            (Problem(message=f"can't listen on {host} port {port}: {error.strerror}", path="listen"),)
        ) from error
