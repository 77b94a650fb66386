"""What people write, turned into our types: strictly, one value at a time, with every problem and its line.

Only the type that a value is meant for decides what it becomes: `no` is text where text is wanted, and refused where
true or false is. Unknown keys are refused with the nearest known one. Every problem is collected, not only the first.

Invariant: a `Reader` that finishes has used every key of the tree and read every value. Until then a Struct may hold a
default, or empty text, in place of what could not be read, so that the rest of it can be judged in the same run;
`Reader.unread` tells which fields those are.
Not here: whether values make sense together (`llmgw.core.catalog_load`, `llmgw.config`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from msgspec import inspect

from llmgw.core.yaml_tree import Fields, Items, Node, Path, Text, Tree, Unusable, nearest, parse, problem, show
from llmgw.errors import Invalid, Problem

T = TypeVar("T")

_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT: Final = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


class Failed:
    """The type of `FAILED`: there is no value, and the reader's problems say why."""


FAILED: Final = Failed()


class Reader:
    """Converts trees to values, collecting every problem on the way.

    `synonyms`: wrong key -> the key that people who write it mean, where spelling alone would not tell.
    """

    def __init__(self, *, synonyms: Mapping[str, str] | None = None) -> None:
        self.problems: list[Problem] = []
        self._unread: set[Path] = set()
        self._synonyms = synonyms or {}

    def parse(self, text: str, *, file: str) -> Tree | None:
        """The document in `text`; None when there is none (an empty file, comments only) or when it is no YAML."""
        tree, problems = parse(text, file=file)
        self.problems += problems
        return tree

    def add(self, node: Node, path: Path, message: str, *, near: str | None = None) -> None:
        """Note a problem at `node`."""
        self.problems.append(problem(node, path, message, near=near))

    def unread(self, path: Path) -> bool:
        """Whether the field at `path`, or one that it is part of, could not be read."""
        return any(path[:size] in self._unread for size in range(len(path) + 1))

    def unknown(self, key: Text, path: Path, known: Iterable[str]) -> None:
        """Note that `key` is none of `known`."""
        names = sorted(known)
        near = self._synonyms.get(key.text)
        near = near if near in names else nearest(key.text, names)
        self.add(key, path, f"unknown key {show(key.text)}; known here: {', '.join(names) or 'none'}", near=near)

    def finish(self) -> None:
        """End the reading. Raises: Invalid, with every problem by file and line, if there is any."""
        if self.problems:
            raise Invalid(tuple(sorted(self.problems, key=lambda each: (each.file or "", each.line or 0))))

    def convert(
        self, node: Tree, kind: type[T], path: Path = (), *, given: Mapping[str, Any] | None = None
    ) -> T | Failed:
        """`node` as a `kind` (a Struct, or what a Struct's fields may be), or FAILED where no default helps.

        Usable only after `finish` found nothing. `given`: fields whose values come from elsewhere, such as the key that
        an entry stands under; they are not allowed inside.
        """
        value: T | Failed = self._value(node, _type_info(kind), path, given or {})
        return value

    def _value(self, node: Tree, info: inspect.Type, path: Path, given: Mapping[str, Any]) -> Any:
        if isinstance(node, Unusable):
            return FAILED
        match info:
            case inspect.UnionType():
                if isinstance(node, Text) and node.null and info.includes_none:
                    return None
                (only,) = (part for part in info.types if not isinstance(part, inspect.NoneType))
                return self._value(node, only, path, given)
            case inspect.StructType():
                return self._struct(node, info, path, given)
            case inspect.DictType():
                return self._dict(node, info, path)
            case inspect.VarTupleType():
                return self._items(node, info.item_type, path)
            case inspect.TupleType():
                return self._fixed(node, info.item_types, path)
            case _:
                return self._scalar(node, info, path)

    def _struct(self, node: Tree, info: inspect.StructType, path: Path, given: Mapping[str, Any]) -> Any:
        if not isinstance(node, Fields):
            return self._wrong(node, path, "a mapping (key: value)")
        known = {field.name: field for field in info.fields if field.name not in given}
        values: dict[str, Any] = dict(given)
        for key, value in node.entries:
            field = known.get(key.text)
            if field is None:
                self.unknown(key, (*path, key.text), known)
            else:
                values[key.text] = self._value(value, field.type, (*path, key.text), {})
        for field in known.values():
            if field.required and field.name not in values:
                self.add(node, (*path, field.name), "is missing")
                values[field.name] = FAILED
            if values.get(field.name) is not FAILED:
                continue
            self._unread.add((*path, field.name))
            if not field.required:
                del values[field.name]
            elif isinstance(field.type, inspect.StrType):
                values[field.name] = ""
        return info.cls(**values) if _complete(values.values()) else FAILED

    def _dict(self, node: Tree, info: inspect.DictType, path: Path) -> Any:
        if not isinstance(node, Fields):
            return self._wrong(node, path, "a mapping (key: value)")
        pairs = {key.text: self._value(value, info.value_type, (*path, key.text), {}) for key, value in node.entries}
        return pairs if _complete(pairs.values()) else FAILED

    def _items(self, node: Tree, kind: inspect.Type, path: Path) -> Any:
        if not isinstance(node, Items):
            return self._wrong(node, path, "a list")
        values = tuple(self._value(item, kind, (*path, i), {}) for i, item in enumerate(node.items))
        return values if _complete(values) else FAILED

    def _fixed(self, node: Tree, kinds: tuple[inspect.Type, ...], path: Path) -> Any:
        if not isinstance(node, Items) or len(node.items) != len(kinds):
            return self._wrong(node, path, f"a list of exactly {len(kinds)}")
        pairs = zip(node.items, kinds, strict=True)
        values = tuple(self._value(item, kind, (*path, i), {}) for i, (item, kind) in enumerate(pairs))
        return values if _complete(values) else FAILED

    def _scalar(self, node: Tree, info: inspect.Type, path: Path) -> Any:
        expected = _expected(info)
        if not isinstance(node, Text) or node.null:
            return self._wrong(node, path, expected)
        text, near = node.text, None
        match info:
            case inspect.StrType():
                return text
            case inspect.IntType() if _INT.fullmatch(text):
                return int(text)
            case inspect.FloatType() if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
                return float(text)
            case inspect.BoolType() if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case inspect.EnumType():
                members = [str(member.value) for member in info.cls]
                if text in members:
                    return info.cls(text)
                near = nearest(text, members)
            case _:
                pass
        self.add(node, path, f"{show(text)} is not {expected}", near=near)
        return FAILED

    def _wrong(self, node: Tree, path: Path, expected: str) -> Failed:
        match node:
            case Text() if node.null:
                what = f"is {node.text or 'empty'} and must be {expected}: give a value or remove the line"
                if expected == "text":
                    what += f"; if the text is meant, write '{node.text}' with the quotes"
            case Text():
                what = f"must be {expected}, not the text {show(node.text)}"
            case Items():
                what = f"must be {expected}, not a list of {len(node.items)}"
            case _:
                what = f"must be {expected}, not a mapping"
        self.add(node, path, what)
        return FAILED


_type_info: Final[Callable[[Any], inspect.Type]] = functools.cache(inspect.type_info)


def _complete(values: Iterable[Any]) -> bool:
    return all(value is not FAILED for value in values)


def _expected(info: inspect.Type) -> str:
    match info:
        case inspect.StrType():
            return "text"
        case inspect.IntType():
            return "a whole number (digits only, no leading zero)"
        case inspect.FloatType():
            return "a number"
        case inspect.BoolType():
            return "true or false"
        case inspect.EnumType():
            return "one of " + ", ".join(str(member.value) for member in info.cls)
        case _:
            raise NotImplementedError(f"no reading of {info}")  # a type of ours has a field this module can't read


def read(text: str, kind: type[T], *, file: str) -> T:
    """The one document in `text` as a `kind`; an empty document counts as an empty mapping. Raises: Invalid."""
    reader = Reader()
    tree = reader.parse(text, file=file)
    if tree is None:
        reader.finish()
        tree = Fields(file=file, line=1, entries=())
    value = reader.convert(tree, kind)
    reader.finish()
    assert not isinstance(value, Failed)  # noqa: S101  # FAILED always comes with a problem, and there is none
    return value
