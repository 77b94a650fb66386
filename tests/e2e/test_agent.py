"""A real agent on real etcd, with an engine that is a program and misbehaves as told."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from llmgw.config import EtcdConfig
from llmgw.core.ids import Secret
from llmgw.core.node import Facts, Session
from llmgw.core.replica import Assignment, ShardPhase, ShardReport, confirms_stop
from llmgw.core.snapshot import Kind, Ref
from llmgw.store import codec
from llmgw.testing.agent_process import WAIT_S, AgentProcess, behave, fake_engine, until
from llmgw.testing.etcd import Etcd
from llmgw.testing.fake_engine import Behaviour
from llmgw.testing.node import assignment, stopped
from llmgw.testing.people import people_of
from llmgw_agent import proc
from llmgw_agent.state import decode_state

pytestmark = [pytest.mark.e2e, pytest.mark.etcd, pytest.mark.anyio]

KEY = "5e" * 32
SHARD = "m-aaaaa.0"
REPORT = Ref(Kind.SHARD, f"n1/{SHARD}")
ORDER = Ref(Kind.ASSIGNMENT, f"n1/{SHARD}")
SESSION = Ref(Kind.SESSION, "n1")


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


def config_of(etcd: Etcd) -> EtcdConfig:
    return EtcdConfig(endpoints=etcd.endpoints)


def order(**changes: Any) -> Assignment:
    return assignment(engine_key=Secret(KEY), **changes)


@pytest.fixture
def agent(etcd: Etcd, tmp_path: Path, tiny_model: Path) -> Iterator[AgentProcess]:
    """An agent with the fake engine, not started."""
    with AgentProcess(
        tmp_path / "n1", endpoints=etcd.endpoints, engine=fake_engine(tmp_path), models=tiny_model.parent
    ) as agent:
        yield agent


def authorised() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


async def ask(report: ShardReport, *, max_tokens: int = 1) -> int:
    async with httpx2.AsyncClient(trust_env=False, timeout=WAIT_S) as http:
        url = f"http://{report.address}:{report.port}/v1/completions"
        answer = await http.post(url, headers=authorised(), json={"prompt": "x", "max_tokens": max_tokens})
        return answer.status_code


@asynccontextmanager
async def chunks_of(report: ShardReport) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """A streamed answer without end; what is handed over returns its next event."""
    assert report.address is not None
    assert report.port is not None
    body = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
    async with await anyio.connect_tcp(report.address, report.port) as connection:
        await connection.send(f"{head}\r\n\r\n{body}".encode())
        buffered = BufferedByteReceiveStream(connection)
        assert b" 200 " in await buffered.receive_until(b"\r\n\r\n", 65536)

        async def next_chunk() -> str:
            return (await buffered.receive_until(b"\n\n", 65536)).decode()

        yield next_chunk


def of_process(report: ShardReport, name: str) -> str:
    """A file of an engine's below /proc."""
    return Path(f"/proc/{report.pid}/{name}").read_text()


def a_stranger() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)


def alive(pid: int | None) -> bool:
    entry = None if pid is None else proc.read(pid)
    return entry is not None and not entry.zombie


async def test_an_order_to_run_and_an_order_to_stop(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order())
        report = await people.until_ready(agent, REPORT)
        assert (report.context, report.slots, report.build) == (512, 2, "llama.cpp@1")
        assert await ask(report) == 200
        facts: Facts = await people.record(Ref(Kind.FACTS, "n1"))
        assert facts.weights is not None
        assert [item.source for item in facts.weights] == ["tiny.gguf"]
        revision = await people.put(ORDER, stopped(order()))
        await people.until(REPORT, lambda r: confirms_stop(r, order_rev=revision), agent)
        assert agent.engines() == []
        await people.delete(ORDER)
        await people.until(REPORT, lambda r: r is None, agent)


