"""A running cluster as a chaos scenario sees it: its tree, its gateway, and its processes by pid.

Either an `llmgw dev` that is up already (--data DIR), or one of its own in a temporary directory. Only processes that
dev.json names, or that an agent reported as its engines, are ever signalled, and only while pid and start time agree.
Time is real: every wait is for a condition, with a dead-line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx2
import psutil

from llmgw.config import EtcdConfig
from llmgw.core.invariants import check
from llmgw.core.replica import ShardPhase, ShardReport
from llmgw.core.snapshot import Index
from llmgw.store import codec
from llmgw.store.etcd import EtcdStore, open_etcd
from llmgw.store.keys import ROOT

REPO = Path(__file__).resolve().parent.parent
FAST = REPO / "chaos" / "fast.yaml"
ANOTHER = """models:
  {name}:
    source: {source}
    profiles:
      - {{name: cpu, engine: llama.cpp, min_memory_gb: 0.5, context: 512, slots: 1, drain_s: 1}}
"""
T = TypeVar("T")


class ScenarioFailed(Exception):
    """The cluster did not do what it promises."""


@dataclass
class Streamed:
    """One streamed answer: when each chunk came (monotonic seconds), the text, and how it ended."""

    chunks: list[float] = field(default_factory=list)
    text: str = ""
    done: bool = False
    error: str | None = None

    def around(self, moment: float) -> tuple[int, int]:
        """How many chunks came before and after `moment`."""
        before = sum(1 for at in self.chunks if at < moment)
        return before, len(self.chunks) - before


class Cluster:
    """Handle on one `llmgw dev`. `model` is what requests are sent to."""

    def __init__(self, data: Path, store: EtcdStore, *, model: str) -> None:
        self.data, self.store, self.model = data, store, model
        self.state: dict[str, Any] = json.loads((data / "dev.json").read_text())
        self.gateway: str = self.state["gateways"][0]
        self.http = httpx2.AsyncClient(trust_env=False, timeout=httpx2.Timeout(60.0, connect=2.0))

    # --- looking ---------------------------------------------------------------------------------------------------

    async def index(self) -> Index:
        """The whole tree, read linearizably."""
        listing = await self.store.list([ROOT])
        index = Index()
        changes = [change for item in listing.items if (change := codec.change(item)) is not None]
        index.reset(changes, revision=listing.revision)
        return index

    async def leader(self) -> tuple[int, int]:
        """(term, pid) of the leading controller; (0, 0) while there is none."""
        row = (await self.index()).leader
        return (0, 0) if row is None or row.record is None else (row.create_revision, row.record.pid)

    async def engines(self) -> list[ShardReport]:
        """The shards that are ready now, as their agents report them."""
        reports = (await self.index()).reports.records()
        return [report for report in reports if report.phase is ShardPhase.READY and report.pid]

    def pid(self, name: str) -> int:
        """The pid of one process of the tree, freshly read."""
        self.state = json.loads((self.data / "dev.json").read_text())
        for process in self.state["processes"]:
            if process["name"] == name:
                return int(process["pid"])
        raise ScenarioFailed(f"{name} does not run")

    def names(self, kind: str) -> list[str]:
        """The tree's processes whose name begins with `kind`."""
        self.state = json.loads((self.data / "dev.json").read_text())
        return [process["name"] for process in self.state["processes"] if process["name"].startswith(kind)]

    async def judge(self) -> None:
        """Hold the tree against the invariants. Raises ScenarioFailed."""
        found = check(await self.index())
        if found:
            raise ScenarioFailed("; ".join(str(violation) for violation in found))

    # --- doing -----------------------------------------------------------------------------------------------------

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Signal a process of this cluster. Raises ScenarioFailed for one that is none."""
        mine = {int(process["pid"]) for process in json.loads((self.data / "dev.json").read_text())["processes"]}
        if pid not in mine and not self._is_engine(pid):
            raise ScenarioFailed(f"pid {pid} is no process of {self.data}")
        os.kill(pid, number)

    def _is_engine(self, pid: int) -> bool:
        agents = [self.pid(name) for name in self.names("node-")]
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            return "LLMGW_SHARD" in process.environ() and process.ppid() in (1, *agents)
        return False

    async def ask(self, text: str = "Say hello.", *, max_tokens: int = 8) -> httpx2.Response:
        """One whole answer."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        return await self.http.post(f"{self.gateway}/v1/chat/completions", json=body)

    async def stream(
        self,
        into: Streamed,
        *,
        text: str,
        max_tokens: int,
        exact: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """`text` continued by the model (the demo's is no chat model), as it comes; `exact`: up to `max_tokens`."""
        body = {"model": self.model, "prompt": text, "max_tokens": max_tokens, "stream": True, "ignore_eos": exact}
        try:
            async with self.http.stream("POST", f"{self.gateway}/v1/completions", json=body) as answer:
                if answer.status_code != httpx2.codes.OK:
                    into.error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}"
                    return
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        into.done = True
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        into.error = json.dumps(event["error"])
                        continue
                    into.chunks.append(anyio.current_time())
                    piece = "".join(choice["text"] for choice in event["choices"])
                    into.text += piece
                    if on_text is not None:
                        on_text(piece)
        except httpx2.HTTPError as error:
            into.error = f"{type(error).__name__}: {error}"

    async def cli(self, *args: str) -> str:
        """Run `llmgw ARGS` against the cluster; its standard output. Raises ScenarioFailed on a non-zero exit."""
        env = {**os.environ, "LLMGW_ETCD": ",".join(self.state["etcd"])}
        done = await anyio.run_process([sys.executable, "-m", "llmgw.cli", *args], env=env, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace")
            raise ScenarioFailed(f"llmgw {' '.join(args)} exited {done.returncode}: {why}")
        return done.stdout.decode()

    @contextlib.asynccontextmanager
    async def another_model(self, name: str, *, limit_s: float) -> AsyncIterator[None]:
        """Have the leader place one more model, and see it answer; the catalog is as before afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            before, more = Path(folder) / "before.yaml", Path(folder) / "more.yaml"
            before.write_text(await self.cli("get", "catalog"))
            more.write_text(ANOTHER.format(name=name, source=tiny_models() / "tiny.gguf"))
            await self.cli("apply", "-f", str(more))

            async def placed() -> bool:
                index = await self.index()
                state, head, leader = index.model_states.record(name), index.head, index.leader
                if state is None or state.ready < 1 or head is None or head.record is None or leader is None:
                    return False
                return head.record.term == leader.create_revision

            await self.until(f"{name} is placed and ready", placed, limit_s=limit_s)
            try:
                yield
            finally:
                await self.cli("apply", "-f", str(before), "--prune")

    async def until(self, what: str, condition: Callable[[], Awaitable[T | None]], *, limit_s: float) -> T:
        """Await `condition` to give something truthy. Raises ScenarioFailed at the dead-line."""
        with anyio.move_on_after(limit_s):
            while True:
                found = await condition()
                if found:
                    return found
                await anyio.sleep(0.05)
        raise ScenarioFailed(f"{what}: not within {limit_s:.0f} s")

    async def serving(self, *, limit_s: float = 120.0) -> None:
        """Wait until the model answers."""

        async def answers() -> bool:
            try:
                return (await self.ask(max_tokens=1)).status_code == httpx2.codes.OK
            except httpx2.HTTPError:
                return False

        await self.until(f"{self.model} answers", answers, limit_s=limit_s)

    async def another_leader(self, term: int, *, limit_s: float = 60.0) -> int:
        """Wait for a term above `term`; gives it."""

        async def led() -> int | None:
            now, _ = await self.leader()
            return now if now > term else None

        return await self.until(f"a term above {term}", led, limit_s=limit_s)


@contextlib.asynccontextmanager
async def opened(data: Path, *, model: str) -> AsyncIterator[Cluster]:
    """The cluster that runs on `data`."""
    state = json.loads((data / "dev.json").read_text())
    async with open_etcd(EtcdConfig(endpoints=tuple(state["etcd"]))) as store:
        cluster = Cluster(data, store, model=model)
        async with cluster.http:
            yield cluster


@contextlib.asynccontextmanager
async def started(*, settings: Path | None, extra: tuple[str, ...] = ()) -> AsyncIterator[Cluster]:
    """A cluster of our own in a temporary directory, with chaos/catalog.yaml applied and its model answering.

    `settings`: file of durations, None for production's; `extra`: more arguments of `llmgw dev`.
    """
    override = () if settings is None else ("--settings", str(settings))
    with tempfile.TemporaryDirectory(prefix="llmgw-chaos-") as folder:
        data, log = Path(folder) / "data", Path(folder) / "log"
        argv = [sys.executable, "-m", "llmgw.cli", "dev", "--data", str(data), "--model-dir", str(tiny_models())]
        argv += [*override, *extra]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220  # returns at once; its end is awaited below
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            await _until_file(data / "env", process)
            async with opened(data, model="slow") as cluster:
                await cluster.cli("apply", "-f", str(REPO / "chaos" / "catalog.yaml"))
                await cluster.serving()
                yield cluster
        except BaseException:
            sys.stderr.write(log.read_text(errors="replace")[-20_000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            left = leftovers(data)
            if left:
                raise ScenarioFailed(f"left behind: {left}")


async def _until_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    with anyio.move_on_after(120):
        while not await anyio.Path(path).exists():
            if process.poll() is not None:
                raise ScenarioFailed(f"llmgw dev ended with {process.returncode}")
            await anyio.sleep(0.1)
        return
    raise ScenarioFailed("llmgw dev was not ready within 120 s")


def leftovers(data: Path) -> list[str]:
    """Processes that still speak of `data` in argv, or were started as its engines."""
    out = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        marks = (process.info["environ"] or {}).get("LLMGW_DATA_DIR", "")
        if process.pid != os.getpid() and (f"{data}/" in line or marks.startswith(f"{data}/")):
            out.append(f"{process.pid} {line[:120]}")
    return out


def say(text: str) -> None:
    """One line of the scenario's story."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


Scenario = Callable[[Cluster], Awaitable[None]]


def tiny_models() -> Path:
    """Folder of the generated test models; makes the slow one (about 40 tokens a second) when it is missing."""
    folder = REPO / ".tools" / "models"
    slow = folder / "slow.gguf"
    if not slow.exists():
        fresh = slow.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [sys.executable, "-m", "llmgw.testing.tiny_gguf", str(fresh), "--ff", "16384"], check=True, timeout=120
        )
        shutil.move(fresh, slow)
    return folder


def main(scenario: Scenario) -> None:
    """Entry of every scenario file: `--data DIR --model NAME` for a cluster that is up, else one of its own."""
    parser = argparse.ArgumentParser(description=sys.modules[scenario.__module__].__doc__)
    parser.add_argument("--data", type=Path, help="data directory of a running `llmgw dev` (default: start one)")
    parser.add_argument("--model", default="slow", help="the model that requests go to (default: %(default)s)")
    options = parser.parse_args()

    async def run() -> None:
        if options.data is not None:
            async with opened(options.data, model=options.model) as at:
                await scenario(at)
        else:
            async with started(settings=FAST) as at:
                await scenario(at)

    judged(run)


def judged(run: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Run to the end; a cluster that broke a promise ends the process with that one sentence."""
    try:
        anyio.run(run, *args, backend="trio")
    except ScenarioFailed as error:
        sys.exit(f"failed: {error}")
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, ScenarioFailed):
            raise
        sys.exit(f"failed: {first}")
