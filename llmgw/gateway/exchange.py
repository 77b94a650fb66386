"""One request's life: choose a replica, try, try another one while nothing has been sent, hand the answer on, count.

Invariants: until the first byte of a body is there the client has been sent nothing, so another replica can still
answer; from then on nobody else can. An answer that is cut is never presented as complete. Whatever happens, and
whenever the client leaves, the exchange ends once (`_end`), its engine connection is given up within that moment, and
every count it raised is lowered.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from llmgw.core.routing import Target
from llmgw.gateway import metrics, wire
from llmgw.gateway.balance import Group, Member
from llmgw.gateway.body import rename
from llmgw.gateway.request import Request
from llmgw.gateway.upstream import SMALL_BODY_BYTES, Answer, Upstream
from llmgw.gateway.wire import Trouble

if TYPE_CHECKING:
    from llmgw.gateway.hub import Hub
    from llmgw.gateway.server import Client

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 2
"""What a client is told when nothing is ready. A restarted engine with a small model is back about then."""

HARD: Final = frozenset({401, 503})
"""Answers that are never shown, since they say that the replica as such can't serve: 503, it is still loading; 401, it
does not know our key, so what listens there is not what the route speaks of.
"""

SOFT: Final = frozenset({500, 502, 504})
"""Answers that may say so, or may be this request's own doing."""

BUSY: Final = 429
"""Another replica may have room; no fault."""

_NEWLINE: Final = 10