async def test_the_key_is_nowhere_but_in_the_engines_environment_and_the_saved_state(
    etcd: Etcd, agent: AgentProcess
) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(launch={"env": behave(spam_bytes=4096)}))
        report = await people.until_ready(agent, REPORT)
        assert KEY not in of_process(report, "cmdline")
        assert f"LLAMA_API_KEY={KEY}" in of_process(report, "environ")
        holding = [path for path in agent.directory.rglob("*") if path.is_file() and KEY in path.read_text("latin-1")]
        assert {path.name for path in holding} <= {"state.json", "state.previous.json"}
        assert all(path.stat().st_mode & 0o077 == 0 for path in agent.data.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["ordered to stop", "main process killed"])
async def test_b03_the_whole_tree_ends_before_a_stop_is_confirmed_or_a_start_made(
    etcd: Etcd, agent: AgentProcess, how: str
) -> None:
    behaviour = behave(ignore_term=True, children=2, session_children=1)
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(launch={"env": behaviour}))
        first = await people.until_ready(agent, REPORT)
        tree = agent.engines()
        assert len(tree) == 4
        if how == "ordered to stop":
            revision = await people.put(ORDER, stopped(order()))
            await people.until(REPORT, lambda r: confirms_stop(r, order_rev=revision), agent)
            assert not [pid for pid in tree if alive(pid)]
            assert agent.engines() == []
        else:
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            second = await people.until(
                REPORT,
                lambda r: r.phase is ShardPhase.READY and r.incarnation != first.incarnation,
                agent,
            )
            assert not [pid for pid in tree if alive(pid)]
            assert (second.port, second.attempts) == (first.port, 1)


async def test_b03_children_without_the_mark_are_known_by_their_descent(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(launch={"env": behave(clean_children=2)}))
        report = await people.until_ready(agent, REPORT)
        tree = [entry.pid for entry in proc.scan().values() if entry.ppid == report.pid]
        assert len(tree) == 2
        revision = await people.put(ORDER, stopped(order()))
        await people.until(REPORT, lambda r: confirms_stop(r, order_rev=revision), agent)
        assert not [pid for pid in tree if alive(pid)]


@pytest.mark.parametrize("how", ["start time", "boot"])
async def test_b07_a_stranger_with_a_recorded_number_is_never_signalled(
    etcd: Etcd, agent: AgentProcess, how: str
) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order())
        first = await people.until_ready(agent, REPORT)
        agent.kill()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        # A stranger that dies of any signal, leading a session and a group of its own, under the recorded number.
        stranger = a_stranger()
        try:
            entry = proc.read(stranger.pid)
            assert entry is not None
            path = agent.data / "state.json"
            state = decode_state(path.read_bytes())
            [shard] = state.shards
            assert shard.process is not None
            started = shard.process.started if how == "start time" else entry.started
            boot = shard.process.boot_id if how == "start time" else "another boot"
            forged = msgspec.structs.replace(shard.process, pid=stranger.pid, started=started, boot_id=boot)
            shard = msgspec.structs.replace(shard, process=forged)
            path.write_bytes(codec.encode_stored(msgspec.structs.replace(state, shards=(shard,))))
            agent.start()
            second = await people.until(
                REPORT,
                lambda r: r.phase is ShardPhase.READY and r.incarnation != first.incarnation,
                agent,
            )
            assert second.pid != stranger.pid
            revision = await people.put(ORDER, stopped(order()))
            await people.until(REPORT, lambda r: confirms_stop(r, order_rev=revision), agent)
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


