"""The tree restarts what dies, gives up where that can't help, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import anyio
import psutil
import pytest

from llmgw.cli.dev_plan import Child
from llmgw.cli.dev_tree import Running, Tree, end_leftovers
from llmgw.errors import Invalid

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


def program(text: str, *, name: str = "one") -> Child:
    return Child(name=name, kind="gateway", argv=(sys.executable, "-c", text))


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = anyio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")
        self._more.set()

    async def saw(self, text: str, *, times: int = 1) -> None:
        with anyio.fail_after(20):
            while sum(text in line for line in self.lines) < times:
                self._more = anyio.Event()
                await self._more.wait()


async def test_a_killed_child_is_started_again_and_stopped_in_the_end() -> None:
    said = Lines()
    tree = Tree(say=said, changed=lambda: None)
    child = program("import os, time; print('up', os.getpid(), flush=True); time.sleep(600)")
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: tree.supervise(child, give_up=said.lines.append))
        await said.saw("up")
        [first] = tree.running()
        psutil.Process(first.pid).kill()
        await said.saw("SIGKILL")
        await said.saw("starting it again")
        await said.saw("up", times=2)
        now = tree.running()
        assert now[0].pid != first.pid
        await tree.stop([child], hurry=anyio.Event())
    assert tree.running() == []
    assert not psutil.pid_exists(now[0].pid)


async def test_a_refused_config_is_not_tried_again() -> None:
    said = Lines()
    tree = Tree(say=said, changed=lambda: None)
    why: list[str] = []
    await tree.supervise(program("import sys; print('bad config'); sys.exit(2)"), give_up=why.append)
    assert why == [str(tree.failed)]
    assert isinstance(tree.failed, Invalid)
    assert said.lines == ["one: bad config"]


async def test_what_ignores_term_is_killed_in_a_hurry() -> None:
    said = Lines()
    tree = Tree(say=said, changed=lambda: None)
    text = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    child, hurry = program(text), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: tree.supervise(child, give_up=said.lines.append))
        await said.saw("deaf")
        [running] = tree.running()
        hurry.set()
        await tree.stop([child], hurry=hurry)
    assert not psutil.pid_exists(running.pid)
    assert any("killing it" in line for line in said.lines)


async def test_leftovers_are_ended_only_while_pid_and_start_time_agree() -> None:
    said = Lines()
    left = subprocess.Popen(  # noqa: ASYNC220  # returns at once
        [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    other = subprocess.Popen(  # noqa: ASYNC220  # returns at once
        [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    try:
        at = psutil.Process(left.pid).create_time()
        records = [
            Running(name="left", pid=left.pid, started_at=at),
            Running(name="other", pid=other.pid, started_at=at - 100),
        ]
        await end_leftovers(records, said)
        assert not psutil.pid_exists(left.pid)
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
