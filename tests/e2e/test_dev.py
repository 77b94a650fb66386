"""`llmgw dev` as people use it: a taken port, a restart on the same data, a kill, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from chaos import cluster
from llmgw.config import GATEWAY_PORT

pytestmark = [pytest.mark.e2e, pytest.mark.etcd]

WAIT_S = 90.0


class Dev:
    """One run of `llmgw dev` on a directory, in a session of its own."""

    def __init__(self, data: Path, *args: str) -> None:
        self.data, self.log = data, data.parent / "log"
        data.mkdir(exist_ok=True)
        (data / "env").unlink(missing_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw.cli", "dev", "--data", str(data), *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until_ready(self) -> dict[str, list[str]]:
        limit = time.monotonic() + WAIT_S
        while not (self.data / "env").exists():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < limit, self.said()
            time.sleep(0.05)
        state: dict[str, list[str]] = json.loads((self.data / "dev.json").read_text())
        return state

    def end(self, number: signal.Signals) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(WAIT_S)


@contextmanager
def dev(data: Path, *args: str) -> Iterator[Dev]:
    running = Dev(data, "--controllers", "1", "--nodes", "1", *args)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end(signal.SIGTERM)


def test_a_taken_port_ctrl_c_and_a_restart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with socket.socket() as blocker:
        blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it: as good
            blocker.bind(("127.0.0.1", GATEWAY_PORT))
            blocker.listen()
        with dev(data) as first:
            assert first.until_ready()["gateways"] != [f"http://127.0.0.1:{GATEWAY_PORT}"]
            assert f"port {GATEWAY_PORT} is taken, gateway-1 listens on" in first.said()
            incarnation = _incarnation(first)
            assert first.end(signal.SIGINT) == 0
    assert "dev          | stopped" in first.said()
    assert cluster.leftovers(data) == []
    with dev(data) as second:
        second.until_ready()
        assert _incarnation(second) == incarnation  # the same store: it went on where it stopped


def test_what_a_killed_run_left_is_ended_by_the_next(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with dev(data) as first:
        first.until_ready()
        left = [psutil.Process(record["pid"]) for record in json.loads((data / "dev.json").read_text())["processes"]]
        first.end(signal.SIGKILL)
    with dev(data) as second:
        second.until_ready()
        assert "is left from an earlier run" in second.said()
        assert not [process for process in left if process.is_running()]
    assert cluster.leftovers(data) == []


def test_a_closed_terminal_stops_everything(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "llmgw.cli", "dev", "--data", str(data), "--controllers", "1", "--nodes", "1"]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    while b"llmgw status" not in said:
        said += os.read(ours, 4096)
    os.close(ours)  # from here on every write of it fails
    process.send_signal(signal.SIGHUP)
    assert process.wait(WAIT_S) == 0
    assert cluster.leftovers(data) == []
    assert not (data / "env").exists()


def test_a_second_run_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with dev(data) as first:
        first.until_ready()
        done = subprocess.run(
            [sys.executable, "-m", "llmgw.cli", "dev", "--data", str(data)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 4
    assert "another `llmgw dev` runs on" in done.stderr


def test_a_setting_that_is_refused_ends_the_run_and_says_why(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("agent: {memmory_gb: 3}\n")
    with dev(tmp_path / "data", "--settings", str(settings)) as run:
        assert run.process.wait(WAIT_S) == 2
    assert "memmory_gb" in run.said()
    assert "did you mean 'memory_gb'" in run.said()
    assert cluster.leftovers(tmp_path / "data") == []


def _incarnation(run: Dev) -> str:
    env = os.environ | {"LLMGW_ETCD": ",".join(json.loads((run.data / "dev.json").read_text())["etcd"])}
    done = subprocess.run(
        [sys.executable, "-m", "llmgw.cli", "get", "/llmgw/meta/store"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(done.stdout.splitlines()[-1])["incarnation"])
