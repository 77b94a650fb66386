"""Replicas that go on generating for a client who has left: they stay counted as busy until the engine has finished.

llama.cpp ends a *streamed* answer when its client leaves, but generates one that was asked for in one piece to its end
(watched for 60 s, build 10434). The connection is closed all the same; what the engine then says of its slots tells
when the work is over. Newer builds that do stop are found idle at the first look.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from llmgw.gateway.balance import Member
from llmgw.gateway.upstream import Answer, Upstream

if TYPE_CHECKING:
    from llmgw.gateway.hub import Hub

GOES_ON: Final = frozenset({"llama.cpp"})
"""Engines that go on. vLLM and SGLang abort a request when its connection closes."""

LOOK_S: Final = 1.0
"""How often the slots are looked at."""

ANSWER_S: Final = 2.0
"""How long one look may take. `/slots` hangs while the engine does; then it is asked again."""

log = logging.getLogger(__name__)


class Slot(msgspec.Struct, frozen=True):
    """One of llama.cpp's `/slots`."""

    is_processing: bool


_SLOTS: Final = msgspec.json.Decoder(list[Slot])


class _Look:
    """Takes the answer to one look and puts it into `text`: the body of a 200, None for anything else."""

    def __init__(self, upstream: Upstream, text: asyncio.Future[bytes | None]) -> None:
        self._upstream = upstream
        self._text = text
        self._parts: list[bytes] = []

    def answered(self, answer: Answer) -> bool:
        if answer.status == 200:
            return True
        self._upstream.close()
        self._tell(None)
        return False

    def body(self, data: bytes) -> None:
        self._parts.append(data)

    def whole(self) -> bool:
        return True

    def done(self) -> None:
        self._tell(b"".join(self._parts))

    def broke(self, why: str) -> None:
        log.debug("no word of the slots", extra={"fields": {"why": why}})
        self._tell(None)

    def _tell(self, text: bytes | None) -> None:
        if not self._text.done():
            self._text.set_result(text)


class Holds:
    """All that is held, by member: until when at the latest."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._until_s: dict[Member, deque[float]] = {}

    def hold(self, member: Member) -> None:
        """Keep one request of `member` counted, if its engine goes on with it."""
        if member.route.engine not in GOES_ON or member.gone:
            self._hub.release(member)
            return
        member.held += 1
        until_s = self._hub.clock() + self._hub.config.first_byte_timeout_s
        if member in self._until_s:
            self._until_s[member].append(until_s)
        else:
            self._until_s[member] = deque([until_s])
            self._hub.spawn(self._watch(member))

    async def _watch(self, member: Member) -> None:
        held = self._until_s[member]
        try:
            while held:
                await asyncio.sleep(LOOK_S)
                working = await self._working(member)
                # Those of our own that still wait for an answer have a slot each; what is beyond them may be held.
                room = max(0, working - (member.in_flight - member.held))
                now_s = self._hub.clock()
                while held and (len(held) > room or held[0] <= now_s or member.gone):
                    self._free(member, held)
        finally:
            while held:
                self._free(member, held)
            del self._until_s[member]

    def _free(self, member: Member, held: deque[float]) -> None:
        held.popleft()
        member.held -= 1
        self._hub.release(member)

    async def _working(self, member: Member) -> int:
        """How many slots work: as many as may be when the engine is silent, none when it is gone or can't tell."""
        try:
            async with asyncio.timeout(ANSWER_S):
                text = await self._ask(member)
            return 0 if text is None else sum(slot.is_processing for slot in _SLOTS.decode(text))
        except TimeoutError:
            return member.in_flight
        except (OSError, msgspec.DecodeError):
            return 0

    async def _ask(self, member: Member) -> bytes | None:
        upstream = await self._hub.connect(member)
        text: asyncio.Future[bytes | None] = self._hub.loop.create_future()
        upstream.ask(_Look(upstream, text), member.ask_head("/slots"))
        try:
            return await text
        finally:
            if text.cancelled():
                upstream.close()
