"""Waiting for a replica: in order, bounded in number and time, and refused with the limit's name."""

from __future__ import annotations

import pytest

from llmgw.config import GatewayConfig
from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import Reply, Silent

pytestmark = pytest.mark.anyio


def waiting(rig: Rig) -> int:
    return len(rig.hub.groups["m"].queue.waiting)


class TestOrder:
    """One at a time."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(in_flight_max=1, queue_max=3)

    async def test_first_come_first_served_and_no_more_than_the_replica_takes(self, rig: Rig) -> None:
        engine = await rig.engine(Silent())
        rig.route(engine.port)
        wires = [await rig.connect() for _ in range(4)]
        for n, wire in enumerate(wires):
            await wire.send(request(chat(stream=True, n=n)))
            await rig.until(lambda n=n: waiting(rig) + len(engine.seen) == n + 1)  # type: ignore[misc]  # n is bound
        assert engine.active == 1
        refused = await rig.ask()
        assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "queue_full", "rate_limit_error")
        assert "3" in refused.error["message"]
        assert "queue_max" in refused.error["message"]
        assert b"retry-after" in refused.headers
        wires[0].leave()
        for wire in wires[1:]:
            assert (await wire.answer()).status == 200
        assert [seen.body for seen in engine.seen] == [chat(stream=True, n=n) for n in range(4)]
        await rig.until(rig.settled)

    async def test_a_new_replica_takes_those_who_wait(self, rig: Rig) -> None:
        full, fresh = await rig.engine(Silent()), await rig.engine()
        rig.route(full.port)
        wires = [await rig.connect() for _ in range(3)]
        for n, wire in enumerate(wires):
            await wire.send(request(chat(stream=True)))
            await rig.until(lambda n=n: waiting(rig) + len(full.seen) == n + 1)  # type: ignore[misc]  # n is bound
        rig.route(full.port, fresh.port)
        for wire in wires[1:]:
            assert (await wire.answer()).status == 200
        assert len(fresh.seen) == 2

    async def test_when_the_last_replica_goes_nobody_waits_for_ever(self, rig: Rig) -> None:
        full, spare = await rig.engine(Silent()), await rig.engine()
        rig.route(spare.port, model="spare")
        rig.route(full.port, fallbacks=["spare"])
        wires = [await rig.connect() for _ in range(2)]
        for n, wire in enumerate(wires):
            await wire.send(request(chat(stream=True)))
            await rig.until(lambda n=n: waiting(rig) + len(full.seen) == n + 1)  # type: ignore[misc]  # n is bound
        rig.route(fallbacks=["spare"])
        assert (await wires[1].answer()).status == 200
        assert len(spare.seen) == 1
        assert full.active == 1  # what runs there may end there


class TestTime:
    """With little patience."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(in_flight_max=1, queue_wait_s=0.2)

    async def test_the_wait_is_bounded(self, rig: Rig) -> None:
        engine = await rig.engine(Silent(), Reply())
        rig.route(engine.port)
        first = await rig.connect()
        await first.send(request(chat(stream=True)))
        await engine.until(lambda e: e.active == 1)
        answer = await rig.ask()
        assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
        assert "queue_wait_s" in answer.error["message"]
        assert waiting(rig) == 0
        first.leave()
        await rig.until(rig.settled)
