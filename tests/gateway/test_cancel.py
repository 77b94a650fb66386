"""The client leaves: in whatever phase, the engine is let go at once and every count comes back to where it was."""

from __future__ import annotations

import asyncio

import pytest

from llmgw.config import GatewayConfig
from llmgw.testing.gateway import Rig, Wire, blackhole, chat, request
from llmgw.testing.stub_engine import WITHIN_S, Act, Flood, Reply, Silent, Stream, StubEngine, sse

pytestmark = pytest.mark.anyio

LONG = Stream(events=sse(*map(str, range(100))), pause_s=0.2)
"""20 s: longer than any wait here, so that an engine that was not told goes on until the test fails."""


async def gone(rig: Rig, engine: StubEngine) -> None:
    """Until the engine has seen its client leave, and the gateway's counts have settled."""
    async with asyncio.timeout(WITHIN_S):
        await engine.until(lambda e: e.left == 1 and e.active == 0)
    await rig.until(rig.settled)


async def leave(wire: Wire, how: str) -> None:
    if how == "half-close":
        wire.writer.write_eof()
    else:
        wire.leave(reset=how == "reset")


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
async def test_d01_a_client_that_leaves_in_mid_stream_frees_the_engine(rig: Rig, how: str) -> None:
    engine = await rig.engine(LONG)
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)))
    await wire.head()
    for _ in range(3):
        await wire.chunk()
    await leave(wire, how)
    await gone(rig, engine)
    assert rig.counts() == {"client_closed": 1}
    assert 3 <= rig.hub.figures.of("m").chunks < 100
    assert engine.open == 0


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
async def test_d01_before_the_first_byte_of_a_stream(rig: Rig, how: str) -> None:
    engine = await rig.engine(Silent())
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)))
    await engine.until(lambda e: e.active == 1)
    await leave(wire, how)
    await gone(rig, engine)
    assert rig.counts() == {"client_closed": 1}


async def test_d01_before_a_whole_answer_of_an_engine_that_stops_by_itself(rig: Rig) -> None:
    engine = await rig.engine(Silent())
    rig.route(engine.port, engine="vllm")
    wire = await rig.connect()
    await wire.send(request(chat()))
    await engine.until(lambda e: e.active == 1)
    wire.leave(reset=True)
    await gone(rig, engine)
    assert engine.slots_asked == 0


async def test_d01_while_connecting(rig: Rig) -> None:
    with blackhole() as port:
        rig.route(port)
        wire = await rig.connect()
        await wire.send(request(chat()))
        await rig.until(lambda: rig.hub.groups["m"].members[0].in_flight == 1)
        wire.leave(reset=True)
        await rig.until(rig.settled)
    assert rig.counts() == {"client_closed": 1}
    assert not rig.hub.groups["m"].members[0].ejected


async def test_d01_while_the_answer_is_more_than_it_takes(rig: Rig) -> None:
    engine = await rig.engine(Flood(size=200_000_000))
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)))
    await rig.until(lambda: any(client.paused for client in rig.hub.clients))
    wire.leave(reset=True)
    await gone(rig, engine)


async def test_d01_in_the_middle_of_its_own_request(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat())[:-5])
    wire.leave(reset=True)
    await rig.until(lambda: not rig.hub.clients)
    assert rig.settled()
    assert engine.connections == 0


async def test_d01_with_another_request_sent_ahead(rig: Rig) -> None:
    engine = await rig.engine(LONG)
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)) * 2)
    await wire.head()
    wire.leave()
    await gone(rig, engine)
    assert len(engine.seen) == 1


async def test_d01_many_at_once_and_in_all_phases(rig: Rig) -> None:
    acts: list[Act] = [LONG, Silent(), Reply(), Flood(size=50_000_000)] * 25
    engine = await rig.engine(*acts)
    rig.route(engine.port, engine="vllm")
    wires = [await rig.connect() for _ in range(100)]
    for n, wire in enumerate(wires):
        await wire.send(request(chat(stream=n % 3 == 0)))
    await engine.until(lambda e: len(e.seen) == 100)
    for n, wire in enumerate(wires):
        wire.leave(reset=n % 2 == 0)
    await rig.until(rig.settled)
    await engine.until(lambda e: e.active == 0)
    assert sum(rig.counts().values()) == 100
    assert not rig.hub.clients


class TestQueued:
    """With room for one request only."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(in_flight_max=1)

    async def test_d01_while_waiting_for_a_replica(self, rig: Rig) -> None:
        engine = await rig.engine(Silent(), Reply())
        rig.route(engine.port)
        first, second, third = [await rig.connect() for _ in range(3)]
        await first.send(request(chat(stream=True)))
        await engine.until(lambda e: e.active == 1)
        await second.send(request(chat(n=2)))
        await rig.until(lambda: len(rig.hub.groups["m"].queue.waiting) == 1)
        await third.send(request(chat(n=3)))
        await rig.until(lambda: len(rig.hub.groups["m"].queue.waiting) == 2)
        second.leave()
        await rig.until(lambda: len(rig.hub.groups["m"].queue.waiting) == 1)
        first.leave()
        assert (await third.answer()).status == 200
        assert [seen.body for seen in engine.seen] == [chat(stream=True), chat(n=3)]
        assert rig.counts() == {"client_closed": 2, "200": 1}
        await rig.until(rig.settled)

    async def test_a_slot_that_goes_on_generating_stays_counted_until_the_engine_says_it_is_free(
        self, rig: Rig
    ) -> None:
        engine = await rig.engine(Silent(), Reply())
        engine.slots = (True,)
        rig.route(engine.port, engine="llama.cpp")
        wire = await rig.connect()
        await wire.send(request(chat()))
        await engine.until(lambda e: e.active == 1)
        wire.leave(reset=True)
        await engine.until(lambda e: e.left == 1)
        member = rig.hub.groups["m"].members[0]
        assert (member.in_flight, member.held) == (1, 1)
        assert rig.hub.figures.of("m").in_flight == 0
        waiting = await rig.connect()
        await waiting.send(request(chat()))
        await engine.until(lambda e: e.slots_asked == 2)
        assert len(engine.seen) == 1
        assert member.held == 1
        engine.slots = (False,)
        assert (await waiting.answer()).status == 200
        await rig.until(rig.settled)

    async def test_it_is_let_go_of_when_the_engine_can_not_tell_or_is_gone(self, rig: Rig) -> None:
        engine = await rig.engine(Silent())
        rig.route(engine.port, engine="llama.cpp")
        wire = await rig.connect()
        await wire.send(request(chat()))
        await engine.until(lambda e: e.active == 1)
        wire.leave(reset=True)
        await engine.until(lambda e: e.slots_asked == 1)
        await rig.until(rig.settled)
