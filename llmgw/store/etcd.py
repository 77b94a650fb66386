"""The store on etcd, through etcd's JSON gateway.

Unary calls go through etcd3gw's client, of which only the parts that hold are used (its watch and lock hang or lie, see
the tests); they run on threads of their own. The watch is ours (`etcd_watch`). What may be assumed after a failure is
decided in `etcd_call` and `etcd_verdict`; this module only carries bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from llmgw.errors import Unavailable
from llmgw.store import keys
from llmgw.store.etcd_call import Broken, Caller, Lane, Members, Reply, Stream
from llmgw.store.etcd_endpoint import login, tls_context
from llmgw.store.etcd_store import EtcdStore
from llmgw.store.port import Store

__all__ = ["EtcdStore", "open_etcd", "wait_until_reachable"]

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
        # Go's server throws away what it has not yet read of a request once it begins to answer, unless the connection
        # is to be closed: without this every few streams lack some of their watches (measured on 3.4.23 and 3.5.1).
        headers = {**HEADERS, "Connection": "close"}
        if token is not None:
            headers["Authorization"] = token.reveal()
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
