"""etcd with TLS, users and the roles that ship: the store's contract once more, and what each process may not do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest

from llmgw.config import EtcdConfig
from llmgw.errors import Denied, NotApplied, OutcomeUnknown, Unavailable
from llmgw.store.etcd import EtcdStore, open_etcd, wait_until_reachable
from llmgw.store.port import DeleteOp, GetOp, PutOp, absent, unchanged
from llmgw.testing.conformance import CHECKS, Check, Rig, events_until, put
from llmgw.testing.etcd import Certificates, Etcd, Member
from llmgw.testing.reader import WAIT_S, reading

pytestmark = [pytest.mark.etcd, pytest.mark.anyio]

OPERATOR, CONTROLLER, GATEWAY = "llmgw-operator", "llmgw-controller", "llmgw-gateway"
AGENT = "llmgw-agent-gpu-1"


@pytest.fixture(scope="module")
def secure(start_etcd: Callable[..., Etcd]) -> Etcd:
    etcd = start_etcd(tls=True, auth=True)
    etcd.roles("agent", "gpu-1")
    etcd.roles("agent", "gpu-10")
    return etcd


def settings(etcd: Etcd, user: str | None) -> EtcdConfig:
    files = etcd.certificates
    assert files is not None
    assert etcd.passwords is not None
    return EtcdConfig(
        endpoints=etcd.endpoints,
        ca=str(files.ca),
        cert=str(files.client),
        key=str(files.client_key),
        user=user,
        password_file=None if user is None else str(etcd.passwords / user),
    )


@asynccontextmanager
async def as_user(etcd: Etcd, user: str | None) -> AsyncIterator[EtcdStore]:
    async with open_etcd(settings(etcd, user), jitter=lambda: 0.0) as store:
        yield store


async def as_root(etcd: Etcd, path: str, body: dict[str, object]) -> None:
    """What only root may do."""
    async with etcd.client() as http:
        login = {"name": "root", "password": etcd.password("root").strip()}
        token = (await http.post(f"{etcd.endpoints[0]}/v3/auth/authenticate", json=login)).json()["token"]
        answer = await http.post(f"{etcd.endpoints[0]}{path}", json=body, headers={"Authorization": token})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_contract_with_tls_users_and_roles(secure: Etcd, check: Check) -> None:
    async def compact(revision: int) -> None:
        await as_root(secure, "/v3/kv/compaction", {"revision": revision})

    root = f"/llmgw/spec/{check.__name__}/"
    async with as_user(secure, OPERATOR) as store, as_user(secure, OPERATOR) as other:
        await check(Rig(store=store, other=other, root=root, compact=compact))
        assert store.stats().logins <= 1


# --- what a role may not do -----------------------------------------------------------------------------------------

FORBIDDEN = [
    (AGENT, "/llmgw/node/session/gpu-10"),
    (AGENT, "/llmgw/node/facts/gpu-10"),
    (AGENT, "/llmgw/node/shards/gpu-10/m-aaaaa.0"),
    (AGENT, "/llmgw-live/measurement/gpu-10"),
    (AGENT, "/llmgw/spec/models/m"),
    (AGENT, "/llmgw/spec/nodes/gpu-1"),
    (AGENT, "/llmgw/plan/assignments/gpu-1/m-aaaaa.0"),
    (AGENT, "/llmgw/plan/head"),
    (AGENT, "/llmgw/election/controller"),
    (AGENT, "/llmgw/meta/store"),
    (GATEWAY, "/llmgw/plan/replicas/m-aaaaa"),
    (GATEWAY, "/llmgw/plan/secrets/m-aaaaa"),
    (GATEWAY, "/llmgw/plan/head"),
    (GATEWAY, "/llmgw/spec/keys/k"),
    (GATEWAY, "/llmgw/node/shards/gpu-1/m-aaaaa.0"),
    (CONTROLLER, "/llmgw/spec/models/m"),
    (CONTROLLER, "/llmgw/node/shards/gpu-1/m-aaaaa.0"),
    (OPERATOR, "/llmgw/plan/head"),
]
ALLOWED = [
    (AGENT, "/llmgw/node/session/gpu-1"),
    (AGENT, "/llmgw/node/shards/gpu-1/m-aaaaa.0"),
    (GATEWAY, "/llmgw-live/gateway/g"),
    (CONTROLLER, "/llmgw/plan/head"),
    (OPERATOR, "/llmgw/spec/models/m"),
]


@pytest.mark.parametrize("user", [AGENT, GATEWAY, CONTROLLER, OPERATOR])
async def test_each_process_writes_its_own_part_only(secure: Etcd, user: str) -> None:
    async with as_user(secure, user) as store, as_user(secure, "root") as root:
        for key in [key for who, key in ALLOWED if who == user]:
            lease = await store.grant(60)
            await put(store, key, lease=lease.id)
            assert await store.keepalive(lease.id) == 60
            await store.revoke(lease.id)
        for key in [key for who, key in FORBIDDEN if who == user]:
            for op in (PutOp(key=key, value=b"x"), DeleteOp(key=key)):
                with pytest.raises(Denied, match=f"{user}.*permission denied"):
                    await store.txn([], [op])
            assert await root.get(key) is None
        # One good operation does not carry a bad one along.
        good, bad = next(key for who, key in ALLOWED if who == user), next(key for who, key in FORBIDDEN if who == user)
        with pytest.raises(Denied):
            await store.txn([], [PutOp(key=good, value=b"x"), PutOp(key=bad, value=b"x")])
        assert await root.get(good) is None
        assert store.stats().logins == 1  # being denied is no reason to log in again


async def test_a_compare_needs_to_read_the_key_it_compares(secure: Etcd) -> None:
    mine = PutOp(key="/llmgw/node/facts/gpu-1", value=b"x")
    async with as_user(secure, AGENT) as store:
        assert (await store.txn([absent("/llmgw/meta/store")], [mine])).ok
        with pytest.raises(Denied):
            await store.txn([unchanged("/llmgw/plan/head", 0)], [mine])
        with pytest.raises(Denied):
            await store.txn([], [GetOp(key="/llmgw/spec/keys/", prefix=True)])


async def watch_out(store: EtcdStore, prefixes: list[str], revision: int) -> None:
    """Read a watch to its end, which is an error."""
    with anyio.fail_after(WAIT_S):
        async with store.watch(prefixes, from_revision=revision) as batches:
            async for _ in batches:
                pass


async def test_a_wider_watch_or_listing_than_granted_is_denied_at_once(secure: Etcd) -> None:
    async with as_user(secure, AGENT) as store:
        good = ["/llmgw/plan/assignments/gpu-1/", "/llmgw/plan/engines/", "/llmgw/plan/fleet", "/llmgw/meta/"]
        revision = (await store.list(good)).revision
        for wide in ("/llmgw/", "/llmgw/plan/", "/llmgw/plan/assignments/", "/llmgw/plan/assignments/gpu-10/"):
            with pytest.raises(Denied):
                await store.list([wide])
            with pytest.raises(Denied, match=wide):
                await watch_out(store, [*good, wide], revision)
        async with as_user(secure, CONTROLLER) as leader, store.watch(good, from_revision=revision + 1) as batches:
            written = await put(leader, "/llmgw/plan/assignments/gpu-1/m-aaaaa.0")
            await put(leader, "/llmgw/plan/assignments/gpu-10/m-aaaaa.0")
            (event,) = await events_until(batches, written)
            assert event.key == "/llmgw/plan/assignments/gpu-1/m-aaaaa.0"
        assert store.stats().watch_restarts == 0


# --- logins ---------------------------------------------------------------------------------------------------------


async def forget_logins(etcd: Etcd) -> None:
    """Make every token void. (A restart does not: etcd replays the logins from its log.)"""
    await as_root(etcd, "/v3/auth/disable", {})
    async with etcd.client() as http:
        answer = await http.post(f"{etcd.endpoints[0]}/v3/auth/enable", json={})
        assert answer.status_code == 200, answer.text


async def test_a_login_that_etcd_forgot_is_renewed_once(secure: Etcd) -> None:
    async with as_user(secure, OPERATOR) as store:
        revision = await put(store, "/llmgw/spec/r/a", b"1")
        await forget_logins(secure)
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(store.get, "/llmgw/spec/r/a")
        assert (store.stats().logins, store.stats().errors) == (2, 0)
        await forget_logins(secure)
        async with store.watch(["/llmgw/spec/r/"], from_revision=revision) as batches:
            assert len(await events_until(batches, revision)) == 1
        assert (store.stats().logins, store.stats().watch_restarts) == (3, 0)
        await forget_logins(secure)
        assert (await put(store, "/llmgw/spec/r/a", b"2")) > revision
        assert store.stats().logins == 4


async def test_a_watch_whose_member_restarts_and_forgot_us_goes_on(secure: Etcd) -> None:
    async with as_user(secure, OPERATOR) as store, reading(store, ["/llmgw/spec/r/"]) as reader:
        await put(store, "/llmgw/spec/r/a", b"1")
        await reader.sees("/llmgw/spec/r/a", b"1")
        await forget_logins(secure)
        secure.members[0].restart()
        async with as_user(secure, OPERATOR) as other:
            with anyio.fail_after(WAIT_S):
                while True:
                    try:
                        await put(other, "/llmgw/spec/r/a", b"2")
                        break
                    except (NotApplied, OutcomeUnknown):
                        await anyio.sleep(0.1)
        await reader.sees("/llmgw/spec/r/a", b"2")
        assert store.stats().logins == 2
        assert reader.causes == ["start"]


async def test_a_wrong_password_ends_the_waiting(secure: Etcd, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("not it\n")
    lines: list[str] = []
    good = settings(secure, OPERATOR)
    config = EtcdConfig(
        endpoints=good.endpoints, ca=good.ca, cert=good.cert, key=good.key, user=OPERATOR, password_file=str(file)
    )
    async with open_etcd(config) as store:
        with pytest.raises(Denied, match=f"{OPERATOR}.*invalid user ID or password") as told:
            await wait_until_reachable(store, lines.append)
    assert "not it" not in str(told.value)
    assert lines == []


async def test_no_user_where_one_is_needed(secure: Etcd) -> None:
    async with as_user(secure, None) as store, as_user(secure, OPERATOR) as operator:
        revision = (await operator.list(["/llmgw/meta/"])).revision
        with pytest.raises(Denied, match=r"etcd\.user and etcd\.password_file"):
            await store.get("/llmgw/meta/store")
        with anyio.fail_after(WAIT_S), pytest.raises(Denied, match=r"etcd\.user"):
            async with store.watch(["/llmgw/meta/"], from_revision=revision) as batches:
                await anext(batches)


async def test_a_user_where_none_is_needed(etcd: Etcd, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("x")
    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints, user="u", password_file=str(file))) as store:
        revision = await put(store, "/t/a")
        async with store.watch(["/t/"], from_revision=revision) as batches:
            assert len(await events_until(batches, revision)) == 1
        assert (store.stats().logins, store.stats().errors) == (0, 0)


async def test_neither_password_nor_token_is_logged(secure: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with as_user(secure, OPERATOR) as store:
        await put(store, "/llmgw/spec/r/a", b"1")
        with pytest.raises(Denied):
            await store.get("/")
        token = store._caller.token
        assert token is not None
        for secret in (token.reveal(), secure.password(OPERATOR).strip()):
            assert secret not in caplog.text
            assert secret not in repr(store._caller.__dict__)
    assert caplog.text  # the libraries did speak


# --- TLS ------------------------------------------------------------------------------------------------------------


async def test_the_environment_does_not_decide_whom_we_trust(
    secure: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REQUESTS_CA_BUNDLE would silently win over `etcd.ca`, proxies and .netrc over us."""
    stranger = Certificates.make(tmp_path / "stranger")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login x password y\n")
    netrc.chmod(0o600)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(stranger.ca))
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NETRC", str(netrc))
    async with as_user(secure, OPERATOR) as store:
        revision = await put(store, "/llmgw/spec/r/a")
        async with store.watch(["/llmgw/spec/r/"], from_revision=revision) as batches:
            assert len(await events_until(batches, revision)) == 1
        assert store.stats().errors == 0


