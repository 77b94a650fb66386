"""Watching etcd: one streamed request carries a watch for each prefix, and is replaced whenever it may be dead.

A watch stream dies in five ways, four of them without an exception: an error object in the stream, a closed connection,
a cancelled watch (compacted, denied), a frozen member, a member cut off from the others. Each of them, and a raft term
that goes back, leads to another member, where every prefix goes on behind the last revision it delivered.

Invariants: per prefix no event is lost, repeated or out of order; where to go on is known from events, or from a word
of progress, never from the revision in the header of an event message, which runs ahead of its events (measured).
Memory is bounded: a slow reader slows the reading from etcd.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Final

import anyio
import msgspec

from llmgw.errors import Compacted, Denied, StoreError, WentBack
from llmgw.store import etcd_wire as wire
from llmgw.store.etcd_call import Broken, Caller, Lane, Stream
from llmgw.store.etcd_verdict import Failure, Verdict, judge, judge_canceled, judge_error
from llmgw.store.port import Batch

BUFFER_BATCHES: Final = 64
"""Batches read ahead of the reader; then reading stops until there is room, and etcd holds the rest in its history."""

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
"""Between two streams, doubled with each that brought nothing, times 0.5 to 1 by lot."""

PROBES_PER_SILENCE: Final = 3
"""Where etcd sends no progress (its own default is every 10 minutes): that often within the silence limit the same
member is asked whether it lives and has a leader."""

PROBE_MISSES: Final = 2
"""So many without a good answer, in a row, are death."""

log = logging.getLogger(__name__)


class Ledger:
    """What the watches of one store have been through."""

    def __init__(self) -> None:
        self.open: set[Watch] = set()
        self.restarts = 0
        self.resyncs = 0
        self.progress_seen = False
        """Whether this etcd is known to tell progress often; then silence alone is death."""


_End = Failure | StoreError
"""How a stream ended: with a failure, after which the watch goes on elsewhere, or with the error that ends it."""


class Watch:
    """An async context manager; inside it, an async iterator of batches. Made by `EtcdStore.watch`."""

    def __init__(
        self, caller: Caller, prefixes: Sequence[str], from_revision: int, *, silence_s: float, ledger: Ledger
    ) -> None:
        self._caller = caller
        self._prefixes = tuple(prefixes)
        self._next = [from_revision] * len(self._prefixes)
        self._silence_s = silence_s
        self._ledger = ledger
        self._busy = False
        self._created: set[int] = set()
        self._retried = False
        self._pause_s = BACKOFF_MIN_S
        self._error: StoreError | None = None
        self._dead = ""
        self.heard_s = 0.0
        """When etcd last said anything, monotonic."""

    async def __aenter__(self) -> AsyncIterator[Batch]:
        self.heard_s = anyio.current_time()
        self._send, self._receive = anyio.create_memory_object_stream[Batch](BUFFER_BATCHES)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._ledger.open.add(self)
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._ledger.open.discard(self)
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is not None and group.exceptions == (error,):
                return False  # the reader's own error, which the task group only wrapped
            raise
        finally:
            self._receive.close()

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self._receive.receive()
        except anyio.EndOfStream:
            assert self._error is not None  # noqa: S101  # `_run` ends no other way; narrows the type
            raise self._error from None

    # --- one stream after the other ---

    async def _run(self) -> None:
        with self._send:
            while self._error is None:
                member = self._caller.members.pick(anyio.current_time())
                end = await self._stream(member)
                if isinstance(end, StoreError):
                    self._error = end
                else:
                    await self._recover(member, end)
            self._ledger.resyncs += isinstance(self._error, (Compacted, WentBack))

    async def _stream(self, member: str) -> _End:
        """Follow one stream until it ends or must be taken for dead."""
        caller, self._dead, self._busy = self._caller, "", False
        self._created.clear()
        try:
            failure = await caller.log_in(member)
            if failure is not None:
                return failure
            token = caller.token
            with anyio.move_on_after(caller.connect_s + caller.read_s) as scope:
                body = wire.watch_request(self._prefixes, self._next)
                async with caller.transport.stream(member, wire.WATCH, body, token=token) as stream:
                    end: _End
                    if stream.status == 200:
                        scope.deadline = math.inf
                        end = await self._guarded(stream, member)
                    else:
                        end = judge(stream.status, await stream.read())
                    if isinstance(end, Failure) and end.verdict is Verdict.LOGIN:
                        caller.forget(token)
                    return end
            return _gone("no answer to a watch")
        except Denied as denied:
            return denied
        except Broken as broken:
            return _gone(self._dead or broken.why)

    async def _guarded(self, stream: Stream, member: str) -> _End:
        """Read the stream, while somebody looks whether it lives."""
        end: _End | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._guard, member, tasks.cancel_scope)
            end = await self._read(stream)
            tasks.cancel_scope.cancel()
        return end or _gone(self._dead)

    async def _recover(self, member: str, failure: Failure) -> None:
        """After a stream has failed: see to what the next one needs, or that there is none."""
        caller = self._caller
        match failure.verdict:
            case Verdict.LOGIN if caller.has_login and not self._retried:
                self._retried = True
            case Verdict.DENIED if not self._retried:
                self._error = await self._judge_rights()
            case Verdict.LOGIN | Verdict.DENIED:
                self._error = self._denied(caller.denial(failure))
            case Verdict.COMPACTED:
                self._error = Compacted(0)
            case _:
                self._ledger.restarts += 1
                caller.members.failed(member, anyio.current_time())
                if self._pause_s == BACKOFF_MIN_S:
                    log.warning(
                        "a watch ended, going on elsewhere", extra={"fields": {"member": member, "why": failure.why}}
                    )
                await anyio.sleep(self._pause_s * (0.5 + 0.5 * caller.jitter()))
                self._pause_s = min(2 * self._pause_s, BACKOFF_MAX_S)

    async def _judge_rights(self) -> Denied | None:
        """Whether we are denied, or only our login was lost, which etcd 3.5.1 tells of a watch in the same words."""
        try:
            for prefix in self._prefixes:
                await self._probe(prefix)
        except Denied as denied:
            return self._denied(str(denied))
        except StoreError as error:
            log.debug("can't tell yet whether a watch is denied: %s", error)
        else:
            self._retried = True
        return None

    def _denied(self, why: str) -> Denied:
        return Denied(f"watching {', '.join(self._prefixes)}: {why}")

    async def _probe(self, prefix: str) -> wire.Header:
        """Where the store stands, by a linearizable read of what is watched; it also renews a lost login."""
        request = wire.range_request(prefix, prefix=prefix.endswith("/"), limit=1)
        return (await self._caller.call(wire.RANGE, request, wire.RANGE_REPLY, again=True)).header

    # --- is it alive? ---

    async def _guard(self, member: str, scope: anyio.CancelScope) -> None:
        """Cancel `scope` once the stream must be taken for dead; `_dead` says why."""
        opened_s, misses = anyio.current_time(), 0
        made_by_s = opened_s + self._caller.connect_s + self._caller.read_s
        probe_s = self._silence_s / PROBES_PER_SILENCE
        while misses < PROBE_MISSES:
            now_s = anyio.current_time()
            heard_s = now_s if self._busy else max(self.heard_s, opened_s)
            wake_s = now_s + probe_s
            if now_s >= made_by_s and not self._busy and len(self._created) < len(self._prefixes):
                self._dead = f"it made {len(self._created)} of {len(self._prefixes)} watches"
                break
            if not self._ledger.progress_seen:
                answers = now_s < heard_s + probe_s or await self._answers(member, within_s=probe_s / 2)
                misses = 0 if answers else misses + 1
            elif now_s >= heard_s + self._silence_s:
                self._dead = f"silent for {self._silence_s:g} s"
                break
            else:
                wake_s = min(wake_s, heard_s + self._silence_s)
            await anyio.sleep_until(wake_s)
        self._dead = self._dead or "silent, and it does not say that it has a leader"
        scope.cancel()

    async def _answers(self, member: str, *, within_s: float) -> bool:
        """Whether `member` lives and has a leader."""
        try:
            reply = await self._caller.transport.call(
                member,
                wire.STATUS,
                b"{}",
                token=self._caller.token,
                lane=Lane.CALL,
                connect_s=within_s,
                read_s=within_s,
                leave=True,
            )
        except Broken:
            return False
        if reply.status != 200:
            return judge(reply.status, reply.body).verdict in {Verdict.LOGIN, Verdict.DENIED}
        try:
            return wire.STATUS_REPLY.decode(reply.body).leader != 0
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    # --- what it says ---

    async def _read(self, stream: Stream) -> _End:
        """Hand on what the stream brings, until it ends."""
        lines = wire.Lines()
        try:
            while chunk := await stream.receive():
                self.heard_s = anyio.current_time()
                self._busy = True  # with the reader or a check, so that silence proves nothing
                for line in lines.feed(chunk):
                    if (end := await self._take(line)) is not None:
                        return end
                self._busy = False
        except Broken as broken:
            return _gone(broken.why)
        return _gone("it closed the watch")

    async def _take(self, line: bytes) -> _End | None:
        """One message; None: go on."""
        try:
            message = wire.WATCH_MESSAGE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _gone(f"its answer is not etcd's: {error}")
        if message.error is not None:
            return judge_error(message.error)
        result = message.result
        if result is None:
            return _gone("its answer is not etcd's: neither a result nor an error")
        if result.canceled:  # perhaps `created` as well
            return Compacted(result.compact_revision) if result.compact_revision else judge_canceled(result)
        index = result.watch_id - 1
        if not 0 <= index < len(self._prefixes):
            return _gone(f"its answer is not etcd's: nobody asked for watch {result.watch_id}")
        if (end := await self._judge_header(index, result.header)) is not None:
            return end
        if result.created:
            self._created.add(index)
            if len(self._created) == len(self._prefixes):
                self._retried = False
            return None
        self._pause_s = BACKOFF_MIN_S
        if result.events:
            events = wire.events(result, from_revision=self._next[index])
            if events:
                self._next[index] = events[-1].mod_revision + 1
                await self._send.send(Batch(revision=events[-1].mod_revision, events=events))
            return None
        self._ledger.progress_seen = True
        self._next[index] = max(self._next[index], result.header.revision + 1)
        await self._send.send(Batch(revision=min(self._next) - 1))
        return None

    async def _judge_header(self, index: int, header: wire.Header) -> _End | None:
        """Whether the member stands where it must. Only a linearizable read can tell a slow one from a lost past."""
        caller, prefix, seen = self._caller, self._prefixes[index], self._next[index] - 1
        if header.raft_term >= caller.raft_term and header.revision >= seen:
            caller.raft_term = header.raft_term
            return None
        try:
            store = await self._probe(prefix)
        except Denied as denied:
            return denied
        except StoreError as error:
            return _gone(f"it seems to be behind: {error}")
        if store.revision < seen:
            return WentBack(seen=seen, got=store.revision)
        term = caller.raft_term
        if store.raft_term < term:
            caller.raft_term = store.raft_term
            return WentBack(seen=term, got=store.raft_term, what="raft term")
        if header.raft_term < term:
            return _gone(f"its raft term {header.raft_term} is below {term}")
        return None


def _gone(why: str) -> Failure:
    return Failure(verdict=Verdict.ELSEWHERE, why=why)
