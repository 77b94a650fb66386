"""Slow clients and endless answers cost the gateway a bounded amount of memory, and the engine a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest

from llmgw.config import GatewayConfig
from llmgw.testing.gateway import Rig, Wire, chat, request
from llmgw.testing.stub_engine import WITHIN_S, Flood, Stream, StubEngine

pytestmark = pytest.mark.anyio

MIB = 2**20


async def stall(rig: Rig, count: int) -> list[Wire]:
    """Clients that ask and never read."""
    wires = [await rig.connect() for _ in range(count)]
    for wire in wires:
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport in both directions
        await wire.send(request(chat(stream=True)))
    return wires


async def no_further(engine: StubEngine, check: Callable[[], None]) -> None:
    """Until the engine is held up: its bytes stay the same while the loop goes round many times. `check` every time."""
    sent, same = -1, 0
    async with asyncio.timeout(WITHIN_S):
        while same < 20:
            await asyncio.sleep(0.01)
            check()
            same = same + 1 if engine.sent_bytes == sent else 0
            sent = engine.sent_bytes


async def test_d13_clients_that_never_read_hold_up_the_engine_and_cost_little_memory(rig: Rig) -> None:
    count, size = 50, 200 * MIB
    engine = await rig.engine(*[Flood(size=size)] * count)
    rig.route(engine.port)
    process = psutil.Process()
    before = process.memory_info().rss

    def check() -> None:
        assert process.memory_info().rss - before < count * 3 * MIB

    wires = await stall(rig, count)
    await engine.until(lambda e: e.active == count)
    await no_further(engine, check)
    assert all(client.paused for client in rig.hub.clients)
    assert engine.sent_bytes < count * size / 4  # what fits the sockets' buffers
    assert len(wires) == count


class TestStalled:
    """With little patience."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(write_timeout_s=1.0)

    async def test_d13_clients_that_never_read_are_dropped_and_the_engine_is_free_again(self, rig: Rig) -> None:
        engine = await rig.engine(*[Flood(size=200 * MIB)] * 5)
        rig.route(engine.port)
        wires = await stall(rig, 5)
        await engine.until(lambda e: e.left == 5 and e.active == 0)
        await rig.until(rig.settled)
        assert rig.counts() == {"client_closed": 5}
        assert len(wires) == 5

    async def test_d13_a_slow_client_is_not_a_stalled_one(self, rig: Rig) -> None:
        size = 8 * MIB
        engine = await rig.engine(Flood(size=size))
        rig.route(engine.port)
        (wire,) = await stall(rig, 1)
        await rig.until(lambda: all(client.paused for client in rig.hub.clients))
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        await wire.head()
        got, paused = 0, 0
        while chunk := await wire.chunk():
            got += len(chunk)
            paused += any(client.paused for client in rig.hub.clients)
            await asyncio.sleep(0)
        assert got >= size
        assert paused > 0
        assert rig.counts() == {"200": 1}


class TestEndless:
    """A line without an end."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(line_max_bytes=1 * MIB)

    async def test_d13_a_line_without_end_is_cut_off_at_the_cap(self, rig: Rig) -> None:
        engine = await rig.engine(Flood(size=64 * MIB, piece=b"x" * 65536))
        rig.route(engine.port)
        answer = await rig.ask(request(chat(stream=True)))
        assert not answer.whole
        assert len(answer.body) < 3 * MIB
        assert b"upstream_disconnected" in answer.body
        await engine.until(lambda e: e.left == 1)
        assert rig.counts() == {"cut": 1}
        assert rig.settled()

    async def test_d13_lines_below_it_pass_however_many(self, rig: Rig) -> None:
        line = b"data: " + b"x" * (MIB - 100) + b"\n"
        engine = await rig.engine(Stream(events=(line[:-1], b"\n", line[:500], line[500:], b"\n") * 3))
        rig.route(engine.port)
        answer = await rig.ask(request(chat(stream=True)))
        assert answer.whole
        assert answer.body == (line + line + b"\n") * 3
