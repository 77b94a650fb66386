"""Why a replica is rolled, in the words of the files."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.core.catalog import EngineSpec, ModelSpec, Profile, Task, launch_hash
from llmgw.core.catalog_diff import describe_changes
from llmgw.core.launch_diff import launch_parts, why_rolled
from llmgw.core.snapshot import Index, Kind
from llmgw.testing.apply import changes_for
from llmgw.testing.cluster import Cluster, cpu_profile, model_spec

OTHER: dict[str, Any] = {
    "engine": "vllm",
    "priority": 3,
    "min_memory_gb": 3.0,
    "context": 17,
    "slots": 17,
    "start_s": 17.0,
    "drain_s": 17.0,
    "node_selector": {"a": "b"},
    "nodes": 2,
    "gpus_per_node": 2,
    "gpu_class": "H100",
    "min_gpu_memory_gb": 17.0,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "args": ("--x",),
    "env": {"A": "b"},
}


def parts(spec: ModelSpec) -> msgspec.Struct:
    return launch_parts(spec, spec.profiles[0])


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(Profile) if field.name != "name"])
def test_a_field_is_told_when_and_only_when_it_rolls(field: str) -> None:
    spec = model_spec("m", cpu_profile())
    other = model_spec("m", cpu_profile(**{field: OTHER[field]}) if field != "min_memory_gb" else cpu_profile(3.0))
    rolls = launch_hash(spec, spec.profiles[0]) != launch_hash(other, other.profiles[0])
    assert bool(describe_changes(parts(spec), parts(other))) == rolls


def test_source_and_task_are_told() -> None:
    spec = model_spec("m")
    other = msgspec.structs.replace(spec, source="b.gguf", task=Task.EMBED)
    assert describe_changes(parts(spec), parts(other)) == "source m.gguf → b.gguf, task generate → embed"


def catalog(*specs: ModelSpec | EngineSpec) -> Index:
    index = Index()
    records = [(Kind.MODEL if isinstance(spec, ModelSpec) else Kind.ENGINE, spec.name, spec) for spec in specs]
    index.apply(changes_for(index, *records, revision=1), revision=1)
    return index


def running(*, apply_again: ModelSpec | None = None) -> Cluster:
    """A replica of `m`; `apply_again`: what the catalog says since."""
    c = Cluster()
    c.node("n1")
    c.model("m")
    c.settle()
    if apply_again is not None:
        c.write(Kind.MODEL, "m", apply_again)
    return c


def test_what_an_older_catalog_launched_is_compared_by_its_order() -> None:
    c = running(apply_again=model_spec("m", cpu_profile(2.0, context=5000)))
    wanted = catalog(model_spec("m", cpu_profile(2.0, context=6000)))
    assert why_rolled(c.index, wanted, c.one("m")) == "context 4096 → 6000"


def test_what_an_order_does_not_tell_is_not_made_up() -> None:
    c = running(apply_again=model_spec("m", cpu_profile(2.0)))
    assert why_rolled(c.index, catalog(model_spec("m", cpu_profile(3.0))), c.one("m")) == "another launch"
    c.meddle((Kind.ASSIGNMENT, c.shard(c.one("m")), None))
    assert why_rolled(c.index, catalog(model_spec("m", cpu_profile(3.0))), c.one("m")) == "another launch"


def test_a_profile_that_is_gone_and_a_model_that_is_gone() -> None:
    c = running()
    gone = "the profile cpu is not in the catalog any more"
    assert why_rolled(c.index, catalog(model_spec("m", cpu_profile(name="other"))), c.one("m")) == gone
    assert why_rolled(c.index, catalog(), c.one("m")) == ""


def test_another_version_of_its_engine() -> None:
    c = running()
    same, engine = model_spec("m"), EngineSpec(name="llama.cpp", version="b2")
    assert why_rolled(c.index, catalog(same, engine), c.one("m")) == "llama.cpp b1 → b2"
    assert why_rolled(c.index, catalog(same), c.one("m")) == ""
    unknown = msgspec.structs.replace(c.one("m"), build=None)
    assert why_rolled(c.index, catalog(same, engine), unknown) == "llama.cpp b2 is wanted"
    c.write(Kind.ENGINE, "llama.cpp", EngineSpec(name="llama.cpp", version="b1"))
    assert why_rolled(c.index, catalog(same, engine), unknown) == "llama.cpp b1 → b2"
