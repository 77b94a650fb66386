"""`llmgw explain`: where a model runs and why, what it waits for, and why one more would not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from llmgw.cli.explain_text import lines
from llmgw.cli.refusal_text import scored
from llmgw.core.catalog import Alias, EngineSpec, ModelSpec, Scaling
from llmgw.core.explain import Score
from llmgw.core.explanation import explain_model, waits_for
from llmgw.core.node import Build, EngineFacts, Fabric
from llmgw.core.record import Leader, Recover, StoreMeta
from llmgw.core.replica import ReplicaPhase, ScaleCause, ScaleState, ShardPhase
from llmgw.core.snapshot import Kind
from llmgw.testing.cluster import Cluster, cpu_profile, gpu

On = Callable[..., int]

NO_LLAMA = EngineFacts(probed=True, builds=(Build(engine="vllm", version="v1"),))
RPC = EngineFacts(probed=True, builds=(Build(engine="llama.cpp", version="b1", variant="cuda", named=True),))


@pytest.fixture
def c() -> Cluster:
    """Three nodes with a leader; `a` wants one replica."""
    made = Cluster()
    made.write(Kind.LEADER, "", Leader(id="c1", address="h:1", version="1", pid=1))
    made.node("n1", weights=("a.gguf",))
    made.node("n2", 32.0)
    made.node("n3", 4.0)
    made.settle()
    made.model("a", cpu_profile(9.0))
    made.settle()
    return made


def text(c: Cluster, name: str = "a", *, every: bool = False) -> str:
    """What would be printed, in one piece."""
    told = explain_model(c.index, name, wall_s=c.now.wall_s)
    return "\n".join(f"{head}{line}".rstrip() for head, line in lines(told, c.now.wall_s, every=every)) + "\n"


def test_where_it_runs_and_why_there(c: Cluster, on: On, capsys: pytest.CaptureFixture[str]) -> None:
    assert on(c, "explain", "a") == 0
    out = capsys.readouterr().out
    replica = c.one("a").id
    assert out.startswith("model     a\nready     1 of 1 wanted, 1 placed\n\n")
    assert f"\n{replica} is ready on n1 (cpu) for " in out
    for line in (
        "  runs      llama.cpp@b1",
        "  claims    9 GB of memory on n1",
        "  why there n1: has the weights, empty, 16 GB free",
        "  second    n2: weights not seen there, empty, 32 GB free",
        "  refused   at revision 11: 1 has too little memory; the nearest misses:",
        "            n3: has 4 GB of memory, needs 9",
        "one more replica would go to n2 (cpu), claiming 9 GB of memory",
        "profile cpu (priority 0): 1 node fits, 2 do not",
        "    1. n2: weights not seen there, empty, 32 GB free; llama.cpp@b1",
        f"    - n1: needs 9 GB; 16 GB in all, 9 GB promised to {replica}",
        "        to change: free 2 GB there, or ask for at most 7 GB",
        "    - n3: has 4 GB of memory, needs 9",
        "        to change: ask for at most 4 GB",
    ):
        assert f"\n{line}\n" in out, line


def test_for_programs(c: Cluster, on: On, capsys: pytest.CaptureFixture[str]) -> None:
    assert on(c, "explain", "a", "-o", "json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["name"], told["led"], told["guard"], told["waiting_for"]) == ("a", True, None, None)
    (each,) = told["replicas"]
    assert (each["replica"]["id"], each["waits_for"], each["rolls"]) == (c.one("a").id, "", "")
    assert each["replica"]["receipt"]["winner"][0]["node"] == "n1"
    (profile,) = told["profiles"]
    assert [fit["node"] for fit in profile["fits"]] == ["n2"]
    refused = {one["node"]: one for one in profile["refused"]}
    assert refused["n3"]["constraint"] == "memory_total"
    assert refused["n3"]["reason"] == "has 4 GB of memory, needs 9"
    assert refused["n3"]["remedy"] == "ask for at most 4 GB"
    assert (told["next"]["nodes"], told["next"]["profile"]) == (["n2"], "cpu")
    assert on(c, "explain", "a", "-o", "yaml") == 0
    assert not any(each.key.reveal() in capsys.readouterr().out for each in c.index.secrets.records())


def test_an_alias_and_a_name_that_nothing_has(c: Cluster, on: On, capsys: pytest.CaptureFixture[str]) -> None:
    c.write(Kind.ALIAS, "gpt-4", Alias(name="gpt-4", model="a"))
    c.write(Kind.ALIAS, "dangling", Alias(name="dangling", model="gone"))
    assert on(c, "explain", "gpt-4") == 0
    assert capsys.readouterr().out.startswith("model     a (gpt-4 is an alias)\n")
    assert on(c, "explain", "gpt4") == 3
    assert capsys.readouterr().err == "llmgw: no model named 'gpt4' (did you mean 'gpt-4'?)\n"
    assert on(c, "explain", "dangling") == 3
    assert "no model named 'gone'" in capsys.readouterr().err


def test_what_fits_nowhere_is_told_node_by_node_and_profile_by_profile(c: Cluster) -> None:
    c.model("big", cpu_profile(40.0), cpu_profile(20.0, name="small", engine="vllm", priority=-1))
    c.settle()
    out = text(c, "big")
    assert "\none more replica fits nowhere\n" in out
    first, second = out.index("profile cpu (priority 0)"), out.index("profile small (priority -1)")
    assert first < second
    assert out.count("of memory, needs 40\n") == 3
    assert "    - 3 nodes (n1, n2, n3): has no vllm\n" in out[second:]


def test_hundreds_of_nodes_are_told_by_reason_and_all_of_them_on_demand() -> None:
    c = Cluster()
    for i in range(412):
        c.node(f"g{i:03}", engines=NO_LLAMA)
    for i in range(30):
        c.node(f"n{i:02}", 10.0 + i)
    c.settle()
    c.model("a", cpu_profile(30.0))
    out = text(c)
    assert "    - 412 nodes (g000, g001, g002, g003 and 408 more): has no llama.cpp\n" in out
    assert "profile cpu (priority 0): 10 nodes fit, 432 do not\n" in out
    assert "    - and so on: 15 have too little memory (--all shows each)\n" in out
    assert len(out.splitlines()) < 40
    every = text(c, every=True)
    assert all(f"g{i:03}" in every for i in range(412))
    assert all(f"n{i:02}" in every for i in range(30))


def test_nodes_that_fit_are_ranked_and_the_many_counted() -> None:
    c = Cluster()
    for i in range(15):
        c.node(f"n{i:02}", 20.0 - i / 2)
    c.settle()
    c.model("a", cpu_profile(1.0), replicas=0)
    out = text(c)
    assert "    1. n14: " in out
    assert "   10. n05: " in out
    assert "       and 5 more (--all shows each)\n" in out
    assert "   15. n00: " in text(c, every=True)


def test_a_failed_replica_and_the_backoff_after_it(c: Cluster) -> None:
    c.report(c.shard(c.one("a")), ShardPhase.FAILED, reason="exit 1")
    c.settle()
    out = text(c)
    assert "\nwhy       a-aaaab on n1: exit 1; next try in " in out
    assert "\nbackoff   after 1 failed replica in a row the next is placed in " in out
    assert "\navoids    n1 for 5 min more: it failed there lately" in out
    assert ": failed it lately, has the weights" in out


def test_a_rollout_says_what_rolls(c: Cluster) -> None:
    c.model("a", cpu_profile(9.0, context=8192))
    c.step()
    out = text(c)
    assert "\nrollout   under way: 1 replica runs an older launch\n" in out
    assert "\n  rolls     context 4096 → 8192\n" in out
    assert "\n  replaces  a-aaaab\n" in out


def test_a_restored_store_and_the_guard(c: Cluster) -> None:
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")))
    c.back("n1")
    c.settle()
    out = text(c)
    assert "\nrestored  nothing is placed or stopped before these nodes have reported to the store: n2, n3\n" in out
    assert "the store was restored" in out
    c.meddle((Kind.RECOVER, "", Recover(incarnation="store-2")))
    c.settle()
    assert "restored" not in text(c)
    c.away("n1")
    c.away("n2")
    c.settle()
    assert "\nguard     on: too many nodes went away at once; no node is given up meanwhile\n" in text(c)


def test_without_a_leader_and_before_any(c: Cluster) -> None:
    c.write(Kind.LEADER, "", None)
    assert "\nleader    none: " in text(c)
    c.model("b")
    assert "\nready     no controller has looked at it yet\n" in text(c, "b")


def test_what_cannot_be_read(c: Cluster) -> None:
    c.spoil(Kind.REPLICA, c.one("a").id)
    c.spoil(Kind.MODEL, "a")
    out = text(c)
    assert "\nunreadable/llmgw/spec/models/a: nothing is decided" in out.replace("unreadable ", "unreadable")
    assert "\n  waits for a record of it can't be read: " in out


def test_what_left_the_catalog(c: Cluster) -> None:
    c.remove_model("a")
    c.step()
    out = text(c)
    assert "\ncatalog   it is not in the catalog any more\n" in out
    assert "\n  leaves    model removed: the model was removed\n" in out
    assert "\n  waits for n1 to confirm that nothing of it runs there (ready)\n" in out
    assert "one more" not in out


SCALE: list[tuple[ScaleState | None, str]] = [
    (None, "0 to 5 by load; no load is known yet"),
    (
        ScaleState(wanted=2, since_at=999_880.0, cause=ScaleCause.LOAD, load=9, target=4.5),
        "0 to 5 by load; 2 for 2 min: load (9 requests, 4.5 a replica)",
    ),
    (
        ScaleState(wanted=0, since_at=999_990.0, cause=ScaleCause.IDLE),
        "0 to 5 by load; asleep: no request for a while, the next one wakes it; 0 for 10 s: idle",
    ),
]


@pytest.mark.parametrize(("scale", "expected"), SCALE)
def test_how_many_by_load(c: Cluster, scale: ScaleState | None, expected: str) -> None:
    spec, state = c.index.models.record("a"), c.index.model_states.record("a")
    assert spec is not None
    assert state is not None
    c.write(Kind.MODEL, "a", msgspec.structs.replace(spec, scaling=Scaling(min=0, max=5)))
    c.write(Kind.MODEL_STATE, "a", msgspec.structs.replace(state, scale=scale))
    assert f"\nscale     {expected}\n" in text(c)


def test_a_profile_that_no_node_comes_into_question_for(c: Cluster) -> None:
    empty = Cluster()
    empty.model("a")
    empty.settle()
    assert (
        "\nprofile cpu (priority 0): no node comes into question\n    - there is no node yet\n"
        "        to change: start an agent\n"
    ) in text(empty)
    c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version="b1"))
    c.spoil(Kind.ENGINE, "llama.cpp")
    c.settle()
    assert "    - the wished version of llama.cpp can't be read\n" in text(c)
    c.write(Kind.MODEL, "b", ModelSpec(name="b", source="b.gguf"))
    c.settle()
    assert text(c, "b").endswith(
        "\none more replica fits nowhere\n    - the model has no profile\n        to change: give the model a profile\n"
    )


def test_what_has_no_receipt_says_where_it_comes_from(c: Cluster) -> None:
    replica = c.one("a")
    c.meddle((Kind.REPLICA, replica.id, None), (Kind.ASSIGNMENT, c.shard(replica), None))
    c.answer()
    c.settle()
    out = text(c)
    assert "\n  why there adopted: it ran without an order\n" in out
    bare = msgspec.structs.replace(c.one("a"), reason="", build=None)
    c.meddle((Kind.REPLICA, bare.id, bare))
    assert "\n  runs      llama.cpp, whichever build its node has\n" in text(c)
    assert "\n  why there it has no receipt\n" in text(c)


# --- what a replica waits for ---------------------------------------------------------------------------------------


def test_a_start_is_followed_to_its_node(c: Cluster) -> None:
    c.model("b", cpu_profile(1.0))
    c.step()
    replica = c.one("b")
    node, name = replica.shards[0].node, c.shard(c.one("b"))
    assert waits_for(c.index, replica) == f"{node} to get its engine ready (nothing reported yet)"
    c.report(name, ShardPhase.STARTING, reason="loading")
    report = c.index.reports.record(name)
    assert report is not None
    c.write(Kind.SHARD, name, msgspec.structs.replace(report, attempts=2))
    assert waits_for(c.index, replica) == f"{node} to get its engine ready (starting: loading, 2 failed starts so far)"
    c.away(node)
    c.step()
    assert waits_for(c.index, replica) == f"{node}, which is unreachable"
    c.back(node)
    c.settle()
    assert waits_for(c.index, c.one("b")) == ""


def test_a_stop_on_a_node_that_is_away_waits_for_its_word(c: Cluster) -> None:
    c.away("n1")
    c.remove_model("a")
    c.step()
    assert c.one("a").phase is ReplicaPhase.DRAINING
    assert waits_for(c.index, c.one("a")) == "n1, which is unreachable, to confirm that nothing of it runs there"


def test_a_gang_with_its_head_on_hold() -> None:
    c = Cluster()
    for i in range(2):
        gpus = tuple(gpu(j, uuid=f"GPU-{i}-{j}") for j in range(2))
        c.node(f"g{i}", engines=RPC, gpus=gpus, fabrics=(Fabric(name="ib0", hcas=("mlx5_0",)),))
    c.settle()
    shape: dict[str, Any] = {
        "nodes": 2,
        "gpus_per_node": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 2,
        "gpu_class": "H100",
    }
    c.model("a", cpu_profile(9.0, **shape))
    c.step()
    replica = c.one("a")
    assert waits_for(c.index, replica) == (
        "rank 0 on g0, held until all the others listen (nothing reported yet); "
        "rank 1 on g1 to get its engine ready (nothing reported yet)"
    )
    out = text(c)
    assert "\na-aaaab is placed on g0 + g1 (cpu) for 0 s\n" in out
    assert "\n  runs      llama.cpp@b1+cuda, over the fabric ib0\n" in out
    assert "\n  claims    9 GB of memory, GPU 0, mlx5_0 on g1\n" in out
    assert "\n  second    none: nothing else would have fitted\n" in out
    assert "\none more replica fits nowhere\n" in out
    c.settle()
    assert waits_for(c.index, c.one("a")) == ""


def test_a_gang_whose_members_fit_but_can_not_meet() -> None:
    c = Cluster()
    for i, ports in enumerate(((21000, 21099), (21200, 21299))):
        gpus = (gpu(0, uuid=f"GPU-{i}"),)
        c.node(f"g{i}", engines=RPC, gpus=gpus, fabrics=(Fabric(name="ib0"),), gang_ports=ports)
    c.settle()
    shape: dict[str, Any] = {"nodes": 2, "gpus_per_node": 1, "pipeline_parallel": 2}
    c.model("a", cpu_profile(9.0, **shape))
    c.settle()
    out = text(c)
    assert "\none more replica fits nowhere\n" in out
    assert "its gang_ports 21000-21099 have no 16 in a row that are free on another node of ib0 too" in out
    assert "give its nodes more gang_ports" in out


def test_a_score_of_a_gang_says_what_is_taken() -> None:
    score = Score(
        failed_lately=False,
        weights_missing=True,
        replicas_of_model=2,
        node_empty=False,
        free_bytes=None,
        node="g0",
        gpu_class="H100",
        free_gpus=4,
        claimed_gpus=3,
        claimed_bytes=10**9,
    )
    assert scored(score) == (
        "3 GPUs and 1 GB taken, weights not seen there, 2 of this model there, in use, 4 H100 free, memory not known"
    )
