"""The commands on a store in memory that holds what a test's cluster has come to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from llmgw.cli import main as cli_main
from llmgw.cli.connection import Connection
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import PutOp
from llmgw.testing.cluster import Cluster

OnCluster = Callable[..., int]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> OnCluster:
    """`on(cluster, "plan", …)` runs a command that only reads on all that is in the cluster; returns its exit code."""

    def command_on(c: Cluster, *args: str) -> int:
        def run(_: Connection, command: Callable[[MemoryStore], Awaitable[Any]]) -> Any:
            return anyio.run(_reading, c, command, backend="trio")

        monkeypatch.setattr(Connection, "run", run)
        return cli_main.main(args)

    return command_on


async def _reading(c: Cluster, command: Callable[[MemoryStore], Awaitable[Any]]) -> Any:
    store = MemoryStore(MemoryCluster())
    for ref, row in c.index.rows():
        value = b"{" if row.corrupt is not None or row.record is None else encode_stored(row.record)
        await store.txn([], [PutOp(key=keys.key(ref), value=value)])
    before = await store.list([keys.ROOT])
    outcome = await command(store)
    assert await store.list([keys.ROOT]) == before
    return outcome
