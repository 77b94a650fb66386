"""One call to etcd as a whole: which member, with which token, how often, and what is told when it fails.

Below it lies the `Transport` seam, which carries one HTTP request to one member; above it the store and the watch.
Invariants: a call ends within its dead-line; a write goes out a second time only after the first was certainly refused;
a lost login costs one new login, never a loop; a member that failed is left alone for a while, whatever it failed at.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from llmgw.core.ids import Secret
from llmgw.errors import Denied, NotApplied, OutcomeUnknown, StoreError, Unavailable
from llmgw.store import etcd_wire as wire
from llmgw.store.etcd_verdict import Failure, Verdict, judge

AVOID_S: Final = 30.0
"""How long a member that failed is left alone while others are there: long enough that a member which answers only
half of the calls is not chosen again and again, short enough to come back to a cluster that was restarted in turn."""

LOGIN_JITTER_S: Final = 0.3
"""Logins are spread over this long. Source: one costs etcd 60 ms of CPU (bcrypt, measured); must fit into a call."""

ROUND_PAUSE_S: Final = 0.1
"""Pause after every member refused in turn; an election takes about a second, so there are several rounds in a call."""

ATTEMPT_MIN_S: Final = 0.05
"""With less time left than this nothing more is sent."""

T = TypeVar("T")


class Lane(enum.Enum):
    """Which connections and threads carry a call. Keepalives have their own: slow calls must not cost a lease."""

    CALL = "call"
    KEEPALIVE = "keepalive"


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a member answered, good or bad."""

    status: int
    body: bytes


class Broken(Exception):
    """No answer. `sent`: the request may have reached the member. `empty`: it closed the connection without a word."""

    def __init__(self, why: str, *, sent: bool, empty: bool = False) -> None:
        self.why, self.sent, self.empty = why, sent, empty
        super().__init__(why)


class Stream(Protocol):
    """An answer that goes on. Both ways of reading raise Broken."""

    @property
    def status(self) -> int: ...

    async def receive(self) -> bytes:
        """The next piece of the body; empty once the member ended it."""
        ...

    async def read(self) -> bytes:
        """All of it, for a short one."""
        ...


class Transport(Protocol):
    """One request to one member. `member` is a URL without a path, `path` comes from `etcd_wire`."""

    async def call(
        self,
        member: str,
        path: str,
        body: bytes,
        *,
        token: Secret | None,
        lane: Lane,
        connect_s: float,
        read_s: float,
        leave: bool,
    ) -> Reply:
        """Raises Broken. A cancelled call is waited for, unless `leave`: a write left behind could land any time."""
        ...

    def stream(
        self, member: str, path: str, body: bytes, *, token: Secret | None
    ) -> AbstractAsyncContextManager[Stream]:
        """Entering and reading raise Broken. It has no time-outs of its own but for connecting and sending."""
        ...


class Members:
    """Which endpoint to talk to. Sticky: it changes only when the one in use fails."""

    def __init__(self, urls: Sequence[str], *, first: int) -> None:
        self.urls = tuple(urls)
        self.rotations = 0
        self._current = first % len(urls)
        self._avoid_until_s = [0.0] * len(urls)

    @property
    def current(self) -> str:
        """The one in use."""
        return self.urls[self._current]

    def pick(self, now_s: float) -> str:
        """The one in use if it did not fail of late, else the next such one, else the one whose failure is oldest."""
        count = len(self.urls)
        ring = [(self._current + step) % count for step in range(count)]
        fine = (index for index in ring if self._avoid_until_s[index] <= now_s)
        chosen = next(fine, None)
        if chosen is None:
            chosen = min(ring, key=lambda index: self._avoid_until_s[index])
        if chosen != self._current:
            self._current = chosen
            self.rotations += 1
        return self.current

    def failed(self, url: str, now_s: float) -> None:
        """Leave `url` alone for a while."""
        self._avoid_until_s[self.urls.index(url)] = now_s + AVOID_S


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """Who to be. `password` reads the file afresh, so that a changed password needs no restart; raises Denied."""

    user: str
    password: Callable[[], Awaitable[Secret]]


