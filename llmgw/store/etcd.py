"""The store on etcd, through etcd's JSON gateway.

Unary calls go through etcd3gw's client, of which only the parts that hold are used (its watch and lock hang or lie, see
the tests); they run on threads of their own. The watch is ours (`etcd_watch`). What may be assumed after a failure is
decided in `etcd_call` and `etcd_verdict`; this module only carries bytes and speaks the port's language.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import requests
from etcd3gw import Etcd3Client
from requests.adapters import HTTPAdapter

from llmgw.config import EtcdConfig
from llmgw.core.ids import Secret
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Compacted, LeaseLost, TooLarge, Unavailable
from llmgw.store import etcd_wire as wire
from llmgw.store import keys
from llmgw.store.etcd_call import Broken, Caller, Lane, Members, Rejected, Reply, Stream
from llmgw.store.etcd_endpoint import login, tls_context
from llmgw.store.etcd_verdict import Verdict
from llmgw.store.etcd_watch import Ledger, Watch
from llmgw.store.limits import check_key, check_txn, writes
from llmgw.store.port import (
    REQUEST_BYTES_MAX,
    Batch,
    Compare,
    KeyValue,
    Lease,
    Listing,
    Operation,
    PutOp,
    Store,
    StoreStats,
    TxnResult,
)

PAGE_KEYS: Final = 1000
"""Keys in one page of a listing. Source: 10,000 keys of 1 KiB took no longer so than in one piece (measured)."""

API_PATH: Final = "/v3/"
"""Since 3.4, and the only one since 3.5. Source: measured on 3.4.23; etcd's upgrade notes."""

HEADERS: Final = {
    # A member without a leader refuses at once, and ends its watches, instead of leaving both to hang.
    "Grpc-Metadata-hasleader": "true",
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",
}

THREADS: Final = {Lane.CALL: 16, Lane.KEEPALIVE: 4}
"""Calls at once on each lane. Source: etcd3gw's throughput is flat from 8 threads on (measured)."""

THREAD_SLACK_S: Final = 0.25
"""How much later than its own time-outs a thread is given up: they hold for each read, this for the whole answer."""

WAIT_EVERY_S: Final = 3.0
"""Pause between two looks for a store that is not there at start."""

SYSTEM_JITTER: Final = secrets.SystemRandom().random
"""From the operating system's randomness."""

META: Final = keys.key(Ref(Kind.META))
"""A key that every role may read."""


class GatewayClient(Etcd3Client):
    """etcd3gw's client, told by each call which member to ask, as whom and how long. Thread-safe as its session is.

    `trust_env` is off: REQUESTS_CA_BUNDLE would silently win over our own authority, and proxies and .netrc over us.
    """

    def __init__(self, config: EtcdConfig, *, connections: int) -> None:
        session = requests.Session()
        session.trust_env = False
        session.verify = config.ca or True
        if config.cert is not None and config.key is not None:
            session.cert = (config.cert, config.key)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=connections, max_retries=0))
        session.headers.update(HEADERS)
        self._timeout = (config.connect_timeout_s, config.read_timeout_s)
        super().__init__(api_path=API_PATH, session=session)

    def get_url(self, path: str) -> str:
        """Without the member, which `post` adds."""
        return API_PATH + path.lstrip("/")

    def post(
        self,
        url: str,
        *args: Any,
        json: Any = None,
        member: str = "",
        token: Secret | None = None,
        timeout: tuple[float, float] | None = None,
        **kwargs: Any,
    ) -> Reply:
        """One request, whatever its answer. `timeout`: for connecting, and for each read. Raises Broken."""
        timeout = timeout or self._timeout
        headers = {} if token is None else {"Authorization": token.reveal()}
        with _requests_errors(member, timeout):
            response = self.session.post(  # type: ignore[misc]  # `args` are etcd3gw's business, we pass none
                (member or self.base_url) + url,
                *args,
                json=json,
                timeout=timeout,
                headers=headers,
                allow_redirects=False,
                **kwargs,
            )
        return Reply(status=response.status_code, body=response.content)


