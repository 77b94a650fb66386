"""Everything below some prefixes, and then every change of it, for as long as the context lasts.

Built on `list` and `watch` alone, so it is the same for every store. What it hands over is a `Reset` (all there is at
one revision) and then `Batch`es from the next revision on; a fresh `Reset` after everything that could have lost a
change: history compacted, revisions gone back, a reader too slow for the bounded buffer, or a difference that a
periodic listing finds (some etcd releases lose events). Trouble with the store only makes it older, which `age_s`
tells; iteration raises nothing but Denied.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import anyio
import anyio.lowlevel

from llmgw.errors import Compacted, Denied, Unavailable, WentBack
from llmgw.store.port import Batch, Listing, Reset, Store

BUFFER_BATCHES: Final = 64
"""Batches that may wait for a slow reader; more, and it starts over with a `Reset` instead."""

RELIST_S: Final = 420.0
"""Default time between two listings that check the watch, as in `llmgw.config.EtcdConfig`."""

SETTLE_S: Final = 10.0
"""How long a difference may be put down to a watch that is behind; above its silence limit of 6 s."""

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
"""Pauses between listings that fail: doubled each time, times 0.5 to 1.5."""

SPREAD_S: Final = 1.0
"""A fresh listing waits up to this long, because what made it necessary often hit every client at once."""

Jitter = Callable[[], float]
"""Draws from [0, 1), evenly."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def follow(
    store: Store, prefixes: Sequence[str], *, jitter: Jitter, relist_s: float = RELIST_S
) -> AsyncIterator[Following]:
    """Follow `prefixes` (each ends with `/`, or names one key) while the context lasts.

    `relist_s`: mean time between two checks of the watch by a listing. Exceptions of the body pass as they are.
    """
    following = Following(store, prefixes, relist_s=relist_s, jitter=jitter)
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(following.run)
            yield following
            tasks.cancel_scope.cancel()


