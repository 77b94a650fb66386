"""The gateway as a process on a real etcd: it serves without it, starts without it, and ends in good order."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmgw.config import EtcdConfig
from llmgw.core.catalog import ModelSpec
from llmgw.core.ids import Secret
from llmgw.core.record import Record, StoreMeta
from llmgw.core.replica import Claim, EngineSecret, Replica, ReplicaPhase, ReplicaShard, ShardPhase, ShardReport
from llmgw.core.snapshot import Kind, Ref
from llmgw.store import codec, keys
from llmgw.store.etcd import open_etcd
from llmgw.store.port import PutOp
from llmgw.testing.etcd import Etcd
from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import WITHIN_S, Stream, sse

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.etcd]

KEY = "5ec2e7" * 10
START_S = 30.0
"""Dead-line for a process to start on a busy machine; it takes a second."""


def records(name: str, port: int, model: str = "m") -> dict[Ref, Record]:
    """Everything that makes one replica routable."""
    return {
        Ref(Kind.META): StoreMeta(incarnation="one"),
        Ref(Kind.MODEL, model): ModelSpec(name=model, source="x"),
        Ref(Kind.REPLICA, name): Replica(
            id=name,
            model=model,
            profile="cpu",
            engine="llama.cpp",
            launch="0" * 16,
            phase=ReplicaPhase.PLACED,
            shards=(ReplicaShard(rank=0, node="n1", claim=Claim()),),
            created_at=1.0,
            phase_at=1.0,
        ),
        Ref(Kind.SECRET, name): EngineSecret(replica=name, key=Secret(KEY)),
        Ref(Kind.SHARD, f"n1/{name}.0"): ShardReport(
            node="n1",
            replica=name,
            rank=0,
            model=model,
            phase=ShardPhase.READY,
            phase_at=1.0,
            incarnation="i1",
            address="127.0.0.1",
            port=port,
        ),
    }


async def write(etcd: Etcd, found: dict[Ref, Record]) -> None:
    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store:
        ops = [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in found.items()]
        await store.txn([], ops)


class Gateway:
    """A running `llmgw-gateway`, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())
        self._news = asyncio.Event()

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(msgspec.json.decode(line))
            self._news.set()

    async def logged(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line for which `condition` holds."""
        async with asyncio.timeout(START_S):
            while True:
                for line in self.lines:
                    if condition(line):
                        return line
                self._news.clear()
                await self._news.wait()

    async def port(self) -> int:
        url: str = (await self.logged(lambda line: line["message"] == "serving"))["url"]
        return int(url.rpartition(":")[2])

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), START_S)
        await asyncio.wait_for(self._reading, WITHIN_S)
        return code


class Starter:
    """Starts gateways with one configuration file."""

    def __init__(self, path: Path, etcd: Etcd) -> None:
        self.path = path
        self.started: list[Gateway] = []
        settings = {
            "etcd": {"endpoints": list(etcd.endpoints)},
            "listen": "127.0.0.1:0",
            "snapshot": "state/routes.json",
            "log_format": "json",
        }
        path.write_bytes(msgspec.yaml.encode(settings))

    async def start(self) -> Gateway:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmgw.gateway", "--config", self.path, stderr=asyncio.subprocess.PIPE
        )
        self.started.append(Gateway(process))
        return self.started[-1]


@pytest.fixture
async def starter(tmp_path: Path, etcd: Etcd) -> AsyncIterator[Starter]:
    made = Starter(tmp_path / "gateway.yaml", etcd)
    yield made
    for gateway in made.started:
        await gateway.end(signal.SIGKILL)


async def status(rig: Rig, port: int, data: bytes | None = None) -> int:
    return (await rig.ask(data, port=port)).status


async def until_status(rig: Rig, port: int, wanted: int, data: bytes | None = None) -> None:
    async with asyncio.timeout(START_S):
        # Another process: nothing there could set an event.
        while await status(rig, port, data) != wanted:  # noqa: ASYNC110  # as said
            await asyncio.sleep(0.02)


async def test_a01_it_serves_while_etcd_is_gone_and_starts_without_it(
    etcd: Etcd, rig: Rig, starter: Starter, tmp_path: Path
) -> None:
    long = Stream(events=sse(*map(str, range(60))), pause_s=0.1)
    engine = await rig.engine(long, key=KEY)
    await write(etcd, records("r1", engine.port))
    gateway = await starter.start()
    port = await gateway.port()
    saved = tmp_path / "state" / "routes.json"
    await until_status(rig, port, 200, request(method="GET", path="/healthz"))
    streaming = await rig.connect(port)
    await streaming.send(request(chat(stream=True)))
    await streaming.head()
    await streaming.chunk()
    await rig.until(saved.exists)

    for member in etcd.members:
        member.kill()
    for _ in range(100):
        assert await status(rig, port) == 200
    fresh = await starter.start()
    await fresh.logged(lambda line: "saved routes" in line["message"])
    fresh_port = await fresh.port()
    for _ in range(20):
        assert await status(rig, fresh_port) == 200
    assert saved.stat().st_mode & 0o777 == 0o600

    for member in etcd.members:
        member.restart()
    await etcd.healthy()
    other = await rig.engine(key=KEY)
    await write(etcd, records("q1", other.port, model="later"))
    for each in (port, fresh_port):
        await until_status(rig, each, 200, request(chat(model="later")))
        assert await status(rig, each) == 200

    body = b""
    while chunk := await streaming.chunk():
        body += chunk
    assert body.endswith(b"data: [DONE]\n\n")
    streaming.leave()
    for each_gateway in starter.started:
        assert each_gateway.process.returncode is None
        assert not [line for line in each_gateway.lines if "trace" in line or KEY in str(line)]


async def test_told_to_end_it_lets_requests_finish_and_takes_no_more(etcd: Etcd, rig: Rig, starter: Starter) -> None:
    engine = await rig.engine(Stream(events=sse(*map(str, range(10))), pause_s=0.1), key=KEY)
    await write(etcd, records("r1", engine.port))
    gateway = await starter.start()
    port = await gateway.port()
    await until_status(rig, port, 200, request(method="GET", path="/healthz"))
    idle, streaming = await rig.connect(port), await rig.connect(port)
    await streaming.send(request(chat(stream=True)))
    await streaming.head()
    gateway.process.send_signal(signal.SIGTERM)
    assert await idle.closed() == b""
    body = b""
    while chunk := await streaming.chunk():
        body += chunk
    assert body.endswith(b"data: [DONE]\n\n")
    assert await streaming.closed() == b""
    assert await gateway.end() == 0


async def test_a_second_signal_ends_it_at_once(etcd: Etcd, rig: Rig, starter: Starter) -> None:
    engine = await rig.engine(Stream(events=sse(*map(str, range(1000))), pause_s=0.1), key=KEY)
    await write(etcd, records("r1", engine.port))
    gateway = await starter.start()
    port = await gateway.port()
    await until_status(rig, port, 200, request(method="GET", path="/healthz"))
    streaming = await rig.connect(port)
    await streaming.send(request(chat(stream=True)))
    await streaming.head()
    gateway.process.send_signal(signal.SIGINT)
    await gateway.logged(lambda line: line["message"] == "told to end")
    gateway.process.send_signal(signal.SIGTERM)
    assert await gateway.end() == 0
    await engine.until(lambda e: e.left == 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("listen: 0.0.0.0:8880\n", ["gateway.yaml:1", "listen", "0.0.0.0:8880", "loopback", "127.0.0.1:8880"]),
        ("listen: '[::]:8880'\n", ["gateway.yaml:1", "loopback"]),
        ("in_flight_max: 5\nbody_max_byte: 7\n", ["gateway.yaml:2", "body_max_byte", "body_max_bytes"]),
        ("upstream_idle_s: 5\n", ["gateway.yaml:1", "upstream_idle_s", "below 5"]),
        ("metrics_listen: 9000\n", ["gateway.yaml:1", "metrics_listen", "host:port"]),
    ],
)
async def test_a_bad_configuration_is_refused_with_its_line(tmp_path: Path, text: str, says: list[str]) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmgw.gateway", "--config", path, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    for part in says:
        assert part in stderr.decode()


async def test_a_port_that_is_taken_is_said_plainly(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"listen: 127.0.0.1:{rig.port}\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmgw.gateway", "--config", path, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert f"can't listen on 127.0.0.1:{rig.port}" in stderr.decode()
    assert b"Traceback" not in stderr


async def test_metrics_on_an_address_of_their_own(etcd: Etcd, rig: Rig, starter: Starter) -> None:
    settings = msgspec.yaml.decode(starter.path.read_bytes())
    starter.path.write_bytes(msgspec.yaml.encode({**settings, "metrics_listen": "127.0.0.1:0"}))
    gateway = await starter.start()
    api = await gateway.logged(lambda line: line["message"] == "serving" and not line["metrics"])
    metrics = await gateway.logged(lambda line: line["message"] == "serving" and line["metrics"])
    ports = [int(line["url"].rpartition(":")[2]) for line in (api, metrics)]
    wanted = {"/metrics": (404, 200), "/v1/models": (503, 404), "/v1/chat/completions": (405, 405)}
    for path, expected in wanted.items():
        got = tuple([await status(rig, port, request(method="GET", path=path)) for port in ports])
        assert got == expected, path
    assert await status(rig, ports[1], request(chat())) == 404
