"""People and a controller's hand on a real store, for tests of one agent: write orders, wait for what comes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from llmgw.config import EtcdConfig
from llmgw.core.record import Record, StoreMeta
from llmgw.core.replica import ShardPhase, ShardReport
from llmgw.core.snapshot import Kind, Ref
from llmgw.store import codec, keys
from llmgw.store.etcd import open_etcd
from llmgw.store.port import DeleteOp, PutOp, Store
from llmgw.testing.agent_process import WAIT_S, AgentProcess


class People:
    """Reads and writes past everybody."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def put(self, ref: Ref, record: Record) -> int:
        """Write; returns the revision."""
        return (await self.store.txn([], [PutOp(key=keys.key(ref), value=codec.encode_stored(record))])).revision

    async def delete(self, ref: Ref) -> None:
        """Remove."""
        await self.store.txn([], [DeleteOp(key=keys.key(ref))])

    async def record(self, ref: Ref) -> Any:
        """What is there now, None for nothing."""
        item = await self.store.get(keys.key(ref))
        return None if item is None else codec.decode(ref, item.value)

    async def until(self, ref: Ref, what: Callable[[Any], bool], agent: AgentProcess) -> Any:
        """The record at `ref` once `what` holds of it (None where it is absent).

        Raises RuntimeError, with the record and with what agent and engines said, when it does not come in time or the
        agent ended by itself.
        """
        record = None
        with anyio.move_on_after(WAIT_S):
            while not what(record := await self.record(ref)):  # reads, so that it sees deletions too
                if agent.poll() is not None:
                    break
                await anyio.sleep(0.02)
            else:
                return record
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in agent.data.glob("logs/*/*.log"))
        raise RuntimeError(f"{ref}: {record}\n{agent.said()}\n{logs}")

    async def until_ready(self, agent: AgentProcess, ref: Ref) -> ShardReport:
        """The shard's report once it is ready."""
        report: ShardReport = await self.until(ref, lambda r: r is not None and r.phase is ShardPhase.READY, agent)
        return report


@asynccontextmanager
async def people_of(config: EtcdConfig) -> AsyncIterator[People]:
    """A client of an etcd, in which a controller has set up the store."""
    async with open_etcd(config) as store:
        people = People(store)
        await people.put(Ref(Kind.META), StoreMeta(incarnation="store-1"))
        yield people