@contextmanager
def ungrouped() -> Iterator[None]:
    """A lone exception that passes through task groups comes out as itself, for the caller's `except`.

    However many groups are around it: an inner one may have held a cancellation as well, which is gone by now.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from None


class Following:
    """An async iterator of `Reset | Batch`, for one reader. Made by `follow`.

    Nothing is lost to a reader that gives up waiting: iteration can be cancelled and taken up again.
    """

    def __init__(self, store: Store, prefixes: Sequence[str], *, relist_s: float, jitter: Jitter) -> None:
        self._store = store
        self._prefixes = tuple(prefixes)
        self._relist_s = relist_s
        self._jitter = jitter
        self._buffer: deque[Reset | Batch] = deque()
        self._filled, self._hungry = anyio.Event(), anyio.Event()
        self._watching: anyio.CancelScope | None = None
        self._cause = "start"
        self._asked = False
        self._denied: Denied | None = None
        self._heard_s: float | None = None
        # What the reader was told, and what a check in progress found: keys with the revision of their last change.
        self._told: dict[str, int] = {}
        self._touched: set[str] = set()
        self._suspects: set[str] = set()
        self.revision = 0
        """The newest revision told to the reader, or waiting in its buffer."""
        self.resets: dict[str, int] = {}
        """How many `Reset`s there were, by cause; the first one's is `start`."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the store last said anything; None before its first word."""
        return None if self._heard_s is None else anyio.current_time() - self._heard_s

    def start_over(self, cause: str) -> None:
        """Stop watching and list afresh; without effect where that is about to happen anyway."""
        if self._watching is not None:
            self._cause, self._asked = cause, True
            self._watching.cancel()

    def __aiter__(self) -> AsyncIterator[Reset | Batch]:
        return self

    async def __anext__(self) -> Reset | Batch:
        if self._buffer:
            await anyio.lowlevel.checkpoint()  # a reader that never has to wait still lets the others have their turn
        else:
            self._hungry.set()
        while not self._buffer:
            if self._denied is not None:
                raise self._denied
            self._filled = anyio.Event()
            await self._filled.wait()
        return self._buffer.popleft()

    async def run(self) -> None:
        """Fetch until cancelled, or until the store denies it, which the reader is told."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._check)
                await self._fetch()
        except BaseExceptionGroup as group:
            denied, rest = group.split(Denied)  # it may come in the same moment as a cancellation
            found: BaseException | None = denied
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            if isinstance(found, Denied):
                self._denied = found
                self._filled.set()
            if rest is not None:
                with ungrouped():
                    raise rest from None

    async def _fetch(self) -> None:
        while True:
            listing = await self._list()
            self.revision = listing.revision
            self._told = {item.key: item.mod_revision for item in listing.items}
            self._suspects = set()
            self.resets[self._cause] = self.resets.get(self._cause, 0) + 1
            self._buffer.clear()  # what the reader has not taken is in the listing
            self._put(Reset(items=listing.items, revision=listing.revision, cause=self._cause))
            with anyio.CancelScope() as self._watching:
                self._cause = await self._watch()
            self._watching = None
            if self._cause == "overflow":
                await self._forget_buffered()
            log.warning("listing again", extra={"fields": {"cause": self._cause, "revision": self.revision}})
            await anyio.sleep(0 if self._asked else SPREAD_S * self._jitter())
            self._asked = False

    async def _list(self) -> Listing:
        pause_s = BACKOFF_MIN_S
        while True:
            try:
                listing = await self._store.list(self._prefixes)
            except (Unavailable, Compacted) as error:
                log.warning("can't list", extra={"fields": {"why": str(error), "age_s": self.age_s}})
                await anyio.sleep(pause_s * (0.5 + self._jitter()))
                pause_s = min(2 * pause_s, BACKOFF_MAX_S)
            else:
                self._heard_s = anyio.current_time()
                return listing

    async def _watch(self) -> str:
        """Hand over changes until one may have been lost; returns why."""
        try:
            async with self._store.watch(self._prefixes, from_revision=self.revision + 1) as batches:
                while True:
                    batch = await anext(batches)
                    self._heard_s = anyio.current_time()
                    if not self._hand_over(batch):
                        return "overflow"
        except Compacted:
            return "compacted"
        except WentBack:
            return "went_back"

    def _hand_over(self, batch: Batch) -> bool:
        """Put `batch` into the buffer; False if the reader is too slow.

        Mere word of progress is left out while anything else waits there: it must not crowd out events.
        """
        if not batch.events and self._buffer:
            return True
        if len(self._buffer) >= BUFFER_BATCHES:
            return False
        self._put(batch)
        self.revision = max(self.revision, batch.revision)
        for event in batch.events:
            if event.value is None:
                self._told.pop(event.key, None)
            else:
                self._told[event.key] = event.mod_revision
            self._touched.add(event.key)
            self._suspects.discard(event.key)
        return True

    def _put(self, word: Reset | Batch) -> None:
        self._buffer.append(word)
        self._filled.set()

    async def _forget_buffered(self) -> None:
        """Drop what the reader did not take, and wait until it asks again: one listing for a stall of any length."""
        self._hungry = anyio.Event()
        self._buffer.clear()
        await self._hungry.wait()

    async def _check(self) -> None:
        """Now and then, see whether the watch told everything."""
        while True:
            await anyio.sleep(self._relist_s * (0.75 + 0.5 * self._jitter()))
            watching, seen, self._touched = self._watching, self.revision, set()
            if watching is None:
                continue
            try:
                listing = await self._store.list(self._prefixes)
            except (Unavailable, Compacted):
                continue  # the next check is as good; the watch has its own dead-line
            if watching is not self._watching:
                continue  # a fresh listing came in between
            self._heard_s = anyio.current_time()
            if listing.revision < seen:
                self.start_over("went_back")
                continue
            # An event may have overtaken the listing (touched) or be still on its way (it has SETTLE_S to come).
            there = {item.key: item.mod_revision for item in listing.items}
            either = there.keys() | self._told.keys()
            self._suspects = {key for key in either if there.get(key) != self._told.get(key)} - self._touched
            if self._suspects:
                await anyio.sleep(SETTLE_S)
            if self._suspects:
                self.start_over("relist")
