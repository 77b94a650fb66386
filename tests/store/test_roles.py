"""deploy/etcd/roles: each kind of process may do its part of the key tree and no more, shown by a real etcd with TLS.

It is spoken to through the JSON gateway, as llmgw does. Names that continue one another (gpu-1, gpu-10) are the trap.
"""

import base64
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from llmgw.core.snapshot import Kind
from llmgw.store import keys
from llmgw.testing.etcd import DEPLOY, Etcd

CONTROLLER, GATEWAY, OPERATOR = "llmgw-controller", "llmgw-gateway", "llmgw-operator"
AGENT, OTHER_AGENT = "llmgw-agent-gpu-1", "llmgw-agent-gpu-10"

READS = [
    (CONTROLLER, "/llmgw/", True),
    (CONTROLLER, "/llmgw-live/", True),
    (CONTROLLER, keys.GATEWAYS, True),
    (CONTROLLER, "/", False),
    (AGENT, "/llmgw/meta/store", True),
    (AGENT, "/llmgw/plan/assignments/gpu-1/", True),
    (AGENT, "/llmgw/plan/assignments/gpu-10/", False),
    (AGENT, "/llmgw/plan/assignments/", False),
    (AGENT, "/llmgw/plan/engines/", True),
    (AGENT, "/llmgw/plan/fleet", True),
    (AGENT, "/llmgw/plan/head", False),
    (AGENT, "/llmgw/plan/secrets/", False),
    (AGENT, "/llmgw/spec/models/", False),
    (AGENT, "/llmgw/spec/keys/", False),
    (AGENT, keys.GATEWAYS, False),
    (AGENT, "/llmgw/node/session/gpu-1", True),
    (AGENT, "/llmgw/node/session/gpu-10", False),
    (AGENT, "/llmgw/node/shards/gpu-1/", True),
    (AGENT, "/llmgw/node/shards/gpu-10/", False),
    (OTHER_AGENT, "/llmgw/node/session/gpu-1", False),
    (GATEWAY, "/llmgw/meta/store", True),
    (GATEWAY, "/llmgw/spec/models/", True),
    (GATEWAY, "/llmgw/spec/aliases/", True),
    (GATEWAY, "/llmgw/spec/keys/", True),
    (GATEWAY, "/llmgw/plan/replicas/", True),
    (GATEWAY, "/llmgw/plan/secrets/", True),
    (GATEWAY, "/llmgw/node/shards/", True),
    (GATEWAY, "/llmgw/plan/assignments/", False),
    (GATEWAY, "/llmgw/node/session/", False),
    (OPERATOR, "/llmgw/", True),
    (OPERATOR, "/llmgw-live/", True),
]
WRITES = [
    (CONTROLLER, "/llmgw/meta/store", True),
    (CONTROLLER, "/llmgw/election/controller", True),
    (CONTROLLER, "/llmgw/plan/head", True),
    (CONTROLLER, "/llmgw-live/events/1", True),
    (CONTROLLER, "/llmgw/spec/models/m", False),
    (CONTROLLER, "/llmgw/node/shards/gpu-1/m.0", False),
    (CONTROLLER, "/llmgw-live/measurement/gpu-1", False),
    (CONTROLLER, keys.gateway_key("g"), False),
    (AGENT, "/llmgw/node/session/gpu-1", True),
    (AGENT, "/llmgw/node/facts/gpu-1", True),
    (AGENT, "/llmgw/node/shards/gpu-1/m-aaaaa.0", True),
    (AGENT, "/llmgw-live/measurement/gpu-1", True),
    (AGENT, "/llmgw/node/session/gpu-10", False),
    (AGENT, "/llmgw/node/facts/gpu-10", False),
    (AGENT, "/llmgw/node/shards/gpu-10/m-aaaaa.0", False),
    (AGENT, "/llmgw-live/measurement/gpu-10", False),
    (AGENT, "/llmgw/plan/assignments/gpu-1/m-aaaaa.0", False),
    (AGENT, "/llmgw/plan/fleet", False),
    (AGENT, keys.gateway_key("g"), False),
    (AGENT, "/llmgw/meta/store", False),
    (AGENT, "/llmgw/spec/nodes/gpu-1", False),
    (AGENT, "/llmgw/election/controller", False),
    (OTHER_AGENT, "/llmgw/node/session/gpu-1", False),
    (GATEWAY, keys.gateway_key("host:8880"), True),
    (GATEWAY, "/llmgw-live/usage/g/2026-12-01/k", True),
    (GATEWAY, "/llmgw/spec/keys/k", False),
    (GATEWAY, "/llmgw/plan/replicas/m-aaaaa", False),
    (GATEWAY, "/llmgw-live/events/1", False),
    (OPERATOR, "/llmgw/spec/models/m", True),
    (OPERATOR, "/llmgw/spec/generation", True),
    (OPERATOR, "/llmgw/node/session/gpu-1", True),
    (OPERATOR, "/llmgw/plan/head", False),
    (OPERATOR, "/llmgw/meta/store", False),
]


