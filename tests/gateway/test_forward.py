"""A request goes to an engine and its answer comes back, in all the ways that HTTP has for it."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.catalog import Task
from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import ANSWER, Raw, Reply, Stream, sse

pytestmark = pytest.mark.anyio


async def test_an_answer_in_one_piece(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.status, answer.body, answer.whole) == (200, ANSWER, True)
    assert answer.headers[b"content-type"] == b"application/json"
    assert engine.seen[0].body == chat()
    assert engine.seen[0].line == b"POST /v1/chat/completions HTTP/1.1"
    assert rig.counts() == {"200": 1}
    assert rig.settled()


async def test_a_stream_ends_as_the_engine_ended_it(rig: Rig) -> None:
    engine = await rig.engine(Stream(events=sse("a", "b", "c")))
    rig.route(engine.port)
    answer = await rig.ask(request(chat(stream=True)))
    assert answer.headers[b"content-type"] == b"text/event-stream"
    assert (answer.body, answer.whole) == (b"".join(sse("a", "b", "c")), True)
    assert rig.hub.figures.of("m").chunks == 4
    assert rig.settled()


async def test_chunked_without_being_a_stream(rig: Rig) -> None:
    engine = await rig.engine(Reply(length=False, pieces=(b'{"a":', b"1}")))
    rig.route(engine.port)
    answer = await rig.ask()
    assert answer.headers[b"transfer-encoding"] == b"chunked"
    assert (answer.body, answer.whole) == (b'{"a":1}', True)


async def test_an_empty_answer(rig: Rig) -> None:
    engine = await rig.engine(Reply(pieces=()), Reply(pieces=(), length=False))
    rig.route(engine.port)
    for _ in range(2):
        answer = await rig.ask()
        assert (answer.status, answer.body, answer.whole) == (200, b"", True)


async def test_an_answer_that_only_the_connections_end_frames(rig: Rig) -> None:
    engine = await rig.engine(
        Reply(framed=False),
        Reply(framed=False, content_type=b"text/event-stream", pieces=sse("a")),
        Reply(framed=False, content_type=b"text/event-stream", pieces=sse("a", done=False)),
    )
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.body, answer.whole) == (ANSWER, True)
    answer = await rig.ask()
    assert (answer.body, answer.whole) == (b"".join(sse("a")), True)
    answer = await rig.ask()
    assert b"upstream_disconnected" in answer.body
    assert not answer.whole


async def test_interim_answers_are_kept_back(rig: Rig) -> None:
    engine = await rig.engine(
        Raw(
            sent=b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        )
    )
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.status, answer.body) == (200, b"ok")
    assert b"link" not in answer.headers


async def test_what_comes_after_the_answer_is_nobodys(rig: Rig) -> None:
    twice = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    engine = await rig.engine(Raw(sent=twice))
    rig.route(engine.port)
    answer = await rig.ask()
    assert (answer.status, answer.body, answer.whole) == (200, b"ok", True)
    answer = await rig.ask()
    assert answer.body == ANSWER
    assert engine.connections == 2


async def test_connections_are_used_again_in_both_directions(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    wire = await rig.connect()
    for n in range(5):
        await wire.send(request(chat(seed=n)))
        assert (await wire.answer()).whole
    assert engine.connections == 1
    assert [msgspec.json.decode(seen.body)["seed"] for seen in engine.seen] == [0, 1, 2, 3, 4]


async def test_a_connection_that_the_engine_ends_is_not_used_again(rig: Rig) -> None:
    engine = await rig.engine(Reply(close=True))
    rig.route(engine.port)
    for _ in range(3):
        assert (await rig.ask()).status == 200
    assert engine.connections == 2
    assert rig.hub.figures.of("m").retries == {}


async def test_pipelined_requests_are_answered_in_their_order(rig: Rig) -> None:
    engine = await rig.engine(*(Reply(pieces=(b'{"n":%d}' % n,)) for n in range(4)))
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(
        request(chat())
        + request(method="GET", path="/healthz")
        + request(chat())
        + request(method="GET", path="/v1/nothing")
    )
    await wire.send(request(chat()) + request(chat())[:-10])
    await wire.send(request(chat())[-10:])
    bodies = [(await wire.answer()).body for _ in range(6)]
    assert bodies[0::2][:2] == [b'{"n":0}', b'{"n":1}']
    assert b"ok" in bodies[1]
    assert b"unknown_url" in bodies[3]
    assert bodies[4:] == [b'{"n":2}', b'{"n":3}']


async def test_http10_gets_a_body_that_the_connections_end_closes(rig: Rig) -> None:
    engine = await rig.engine(Stream(events=sse("a")), Reply(), Reply(length=False))
    rig.route(engine.port)
    for expected in (b"".join(sse("a")), ANSWER, ANSWER):
        wire = await rig.connect()
        await wire.send(request(chat(), version="1.0"))
        answer = await wire.answer()
        assert answer.body == expected
        assert b"transfer-encoding" not in answer.headers
        assert answer.headers[b"connection"] == b"close"
        assert await wire.closed() == b""


async def test_connection_close_is_respected(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(), headers=["Connection: close"]))
    answer = await wire.answer()
    assert answer.headers[b"connection"] == b"close"
    assert await wire.closed() == b""


async def test_a_chunked_request_is_framed_anew(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    body = chat()
    wire = await rig.connect()
    await wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")
    for byte in body:
        await wire.send(b"1;x=y\r\n%c\r\n" % byte)
    await wire.send(b"0\r\nTrailer: x\r\n\r\n")
    assert (await wire.answer()).status == 200
    assert engine.seen[0].body == body
    assert engine.seen[0].header(b"content-length") == b"%d" % len(body)
    assert engine.seen[0].header(b"transfer-encoding") is None
    assert engine.seen[0].line == b"POST /v1/completions HTTP/1.1"


async def test_a_request_may_come_byte_by_byte(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    wire = await rig.connect()
    for byte in request(chat()):
        await wire.send(bytes([byte]))
    assert (await wire.answer()).status == 200
    assert engine.seen[0].body == chat()


async def test_a_large_body_passes_whole(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    body = chat(image="data:image/png;base64," + "A" * 25_000_000)
    assert (await rig.ask(request(body))).status == 200
    assert engine.seen[0].body == body


async def test_an_alias_is_replaced_by_the_models_name_and_nothing_else_changes(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port, model="org/real")
    rig.names["gpt-4o"] = rig.names["org/real"]
    rig.swap()
    body = b'{ "temperature": 1.10, "model" : "gpt-4o", "messages":[{"role":"user","content":"\\u00e4 \xe2\x82\xac"}]}'
    assert (await rig.ask(request(body))).status == 200
    assert engine.seen[0].body == (
        b'{"temperature":1.10,"model":"org/real","messages":[{"role":"user","content":"\\u00e4 \xe2\x82\xac"}]}'
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[],"model":"other"}',
        b'{"model":"other","messages":[],"model":"m"}',
        b'{"model":"m","messages":[],"mod\\u0065l":"other"}',
        b'{"\\u006dodel":"other","messages":[],"model":"m"}',
    ],
)
async def test_no_second_model_hides_in_a_body(rig: Rig, body: bytes) -> None:
    engine, other = await rig.engine(), await rig.engine()
    rig.route(engine.port)
    rig.route(other.port, model="other")
    assert (await rig.ask(request(body))).status == 200
    (seen,) = engine.seen + other.seen
    asked = "m" if engine.seen else "other"
    assert seen.body == b'{"model":"%b","messages":[]}' % asked.encode() or (
        msgspec.json.decode(seen.body) == {"model": asked, "messages": []} and seen.body.count(b"model") == 1
    )


async def test_bodies_that_make_no_sense(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    for body, code, says in (
        (b"{", "invalid_json", "JSON"),
        (b"", "invalid_json", "JSON"),
        (b"[1]", "invalid_body", "object"),
        (b'{"messages":[]}', "invalid_body", "model"),
        (b'{"model":7}', "invalid_body", "$.model"),
        (b'{"model":"m","stream":"yes"}', "invalid_body", "$.stream"),
        (b'{"model":"m","x":' + b"[" * 100_000, "invalid_json", "JSON"),
        (b'{"model":"\xff"}', "invalid_json", "JSON"),
    ):
        answer = await rig.ask(request(body))
        assert (answer.status, answer.error["code"]) == (400, code), body[:40]
        assert says in answer.error["message"]
        assert answer.error["type"] == "invalid_request_error"
    assert engine.seen == []


async def test_the_task_must_fit(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port, model="e", task=Task.EMBED)
    answer = await rig.ask(request(chat(model="e")))
    assert (answer.status, answer.error["code"]) == (400, "wrong_task")
    assert engine.seen == []


async def test_an_unknown_name_is_not_found_and_the_nearest_is_named(rig: Rig) -> None:
    rig.route(model="gemma-270m")
    answer = await rig.ask(request(chat(model="gema-270m")))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "'gemma-270m'" in answer.error["message"]


async def test_nothing_ready_is_said_at_once(rig: Rig) -> None:
    rig.route(model="m")
    answer = await rig.ask()
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
    assert int(answer.headers[b"retry-after"]) > 0
    assert rig.counts() == {"503": 1}


async def test_a_fallback_answers_for_a_model_with_nothing_ready(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port, model="spare")
    rig.route(model="m", fallbacks=["gone", "spare"])
    assert (await rig.ask()).status == 200
    assert msgspec.json.decode(engine.seen[0].body)["model"] == "spare"


async def test_before_any_routes_are_known_nothing_is_claimed(rig: Rig) -> None:
    answer = await rig.ask()
    assert (answer.status, answer.error["code"]) == (503, "routes_not_loaded")
    for path in ("/healthz", "/v1/models", "/v1/models/m"):
        assert (await rig.ask(request(method="GET", path=path))).status == 503
