"""A real etcd member with faults: a proxy that passes everything through, except what a test tells it not to.

It exists for faults that kills and signals can't make: an error object inside a stream, an answer that gets lost after
the write has landed, a request that lands long after its sender gave up, a member that is sick for some calls only.
One request per connection; watches are cut into lines and sent on, so that lines can be added, changed or cut anew.
"""

from __future__ import annotations

import enum
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc
import httpx2

from llmgw.store.etcd_wire import Lines

WATCH: Final = "/v3/watch"
_GONE: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKEN: Final = re.compile(rb"\r\nauthorization: *([^\r]*)", re.IGNORECASE)


class Act(enum.Enum):
    """What is done with a request instead of passing it on and its answer back."""

    BLACKHOLE = "never delivered, never answered"
    CLOSE = "never delivered, the connection closed without a word"
    ANSWER = "never delivered, answered by the proxy"
    LOSE = "delivered, the answer is lost"
    HOLD = "delivered when the test says so, and then answered"


@dataclass(kw_only=True)
class Rule:
    """One fault. `path` is a beginning, such as `/v3/lease/`; `left` how many requests it still applies to."""

    path: str
    act: Act
    status: int = 200
    body: bytes = b""
    left: int | None = None
    hits: int = 0
    hit: anyio.Event = field(default_factory=anyio.Event)
    released: anyio.Event = field(default_factory=anyio.Event)
    delivered: anyio.Event = field(default_factory=anyio.Event)

    def release(self) -> None:
        """Deliver what is held."""
        self.released.set()


