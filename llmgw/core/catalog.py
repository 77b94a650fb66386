"""What people want: models, aliases, engines, nodes. Types only; reading and judging YAML is `llmgw.core.document`.

Desired state has one writer: people, through `llmgw apply`, `cordon` and the like. No process of ours edits it.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from llmgw.core.record import Record
from llmgw.core.units import gb_to_bytes

ENGINES: Final = ("llama.cpp", "sglang", "vllm")
"""The engines that agents know how to start: what a profile, an engine wish and an agent's named engine may name."""

START_S: Final = 600.0
"""Default start budget of a profile, seconds. Source: a 70 GB model from a shared filer at 150 MB/s needs ~8 min."""

DRAIN_S: Final = 60.0
"""Default time that requests in flight get before a replica stops, seconds."""


IDLE_S: Final = 900.0
"""Default time without any request after which a model with `min: 0` is put to sleep, seconds.

Longer than a default start may take (`START_S`), so that what takes long to load is not unloaded between two questions.
"""


class Task(enum.Enum):
    """What a model is for; decides which endpoints it serves and which work proves it ready."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


class Profile(Record, frozen=True, kw_only=True):
    """One way to run a model. Sizes in GB as people wrote them (1 GB = 10**9 bytes).

    `nodes` × `gpus_per_node` = `tensor_parallel` × `pipeline_parallel`, checked at load.
    `min_memory_gb` None: nothing declared, so nothing claimed and any node fits.
    """

    name: str
    engine: str
    priority: int = 0
    min_memory_gb: float | None = None
    context: int = 4096
    slots: int = 4
    start_s: float = START_S
    drain_s: float = DRAIN_S
    node_selector: dict[str, str] = {}
    nodes: int = 1
    gpus_per_node: int = 0
    gpu_class: str | None = None
    min_gpu_memory_gb: float | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}

    @property
    def memory_bytes(self) -> int | None:
        """Host memory one shard of this profile claims; None when it declares none."""
        return None if self.min_memory_gb is None else gb_to_bytes(self.min_memory_gb)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Memory that each GPU must have for this profile; None when it declares none."""
        return None if self.min_gpu_memory_gb is None else gb_to_bytes(self.min_gpu_memory_gb)


class Scaling(Record, frozen=True, kw_only=True):
    """How many replicas a model has: between `min` and `max`, by load (`llmgw.core.autoscale`).

    `target_load`: requests, in flight and queued, that each replica is to have; None for the profile's `slots`.
    `idle_s`: where `min` is 0, how long without any request until no replica is left, seconds.
    """

    min: int = 1
    max: int = 1
    target_load: float | None = None
    idle_s: float = IDLE_S


class ModelSpec(Record, frozen=True, kw_only=True):
    """`spec/models/<name>`: one model of the catalog.

    `source` is a weight set: relative to any of a node's model_dirs, or absolute.
    """

    name: str
    source: str
    task: Task = Task.GENERATE
    profiles: tuple[Profile, ...] = ()
    scaling: Scaling = Scaling()
    fallbacks: tuple[str, ...] = ()

    @property
    def by_priority(self) -> tuple[Profile, ...]:
        """The profiles in the order they are tried: priority, then as written."""
        return tuple(sorted(self.profiles, key=lambda profile: -profile.priority))


class Alias(Record, frozen=True, kw_only=True):
    """`spec/aliases/<name>`: another name for a model."""

    name: str
    model: str


class EngineSpec(Record, frozen=True, kw_only=True):
    """`spec/engines/<name>`: the wanted version of an engine and where it comes from.

    `source`: `github`, an https URL, a directory, or `pypi:NAME`. No record means no wish: any reported build will do.
    """

    name: str
    version: str
    source: str = "github"


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a catalog, by name: what the files say, or what the store holds."""

    models: Mapping[str, ModelSpec] = {}
    aliases: Mapping[str, Alias] = {}
    engines: Mapping[str, EngineSpec] = {}


class NodeSpec(Record, frozen=True, kw_only=True):
    """`spec/nodes/<name>`: what people say of a node; its agent can't touch it.

    `release`: the session (lease id) whose absence an operator has judged, so the guard lets go of it.
    `forget`: the boot id of a machine that an operator has declared gone for good.
    """

    name: str
    cordon: bool = False
    drain: bool = False
    labels: dict[str, str] = {}
    release: int | None = None
    forget: str | None = None


def launch_hash(model: ModelSpec, profile: Profile) -> str:
    """What a replica was launched from, as 16 hex digits; a replica rolls when, and only when, this changes.

    Covers source, task and the profile's engine, context, slots, GPU and parallel shape, memory, args and env. Scaling,
    fallbacks, priority, node_selector, start_s and drain_s act without a restart, so they are left out.
    """
    parts = (
        model.source,
        model.task,
        profile.engine,
        profile.context,
        profile.slots,
        profile.nodes,
        profile.gpus_per_node,
        profile.gpu_class,
        profile.min_gpu_memory_gb,
        profile.tensor_parallel,
        profile.pipeline_parallel,
        profile.min_memory_gb,
        profile.args,
        sorted(profile.env.items()),
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