async def test_b09_an_engine_that_prints_without_end_answers_whatever_becomes_of_the_agent(
    etcd: Etcd, agent: AgentProcess
) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(launch={"env": behave(spam_bytes=5 * 2**20, spam_bytes_s=2**20)}))
        report = await people.until_ready(agent, REPORT)

        async def prints_and_answers() -> None:
            log = agent.data / "logs" / SHARD / "current.log"
            before = log.stat().st_size
            await until(lambda: log.stat().st_size > before + 2**20, "another MiB of output")
            assert await ask(report) == 200

        assert (agent.data / "logs" / SHARD / "current.log").stat().st_size >= 5 * 2**20 - 2**10
        agent.signal(signal.SIGSTOP)
        await prints_and_answers()
        agent.kill()
        await prints_and_answers()
        agent.start()
        await until(lambda: "session held" in agent.said().rpartition("agent up")[2], "the agent is back")
        await prints_and_answers()
        again = await people.until_ready(agent, REPORT)
        assert (again.pid, again.incarnation) == (report.pid, report.incarnation)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
async def test_b11_a_restart_of_the_agent_cuts_no_stream_and_starts_no_second_engine(
    etcd: Etcd, agent: AgentProcess, how: str
) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order())
        report = await people.until_ready(agent, REPORT)
        async with chunks_of(report) as next_chunk:
            seen = [await next_chunk()]
            begun_s = anyio.current_time()
            if how == "SIGTERM":
                assert agent.terminate() == 0
            else:
                agent.kill()
            agent.start()
            await until(lambda: agent.said().count("session held") == 2, "the agent is back")
            again = await people.until_ready(agent, REPORT)
            # More than what may lie in buffers since before: chunks that were made after the agent was back.
            enough = int((anyio.current_time() - begun_s) / Behaviour().chunk_s) + 10
            with anyio.fail_after(WAIT_S):
                while len(seen) < enough:
                    seen.append(await next_chunk())
            assert all(f'"w{n} "' in chunk for n, chunk in enumerate(seen))
        assert (again.pid, again.incarnation, again.port) == (report.pid, report.incarnation, report.port)
        assert agent.engines() == [report.pid]
        session: Session = await people.record(SESSION)
        assert session.pid == agent.pid


async def test_b11_with_on_exit_stop_engines_end_with_the_agent(etcd: Etcd, tmp_path: Path, tiny_model: Path) -> None:
    with AgentProcess(
        tmp_path / "n1",
        endpoints=etcd.endpoints,
        engine=fake_engine(tmp_path),
        models=tiny_model.parent,
        settings={"on_exit": "stop"},
    ) as agent:
        async with people_of(config_of(etcd)) as people:
            agent.start()
            await people.put(ORDER, order(launch={"env": behave(children=1)}))
            await people.until_ready(agent, REPORT)
            assert agent.terminate() == 0
            assert agent.engines() == []
            assert await people.record(SESSION) is None
            agent.start()
            await people.until_ready(agent, REPORT)


async def test_b14_a_damaged_state_is_kept_and_the_engine_found_again(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order())
        report = await people.until_ready(agent, REPORT)
        agent.kill()
        for name in ("state.json", "state.previous.json"):
            path = agent.data / name
            path.write_bytes(path.read_bytes()[:100])
        agent.start()
        await until(lambda: agent.said().count("session held") == 2, "the agent is back", within_s=60)
        again = await people.until_ready(agent, REPORT)
        assert (again.pid, again.port, again.assigned) == (report.pid, report.port, True)
        assert "state.json is damaged" in agent.said()
        assert (agent.data / "state.json.damaged-1").exists()
        assert agent.engines() == [report.pid]


async def test_c07_a_copied_data_directory_is_refused_by_name_and_disturbs_nothing(
    etcd: Etcd, agent: AgentProcess, tmp_path: Path, tiny_model: Path
) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order())
        report = await people.until_ready(agent, REPORT)
        session = await people.record(SESSION)
        with AgentProcess(
            tmp_path / "copy",
            endpoints=etcd.endpoints,
            engine=fake_engine(tmp_path),
            models=tiny_model.parent,
            settings={"engine_ports": [20600, 20640]},
        ) as copy:
            copy.data.mkdir()
            for path in agent.data.glob("*.json"):
                (copy.data / path.name).write_bytes(path.read_bytes())
            copy.start()
            await until(lambda: "is held by the agent at 127.0.0.1" in copy.said(), "the copy is refused")
            assert "the data directory is a copy" in copy.said()
            assert copy.engines() == []
        assert await people.record(SESSION) == session
        assert await people.record(REPORT) == report
        assert alive(report.pid)


