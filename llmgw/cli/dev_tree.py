"""A supervised tree of processes for `llmgw dev`: start in order, restart what dies, stop in the reverse order.

Invariant: when `run` returns, by whatever way, no process it started is left, and it says which one it had to kill.
Each child has its own session, so that Ctrl-C on the terminal reaches only the supervisor, which stops them in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.abc
import msgspec
import psutil

from llmgw.cli.dev_plan import Child
from llmgw.errors import Invalid, LlmgwError, Problem, Refused

RESTART_S: Final = 0.2
"""First delay before a dead child is started again; doubles up to RESTART_MAX_S."""

RESTART_MAX_S: Final = 5.0
STABLE_S: Final = 10.0
"""A child that lived so long starts again without a longer delay."""

GIVE_UP: Final = 5
"""Starts in a row that ended by themselves before STABLE_S, after which something is wrong for good."""

EXIT_INVALID: Final = 2
"""Exit code of every llmgw process for a config that is refused: starting again can't help."""

STOP_S: Final = {"etcd": 15.0, "controller": 15.0, "gateway": 15.0, "agent": 60.0}
"""How long each kind may take to stop before it is killed. An agent ends its engines first; an etcd leader whose peers
are gone waits about 6 s for a hand-over."""

LINE_BYTES_MAX: Final = 16 * 1024

EOF_S: Final = 0.2
"""How long to await the end of a dead child's output; a grandchild may hold the pipe open for ever."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A process that runs now, provably: `started_at` is the kernel's, so a reused pid is told apart."""

    name: str
    pid: int
    started_at: float


class Tree:
    """Runs children. `say(name, line)` gets their output and the tree's own words; `changed()` follows every start."""

    def __init__(self, *, say: Callable[[str, str], None], changed: Callable[[], None]) -> None:
        self._say = say
        self._changed = changed
        self._live: dict[str, anyio.abc.Process] = {}
        self._stopping: set[str] = set()
        self._ended: dict[str, anyio.Event] = {}
        self.failed: LlmgwError | None = None
        """Why the tree can't go on, once it can't: Invalid where a process refused its configuration."""

    def running(self) -> list[Running]:
        """What runs now, in the order of starting."""
        out = []
        for name, process in self._live.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                started_at = psutil.Process(process.pid).create_time()
                out.append(Running(name=name, pid=process.pid, started_at=started_at))
        return out

    async def supervise(self, child: Child, *, give_up: Callable[[str], None]) -> None:
        """Keep `child` running until it is stopped; `give_up(why)` when starting it again can't help."""
        self._ended[child.name] = anyio.Event()
        delay_s, failures = RESTART_S, 0
        try:
            while child.name not in self._stopping:
                began = anyio.current_time()
                code = await self._once(child)
                if child.name in self._stopping:
                    return
                lived_s = anyio.current_time() - began
                if lived_s >= STABLE_S:
                    delay_s, failures = RESTART_S, 0
                elif code >= 0:  # somebody's kill says nothing about whether it can run
                    failures += 1
                if code == EXIT_INVALID or failures >= GIVE_UP:
                    why = f"{child.name} can't run (exit code {code}); its last lines above say why"
                    self.failed = Invalid((Problem(message=why),)) if code == EXIT_INVALID else Refused(why)
                    give_up(why)
                    return
                self._say(child.name, f"{_death(code)} after {lived_s:.0f} s; starting it again")
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, RESTART_MAX_S)
        finally:
            self._ended[child.name].set()

    async def _once(self, child: Child) -> int:
        """Run `child` to its end, passing its output on; its exit code."""
        process = await anyio.open_process(
            child.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._live[child.name] = process
        self._changed()
        try:
            await self._pump(child.name, process)
            return await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                await process.aclose()
            self._live.pop(child.name, None)

    async def _pump(self, name: str, process: anyio.abc.Process) -> None:
        """Pass on whole lines until the process closes its output or ends; its own children may hold the pipe open."""
        assert process.stdout is not None  # noqa: S101  # asked for with PIPE above
        stream = process.stdout
        rest = b""
        async with anyio.create_task_group() as group:

            async def until_exit() -> None:
                await process.wait()
                scope.deadline = anyio.current_time() + EOF_S

            with anyio.CancelScope() as scope, contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError):
                group.start_soon(until_exit)
                while True:
                    *lines, rest = (rest + await stream.receive()).split(b"\n")
                    for line in lines:
                        self._say(name, line.decode(errors="replace").rstrip("\r"))
                    if len(rest) > LINE_BYTES_MAX:
                        self._say(name, rest.decode(errors="replace"))
                        rest = b""
        if rest:
            self._say(name, rest.decode(errors="replace"))

    async def stop(self, children: Sequence[Child], *, hurry: anyio.Event) -> None:
        """End these children together: TERM, then KILL after their kind's time or as soon as `hurry` is set."""
        async with anyio.create_task_group() as group:
            for child in children:
                group.start_soon(self._stop, child, hurry)

    async def _stop(self, child: Child, hurry: anyio.Event) -> None:
        self._stopping.add(child.name)
        process = self._live.get(child.name)
        if process is None or process.returncode is not None:
            return
        self._signal(process, signal.SIGTERM)
        with anyio.move_on_after(0.2 if hurry.is_set() else STOP_S[child.kind]):
            async with anyio.create_task_group() as group:

                async def on_hurry() -> None:
                    await hurry.wait()
                    group.cancel_scope.cancel()

                group.start_soon(on_hurry)
                await process.wait()
                group.cancel_scope.cancel()
        if process.returncode is None:
            self._say(child.name, "did not stop in time; killing it")
            self._signal(process, signal.SIGKILL)
        await self._ended[child.name].wait()

    @staticmethod
    def _signal(process: anyio.abc.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            if number is signal.SIGTERM:  # a stopped process gets to see it only when it goes on
                process.send_signal(signal.SIGCONT)


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


async def end_leftovers(left: Sequence[Running], say: Callable[[str, str], None]) -> None:
    """End what an earlier run of this data directory left behind (it was killed): these very processes, no others.

    Raises Refused when one of them outlives SIGKILL for five seconds.
    """
    alive = []
    for record in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(record.pid)
            if abs(process.create_time() - record.started_at) < 0.01:
                say(record.name, f"is left from an earlier run (pid {record.pid}); ending it")
                process.terminate()
                process.resume()
                alive.append(process)
    for process in await _wait_gone(alive, 10.0):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    stuck = await _wait_gone(alive, 5.0)
    if stuck:
        raise Refused(f"processes {', '.join(str(process.pid) for process in stuck)} of an earlier run do not end")


async def _wait_gone(processes: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=limit_s))
    return alive
