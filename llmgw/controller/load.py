"""The leader's sampler: it hears what gateways tell, takes a sample now and then, and says which models it moves.

It runs beside the loop for as long as a reign does and decides nothing itself (`llmgw.core.autoscale` does). Ordinary
news waits for the next sample. Only what can't wait brings one about by itself: requests for a model that has no
replica, or is about to lose its last.

Invariant: trouble with this watch, or with a record, makes what is heard older and a sample incomplete. It is never
read as no load, and it never ends the reign.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel

from llmgw.core.autoscale import moved, observe, waiting
from llmgw.core.live import Heard, LoadView, take_sample
from llmgw.core.snapshot import Index
from llmgw.errors import CorruptRecord, Denied
from llmgw.obs.clock import WallClock, now
from llmgw.store import codec, keys
from llmgw.store.follow import Jitter, follow
from llmgw.store.port import Batch, Event, KeyValue, Reset, Store

DENIED_RETRY_S: Final = 5.0
"""Pause after the store denied us, on average, as for the mirror."""

log = logging.getLogger(__name__)

Sampled = Callable[[LoadView, set[str]], None]
"""Called with what is seen now, and the models for which that leads to another number."""


class Sampler:
    """What one leader hears of the gateways. `index`: its mirror's, read between two waits only."""

    def __init__(
        self,
        store: Store,
        index: Index,
        *,
        every_s: float,
        relist_s: float,
        lost_after_s: float,
        wall: WallClock,
        jitter: Jitter,
        sampled: Sampled,
    ) -> None:
        self._store, self._index, self._wall, self._jitter = store, index, wall, jitter
        self._every_s, self._relist_s, self._lost_after_s = every_s, relist_s, lost_after_s
        self._sampled = sampled
        self._heard: dict[str, Heard] = {}
        self._vanished: dict[str, float] = {}
        self._denied = False
        self.load = LoadView()
        """What it has made of all samples so far."""

    async def run(self) -> None:
        """Hear and sample until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear)
            while True:
                await anyio.sleep(self._every_s)
                self._sample()

    async def _hear(self) -> None:
        while True:
            try:
                async with follow(
                    self._store, [keys.GATEWAYS], jitter=self._jitter, relist_s=self._relist_s
                ) as following:
                    async for word in following:
                        self._fold(word)
            except Denied as error:
                if not self._denied:
                    log.warning("the store denies us the gateways' load", extra={"fields": {"why": str(error)}})
                self._denied = True
            await anyio.sleep(DENIED_RETRY_S * (0.5 + self._jitter()))

    def _fold(self, word: Reset | Batch) -> None:
        """Take in what the store says; look at once at what can't wait."""
        self._denied = False
        items: tuple[KeyValue | Event, ...] = word.items if isinstance(word, Reset) else word.events
        there: dict[str, KeyValue | Event] = {}
        for item in items:
            if (gateway := keys.parse_gateway(item.key)) is not None:
                there[gateway] = item
        gone = {gateway for gateway, item in there.items() if item.value is None}
        if isinstance(word, Reset):
            gone |= self._heard.keys() - there.keys()
        urgent: set[str] = set()
        for gateway, item in there.items():
            before = self._heard.get(gateway)
            if item.value is None or (before is not None and before.revision == item.mod_revision):
                continue
            heard = self._read(gateway, item.value, revision=item.mod_revision)
            self._heard[gateway] = heard
            self._vanished.pop(gateway, None)
            if heard.load is not None:
                urgent |= waiting(self._index, self.load, heard.load)
        for gateway in gone & self._heard.keys():
            del self._heard[gateway]
            self._vanished[gateway] = anyio.current_time()
        if urgent:
            self._sample(frozenset(urgent))

    def _read(self, gateway: str, value: bytes, *, revision: int) -> Heard:
        load = None
        try:
            load = codec.decode_load(gateway, value)
        except CorruptRecord as error:
            before = self._heard.get(gateway)
            if before is None or before.load is not None:
                log.warning("corrupt record", extra={"fields": {"key": error.key, "why": error.why}})
        return Heard(load=load, revision=revision, mono_s=anyio.current_time())

    def _sample(self, only: frozenset[str] | None = None) -> None:
        """Take a sample; `only`: of these models, as it can't wait."""
        moment = now(self._wall)
        for gateway, since_s in list(self._vanished.items()):
            if moment.mono_s - since_s >= self._lost_after_s:
                del self._vanished[gateway]
        sample = take_sample(self._heard, self._vanished, now=moment, lost_after_s=self._lost_after_s)
        before, self.load = self.load, observe(self.load, sample, index=self._index, now=moment, only=only)
        if self.load.models and sample.missing != before.missing:
            text = "the models' load is known" if sample.complete else "the models' load is not known"
            log.info(text, extra={"fields": {"why": sample.missing} if sample.missing else {}})
        self._sampled(self.load, moved(self._index, self.load, now=moment))
