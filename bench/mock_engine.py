"""An engine that costs nearly nothing: a small JSON answer, or a stream of equal chunks, to any POST.

At protocol level (uvloop, httptools), so that it is never what a proxy waits for. Bodies are constants: the load knows
them too and checks every byte.

    bench/mock_engine.py PORT [--chunks 100] [--interval-ms 10]
"""

from __future__ import annotations

import argparse
import asyncio

import httptools
import uvloop

BODY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"' + b"hello world " * 20 + b'"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":10,"completion_tokens":20,"total_tokens":30}}'
)
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)


def stream_body(chunks: int) -> bytes:
    """What a whole stream's body is."""
    return CHUNK * chunks + DONE


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, chunks: int, interval_s: float) -> None:
        self.chunks = chunks
        self.interval_s = interval_s
        self.loop = asyncio.get_running_loop()
        self.left = 0
        self.stream = False
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self.stream = self.stream or b'"stream":true' in piece

    def on_message_complete(self) -> None:
        if self.stream:
            self.stream = False
            self.left = self.chunks
            self.transport.write(_HEAD)
            self.tick()
        else:
            self.transport.write(_ANSWER)

    def tick(self) -> None:
        if self.transport.is_closing():
            return
        if self.left == 0:
            self.transport.write(_END)
            return
        self.left -= 1
        self.transport.write(_CHUNK)
        self.loop.call_later(self.interval_s, self.tick)


async def serve(port: int, chunks: int, interval_s: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(chunks, interval_s), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--interval-ms", type=float, default=10.0)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.chunks, options.interval_ms / 1000))
