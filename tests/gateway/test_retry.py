"""Another replica answers as long as nothing has been sent, and never afterwards; a cut answer never looks whole."""

from __future__ import annotations

import logging

import msgspec
import pytest

from llmgw.config import GatewayConfig
from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import ANSWER, Act, Die, Raw, Reply, Silent, Stream, sse

pytestmark = pytest.mark.anyio

EVENTS = sse(*map(str, range(10)))
GOOD = Reply(pieces=(b'{"from":"b"}',))


def fields(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = getattr(record, "fields", {})
    return found


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_d06_after_the_first_byte_a_stream_is_cut_with_one_error_event(
    rig: Rig, version: str, *, reset: bool
) -> None:
    bad = await rig.engine(Stream(events=EVENTS, die_after=5, reset=reset, pause_s=0.01))
    good = await rig.engine(GOOD)
    rig.route(bad.port, good.port)
    answer = await rig.ask(request(chat(stream=True), version=version))
    *events, error, end = answer.body.split(b"\n\n")
    assert [event + b"\n\n" for event in events] == list(EVENTS[:5])
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == "upstream_disconnected"
    assert end == b""
    assert b"[DONE]" not in answer.body
    assert version == "1.0" or not answer.whole
    assert good.seen == []
    assert rig.counts() == {"cut": 1}
    assert rig.settled()


async def test_d06_a_chunk_with_the_role_only_counts_as_sent(rig: Rig) -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}\n\n'
    bad = await rig.engine(Stream(events=(role,), die_after=1))
    good = await rig.engine(GOOD)
    rig.route(bad.port, good.port)
    answer = await rig.ask(request(chat(stream=True)))
    assert answer.body.startswith(role + b'data: {"error"')
    assert good.seen == []


async def test_d06_half_an_event_is_ended_before_the_error(rig: Rig) -> None:
    for half, between in ((b'data: {"cho', b"\n\n"), (b"data: x\n", b"\n"), (b"data: x\r\n\r\n", b"")):
        bad = await rig.engine(Stream(events=(half,), die_after=1))
        rig.route(bad.port)
        answer = await rig.ask(request(chat(stream=True)))
        assert answer.body.startswith(half + between + b'data: {"error"')
        assert not answer.whole