class Exchange:
    """A request that an engine answers. Driven by its client (cancel, pause, resume) and its upstream (a `Taker`).

    `target`: the models that may answer. `tried`: the members that could not. `keep_alive`: what the client is told.
    """

    __slots__ = (
        "_asked",
        "_chunked",
        "_client",
        "_dialling",
        "_figures",
        "_head",
        "_hub",
        "_last",
        "_line_bytes",
        "_member",
        "_path",
        "_quiet_since_s",
        "_request",
        "_sent",
        "_started_s",
        "_status",
        "_stream",
        "_trouble",
        "_unframed",
        "_upstream",
        "_waiting",
        "_why",
        "keep_alive",
        "target",
        "tried",
    )

    def __init__(self, hub: Hub, client: Client, request: Request, path: str, asked: str, target: Target) -> None:
        self._hub = hub
        self._client = client
        self._request = request
        self._path = path
        self._asked = asked
        self._figures = figures = hub.figures.models.get(target.models[0]) or hub.figures.of(target.models[0])
        figures.in_flight += 1
        self._started_s = self._quiet_since_s = hub.clock()
        self._member: Member | None = None
        self._upstream: Upstream | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._waiting: Group | None = None
        self._trouble: Trouble | None = None
        self._why = ""
        self._head = b""
        self._sent = False
        self._status = 0
        self._stream = False
        self._chunked = False
        self._unframed = False
        self._line_bytes = 0
        self._last = b""
        self.keep_alive = request.keep_alive
        self.target = target
        self.tried: list[Member] = []

    # --- choosing ---

    def start(self, *, in_turn: bool = False) -> None:
        """Go to a replica, or wait for one (unless it is `in_turn`, having waited), or say why not."""
        found = self._hub.find(self.target, self.tried, in_turn=in_turn)
        if isinstance(found, Member):
            found.in_flight += 1
            self._member = found
            if self.tried:
                self._figures.retried(self._why)
            upstream = found.take(self._hub.clock(), self._hub.config.upstream_idle_s)
            if upstream is None:
                self._dial(found)
            else:
                self._ask(upstream)
        elif isinstance(found, Group):
            self._wait(found)
        else:
            self._refuse(self._trouble or not_ready(self.target.models[0]))

    def _wait(self, group: Group) -> None:
        trouble = group.queue.join(self, self._hub.clock())
        if trouble is not None:
            self._refuse(trouble)
        else:
            self._waiting = group

    def admitted(self) -> None:
        """It is this exchange's turn; it has left the queue."""
        self._waiting = None
        self.start(in_turn=True)

    def expired(self, trouble: Trouble) -> None:
        self._waiting = None
        self._refuse(trouble)

    def _dial(self, member: Member) -> None:
        self._dialling = self._hub.loop.create_task(self._connect(member))

    async def _connect(self, member: Member) -> None:
        try:
            upstream = await self._hub.connect(member)
        except OSError as error:
            self._dialling = None
            self._hub.fault(member, f"can't connect: {str(error) or 'timed out'}", hard=True)
            self._trouble = not_ready(member.group.model)
            self._elsewhere("connect")
        else:
            self._dialling = None
            self._ask(upstream)

    def _ask(self, upstream: Upstream) -> None:
        self._upstream = upstream
        member = upstream.member
        request = self._request
        body = request.body
        if member.group.model != self._asked:
            body = rename(body, member.group.model)
        head = b"%b%d\r\n%b\r\n" % (member.heads[self._path], len(body), request.passed)
        if len(body) <= SMALL_BODY_BYTES:
            upstream.ask(self, head + body)
        else:
            upstream.ask_large(self, head, body)

    def _elsewhere(self, why: str) -> None:
        """The present try has failed, and nothing was sent to the client: the next one."""
        member = self._member
        assert member is not None  # noqa: S101  # a try has a member
        self._member = self._upstream = None
        self._status, self._head = 0, b""
        self._stream = self._chunked = self._unframed = False
        self.tried.append(member)
        self._why = why
        self._hub.release(member)
        self.start()

    # --- the answer (Taker) ---

    def answered(self, answer: Answer) -> bool:
        status = answer.status
        if status >= 400 and self._better_elsewhere(status):
            return False
        self._status = status
        self._stream = answer.stream
        head = answer.head
        if not answer.has_length and status not in wire.BODILESS:
            if self._request.http10:
                self._unframed = True
            else:
                self._chunked = True
                head += b"transfer-encoding: chunked\r\n"
        self._head = head + (self._hub.head_end if self.keep_alive else self._hub.last_head_end)
        return True

    def _better_elsewhere(self, status: int) -> bool:
        """Note what an error says of the replica; whether it was given up because another may do better."""
        member, upstream = self._member, self._upstream
        assert member is not None  # noqa: S101  # it was asked
        assert upstream is not None  # noqa: S101  # as above
        if status in HARD or status in SOFT:
            self._hub.fault(member, f"answered {status}", hard=status in HARD)
        elif status != BUSY:
            return False
        if status not in HARD and not isinstance(self._hub.find(self.target, [*self.tried, member]), Member):
            return False
        upstream.close()
        self._trouble = not_ready(member.group.model)
        self._elsewhere(str(status))
        return True

    def body(self, data: bytes) -> None:
        if self._stream:
            self._last = data
            if data[-1] == _NEWLINE:
                self._line_bytes = 0
            elif not self._line_fits(data):
                return
        if self._chunked:
            data = wire.chunk(data)
        if self._sent:
            self._client.write(data)
            return
        self._sent = True
        self._client.write(self._head + data)
        if self._stream:
            self._figures.first_byte.observe(self._hub.clock() - self._started_s)

    def _line_fits(self, data: bytes) -> bool:
        """Bound the lines of a stream: one without end must not grow in the client's memory, or ours."""
        begun = data.rfind(b"\n") + 1
        self._line_bytes = len(data) - begun if begun else self._line_bytes + len(data)
        limit = self._hub.config.line_max_bytes
        if self._line_bytes > limit:
            self._break_off(f"a line of the stream is over {limit} bytes (line_max_bytes)")
            return False
        return True

    def whole(self) -> bool:
        return not self._stream or b"[DONE]" in self._last

    def done(self) -> None:
        if not self._sent:
            self._client.write(self._head + (b"0\r\n\r\n" if self._chunked else b""))
        elif self._chunked:
            self._client.write(b"0\r\n\r\n")
        self._end(None)

    def broke(self, why: str) -> None:
        upstream, member = self._upstream, self._member
        assert member is not None  # noqa: S101  # it was asked
        assert upstream is not None  # noqa: S101  # as above
        if upstream.reused and upstream.silent:
            # The engine closed an idle connection in the moment of its reuse: no fault, the same replica again.
            self._upstream = None
            self._dial(member)
            return
        self._hub.fault(member, why, hard=False)
        if self._sent:
            self._cut(why)
        else:
            self._trouble = _lost(member.group.model)
            self._elsewhere("connection")

    # --- ends ---

    def _break_off(self, why: str, *, status: int = 502, code: str = "upstream_error") -> None:
        """The engine goes wrong: give its answer up and tell the client."""
        upstream = self._upstream
        assert upstream is not None  # noqa: S101  # it was asked
        upstream.close()
        self._hub.fault(upstream.member, why, hard=False)
        if self._sent:
            self._cut(why)
        else:
            self._refuse(Trouble(status=status, code=code, message=f"no usable answer from the engine: {why}"))

    def _cut(self, why: str) -> None:
        """The answer has begun and can't be finished: one error event where there are events, and no proper end."""
        log.warning("answer cut", extra={"fields": self._story(why)})
        if self._stream:
            event = wire.error_event(
                Trouble(status=502, code="upstream_disconnected", message="the engine broke off in mid-answer"),
                after=self._last,
            )
            self._client.write(wire.chunk(event) if self._chunked else event)
        # Where only closing tells the end, a body that is no event stream must not look whole.
        self._end(metrics.CUT, reset=self._unframed and not self._stream)

    def _refuse(self, trouble: Trouble) -> None:
        """The client gets an error of ours instead of an answer."""
        self._status = trouble.status
        headers = trouble.headers() + self._hub.notice
        self._client.write(wire.reply(trouble.status, trouble.body(), headers=headers, close=not self.keep_alive))
        self._end(None)

    def cancel(self) -> None:
        """The client left."""
        log.debug("client left", extra={"fields": self._story("client left")})
        if self._waiting is not None:
            self._waiting.queue.leave(self)
        if self._dialling is not None:
            self._dialling.cancel()
        upstream, member = self._upstream, self._member
        if upstream is not None:
            upstream.close()
            if member is not None and not self._status and not self._request.stream:
                self._member = None
                self._hub.hold(member)
        self._end(metrics.CLIENT_CLOSED)

    def _end(self, outcome: str | None, *, reset: bool = False) -> None:
        """It is over, once: count it, give the member back, and hand the connection back to the client."""
        figures = self._figures
        figures.in_flight -= 1
        figures.finished(outcome or self._status, self._hub.clock() - self._started_s)
        if self._stream and self._upstream is not None:
            figures.chunks += self._upstream.answer.chunks
        if self.tried and outcome is None:
            log.info("answered after retries", extra={"fields": self._story(self._why)})
        member = self._member
        if member is not None:
            if member.faults and outcome is None and self._status < 500:
                self._hub.healthy(member)
            self._hub.release(member)
        if outcome is None:
            self._client.finished(self.keep_alive)
        elif outcome is metrics.CUT:
            self._client.cut(reset=reset)

    def _story(self, what: str) -> dict[str, object]:
        member, upstream = self._member, self._upstream
        return {
            "model": self.target.models[0],
            "replica": None if member is None else member.route.replica,
            "attempts": len(self.tried) + (member is not None),
            "status": self._status or None,
            "chunks": 0 if upstream is None else upstream.answer.chunks,
            "seconds": round(self._hub.clock() - self._started_s, 3),
            "why": what,
        }

    # --- time and pressure ---

    def pause(self) -> None:
        """The client does not take what it is sent: let the engine wait."""
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        """The client takes again."""
        if self._upstream is not None:
            self._upstream.resume()
            self._quiet_since_s = self._hub.clock()

    def sweep(self, now_s: float) -> None:
        """Now and then: an engine that has been silent for too long is given up."""
        upstream = self._upstream
        limit_s = self._hub.config.first_byte_timeout_s
        if upstream is None or upstream.heard or self._client.paused:
            self._quiet_since_s = now_s
            if upstream is not None:
                upstream.heard = False
        elif now_s - self._quiet_since_s > limit_s:
            why = f"it was silent for {limit_s:g} s (first_byte_timeout_s)"
            self._break_off(why, status=504, code="upstream_timeout")


def not_ready(model: str) -> Trouble:
    """There is such a model, and nobody to answer for it."""
    return Trouble(
        status=503,
        code="model_not_ready",
        message=f"no replica of {model!r} is ready",
        retry_after_s=RETRY_AFTER_S,
    )


def _lost(model: str) -> Trouble:
    return Trouble(
        status=502,
        code="upstream_error",
        message=f"the connection to the replica of {model!r} was lost before it answered",
        retry_after_s=RETRY_AFTER_S,
    )