async def test_c07_two_agents_in_one_data_directory_are_refused_at_once(etcd: Etcd, agent: AgentProcess) -> None:
    agent.start()
    await until(lambda: "agent up" in agent.said(), "the agent is up")
    second = AgentProcess(agent.directory, endpoints=etcd.endpoints)
    second.start()
    await until(lambda: second.poll() is not None, "the second one ends")
    assert second.poll() == 4
    assert f"is in use by another agent (pid {agent.pid})" in second.said()


class Proxy(BaseHTTPRequestHandler):
    """A corporate proxy that answers everything with 503."""

    seen: list[str]

    def handle_one_request(self) -> None:
        self.seen.append(str(self.rfile.readline(65536)))
        self.wfile.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.close_connection = True


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """(its URL, the first line of each request it got)."""
    seen: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Seeing", (Proxy,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    thread.join()
    server.server_close()


async def test_g07_no_proxy_is_ever_asked_and_none_is_handed_to_engines(
    etcd: Etcd, agent: AgentProcess, proxy: tuple[str, list[str]]
) -> None:
    url, seen = proxy
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    hostile = dict.fromkeys(names, url) | {"NO_PROXY": "10.0.0.0/8, example.org", "LLAMA_ARG_N_PREDICT": "1"}
    async with people_of(config_of(etcd)) as people:
        agent.start(env=hostile)
        await people.put(ORDER, order())
        report = await people.until_ready(agent, REPORT)
        names_there = [item.partition("=")[0] for item in of_process(report, "environ").split("\0")]
        assert "LLAMA_API_KEY" in names_there
        assert not [name for name in names_there if "proxy" in name.lower() or name.startswith("LLAMA_ARG_")]
        assert seen == []


async def test_without_etcd_it_says_so_in_one_line_and_runs_what_was_assigned(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order())
        report = await people.until_ready(agent, REPORT)
        agent.kill()
        assert report.pid is not None
        os.kill(report.pid, signal.SIGKILL)
        with socket.socket() as nobody:  # bound and not listening: refused, and nobody else's meanwhile
            nobody.bind(("127.0.0.1", 0))
            agent.start(env={"LLMGW_ETCD": f"http://127.0.0.1:{nobody.getsockname()[1]}"})
            await until(partial(_answers, report), "the engine is back without the store")
            await until(lambda: "waiting for the store" in agent.said(), "it says what it waits for")
        assert "Traceback" not in agent.said()


def _answers(report: ShardReport) -> bool:
    try:
        answer = httpx2.get(f"http://{report.address}:{report.port}/health", trust_env=False, timeout=2)
    except httpx2.HTTPError:
        return False
    return answer.status_code == 200