async def test_d06_before_the_first_byte_another_replica_answers(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    acts: tuple[Act, ...] = (
        Die(),
        Die(reset=True),
        Die(sent=b"HTTP/1.1 200 OK\r\nconte"),
        Die(sent=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"),
        Die(sent=b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        Raw(sent=b"this is no HTTP\r\n\r\n"),
        Raw(sent=b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n"),
        Raw(sent=b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000),
    )
    for act in acts:
        bad, good = await rig.engine(act), await rig.engine(GOOD)
        rig.route(bad.port, good.port)
        caplog.clear()
        answer = await rig.ask(request(chat(stream=True)))
        assert (answer.status, answer.body, answer.whole) == (200, b'{"from":"b"}', True), act
        assert (len(bad.seen), len(good.seen)) == (1, 1)
        assert [fields(record).get("attempts") for record in caplog.records if "retries" in record.message] == [2]
        assert rig.settled()
    assert rig.counts() == {"200": len(acts)}
    assert sum(rig.hub.figures.of("m").retries.values()) == len(acts)


async def test_a_body_that_ends_too_early_does_not_look_whole(rig: Rig) -> None:
    short = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n" + b"x" * 20
    engine = await rig.engine(Die(sent=short), Die(sent=short))
    rig.route(engine.port)
    for version in ("1.1", "1.0"):
        answer = await rig.ask(request(chat(), version=version))
        assert (answer.body, answer.whole) == (b"x" * 20, False)
    assert rig.counts() == {"cut": 2}


async def test_nor_does_one_that_only_closing_would_end(rig: Rig) -> None:
    begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
    engine = await rig.engine(Die(sent=begun))
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(), version="1.0"))
    with pytest.raises(ConnectionResetError):
        await wire.closed()


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
async def test_answers_that_another_replica_may_better(rig: Rig, status: int) -> None:
    bad, good = await rig.engine(Reply(status=status)), await rig.engine(GOOD)
    rig.route(bad.port, good.port)
    answer = await rig.ask()
    assert (answer.status, answer.body) == (200, b'{"from":"b"}')
    assert rig.hub.figures.of("m").retries == {str(status): 1}
    assert rig.settled()


@pytest.mark.parametrize("status", [500, 502, 504, 429])
async def test_are_passed_on_when_there_is_none(rig: Rig, status: int) -> None:
    engine = await rig.engine(Reply(status=status, headers=(b"retry-after: 7",), pieces=(b'{"error":{}}',)))
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.status, answer.body) == (status, b'{"error":{}}')
    assert answer.headers[b"retry-after"] == b"7"


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
async def test_what_is_the_clients_own_doing_is_passed_on_and_is_no_fault(rig: Rig, status: int) -> None:
    bad, good = await rig.engine(*[Reply(status=status)] * 5), await rig.engine(GOOD)
    rig.route(bad.port, good.port)
    answers = [await rig.ask() for _ in range(10)]
    assert sorted(answer.status for answer in answers) == sorted([200] * 5 + [status] * 5)
    assert not any(member.faults for member in rig.hub.groups["m"].members)


async def test_an_engine_that_is_still_loading_is_not_shown(rig: Rig) -> None:
    engine = await rig.engine(Reply(status=503, pieces=(b'{"error":{"message":"Loading model"}}',)))
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
    assert b"retry-after" in answer.headers


async def test_d23_a_stale_route_leads_to_another_replica_and_never_to_another_model(rig: Rig) -> None:
    moved = await rig.engine(key="b" * 64)  # B's engine, on the port that A's replica had
    good = await rig.engine(GOOD, key="a" * 64)
    rig.route(moved.port, good.port, model="a", key="a" * 64)
    rig.route(moved.port, model="b", key="b" * 64)
    answer = await rig.ask(request(chat(model="a")))
    assert answer.body == b'{"from":"b"}'
    for _ in range(5):
        assert (await rig.ask(request(chat(model="a")))).status == 200
    assert moved.seen == []
    assert moved.connections == 1  # the stale route was left alone afterwards
    assert (await rig.ask(request(chat(model="b")))).status == 200
    assert len(moved.seen) == 1


async def test_d23_with_no_other_replica_nobody_answers(rig: Rig) -> None:
    moved = await rig.engine(key="b" * 64)
    rig.route(moved.port, model="a", key="a" * 64)
    answer = await rig.ask(request(chat(model="a")))
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
    assert b"Unauthorized" not in answer.body
    assert moved.seen == []


async def test_d23_a_pooled_connection_does_not_outlive_its_route(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port, incarnation="1")
    await rig.ask()
    rig.route(engine.port, incarnation="2")
    await engine.until(lambda e: e.open == 0)
    assert (await rig.ask()).status == 200
    assert engine.connections == 2


async def test_an_idle_connection_closed_in_the_moment_of_reuse_is_no_fault(rig: Rig) -> None:
    engine = await rig.engine(Reply(), Die(), Reply(), Die(reset=True), Reply())
    rig.route(engine.port)
    assert [(await rig.ask()).body for _ in range(3)] == [ANSWER] * 3
    member = rig.hub.groups["m"].members[0]
    assert (member.faults, member.ejected) == (0, False)
    assert rig.hub.figures.of("m").retries == {}
    assert rig.settled()


async def test_a_fresh_connection_that_is_closed_is_one(rig: Rig) -> None:
    engine = await rig.engine(Die())
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert rig.hub.groups["m"].members[0].faults == 1


class TestLimits:
    """How often, and for how long."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(attempts_max=2, first_byte_timeout_s=0.5)

    async def test_so_many_replicas_of_a_model_are_tried_then_its_fallback(self, rig: Rig) -> None:
        bad = [await rig.engine(*[Die()] * 9) for _ in range(4)]
        spare = await rig.engine(GOOD)
        rig.route(spare.port, model="spare")
        rig.route(*(engine.port for engine in bad), fallbacks=["spare"])
        assert (await rig.ask()).body == b'{"from":"b"}'
        assert sum(len(engine.seen) for engine in bad) == 2
        assert msgspec.json.decode(spare.seen[0].body)["model"] == "spare"

    async def test_an_engine_that_says_nothing_is_given_up(self, rig: Rig) -> None:
        engine = await rig.engine(Silent(), Stream(events=EVENTS, hang_after=3))
        rig.route(engine.port)
        answer = await rig.ask()
        assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
        await engine.until(lambda e: e.left == 1)
        answer = await rig.ask(request(chat(stream=True)))
        assert answer.body.startswith(b"".join(EVENTS[:3]) + b'data: {"error"')
        assert not answer.whole
        await engine.until(lambda e: e.left == 2)
        assert rig.counts() == {"504": 1, "cut": 1}
        assert rig.settled()
