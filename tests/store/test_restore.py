"""deploy/etcd/restore on a real etcd: what a snapshot held is there again, as another store; nothing is overwritten."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import trio

from llmgw.cli.connection import read_index
from llmgw.config import ControllerConfig, EtcdConfig
from llmgw.controller.loop import control
from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.fleet import is_restoring, unreported
from llmgw.core.node import Fleet, Guard, Session
from llmgw.core.record import Generation, Leader
from llmgw.core.replica import ReplicaPhase, ShardPhase
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.obs.clock import SystemIds, system_jitter, system_wall
from llmgw.obs.status import ControllerStatus
from llmgw.store import codec, keys
from llmgw.store.etcd import open_etcd
from llmgw.store.port import PutOp, Store
from llmgw.testing.agent_process import AgentProcess, fake_engine
from llmgw.testing.etcd import DEPLOY, Etcd

META = keys.key(Ref(Kind.META))
BEFORE, AFTER = "/llmgw/spec/models/before", "/llmgw/spec/models/after"
ETCDCTL = DEPLOY.parents[1] / ".tools" / "bin" / "etcdctl"

StartEtcd = Callable[..., Etcd]


def run(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": os.environ["PATH"], **environment},
    )


def restore(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([str(DEPLOY / "restore"), *map(str, arguments)], **environment)


def etcdctl(etcd: Etcd, *arguments: str, member: int = 0) -> str:
    """As root of the roles where there are users, over TLS where there is any."""
    environment = {"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": etcd.endpoints[member]}
    if etcd.certificates is not None:
        environment["ETCDCTL_CACERT"] = str(etcd.certificates.ca)
        environment["ETCDCTL_CERT"] = str(etcd.certificates.client)
        environment["ETCDCTL_KEY"] = str(etcd.certificates.client_key)
    if etcd.passwords is not None:
        environment |= {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": etcd.password("root")}
    tool = str(ETCDCTL) if ETCDCTL.exists() else shutil.which("etcdctl")
    assert tool is not None
    done = run([tool, *arguments], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def value(etcd: Etcd, key: str, *, member: int = 0) -> str:
    return etcdctl(etcd, "get", key, "--print-value-only", "--consistency", "s", member=member).removesuffix("\n")


def snapshot(etcd: Etcd, file: Path, *, meta: str | None) -> Path:
    """Of a store with `meta` and one model; another model is written after it."""
    if meta is not None:
        etcdctl(etcd, "put", META, meta)
    etcdctl(etcd, "put", BEFORE, "a model")
    etcdctl(etcd, "snapshot", "save", str(file))
    etcdctl(etcd, "put", AFTER, "a later one")
    return file


def swap(etcd: Etcd, made: Path, *, into: str) -> None:
    """End every member of the old cluster, and start it on what was made: `made` below / `into` is a member's."""
    for member in etcd.members:
        member.kill()
    for member in etcd.members:
        data = etcd.directory / member.name
        data.rename(etcd.directory / f"{member.name}.old")
        (made / into.format(member.name)).rename(data)
        member.start()
    etcd.wait_healthy()


