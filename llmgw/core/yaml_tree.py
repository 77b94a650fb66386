"""YAML as a tree that remembers where everything stood and how it was written.

YAML's own loaders turn the key `no` into False, drop a duplicate silently and forget lines. Here a plain scalar stays
the text it is, duplicates (also those that differ only in case or Unicode form) are problems that name both lines, and
anchors, merge keys, tags and second documents are refused. `${X}` and `$$` are text like any other.

Invariant: whatever is not in the tree has a problem that says so.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from typing import Final

import msgspec
import yaml

from llmgw.errors import Problem

Path = tuple[str | int, ...]
"""Where in a document: keys and list positions, from the root."""

_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One thing as written. `line` is 1-based; None where there is no file, then `file` says where it came from."""

    file: str
    line: int | None


class Text(Node, frozen=True, kw_only=True):
    """A scalar, exactly as written. `plain`: without quotes."""

    text: str
    plain: bool

    @property
    def null(self) -> bool:
        """Whether nothing was given: plain and empty, `~` or `null`."""
        return self.plain and self.text in _NULLS


class Items(Node, frozen=True, kw_only=True):
    """A list."""

    items: tuple[Tree, ...]


class Fields(Node, frozen=True, kw_only=True):
    """A mapping, in the order written, without duplicates."""

    entries: tuple[tuple[Text, Tree], ...]

    def get(self, key: str) -> Tree | None:
        """The value under `key`, None when there is none."""
        return next((value for name, value in self.entries if name.text == key), None)

    def key(self, key: str) -> Text | None:
        """`key` as it was written, None when it is not there."""
        return next((name for name, _ in self.entries if name.text == key), None)


class Unusable(Node, frozen=True, kw_only=True):
    """Something already complained about; nothing more is said of it."""


Tree = Text | Items | Fields | Unusable


def fold(name: str) -> str:
    """What two names share when people would take them for the same: NFKC and case folded."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`, None when none is near."""
    by_fold = {fold(candidate): candidate for candidate in sorted(candidates, reverse=True)}
    close = difflib.get_close_matches(fold(name), by_fold, n=1, cutoff=0.6)
    return by_fold[close[0]] if close else None


def show(value: str) -> str:
    """A value inside a message: quoted, with control characters escaped, at most 60 characters of it."""
    return repr(value if len(value) <= 60 else value[:57] + "...")


def path_text(path: Path) -> str:
    """`models.gemma.profiles[0].engine`; keys that are more than a word are quoted: `engines['llama.cpp']`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{show(part)}]"
    return text


def locate(tree: Tree, path: Path) -> Node:
    """What stands at `path` below `tree`, or the deepest part of the way there that exists."""
    for part in path:
        step: Tree | None = None
        if isinstance(tree, Fields) and isinstance(part, str):
            step = tree.get(part)
        elif isinstance(tree, Items) and isinstance(part, int) and part < len(tree.items):
            step = tree.items[part]
        if step is None:
            break
        tree = step
    return tree


def problem(node: Node, path: Path, message: str, *, near: str | None = None) -> Problem:
    """A problem at `node`."""
    return Problem(message=message, file=node.file, line=node.line, path=path_text(path) or None, nearest=near)


def parse(text: str, *, file: str) -> tuple[Tree | None, list[Problem]]:
    """The document in `text` and what is wrong with it.

    The tree is None when there is no document (an empty file, comments only) or when the text is no YAML.
    """
    parser = _Parser(file)
    try:
        for event in yaml.parse(text, Loader=yaml.CBaseLoader):
            parser.take(event)
    except yaml.MarkedYAMLError as error:
        why = ", ".join(part for part in (error.context, error.problem) if part)
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        return None, [*parser.problems, Problem(message=f"not YAML: {why}", file=file, line=line)]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"not YAML: the character U+{int(error.character):04X} is not allowed"
        return None, [*parser.problems, Problem(message=why, file=file, line=line)]
    return parser.root, parser.problems


class _Open:
    """A list or mapping whose end has not been seen. `key`: the key that waits for its value."""

    def __init__(self, *, line: int, mapping: bool) -> None:
        self.line, self.mapping = line, mapping
        self.items: list[Tree] = []
        self.entries: list[tuple[Text, Tree]] = []
        self.seen: dict[str, Text] = {}
        self.key: Text | Unusable | None = None


class _Parser:
    """Builds the tree from YAML's events, without recursion."""

    def __init__(self, file: str) -> None:
        self.root: Tree | None = None
        self.problems: list[Problem] = []
        self._file = file
        self._stack: list[_Open] = []
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        """Take the next event."""
        assert event.start_mark is not None  # noqa: S101  # libyaml marks every event
        line = event.start_mark.line + 1
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents == 2:
                    self._refuse(line, "a second document begins here ('---'): one file holds one document")
            case yaml.AliasEvent():
                self._place(self._refuse(line, f"alias '*{event.anchor}' is not supported, write it out"))
            case yaml.ScalarEvent():
                bad = self._marked(event, line)
                self._place(bad or Text(file=self._file, line=line, text=event.value, plain=not event.style))
            case yaml.CollectionStartEvent():
                self._marked(event, line)
                self._stack.append(_Open(line=line, mapping=isinstance(event, yaml.MappingStartEvent)))
            case yaml.CollectionEndEvent():
                top = self._stack.pop()
                if top.mapping:
                    self._place(Fields(file=self._file, line=top.line, entries=tuple(top.entries)))
                else:
                    self._place(Items(file=self._file, line=top.line, items=tuple(top.items)))
            case _:
                pass

    def _marked(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> Unusable | None:
        if event.anchor is not None:
            return self._refuse(line, f"anchor '&{event.anchor}' is not supported, write it out")
        if event.tag is not None:
            return self._refuse(line, f"tag {show(event.tag)} is not supported, a value's key decides its type")
        return None

    def _refuse(self, line: int | None, message: str, *, key: str | None = None) -> Unusable:
        path: list[str | int] = []
        for part in self._stack:
            if not part.mapping:
                path.append(len(part.items))
            elif isinstance(part.key, Text):
                path.append(part.key.text)
        if key is not None:
            path.append(key)
        bad = Unusable(file=self._file, line=line)
        self.problems.append(problem(bad, tuple(path), message))
        return bad

    def _place(self, node: Tree) -> None:
        if not self._stack:
            self.root = node if self.root is None else self.root
            return
        top = self._stack[-1]
        if not top.mapping:
            top.items.append(node)
        elif top.key is None:
            top.key = self._key(top, node)
        else:
            if isinstance(top.key, Text):
                top.entries.append((top.key, node))
            top.key = None

    def _key(self, top: _Open, node: Tree) -> Text | Unusable:
        if isinstance(node, Unusable):
            return node
        if not isinstance(node, Text):
            return self._refuse(node.line, "a key must be text, not a list or a mapping")
        if node.plain and node.text == "<<":
            return self._refuse(node.line, "merge keys are not supported, write it out", key="<<")
        before = top.seen.setdefault(fold(node.text), node)
        if before is node:
            return node
        message = f"{show(node.text)} is here a second time, first on line {before.line}"
        if before.text != node.text:
            message += f" as {show(before.text)}, which differs only in case or Unicode form"
        return self._refuse(node.line, message, key=node.text)
