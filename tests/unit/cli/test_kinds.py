"""What is shown of each kind: unknown is `-` and null, corrupt is said, joined records keep their writers apart."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from llmgw.cli.kinds import KINDS
from llmgw.core.catalog import ModelSpec, NodeSpec, Profile, Scaling, Task
from llmgw.core.ids import Secret
from llmgw.core.node import Build, EngineFacts, Facts, Gpu, GpuHealth, Liveness, NodeState
from llmgw.core.record import Record
from llmgw.core.replica import (
    Assignment,
    Claim,
    Desired,
    GpuClaim,
    Launch,
    ModelState,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    ScaleCause,
    ScaleState,
    ShardPhase,
    ShardReport,
)
from llmgw.core.snapshot import Change, Index, Kind, Ref

LAUNCH = Launch(source="x", task=Task.GENERATE, profile="cpu", engine="llama.cpp", context=1, slots=1)
REPLICA = Replica(
    id="m-aaaaa",
    model="m",
    profile="cpu",
    engine="llama.cpp",
    launch="0",
    phase=ReplicaPhase.READY,
    shards=(ReplicaShard(rank=0, node="n1", claim=Claim(memory_bytes=1_500_000_000)),),
    created_at=1.0,
    phase_at=1.0,
)
ORDER = Assignment(
    node="n1",
    replica="m-aaaaa",
    rank=0,
    model="m",
    desired=Desired.RUNNING,
    launch=LAUNCH,
    claim=Claim(memory_bytes=1_500_000_000),
    engine_key=Secret("hunter2"),
)
REPORT = ShardReport(
    node="n1",
    replica="m-aaaaa",
    rank=0,
    model="m",
    phase=ShardPhase.READY,
    phase_at=1.0,
    address="10.0.0.1",
    port=20001,
    build="llama.cpp@b1",
)


def index_of(records: Mapping[Ref, Record | str]) -> Index:
    """An index of records; a text stands for what is wrong with a corrupt one."""
    index = Index()
    changes = [
        Change(ref=ref, mod_revision=1, create_revision=1, corrupt=record)
        if isinstance(record, str)
        else Change(ref=ref, mod_revision=1, create_revision=1, record=record)
        for ref, record in records.items()
    ]
    index.reset(changes, revision=1)
    return index


def row(kind: str, name: str, records: Mapping[Ref, Record | str]) -> tuple[str, ...]:
    index = index_of(records)
    assert name in KINDS[kind].names(index)
    (made,) = KINDS[kind].rows(index, [name], 100.0)
    assert len(made) == len(KINDS[kind].headers)
    return made


def test_a_node_with_everything_known() -> None:
    facts = Facts(
        node="n1",
        boot_id="b",
        cpus=8.0,
        memory_bytes=16_000_000_000,
        gpus=(
            Gpu(uuid="a", index=0, gpu_class="L4", health=GpuHealth.OK, foreign=0),
            Gpu(uuid="b", index=1, gpu_class="L4", health=GpuHealth.FAULT),
        ),
        engines=EngineFacts(probed=True, builds=(Build(engine="llama.cpp", version="b1"),)),
        warnings=("no AVX2",),
    )
    records: dict[Ref, Record | str] = {
        Ref(Kind.FACTS, "n1"): facts,
        Ref(Kind.NODE_STATE, "n1"): NodeState(name="n1", liveness=Liveness.READY, since_at=1.0),
        Ref(Kind.NODE_SPEC, "n1"): NodeSpec(name="n1", cordon=True),
        Ref(Kind.REPLICA, "m-aaaaa"): REPLICA,
        Ref(Kind.SHARD, "n1/m-aaaaa.0"): REPORT,
    }
    expected = ("n1", "ready, cordoned", "8", "1.5/16 GB", "2 (1 faulty)", "llama.cpp@b1", "1", "no AVX2")
    assert row("nodes", "n1", records) == expected


def test_what_a_node_never_said_is_unknown_and_not_zero() -> None:
    state = NodeState(name="n1", liveness=Liveness.UNREACHABLE, since_at=1.0, reason="session gone")
    unknown = ("n1", "unreachable", "-", "-", "-", "-", "0", "session gone")
    assert row("nodes", "n1", {Ref(Kind.NODE_STATE, "n1"): state}) == unknown
    facts = Facts(node="n1", boot_id="b", engines=EngineFacts(probed=False))
    assert row("nodes", "n1", {Ref(Kind.FACTS, "n1"): facts}) == ("n1", "-", "-", "-", "-", "-", "0", "")
    none = Facts(node="n1", boot_id="b", gpus=(), engines=EngineFacts(probed=True), memory_bytes=4_000_000_000)
    assert row("nodes", "n1", {Ref(Kind.FACTS, "n1"): none})[3:6] == ("0/4 GB", "0", "none")


def test_what_keeps_gpus_is_counted() -> None:
    healthy = Gpu(uuid="a", index=0, gpu_class="L4", health=GpuHealth.OK, foreign=0)
    held = msgspec.structs.replace(healthy, uuid="b", index=1, health=GpuHealth.FAULT)
    used = msgspec.structs.replace(healthy, uuid="c", index=2, foreign=1)
    unknown = Gpu(uuid="d", index=3, gpu_class="L4")
    shard = ReplicaShard(rank=0, node="n1", claim=Claim(gpus=(GpuClaim(uuid="b"),)))
    facts = Facts(node="n1", boot_id="b", gpus=(healthy, held, used, unknown))
    replica = msgspec.structs.replace(REPLICA, shards=(shard,))
    made = row("nodes", "n1", {Ref(Kind.FACTS, "n1"): facts, Ref(Kind.REPLICA, replica.id): replica})
    assert made[4] == "4 (1 faulty, 1 claimed, 1 in use, 1 unknown)"
    assert row("nodes", "n1", {Ref(Kind.FACTS, "n1"): msgspec.structs.replace(facts, gpus=(healthy,))})[4] == "1"


def test_facts_that_cannot_be_true_are_said_and_not_shown_as_numbers() -> None:
    facts = Facts(node="n1", boot_id="b", cpus=-2.0, memory_bytes=-5, warnings=("no AVX2",))
    made = row("nodes", "n1", {Ref(Kind.FACTS, "n1"): facts})
    assert made[2:4] == ("-", "-")
    said = "its facts can't be true: has -5 bytes of memory, has -2.0 CPUs; no AVX2"
    assert made[-1] == said


def test_memory_that_nobody_accounts_for_makes_the_sum_unknown() -> None:
    facts = Facts(node="n1", boot_id="b", memory_bytes=4_000_000_000)
    stray = ShardReport(
        node="n1", replica="m-zzzzz", rank=0, model="m", phase=ShardPhase.READY, phase_at=1.0, assigned=False
    )
    made = row("nodes", "n1", {Ref(Kind.FACTS, "n1"): facts, Ref(Kind.SHARD, "n1/m-zzzzz.0"): stray})
    assert made[3] == "-/4 GB"
    assert "m-zzzzz" in made[-1]


def test_models() -> None:
    spec = ModelSpec(name="m", source="x", profiles=(Profile(name="cpu", engine="llama.cpp"),))
    state = ModelState(name="m", wanted=2, placed=1, ready=1, reason="no room")
    assert row("models", "m", {Ref(Kind.MODEL, "m"): spec}) == ("m", "-", "generate", "x", "cpu", "")
    both = {Ref(Kind.MODEL, "m"): spec, Ref(Kind.MODEL_STATE, "m"): state}
    assert row("models", "m", both) == ("m", "1/2", "generate", "x", "cpu", "no room")
    gone = row("models", "m", {Ref(Kind.MODEL_STATE, "m"): state})
    assert gone == ("m", "1/2", "-", "-", "-", "not in the catalog any more; no room")
    corrupt = row("models", "m", {Ref(Kind.MODEL, "m"): "no JSON", Ref(Kind.MODEL_STATE, "m"): state})
    assert corrupt == ("m", "1/2", "-", "-", "-", "no room; can't be read: no JSON")


def test_a_model_that_backs_off_says_when_it_is_tried_again() -> None:
    state = ModelState(name="m", wanted=1, placed=0, ready=0, reason="m-1: died", failure="m-1: died", retry_at=127.5)

    def why(**fields: object) -> str:
        return row("models", "m", {Ref(Kind.MODEL_STATE, "m"): msgspec.structs.replace(state, **fields)})[-1]

    assert why().endswith("m-1: died; next try in 28 s")
    assert why(retry_at=100.0).endswith("m-1: died")
    assert why(reason="rollout stopped: m-1: died").endswith("rollout stopped: m-1: died")
    assert "next try" not in why(reason="", failure="")


def test_a_model_that_follows_its_load_says_between_which_numbers_and_whether_it_is_asleep() -> None:
    spec = ModelSpec(name="m", source="x", scaling=Scaling(min=0, max=4))
    up = ScaleState(wanted=1, since_at=0.0, cause=ScaleCause.WAKE)

    def cells(wanted: int, scale: ScaleState | None, **fields: object) -> tuple[str, str]:
        state = ModelState(name="m", wanted=wanted, placed=wanted, ready=wanted, scale=scale)
        state = msgspec.structs.replace(state, **fields)
        made = row("models", "m", {Ref(Kind.MODEL, "m"): spec, Ref(Kind.MODEL_STATE, "m"): state})
        return made[1], made[-1]

    assert cells(1, up) == ("1/1 (0-4)", "")
    idle = msgspec.structs.replace(up, wanted=0, cause=ScaleCause.IDLE)
    assert cells(0, idle) == ("0/0 (0-4)", "asleep: no request for a while")
    new = msgspec.structs.replace(up, wanted=0, cause=ScaleCause.START)
    assert cells(0, new) == ("0/0 (0-4)", "asleep: no request yet")
    assert cells(0, new, reason="restoring") == ("0/0 (0-4)", "restoring")
    assert cells(0, None) == ("0/0 (0-4)", "")


def test_replicas_and_shards() -> None:
    assert row("replicas", "m-aaaaa", {Ref(Kind.REPLICA, "m-aaaaa"): REPLICA}) == (
        "m-aaaaa",
        "ready",
        "m",
        "cpu",
        "n1",
        "",
    )
    assert row("replicas", "m-aaaaa", {Ref(Kind.REPLICA, "m-aaaaa"): "bad"})[1:] == (*["-"] * 4, "can't be read: bad")
    name = "n1/m-aaaaa.0"
    assert row("shards", name, {Ref(Kind.ASSIGNMENT, name): ORDER}) == (name, "running", "-", "m", "-", "-", "")
    both = {Ref(Kind.ASSIGNMENT, name): ORDER, Ref(Kind.SHARD, name): REPORT}
    assert row("shards", name, both) == (name, "running", "ready", "m", "llama.cpp@b1", "10.0.0.1:20001", "")


def test_objects_keep_apart_what_is_wanted_and_what_runs() -> None:
    name = "n1/m-aaaaa.0"
    index = index_of({Ref(Kind.ASSIGNMENT, name): ORDER, Ref(Kind.SHARD, name): "bad"})
    made = KINDS["shards"].object(index, name)
    assert made["name"] == name
    assert made["assignment"]["desired"] == "running"
    assert made["assignment"]["engine_key"] == "***"
    assert made["report"] is None
    assert made["corrupt"] == {"report": "bad"}
    alias = KINDS["aliases"].object(index_of({Ref(Kind.ALIAS, "a"): "bad"}), "a")
    assert alias == {"name": "a", "corrupt": {"alias": "bad"}}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reads_what_it_watches_and_shows(kind: str) -> None:
    view = KINDS[kind]
    assert set(view.watched) <= set(view.kinds)
    assert set(view.parts.values()) <= set(view.kinds)
    assert len(set(view.kinds)) == len(view.kinds)
    assert view.names(Index()) == []
