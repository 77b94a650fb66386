"""The real host: Linux processes, /proc, files below the data directory, HTTP to engines.

Engines get a session of their own, a mark in their environment and files for their output, so that they outlive the
agent and are known again. Everything that can block runs on bounded threads; what gives no answer is unknown, and an
engine of which nothing is known counts as alive.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import httpx2

from llmgw.config import AgentConfig
from llmgw.core.node import EngineFacts, Facts, WeightSet
from llmgw.core.replica import Assignment
from llmgw.errors import Invalid, Problem, Refused
from llmgw_agent import enginelog, proc, statefile, weights
from llmgw_agent.bounded import Bounded, Hung, patiently
from llmgw_agent.cgroup import Cgroups
from llmgw_agent.engines import llama_cpp, llama_probe
from llmgw_agent.engines.find import Survey, survey
from llmgw_agent.engines.launch import MARK, PORT, Launch, NodeView
from llmgw_agent.exit import exit_words
from llmgw_agent.facts import Machine, build_facts, look_at_machine, threads
from llmgw_agent.host import LOOK_S, Found, Launched, Loaded, Look, Probe, Purpose, StartFailed
from llmgw_agent.progress import Progress
from llmgw_agent.state import Process, SavedState

LOCK: Final = "agent.lock"

LOOK_BOUND_S: Final = 5.0
SAVE_BOUND_S: Final = 10.0
START_BOUND_S: Final = 30.0
FACTS_BOUND_S: Final = 5.0
WEIGHTS_BOUND_S: Final = 20.0

KILL_PASSES: Final = 5
"""How often in a row a tree is looked through and killed, against processes that fork meanwhile."""

HTTP_IDLE_S: Final = 2.0
"""Idle connections to engines are dropped after this, before the engines' own 5 s."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_host(config: AgentConfig, *, subreaper: bool = False) -> AsyncIterator[LinuxHost]:
    """The host of `config`, with its data directory locked while the context lasts.

    `subreaper`: every child of this process is an engine's, or an orphan of an engine's tree, so all are buried here.

    Raises:
        Refused: another agent has the data directory.
        Invalid: it can't be made or written.
    """
    directory = Path(config.data_dir)
    lock = await patiently(f"the data directory {directory}", partial(_lock, directory))
    try:
        stat = os.fstat(lock)
        # Node addresses and loopback are never reached through a proxy.
        async with httpx2.AsyncClient(trust_env=False, limits=httpx2.Limits(keepalive_expiry=HTTP_IDLE_S)) as http:
            host = LinuxHost(config, http, data=f"{stat.st_dev}:{stat.st_ino}", boot_id=proc.boot_id())
            host.buries_all = subreaper
            yield host
    finally:
        os.close(lock)