@pytest.mark.parametrize("what", ["no certificate", "another authority", "a name in the certificate", "plain HTTP"])
async def test_bad_tls_says_what_is_wrong(secure: Etcd, tmp_path: Path, what: str) -> None:
    good = settings(secure, OPERATOR)
    assert secure.certificates is not None
    ca, cert, key, urls = good.ca, good.cert, good.key, good.endpoints
    error: type[Exception] = Unavailable
    match what:
        case "no certificate":
            cert = key = None
            words = "alert|certificate required|EOF|reset"
        case "another authority":
            ca = str(Certificates.make(tmp_path / "stranger").ca)
            words = "certificate verify failed"
        case "a name in the certificate":
            cert, key = str(secure.certificates.named), str(secure.certificates.named_key)
            error, words = Denied, "certificate has a CN"
        case _:
            ca = cert = key = None
            urls = tuple(url.replace("https://", "http://") for url in urls)
            words = "does it want https"
    config = EtcdConfig(
        endpoints=urls, ca=ca, cert=cert, key=key, user=good.user, password_file=good.password_file, read_timeout_s=1.0
    )
    async with open_etcd(config) as store:
        with pytest.raises(error, match=words):
            await store.get("/llmgw/meta/store")


# --- what is no etcd as we need it ----------------------------------------------------------------------------------


