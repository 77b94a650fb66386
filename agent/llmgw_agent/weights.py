"""Weights on this node: what `source` names, and which sets lie below the model directories.

A source is relative to one of `model_dirs` and never leads out of it, by `..` or by a link; an absolute one is taken as
it is. Sets are listed as a preference for placement, never as a filter: what is not listed may still be there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from llmgw.core.node import WeightSet
from llmgw_agent.host import StartFailed

GGUF: Final = ".gguf"
MAGIC: Final = b"GGUF"
SETS_MAX: Final = 500
"""Most sets that are listed."""

DEPTH_MAX: Final = 6
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """A file to load, and how many bytes it and its further parts have."""

    path: Path
    bytes: int


def resolve(source: str, model_dirs: Sequence[str]) -> Weights:
    """The file that `source` names here. Reads files; not for the event loop.

    Raises:
        StartFailed: there is none that may be used; says where it was looked for.
    """
    try:
        return _resolve(source, model_dirs)
    except OSError as error:  # a name that is too long, a directory on the way that may not be searched
        raise StartFailed(f"the source {source!r} can't be looked for: {error.strerror}") from error


def _resolve(source: str, model_dirs: Sequence[str]) -> Weights:
    path = Path(source)
    if path.is_absolute():
        return _check(path, f"{source} is not there")
    if ".." in path.parts or not path.parts:
        raise StartFailed(f"the source {source!r} leads out of the model directories")
    if not model_dirs:
        raise StartFailed(f"the source {source!r} is relative, and agent.yaml names no model_dirs")
    for directory in model_dirs:
        root = Path(directory)
        candidate = root / path
        if not candidate.exists():
            continue
        if not candidate.resolve().is_relative_to(root.resolve()):
            raise StartFailed(f"{candidate} is a link that leads out of {root}")
        return _check(candidate, f"{candidate} is not there")
    raise StartFailed(f"there is no {source!r} in {', '.join(map(str, model_dirs))}")


def _check(path: Path, missing: str) -> Weights:
    if path.is_dir():
        raise StartFailed(f"{path} is a directory; name the {GGUF} file in it")
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except FileNotFoundError as error:
        raise StartFailed(missing) from error
    except OSError as error:
        raise StartFailed(f"{path} can't be read: {error.strerror}") from error
    if magic != MAGIC:
        raise StartFailed(f"{path} is no GGUF file")
    parts = _parts(path)
    if parts[0] != path:
        raise StartFailed(f"{path.name} is a further part of its set; name {parts[0].name}")
    absent = next((part for part in parts if not part.is_file()), None)
    if absent is not None:
        raise StartFailed(f"{absent} is missing from its set of {len(parts)}")
    return Weights(path=path, bytes=sum(part.stat().st_size for part in parts))


def _parts(path: Path) -> list[Path]:
    """All files of the set that `path` is of, in order; by their names only."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = int(match["parts"])
    return [path.with_name(f"{match['stem']}-{n:05d}-of-{parts:05d}{GGUF}") for n in range(1, parts + 1)]


def listing(model_dirs: Sequence[str]) -> tuple[WeightSet, ...]:
    """The sets below `model_dirs`, by source, at most `SETS_MAX`. Reads files; not for the event loop."""
    found: dict[str, WeightSet] = {}
    for directory in model_dirs:
        root = Path(directory)
        for path in _walk(root):
            match = _PART.fullmatch(path.name)
            if match is not None and int(match["part"]) != 1:
                continue
            source = str(path.relative_to(root))
            if source not in found and len(found) < SETS_MAX and _is_text(source):
                found[source] = _set(source, path)
    return tuple(found[source] for source in sorted(found))


def warnings(model_dirs: Sequence[str]) -> tuple[str, ...]:
    """What is wrong with the directories themselves. Looks at files; not for the event loop."""
    found: list[str] = []
    for directory in model_dirs:
        try:
            os.scandir(directory).close()
        except FileNotFoundError:
            found.append(f"no such model directory {directory}")
        except OSError as error:
            found.append(f"the model directory {directory} can't be read: {error.strerror}")
    return tuple(found)


def _walk(root: Path) -> Iterator[Path]:
    """All GGUF files, sorted, links to directories not followed."""
    for directory, names, files in os.walk(root):
        depth = len(Path(directory).relative_to(root).parts)
        names[:] = sorted(names) if depth < DEPTH_MAX else []
        yield from (Path(directory) / name for name in sorted(files) if name.endswith(GGUF))


def _is_text(source: str) -> bool:
    """Whether a catalog could name it: a file's name may be any bytes."""
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def _set(source: str, path: Path) -> WeightSet:
    parts = _parts(path)
    sizes: list[int] = []
    for part in parts:
        try:
            sizes.append(part.stat().st_size)
        except OSError as error:
            return WeightSet(source=source, complete=False, why=f"{part.name}: {error.strerror}")
    empty = next((part for part, size in zip(parts, sizes, strict=True) if size == 0), None)
    if empty is not None:
        return WeightSet(source=source, bytes=sum(sizes), complete=False, why=f"{empty.name} is empty")
    return WeightSet(source=source, bytes=sum(sizes))
