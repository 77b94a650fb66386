"""One client's connection: requests are read, answered one after the other in their order, and slow clients bounded.

Invariant: while a request is being answered the connection is still read, so that a client who leaves is noticed at
once; what it sends meanwhile is kept up to a bound and read afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol, cast

from llmgw.gateway import local, wire
from llmgw.gateway.body import ambiguous, peek, rename
from llmgw.gateway.endpoint import NOWHERE, Endpoint, Local
from llmgw.gateway.exchange import Exchange
from llmgw.gateway.hub import Hub
from llmgw.gateway.metrics import Exposition
from llmgw.gateway.request import Request, RequestParser
from llmgw.gateway.wire import Rejected, Trouble

EARLY_MAX_BYTES: Final = 256 * 2**10
"""What a client may send ahead while its previous request is answered; more closes the connection after that answer."""

IDLE_S: Final = 75.0
"""A connection without a request is closed after this. Source: nginx's keepalive_timeout; clients keep less."""

HEAD_S: Final = 30.0
"""From a request's first byte to the end of its head."""

BODY_QUIET_S: Final = 60.0
"""Longest pause within a request's body. Source: nginx's client_body_timeout."""

LINGER_S: Final = 30.0
LINGER_QUIET_S: Final = 5.0
"""After a refusal the rest of the request is read and dropped for so long, so that the client gets to see the answer
(closing with unread bytes would reset the connection). Source: nginx's lingering_time and lingering_timeout."""


class Work(Protocol):
    """What is being done for a client: an `Exchange`, or a `Scrape`."""

    def cancel(self) -> None:
        """The client left."""
        ...

    def pause(self) -> None:
        """The client does not take what it is sent."""
        ...

    def resume(self) -> None:
        """It takes again."""
        ...

    def sweep(self, now_s: float) -> None:
        """Look at time-outs."""
        ...


