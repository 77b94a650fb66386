"""The controller's page, health and metrics, asked over HTTP as a browser would; and the server under them."""

import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import httpx2
import pytest
import trio

from llmgw.config import ControllerConfig, split_listen
from llmgw.core.catalog import Alias, ModelSpec, Scaling
from llmgw.core.ids import Secret
from llmgw.core.node import Facts, Fleet, Guard, Liveness, NodeState, Session
from llmgw.core.record import Leader, Record, StoreMeta
from llmgw.core.replica import (
    Claim,
    EngineSecret,
    ModelState,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    ScaleCause,
    ScaleState,
)
from llmgw.core.snapshot import Change, Index, Kind, Ref
from llmgw.errors import Invalid
from llmgw.obs.metrics import registry
from llmgw.obs.status import ControllerStatus
from llmgw.web.app import build_app
from llmgw.web.serve import serve


@dataclass
class Mirror:
    index: Index = field(default_factory=Index)
    ready: bool = True
    age_s: float | None = 0.5
    resets: dict[str, int] = field(default_factory=dict)


@dataclass
class Term:
    number: int
    renewed_mono_s: float


NASTY = ['"><img src=x onerror=alert(1)>', "'); alert(1)//", "<script>alert(1)</script>", "{{ 7*7 }}"]


