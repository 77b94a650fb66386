"""Reading a process's config: its file, then the environment, then the command line.

Invariant: a config that `load_config` hands out has been checked whole; a process need not look at it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from llmgw.config.check import problems
from llmgw.config.file import read_text
from llmgw.config.settings import Config
from llmgw.core.document import Failed, Reader
from llmgw.core.yaml_tree import Fields, Items, Text, Tree, locate, show
from llmgw.core.yaml_tree import Path as Place

C = TypeVar("C", bound=Config)

_PATHS: Final = frozenset({"ca", "cert", "key", "password_file", "data_dir", "model_dirs", "binary", "snapshot"})
"""Keys whose values are paths, wherever they stand."""


def load_config(
    path: str | Path | None,
    kind: type[C],
    *,
    env: Mapping[str, str],
    overrides: Mapping[str, str | tuple[str, ...]] | None = None,
) -> C:
    """A process's config: its file, then LLMGW_ETCD from `env`, then `overrides`; the later wins.

    Args:
        path: the file; None for defaults. Relative paths in it are relative to its folder.
        kind: the config's type.
        env: the process's environment.
        overrides: what options on the command line say, by dotted key: `{"etcd.endpoints": ("http://…",)}`.

    Raises:
        Invalid: with every problem found, by file and line.
    """
    reader = Reader()
    name = "defaults" if path is None else str(path)
    tree: Tree | None = None
    if path is not None:
        tree = reader.parse(read_text(Path(path)), file=name)
        if tree is None:
            reader.finish()
    if tree is None or (isinstance(tree, Text) and tree.null):
        tree = Fields(file=name, line=None if path is None else 1, entries=())
    if path is not None:
        tree = _absolute(tree, Path(path).absolute().parent, reader)
    if "LLMGW_ETCD" in env:
        tree = _put(tree, ("etcd", "endpoints"), tuple(env["LLMGW_ETCD"].split(",")), origin="LLMGW_ETCD")
    for key, value in (overrides or {}).items():
        keys = tuple(key.split("."))
        origin = "--etcd" if keys == ("etcd", "endpoints") else "--" + keys[-1].replace("_", "-")
        tree = _put(tree, keys, value, origin=origin)
    config = reader.convert(tree, kind)
    if not isinstance(config, Failed):
        for place, message, near in problems(config):
            if not reader.unread(place):
                reader.add(locate(tree, place), place, message, near=near)
    reader.finish()
    assert not isinstance(config, Failed)  # noqa: S101  # finish() raised otherwise
    return config


def _put(tree: Tree, keys: tuple[str, ...], value: str | tuple[str, ...], *, origin: str) -> Tree:
    """`tree` with `value` at `keys`, in place of what the file says there."""
    if not keys:
        if isinstance(value, str):
            return Text(file=origin, line=None, text=value, plain=False)
        texts = tuple(Text(file=origin, line=None, text=each.strip(), plain=False) for each in value)
        return Items(file=origin, line=None, items=texts)
    if not isinstance(tree, Fields):
        return tree  # not a mapping, which the conversion complains about
    below = tree.get(keys[0]) or Fields(file=origin, line=None, entries=())
    written = tree.key(keys[0]) or Text(file=origin, line=None, text=keys[0], plain=False)
    others = tuple(entry for entry in tree.entries if entry[0].text != keys[0])
    entry = (written, _put(below, keys[1:], value, origin=origin))
    return msgspec.structs.replace(tree, entries=(*others, entry))


def _absolute(tree: Tree, base: Path, reader: Reader, place: Place = ()) -> Tree:
    """`tree` with its relative paths below `base`."""
    match tree:
        case Fields():
            entries = tuple((key, _absolute(value, base, reader, (*place, key.text))) for key, value in tree.entries)
            return msgspec.structs.replace(tree, entries=entries)
        case Items():
            items = tuple(_absolute(item, base, reader, (*place, i)) for i, item in enumerate(tree.items))
            return msgspec.structs.replace(tree, items=items)
        case Text() if not tree.null and tree.text and place and _is_path(place):
            if tree.text.startswith("~"):
                reader.add(tree, place, f"{show(tree.text)}: '~' is not expanded, write the whole path")
            return msgspec.structs.replace(tree, text=str(base / tree.text), plain=False)
        case _:
            return tree


def _is_path(place: Place) -> bool:
    keys = [part for part in place if isinstance(part, str)]
    return bool(keys) and keys[-1] in _PATHS and keys[0] != "labels"