async def test_an_engine_that_crashes_leaves_its_last_words(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        crash = behave(crash_s=0.1, load_s=30, exit_code=3, last_words=f"could not do it, key {KEY}")
        await people.put(ORDER, order(launch={"env": crash}))
        report = await people.until(REPORT, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        assert report.reason == "exit 3: could not do it, key *** (attempt 4, the last)"
        assert report.attempts == 4
        assert "could not do it" in agent.engine_log(SHARD, "previous.log")


async def test_b13_a_slow_load_that_writes_its_log_outlives_its_budget_and_a_silent_one_does_not(
    etcd: Etcd, agent: AgentProcess
) -> None:
    silent = order(replica="m-bbbbb", start_s=1.0, launch={"env": behave(load_s=4.0)})
    other = Ref(Kind.SHARD, "n1/m-bbbbb.0")
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(start_s=1.0, launch={"env": behave(load_s=4.0, spam_bytes_s=2**14)}))
        await people.put(Ref(Kind.ASSIGNMENT, "n1/m-bbbbb.0"), silent)
        await people.until(REPORT, lambda r: r is not None and r.extended > 0, agent)
        failed = await people.until(other, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        report = await people.until_ready(agent, REPORT)
    assert failed.reason.endswith(" 1 s: Loading model")  # that its port opened counts as a step, if it was seen
    assert report.attempts == 0
    assert await ask(report) == 200


async def test_an_engine_with_other_slots_than_ordered_fails(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(launch={"env": behave(slots=1)}))
        report = await people.until(REPORT, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        assert report.reason == "2 slots were ordered, the engine has 1"
        assert agent.engines() == []


async def test_missing_weights_fail_with_where_they_were_looked_for(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        await people.put(ORDER, order(launch={"source": "no/such.gguf"}))
        report = await people.until(REPORT, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        assert report.reason.startswith("there is no 'no/such.gguf' in ")


async def test_many_starts_at_once_get_ports_of_their_own(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(config_of(etcd)) as people:
        agent.start()
        refs = [Ref(Kind.SHARD, f"n1/m-aaaa{letter}.0") for letter in "abcdef"]
        for ref in refs:
            replica = ref.name.partition("/")[2][:-2]
            await people.put(Ref(Kind.ASSIGNMENT, ref.name), order(replica=replica))
        ports = [(await people.until_ready(agent, ref)).port for ref in refs]
        assert len(set(ports)) == len(refs)


@pytest.fixture
def secured(start_etcd: Callable[..., Etcd]) -> Etcd:
    """An etcd with TLS, users and a role for node n1."""
    etcd = start_etcd(tls=True, auth=True)
    etcd.roles("agent", "n1")
    return etcd


async def test_with_tls_and_a_role_of_its_own_it_can_do_all_it_must_and_no_more(
    secured: Etcd, tmp_path: Path, tiny_model: Path
) -> None:
    etcd = secured
    assert etcd.certificates is not None
    assert etcd.passwords is not None
    files = etcd.certificates
    connection: dict[str, Any] = {"ca": str(files.ca), "cert": str(files.client), "key": str(files.client_key)}
    controller = EtcdConfig(
        endpoints=etcd.endpoints,
        user="llmgw-controller",
        password_file=str(etcd.passwords / "llmgw-controller"),
        **connection,
    )
    agent_user = {"user": "llmgw-agent-n1", "password_file": str(etcd.passwords / "llmgw-agent-n1")}
    settings = {"etcd": {"endpoints": list(etcd.endpoints), **connection, **agent_user}}
    engine = fake_engine(tmp_path)
    with AgentProcess(
        tmp_path / "n1", endpoints=(), engine=engine, models=tiny_model.parent, settings=settings
    ) as agent:
        async with people_of(controller) as people:
            agent.start()
            await people.put(ORDER, order())
            await people.until_ready(agent, REPORT)
            revision = await people.put(ORDER, stopped(order()))
            await people.until(REPORT, lambda r: confirms_stop(r, order_rev=revision), agent)
            assert "denies" not in agent.said()
        # Under another's role it says what is wrong, and goes on trying.
        agent.kill()
        settings["etcd"]["user"] = "llmgw-gateway"
        settings["etcd"]["password_file"] = str(etcd.passwords / "llmgw-gateway")
    with AgentProcess(
        tmp_path / "n2", endpoints=(), engine=engine, models=tiny_model.parent, settings=settings
    ) as stranger:
        stranger.start()
        await until(lambda: "the store denies this agent" in stranger.said(), "it says that it is denied")
        assert stranger.poll() is None


async def test_a_bad_config_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("name: n1\ndata_dir: data\nmodel_dir: [x]\n")
    done = await anyio.run_process([sys.executable, "-m", "llmgw_agent", "--config", str(path)], check=False)
    assert done.returncode == 2
    assert f"{path}:3: model_dir" in done.stderr.decode()
    assert "model_dirs" in done.stderr.decode()