@contextmanager
def _requests_errors(member: str, timeout: tuple[float, float]) -> Iterator[None]:
    """Requests' errors as ours. `sent` unless it is certain that nothing was."""
    try:
        yield
    except requests.exceptions.ConnectTimeout as error:
        raise Broken(f"no connection within {timeout[0]:.3g} s", sent=False) from error
    except requests.exceptions.Timeout as error:
        raise Broken(f"no answer within {timeout[1]:.3g} s", sent=True) from error
    except OSError as error:  # RequestException is one; a vanished certificate file is a plain one
        chain = list(_chain(error))
        names = {type(link).__name__ for link in chain}
        if "RemoteDisconnected" in names:
            hint = " (does it want https://?)" if member.startswith("http://") else ""
            raise Broken(f"it closed the connection without an answer{hint}", sent=True, empty=True) from error
        why = next(
            (link.strerror for link in reversed(chain) if isinstance(link, OSError) and link.strerror), str(error)
        )
        unsent = not names.isdisjoint({"NewConnectionError", "NameResolutionError", "SSLCertVerificationError"})
        raise Broken(why, sent=not unsent) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and everything it was made from; requests and urllib3 keep it in three different places."""
    todo: list[object] = [error]
    seen: set[int] = set()
    while todo:
        link = todo.pop()
        if not isinstance(link, BaseException) or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [link.__cause__, link.__context__, getattr(link, "reason", None), *link.args]


@contextmanager
def _httpx_errors() -> Iterator[None]:
    """httpx2's errors as ours; a stream only reads, so whether it was sent does not matter."""
    try:
        yield
    except httpx2.TransportError as error:
        raise Broken(str(error) or type(error).__name__, sent=True) from error


class _HttpxStream:
    """Implements `Stream`."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self._chunks = response.aiter_raw()

    @property
    def status(self) -> int:
        return self._response.status_code

    async def receive(self) -> bytes:
        with _httpx_errors():
            return await anext(self._chunks, b"")

    async def read(self) -> bytes:
        with _httpx_errors():
            return b"".join([chunk async for chunk in self._chunks])

    async def finish(self) -> None:
        """A cancelled read ends httpx2's generators; left to the collector they would warn on trio."""
        with _httpx_errors(), anyio.CancelScope() as scope:
            scope.cancel()
            async for _ in self._chunks:
                pass


