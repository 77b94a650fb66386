"""Whether one entry of a catalog makes sense: names, ranges, GPU arithmetic, what the launcher owns, sizes.

Each check yields (where below the entry, what is wrong, the nearest right value). Values already have the right types;
what entries say of one another is judged by `llmgw.core.catalog_load`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from llmgw.core.catalog import ENGINES, EngineSpec, ModelSpec, Profile, Scaling
from llmgw.core.engine_flags import args_problems, env_problem
from llmgw.core.ids import MODEL_NAME_BYTES_MAX, model_name_problem, name_problem
from llmgw.core.yaml_tree import Path, nearest, show

Found = Iterator[tuple[Path, str, str | None]]

RECORD_BYTES_MAX: Final = 64 * 1024
"""Largest encoded record of a catalog, bytes. Two dozen fit one store request of 1.5 MB; real ones are below 2 kB."""

SOURCE_BYTES_MAX: Final = 1024
"""Longest `source`, bytes. Longer than any sane path, shorter than Linux's limit of 4096 with a model_dir before it."""

_RANGES: Final[Mapping[type, Mapping[str, tuple[float, float, str]]]] = {
    Profile: {
        "priority": (-1_000_000, 1_000_000, ""),
        "min_memory_gb": (0.001, 1_000_000, " GB; leave it out to declare nothing"),
        "min_gpu_memory_gb": (0.001, 10_000, " GB; leave it out to declare nothing"),
        "context": (1, 100_000_000, " tokens"),
        "slots": (1, 4096, ""),
        "start_s": (1, 7 * 86_400, " seconds"),
        "drain_s": (0, 7 * 86_400, " seconds"),
        "nodes": (1, 256, ""),
        "gpus_per_node": (0, 64, ""),
        "tensor_parallel": (1, 16_384, ""),
        "pipeline_parallel": (1, 16_384, ""),
    },
    Scaling: {
        "min": (0, 10_000, ""),
        "max": (1, 10_000, ""),
        "target_load": (0.01, 1_000_000, " requests; leave it out for the profile's slots"),
        "idle_s": (0, 30 * 86_400, " seconds"),
    },
}
"""Lowest, highest, and what to say of them. The highest are no promises: ten times the largest known installation."""


SHAPE: Final = ("nodes", "gpus_per_node", "gpu_class", "min_gpu_memory_gb", "tensor_parallel", "pipeline_parallel")
"""Fields of a profile that are judged together."""


def model_problems(spec: ModelSpec, *, bounds_read: bool = True) -> Found:
    """What is wrong with a model, apart from its profiles and the models it names.

    `bounds_read`: both bounds of its scaling are as written, so that they can be compared.
    """
    yield from _source(spec.source)
    yield from _ranges(spec.scaling, ("scaling",))
    if bounds_read and spec.scaling.min > spec.scaling.max:
        yield ("scaling", "min"), f"min {spec.scaling.min} is above max {spec.scaling.max}", None
    yield from _size(spec)


def profile_problems(profile: Profile, *, shape_read: bool = True) -> Found:
    """What is wrong with one profile. `shape_read`: each field of its `SHAPE` is as written."""
    if (why := name_problem(profile.name)) is not None:
        yield ("name",), f"{show(profile.name)} {why}", None
    if profile.engine not in ENGINES:
        yield from _unknown_engine(profile.engine, ("engine",))
    out_of_range = list(_ranges(profile))
    yield from out_of_range
    if shape_read and not out_of_range:
        yield from _shape(profile)
    yield from _texts("args", enumerate(profile.args))
    for i, why in args_problems(profile.engine, profile.args) if profile.engine else ():  # whose flags, else
        yield ("args", i), why, None
    yield from _texts("env", profile.env.items())
    for name in profile.env:
        if (why := env_problem(name)) is not None:
            yield ("env", name), f"{show(name)} {why}", None
    yield from _texts("node_selector", profile.node_selector.items())


def engine_problems(spec: EngineSpec) -> Found:
    """What is wrong with the wish for an engine."""
    if spec.name not in ENGINES:
        yield from _unknown_engine(spec.name, ())
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,62}", spec.version):
        yield ("version",), f"{show(spec.version)} is not a version (letters, digits and '.+_-', at most 63)", None
    source = spec.source
    if source == "github" or re.fullmatch(r"pypi:[A-Za-z0-9][A-Za-z0-9._-]*", source):
        return
    if _control(source) is not None or not re.fullmatch(r"https://[^/\s@]+/.*|/.*", source):
        near = "https" + source[4:] if source.startswith("http:") else nearest(source, ["github"])
        yield ("source",), f"{show(source)} is none of github, https://…, /a/directory, pypi:NAME", near


