"""A program that plays llama-server, and misbehaves as told: `python -m llmgw.testing.fake_engine ARGS…`.

It takes llama-server's arguments (of which it heeds model, alias, host, port, context and slots), demands the key in
LLAMA_API_KEY and answers what the agent and the gateway ask. How it misbehaves stands as JSON in FAKE_ENGINE, see
`Behaviour`. Standard library and msgspec only, so that it starts quickly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import msgspec

CLEAN_ENV: Final = ("env", "-i", "sleep", "3600")


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How it behaves; all of it optional.

    load_s: how long it says 503 first. ignore_term: SIGTERM does nothing. children: processes forked into its group,
    session_children: into sessions of their own, clean_children: as those, with an empty environment; all of them
    ignore SIGTERM. spam_bytes: written to stdout at once,
    spam_bytes_s: and so many each second. crash_s: exits with `exit_code` so long after its start, saying `last_words`.
    slots: what /props says, instead of what was ordered. silent: completions are accepted and never answered.
    chunk_s: time between two chunks of a stream.
    """

    load_s: float = 0.0
    ignore_term: bool = False
    children: int = 0
    session_children: int = 0
    clean_children: int = 0
    spam_bytes: int = 0
    spam_bytes_s: int = 0
    crash_s: float | None = None
    exit_code: int = 1
    last_words: str = ""
    slots: int | None = None
    silent: bool = False
    chunk_s: float = 0.05


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What of the command line is heeded."""

    model: str
    alias: str
    host: str
    port: int
    context: int
    slots: int

    @classmethod
    def parse(cls, argv: list[str]) -> Options:
        """From llama-server's arguments."""
        values = dict(zip(argv, [*argv[1:], ""], strict=True))
        return cls(
            model=values["-m"],
            alias=values["--alias"],
            host=values["--host"],
            port=int(values["--port"]),
            context=int(values["-c"]),
            slots=int(values["-np"]),
        )


class Server(ThreadingHTTPServer):
    """The server and what its requests share."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: Options, behaviour: Behaviour, key: str) -> None:
        self.options, self.behaviour, self.key = options, behaviour, key
        self.loaded = threading.Event()
        self.busy = 0
        self.counting = threading.Lock()
        self.never = threading.Event()
        super().__init__((options.host, options.port), Handler)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[mutable-override]  # a handler only ever has this server

    def do_GET(self) -> None:  # the standard library's name
        """health, props, slots."""
        options, behaviour = self.server.options, self.server.behaviour
        if not self.server.loaded.is_set():
            self._error(503, "Loading model")
        elif self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif not self._allowed():
            self._error(401, "Invalid API Key")
        elif self.path == "/props":
            slots = options.slots if behaviour.slots is None else behaviour.slots
            settings = {"n_ctx": options.context // options.slots}
            self._answer(200, {"total_slots": slots, "default_generation_settings": settings})
        elif self.path == "/slots":
            busy = self.server.busy
            self._answer(200, [{"id": n, "is_processing": n < busy} for n in range(options.slots)])
        else:
            self._error(404, "File Not Found")

    def do_POST(self) -> None:  # the standard library's name
        """Completions: `max_tokens` chunks."""
        body = msgspec.json.decode(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if not self.server.loaded.is_set():
            self._error(503, "Loading model")
        elif not self._allowed():
            self._error(401, "Invalid API Key")
        elif self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._error(404, "File Not Found")
        else:
            with self.server.counting:
                self.server.busy += 1
            try:
                self._complete(body)
            finally:
                with self.server.counting:
                    self.server.busy -= 1

    def _complete(self, body: dict[str, Any]) -> None:
        behaviour, tokens = self.server.behaviour, int(body.get("max_tokens", 4))
        if behaviour.silent:
            self.server.never.wait()
        if not body.get("stream"):
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            self._answer(200, {"model": self.server.options.alias, "choices": [{"text": "w" * tokens}], "usage": usage})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for n in range(tokens):
            self.wfile.write(b"data: " + msgspec.json.encode({"choices": [{"text": f"w{n} "}]}) + b"\n\n")
            self.server.never.wait(behaviour.chunk_s)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.key}"

    def _answer(self, status: int, body: object) -> None:
        raw = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _error(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "code": status}})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the standard library's name
        """Silence: what it prints is scripted."""


def fork_child(*, session: bool, clean: bool) -> None:
    """A process of the tree that ignores SIGTERM for as long as it lives."""
    if os.fork() != 0:
        return
    if session:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if clean:
        os.execvp(CLEAN_ENV[0], CLEAN_ENV)  # noqa: S606  # a constant; an ignored signal stays ignored
    while True:
        signal.pause()


def spam(behaviour: Behaviour, stop: threading.Event) -> None:
    """Write what was asked for, blocking as any careless engine would."""
    line = b"x" * 1023 + b"\n"
    for _ in range(behaviour.spam_bytes // len(line)):
        os.write(1, line)
    while behaviour.spam_bytes_s and not stop.wait(0.1):
        for _ in range(behaviour.spam_bytes_s // len(line) // 10):
            os.write(1, line)


def main() -> None:
    """The program."""
    behaviour = msgspec.json.decode(os.environ.get("FAKE_ENGINE", "{}"), type=Behaviour)
    options = Options.parse(sys.argv[1:])
    if not Path(options.model).is_file():
        sys.exit(f"error: failed to load model '{options.model}'")
    if behaviour.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    for n in range(behaviour.children + behaviour.session_children + behaviour.clean_children):
        clean = n >= behaviour.children + behaviour.session_children
        fork_child(session=clean or n >= behaviour.children, clean=clean)
    try:
        server = Server(options, behaviour, os.environ["LLAMA_API_KEY"])
    except OSError as error:
        sys.exit(f"error: couldn't bind to {options.host}:{options.port}: {error.strerror}")
    threading.Thread(target=spam, args=(behaviour, server.never), daemon=True).start()

    def load() -> None:
        server.never.wait(behaviour.load_s)
        server.loaded.set()

    def crash(after_s: float) -> None:
        server.never.wait(after_s)
        os.write(2, f"{behaviour.last_words}\n".encode())
        os._exit(behaviour.exit_code)

    threading.Thread(target=load, daemon=True).start()
    if behaviour.crash_s is not None:
        threading.Thread(target=crash, args=(behaviour.crash_s,), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
