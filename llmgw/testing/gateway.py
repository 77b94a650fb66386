"""A gateway in the test's own loop, with engines and raw clients around it. asyncio, as the gateway is."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from typing import Any, Self, TypeVar

import msgspec

from llmgw.config import GatewayConfig
from llmgw.core.catalog import Task
from llmgw.core.ids import Secret
from llmgw.core.routing import Route, RouteTable, Target
from llmgw.gateway.hub import Hub
from llmgw.gateway.metrics import Exposition, Figures
from llmgw.gateway.server import Client
from llmgw.testing.stub_engine import WITHIN_S, Act, StubEngine, stub_engine

T = TypeVar("T")

FILL = 4
"""Connections that fill the queue of a socket with backlog 0. Source: tried on Linux 6; two are enough."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One response as it came. `whole`: its framing said that it ended."""

    status: int
    headers: dict[bytes, bytes]
    raw_headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    whole: bool

    @property
    def error(self) -> dict[str, Any]:
        """The error object that it must be."""
        found: dict[str, Any] = msgspec.json.decode(self.body)["error"]
        return found


class Wire:
    """A raw client: what is sent is exactly what a test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write it all."""
        self.writer.write(data)
        await self.writer.drain()

    def leave(self, *, reset: bool = False) -> None:
        """Close; with a TCP reset if asked."""
        if reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()

    async def head(self) -> tuple[int, tuple[tuple[bytes, bytes], ...]]:
        """Status and headers of the next response."""
        text = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        lines = text[:-4].split(b"\r\n")
        pairs = (line.partition(b":") for line in lines[1:])
        return int(lines[0].split()[1]), tuple((name.lower(), value.strip()) for name, _, value in pairs)

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end."""
        size = int((await asyncio.wait_for(self.reader.readuntil(b"\r\n"), WITHIN_S))[:-2], 16)
        return (await asyncio.wait_for(self.reader.readexactly(size + 2), WITHIN_S))[:-2]

    async def answer(self, *, head_only: bool = False) -> Answer:
        """The next response, as far as it goes."""
        status, raw = await self.head()
        headers = dict(raw)
        body, whole = bytearray(), True
        try:
            if head_only or status in {100, 204, 304}:
                pass
            elif b"content-length" in headers:
                size = int(headers[b"content-length"])
                while len(body) < size:
                    piece = await asyncio.wait_for(self.reader.read(size - len(body)), WITHIN_S)
                    if not piece:
                        whole = False
                        break
                    body += piece
            elif headers.get(b"transfer-encoding") == b"chunked":
                while piece := await self.chunk():
                    body += piece
            else:
                body += await asyncio.wait_for(self.reader.read(), WITHIN_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            whole = False
        return Answer(status=status, headers=headers, raw_headers=raw, body=bytes(body), whole=whole)

    async def closed(self) -> bytes:
        """What still comes until the gateway closes."""
        return await asyncio.wait_for(self.reader.read(), WITHIN_S)


@contextmanager
def blackhole() -> Iterator[int]:
    """A port that answers no connection at all: it listens, and its queue is full, so what comes is dropped."""
    with socket.socket() as listening, ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(FILL):
            filler = waiting.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address[1]


def chat(*, model: str = "m", stream: bool | None = None, **more: Any) -> bytes:
    """The body of a chat request."""
    fields: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "say hello"}], **more}
    if stream is not None:
        fields["stream"] = stream
    return msgspec.json.encode(fields)


def request(
    body: bytes = b"",
    *,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    headers: Sequence[str] = (),
    version: str = "1.1",
) -> bytes:
    """A whole request, framed by its length."""
    lines = [f"{method} {path} HTTP/{version}", "Host: gateway", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Rig:
    """A gateway, its table and its engines. Engines are made by `engine`, put into the table by `route`."""

    def __init__(self, stack: AsyncExitStack, config: GatewayConfig) -> None:
        self._stack = stack
        self.config = config
        self.hub = Hub(config, Figures(), loop=asyncio.get_running_loop())
        self.exposition = Exposition(self.hub.figures, self.hub.gauges)
        self.port = 0
        self.names: dict[str, Target] = {}
        self.routes: dict[str, tuple[Route, ...]] = {}
        self._server: asyncio.AbstractServer | None = None
        self._wires: list[Wire] = []

    async def start(self) -> Self:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Client(self.hub, self.exposition), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.hub.start()
        return self

    async def stop(self) -> None:
        """End everything, and see that nothing is left."""
        assert self._server is not None
        self._server.close()
        for wire in self._wires:
            wire.writer.transport.abort()
        self.hub.stop()
        await asyncio.wait_for(self.hub.wait_empty(), WITHIN_S)

    async def engine(self, *script: Act, key: str = "k" * 64, port: int = 0) -> StubEngine:
        """A new engine."""
        return await self.hold(stub_engine(key=key, script=script, port=port))

    async def hold(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter `context` for the rest of the test, in a task of its own, so that task groups may end in any order."""
        entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        leave = asyncio.Event()

        async def run() -> None:
            async with context as value:
                entered.set_result(value)
                await leave.wait()

        task = asyncio.create_task(run())

        async def end() -> None:
            leave.set()
            await asyncio.wait_for(task, WITHIN_S)

        await asyncio.wait((entered, task), return_when=asyncio.FIRST_COMPLETED)
        self._stack.push_async_callback(end)
        if task.done():
            await task
        return await entered

    def route(
        self,
        *ports: int,
        model: str = "m",
        key: str = "k" * 64,
        fallbacks: Sequence[str] = (),
        task: Task = Task.GENERATE,
        engine: str = "llama.cpp",
        incarnation: str = "1",
    ) -> None:
        """Put `model` into the table, with an engine on each of `ports`; it takes effect at once."""
        self.names[model] = Target(models=(model, *fallbacks), task=task)
        self.routes[model] = tuple(
            Route(
                replica=f"{model}-{n}",
                model=model,
                engine=engine,
                incarnation=incarnation,
                address="127.0.0.1",
                port=port,
                key=Secret(key),
            )
            for n, port in enumerate(ports)
        )
        self.swap()

    def swap(self) -> None:
        """Put the present names and routes in force."""
        routes = {model: found for model, found in self.routes.items() if found}
        self.hub.swap(RouteTable(names=dict(self.names), routes=routes))

    async def connect(self, port: int | None = None) -> Wire:
        """A new client, of this gateway or of one in another process."""
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port if port is None else port))
        self._wires.append(wire)
        return wire

    async def ask(self, data: bytes | None = None, *, port: int | None = None) -> Answer:
        """One request on a connection of its own."""
        wire = await self.connect(port)
        await wire.send(request(chat()) if data is None else data)
        answer = await wire.answer()
        wire.leave()
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds, with a dead-line. The loop runs in between."""
        async with asyncio.timeout(WITHIN_S):
            # What it looks at spans sockets and processes: nothing there could set an event.
            while not condition():  # noqa: ASYNC110  # as said
                await asyncio.sleep(0.005)

    def counts(self, model: str = "m") -> dict[str, int]:
        """Finished requests of `model`, by outcome."""
        return {str(outcome): count for outcome, count in self.hub.figures.of(model).requests.items()}

    def settled(self) -> bool:
        """Whether every count that must return to zero has."""
        members = [member for group in self.hub.groups.values() for member in group.members]
        return (
            all(each.in_flight == 0 for each in self.hub.figures.models.values())
            and all(member.in_flight == 0 == member.held for member in members)
            and not any(group.queue.waiting for group in self.hub.groups.values())
        )