class EtcdProxy:
    """Made by `etcd_proxy`. `url` is what a client is given instead of the member's.

    Attributes:
        requests: the paths asked for so far, in order.
        tokens: the Authorization of each of them, None where there was none.
        on_watch: changes each line of a watch (without its end), or drops it by returning None.
        cut: watches are sent on in pieces of so many bytes; 0 for one line a piece.
    """

    def __init__(self, upstream: str, client: httpx2.AsyncClient) -> None:
        self.upstream = upstream
        self.url = ""
        self.requests: list[str] = []
        self.tokens: list[str | None] = []
        self.on_watch: Callable[[bytes], bytes | None] | None = None
        self.cut = 0
        self._client = client
        self._rules: list[Rule] = []
        self._watches: dict[_Watch, None] = {}
        self._changed = anyio.Event()
        self._thawed = anyio.Event()
        self._thawed.set()

    # --- what a test tells it ---

    @contextmanager
    def fault(
        self, path: str, act: Act, *, status: int = 200, body: bytes = b"", times: int | None = None
    ) -> Iterator[Rule]:
        """While the context lasts, do that with every request (the next `times` ones) whose path begins so."""
        rule = Rule(path=path, act=act, status=status, body=body, left=times)
        self._rules.append(rule)
        try:
            yield rule
        finally:
            self._rules.remove(rule)

    def freeze(self) -> None:
        """As if stopped: connections stay open and are accepted, nothing moves."""
        self._thawed = anyio.Event()

    def thaw(self) -> None:
        """Go on."""
        self._thawed.set()

    def count(self, path: str) -> int:
        """How many requests there were whose path begins so."""
        return sum(1 for seen in self.requests if seen.startswith(path))

    async def say(self, line: bytes) -> None:
        """Put a line into every open watch."""
        for watch in list(self._watches):
            await watch.outbox.send(line)

    def close_watches(self) -> None:
        """Close the connection of every open watch, in the middle of its body."""
        for watch in list(self._watches):
            watch.scope.cancel()

    async def end_watches(self) -> None:
        """End the body of every open watch, as if etcd had nothing more to say."""
        for watch in list(self._watches):
            await watch.outbox.send(None)

    async def watched(self, count: int = 1) -> None:
        """Return once at least `count` watches are open and have been answered."""
        while sum(1 for watch in self._watches if watch.answered) < count:
            await self._changed.wait()

    # --- what it does ---

    def changed(self) -> None:
        """Wake whoever waits in `watched`."""
        self._changed.set()
        self._changed = anyio.Event()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        """One connection, one request."""
        async with stream:
            try:
                await self._serve(stream)
            except _GONE:
                return  # the client gave up, which is its right

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        head, body = await _request(stream)
        await self._thawed.wait()
        path = head.split(b" ", 2)[1].decode()
        token = _TOKEN.search(head)
        self.requests.append(path)
        self.tokens.append(token.group(1).decode() if token else None)
        rule = self._rule(path)
        if rule is not None:
            rule.hits += 1
            rule.hit.set()
            match rule.act:
                case Act.BLACKHOLE:
                    await anyio.sleep_forever()
                case Act.CLOSE:
                    return
                case Act.ANSWER:
                    await stream.send(_answer(rule.status, rule.body))
                    return
                case Act.HOLD:
                    await rule.released.wait()
                case Act.LOSE:
                    pass
        headers = {"Authorization": token.group(1).decode()} if token else {}
        headers |= {"Grpc-Metadata-hasleader": "true", "Connection": "close"}
        try:
            if path == WATCH and rule is None:
                await self._watch(stream, body, headers)
                return
            reply = await self._client.post(self.upstream + path, content=body, headers=headers)
        except httpx2.TransportError:
            return  # closes the connection, as the death of the member does
        if rule is not None:
            rule.delivered.set()
        await self._thawed.wait()
        if rule is not None and rule.act is Act.LOSE:
            await anyio.sleep_forever()
        await stream.send(_answer(reply.status_code, reply.content))

    def _rule(self, path: str) -> Rule | None:
        for rule in self._rules:
            if path.startswith(rule.path) and rule.left != 0:
                if rule.left is not None:
                    rule.left -= 1
                return rule
        return None

    async def _watch(self, stream: anyio.abc.SocketStream, body: bytes, headers: dict[str, str]) -> None:
        async with anyio.create_task_group() as tasks:
            watch = _Watch(tasks.cancel_scope)
            self._watches[watch] = None
            tasks.start_soon(watch.read, self._client, self.upstream + WATCH, body, headers)
            tasks.start_soon(watch.notice_end, stream)
            try:
                await stream.send(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                async for line in watch.outbox_end:
                    await self._thawed.wait()
                    if line is None:
                        await stream.send(b"0\r\n\r\n")
                        break
                    kept = line if self.on_watch is None else self.on_watch(line)
                    if kept is None:
                        continue
                    data = kept + b"\n"
                    step = self.cut or len(data)
                    for start in range(0, len(data), step):
                        piece = data[start : start + step]
                        await stream.send(b"%x\r\n%s\r\n" % (len(piece), piece))
                    watch.answered = True
                    self.changed()
            except _GONE:
                pass  # the client left
            finally:
                del self._watches[watch]
                watch.outbox.close()
                watch.outbox_end.close()
                tasks.cancel_scope.cancel()


class _Watch:
    """One open watch: lines come from etcd, or from a test, and go to the client."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self.scope = scope
        self.answered = False
        self.outbox, self.outbox_end = anyio.create_memory_object_stream[bytes | None](1024)

    async def read(self, client: httpx2.AsyncClient, url: str, body: bytes, headers: dict[str, str]) -> None:
        lines = Lines()
        with self.outbox:
            try:
                async with client.stream("POST", url, content=body, headers=headers) as response:
                    chunks = response.aiter_raw()
                    try:
                        async for chunk in chunks:
                            for line in lines.feed(chunk):
                                await self.outbox.send(line)
                    finally:
                        with anyio.CancelScope() as scope:  # a cancelled read ends httpx2's generators for good
                            scope.cancel()
                            async for _ in chunks:
                                pass
            except (httpx2.TransportError, *_GONE):
                self.scope.cancel()

    async def notice_end(self, stream: anyio.abc.SocketStream) -> None:
        try:
            while True:
                await stream.receive()
        except _GONE:
            self.scope.cancel()


@asynccontextmanager
async def etcd_proxy(upstream: str) -> AsyncIterator[EtcdProxy]:
    """A proxy for the member at `upstream` (plain HTTP), on a free port of 127.0.0.1."""
    async with httpx2.AsyncClient(trust_env=False, timeout=httpx2.Timeout(None, connect=5.0)) as client:
        proxy = EtcdProxy(upstream, client)
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610  # a socket's attribute, no SQL
        proxy.url = f"http://127.0.0.1:{port}"
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, proxy.serve)
            yield proxy
            tasks.cancel_scope.cancel()


async def _request(stream: anyio.abc.SocketStream) -> tuple[bytes, bytes]:
    """Head and body of the one request that comes."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, body = data.split(b"\r\n\r\n", 1)
    length = _LENGTH.search(head)
    while length is not None and len(body) < int(length.group(1)):
        body += await stream.receive()
    return head, body


def _answer(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
