"""What passes between client and engine beside the bodies: only what is on the lists."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import Reply, Stream, sse

pytestmark = pytest.mark.anyio

CANARY = "canary-7f3a"

CREDENTIALS = [
    f"Authorization: Bearer {CANARY}",
    f"X-Api-Key: {CANARY}",
    f"api-key: {CANARY}",
    f"Cookie: session={CANARY}",
    f"Proxy-Authorization: Basic {CANARY}",
    f"Proxy-Connection: {CANARY}",
    "Connection: x-secret, keep-alive",
    f"X-Secret: {CANARY}",
    f"X-Forwarded-For: {CANARY}",
    f"X-Forwarded-Host: {CANARY}",
    f"Forwarded: for={CANARY}",
    f"OpenAI-Organization: {CANARY}",
    f"User-Agent: {CANARY}",
    f"Accept-Encoding: gzip, {CANARY}",
    f"Content-Type: application/json; x={CANARY}",
]


async def test_i02_an_engine_sees_the_allow_list_and_our_key_only(rig: Rig) -> None:
    engine = await rig.engine(key="e" * 64)
    rig.route(engine.port, key="e" * 64)
    body = chat()
    data = request(
        body, headers=[*CREDENTIALS, "X-Request-Id: r-1", "traceparent: t-1"], path=f"/v1/completions?{CANARY}"
    )
    assert (await rig.ask(data)).status == 200
    (seen,) = engine.seen
    assert dict(seen.headers) == {
        b"host": b"127.0.0.1:%d" % engine.port,
        b"authorization": b"Bearer " + b"e" * 64,
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body),
        b"x-request-id": b"r-1",
        b"traceparent": b"t-1",
    }
    assert CANARY.encode() not in seen.line


async def test_i02_a_client_sees_nothing_of_the_engines_own(rig: Rig) -> None:
    own = (
        b"Server: llama.cpp",
        b"Set-Cookie: a=b",
        b"Keep-Alive: timeout=5, max=100",
        b"Connection: keep-alive",
        b"X-Powered-By: y",
        b"Access-Control-Allow-Origin: *",
        b"WWW-Authenticate: Bearer",
        b"Proxy-Authenticate: Basic",
        b"Trailer: x",
        b"X-Request-Id: r-9",
    )
    engine = await rig.engine(Reply(headers=own), Stream(events=sse("a"), headers=own))
    rig.route(engine.port)
    answer = await rig.ask()
    assert set(answer.headers) == {b"content-type", b"content-length", b"x-request-id"}
    assert answer.headers[b"x-request-id"] == b"r-9"
    answer = await rig.ask(request(chat(stream=True)))
    assert set(answer.headers) == {b"content-type", b"transfer-encoding", b"x-request-id"}


async def test_i02_an_engines_key_stays_out_of_answers_logs_and_metrics(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "5ec2e7" * 10
    wrong, dying = await rig.engine(key="other"), await rig.engine(key=key)
    await dying.stop()
    rig.route(wrong.port, dying.port, key=key)
    answer = await rig.ask()
    assert answer.status == 503
    metrics = await rig.ask(request(method="GET", path="/metrics"))
    logged = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "replica at fault" in logged
    for text in (logged, answer.body.decode(), metrics.body.decode(), repr(rig.hub.groups["m"].members)):
        assert key not in text


@pytest.fixture
def proxy() -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that answers 503 to whatever it is sent, and keeps what that was."""
    caught: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    caught.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 503 Proxy\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1], caught
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


async def test_g07_engines_are_never_reached_through_a_proxy(
    rig: Rig, proxy: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, caught = proxy
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8, example.org ")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, example.org ")
    engine = await rig.engine()
    rig.route(engine.port)
    assert (await rig.ask()).status == 200
    assert caught == []
