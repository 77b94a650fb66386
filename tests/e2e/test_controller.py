"""`llmgw-controller` as a process: its configuration, its store, its signals, and what it says of itself."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from llmgw.config import EtcdConfig
from llmgw.core.catalog import ModelSpec, Scaling
from llmgw.core.record import Head, Leader
from llmgw.core.replica import ModelState, ScaleCause
from llmgw.core.snapshot import Kind, Ref
from llmgw.store import codec, keys
from llmgw.store.etcd import EtcdStore, open_etcd
from llmgw.store.port import PutOp
from llmgw.testing.etcd import Etcd
from llmgw.testing.load import LoadTeller
from llmgw.testing.port import HeldPort

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

DEADLINE_S = 60
BIN = Path(sys.executable).parent / "llmgw-controller"

FAST = "ttl_s: 6\nkeepalive_s: 1.2\nmargin_s: 2\netcd: {connect_timeout_s: 0.5, read_timeout_s: 1.5, endpoints: %s}\n"
"""A lease that lapses soon, and still has room for a busy machine."""


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


class Process:
    """One controller on a port of its own."""

    def __init__(self, directory: Path, name: str, settings: str) -> None:
        self._port = HeldPort()
        self.name = name
        self.url = f"http://127.0.0.1:{self._port.number}"
        self.config = directory / f"{name}.yaml"
        self.config.write_text(f"id: {name}\nlisten: 127.0.0.1:{self._port.number}\nlog_format: json\n{settings}")
        self.errors = directory / f"{name}.log"
        with self.errors.open("ab") as log:
            self.process = subprocess.Popen(
                [BIN, "--config", self.config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged so far, whole lines only."""
        text = self.errors.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._port.close()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, etcd: Etcd) -> Iterator[Start]:
    started: list[Process] = []

    def begin(name: str, settings: str | None = None) -> Process:
        one = Process(tmp_path, name, FAST % json.dumps(etcd.endpoints) if settings is None else settings)
        started.append(one)
        return one

    yield begin
    for one in started:
        one.close()


async def until(holds: Callable[[], Any]) -> None:
    """Until `holds`, which may be asynchronous."""
    with anyio.fail_after(DEADLINE_S):
        while True:
            found = holds()
            if hasattr(found, "__await__"):
                found = await found
            if found:
                return
            await anyio.sleep(0.02)


async def is_led_by(store: EtcdStore, name: str) -> bool:
    held = await store.get(keys.key(Ref(Kind.LEADER)))
    if held is None:
        return False
    found = codec.decode(Ref(Kind.LEADER), held.value)
    return isinstance(found, Leader) and found.id == name


async def health(client: httpx2.AsyncClient, one: Process) -> dict[str, Any]:
    """Its health as it says; empty while it does not answer."""
    try:
        answer = await client.get(f"{one.url}/healthz")
    except httpx2.TransportError:
        return {}
    return {**answer.json(), "code": answer.status_code}


async def has_role(client: httpx2.AsyncClient, one: Process, role: str) -> bool:
    return (await health(client, one)).get("role") == role


async def follows(client: httpx2.AsyncClient, one: Process) -> bool:
    return bool((await health(client, one)).get("mirror", {}).get("ready"))


def visitor() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(trust_env=False, timeout=5)


async def test_one_leads_the_other_stands_by_and_sigterm_hands_over(start: Start, etcd: Etcd) -> None:
    async with visitor() as client:
        a = start("a")

        await until(lambda: has_role(client, a, "leader"))
        b = start("b")

        await until(lambda: follows(client, b))
        standby = await health(client, b)
        assert (standby["code"], standby["status"], standby["role"]) == (200, "ok", "standby")
        assert "llmgw_controller_leader 1.0" in (await client.get(f"{a.url}/metrics")).text
        assert "llmgw_controller_leader 0.0" in (await client.get(f"{b.url}/metrics")).text
        assert "a (127.0.0.1:" in (await client.get(b.url)).text
        first = (await health(client, a))["term"]

        assert a.end() == 0

        await until(lambda: has_role(client, b, "leader"))
        assert (await health(client, b))["term"] > first
        assert "Traceback" not in a.errors.read_text()


async def test_a04_a_stopped_leader_wakes_up_as_a_standby(start: Start, etcd: Etcd) -> None:
    """SIGSTOP until the other leads and writes, then SIGCONT: nothing of the old term is written, and it steps down."""
    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store, visitor() as client:
        a = start("a")
        await until(lambda: is_led_by(store, "a"))
        b = start("b")

        await until(lambda: follows(client, b))
        old = (await health(client, a))["term"]
        a.process.send_signal(signal.SIGSTOP)
        await until(lambda: is_led_by(store, "b"))
        model = PutOp(key=keys.key(Ref(Kind.MODEL, "m")), value=codec.encode_stored(ModelSpec(name="m", source="s")))
        await store.txn([], [model])

        async def judged() -> bool:
            return await store.get(keys.key(Ref(Kind.MODEL_STATE, "m"))) is not None

        await until(judged)
        a.process.send_signal(signal.SIGCONT)

        async def a_stands_by() -> bool:
            found = await health(client, a)
            return found.get("role") == "standby" and found.get("code") == 200

        await until(a_stands_by)
        await until(lambda: any(line["message"] == "no longer leading" for line in a.lines()))
        held = await store.get(keys.key(Ref(Kind.HEAD)))
        assert held is not None
        head = codec.decode(Ref(Kind.HEAD), held.value)
        assert isinstance(head, Head)
        assert head.term > old
        assert await is_led_by(store, "b")


