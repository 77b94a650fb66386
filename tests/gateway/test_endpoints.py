"""The exact list of what may be asked for, and what the gateway answers by itself."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.testing.gateway import Rig, chat, request

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "//v1/chat/completions", 404),
        ("POST", "/v1//chat/completions", 404),
        ("POST", "/v1/../v1/chat/completions", 404),
        ("POST", "/v1/chat%2fcompletions", 404),
        ("POST", "/v1/chat/completion%73", 404),
        ("POST", "/V1/chat/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/invocations", 404),
        ("GET", "/slots", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/m", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions?x=/v1/models", 200),
        ("POST", "http://other:99/v1/chat/completions", 200),
        ("OPTIONS", "*", 404),
    ],
)
async def test_only_listed_methods_and_paths(rig: Rig, method: str, path: str, status: int) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    answer = await rig.ask(request(chat(), method=method, path=path))
    assert answer.status == status
    assert len(engine.seen) == (status == 200)
    if status != 200:
        assert answer.error["code"] in {"unknown_url", "method_not_allowed", "invalid_url"}
    if status == 405:
        assert answer.headers[b"allow"] in {b"POST", b"GET, HEAD"}


async def test_a_query_does_not_reach_the_engine(rig: Rig) -> None:
    engine = await rig.engine()
    rig.route(engine.port)
    await rig.ask(request(chat(), path="/v1/completions?key=secret"))
    assert engine.seen[0].line == b"POST /v1/completions HTTP/1.1"


async def test_models_are_listed_ready_or_not_and_each_can_be_fetched(rig: Rig) -> None:
    rig.route(model="org/name")
    rig.names["alias"] = rig.names["org/name"]
    rig.swap()
    listed = msgspec.json.decode((await rig.ask(request(method="GET", path="/v1/models"))).body)
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["org/name", "alias"]
    assert {each["object"] for each in listed["data"]} == {"model"}
    plain = await rig.ask(request(method="GET", path="/v1/models/org/name"))
    encoded = await rig.ask(request(method="GET", path="/v1/models/org%2Fname"))
    assert plain.status == encoded.status == 200
    assert plain.body == encoded.body
    assert msgspec.json.decode(plain.body) == listed["data"][0]


@pytest.mark.parametrize("name", ["org%252Fname", "nothing", "%ff", "org/name/", "org//name"])
async def test_unknown_models_are_not_found(rig: Rig, name: str) -> None:
    rig.route(model="org/name")
    answer = await rig.ask(request(method="GET", path=f"/v1/models/{name}"))
    assert answer.status == 404
    assert answer.error["code"] in {"model_not_found", "unknown_url"}


async def test_head_works_where_get_does(rig: Rig) -> None:
    rig.route(model="m")
    for path in ("/v1/models", "/v1/models/m", "/healthz", "/metrics"):
        wire = await rig.connect()
        await wire.send(request(method="HEAD", path=path) + request(method="GET", path=path))
        head = await wire.answer(head_only=True)
        got = await wire.answer()
        assert (head.status, got.status) == (200, 200)
        assert head.headers[b"content-type"] == got.headers[b"content-type"]
        if path != "/metrics":
            assert int(head.headers[b"content-length"]) == len(got.body)


async def test_metrics_and_health_while_a_client_leaves(rig: Rig) -> None:
    rig.route(model="m")
    wire = await rig.connect()
    await wire.send(request(method="GET", path="/metrics"))
    wire.leave(reset=True)
    await rig.until(lambda: not rig.hub.clients)
    assert (await rig.ask(request(method="GET", path="/healthz"))).status == 200