@pytest.fixture(scope="module")
def guarded(start_etcd: Callable[..., Etcd]) -> Etcd:
    etcd = start_etcd(tls=True, auth=True)
    etcd.roles("agent", "gpu-1")
    etcd.roles("agent", "gpu-10")
    return etcd


@pytest.fixture(scope="module")
def login(guarded: Etcd) -> Callable[[str], str]:
    """The token of a user; one login each, as each costs etcd 60 ms."""

    async def authenticate(user: str) -> str:
        async with guarded.client() as client:
            body = {"name": user, "password": guarded.password(user)}
            answer = await client.post(f"{guarded.endpoints[0]}/v3/auth/authenticate", json=body)
            answer.raise_for_status()
            token: str = answer.json()["token"]
            return token

    @functools.cache
    def token(user: str) -> str:
        return anyio.run(authenticate, user, backend="trio")

    return token


def ask(etcd: Etcd, token: str, path: str, body: dict[str, Any]) -> int:
    """The HTTP status of one call: 200, or 403 for denied."""

    async def post() -> int:
        async with etcd.client() as client:
            headers = {"Authorization": token} if token else {}
            answer = await client.post(f"{etcd.endpoints[0]}/v3/{path}", json=body, headers=headers)
            return answer.status_code

    return anyio.run(post, backend="trio")


def spell(key: str) -> dict[str, str]:
    """A key, or a prefix where it ends in /, as the JSON gateway wants it."""
    body = {"key": base64.b64encode(key.encode()).decode()}
    if key.endswith("/"):
        body["range_end"] = base64.b64encode(key[:-1].encode() + b"0").decode()
    return body


@pytest.mark.etcd
@pytest.mark.parametrize(("user", "key", "allowed"), READS)
def test_read(guarded: Etcd, login: Callable[[str], str], user: str, key: str, allowed: bool) -> None:
    assert ask(guarded, login(user), "kv/range", spell(key)) == (200 if allowed else 403)


@pytest.mark.etcd
@pytest.mark.parametrize(("user", "key", "allowed"), WRITES)
def test_write(guarded: Etcd, login: Callable[[str], str], user: str, key: str, allowed: bool) -> None:
    wanted = 200 if allowed else 403
    assert ask(guarded, login(user), "kv/put", {**spell(key), "value": "YQ=="}) == wanted
    assert ask(guarded, login(user), "kv/deleterange", spell(key)) == wanted


@pytest.mark.etcd
def test_nobody_without_a_login(guarded: Etcd) -> None:
    assert ask(guarded, "", "kv/range", spell("/llmgw/meta/store")) == 400
    assert ask(guarded, "made up", "kv/range", spell("/llmgw/meta/store")) == 401