class Bench:
    def __init__(self) -> None:
        self.mirror = Mirror()
        leader = Leader(id="ctl-a", address="127.0.0.1:8800", version="0.1", pid=1)
        self.status = ControllerStatus(leader=leader, renew_within_s=5, mirror=self.mirror)

    def put(self, kind: Kind, name: str, record: Record | None, *, corrupt: str | None = None) -> None:
        revision = self.mirror.index.revision + 1
        change = Change(
            ref=Ref(kind, name), mod_revision=revision, create_revision=revision, record=record, corrupt=corrupt
        )
        self.mirror.index.apply([change], revision=revision)

    def visit(self, scene: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> None:
        """Serve, run `scene` as a client, stop."""

        async def main() -> None:
            app = build_app(self.status, registry(self.status), wall=lambda: 10_000.0)
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    (url,) = await nursery.start(partial(serve, app, host="127.0.0.1", port=0))
                    async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
                        await scene(client)
                    nursery.cancel_scope.cancel()

        trio.run(main)

    def page(self) -> str:
        found: list[str] = []

        async def scene(client: httpx2.AsyncClient) -> None:
            answer = await client.get("/")
            assert answer.status_code == 200
            found.append(answer.text)

        self.visit(scene)
        return found[0]


def replica(name: str, *, node: str = "n0", reason: str = "") -> Replica:
    return Replica(
        id=name,
        model="m",
        profile="cpu",
        engine="llama.cpp",
        launch="0",
        phase=ReplicaPhase.FAILED,
        shards=(ReplicaShard(rank=0, node=node, claim=Claim(memory_bytes=4 * 10**9)),),
        created_at=0,
        phase_at=0,
        reason=reason,
    )


# --- health ----------------------------------------------------------------------------------------------------------


def test_health_of_a_standby_a_leader_and_a_leader_that_does_not_renew() -> None:
    bench = Bench()

    async def scene(client: httpx2.AsyncClient) -> None:
        standby = await client.get("/healthz")
        assert (standby.status_code, standby.json()["status"], standby.json()["role"]) == (200, "ok", "standby")
        assert standby.json()["term"] is None

        bench.status.term = Term(number=7, renewed_mono_s=trio.current_time() - 1)
        leader = await client.get("/healthz")
        assert (leader.status_code, leader.json()["role"], leader.json()["term"]) == (200, "leader", 7)
        assert leader.json()["mirror"] == {"ready": True, "age_s": 0.5, "revision": 0}

        bench.status.term = Term(number=7, renewed_mono_s=trio.current_time() - 6)
        failing = await client.get("/healthz")
        assert (failing.status_code, failing.json()["status"]) == (503, "unhealthy")
        assert "keepalive" in failing.json()["why"]

    bench.visit(scene)


def test_a_leader_that_can_not_read_what_it_decides_from_is_unhealthy() -> None:
    bench = Bench()
    bad = Change(ref=Ref(Kind.FLEET), mod_revision=9, create_revision=9, corrupt="not JSON")

    async def scene(client: httpx2.AsyncClient) -> None:
        bench.status.term = Term(number=7, renewed_mono_s=trio.current_time())
        assert (await client.get("/healthz")).status_code == 200
        bench.mirror.index.apply([bad], revision=9)
        failing = await client.get("/healthz")
        assert failing.status_code == 503
        assert failing.json()["why"] == "leads, but can decide little: plan/fleet can't be read (not JSON)"
        bench.status.term = None
        assert (await client.get("/healthz")).status_code == 200

    bench.visit(scene)


def test_health_before_anything_was_read_is_null_not_zero() -> None:
    bench = Bench()
    bench.status.mirror = None

    async def scene(client: httpx2.AsyncClient) -> None:
        answer = await client.get("/healthz")
        assert answer.status_code == 200
        assert answer.json()["mirror"] == {"ready": False, "age_s": None, "revision": None}

    bench.visit(scene)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_shows_who_leads_nodes_models_and_why_not_more() -> None:
    bench = Bench()
    bench.put(Kind.META, "", StoreMeta(incarnation="store-1"))
    bench.put(Kind.LEADER, "", Leader(id="ctl-b", address="host-b:8800", version="1", pid=1))
    bench.put(Kind.FACTS, "n0", Facts(node="n0", boot_id="b", memory_bytes=8 * 10**9, cpus=0.666666))
    bench.put(Kind.NODE_STATE, "n0", NodeState(name="n0", liveness=Liveness.READY, since_at=10_000 - 7200))
    bench.put(Kind.FACTS, "n1", Facts(node="n1", boot_id="b"))
    bench.put(Kind.NODE_STATE, "n1", NodeState(name="n1", liveness=Liveness.LOST, since_at=0, reason="gone away"))
    bench.put(Kind.MODEL, "m", ModelSpec(name="m", source="m.gguf"))
    bench.put(
        Kind.MODEL_STATE,
        "m",
        ModelState(name="m", wanted=2, placed=1, ready=0, reason="died", failure="died", retry_at=10_020),
    )
    bench.put(Kind.REPLICA, "m-abcde", replica("m-abcde"))
    bench.put(Kind.ALIAS, "gpt", Alias(name="gpt", model="m"))
    html = bench.page()
    for text in (
        "ctl-b (host-b:8800)",
        "standby",
        "store-1",
        "4 of 8 GB",
        ">0.7<",
        'value="0.500"',
        "2 h",
        "gone away",
        "0 MB of -",
        "m-abcde",
        "died; next try in 20 s",
        "gpt",
    ):
        assert text in html, text


def test_a_model_that_sleeps_lacks_nothing() -> None:
    bench = Bench()
    scale = ScaleState(wanted=0, since_at=0.0, cause=ScaleCause.IDLE)
    bench.put(Kind.MODEL, "m", ModelSpec(name="m", source="m.gguf", scaling=Scaling(min=0, max=4)))
    bench.put(Kind.MODEL_STATE, "m", ModelState(name="m", wanted=0, placed=0, ready=0, scale=scale))
    html = bench.page()
    assert ">0 (0-4)<" in html
    assert "asleep: no request for a while" in html


def test_unknown_is_not_shown_as_zero() -> None:
    bench = Bench()
    bench.mirror.ready, bench.mirror.age_s = False, None
    html = bench.page()
    assert "unknown" in html
    assert "No agent has registered" not in html
    assert "No model in the catalog" not in html
    assert ">0<" not in html


def test_facts_that_cannot_be_true_are_said_and_not_shown_as_numbers() -> None:
    bench = Bench()
    bench.put(Kind.FACTS, "n0", Facts(node="n0", boot_id="b", memory_bytes=-12345, cpus=-67.0))
    html = bench.page()
    assert "its facts can&#39;t be true: has -12345 bytes of memory, has -67.0 CPUs" in html
    assert html.count("-67") == 1


def test_what_needs_a_person_comes_first() -> None:
    bench = Bench()
    bench.put(Kind.FLEET, "", Fleet(incarnation="1", guard=Guard(on=True, reason="too many went away")))
    bench.put(Kind.ALIAS, "broken", None, corrupt="not JSON at 3")
    bench.mirror.age_s = 125.0
    html = bench.page()
    for text in (
        "No controller leads",
        "too many went away",
        "Corrupt record spec/aliases/broken: not JSON at 3",
        "etcd has said nothing for 2 min",
    ):
        assert text in html, text
        assert html.index(text) < html.index("<h2>Models")


@pytest.mark.parametrize("nasty", NASTY)
def test_h04_no_text_becomes_markup(nasty: str) -> None:
    bench = Bench()
    bench.put(Kind.LEADER, "", Leader(id=nasty, address=nasty, version=nasty, pid=1))
    bench.put(Kind.META, "", StoreMeta(incarnation=nasty))
    bench.put(Kind.FACTS, "n0", Facts(node="n0", boot_id="b", warnings=(nasty,)))
    bench.put(Kind.NODE_STATE, "n0", NodeState(name="n0", liveness=Liveness.LOST, since_at=0, reason=nasty))
    session = Session(
        node="n0", boot_id="b", data="", lease=1, store="", address=nasty, version=nasty, pid=1, started_at=0
    )
    bench.put(Kind.SESSION, "n0", session)
    bench.put(Kind.MODEL, nasty, ModelSpec(name=nasty, source=nasty))
    bench.put(Kind.MODEL_STATE, nasty, ModelState(name=nasty, wanted=1, placed=0, ready=0, reason=nasty))
    bench.put(Kind.REPLICA, "m-abcde", replica("m-abcde", reason=nasty))
    bench.put(Kind.ALIAS, nasty, Alias(name=nasty, model=nasty))
    bench.put(Kind.ENGINE, "llama.cpp", None, corrupt=nasty)
    html = bench.page()
    assert "<img" not in html
    assert "<script" not in html
    assert "49" not in html.replace("1349", "")
    assert html.count("alert(1)") >= (10 if "alert" in nasty else 0)


def test_no_secret_reaches_the_page_or_the_metrics() -> None:
    bench = Bench()
    bench.status.term = Term(number=1, renewed_mono_s=0)
    bench.put(Kind.REPLICA, "m-abcde", replica("m-abcde"))
    bench.put(Kind.SECRET, "m-abcde", EngineSecret(replica="m-abcde", key=Secret("canary-key")))

    async def scene(client: httpx2.AsyncClient) -> None:
        for path in ("/", "/metrics", "/healthz"):
            assert "canary-key" not in (await client.get(path)).text

    bench.visit(scene)


# --- what surrounds it -----------------------------------------------------------------------------------------------


def test_every_answer_forbids_scripts_and_foreign_origins() -> None:
    async def scene(client: httpx2.AsyncClient) -> None:
        for path in ("/", "/healthz", "/metrics", "/static/page.css", "/nothing", "/static/../app.py"):
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src" not in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"

    Bench().visit(scene)


def test_the_page_loads_nothing_from_elsewhere_and_holds_no_inline_code() -> None:
    html = Bench().page()
    assert "http://" not in html
    assert "https://" not in html
    assert "style=" not in html
    assert "<script" not in html
    assert " on" not in {part[:3] for part in html.split("<") if "onclick" in part}


def test_it_only_reads_and_only_what_is_meant_to_be_read() -> None:
    async def scene(client: httpx2.AsyncClient) -> None:
        for path in ("/", "/healthz", "/metrics"):
            assert (await client.post(path)).status_code == 405
        for path in ("/static/%2e%2e/app.py", "/static/../templates/cluster.html", "/static/", "/templates/"):
            assert (await client.get(path)).status_code == 404

    Bench().visit(scene)


def test_metrics_are_prometheus_text() -> None:
    async def scene(client: httpx2.AsyncClient) -> None:
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert "llmgw_controller_leader 0.0" in answer.text

    Bench().visit(scene)


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert split_listen(ControllerConfig().listen)[0] == "127.0.0.1"


def test_an_address_in_use_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bench = Bench()
        app = build_app(bench.status, registry(bench.status), wall=lambda: 0.0)
        with pytest.raises(Invalid, match=f"127.0.0.1 port {port}: Address already in use"):
            trio.run(partial(serve, app, host="127.0.0.1", port=port))


def test_it_stops_with_connections_open() -> None:
    async def main() -> None:
        bench = Bench()
        app = build_app(bench.status, registry(bench.status), wall=lambda: 0.0)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                (url,) = await nursery.start(partial(serve, app, host="127.0.0.1", port=0))
                client = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
                await client.send_all(b"GET / HTTP/1.1\r\n")  # and never the rest
                nursery.cancel_scope.cancel()
            with suppress(trio.BrokenResourceError):  # closed or reset: either ends it
                assert await client.receive_some() == b""
            await client.aclose()

    trio.run(main)
