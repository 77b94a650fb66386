"""Connections that do nothing are closed, on either side. The client's clock is turned by hand."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from llmgw.config import GatewayConfig
from llmgw.gateway.server import BODY_QUIET_S, HEAD_S, IDLE_S, LINGER_QUIET_S, LINGER_S, Client
from llmgw.testing.gateway import Rig, Wire, chat, request
from llmgw.testing.stub_engine import Silent

pytestmark = pytest.mark.anyio


async def connected(rig: Rig, sent: bytes = b"") -> tuple[Wire, Client]:
    """A client that has sent something, and its connection at the gateway, which has read it and sweeps no more."""
    assert rig.hub._ticking is not None
    rig.hub._ticking.cancel()
    before = set(rig.hub.clients)
    wire = await rig.connect()
    await rig.until(lambda: len(rig.hub.clients) > len(before))
    (client,) = rig.hub.clients - before
    await wire.send(sent)
    if sent:
        await rig.until(lambda: client.heard)
    client.sweep(rig.hub.clock())
    return wire, client


async def test_an_idle_connection_is_closed(rig: Rig) -> None:
    wire, client = await connected(rig)
    now_s = rig.hub.clock()
    client.sweep(now_s + IDLE_S - 1)
    assert client in rig.hub.clients
    client.sweep(now_s + IDLE_S + 1)
    assert await wire.closed() == b""


async def test_a_head_must_end_in_time_however_slowly_it_drips(rig: Rig) -> None:
    wire, client = await connected(rig, b"POST /v1/chat/completions HTTP/1.1\r\n")
    now_s = rig.hub.clock()
    await wire.send(b"Host: g\r\n")
    await rig.until(lambda: client.heard)
    client.sweep(now_s + HEAD_S - 1)
    assert client in rig.hub.clients
    client.sweep(now_s + HEAD_S + 1)
    assert await wire.closed() == b""


async def test_a_body_may_take_long_but_not_pause_long(rig: Rig) -> None:
    wire, client = await connected(rig, request(chat())[:-20])
    now_s = rig.hub.clock()
    await wire.send(b" ")
    await rig.until(lambda: client.heard)
    client.sweep(now_s + 10 * BODY_QUIET_S)
    assert client in rig.hub.clients
    client.sweep(now_s + 11 * BODY_QUIET_S + 1)
    assert await wire.closed() == b""


async def test_a_request_under_way_has_no_limit_of_the_connections(rig: Rig) -> None:
    engine = await rig.engine(Silent())
    rig.route(engine.port)
    _, client = await connected(rig, request(chat(stream=True)))
    await engine.until(lambda e: e.active == 1)
    client.sweep(rig.hub.clock() + 500)
    assert client in rig.hub.clients


HOPELESS = b"POST /v1/nothing HTTP/1.1\r\nHost: g\r\nContent-Length: 99999999\r\n\r\n"


async def test_a_refused_client_that_sends_no_more_is_dropped(rig: Rig) -> None:
    wire, client = await connected(rig, HOPELESS)
    assert (await wire.answer()).status == 404
    now_s = rig.hub.clock()
    client.sweep(now_s + LINGER_QUIET_S - 1)
    assert client in rig.hub.clients
    client.sweep(now_s + LINGER_QUIET_S + 1)
    await rig.until(lambda: client not in rig.hub.clients)


async def test_nor_may_it_send_for_ever(rig: Rig) -> None:
    wire, client = await connected(rig, HOPELESS)
    assert (await wire.answer()).status == 404
    now_s, step_s = rig.hub.clock(), LINGER_QUIET_S - 1
    client.sweep(now_s)
    for n in range(1, round(LINGER_S / step_s)):
        await wire.send(b"x")
        await rig.until(lambda: client.heard)
        client.sweep(now_s + n * step_s)
        assert client in rig.hub.clients
    client.sweep(now_s + LINGER_S + 1)
    await rig.until(lambda: client not in rig.hub.clients)


class SlowTransport(asyncio.Transport):
    """A connection that still has `unsent` bytes to send."""

    def __init__(self, unsent: int) -> None:
        super().__init__()
        self.unsent = unsent
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


async def test_a_slow_client_gets_the_end_of_its_last_answer_too(rig: Rig) -> None:
    write_timeout_s = rig.config.write_timeout_s
    client, transport = Client(rig.hub, rig.exposition), SlowTransport(300_000)
    client.connection_made(transport)
    client.finished(keep_alive=False)
    now_s = rig.hub.clock()
    client.sweep(now_s)
    while transport.unsent > 1000:
        transport.unsent -= 1000
        now_s += write_timeout_s - 1
        client.sweep(now_s)
        assert not transport.aborted
    client.sweep(now_s + write_timeout_s + 1)  # it took nothing in all that time
    assert transport.aborted
    client.connection_lost(None)


class TestUpstream:
    """Idle connections to engines."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(upstream_idle_s=0.3)

    async def test_they_are_closed_before_the_engine_would(self, rig: Rig) -> None:
        engine = await rig.engine()
        rig.route(engine.port)
        assert (await rig.ask()).status == 200
        assert engine.open == 1
        await engine.until(lambda e: e.open == 0)
        assert (await rig.ask()).status == 200
        assert engine.connections == 2


async def test_health_tells_the_age_of_the_routes(rig: Rig) -> None:
    rig.route(model="m")
    answer = await rig.ask(request(method="GET", path="/healthz"))
    assert msgspec.json.decode(answer.body) == {"status": "ok", "routes_age_s": None}
    rig.hub.routes_age_s = 12.34
    answer = await rig.ask(request(method="GET", path="/healthz"))
    assert msgspec.json.decode(answer.body) == {"status": "ok", "routes_age_s": 12.3}
