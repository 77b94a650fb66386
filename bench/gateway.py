"""What a request and a chunk of a stream cost in CPU, behind llmgw-gateway and behind HAProxy, side by side.

One mock engine; both proxies route by the `model` in the body and put the engine's key in. The gateway is one worker
with its default configuration and gets its routes from a real etcd. Every body is checked. Compared is the CPU time of
each proxy's process tree, in rounds that alternate between the two, so that whoever else uses the machine disturbs
both alike. Where there are two CPUs or more, the proxies have one of their own and engine and load share another.

    bench/gateway.py [--rounds 5] [--requests 20000] [--streams 600]

Last line: request_ratio=… chunk_ratio=… request_us=… chunk_us=… errors=…; exit code 1 if there were errors or a ratio
is above its limit (--request-limit, --chunk-limit).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import msgspec
import psutil

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
from llmgw.testing.port import HeldPort

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent / ".tools" / "bin"
KEY = "0123456789abcdef" * 4
START_S = 30.0
CONNECTIONS = 32
STREAMS = 200
CHUNKS = 100


def records(port: int) -> dict[Ref, Record]:
    """One model `m` with one replica, ready at `port`."""
    return {
        Ref(Kind.META): StoreMeta(incarnation="bench"),
        Ref(Kind.MODEL, "m"): ModelSpec(name="m", source="x"),
        Ref(Kind.REPLICA, "m-bench"): Replica(
            id="m-bench",
            model="m",
            profile="cpu",
            engine="llama.cpp",
            launch="0" * 16,
            phase=ReplicaPhase.READY,
            shards=(ReplicaShard(rank=0, node="n1", claim=Claim()),),
            created_at=1.0,
            phase_at=1.0,
        ),
        Ref(Kind.SECRET, "m-bench"): EngineSecret(replica="m-bench", key=Secret(KEY)),
        Ref(Kind.SHARD, "n1/m-bench.0"): ShardReport(
            node="n1",
            replica="m-bench",
            rank=0,
            model="m",
            phase=ShardPhase.READY,
            phase_at=1.0,
            incarnation="1",
            address="127.0.0.1",
            port=port,
        ),
    }


async def publish(endpoints: tuple[str, ...], port: int) -> None:
    """Write what makes the engine at `port` routable."""
    async with open_etcd(EtcdConfig(endpoints=endpoints)) as store:
        await store.txn(
            [], [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in records(port).items()]
        )


class Proxy:
    """A running proxy: its name, address and process, and what was measured of it."""

    def __init__(self, name: str, port: int, pid: int) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.pid = pid
        self.requests_us: list[float] = []
        self.chunks_us: list[float] = []
        self.plain: list[dict[str, float]] = []
        self.streams: list[dict[str, float]] = []

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children, by the kernel's clock of each process (nanoseconds fine)."""
        process = psutil.Process(self.pid)
        tree = [process, *process.children(recursive=True)]
        return sum(time.clock_gettime(((~each.pid) << 3) | 2) for each in tree)

    def rss_mb(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 1e6


def cpus() -> tuple[set[int], set[int]]:
    """For the proxies, and for engine and load."""
    there = sorted(os.sched_getaffinity(0))
    return ({there[0]}, {there[1]}) if len(there) > 1 else (set(there), set(there))


@contextmanager
def running(command: list[str], cpu: set[int], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process on `cpu`, ended with the context."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        os.sched_setaffinity(process.pid, cpu)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask(url: str) -> bool:
    """Whether a request gets its answer."""
    body = msgspec.json.encode({"model": "m", "messages": []})
    request = urllib.request.Request(f"{url}/v1/chat/completions", data=body)  # noqa: S310  # http, of our own
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait(condition: Callable[[], bool], what: str, log: Path) -> None:
    """Until `condition` holds; says what did not happen, with the log's last lines."""
    end_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end_s:
            sys.exit(f"bench: {what} did not come up:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)


def free_port(stack: ExitStack) -> int:
    """A port that nobody else gets meanwhile."""
    held = stack.enter_context(HeldPort())
    return held.number


def load(proxy: Proxy, cpu: set[int], *arguments: str) -> dict[str, float]:
    """Put load on `proxy`; the outcome, and the CPU seconds it took the proxy as `cpu_s`."""
    before_s = proxy.cpu_s()
    command = [sys.executable, str(HERE / "load.py"), proxy.url, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        os.sched_setaffinity(process.pid, cpu)
        out, _ = process.communicate()
    if process.returncode != 0:
        sys.exit(f"bench: the load on {proxy.name} failed")
    outcome: dict[str, float] = msgspec.json.decode(out)
    outcome["cpu_s"] = proxy.cpu_s() - before_s
    return outcome


def measure(proxies: list[Proxy], cpu: set[int], options: argparse.Namespace) -> int:
    """All rounds; how many errors there were."""
    errors = 0
    for proxy in proxies:  # once unmeasured: connections, caches
        load(proxy, cpu, "--requests", "2000")
    for number in range(options.rounds):
        for proxy in proxies if number % 2 == 0 else proxies[::-1]:
            plain = load(proxy, cpu, "--connections", str(CONNECTIONS), "--requests", str(options.requests))
            proxy.plain.append(plain)
            proxy.requests_us.append(plain["cpu_s"] / plain["good"] * 1e6)
            errors += int(plain["bad"])
        for proxy in proxies if number % 2 == 0 else proxies[::-1]:
            arguments = ("--connections", str(STREAMS), "--requests", str(options.streams), "--chunks", str(CHUNKS))
            streams = load(proxy, cpu, *arguments, "--stream")
            proxy.streams.append(streams)
            proxy.chunks_us.append(streams["cpu_s"] / streams["chunks"] * 1e6)
            errors += int(streams["bad"])
            if streams["chunks"] != options.streams * CHUNKS:
                errors += 1
        row = "  ".join(f"{p.name} {p.requests_us[-1]:.1f} µs, {p.chunks_us[-1]:.2f} µs" for p in proxies)
        print(f"round {number + 1}: {row}", flush=True)
    return errors


def table(proxies: list[Proxy]) -> None:
    """What was measured, a line each."""
    print(
        f"\n{'':16} {'CPU/request':>12} {'min..max':>14} {'CPU/chunk':>10} {'min..max':>12} {'req/s':>7} "
        f"{'p50':>7} {'p99':>8} {'first p50':>10} {'RSS':>7}"
    )
    for each in proxies:
        rate = statistics.median(plain["good"] / plain["seconds"] for plain in each.plain)
        p50, p99 = (statistics.median(plain[f"whole_{p}_ms"] for plain in each.plain) for p in ("p50", "p99"))
        first = statistics.median(streams["first_p50_ms"] for streams in each.streams)
        print(
            f"{each.name:16} {statistics.median(each.requests_us):9.1f} µs "
            f"{min(each.requests_us):6.1f}..{max(each.requests_us):<6.1f} "
            f"{statistics.median(each.chunks_us):7.2f} µs {min(each.chunks_us):5.2f}..{max(each.chunks_us):<5.2f} "
            f"{rate:7.0f} {p50:4.1f} ms {p99:5.1f} ms {first:7.1f} ms {each.rss_mb():4.0f} MB"
        )


def counted(url: str) -> float:
    """How many good requests the gateway says it has answered."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith('llmgw_gateway_requests_total{code="200",model="m"}'):
                return float(line.rpartition(" ")[2])
    return 0.0


def bench(options: argparse.Namespace) -> int:
    """Run it all; the exit code."""
    haproxy = shutil.which("haproxy", path=f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")
    if haproxy is None:
        sys.exit("bench: there is no haproxy; `make setup` unpacks Debian's into .tools/bin")
    for_proxies, for_others = cpus()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-bench-")))
        engine, first, second = (free_port(stack) for _ in range(3))
        (directory / "etcd").mkdir()
        etcd = stack.enter_context(Etcd(directory / "etcd"))
        etcd.wait_healthy()
        anyio.run(publish, etcd.endpoints, engine)

        command = [sys.executable, str(HERE / "mock_engine.py"), str(engine), "--chunks", str(CHUNKS)]
        log = directory / "engine.log"
        stack.enter_context(running(command, for_others, log))
        wait(lambda: ask(f"http://127.0.0.1:{engine}"), "the engine", log)

        config = directory / "haproxy.cfg"
        text = (HERE / "haproxy.cfg.in").read_text()
        for name, value in {"DIR": directory, "PORT": first, "ENGINE": engine, "KEY": KEY}.items():
            text = text.replace(f"@{name}@", str(value))
        config.write_text(text)
        log = directory / "haproxy.log"
        process = stack.enter_context(running([haproxy, "-f", str(config)], for_proxies, log))
        proxies = [Proxy("haproxy", first, process.pid)]
        wait(lambda: ask(proxies[0].url), "haproxy", log)

        settings = directory / "gateway.yaml"
        settings.write_text(f"etcd: {{endpoints: [{', '.join(etcd.endpoints)}]}}\nlisten: 127.0.0.1:{second}\n")
        log = directory / "gateway.log"
        command = [sys.executable, "-m", "llmgw.gateway", "--config", str(settings)]
        process = stack.enter_context(running(command, for_proxies, log))
        proxies.append(Proxy("llmgw-gateway", second, process.pid))
        wait(lambda: ask(proxies[1].url), "the gateway", log)

        before = counted(proxies[1].url)
        errors = measure(proxies, for_others, options)
        sent = 2000 + options.rounds * (options.requests + options.streams)
        if counted(proxies[1].url) - before != sent:
            print(f"the gateway counted {counted(proxies[1].url) - before:.0f} requests, {sent} were sent")
            errors += 1
        table(proxies)
        return verdict(proxies, errors, options)


def verdict(proxies: list[Proxy], errors: int, options: argparse.Namespace) -> int:
    """Print the last line; the exit code."""
    haproxy, gateway = proxies
    request_us, chunk_us = statistics.median(gateway.requests_us), statistics.median(gateway.chunks_us)
    request_ratio = request_us / statistics.median(haproxy.requests_us)
    chunk_ratio = chunk_us / statistics.median(haproxy.chunks_us)
    print(
        f"request_ratio={request_ratio:.2f} chunk_ratio={chunk_ratio:.2f} "
        f"request_us={request_us:.1f} chunk_us={chunk_us:.2f} errors={errors}"
    )
    return int(errors > 0 or request_ratio > options.request_limit or chunk_ratio > options.chunk_limit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000, help="per proxy and round")
    parser.add_argument("--streams", type=int, default=600, help=f"per proxy and round, {CHUNKS} chunks each")
    parser.add_argument("--request-limit", type=float, default=2.0)
    parser.add_argument("--chunk-limit", type=float, default=1.4)
    sys.exit(bench(parser.parse_args()))