@pytest.mark.etcd
def test_again_changes_nothing_and_repairs_what_was_changed(start_etcd: Callable[..., Etcd]) -> None:
    etcd = start_etcd(auth=True)
    etcd.roles("agent", "gpu-1")
    assert etcd.roles("agent", "gpu-1") == ""
    assert etcd.passwords is not None
    root = {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": etcd.password("root"), "ETCDCTL_ENDPOINTS": etcd.endpoints[0]}
    etcdctl = str(DEPLOY.parents[1] / ".tools" / "bin" / "etcdctl")
    for change in (("readwrite", "--prefix", "/llmgw/spec/"), ("readwrite", "/llmgw/plan/fleet")):
        argv = [etcdctl, "role", "grant-permission", AGENT, *change]
        subprocess.run(argv, env=root, check=True, capture_output=True, timeout=30)
    (etcd.passwords / AGENT).unlink()
    assert etcd.roles("agent", "gpu-1").splitlines() == [
        f"made {etcd.passwords / AGENT}",
        f"{AGENT}: granted read /llmgw/plan/fleet",
        f"{AGENT}: revoked readwrite /llmgw/spec/",
        f"{AGENT}: password set",
    ]
    assert etcd.roles("agent", "gpu-1") == ""


def show(*what: str) -> dict[str, dict[str, str]]:
    """Role -> key or prefix -> READ, WRITE or READWRITE, as `roles show` prints it."""
    argv = [str(DEPLOY / "roles"), "show", *what]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30)
    table: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        if not line.startswith(" "):
            table[line] = {}
            continue
        access, key = line.split()
        table[next(reversed(table))][key] = access
    return table


def overlap(first: str, second: str) -> bool:
    """Whether two keys, or prefixes (they end in /), have a key in common."""
    return first == second or any(a.endswith("/") and b.startswith(a) for a, b in ((first, second), (second, first)))


@pytest.mark.parametrize("kind", Kind)
def test_every_record_has_its_writer_and_no_other(kind: Kind) -> None:
    """The table of roles knows every kind of record that the code knows."""
    roles = show("init") | show("agent", "gpu-1")
    writers = {
        role
        for role, table in roles.items()
        for key, access in table.items()
        if "WRITE" in access and overlap(key, keys.prefix(kind))
    }
    first = kind.value.split("/")[0]
    expected = {
        "meta": {CONTROLLER},
        "election": {CONTROLLER},
        "spec": {OPERATOR},
        "plan": {CONTROLLER},
        "node": {AGENT, OPERATOR},  # people clear away a forgotten node
    }
    assert writers == expected[first]


def test_passwords_are_in_no_argument_list(tmp_path: Path) -> None:
    fake, log = tmp_path / "etcdctl", tmp_path / "log"
    fake.write_text(
        f'#!/bin/sh\necho "argv: $*" >>{log}\ncase $1-$2 in user-add) echo "stdin: $(cat)" >>{log};; esac\n'
    )
    fake.chmod(0o755)
    argv = [str(DEPLOY / "roles"), "init", "--passwords", str(tmp_path / "pw"), "--etcdctl", str(fake)]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)
    passwords = [file.read_text() for file in sorted((tmp_path / "pw").iterdir())]
    assert len(passwords) == len(set(passwords)) == 4
    assert all((tmp_path / "pw" / user).stat().st_mode & 0o777 == 0o600 for user in ("root", CONTROLLER, GATEWAY))
    lines = log.read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("stdin: ")) == sorted(f"stdin: {p}" for p in passwords)
    assert not any(password in line for line in lines if line.startswith("argv: ") for password in passwords)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("agent", "GPU"), 2, "'GPU' is no name for a node"),
        (("agent", "a/../b"), 2, "'a/../b' is no name for a node"),
        (("agent", "n" * 64), 2, "is no name for a node"),
        (("agent",), 2, "'' is no name for a node"),
        (("init",), 2, "--passwords DIR is required"),
        (("init", "--passwords"), 2, "--passwords needs a value"),
        (("init", "--password", "x"), 2, "unknown option '--password'"),
        (("remove",), 2, "init, agent NODE or show, not 'remove'"),
    ],
)
def test_refused(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = subprocess.run([str(DEPLOY / "roles"), *arguments], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    assert message in done.stderr


def test_a_password_file_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("secret")
    (tmp_path / "root").chmod(0o644)
    argv = [str(DEPLOY / "roles"), "init", "--passwords", str(tmp_path)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "can be read by others" in done.stderr
