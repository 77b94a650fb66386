"""What an update says of itself."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.apply import plan_apply
from llmgw.core.catalog import Alias, Catalog, ModelSpec, Profile, Scaling, Task
from llmgw.core.catalog_diff import CHANGES_MAX, VALUE_LEN_MAX, describe_changes
from llmgw.core.catalog_load import Loaded
from llmgw.core.snapshot import Kind, Ref

CPU = Profile(name="cpu", engine="llama.cpp", priority=10, env={"TOKEN": "old", "GONE": "x"})
MODEL = ModelSpec(name="m", source="m.gguf", profiles=(CPU,))


def changed(**fields: object) -> ModelSpec:
    return msgspec.structs.replace(MODEL, **fields)


def cpu(**fields: object) -> ModelSpec:
    return changed(profiles=(msgspec.structs.replace(CPU, **fields),))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (MODEL, ""),
        (changed(scaling=Scaling(min=2, max=2)), "scaling.min 1 → 2, scaling.max 1 → 2"),
        (changed(task=Task.EMBED, fallbacks=("a", "b")), 'task generate → embed, fallbacks [] → ["a","b"]'),
        (cpu(priority=0, min_memory_gb=1.5), "profiles.cpu.priority 10 → 0, profiles.cpu.min_memory_gb none → 1.5"),
        (cpu(args=("--a\n",)), 'profiles.cpu.args [] → ["--a\\n"]'),
        (
            cpu(env={"TOKEN": "hunter2", "NEW": "hunter2"}),
            "profiles.cpu.env.TOKEN changed, profiles.cpu.env.GONE removed, profiles.cpu.env.NEW added",
        ),
        (changed(profiles=()), "profiles.cpu removed"),
        (changed(profiles=(Profile(name="b", engine="vllm"), CPU)), "profiles.b added"),
        (changed(source="s" * 99), f"source m.gguf → {'s' * (VALUE_LEN_MAX - 1)}…"),
    ],
)
def test_only_what_differs_is_told(new: ModelSpec, said: str) -> None:
    assert describe_changes(MODEL, new) == said


def test_a_new_order_and_what_differs_only_where_it_was_cut() -> None:
    two = changed(profiles=(CPU, Profile(name="b", engine="vllm")))
    assert describe_changes(two, changed(profiles=two.profiles[::-1])) == 'profiles reordered: ["b","cpu"]'
    assert describe_changes(changed(source="s" * 98), changed(source="s" * 99)) == "source changed"


def test_a_line_is_bounded() -> None:
    many = changed(profiles=tuple(Profile(name=f"p{i}", engine="vllm") for i in range(30)))
    said = describe_changes(changed(profiles=()), many)
    assert said.count(" added") == CHANGES_MAX
    assert said.endswith(f", and {30 - CHANGES_MAX} more")


def test_an_edit_says_it() -> None:
    current = Catalog(models={"m": MODEL}, aliases={"a": Alias(name="a", model="m")})
    wanted = Loaded(catalog=Catalog(models={"m": changed(source="n.gguf")}), sections=frozenset({"models"}))
    plan = plan_apply(current, wanted, prune=False, changes_max=9, bytes_max=9999)
    assert [str(edit) for edit in plan.edits] == ["update model m: source m.gguf → n.gguf"]
    assert (plan.left, plan.untouched) == ((), {"aliases": 1})
    corrupt = frozenset({Ref(Kind.MODEL, "m")})
    plan = plan_apply(Catalog(), wanted, prune=False, changes_max=9, bytes_max=9999, corrupt=corrupt)
    assert [str(edit) for edit in plan.edits] == ["update model m: was unreadable"]