def _lock(directory: Path) -> int:
    """Make the directory and lock it; returns the lock's descriptor. Raises: Refused, Invalid."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "?"
        os.close(lock)
        raise Refused(f"{directory} is in use by another agent (pid {holder})") from error
    except OSError as error:
        os.close(lock)
        raise _unusable(directory, error) from error
    try:
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # a full disk: the number is for people only, and engines are to be looked after
        log.warning("can't write the lock's holder", extra={"fields": {"why": error.strerror}})
    return lock


def _unusable(directory: Path, error: OSError) -> Invalid:
    return Invalid((Problem(path="data_dir", message=f"{directory} can't be used: {error.strerror}"),))


class LinuxHost:
    """Implements `llmgw_agent.host.Host`. Made by `open_host`."""

    def __init__(self, config: AgentConfig, http: httpx2.AsyncClient, *, data: str, boot_id: str) -> None:
        self._config, self._http = config, http
        self.data, self.boot_id = data, boot_id
        self._directory = Path(config.data_dir)
        self._bounded = Bounded()
        self._survey: Survey | None = None
        self._machine: Machine | None = None
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Shard -> the engine that this very process started."""
        self._known: dict[str, set[tuple[int, int]]] = {}
        """Shard -> (pid, started) of processes seen to be of its tree."""
        self._learning = threading.Lock()
        """Held while `_known` of a shard is renewed from itself, so that no two threads forget each other's finds."""
        self._progress: dict[str, Progress] = {}
        self._signalled: set[str] = set()
        self._oom_kills: dict[str, int | None] = {}
        self._warned: tuple[str, ...] = ()
        self.buries_all = False

    @property
    def pid(self) -> int:
        return os.getpid()

    # --- state --------------------------------------------------------------------------------------------------

    async def load(self) -> Loaded:
        return await patiently(f"the data directory {self._directory}", partial(statefile.load, self._directory))

    async def save(self, state: SavedState) -> None:
        try:
            await self._bounded.run("the data directory", partial(self._save, state), bound_s=SAVE_BOUND_S)
        except Hung as error:
            raise OSError(errno.ETIMEDOUT, str(error)) from error

    def _save(self, state: SavedState) -> None:
        statefile.save(self._directory, state)

    # --- processes ----------------------------------------------------------------------------------------------

    async def find(self) -> tuple[Found, ...]:
        return await patiently("/proc", self._find)

    def _find(self) -> tuple[Found, ...]:
        mains: dict[tuple[str, str, str], Found] = {}
        for entry in sorted(proc.scan().values(), key=lambda entry: entry.started):
            mark = None if entry.zombie else proc.mark_of(entry.pid)
            parts = [] if mark is None else mark.split("/")
            if mark is None or len(parts) != 4 or parts[0] != self.data:
                continue
            _, node, shard, incarnation = parts
            self._known.setdefault(shard, set()).add(entry.key)
            process = Process(pid=entry.pid, started=entry.started, boot_id=self.boot_id, mark=mark)
            found = Found(
                node=node, shard=shard, incarnation=incarnation, process=process, port=proc.port_of(entry.pid)
            )
            mains.setdefault((node, shard, incarnation), found)
        return tuple(mains.values())

    async def start(self, order: Assignment, *, incarnation: str, port: int) -> Launched:
        shard = f"{order.replica}.{order.rank}"
        try:
            engines = self._survey or await self._look_for_engines()
            item = engines.choose(order.launch.engine, order.launch.build)
            if item is None:
                wanted = order.launch.build or order.launch.engine
                note = engines.notes.get(order.launch.engine, "not one of the builds this node has")
                raise StartFailed(f"no {wanted} here: {note}")
            resolve = partial(weights.resolve, order.launch.source, self._config.model_dirs)
            found = await self._bounded.run(f"the weights of {shard}", resolve, bound_s=START_BOUND_S)
            node = NodeView(
                address=self._config.address,
                threads=threads(self._config, await self._look_at_machine()),
                home=self._directory / "home",
            )
            launch = llama_cpp.launch(
                order, binary=item.binary, weights=found.path, weights_bytes=found.bytes, node=node, port=port
            )
            spawn = partial(self._spawn, shard, launch, incarnation=incarnation, port=port)
            process = await self._bounded.run(f"the start of {shard}", spawn, bound_s=START_BOUND_S)
        except Hung as error:
            raise StartFailed(str(error)) from error
        return Launched(process=process, build=item.build.id)

    def _spawn(self, shard: str, launch: Launch, *, incarnation: str, port: int) -> Process:
        _check_port(self._config.address, port)
        mark = f"{self.data}/{self._config.name}/{shard}/{incarnation}"
        directory = self._logs(shard)
        enginelog.prune(directory.parent, keep={shard, *self._known})
        home = self._directory / "home"
        self._oom_kills[shard] = Cgroups().oom_kills()
        self._signalled.discard(shard)
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            output = enginelog.open_new(directory)
            try:
                child = subprocess.Popen(
                    launch.argv,
                    env={**launch.env, MARK: mark, PORT: str(port)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=home,
                    start_new_session=True,
                )
            finally:
                os.close(output)
        except OSError as error:
            raise StartFailed(f"{launch.argv[0]} can't be started: {error.strerror}") from error
        self._children[shard] = child
        entry = proc.read(child.pid)
        if entry is None:  # not even a zombie: somebody else reaps our children
            raise StartFailed("the engine was gone at once")
        self._known[shard], self._progress[shard] = {entry.key}, Progress()
        return Process(pid=child.pid, started=entry.started, boot_id=self.boot_id, mark=mark)

    async def look(self, shard: str, process: Process | None, *, whole: bool) -> Look:
        try:
            return await self._bounded.run(
                f"the processes of {shard}", partial(self._look, shard, process, whole=whole), bound_s=LOOK_BOUND_S
            )
        except Hung as error:
            log.warning("can't look at an engine", extra={"fields": {"shard": shard, "why": str(error)}})
            return Look(alive=True, left=1)

    async def gone(self, shard: str, process: Process | None) -> Look:
        while (look := await self.look(shard, process, whole=False)).alive:  # noqa: ASYNC110  # /proc has no events
            await anyio.sleep(LOOK_S)
        return look

    def _look(self, shard: str, process: Process | None, *, whole: bool) -> Look:
        enginelog.trim(self._logs(shard))
        if not whole:
            alive = process is not None and self._lives(shard, process)
            return Look(alive=alive, left=int(alive), exit="" if alive else self._exit_words(shard, process))
        members = self._tree(shard, process)
        self._bury()
        alive = process is not None and (process.pid, process.started) in members
        words = "" if alive else self._exit_words(shard, process)
        steps = self._progress.setdefault(shard, Progress()).look(self._logs(shard), [pid for pid, _ in members])
        if not members:
            for known in (self._known, self._children, self._progress):
                known.pop(shard, None)
        return Look(alive=alive, left=len(members), exit=words, progress=steps)

    def _lives(self, shard: str, process: Process) -> bool:
        """A process once proved ours stays ours while number and start time do: some rewrite their environment."""
        if (process.pid, process.started) not in self._known.get(shard, ()):
            return proc.is_it(process, boot=self.boot_id)
        entry = proc.read(process.pid)
        return entry is not None and not entry.zombie and entry.started == process.started

    def _tree(self, shard: str, process: Process | None) -> set[tuple[int, int]]:
        with self._learning:
            return self._learn(shard, process)

    def _learn(self, shard: str, process: Process | None) -> set[tuple[int, int]]:
        entries = proc.scan()
        prefix = f"{self.data}/{self._config.name}/{shard}/"
        main = process if process is not None and process.boot_id == self.boot_id else None
        members = proc.tree(entries, mark_prefix=prefix, main=main, known=self._known.get(shard, ()))
        self._known[shard] = members
        return members

    def _bury(self) -> None:
        """Wait for orphans of engines' trees that died as our children (we are their subreaper)."""
        while self.buries_all:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            child = next((child for child in self._children.values() if child.pid == dead.si_pid), None)
            if child is None:
                os.waitpid(dead.si_pid, os.WNOHANG)
            else:
                child.poll()

    async def signal(self, shard: str, process: Process | None, *, kill: bool) -> None:
        self._signalled.add(shard)
        try:
            await self._bounded.run(
                f"signals to {shard}", partial(self._signal, shard, process, kill=kill), bound_s=LOOK_BOUND_S
            )
        except Hung as error:
            log.warning("can't signal an engine", extra={"fields": {"shard": shard, "why": str(error)}})

    def _signal(self, shard: str, process: Process | None, *, kill: bool) -> None:
        # The tree is learnt before anything is sent: what loses its parent is still known afterwards.
        members = self._tree(shard, process)
        if not kill:
            main = None if process is None else (process.pid, process.started)
            for pid, started in {main} & members if main is not None else members:
                _send(pid, started, signal.SIGTERM)
            return
        for _ in range(KILL_PASSES):
            if not members:
                return
            for pid, started in members:
                _send(pid, started, signal.SIGKILL)
            members = self._tree(shard, process)

    def _exit_words(self, shard: str, process: Process | None) -> str:
        child = self._children.get(shard)
        code = child.poll() if child is not None and process is not None and child.pid == process.pid else None
        before, now = self._oom_kills.get(shard), Cgroups().oom_kills()
        return exit_words(
            code,
            ours=shard in self._signalled,
            oom=before is not None and now is not None and now > before,
            last_words=enginelog.last_words(self._logs(shard)),
        )

    def _logs(self, shard: str) -> Path:
        return self._directory / "logs" / shard

    # --- looking ------------------------------------------------------------------------------------------------

    async def probe(self, order: Assignment, *, process: Process, port: int, purpose: Purpose) -> Probe:
        del process  # whoever answers on the port proves itself by knowing the key
        host = self._config.address
        base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return await llama_probe.probe(self._http, base, order, purpose)

    async def facts(self) -> Facts:
        self._bury()
        machine = await self._look_at_machine()
        warnings: list[str] = []
        try:
            seen = await self._look_for_engines()
            engines = seen.facts
            warnings += seen.warnings
        except Hung as error:
            log.warning("can't look for engines", extra={"fields": {"why": str(error)}})
            engines = EngineFacts(probed=False)
        sets: tuple[WeightSet, ...] | None = None
        try:
            sets, bad = await self._bounded.run("model_dirs", self._look_for_weights, bound_s=WEIGHTS_BOUND_S)
            warnings += bad
        except Hung as error:
            log.warning("can't list weights", extra={"fields": {"why": str(error)}})
        facts = build_facts(
            self._config, machine, boot_id=self.boot_id, engines=engines, weights=sets, warnings=warnings
        )
        for warning in facts.warnings:
            if warning not in self._warned:  # once, not at every look
                log.warning(warning)
        self._warned = facts.warnings
        return facts

    def _look_for_weights(self) -> tuple[tuple[WeightSet, ...], tuple[str, ...]]:
        return weights.listing(self._config.model_dirs), weights.warnings(self._config.model_dirs)

    async def _look_at_machine(self) -> Machine | None:
        try:
            self._machine = await self._bounded.run("the machine's facts", look_at_machine, bound_s=FACTS_BOUND_S)
        except Hung as error:
            log.warning("can't look at the machine", extra={"fields": {"why": str(error)}})
            return None
        return self._machine

    async def _look_for_engines(self) -> Survey:
        machine = self._machine or await self._look_at_machine()
        flags = () if machine is None else machine.cpu_flags
        look = partial(survey, self._config.engines, flags)
        self._survey = await self._bounded.run("engines", look, bound_s=START_BOUND_S)
        return self._survey


def _send(pid: int, started: int, number: signal.Signals) -> None:
    try:
        proc.send(pid, started, number)
    except OSError as error:
        log.warning("can't signal a process", extra={"fields": {"pid": pid, "why": error.strerror}})


def _check_port(address: str, port: int) -> None:
    """Raises StartFailed unless `port` could be bound this moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartFailed(f"port {port} is taken by another process", port_taken=True) from error
            raise StartFailed(f"{address}:{port} can't be bound: {error.strerror}") from error
