"""A real agent process for tests, with engines that are programs: started, stopped, killed, started again.

Engines outlive an agent on purpose, so whoever makes one here must `close` it: that ends every process which bears the
mark of this agent's data directory, and no other.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec
import yaml

from llmgw.testing.fake_engine import Behaviour
from llmgw_agent import proc

WAIT_S: Final = 30.0
"""Dead-line for whatever a test waits for, seconds; nearly all of it is for a busy machine."""


def fake_engine(directory: Path) -> Path:
    """A program that runs `llmgw.testing.fake_engine`, to be named in agent.yaml as a llama.cpp."""
    path = directory / "fake-llama-server"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m llmgw.testing.fake_engine "$@"\n')
    path.chmod(0o755)
    return path


def behave(**behaviour: Any) -> dict[str, str]:
    """A profile's `env` that makes the fake engine behave so."""
    return {"FAKE_ENGINE": msgspec.json.encode(Behaviour(**behaviour)).decode()}


class AgentProcess:
    """One node's agent, its config below `directory`. Use as a context manager, or `close` it."""

    def __init__(
        self,
        directory: Path,
        *,
        endpoints: Sequence[str],
        engine: Path | None = None,
        models: Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`engine` None: whatever the agent finds by itself. `settings` go into agent.yaml as they are."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "agent.log"
        self._config = directory / "agent.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        config: dict[str, Any] = {
            "name": "n1",
            "data_dir": str(self.data),
            "etcd": {"endpoints": list(endpoints)},
            "model_dirs": [str(models)] if models is not None else [],
            "engines": [{"engine": "llama.cpp", "version": "1", "binary": str(engine)}] if engine is not None else [],
            "engine_ports": [20500, 20540],
            "gateway_wait_s": 0.2,
            "session_ttl_s": 6.0,
            "restart_backoff_s": 0.2,
            **(settings or {}),
        }
        self._config.write_text(yaml.safe_dump(config))

    @property
    def pid(self) -> int:
        """Of the running agent. Raises RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError("the agent does not run")
        return self._process.pid

    def start(self, *, env: Mapping[str, str] | None = None) -> None:
        """Start it; returns at once. `env` comes on top of the test's own."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llmgw_agent", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send it to the agent alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Engines go on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """SIGTERM, and wait for its end; returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(timeout=WAIT_S)
        self._process = None
        return status

    def said(self) -> str:
        """Everything it logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def engine_log(self, shard: str, name: str = "current.log") -> str:
        """What a shard's engine printed."""
        path = self.data / "logs" / shard / name
        return path.read_text(errors="replace") if path.exists() else ""

    def engines(self) -> list[int]:
        """The pids of every live process that bears this agent's mark."""
        lock = self.data / "agent.lock"
        if not lock.exists():
            return []
        stat = lock.stat()
        prefix = f"{stat.st_dev}:{stat.st_ino}/"
        return sorted(
            entry.pid
            for entry in proc.scan().values()
            if not entry.zombie and (proc.mark_of(entry.pid) or "").startswith(prefix)
        )

    def close(self) -> None:
        """End the agent and everything it started."""
        self.kill()
        for pid in self.engines():
            entry = proc.read(pid)
            if entry is not None:
                proc.send(pid, entry.started, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def until(condition: Callable[[], bool], what: str, *, within_s: float = WAIT_S) -> None:
    """Return once `condition` holds. Raises TimeoutError naming `what` did not come."""
    with anyio.move_on_after(within_s):
        while not condition():  # noqa: ASYNC110  # the system's processes and files have no event to wait on
            await anyio.sleep(0.02)
        return
    raise TimeoutError(f"not within {within_s:g} s: {what}")