class Caller:
    """Carries calls through to whichever member answers them."""

    def __init__(
        self,
        transport: Transport,
        members: Members,
        *,
        login: Login | None,
        connect_s: float,
        read_s: float,
        jitter: Callable[[], float],
    ) -> None:
        self.transport = transport
        self.members = members
        self.connect_s, self.read_s = connect_s, read_s
        self.jitter = jitter
        self.calls = self.errors = self.logins = 0
        self.raft_term = 0
        """The highest one seen."""
        self._login = login
        self._login_lock = anyio.Lock()
        self._token: Secret | None = None
        self._auth_off = False

    async def call(
        self, path: str, body: bytes, decoder: msgspec.json.Decoder[T], *, again: bool, lane: Lane = Lane.CALL
    ) -> T:
        """One call, within connect + read time-out. `again`: it does no harm to send it twice (reads, keepalives).

        Raises:
            Rejected: the store answers no, and what that means depends on what was asked.
            Denied, NotApplied, OutcomeUnknown, Unavailable: as the port says; `again` decides between the middle ones
                and the last.
        """
        self.calls += 1
        try:
            return await self._call(path, body, decoder, again=again, lane=lane)
        except StoreError:
            self.errors += 1
            raise

    async def _call(self, path: str, body: bytes, decoder: msgspec.json.Decoder[T], *, again: bool, lane: Lane) -> T:
        deadline_s = anyio.current_time() + self.connect_s + self.read_s
        least_s = ATTEMPT_MIN_S if again else self.read_s / 4  # a write that hardly can succeed is better not begun
        reasons: dict[str, str] = {}
        logged_in = False
        while deadline_s - anyio.current_time() > least_s:
            member = self.members.pick(anyio.current_time())
            answer = await self._attempt(member, path, body, decoder, again=again, lane=lane, deadline_s=deadline_s)
            if not isinstance(answer, Failure):
                return answer
            await anyio.lowlevel.checkpoint_if_cancelled()  # a write was shielded; whoever left wants no error any more
            match answer.verdict:
                case Verdict.LOGIN if self._login is not None and not logged_in:
                    logged_in = True
                    continue
                case Verdict.LOGIN | Verdict.DENIED | Verdict.AUTH_OFF:
                    raise Denied(self.denial(answer))
                case Verdict.LEASE_GONE | Verdict.COMPACTED | Verdict.TOO_LARGE:
                    raise Rejected(answer)
                case Verdict.NOWHERE:
                    raise _undone(again, f"{member}: {answer.why}")
                case Verdict.UNCLEAR | Verdict.ELSEWHERE:
                    self.members.failed(member, anyio.current_time())
                    if answer.verdict is Verdict.UNCLEAR and not again:
                        raise OutcomeUnknown(f"{member}: {answer.why}")
            await self._pause(reasons, member, answer.why)
        told = "; ".join(f"{member}: {why}" for member, why in reasons.items()) or "the dead-line was spent"
        raise _undone(again, f"no answer from etcd within {self.connect_s + self.read_s:g} s ({told})")

    async def _pause(self, reasons: dict[str, str], member: str, why: str) -> None:
        """Note why `member` failed; wait a little where all of them have."""
        all_failed = member in reasons or len(reasons) + 1 == len(self.members.urls)
        reasons.setdefault(member, why)  # the first says most; later ones have less time
        if all_failed:
            await anyio.sleep(ROUND_PAUSE_S * (1 + self.jitter()))

    async def _attempt(
        self,
        member: str,
        path: str,
        body: bytes,
        decoder: msgspec.json.Decoder[T],
        *,
        again: bool,
        lane: Lane,
        deadline_s: float,
    ) -> T | Failure:
        """One request to one member, after a login where one is needed."""
        with anyio.CancelScope(deadline=deadline_s) as scope:
            failure = await self.log_in(member, lane=lane)
            if failure is not None:
                return failure
        left_s = deadline_s - anyio.current_time()
        if scope.cancelled_caught or left_s <= 0:
            return Failure(verdict=Verdict.ELSEWHERE, why="no answer to a login")
        read_s = min(self.read_s, left_s)
        if again and len(self.members.urls) > 1:
            read_s = min(read_s, left_s * 2 / 3)  # something must be left for another member
        token = self._token
        try:
            reply = await self.transport.call(
                member,
                path,
                body,
                token=token,
                lane=lane,
                connect_s=min(self.connect_s, left_s),
                read_s=read_s,
                leave=again,
            )
        except Broken as broken:
            if broken.empty:
                self.forget(token)  # some releases of etcd answer a lost login so
            return Failure(verdict=Verdict.UNCLEAR if broken.sent else Verdict.ELSEWHERE, why=broken.why)
        answer = _decoded(reply, decoder)
        if isinstance(answer, Failure) and answer.verdict is Verdict.LOGIN:
            self.forget(token)
        return answer

    # --- who we are ---

    @property
    def token(self) -> Secret | None:
        """What to send as Authorization, after `log_in`; None for nothing."""
        return self._token

    @property
    def has_login(self) -> bool:
        """Whether there is anybody to log in as."""
        return self._login is not None

    def forget(self, token: Secret | None) -> None:
        """`token` is not good any more; None: etcd asked for one where none was sent."""
        if token is self._token:
            self._token, self._auth_off = None, False

    async def log_in(self, member: str, *, lane: Lane = Lane.CALL) -> Failure | None:
        """See to it that there is a token, if one is needed; returns why there is none. Raises: Denied."""
        if self._login is None or self._logged_in():
            return None
        async with self._login_lock:
            if self._logged_in():
                return None  # somebody else was faster
            await anyio.sleep(self.jitter() * LOGIN_JITTER_S)
            password = await self._login.password()
            try:
                reply = await self.transport.call(
                    member,
                    wire.AUTHENTICATE,
                    wire.authenticate_request(self._login.user, password.reveal()),
                    token=None,  # a stale token here is an error of its own
                    lane=lane,
                    connect_s=self.connect_s,
                    read_s=self.read_s,
                    leave=True,
                )
            except Broken as broken:
                return Failure(verdict=Verdict.ELSEWHERE, why=broken.why)
            answer = _decoded(reply, wire.AUTHENTICATE_REPLY)
            if not isinstance(answer, Failure):
                self._token = Secret(answer.token)
                self.logins += 1
                return None
            if answer.verdict is Verdict.AUTH_OFF:
                self._auth_off = True
                return None
            if answer.verdict is Verdict.UNCLEAR:
                return Failure(verdict=Verdict.ELSEWHERE, why=answer.why)  # only the login is unclear, and it may be
            return answer

    def _logged_in(self) -> bool:
        return self._token is not None or self._auth_off

    def denial(self, failure: Failure) -> str:
        """Why etcd says no, for the person who has to change something."""
        if self._login is None and failure.verdict is Verdict.LOGIN:
            return f"etcd wants a login ({failure.why}): set etcd.user and etcd.password_file"
        who = "etcd" if self._login is None else f"etcd, to user {self._login.user!r}"
        return f"{who}: {failure.why}"


class Rejected(StoreError):
    """Internal to the adapter: a refusal whose meaning depends on the call; the store makes it one of the port's."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.why)


def _undone(again: bool, why: str) -> Unavailable:
    return Unavailable(why) if again else NotApplied(why)


def _decoded(reply: Reply, decoder: msgspec.json.Decoder[T]) -> T | Failure:
    """The answer; an error that came with status 200, as in the stream of one that a keepalive is, counts as one."""
    if reply.status != 200 or reply.body.startswith(b'{"error":'):
        return judge(reply.status, reply.body)
    try:
        return decoder.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Failure(verdict=Verdict.UNCLEAR, why=f"its answer is not etcd's: {error}")