class GatewayTransport:
    """Implements `Transport`: unary calls by etcd3gw on threads, streams by httpx2."""

    def __init__(self, config: EtcdConfig, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._clients = {lane: GatewayClient(config, connections=count) for lane, count in THREADS.items()}
        self._threads = {lane: anyio.CapacityLimiter(count) for lane, count in THREADS.items()}

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
        client = self._clients[lane]
        post = partial(
            client.post, client.get_url(path), data=body, member=member, token=token, timeout=(connect_s, read_s)
        )
        with anyio.move_on_after(connect_s + read_s + THREAD_SLACK_S, shield=not leave):
            return await anyio.to_thread.run_sync(post, limiter=self._threads[lane], abandon_on_cancel=True)
        raise Broken(f"no whole answer within {connect_s + read_s:.3g} s", sent=True)

    @asynccontextmanager
    async def stream(self, member: str, path: str, body: bytes, *, token: Secret | None) -> AsyncIterator[Stream]:
        headers = HEADERS if token is None else {**HEADERS, "Authorization": token.reveal()}
        url = member + API_PATH + path.lstrip("/")
        with _httpx_errors():
            async with self._http.stream("POST", url, content=body, headers=headers) as response:
                stream = _HttpxStream(response)
                try:
                    yield stream
                finally:
                    await stream.finish()

    def close(self) -> None:
        """Let go of the threads' connections."""
        for client in self._clients.values():
            client.session.close()


class EtcdStore:
    """Implements `llmgw.store.port.Store`. Made by `open_etcd`."""

    def __init__(self, caller: Caller, *, silence_s: float) -> None:
        self._caller = caller
        self._silence_s = silence_s
        self._ledger = Ledger()

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        reply = await self._range(wire.range_request(key, prefix=False))
        return wire.key_value(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefixes: Sequence[str]) -> Listing:
        return await self.list_at(prefixes, revision=0)

    async def list_at(self, prefixes: Sequence[str], *, revision: int) -> Listing:
        """`list` as of an earlier revision (0: now), for people who look back; not part of the port.

        Raises: Compacted (history no longer reaches so far), Unavailable (also for a revision in the future), Denied.
        """
        for prefix in prefixes:
            check_key(prefix)
        found: dict[str, KeyValue] = {}
        for prefix in prefixes:
            more, after = True, None
            while more:
                reply = await self._range(
                    wire.range_request(
                        prefix, prefix=prefix.endswith("/"), limit=PAGE_KEYS, revision=revision, after=after
                    )
                )
                items = [wire.key_value(stored) for stored in reply.kvs]
                found.update((item.key, item) for item in items)
                revision = revision or reply.header.revision
                more, after = reply.more, reply.kvs[-1].key if reply.kvs else None
                await anyio.lowlevel.checkpoint()
        return Listing(items=tuple(found[key] for key in sorted(found)), revision=revision)

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        check_txn(compares, ops, or_else)
        body = wire.txn_request(compares, ops, or_else)
        leases = [op.lease for op in (*ops, *or_else) if isinstance(op, PutOp) and op.lease]
        with _refusals(lease=leases[0] if leases else 0, size=len(body)):
            reply = await self._caller.call(wire.TXN, body, wire.TXN_REPLY, again=not writes((*ops, *or_else)))
        self._caller.raft_term = max(self._caller.raft_term, reply.header.raft_term)
        return wire.txn_result(reply)

    async def grant(self, ttl_s: int) -> Lease:
        with _refusals():
            reply = await self._caller.call(wire.GRANT, wire.grant_request(ttl_s), wire.GRANT_REPLY, again=False)
        return Lease(id=reply.id, ttl_s=reply.ttl_s)

    async def keepalive(self, lease: int) -> int:
        with _refusals(lease=lease):
            reply = await self._caller.call(
                wire.KEEPALIVE, wire.lease_request(lease), wire.KEEPALIVE_REPLY, again=True, lane=Lane.KEEPALIVE
            )
        if reply.result.ttl_s <= 0:
            raise LeaseLost(lease)
        return reply.result.ttl_s

    async def revoke(self, lease: int) -> None:
        try:
            with _refusals(lease=lease):
                await self._caller.call(wire.REVOKE, wire.lease_request(lease), wire.REVOKE_REPLY, again=True)
        except LeaseLost:
            return  # as wished

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        for prefix in prefixes:
            check_key(prefix)
        return Watch(self._caller, prefixes, from_revision, silence_s=self._silence_s, ledger=self._ledger)

    def stats(self) -> StoreStats:
        caller, now_s = self._caller, anyio.current_time()
        return StoreStats(
            endpoint=caller.members.current,
            calls=caller.calls,
            errors=caller.errors,
            rotations=caller.members.rotations,
            logins=caller.logins,
            resyncs=self._ledger.resyncs,
            watch_restarts=self._ledger.restarts,
            watch_progress_age_s=max((now_s - watch.heard_s for watch in self._ledger.open), default=None),
        )

    async def _range(self, body: bytes) -> wire.RangeReply:
        with _refusals():
            reply = await self._caller.call(wire.RANGE, body, wire.RANGE_REPLY, again=True)
        self._caller.raft_term = max(self._caller.raft_term, reply.header.raft_term)
        return reply


@contextmanager
def _refusals(*, lease: int = 0, size: int = 0) -> Iterator[None]:
    """Etcd's refusals as the port's errors. Where several leases are named, etcd does not say which one is gone."""
    try:
        yield
    except Rejected as error:
        match error.failure.verdict:
            case Verdict.LEASE_GONE:
                raise LeaseLost(lease) from error
            case Verdict.COMPACTED:
                raise Compacted(0) from error
            case _:
                what = f"etcd's --max-request-bytes is below what llmgw needs ({error}): request"
                raise TooLarge(what=what, size=size, limit=REQUEST_BYTES_MAX, unit="bytes") from error


@asynccontextmanager
async def open_etcd(config: EtcdConfig, *, jitter: Callable[[], float] = SYSTEM_JITTER) -> AsyncIterator[EtcdStore]:
    """The store, as `config` says, on trio or asyncio. It need not be there yet: see `wait_until_reachable`.

    `jitter` gives numbers from 0 to below 1; they choose the first member and spread logins and reconnects.

    Raises:
        Invalid: naming everything in `config` that can't be right, before anything is sent.
    """
    tls = tls_context(config)
    # No time-outs of the stream itself: `etcd_watch` judges silence. Each watch has a connection of its own.
    timeout = httpx2.Timeout(None, connect=config.connect_timeout_s, write=config.read_timeout_s)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(verify=tls, trust_env=False, timeout=timeout, limits=limits) as http:
        transport = GatewayTransport(config, http)
        caller = Caller(
            transport,
            Members([url.rstrip("/") for url in config.endpoints], first=int(jitter() * len(config.endpoints))),
            login=login(config),
            connect_s=config.connect_timeout_s,
            read_s=config.read_timeout_s,
            jitter=jitter,
        )
        try:
            yield EtcdStore(caller, silence_s=config.watch_silence_s)
        finally:
            transport.close()


async def wait_until_reachable(store: Store, log: Callable[[str], None], *, every_s: float = WAIT_EVERY_S) -> None:
    """Return once the store answers. Until then say every few seconds, in one line, which endpoints fail and why.

    Raises: Denied; waiting does not help against that.
    """
    while True:
        try:
            await store.get(META)
        except Unavailable as error:
            log(f"waiting for the store: {error}")
            await anyio.sleep(every_s)
        else:
            return
