"""Who gets a request: the least busy replica in rotation; dead ones are found out, left alone and taken back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from llmgw.config import GatewayConfig
from llmgw.testing.gateway import Rig, blackhole, chat, request
from llmgw.testing.stub_engine import Act, Die, Reply, Silent, Stream, sse

pytestmark = pytest.mark.anyio


@pytest.fixture
def config() -> GatewayConfig:
    return GatewayConfig(connect_timeout_s=0.5, eject_s=0.3)


async def test_requests_are_spread_evenly_over_idle_replicas(rig: Rig) -> None:
    engines = [await rig.engine() for _ in range(3)]
    rig.route(*(engine.port for engine in engines))
    for _ in range(30):
        await rig.ask()
    assert [len(engine.seen) for engine in engines] == [10, 10, 10]


async def test_the_least_busy_gets_the_next(rig: Rig) -> None:
    busy, idle = await rig.engine(Silent()), await rig.engine()
    rig.route(busy.port)
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)))
    await busy.until(lambda e: e.active == 1)
    rig.route(busy.port, idle.port)
    for _ in range(6):
        assert (await rig.ask()).status == 200
    assert (len(busy.seen), len(idle.seen)) == (1, 6)


async def test_d14_a_dead_replica_costs_one_retry_and_then_nothing(rig: Rig) -> None:
    good = await rig.engine()
    with blackhole() as dead:
        rig.route(dead, good.port)
        for _ in range(4):
            assert (await rig.ask()).status == 200
        member = rig.hub.groups["m"].members[0]
        assert member.ejected
        figures = rig.hub.figures.of("m")
        assert figures.retries == {"connect": 1}
        for _ in range(20):
            assert (await rig.ask()).status == 200
        # Nobody pays for looking whether it is back: that is done aside.
        await rig.until(lambda: figures.probes >= 2)
        for _ in range(20):
            assert (await rig.ask()).status == 200
        assert figures.retries == {"connect": 1}
        assert figures.ejections == 1
    assert rig.counts() == {"200": 44}
    await rig.until(rig.settled)


class TestHundreds:
    """With a time-out that a busy test machine does not meet by itself."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(connect_timeout_s=3.0)

    async def test_d14_hundreds_of_requests_do_not_wait_for_a_dead_one(self, rig: Rig) -> None:
        good = await rig.engine()
        with blackhole() as dead:
            rig.route(dead, good.port)
            answers = await asyncio.gather(*(rig.ask() for _ in range(500)))
        assert {answer.status for answer in answers} == {200}
        assert len(good.seen) == 500
        # Half of them went to the dead one at first, all of them before it was known to be dead.
        assert rig.hub.figures.of("m").ejections == 1
        await rig.until(rig.settled)


async def test_d14_without_any_replica_the_answer_is_quick(rig: Rig) -> None:
    with blackhole() as dead:
        rig.route(dead)
        answer = await rig.ask()
        assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
        assert b"retry-after" in answer.headers
    rig.route()
    answer = await rig.ask()
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")


async def test_d14_refused_connections_are_found_at_once(rig: Rig) -> None:
    dead, good = await rig.engine(), await rig.engine()
    rig.route(dead.port, good.port)
    await dead.stop()
    for _ in range(10):
        assert (await rig.ask()).status == 200
    assert len(good.seen) == 10
    assert rig.hub.figures.of("m").ejections == 1


async def test_a_replica_that_is_back_is_taken_back(rig: Rig) -> None:
    dead, good = await rig.engine(), await rig.engine()
    rig.route(dead.port, good.port)
    await dead.stop()
    while not rig.hub.groups["m"].members[0].ejected:
        assert (await rig.ask()).status == 200
    again = await rig.engine(port=dead.port)
    await rig.until(lambda: not rig.hub.groups["m"].members[0].ejected)
    seen = len(good.seen)
    for _ in range(20):
        assert (await rig.ask()).status == 200
    assert len(again.seen) == 10  # its share, and not all to make up for its absence
    assert len(good.seen) == seen + 10


async def test_the_only_replica_is_asked_even_when_it_failed(rig: Rig) -> None:
    engine = await rig.engine(*[Reply(status=500)] * 5)
    rig.route(engine.port)
    for _ in range(5):
        assert (await rig.ask()).status == 500
    member = rig.hub.groups["m"].members[0]
    assert member.ejected
    assert (await rig.ask()).status == 200
    assert not member.ejected


async def test_single_faults_do_not_eject(rig: Rig) -> None:
    engine = await rig.engine(*[Reply(status=500), Reply()] * 6)
    rig.route(engine.port)
    for _ in range(12):
        await rig.ask()
    assert rig.hub.figures.of("m").ejections == 0


async def test_d16_counts_return_to_zero_whatever_happens(rig: Rig) -> None:
    acts: list[Act] = [
        Reply(),
        Silent(),
        Stream(events=sse("a", "b")),
        Die(),
        Stream(events=sse("a", "b"), die_after=1),
        Reply(status=500),
        Reply(status=400),
        Stream(events=sse("a", "b"), hang_after=1),
    ]
    engines = [await rig.engine(*(acts[shift:] + acts[:shift]) * 40) for shift in (0, 3)]
    with blackhole() as dead:
        rig.route(engines[0].port, engines[1].port, dead)

        async def one(n: int) -> None:
            wire = await rig.connect()
            await wire.send(request(chat(stream=n % 2 == 0)))
            if n % 3 == 0:
                wire.leave(reset=n % 2 == 0)
                return
            if n % 50 == 1:  # replicas come and go meanwhile
                rig.route(*(engine.port for engine in engines), dead, incarnation=str(n))
            try:
                async with asyncio.timeout(1):
                    await wire.answer()
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                pass
            wire.leave(reset=n % 5 == 0)

        for start in range(0, 300, 50):
            await asyncio.gather(*(one(n) for n in range(start, start + 50)))
        await rig.until(rig.settled)
    assert sum(rig.counts().values()) == 300
    assert Counter(member.in_flight < 0 for member in rig.hub.groups["m"].members) == {False: 3}
