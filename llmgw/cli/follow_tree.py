"""Waiting until the tree is as somebody asked, and saying meanwhile what it still waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from llmgw.cli.output import say
from llmgw.core.snapshot import Index
from llmgw.obs.clock import system_jitter
from llmgw.store import keys
from llmgw.store.mirror import mirror
from llmgw.store.port import Store


async def wait_until(store: Store, missing: Callable[[Index], Sequence[str]], *, timeout_s: float | None) -> list[str]:
    """Follow the tree until nothing is missing any more; every change of what is missing is said, to stderr.

    Args:
        store: where.
        missing: what it still waits for, a line each.
        timeout_s: how long at most; None for as long as it takes.

    Returns:
        What was still missing when the time was up; empty when it has come true.

    Raises:
        Denied: the store refused the listing.
    """
    said: list[str] = []
    left: list[str] = []
    async with mirror(store, [keys.ROOT], jitter=system_jitter) as tree:
        with anyio.move_on_after(timeout_s):
            await tree.wait_ready()
            while left := list(missing(tree.index)):
                seen = tree.changes
                for line in (line for line in left if line not in said):
                    say(line, err=True)
                said = left
                await tree.wait_changed(seen)
    return left