class Client(asyncio.Protocol):
    """A connection from a client, to whom the `api` or the `metrics` or both are served.

    `paused`: it does not take what it is sent.
    """

    __slots__ = (
        "_api",
        "_closing",
        "_early",
        "_exposition",
        "_hub",
        "_metrics",
        "_parser",
        "_reading_since_s",
        "_since_s",
        "_taken_s",
        "_transport",
        "_trouble",
        "_unsent_bytes",
        "_work",
        "heard",
        "paused",
        "write",
    )

    def __init__(self, hub: Hub, exposition: Exposition, *, api: bool = True, metrics: bool = True) -> None:
        self._hub = hub
        self._exposition = exposition
        self._api = api
        self._metrics = metrics
        config = hub.config
        self._parser = RequestParser(
            body_max_bytes=config.body_max_bytes, header_max_bytes=config.header_max_bytes, proceed=self._proceed
        )
        self._work: Work | None = None
        self._early = bytearray()
        self._trouble: Trouble | None = None
        self._closing = False
        self.heard = False
        """Whether anything came since the last sweep."""
        self._since_s = hub.clock()
        self._reading_since_s: float | None = None
        self._unsent_bytes = 0
        self._taken_s = self._since_s
        self.paused = False

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, which does not inherit from it
        self.write: Callable[[bytes], None] = self._transport.write
        self._hub.clients.add(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._work is not None:
            self._keep_early(data)
        elif not self._closing:
            try:
                self._parser.feed(data)
            except Rejected as rejected:
                self._trouble = rejected.trouble
            self._turn()

    def eof_received(self) -> bool:
        # Half-closing counts as leaving, as it does with the engines: it looks the same as closing.
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the loop's protocol
        self._leave()
        self._parser.close()
        self._hub.gone(self)

    def pause_writing(self) -> None:
        self.paused = True
        if self._work is not None:
            self._work.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._work is not None:
            self._work.resume()

    # --- called by the work ---

    def finished(self, keep_alive: bool) -> None:
        """The answer is written whole: on to the next request, or close."""
        self._work = None
        if not keep_alive or self._hub.draining:
            self._close()
        elif self._parser.ready or self._early or self._trouble is not None:
            self._hub.loop.call_soon(self._turn)

    def cut(self, *, reset: bool) -> None:
        """The answer can't be finished: close, with a TCP reset where a plain end would look like the answer's."""
        self._work = None
        self._closing = True
        if reset:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    # --- for the process ---

    def abort(self) -> None:
        """Drop the connection now."""
        self._leave()
        self._transport.abort()

    def drain(self) -> None:
        """The process is about to end: close as soon as nothing is under way."""
        if self._work is None and not self._parser.in_message:
            self._close()

    def sweep(self, now_s: float) -> None:
        """Look at all time-outs of this connection."""
        if self._work is not None:
            self._work.sweep(now_s)
        unsent_bytes = self._transport.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes < self._unsent_bytes or (self._work is not None and not self.paused):
            self._taken_s = now_s
        self._unsent_bytes = unsent_bytes
        if now_s - self._taken_s > self._hub.config.write_timeout_s:
            self.abort()
            return
        if self.heard or unsent_bytes or self._work is not None:
            self.heard = False
            self._since_s = now_s
        if not unsent_bytes and self._overdue(now_s):
            self.abort()

    # --- inside ---

    def _overdue(self, now_s: float) -> bool:
        quiet_s = now_s - self._since_s
        if self._closing:
            self._reading_since_s = self._reading_since_s or now_s
            return quiet_s > LINGER_QUIET_S or now_s - self._reading_since_s > LINGER_S
        if not self._parser.in_message or self._work is not None:
            self._reading_since_s = None
            return quiet_s > IDLE_S
        if not self._parser.in_head:
            return quiet_s > BODY_QUIET_S
        self._reading_since_s = self._reading_since_s or now_s
        return now_s - self._reading_since_s > HEAD_S

    def _keep_early(self, data: bytes) -> None:
        if len(self._early) + len(data) <= EARLY_MAX_BYTES:
            self._early += data
        else:
            self._trouble = Trouble(
                status=400, code="too_early", message="too much was sent before the previous request was answered"
            )

    def _turn(self) -> None:
        """Answer what can be answered, in order, until there is work under way or nothing left."""
        ready = self._parser.ready
        while self._work is None and not self._closing:
            if ready:
                self._answer(ready.popleft())
            elif self._trouble is not None:
                self._reject(self._trouble)
            elif self._early:
                data, self._early = bytes(self._early), bytearray()
                self.data_received(data)  # which turns as well
            else:
                return

    def _answer(self, request: Request) -> None:
        endpoint = request.endpoint
        if isinstance(endpoint, Trouble):
            self._refuse(request, endpoint)
        elif endpoint.to_engine and self._api:
            self._forward(request, endpoint)
        elif endpoint.local is Local.METRICS and self._metrics:
            self._work = local.Scrape(self._hub, self, request, self._exposition, head_only=endpoint.head_only)
        elif endpoint.local is Local.HEALTH or (self._api and endpoint.local in {Local.MODELS, Local.MODEL}):
            status, body = local.answer(endpoint, self._hub)
            self._reply(request, status, body, headers=self._hub.notice, head_only=endpoint.head_only)
        else:
            self._refuse(request, NOWHERE)

    def _forward(self, request: Request, endpoint: Endpoint) -> None:
        """Hand the request to an exchange, once it is known to make sense."""
        hub = self._hub
        names = hub.names
        asked = peek(request.body)
        if isinstance(asked, Trouble):
            self._refuse(request, asked)
        elif names is None:
            self._refuse(request, local.no_routes())
        elif (target := names.get(asked.model)) is None:
            self._refuse(request, local.unknown_model(asked.model, names))
        elif target.task is not endpoint.task:
            self._refuse(request, local.wrong_task(asked.model, target, endpoint))
        else:
            if ambiguous(request.body):
                request.body = rename(request.body, asked.model)
            request.stream = asked.stream is True
            self._work = exchange = Exchange(hub, self, request, endpoint.path, asked.model, target)
            exchange.start()

    def _refuse(self, request: Request, trouble: Trouble) -> None:
        self._hub.figures.reject(trouble.status)
        self._reply(request, trouble.status, trouble.body(), headers=trouble.headers() + self._hub.notice)

    def _reply(
        self, request: Request, status: int, body: bytes, *, headers: bytes = b"", head_only: bool = False
    ) -> None:
        keep_alive = request.keep_alive and not self._hub.draining
        self.write(wire.reply(status, body, headers=headers, close=not keep_alive, head_only=head_only))
        if not keep_alive:
            self._close()

    def _reject(self, trouble: Trouble) -> None:
        """Answer and close, but let the client finish what it is sending: it may read only then."""
        self._hub.figures.reject(trouble.status)
        self.write(wire.reply(trouble.status, trouble.body(), headers=trouble.headers(), close=True))
        self._closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _proceed(self) -> None:
        if self._work is None and not self._parser.ready:
            self.write(wire.CONTINUE)

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    def _leave(self) -> None:
        work, self._work = self._work, None
        self._closing = True
        if work is not None:
            work.cancel()