@pytest.fixture(scope="module")
def saved(start_etcd: StartEtcd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of a store of llmgw without users, for tests that only try to restore it."""
    return snapshot(start_etcd(), tmp_path_factory.mktemp("saved") / "file", meta='{"incarnation":"one","format":1}')


@pytest.mark.etcd
def test_one_member_holds_what_the_snapshot_held_and_is_another_store(start_etcd: StartEtcd, tmp_path: Path) -> None:
    etcd = start_etcd()
    # What a later version keeps there beside, and what a shell might trip over.
    old = json.dumps({"format": 7, "incarnation": "one", "note": "a \"b\" \\ $c 'd' ä"}, separators=(",", ":"))
    file = snapshot(etcd, tmp_path / "file", meta=old)
    done = restore("--snapshot", file, "--data", tmp_path / "made" / "data", "--peer-url", etcd.members[0].peer_url)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "data").stat().st_mode & 0o777 == 0o700
    assert [each.name for each in (tmp_path / "made").iterdir()] == ["data"]
    swap(etcd, tmp_path / "made", into="data")
    found = json.loads(value(etcd, META))
    assert re.fullmatch("[0-9a-f]{32}", found["incarnation"])
    assert f"incarnation {found['incarnation']}, before it one" in done.stdout
    assert found == {**json.loads(old), "incarnation": found["incarnation"]}
    assert (value(etcd, BEFORE), value(etcd, AFTER)) == ("a model", "")


@pytest.mark.etcd
def test_three_members_with_users_are_one_store_again(start_etcd: StartEtcd, tmp_path: Path) -> None:
    etcd = start_etcd(members=3, tls=True, auth=True)
    file = snapshot(etcd, tmp_path / "file", meta='{"incarnation":"one","format":1}')
    assert etcd.passwords is not None
    cluster = ",".join(f"{each.name}={each.peer_url}" for each in etcd.members)
    made, arguments = tmp_path / "made", ("--snapshot", file, "--data", tmp_path / "made", "--cluster", cluster)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "root").write_text("not it\n")
    for more, message in (
        ((), "this etcd asks for a login: give --passwords DIR"),
        (("--passwords", wrong), f"etcd does not take the password in {wrong}/root"),
    ):
        refused = restore(*arguments, *more)
        assert (refused.returncode, made.exists()) == (1, False)
        assert message in refused.stderr
        assert {each.name for each in tmp_path.iterdir()} == {"file", "wrong"}
    done = restore(*arguments, "--passwords", etcd.passwords)
    assert done.returncode == 0, done.stderr
    assert etcd.password("root") not in done.stdout + done.stderr
    assert sorted(each.name for each in made.iterdir()) == ["m0", "m1", "m2"]
    swap(etcd, made, into="{}")
    metas = {value(etcd, META, member=member) for member in range(3)}
    assert len(metas) == 1
    assert re.fullmatch('{"incarnation":"[0-9a-f]{32}","format":1}', metas.pop())
    assert {(value(etcd, BEFORE, member=member), value(etcd, AFTER, member=member)) for member in range(3)} == {
        ("a model", "")
    }
    # All of them take part: with one gone the others still commit.
    etcd.members[0].kill()
    etcd.wait_healthy()
    etcdctl(etcd, "put", AFTER, "written again", member=1)


@pytest.mark.etcd
def test_each_restore_is_a_store_of_its_own(saved: Path, tmp_path: Path) -> None:
    told = {restore("--snapshot", saved, "--data", tmp_path / name).stdout.splitlines()[1] for name in ("a", "b")}
    assert len(told) == 2
    assert all(each.endswith(", before it one") for each in told)


@pytest.mark.etcd
def test_a_store_that_no_controller_has_seen_is_restored_as_it_is(start_etcd: StartEtcd, tmp_path: Path) -> None:
    etcd = start_etcd()
    file = snapshot(etcd, tmp_path / "file", meta=None)
    data = tmp_path / "data"
    done = restore("--snapshot", file, "--data", data, "--peer-url", etcd.members[0].peer_url)
    assert done.returncode == 0, done.stderr
    assert f"it holds no {META}: the first controller makes it" in done.stdout
    swap(etcd, tmp_path, into="data")
    assert (value(etcd, META), value(etcd, BEFORE)) == ("", "a model")


WATCHED = (Kind.META, Kind.FLEET, Kind.SESSION, Kind.NODE_STATE, Kind.REPLICA, Kind.SHARD)


def session(store: str) -> str:
    """What the agent of the one node has registered with, in that store."""
    record = Session(
        node="n1", boot_id="b", data="1:1", lease=1, store=store, address="127.0.0.1", version="1", pid=1, started_at=0
    )
    return codec.encode_stored(record).decode()


@asynccontextmanager
async def controller(etcd: Etcd) -> AsyncIterator[None]:
    """The only one there is, so that it leads."""
    config = EtcdConfig(endpoints=etcd.endpoints)
    leader = Leader(id="a", address="a", version="1", pid=1)

    async def lead(store: Store) -> None:
        await control(
            store,
            ControllerConfig(etcd=config, session_ttl_s=6),
            identity=leader,
            wall=system_wall,
            ids=SystemIds(),
            jitter=system_jitter,
            status=ControllerStatus(leader=leader, renew_within_s=3),
        )

    async with open_etcd(config) as store, trio.open_nursery() as nursery:
        nursery.start_soon(lead, store)
        yield
        nursery.cancel_scope.cancel()


async def until(store: Store, holds: Callable[[Index], bool]) -> Index:
    with anyio.fail_after(60):
        revision = (await store.list([keys.ROOT])).revision
        async with store.watch([keys.ROOT], from_revision=revision + 1) as batches:
            while not holds(index := await read_index(store, WATCHED)):
                await anext(batches)
            return index


@pytest.mark.etcd
def test_a_controller_waits_for_the_nodes_of_a_restored_store(start_etcd: StartEtcd, tmp_path: Path) -> None:
    etcd = start_etcd()
    fleet = Fleet(measure_every_s=10, guard=Guard(), incarnation="one")
    etcdctl(etcd, "put", keys.key(Ref(Kind.FLEET)), codec.encode_stored(fleet).decode())
    etcdctl(etcd, "put", keys.key(Ref(Kind.SESSION, "n1")), session("one"))
    file = snapshot(etcd, tmp_path / "file", meta='{"incarnation":"one","format":1}')
    assert restore("--snapshot", file, "--data", tmp_path / "data").returncode == 0
    swap(etcd, tmp_path, into="data")
    incarnation = json.loads(value(etcd, META))["incarnation"]

    async def scene() -> None:
        async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store, controller(etcd):
            index = await until(store, lambda index: "n1" in index.node_states)
            assert is_restoring(index, incarnation)
            assert unreported(index, incarnation) == ["n1"]
            put = PutOp(key=keys.key(Ref(Kind.SESSION, "n1")), value=session(incarnation).encode())
            await store.txn([], [put])
            await until(store, lambda index: not is_restoring(index, incarnation))

    trio.run(scene)


async def apply(store: Store, *models: str) -> None:
    """The whole catalog: these models, each with one replica of an engine on the test's own node."""
    profile = Profile(name="p", engine="llama.cpp", min_memory_gb=0.1, context=512, slots=2)
    specs = [ModelSpec(name=name, source="tiny.gguf", profiles=(profile,)) for name in models]
    ops = [PutOp(key=keys.key(Ref(Kind.MODEL, each.name)), value=codec.encode_stored(each)) for each in specs]
    generation = PutOp(key=keys.key(Ref(Kind.GENERATION)), value=codec.encode_stored(Generation(number=len(models))))
    await store.txn([], [*ops, generation])


def ready(index: Index) -> dict[str, str]:
    """The replica of each model that is ready, in the plan and by its node's word."""
    return {
        replica.model: replica.id
        for replica in index.replicas.records()
        for report in index.reports.records()
        if (report.replica, report.phase, replica.phase) == (replica.id, ShardPhase.READY, ReplicaPhase.READY)
    }


@pytest.mark.etcd
def test_engines_that_run_are_adopted_also_those_the_snapshot_does_not_know(
    start_etcd: StartEtcd, tmp_path: Path, tiny_model: Path
) -> None:
    """The steps of deploy/etcd/README.md, with a real agent and the processes of its engines."""
    etcd = start_etcd()
    config = EtcdConfig(endpoints=etcd.endpoints)

    async def before(agent: AgentProcess) -> dict[str, str]:
        async with open_etcd(config) as store, controller(etcd):
            agent.start()
            await apply(store, "early")
            await until(store, lambda index: ready(index).keys() == {"early"})
            etcdctl(etcd, "snapshot", "save", str(tmp_path / "file"))
            await apply(store, "early", "late")
            return ready(await until(store, lambda index: ready(index).keys() == {"early", "late"}))

    async def after(agent: AgentProcess) -> dict[str, str]:
        incarnation = json.loads(value(etcd, META))["incarnation"]
        async with open_etcd(config) as store:
            await apply(store, "early", "late")
            async with controller(etcd):
                index = await until(
                    store,
                    lambda index: not is_restoring(index, incarnation) and ready(index).keys() == {"early", "late"},
                )
                assert len(agent.engines()) == 2
                return ready(index)

    engine = fake_engine(tmp_path)
    with AgentProcess(tmp_path / "n1", endpoints=etcd.endpoints, engine=engine, models=tiny_model.parent) as agent:
        replicas = trio.run(before, agent)
        pids = agent.engines()
        assert len(pids) == 2
        done = restore("--snapshot", tmp_path / "file", "--data", tmp_path / "data")
        assert done.returncode == 0, done.stderr
        swap(etcd, tmp_path, into="data")
        assert trio.run(after, agent) == replicas
        assert agent.engines() == pids


@pytest.mark.etcd
def test_a_store_that_does_not_say_which_it_is_is_refused(start_etcd: StartEtcd, tmp_path: Path) -> None:
    file = snapshot(start_etcd(), tmp_path / "file", meta="something else")
    done = restore("--snapshot", file, "--data", tmp_path / "data")
    assert done.returncode == 1
    assert f"{META} of this snapshot names no incarnation" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.etcd
def test_a_directory_that_is_not_empty_is_left_as_it_is(saved: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    assert restore("--snapshot", saved, "--data", data).returncode == 0, "an empty one is taken"
    before = {each: each.stat().st_mtime_ns for each in data.rglob("*")}
    done = restore("--snapshot", saved, "--data", data)
    assert done.returncode == 1
    assert f"{data} is not empty, and is left as it is" in done.stderr
    assert {each: each.stat().st_mtime_ns for each in data.rglob("*")} == before
    assert [each.name for each in tmp_path.iterdir()] == ["data"]


@pytest.mark.etcd
@pytest.mark.parametrize("harm", ["cut", "a byte", "no snapshot"])
def test_a_broken_snapshot_is_refused_and_nothing_is_left(saved: Path, tmp_path: Path, harm: str) -> None:
    whole = saved.read_bytes()
    file = tmp_path / "file"
    match harm:
        case "cut":
            file.write_bytes(whole[: len(whole) // 2])
        case "a byte":
            middle = whole.index(b"a model")
            file.write_bytes(whole[:middle] + b"A" + whole[middle + 1 :])
        case _:
            file.write_text("a text\n" * 100)
    done = restore("--snapshot", file, "--data", tmp_path / "data")
    assert done.returncode == 1
    assert f"etcd can't restore {file}" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


M0, M1 = "m0=http://127.0.0.1:2380", "m1=http://127.0.0.1:2480"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "x"), "--snapshot FILE is required"),
        (("--snapshot", "x"), "--data DIR is required"),
        (("--snapshot",), "--snapshot needs a value"),
        (("--snapshot", "x", "--dat", "y"), "unknown option '--dat'"),
        (("--snapshot", "x", "--data", "y", "--cluster", M0), "is one member"),
        (("--snapshot", "x", "--data", "y", "--cluster", f"{M0},{M1}", "--name", "m0"), "--name is for one member"),
        (("--snapshot", "x", "--data", "y", "--cluster", f"{M0},{M1},"), "ends with a comma"),
        (("--snapshot", "x", "--data", "y", "--cluster", f"{M0},m1"), "'m1' is no member such as"),
        (("--snapshot", "x", "--data", "y", "--cluster", f"{M0},../m={M1[3:]}"), "is no member such as"),
        (("--snapshot", "x", "--data", "y", "--cluster", f"{M0},m0={M1[3:]}"), "--cluster names m0 twice"),
        (("--snapshot", "x", "--data", "y", "--cluster", f"{M0},m1={M0[3:]}"), "to two members"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str) -> None:
    done = restore(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = restore("--snapshot", tmp_path / "none", "--data", tmp_path / "data")
    assert done.returncode == 1
    assert f"can't read {tmp_path}/none as a file" in done.stderr
    (tmp_path / "file").touch()
    done = restore("--snapshot", tmp_path / "file", "--data", tmp_path / "data", "--passwords", tmp_path)
    assert done.returncode == 1
    assert f"can't read {tmp_path}/root" in done.stderr