def name_problems(name: str) -> Found:
    """What is wrong with a model's or an alias's name."""
    if (why := model_name_problem(name)) is not None:
        composed = unicodedata.normalize("NFC", name)
        yield (), f"the name {show(name)} {why}", composed if model_name_problem(composed) is None else None


def _unknown_engine(name: str, place: Path) -> Found:
    yield place, f"unknown engine {show(name)}; known are {', '.join(ENGINES)}", nearest(name, ENGINES)


def _ranges(value: msgspec.Struct, place: Path = ()) -> Found:
    for name, (low, high, unit) in _RANGES[type(value)].items():
        number = getattr(value, name)
        if number is not None and not low <= number <= high:
            yield (*place, name), f"{number:.15g} is not in {low:.15g} to {high:.15g}{unit}", None


def _shape(profile: Profile) -> Found:
    gpus = profile.nodes * profile.gpus_per_node
    ranks = profile.tensor_parallel * profile.pipeline_parallel
    if gpus == 0:
        for name in ("gpu_class", "min_gpu_memory_gb"):
            if getattr(profile, name) is not None:
                yield (name,), "says something of GPUs, but gpus_per_node is 0", None
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(profile, name) != 1:
                yield (name,), f"is {getattr(profile, name)}, but gpus_per_node is 0: there is nothing to split", None
    elif gpus != ranks:
        spread = f"nodes {profile.nodes} × gpus_per_node {profile.gpus_per_node} = {gpus} GPUs"
        split = f"tensor_parallel {profile.tensor_parallel} × pipeline_parallel {profile.pipeline_parallel} = {ranks}"
        wrong = "tensor_parallel" if profile.tensor_parallel != 1 else "gpus_per_node"
        yield (wrong,), f"{spread}, but {split}; the two must be equal", None
    if profile.gpu_class is not None and (not profile.gpu_class or _control(profile.gpu_class)):
        yield ("gpu_class",), f"{show(profile.gpu_class)} names no class", None


def _source(source: str) -> Found:
    place: Path = ("source",)
    size = len(source.encode())
    parts = source.split("/")
    tidy = ("/" if source.startswith("/") else "") + "/".join(part for part in parts if part not in ("", "."))
    if not source.strip():
        yield place, "is empty: it names the weights", None
    elif size > SOURCE_BYTES_MAX:
        yield place, f"is {size} bytes long, the limit is {SOURCE_BYTES_MAX}", None
    elif (bad := _control(source, allowed="")) is not None:
        yield place, f"{show(source)} holds the control character {bad}", None
    elif "://" in source:
        yield place, f"{show(source)} is a URL; weights are files below a node's model_dirs", None
    elif ".." in parts:
        yield place, f"{show(source)} leaves the model_dirs with '..'", None
    elif tidy != source:
        yield place, f"{show(source)} is not in its shortest form", tidy or None


def _texts(field: str, values: Iterator[tuple[Any, str]] | Any) -> Found:
    for key, text in values:
        if (bad := _control(text)) is not None:
            yield (field, key), f"{show(text)} holds the control character {bad}", None
        if isinstance(key, str) and (not key or _control(key, allowed="") or len(key.encode()) > MODEL_NAME_BYTES_MAX):
            why = f"is empty, holds a control character or is longer than {MODEL_NAME_BYTES_MAX} bytes"
            yield (field, key), f"the name {show(key)} {why}", None


def _control(text: str, *, allowed: str = "\n\t") -> str | None:
    """The first control character (or half a surrogate pair) in `text` that is not allowed, as U+XXXX."""
    bad = next((c for c in text if c not in allowed and unicodedata.category(c) in ("Cc", "Cs")), None)
    return None if bad is None else f"U+{ord(bad):04X}"


def _size(spec: ModelSpec) -> Found:
    size = len(msgspec.json.encode(spec))
    if size > RECORD_BYTES_MAX:
        yield (), f"is {size} bytes as a record, the limit is {RECORD_BYTES_MAX}", None
