"""Applying a catalog, whatever it was before: each prefix valid, the end exact, a rerun idle, bounds kept."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.apply import Edit, Entry, plan_apply, problems
from llmgw.core.catalog import Alias, Catalog, EngineSpec, ModelSpec, Profile
from llmgw.core.catalog_load import Loaded
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Refused

# Few names, several of which are the same to a reader, so that they meet as model and as alias.
NAMES = st.sampled_from(["a", "b", "c", "d", "e", "A", "B", "é", "É", "K"])
PROFILES = (Profile(name="cpu", engine="llama.cpp"),)
EVERY_SECTION = frozenset({"models", "aliases", "engines"})


def state_of(catalog: Catalog) -> dict[Ref, Entry | None]:
    return {
        **{Ref(Kind.ENGINE, name): engine for name, engine in catalog.engines.items()},
        **{Ref(Kind.MODEL, name): model for name, model in catalog.models.items()},
        **{Ref(Kind.ALIAS, name): alias for name, alias in catalog.aliases.items()},
    }


def play(state: dict[Ref, Entry | None], batch: Iterable[Edit]) -> dict[Ref, Entry | None]:
    edits = {edit.ref: edit.record for edit in batch}
    gone = {ref for ref, record in edits.items() if record is None}
    return {ref: record for ref, record in {**state, **edits}.items() if ref not in gone}


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    """Any valid catalog over NAMES: fallbacks point only to models drawn earlier in a random order."""
    names = draw(st.lists(NAMES, unique_by=lambda name: name.casefold(), max_size=8))
    cut = draw(st.integers(0, len(names)))
    models: dict[str, ModelSpec] = {}
    for name in names[:cut]:
        targets = tuple(draw(st.lists(st.sampled_from(list(models)), unique=True, max_size=3))) if models else ()
        source = draw(st.sampled_from(["x", "y"]))
        models[name] = ModelSpec(name=name, source=source, profiles=PROFILES, fallbacks=targets)
    aliases = {n: Alias(name=n, model=draw(st.sampled_from(list(models)))) for n in names[cut:]} if models else {}
    versions = draw(st.dictionaries(st.sampled_from(["llama.cpp", "vllm"]), st.sampled_from(["1", "2"])))
    engines = {name: EngineSpec(name=name, version=version) for name, version in versions.items()}
    return Catalog(models=models, aliases=aliases, engines=engines)


@given(catalogs(), catalogs(), st.booleans(), st.integers(1, 12))
def test_every_prefix_of_an_apply_is_valid(current: Catalog, wanted: Catalog, prune: bool, changes_max: int) -> None:
    state = state_of(current)
    assert not list(problems(state))
    try:
        plan = plan_apply(
            current,
            Loaded(catalog=wanted, sections=EVERY_SECTION),
            prune=prune,
            changes_max=changes_max,
            bytes_max=1_000_000,
        )
    except Refused as refused:
        circle = "circle" in refused.why
        # Only for what is left of the old one, or because a circle of changes is larger than a batch.
        allowed = changes_max < 12 if circle else not prune
        assert allowed
        return
    for batch in plan.batches:
        assert 0 < len(batch) <= changes_max
        state = play(state, batch)
        assert not list(problems(state))
    merged = {**state_of(current), **state_of(wanted)}
    assert state == (state_of(wanted) if prune else merged)
    assert set(plan.left) == (set() if prune else state_of(current).keys() - state_of(wanted).keys())


@given(catalogs(), catalogs(), st.integers(0, 8))
def test_a_rerun_after_an_interruption_ends_what_was_begun(current: Catalog, wanted: Catalog, cut: int) -> None:
    loaded = Loaded(catalog=wanted, sections=EVERY_SECTION)
    first = plan_apply(current, loaded, prune=True, changes_max=12, bytes_max=1_000_000)
    state = state_of(current)
    for batch in first.batches[:cut]:
        state = play(state, batch)
    half = Catalog(
        models={ref.name: record for ref, record in state.items() if isinstance(record, ModelSpec)},
        aliases={ref.name: record for ref, record in state.items() if isinstance(record, Alias)},
        engines={ref.name: record for ref, record in state.items() if isinstance(record, EngineSpec)},
    )
    second = plan_apply(half, loaded, prune=True, changes_max=12, bytes_max=1_000_000)
    for batch in second.batches:
        state = play(state, batch)
    assert state == state_of(wanted)
    assert not plan_apply(wanted, loaded, prune=True, changes_max=12, bytes_max=1_000_000).batches


@given(catalogs(), st.sets(st.sampled_from(sorted(EVERY_SECTION))))
def test_sections_that_no_file_has_are_left_alone(current: Catalog, sections: set[str]) -> None:
    loaded = Loaded(catalog=Catalog(), sections=frozenset(sections))
    try:
        plan = plan_apply(current, loaded, prune=True, changes_max=12, bytes_max=1_000_000)
    except Refused:
        assert "models" in sections
        assert "aliases" not in sections
        assert current.aliases
        return
    kinds = {Kind.MODEL: "models", Kind.ALIAS: "aliases", Kind.ENGINE: "engines"}
    assert {kinds[edit.ref.kind] for edit in plan.edits} <= sections


def test_a_circle_larger_than_a_transaction_is_refused_whole() -> None:
    def catalog(name: str, other: str) -> Loaded:
        model = ModelSpec(name=name, source="x", profiles=PROFILES)
        made = Catalog(models={name: model}, aliases={other: Alias(name=other, model=name)})
        return Loaded(catalog=made, sections=EVERY_SECTION)

    # A model renamed in case only, with an alias on it: the three changes make sense together or not at all.
    before, after = catalog("gemma", "chat"), catalog("Gemma", "chat")
    plan = plan_apply(before.catalog, after, prune=True, changes_max=3, bytes_max=10_000)
    assert [len(batch) for batch in plan.batches] == [3]
    with pytest.raises(Refused, match="circle"):
        plan_apply(before.catalog, after, prune=True, changes_max=2, bytes_max=10_000)


def test_order_models_before_aliases_and_prune_in_reverse() -> None:
    def model(name: str, *fallbacks: str) -> ModelSpec:
        return ModelSpec(name=name, source="x", profiles=PROFILES, fallbacks=fallbacks)

    old = Catalog(
        models={"a1": model("a1"), "z1": model("z1", "a1")},
        aliases={"q": Alias(name="q", model="z1")},
        engines={"vllm": EngineSpec(name="vllm", version="1")},
    )
    new = Catalog(
        models={"a2": model("a2", "z2"), "z2": model("z2")},
        aliases={"p": Alias(name="p", model="a2")},
        engines={"llama.cpp": EngineSpec(name="llama.cpp", version="1")},
    )
    loaded = Loaded(catalog=new, sections=EVERY_SECTION)
    plan = plan_apply(old, loaded, prune=True, changes_max=100, bytes_max=100_000)
    assert [str(edit) for edit in plan.edits] == [
        "create engine llama.cpp",
        "create model z2",
        "create model a2",
        "create alias p",
        "delete alias q",
        "delete model z1",
        "delete model a1",
        "delete engine vllm",
    ]


def test_no_loop_closes_through_a_model_that_stays_as_it_is() -> None:
    def catalog(**fallbacks: str) -> Catalog:
        targets = {name: (to,) if to else () for name, to in fallbacks.items()}
        models = {n: ModelSpec(name=n, source="x", profiles=PROFILES, fallbacks=to) for n, to in targets.items()}
        return Catalog(models=models)

    current, wanted = catalog(a="", m="z", z="a"), catalog(a="m", m="z", z="")
    loaded = Loaded(catalog=wanted, sections=EVERY_SECTION)
    plan = plan_apply(current, loaded, prune=True, changes_max=1, bytes_max=10_000)
    assert [edit.ref.name for edit in plan.edits] == ["z", "a"]


def test_what_is_not_valid_is_told() -> None:
    def model(name: str, *fallbacks: str) -> tuple[Ref, Entry | None]:
        return Ref(Kind.MODEL, name), ModelSpec(name=name, source="x", profiles=PROFILES, fallbacks=fallbacks)

    state = dict([model("a", "b"), model("b", "a"), model("c", "none"), model("C")])
    state[Ref(Kind.ALIAS, "x")] = Alias(name="x", model="gone")
    state[Ref(Kind.MODEL, "unreadable")] = None
    assert list(problems(state)) == [
        "model 'c' needs model 'none', which is not there",
        "alias 'x' needs model 'gone', which is not there",
        "these names are the same or nearly so: model 'C', model 'c'",
        "fallbacks go round in a loop: 'a' -> 'b' -> 'a'",
    ]


def test_what_was_wrong_before_stops_nobody() -> None:
    broken = Catalog(aliases={"x": Alias(name="x", model="gone")})
    wanted = Loaded(catalog=Catalog(engines={"vllm": EngineSpec(name="vllm", version="1")}), sections=EVERY_SECTION)
    plan = plan_apply(broken, wanted, prune=False, changes_max=10, bytes_max=10_000)
    assert [str(edit) for edit in plan.edits] == ["create engine vllm"]
