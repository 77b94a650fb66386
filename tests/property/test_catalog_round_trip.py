"""`get catalog` prints what `apply` reads: for any valid catalog, a fixed point."""

from __future__ import annotations

import string
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from llmgw.cli.catalog_text import catalog_yaml
from llmgw.core.catalog import Alias, Catalog, EngineSpec, ModelSpec, Profile, Scaling, Task
from llmgw.core.catalog_load import load_catalog
from llmgw.core.ids import model_name_problem
from llmgw.core.yaml_tree import fold, parse

# Words that YAML's own loaders turn into something else, beside any text at all.
TRAPS = ["no", "on", "y", "null", "~", "1e3", "007", "1_000", "12:30", "2024-01-01", "0x10", "true", "1.0", "08", ""]
TEXT = st.one_of(
    st.sampled_from([*TRAPS, "${X}", "$$", "a: b", "- x", "#", "'", '"', "{", "&a", "*a", "!t", "<<", "="])
)
WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20) | TEXT
NAMES = (
    (WORDS | st.text(string.ascii_letters + "./-", max_size=12))
    .map(lambda text: unicodedata.normalize("NFC", text))
    .filter(lambda text: model_name_problem(text) is None)
)
LABELS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
ENV = st.text(string.ascii_uppercase, min_size=1, max_size=6).map(lambda name: f"X_{name}")
SOURCES = st.lists(st.sampled_from(["a", "no", "007", "x y", "é", "a: b", "${X}"]), min_size=1, max_size=3).map(
    "/".join
)
SIZES = st.none() | st.floats(0.001, 1_000_000) | st.integers(1, 1000).map(float)


@st.composite
def profiles(draw: st.DrawFn, name: str) -> Profile:
    gpus, pipeline = draw(st.integers(0, 8)), draw(st.sampled_from([1, 2]))
    return Profile(
        name=name,
        engine=draw(st.sampled_from(["llama.cpp", "vllm"])),
        priority=draw(st.integers(-5, 20)),
        min_memory_gb=draw(SIZES),
        context=draw(st.integers(1, 1_000_000)),
        slots=draw(st.integers(1, 64)),
        start_s=draw(st.floats(1, 10_000)),
        drain_s=draw(st.integers(0, 1000).map(float)),
        node_selector=draw(st.dictionaries(LABELS, WORDS, max_size=2)),
        nodes=pipeline,
        gpus_per_node=gpus,
        gpu_class=draw(st.sampled_from([None, "a100"])) if gpus else None,
        min_gpu_memory_gb=draw(st.sampled_from([None, 24.0])) if gpus else None,
        tensor_parallel=gpus or 1,
        pipeline_parallel=pipeline if gpus else 1,
        args=tuple(draw(st.lists(WORDS.filter(lambda text: not text.startswith("-")), max_size=3))),
        env=draw(st.dictionaries(ENV, WORDS | st.just("two\nlines\tand a tab"), max_size=2)),
    )


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    names = draw(st.lists(NAMES, unique_by=fold, min_size=1, max_size=5))
    cut = draw(st.integers(1, len(names)))
    models: dict[str, ModelSpec] = {}
    for name in names[:cut]:
        low = draw(st.integers(0, 3))
        models[name] = ModelSpec(
            name=name,
            source=draw(SOURCES),
            task=Task.EMBED,
            profiles=tuple(
                draw(profiles(each)) for each in draw(st.lists(LABELS, unique=True, min_size=1, max_size=2))
            ),
            scaling=Scaling(
                min=low,
                max=draw(st.integers(max(low, 1), 5)),
                target_load=draw(st.none() | st.floats(0.01, 1e6)),
                idle_s=draw(st.sampled_from([0.0, 900.0, 0.5]) | st.floats(0, 2592000)),
            ),
            fallbacks=tuple(draw(st.lists(st.sampled_from(list(models)), unique=True, max_size=2))) if models else (),
        )
    aliases = {name: Alias(name=name, model=draw(st.sampled_from(list(models)))) for name in names[cut:]}
    wished = draw(st.dictionaries(st.sampled_from(["llama.cpp", "vllm"]), st.sampled_from(["b10991", "0.1", "007"])))
    sources = st.sampled_from(["github", "https://example.org/a/", "/srv/engines", "pypi:some-wheel"])
    engines = {n: EngineSpec(name=n, version=version, source=draw(sources)) for n, version in wished.items()}
    return Catalog(models=models, aliases=aliases, engines=engines)


@given(catalogs())
def test_e04_export_apply_export_is_a_fixed_point(catalog: Catalog) -> None:
    text = catalog_yaml(catalog)
    loaded = load_catalog([("catalog.yaml", text)])
    assert loaded.catalog == catalog
    assert loaded.sections == {"models", "aliases", "engines"}
    assert catalog_yaml(loaded.catalog) == text


@given(st.text(max_size=200) | st.text("ab:-[]{}&*!~'\"# \n\t|>?%@,<", max_size=60))
def test_any_text_is_a_tree_or_a_problem(text: str) -> None:
    tree, problems = parse(text, file="any")
    assert tree is None or tree.file == "any"
    assert all(problem.file == "any" for problem in problems)
