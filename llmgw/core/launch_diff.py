"""Why a replica is rolled: which part of its launch, or which version of its engine, is wanted otherwise now."""

from __future__ import annotations

import msgspec

from llmgw.core.catalog import EngineSpec, ModelSpec, Profile, Task, launch_hash
from llmgw.core.catalog_diff import describe_changes
from llmgw.core.reading import order_ref
from llmgw.core.replica import Assignment, Replica
from llmgw.core.snapshot import Index


class LaunchParts(msgspec.Struct, frozen=True, kw_only=True):
    """What `launch_hash` covers, by the names people know; None where an order does not tell."""

    source: str
    task: Task
    engine: str
    context: int
    slots: int
    nodes: int
    gpus_per_node: int
    tensor_parallel: int
    pipeline_parallel: int
    args: tuple[str, ...]
    env: dict[str, str]
    min_memory_gb: float | None = None
    gpu_class: str | None = None
    min_gpu_memory_gb: float | None = None


def launch_parts(spec: ModelSpec, profile: Profile) -> LaunchParts:
    """What a replica of this profile is launched from."""
    return LaunchParts(
        source=spec.source,
        task=spec.task,
        engine=profile.engine,
        context=profile.context,
        slots=profile.slots,
        nodes=profile.nodes,
        gpus_per_node=profile.gpus_per_node,
        tensor_parallel=profile.tensor_parallel,
        pipeline_parallel=profile.pipeline_parallel,
        args=profile.args,
        env=profile.env,
        min_memory_gb=profile.min_memory_gb,
        gpu_class=profile.gpu_class,
        min_gpu_memory_gb=profile.min_gpu_memory_gb,
    )


def why_rolled(before: Index, after: Index, replica: Replica) -> str:
    """Which field of its launch, or which version of its engine, differs from what is wanted; empty when neither does.

    `before`: where the replica is. `after`: where it is wanted otherwise.
    """
    wanted = after.models.record(replica.model)
    if wanted is None:
        return ""
    profile = _profile(wanted, replica.profile)
    if profile is None:
        return f"the profile {replica.profile} is not in the catalog any more"
    if replica.launch != launch_hash(wanted, profile):
        new = launch_parts(wanted, profile)
        old = _launched_from(before, replica, new)
        return "another launch" if old is None else describe_changes(old, new) or "another launch"
    wish = after.engines.record(replica.engine)
    return "" if wish is None else _version_change(before.engines.record(replica.engine), wish, replica)


def _launched_from(before: Index, replica: Replica, new: LaunchParts) -> LaunchParts | None:
    """What a replica runs: by the catalog, if that is still what it was launched from, else by its order."""
    spec = before.models.record(replica.model)
    profile = None if spec is None else _profile(spec, replica.profile)
    if spec is not None and profile is not None and launch_hash(spec, profile) == replica.launch:
        return launch_parts(spec, profile)
    head = next((shard for shard in replica.shards if shard.rank == 0), None)
    row = None if head is None else before.row(order_ref(head.node, replica.id, 0))
    if row is None or not isinstance(row.record, Assignment):
        return None
    launch = row.record.launch
    told = {field.name for field in msgspec.structs.fields(launch)}
    names = [field.name for field in msgspec.structs.fields(LaunchParts) if field.name in told]
    # What an order does not tell is taken to be as it is wanted, so that no change is made up.
    return msgspec.structs.replace(new, **{name: getattr(launch, name) for name in names})


def _profile(spec: ModelSpec, name: str) -> Profile | None:
    return next((profile for profile in spec.profiles if profile.name == name), None)


def _version_change(old: EngineSpec | None, wish: EngineSpec, replica: Replica) -> str:
    runs = (replica.build or "").partition("@")[2]
    has = runs or ("" if old is None else old.version)
    return f"{replica.engine} {has} → {wish.version}" if has else f"{replica.engine} {wish.version} is wanted"
