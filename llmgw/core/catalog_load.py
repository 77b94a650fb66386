"""The catalog's files, read and judged as one: everything that could be refused later is refused here, all at once.

Invariant: what `load_catalog` hands out is valid whole. Every name it uses is defined in it, fallbacks have no loops,
no two names are the same to a reader, every profile adds up. An empty, null or truncated file is an error and never
means "nothing is wanted": only a section written as `{}` says that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from llmgw.core.catalog import Alias, Catalog, EngineSpec, ModelSpec, Profile
from llmgw.core.catalog_check import SHAPE, Found, engine_problems, model_problems, name_problems, profile_problems
from llmgw.core.document import Failed, Reader
from llmgw.core.yaml_tree import Fields, Items, Path, Text, Tree, Unusable, fold, locate, nearest, show

SECTIONS: Final = ("models", "aliases", "engines")

_SYNONYMS: Final = {
    "alias": "aliases",
    "count": "scaling",
    "ctx": "context",
    "ctx_size": "context",
    "engine": "engines",
    "instances": "scaling",
    "model": "models",
    "path": "source",
    "profile": "profiles",
    "replica": "scaling",
    "replicas": "scaling",
    "type": "task",
}
"""What people write who know another system, and what it is called here."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A valid catalog. `sections`: those that some file has; a section that none has is not spoken of at all."""

    catalog: Catalog
    sections: frozenset[str]


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One named thing as a file has it."""

    section: str
    key: Text
    tree: Tree

    @property
    def path(self) -> Path:
        return (self.section, self.key.text)


def load_catalog(files: Sequence[tuple[str, str]]) -> Loaded:
    """The catalog in `files`, given as (name to show, text). Raises: Invalid, with every problem of every file."""
    return _Loader().load(files)


class _Loader:
    def __init__(self) -> None:
        self._reader = Reader(synonyms=_SYNONYMS)
        self._sections: set[str] = set()
        self._entries: dict[str, dict[str, _Entry]] = {section: {} for section in SECTIONS}

    def load(self, files: Sequence[tuple[str, str]]) -> Loaded:
        for file, text in files:
            self._file(file, text)
        self._names()
        models: dict[str, ModelSpec] = {}
        for name, entry in self._entries["models"].items():
            if (model := self._model(entry)) is not None:
                models[name] = model
        aliases = {name: alias for name, entry in self._entries["aliases"].items() if (alias := self._alias(entry))}
        engines = {name: spec for name, entry in self._entries["engines"].items() if (spec := self._engine(entry))}
        self._fallbacks(models)
        self._reader.finish()
        catalog = Catalog(models=models, aliases=aliases, engines=engines)
        return Loaded(catalog=catalog, sections=frozenset(self._sections))

    # --- files and names --------------------------------------------------------------------------------------------

    def _file(self, file: str, text: str) -> None:
        before = len(self._reader.problems)
        tree = self._reader.parse(text, file=file)
        if tree is None and len(self._reader.problems) > before:
            return
        if not isinstance(tree, Fields) or not tree.entries:
            if not isinstance(tree, Unusable):
                node = tree or Fields(file=file, line=1, entries=())
                what = "is empty" if not isinstance(tree, (Items, Text)) or _null(tree) else "is no catalog"
                self._reader.add(
                    node, (), f"{what}: a catalog has {', '.join(SECTIONS)}, and nothing is deleted by omission"
                )
            return
        for key, value in tree.entries:
            if key.text not in SECTIONS:
                self._reader.unknown(key, (key.text,), SECTIONS)
                continue
            self._sections.add(key.text)
            self._section(key.text, value)

    def _section(self, section: str, tree: Tree) -> None:
        if isinstance(tree, Fields):
            for key, value in tree.entries:
                self._enter(_Entry(section=section, key=key, tree=value))
        elif isinstance(tree, Text) and tree.null:
            self._reader.add(tree, (section,), "is empty: remove the line, or write {} to say that there are none")
        elif not isinstance(tree, Unusable):
            shape = "a list" if isinstance(tree, Items) else "text"
            self._reader.add(tree, (section,), f"must be a mapping of names ({section}: {{NAME: …}}), not {shape}")

    def _enter(self, entry: _Entry) -> None:
        first = self._entries[entry.section].setdefault(entry.key.text, entry)
        if first is not entry:
            self._reader.add(
                entry.key, entry.path, f"{show(entry.key.text)} is here a second time, first in {_at(first)}"
            )

    def _names(self) -> None:
        """Models and aliases share one space of names: clients ask for either."""
        seen: dict[str, _Entry] = {}
        for section in ("models", "aliases"):
            for entry in self._entries[section].values():
                name = entry.key.text
                self._add(entry, name_problems(name))
                first = seen.setdefault(fold(name), entry)
                if first is entry:
                    continue
                what = f"{show(name)} is also the name of {_singular(first.section)} in {_at(first)}"
                if first.key.text != name:
                    what += f", {show(first.key.text)}, which differs only in case or Unicode form"
                self._reader.add(entry.key, entry.path, what)

    def _add(self, entry: _Entry, found: Found, *, tail: Path = ()) -> None:
        for place, message, near in found:
            path = (*tail, *place)
            if path and self._unread(entry, *path):
                continue
            node = locate(entry.tree, path) if path else entry.key
            self._reader.add(node, (*entry.path, *path), message, near=near)

    def _unread(self, entry: _Entry, *path: str | int) -> bool:
        return self._reader.unread((*entry.path, *path))

    # --- entries ----------------------------------------------------------------------------------------------------

    def _model(self, entry: _Entry) -> ModelSpec | None:
        tree, profiles = entry.tree, None
        if isinstance(tree, Fields):
            profiles = tree.get("profiles")
            others = tuple(pair for pair in tree.entries if pair[0].text != "profiles")
            tree = msgspec.structs.replace(tree, entries=others)
        spec = self._reader.convert(tree, ModelSpec, entry.path, given={"name": entry.key.text})
        made = self._profiles(entry, profiles)
        if isinstance(spec, Failed):
            return None
        spec = msgspec.structs.replace(spec, profiles=made)
        bounds_read = not any(self._unread(entry, "scaling", name) for name in ("min", "max"))
        self._add(entry, model_problems(spec, bounds_read=bounds_read))
        return spec

    def _profiles(self, entry: _Entry, tree: Tree | None) -> tuple[Profile, ...]:
        if isinstance(tree, Unusable):
            return ()
        if tree is None or not isinstance(tree, Items) or not tree.items:
            if isinstance(entry.tree, Fields):
                why = "needs at least one profile: a list such as [{name: cpu, engine: llama.cpp}]"
                self._reader.add(tree or entry.key, (*entry.path, "profiles"), why)
            return ()
        profiles: list[Profile] = []
        first: dict[str, int | None] = {}
        for i, item in enumerate(tree.items):
            tail: Path = ("profiles", i)
            profile = self._reader.convert(item, Profile, (*entry.path, *tail))
            if isinstance(profile, Failed):
                continue
            shape_read = not any(self._unread(entry, *tail, name) for name in SHAPE)
            self._add(entry, profile_problems(profile, shape_read=shape_read), tail=tail)
            profiles.append(profile)
            if self._unread(entry, *tail, "name"):
                continue
            line = locate(item, ("name",)).line
            if fold(profile.name) in first:
                why = (
                    f"the profile {show(profile.name)} is here a second time, first on line {first[fold(profile.name)]}"
                )
                self._add(entry, iter([(("name",), why, None)]), tail=tail)
            first.setdefault(fold(profile.name), line)
        return tuple(profiles)

    def _alias(self, entry: _Entry) -> Alias | None:
        target = self._reader.convert(entry.tree, str, entry.path)
        if isinstance(target, Failed):
            return None
        if (why := self._target_problem(target, self._entries["models"])) is not None:
            self._reader.add(entry.tree, entry.path, *why[:1], near=why[1])
        return Alias(name=entry.key.text, model=target)

    def _engine(self, entry: _Entry) -> EngineSpec | None:
        spec = self._reader.convert(entry.tree, EngineSpec, entry.path, given={"name": entry.key.text})
        if isinstance(spec, Failed):
            return None
        self._add(entry, engine_problems(spec))
        return spec

    # --- what entries say of one another ----------------------------------------------------------------------------

    def _target_problem(self, name: str, models: Mapping[str, object]) -> tuple[str, str | None] | None:
        """Why `name` is no model that an alias or a fallback can name, and what was probably meant."""
        if name in models:
            return None
        alias = self._entries["aliases"].get(name)
        if alias is not None:
            target = alias.tree.text if isinstance(alias.tree, Text) and alias.tree.text in models else None
            return f"{show(name)} is an alias ({_at(alias)}); name a model", target
        return f"no model {show(name)} in the files", nearest(name, models)

    def _fallbacks(self, models: Mapping[str, ModelSpec]) -> None:
        for name, spec in models.items():
            entry = self._entries["models"][name]
            for i, target in enumerate(spec.fallbacks):
                place: Path = ("fallbacks", i)
                if target == name:
                    self._add(entry, iter([(place, "a model can't fall back to itself", None)]))
                elif target in spec.fallbacks[:i]:
                    self._add(entry, iter([(place, f"{show(target)} is here a second time", None)]))
                elif (why := self._target_problem(target, self._entries["models"])) is not None:
                    self._add(entry, iter([(place, *why)]))
                elif any(self._unread(self._entries["models"][each], "task") for each in (name, target)):
                    continue
                elif target in models and models[target].task != spec.task:
                    tasks = f"{show(target)} is for {models[target].task.value}, this model for {spec.task.value}"
                    self._add(entry, iter([(place, tasks, None)]))
        for loop in fallback_loops(models):
            entry = self._entries["models"][loop[0]]
            i = models[loop[0]].fallbacks.index(loop[1])
            shown = " -> ".join(show(name) for name in loop)
            self._add(entry, iter([(("fallbacks", i), f"fallbacks go round in a loop: {shown}", None)]))


def fallback_loops(models: Mapping[str, ModelSpec]) -> Iterator[tuple[str, ...]]:
    """Loops among fallbacks, each as the names round it with the first again at the end; loops of one are left out.

    Every set of models that can reach one another yields at least one loop.
    """
    done: set[str] = set()
    for start in models:
        way: list[str] = []
        steps: list[Iterator[str]] = []
        at: str | None = start if start not in done else None
        while at is not None or steps:
            if at is not None:
                way.append(at)
                steps.append(iter(models[at].fallbacks))
            at = next(steps[-1], None)
            if at is None:
                done.add(way.pop())
                steps.pop()
            elif at in way:
                loop = (*way[way.index(at) :], at)
                if len(loop) > 2:
                    yield loop
                at = None
            elif at in done or at not in models:
                at = None


def _null(tree: Tree) -> bool:
    return isinstance(tree, Text) and tree.null


def _at(entry: _Entry) -> str:
    return f"{entry.key.file}:{entry.key.line}"


def _singular(section: str) -> str:
    return "the model" if section == "models" else "the alias"