async def test_without_etcd_it_waits_says_so_in_one_line_and_stays_healthy(start: Start, etcd: Etcd) -> None:
    etcd.members[0].kill()
    async with visitor() as client:
        a = start("a")
        await until(lambda: sum("waiting for the store" in line["message"] for line in a.lines()) >= 2)
        found = await health(client, a)
        assert (found["code"], found["role"], found["mirror"]["ready"]) == (200, "standby", False)
        text = a.errors.read_text()
        assert "Traceback" not in text
        waiting = [line["message"] for line in a.lines() if "waiting" in line["message"]]
        assert etcd.endpoints[0] in waiting[0]
        etcd.members[0].start()

        await until(lambda: has_role(client, a, "leader"))
        assert a.end(signal.SIGINT) == 0


async def test_a_leader_that_loses_etcd_stops_leading_and_comes_back_alone(start: Start, etcd: Etcd) -> None:
    async with visitor() as client:
        a = start("a")

        await until(lambda: has_role(client, a, "leader"))
        etcd.members[0].kill()
        await until(lambda: has_role(client, a, "standby"))
        etcd.members[0].start()
        await until(lambda: has_role(client, a, "leader"))
        assert "Traceback" not in a.errors.read_text()
        assert a.end() == 0


async def test_a_bad_config_is_refused_whole(start: Start) -> None:
    a = start("a", "margin_s: 1\nlisen: 127.0.0.1:1\nttl_s: soon\n")
    assert a.process.wait(DEADLINE_S) == 2
    text = a.errors.read_text()
    assert "Traceback" not in text
    assert f"{a.config}:4: margin_s: 1 must be at least" in text
    assert f"{a.config}:5: lisen: unknown key 'lisen'" in text
    assert "did you mean 'listen'?" in text
    assert f"{a.config}:6: ttl_s" in text


async def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    done = await anyio.run_process([BIN, "--config", tmp_path / "none.yaml"], check=False)
    assert done.returncode == 2
    assert b"none.yaml" in done.stderr
    assert b"Traceback" not in done.stderr


async def test_a_port_in_use_is_one_sentence(start: Start, etcd: Etcd) -> None:
    a = start("a")
    async with visitor() as client:

        async def answers() -> bool:
            return bool(await health(client, a))

        await until(answers)
        done = await anyio.run_process([BIN, "--config", a.config], check=False)
    assert done.returncode == 2
    assert b"Address already in use" in done.stderr
    assert b"Traceback" not in done.stderr


async def test_a_corrupt_record_is_told_by_its_key_and_does_no_harm(start: Start, etcd: Etcd) -> None:
    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store, visitor() as client:
        await store.txn([], [PutOp(key=keys.ROOT + "spec/models/broken", value=b"{not json")])
        good = PutOp(key=keys.key(Ref(Kind.MODEL, "m")), value=codec.encode_stored(ModelSpec(name="m", source="s")))
        await store.txn([], [good])
        a = start("a")

        async def judged() -> bool:
            return await store.get(keys.key(Ref(Kind.MODEL_STATE, "m"))) is not None

        await until(judged)
        told = [line for line in a.lines() if line["message"] == "corrupt record"]
        assert [line["key"] for line in told] == ["/llmgw/spec/models/broken"]
        assert 'llmgw_corrupt_records{kind="spec/models"} 1.0' in (await client.get(f"{a.url}/metrics")).text
        assert "spec/models/broken" in (await client.get(a.url)).text
        assert await store.get(keys.ROOT + "spec/models/broken") is not None


async def test_a_model_is_woken_by_what_a_gateway_tells_and_its_load_is_told(start: Start, etcd: Etcd) -> None:
    one = start("one", "scale_every_s: 0.5\n" + FAST % json.dumps(etcd.endpoints))
    spec = ModelSpec(name="m", source="m.gguf", scaling=Scaling(min=0, max=2))

    async def state() -> ModelState | None:
        item = await store.get(keys.key(Ref(Kind.MODEL_STATE, "m")))
        found = None if item is None else codec.decode(Ref(Kind.MODEL_STATE, "m"), item.value)
        return found if isinstance(found, ModelState) else None

    async def wanted(number: int) -> bool:
        found = await state()
        return found is not None and found.wanted == number

    async def told(line: str) -> bool:
        return line in (await client.get(f"{one.url}/metrics")).text

    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store, visitor() as client:
        await until(lambda: is_led_by(store, "one"))
        await store.txn([], [PutOp(key=keys.key(Ref(Kind.MODEL, "m")), value=codec.encode_stored(spec))])
        await until(lambda: wanted(0))
        await until(lambda: told("llmgw_load_known 0.0"))
        async with anyio.create_task_group() as tasks:
            teller = LoadTeller(store, "host:8880")
            teller.say({"m": (0, 3)})
            tasks.start_soon(teller.run)
            await until(lambda: wanted(1))
            found = await state()
            assert found is not None
            assert found.scale is not None
            assert (found.scale.cause, found.scale.load) == (ScaleCause.WAKE, 3)
            await until(lambda: told('llmgw_model_load{model="m"} 3.0'))
            tasks.cancel_scope.cancel()
        await until(lambda: told("llmgw_load_known 0.0"))
        assert await wanted(1)
    assert one.end() == 0
