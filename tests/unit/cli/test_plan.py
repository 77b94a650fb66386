"""`llmgw plan`: what it says and how it ends; nothing is ever written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmgw.cli.plan_text import lines, tally
from llmgw.core.forecast import Forecast, ModelForecast, Step, StepAction
from llmgw.core.node import Guard
from llmgw.core.record import Leader
from llmgw.core.snapshot import Kind
from llmgw.testing.cluster import Cluster, cpu_profile

On = Callable[..., int]


def catalog(path: Path, text: str) -> str:
    file = path / "catalog.yaml"
    file.write_text(text)
    return str(file)


def profile(memory_gb: float, **more: object) -> str:
    fields = {"name": "cpu", "engine": "llama.cpp", "min_memory_gb": memory_gb, **more}
    return "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"


def model(name: str, memory_gb: float, *, replicas: int = 1, **more: object) -> str:
    scaling = f"{{min: {replicas}, max: {replicas}}}"
    return f"  {name}: {{source: {name}.gguf, profiles: [{profile(memory_gb, **more)}], scaling: {scaling}}}\n"


@pytest.fixture
def c() -> Cluster:
    """Three nodes; `a` on one of them, `b` on all."""
    made = Cluster()
    made.write(Kind.LEADER, "", Leader(id="c1", address="h:1", version="1", pid=1))
    for name in ("n1", "n2", "n3"):
        made.node(name)
    made.settle()
    made.model("a", cpu_profile(9.0))
    made.settle()
    made.model("b", cpu_profile(3.0), replicas=3)
    made.settle()
    return made


def test_an_apply_is_told_before_it_is_done(
    c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node, replica = c.one("a").shards[0].node, c.one("a").id
    other = "n2" if node == "n1" else "n1"
    text = "models:\n" + model("a", 9, context=8192) + model("new", 2, replicas=2)
    assert on(c, "plan", "-f", catalog(tmp_path, text)) == 0
    out, err = capsys.readouterr()
    assert err == "not in the files, left as it is (--prune deletes): model b\n"
    assert out.splitlines()[:3] == [
        "would update model a: profiles.cpu.context 4096 → 8192",
        "would create model new",
        "would be 1 created, 1 updated, 0 deleted, 0 unchanged",
    ]
    assert f"  restart   {replica} {node} → {other} (cpu): context 4096 → 8192\n" in out
    assert "\nnew\n  place     2 replicas on " in out
    assert "\nb\n" not in out
    assert out.endswith("\nreplicas: 2 placed, 0 moved, 1 restarted, 0 removed, 3 kept. Nothing was written.\n")


def test_pruned_models_go(c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = catalog(tmp_path, "models:\n" + model("a", 9))
    assert on(c, "plan", "-f", file) == 0
    assert "0 removed, 4 kept" in capsys.readouterr().out
    assert on(c, "plan", "-f", file, "--prune") == 0
    out = capsys.readouterr().out
    assert "would delete model b\n" in out
    assert out.count(": the model was removed\n") == 3
    assert "3 removed, 1 kept" in out


def test_what_does_not_fit_is_told_with_numbers_and_has_its_own_exit_code(
    c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = catalog(tmp_path, "models:\n" + model("big", 14))
    assert on(c, "plan", "-f", file) == 6
    out = capsys.readouterr().out
    assert "\nbig\n  no room   fits on none of 3 nodes: 3 have too little memory left\n" in out
    assert "needs 14 GB; 16 GB in all, 3 GB promised to b-" in out
    assert "to change: free 1 GB there, or ask for at most 13 GB\n" in out
    assert "; not as wanted: 1 of 3 models." in out
    assert on(c, "plan", "-f", file, "-o", "json") == 6
    told = json.loads(capsys.readouterr().out)
    assert (told["whole"], told["settled"]) == (False, True)
    assert [each["name"] for each in told["models"] if not each["whole"]] == ["big"]


def test_nodes_imagined_gone(c: Cluster, on: On, capsys: pytest.CaptureFixture[str]) -> None:
    node, replica = c.one("a").shards[0].node, c.one("a").id
    assert on(c, "plan", "--without", node) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"a\n  move      {replica} {node} → ")
    assert f"(cpu): {node} is gone\n" in out
    assert "would serve nothing for a while: a\n" in out
    assert "guard" not in out
    assert on(c, "plan", "--without", "n1", "--without", "n2") == 6
    out = capsys.readouterr().out
    assert "the guard would hold: 2 of 3 nodes." in out
    assert "1 stranded" in out
    assert "- n1" not in out, "that it is gone is no news"


def test_both_at_once_as_json(c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = catalog(tmp_path, "models:\n" + model("b", 3, replicas=3, drain_s=5))
    assert on(c, "plan", "-f", file, "--without", "n3", "-o", "json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["edits"] == [{"action": "update", "record": "spec/models/b", "changes": "profiles.cpu.drain_s 60 → 5"}]
    assert (told["without"], told["left"], told["warnings"]) == (["n3"], ["spec/models/a"], [])
    steps = [step for each in told["models"] if each["name"] == "b" for step in each["steps"]]
    assert sorted(step["action"] for step in steps) == ["keep", "keep", "move"]
    assert not any("n3" in step["nodes"] for step in steps)


def test_what_is_so_already_is_not_put_down_to_the_change(
    c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c.model("waits", cpu_profile(99.0))
    c.settle()
    assert on(c, "plan", "-f", catalog(tmp_path, "models:\n" + model("new", 1))) == 6
    before, _, after = capsys.readouterr().out.partition("already so, or under way:\n")
    assert "new\n  place " in before
    assert after.startswith("waits\n  no room ")


def test_warnings_of_apply_are_told_as_well(
    c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on(c, "plan", "-f", catalog(tmp_path, "models:\n" + model("huge", 999))) == 6
    assert "warning: huge (cpu): " in capsys.readouterr().err


def test_h05_every_way_it_can_end_without_a_forecast(
    c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on(c, "plan") == 2
    assert "Say what is to be imagined" in capsys.readouterr().err
    assert on(c, "plan", "--prune", "--without", "n1") == 2
    assert on(c, "plan", "-f", catalog(tmp_path, "models:\n  m: {sauce: x}\n  n: {source: x, profile: []}\n")) == 2
    err = capsys.readouterr().err
    assert "catalog.yaml:2: models.m.sauce:" in err
    assert "catalog.yaml:3: models.n.profile:" in err
    assert on(c, "plan", "--without", "n11") == 3
    assert "no node named 'n11' (did you mean 'n1'?)" in capsys.readouterr().err
    assert on(c, "plan", "-f", catalog(tmp_path, "aliases: {x: b}\nmodels: {}\n"), "--prune") == 2


def test_what_apply_would_refuse_is_refused(c: Cluster, on: On, tmp_path: Path) -> None:
    c.model("B2")
    c.settle()
    assert on(c, "plan", "-f", catalog(tmp_path, "models:\n" + model("b2", 1))) == 4


def test_without_a_controller_nothing_can_be_judged(on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = Cluster()
    c.write(Kind.META, "", None)
    assert on(c, "plan", "-f", catalog(tmp_path, "models:\n" + model("a", 1))) == 6
    assert "no controller has been here yet" in capsys.readouterr().out


def text(told: Forecast) -> str:
    """What would be printed, in one piece."""
    return "\n".join(f"{head}{line}".rstrip() for head, line in lines(told)) + "\n" + tally(told)


def told(*models: ModelForecast, settled: bool = True) -> Forecast:
    return Forecast(settled=settled, rounds=7, revision=1, models=models)


def test_what_a_forecast_rests_on_is_told() -> None:
    guard = Guard(on=True, reason="too many nodes went away at once", unreachable=2, nodes=3)
    notes = [
        (told(settled=False), "it did not come to rest within 7 rounds"),
        (msgspec.structs.replace(told(), led=False), "nobody leads now"),
        (msgspec.structs.replace(told(), waiting_for=("n1", "n2")), "have reported: n1, n2 (`llmgw recover`"),
        (msgspec.structs.replace(told(), guard=guard), "the guard is on: too many nodes went away at once."),
        (msgspec.structs.replace(told(), away=("n1",)), "taken to stay away: n1"),
        (msgspec.structs.replace(told(), unreadable=("spec/models/a",)), "so is left as it is: spec/models/a"),
        (msgspec.structs.replace(told(), guard_then=guard, without=("n1", "n2")), "guard release n1 n2`"),
    ]
    for each, expected in notes:
        assert expected in text(each)
        assert text(each).startswith("note: ")
    assert text(told()) == "\nreplicas: 0 placed, 0 moved, 0 restarted, 0 removed, 0 kept. Nothing was written."


def test_steps_in_words() -> None:
    steps = (
        Step(action=StepAction.RESTART, replica="m-a", profile="p", nodes=("n1",), was=("n1",), why="slots 1 → 2",
             old_first=True),
        Step(action=StepAction.MOVE, replica="m-b", profile="p", nodes=("n3", "n4"), was=("n1", "n2"), in_s=300.1),
        Step(action=StepAction.PLACE, profile="p", nodes=("n5",), in_s=5.2),
        Step(action=StepAction.PLACE, profile="p", nodes=("n6",)),
        Step(action=StepAction.KEEP, replica="m-c", profile="p", nodes=("n7",), was=("n7",), why="left alone"),
        Step(action=StepAction.KEEP, replica="m-d", profile="p", nodes=("n8",), was=("n8",)),
    )  # fmt: skip
    model = ModelForecast(name="m", wanted=(6, 9), ready=(6, 6), steps=steps)
    *said, last = text(told(model)).splitlines()
    assert last.endswith(", 2 kept; not as wanted: 1 of 1 models. Nothing was written.")
    assert said == [
        "m",
        "  restart   m-a on n1 (p), the old one first: there is no room for both: slots 1 → 2",
        "  move      m-b n1 + n2 → n3 + n4 (p), in 6 min",
        "  keep      m-c on n7 (p): left alone",
        "  place     on n5 (p), in 6 s",
        "  place     on n6 (p)",
        "  short     6 of 9 replicas would be ready",
        "",
    ]
    unknown = ModelForecast(name="m", wanted=(None, None), ready=(0, 0))
    assert "  short     0 of - replicas would be ready\n" in text(told(unknown))


def test_a_secret_is_never_told(c: Cluster, on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = catalog(tmp_path, "models:\n" + model("a", 9, env="{TOKEN: hunter2}"))
    secrets = [each.key.reveal() for each in c.index.secrets.records()]
    assert secrets
    for form in ("text", "json", "yaml"):
        assert on(c, "plan", "-f", file, "--without", "n1", "-o", form) in (0, 6)
        out = capsys.readouterr().out
        assert not any(secret in out for secret in (*secrets, "hunter2"))
