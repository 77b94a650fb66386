"""The tree as one process sees it: `follow`, decoded and folded into an `Index`, with means to wait for it.

A mirror lags behind the store, always, and says by how much; it is never wrong about the past. Trouble with the store
or with a record makes it older, never empty. Records of one prefix come in order; between prefixes any order is
possible, so what must be consistent shares one (controllers mirror `/llmgw/` alone).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.lowlevel

from llmgw.core.snapshot import Change, Index, Ref
from llmgw.errors import Denied
from llmgw.store import codec, keys
from llmgw.store.follow import RELIST_S, Following, Jitter, follow, ungrouped
from llmgw.store.port import Event, KeyValue, Reset, Store

DENIED_RETRY_S: Final = 5.0
"""Pause after the store denied us what it once allowed: a person may be changing a role or a password."""

YIELD_EVERY: Final = 256
"""Records decoded before others get their turn. 256 take about 2 ms."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def mirror(
    store: Store, prefixes: Sequence[str], *, jitter: Jitter, relist_s: float = RELIST_S
) -> AsyncIterator[Mirror]:
    """Keep a mirror of `prefixes` while the context lasts; it starts empty, see `Mirror.wait_ready`.

    Raises:
        Denied: the store refused the very first listing. Later refusals are logged and retried.
    """
    reflected = Mirror(store, prefixes, jitter=jitter, relist_s=relist_s)
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reflected.run)
            yield reflected
            tasks.cancel_scope.cancel()


class Mirror:
    """The `index`, how old it is, and what one can wait for. `index` belongs to the mirror; others only read it.

    Between two waits of the reader the index does not change.
    """

    def __init__(self, store: Store, prefixes: Sequence[str], *, jitter: Jitter, relist_s: float) -> None:
        self._store = store
        self._prefixes = tuple(prefixes)
        self._jitter = jitter
        self._relist_s = relist_s
        self._following: Following | None = None
        self._heard, self._changed = anyio.Event(), anyio.Event()
        self._corrupt: set[Ref] = set()
        self.index = Index()
        self.changes = 0
        """Changes folded in since the start: grows with each batch of events and each reset, never falls."""
        self.ready = False
        """Whether there was a whole listing yet; until then the index is empty because nothing is known."""
        self.denied: Denied | None = None
        """Why the store refuses us at the moment; None when it does not."""
        self.resets: dict[str, int] = {}
        """How often everything was listed, by cause."""

    @property
    def revision(self) -> int:
        """Everything up to here is folded in, as far as one prefix is mirrored; 0 before the first listing."""
        return self.index.revision

    @property
    def age_s(self) -> float | None:
        """Seconds since the store's last word; None before its first."""
        return None if self._following is None else self._following.age_s

    @property
    def incarnation(self) -> str | None:
        """Which store this is a mirror of; None while unknown."""
        meta = self.index.meta
        return None if meta is None or meta.record is None else meta.record.incarnation

    def start_over(self) -> None:
        """List everything afresh: somebody knows that what is here is not of this store."""
        if self._following is not None:
            self._following.start_over("went_back")

    async def wait_ready(self) -> None:
        """Until the first whole listing is folded in."""
        while not self.ready:
            await self._heard.wait()

    async def wait_revision(self, revision: int) -> None:
        """Until everything up to `revision` is folded in; for a mirror of one prefix.

        A restore of the store may take the revision away for good: callers have a dead-line.
        """
        while self.revision < revision:
            await self._heard.wait()

    async def wait_heard(self) -> None:
        """Until the store has another word, be it only that nothing has changed."""
        await self._heard.wait()

    async def wait_changed(self, since: int) -> int:
        """Until `changes` is above `since`; returns it."""
        while self.changes <= since:
            await self._changed.wait()
        return self.changes

    async def run(self) -> None:
        """Follow and fold until cancelled. Raises Denied if that is the store's first word."""
        while True:
            try:
                async with follow(
                    self._store, self._prefixes, jitter=self._jitter, relist_s=self._relist_s
                ) as following:
                    await self._fold(following)
            except Denied as error:
                if not self.ready:
                    raise
                if self.denied is None:
                    log.warning("the store denies us", extra={"fields": {"why": str(error)}})
                self.denied = error
            await anyio.sleep(DENIED_RETRY_S * (0.5 + self._jitter()))

    async def _fold(self, following: Following) -> None:
        async for word in following:
            self._following, self.denied = following, None
            incarnation = self.incarnation
            if isinstance(word, Reset):
                changes = await self._decode(word.items)
                self.index.reset(changes, revision=word.revision)
                self.resets[word.cause] = self.resets.get(word.cause, 0) + 1
                self.ready = True
            else:
                changes = await self._decode(word.events)
                self.index.apply(changes, revision=word.revision)
                if incarnation not in (None, self.incarnation):
                    # The store was restored behind the watch's back: what came before it here may never have been.
                    following.start_over("went_back")
            if changes or isinstance(word, Reset):
                self.changes += 1
                self._changed.set()
                self._changed = anyio.Event()
            self._heard.set()
            self._heard = anyio.Event()

    async def _decode(self, items: Sequence[KeyValue | Event]) -> list[Change]:
        changes: list[Change] = []
        for n, item in enumerate(items, start=1):
            if n % YIELD_EVERY == 0:
                await anyio.lowlevel.checkpoint()
            change = codec.change(item)
            if change is not None:
                self._report(change)
                changes.append(change)
        return changes

    def _report(self, change: Change) -> None:
        """Say once of each unreadable key that it is."""
        if change.corrupt is None:
            self._corrupt.discard(change.ref)
        elif change.ref not in self._corrupt:
            self._corrupt.add(change.ref)
            log.error("corrupt record", extra={"fields": {"key": keys.key(change.ref), "why": change.corrupt}})