async def test_an_etcd_without_its_json_gateway_is_named(tmp_path: Path) -> None:
    member = Member("m0", tmp_path, None, options=["--", "--enable-grpc-gateway=false"])
    try:
        member.start(f"m0={member.peer_url}")
        async with httpx2.AsyncClient(trust_env=False) as http:
            with anyio.fail_after(WAIT_S):
                while True:
                    try:
                        if (await http.get(f"{member.client_url}/health")).status_code == 200:
                            break
                    except httpx2.TransportError:
                        await anyio.sleep(0.05)
        async with open_etcd(EtcdConfig(endpoints=(member.client_url,), read_timeout_s=0.5)) as store:
            with pytest.raises(Unavailable, match="--enable-grpc-gateway=false"):
                await store.get("/t/a")
            with pytest.raises(NotApplied, match="--enable-grpc-gateway=false"):
                await put(store, "/t/a")
    finally:
        member.close()


# --- the process around it ------------------------------------------------------------------------------------------

SCRIPT = """
    import anyio, sys
    from llmgw.config import EtcdConfig
    from llmgw.store.etcd import open_etcd

    async def main():
        async with open_etcd(EtcdConfig(endpoints=(sys.argv[1],))) as store:
            revision = (await store.list(["/t/"])).revision
            async with store.watch(["/t/"], from_revision=revision + 1) as batches:
                await anext(batches)
                raise SystemExit(7)

    anyio.run(main, backend=sys.argv[2], backend_options={"use_uvloop": True} if sys.argv[2] == "asyncio" else {})
"""


def test_an_open_watch_does_not_keep_a_process_from_ending(etcd: Etcd, anyio_backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), etcd.endpoints[0], anyio_backend],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")


async def test_many_calls_at_once_keep_their_connections(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store:
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for n in range(64):
                    tasks.start_soon(store.get, f"/t/{n}")
        assert store.stats().errors == 0
    assert "pool is full" not in caplog.text


async def test_an_error_with_a_trailer_leaves_the_connection_good(etcd: Etcd) -> None:
    async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store:
        for n in range(30):
            await store.revoke(12345)  # 404, chunked, with a trailer
            await put(store, "/t/a", b"%d" % n)
        found = await store.get("/t/a")
        assert found is not None
        assert (found.value, found.version) == (b"29", 30)
