"""Asks a fixed number of times over a fixed number of connections and checks every byte of every answer.

    bench/load.py URL --connections 32 --requests 20000 [--stream --chunks 100]

Prints one JSON object: how many were good and bad, chunks, seconds, and latencies in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop
from mock_engine import BODY, CHUNK, stream_body

PATH = "/v1/chat/completions"
REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant. " * 10},
        {"role": "user", "content": "Say hello. " * 20},
    ],
    "max_tokens": 100,
}


class Load:
    """What all connections share."""

    def __init__(self, netloc: str, requests: int, *, stream: bool, chunks: int) -> None:
        body = msgspec.json.encode({**REQUEST, "stream": True} if stream else REQUEST)
        # The headers that the official Python client sends, as far as they are always there.
        self.request = (
            f"POST {PATH} HTTP/1.1\r\nHost: {netloc}\r\nAccept: application/json\r\n"
            f"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.1\r\nAuthorization: Bearer sk-1234\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.expected = stream_body(chunks) if stream else BODY
        self.left = requests
        self.open = 0
        self.good = 0
        self.bad = 0
        self.chunks = 0
        self.first_s: list[float] = []
        self.whole_s: list[float] = []
        self.over = asyncio.Event()


class Connection(asyncio.Protocol):
    """One client: asks again as soon as it is answered."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.asked_s = 0.0
        self.waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.load.open += 1
        self.ask()

    def ask(self) -> None:
        if self.load.left == 0:
            self.transport.close()
            return
        self.load.left -= 1
        self.waiting = True
        self.parts.clear()
        self.asked_s = self.loop.time()
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        if not self.parts:
            self.load.first_s.append(self.loop.time() - self.asked_s)
        self.parts.append(piece)

    def on_message_complete(self) -> None:
        load = self.load
        body = b"".join(self.parts)
        self.waiting = False
        if self.parser.get_status_code() == 200 and body == load.expected:
            load.good += 1
            load.chunks += body.count(CHUNK)
            load.whole_s.append(self.loop.time() - self.asked_s)
        else:
            load.bad += 1
        self.loop.call_soon(self.ask)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the loop's protocol
        load = self.load
        load.bad += self.waiting
        load.open -= 1
        if load.open == 0:
            load.over.set()


def percentile_ms(values_s: list[float], share: float) -> float | None:
    """In milliseconds; None when there are none."""
    return round(sorted(values_s)[int(len(values_s) * share)] * 1000, 2) if values_s else None


async def run(url: str, connections: int, requests: int, *, stream: bool, chunks: int) -> dict[str, object]:
    """Put the load on `url`; how it went."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    load = Load(parts.netloc, requests, stream=stream, chunks=chunks)
    began_s = loop.time()
    await asyncio.gather(
        *(loop.create_connection(lambda: Connection(load), parts.hostname, parts.port) for _ in range(connections))
    )
    await load.over.wait()
    return {
        "good": load.good,
        "bad": load.bad + load.left,
        "chunks": load.chunks,
        "seconds": round(loop.time() - began_s, 3),
        "first_p50_ms": percentile_ms(load.first_s, 0.5),
        "first_p99_ms": percentile_ms(load.first_s, 0.99),
        "whole_p50_ms": percentile_ms(load.whole_s, 0.5),
        "whole_p99_ms": percentile_ms(load.whole_s, 0.99),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chunks", type=int, default=100)
    options = parser.parse_args()
    outcome = uvloop.run(
        run(options.url, options.connections, options.requests, stream=options.stream, chunks=options.chunks)
    )
    print(msgspec.json.encode(outcome).decode())
