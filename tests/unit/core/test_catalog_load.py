"""The catalog's files: one form, every error at once, and nothing that reads as "delete all"."""

from __future__ import annotations

import pytest

from llmgw.core.catalog import Alias, EngineSpec, ModelSpec, Profile, Scaling, Task
from llmgw.core.catalog_check import RECORD_BYTES_MAX
from llmgw.core.catalog_load import Loaded, load_catalog
from llmgw.errors import Invalid

OK = "{source: x, profiles: [{name: cpu, engine: llama.cpp}]}"

UNKNOWN_ENGINE = "unknown engine 'vll'; known are llama.cpp, sglang, vllm (did you mean 'vllm'?)"

WHOLE = """
models:
  gemma-270m:
    source: gemma/gemma-270m.gguf
    task: generate
    profiles:
      - {name: cpu, engine: llama.cpp, priority: 10, min_memory_gb: 1, context: 4096, slots: 4, start_s: 600,
         drain_s: 60, node_selector: {rack: 007}, args: [--temp, 0.7], env: {A: true}}
      - {name: gpu, engine: vllm, nodes: 2, gpus_per_node: 4, gpu_class: a100, min_gpu_memory_gb: 40,
         tensor_parallel: 4, pipeline_parallel: 2}
    scaling: {min: 1, max: 3}
    fallbacks: [small]
  small: {source: /srv/small.gguf, profiles: [{name: cpu, engine: llama.cpp}]}
aliases: {gpt-4o-mini: gemma-270m}
engines: {llama.cpp: {version: b10991, source: github}, vllm: {version: 0.33.0}}
"""


def load(*texts: str) -> Loaded:
    return load_catalog([(f"{chr(97 + i)}.yaml", text) for i, text in enumerate(texts)])


def refused(*texts: str) -> list[str]:
    with pytest.raises(Invalid) as told:
        load(*texts)
    return [str(problem) for problem in told.value.problems]


def profile(text: str) -> list[str]:
    return refused(f"models:\n  m:\n    source: x\n    profiles:\n      - {{name: p, engine: vllm, {text}}}\n")


def test_everything_the_form_has() -> None:
    loaded = load(WHOLE)
    catalog = loaded.catalog
    assert catalog.models["gemma-270m"] == ModelSpec(
        name="gemma-270m",
        source="gemma/gemma-270m.gguf",
        task=Task.GENERATE,
        profiles=(
            Profile(
                name="cpu",
                engine="llama.cpp",
                priority=10,
                min_memory_gb=1.0,
                node_selector={"rack": "007"},
                args=("--temp", "0.7"),
                env={"A": "true"},
            ),
            Profile(
                name="gpu",
                engine="vllm",
                nodes=2,
                gpus_per_node=4,
                gpu_class="a100",
                min_gpu_memory_gb=40.0,
                tensor_parallel=4,
                pipeline_parallel=2,
            ),
        ),
        scaling=Scaling(min=1, max=3),
        fallbacks=("small",),
    )
    assert catalog.aliases == {"gpt-4o-mini": Alias(name="gpt-4o-mini", model="gemma-270m")}
    assert catalog.engines["llama.cpp"] == EngineSpec(name="llama.cpp", version="b10991", source="github")
    assert loaded.sections == {"models", "aliases", "engines"}


def test_several_files_are_one_catalog() -> None:
    loaded = load("aliases: {a: m}", f"models: {{m: {OK}}}")
    assert loaded.catalog.aliases["a"].model == "m"
    assert loaded.sections == {"models", "aliases"}


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "null", "~", "{}", "[]", "text", "models:", "models: ~"]
)
def test_an_empty_or_truncated_file_is_an_error_and_never_an_empty_catalog(text: str) -> None:
    (problem,) = refused(text)
    assert problem.startswith("a.yaml:")
    # Also beside a file that is in order.
    assert refused(f"models: {{m: {OK}}}", text) == [problem.replace("a.yaml", "b.yaml")]


def test_only_braces_say_that_there_is_nothing() -> None:
    loaded = load("models: {}")
    assert not loaded.catalog.models
    assert loaded.sections == {"models"}


def test_e01_unknown_keys_at_every_level() -> None:
    found = refused(
        "modells: {}\nmodels:\n  m:\n    source: x\n    replica: 2\n    scaling: {mim: 1}\n    profiles:\n"
        "      - {name: p, engine: vllm, gpu_memmory: 20GiB}\nengines: {vllm: {version: x, sauce: y}}\n"
    )
    assert [(line.split(": ")[:2], line.rpartition("(")[2]) for line in found] == [
        (["a.yaml:1", "modells"], "did you mean 'models'?)"),
        (["a.yaml:5", "models.m.replica"], "did you mean 'scaling'?)"),
        (["a.yaml:6", "models.m.scaling.mim"], "did you mean 'min'?)"),
        (["a.yaml:8", "models.m.profiles[0].gpu_memmory"], "did you mean 'min_gpu_memory_gb'?)"),
        (["a.yaml:9", "engines.vllm.sauce"], "did you mean 'source'?)"),
    ]


def test_e03_names_that_are_the_same_to_a_reader() -> None:
    (problem,) = refused(f"models:\n  m: {OK}\n  m: {OK}\n")
    assert "a.yaml:3: models.m:" in problem
    assert "line 2" in problem
    (problem,) = refused(f"models:\n  m: {OK}\n", f"models:\n  m: {OK}\n")
    assert "b.yaml:2: models.m:" in problem
    assert "a.yaml:2" in problem
    (problem,) = refused(f"models:\n  gemma: {OK}\n", f"models:\n  Gemma: {OK}\n")
    assert "b.yaml:2: models.Gemma:" in problem
    assert "a.yaml:2, 'gemma', which differs only in case" in problem
    found = refused(f"models: {{a: {OK}, b: {OK}}}\naliases:\n  x: a\n  x: b\n")
    assert any("a.yaml:4: aliases.x:" in problem and "line 3" in problem for problem in found)
    (problem,) = refused(f"models:\n  m: {OK}\naliases:\n  m: m\n")
    assert problem == "a.yaml:4: aliases.m: 'm' is also the name of the model in a.yaml:2"
    (problem,) = refused(f"models:\n  m: {OK}\naliases:\n  M: m\n")
    assert "a.yaml:4: aliases.M: 'M' is also the name of the model in a.yaml:2" in problem
    (problem,) = refused(
        "models:\n  m:\n    source: x\n    profiles:\n    - {name: a, engine: vllm}\n    - {name: a, engine: vllm}\n"
    )
    assert "a.yaml:6: models.m.profiles[1].name:" in problem
    assert "line 5" in problem


def test_e03_the_list_form_is_refused() -> None:
    (problem,) = refused("models:\n  - {name: m, source: x}\n  - {name: m, source: y}\n")
    assert problem.startswith("a.yaml:2: models: must be a mapping of names")


@pytest.mark.parametrize("word", ["no", "on", "y", "null", "~", "1e3", "007", "1_000", "12:30", "2024-01-01", "0x10"])
def test_e04_words_are_names(word: str) -> None:
    loaded = load(f"models: {{{word}: {OK}}}\naliases: {{a: '{word}'}}")
    assert loaded.catalog.models[word].name == word
    assert loaded.catalog.aliases["a"].model == word


def test_e04_arguments_and_variables_reach_the_record_as_written() -> None:
    loaded = load(
        "models: {m: {source: 012, profiles: [{name: 0x10, engine: vllm, args: [true, 1.0, 08, 1e3, no],"
        " env: {A: true, B: 1.0, C: 08, D: '', E: no}}]}}"
    )
    spec = loaded.catalog.models["m"]
    assert spec.source == "012"
    assert spec.profiles[0].name == "0x10"
    assert spec.profiles[0].args == ("true", "1.0", "08", "1e3", "no")
    assert spec.profiles[0].env == {"A": "true", "B": "1.0", "C": "08", "D": "", "E": "no"}


def test_e06_nothing_is_substituted() -> None:
    loaded = load(
        "models: {m: {source: '${X}', profiles: [{name: p, engine: vllm, args: ['$$'], env: {A: '${UNSET}'}}]}}"
    )
    spec = loaded.catalog.models["m"]
    assert (spec.source, spec.profiles[0].args, spec.profiles[0].env) == ("${X}", ("$$",), {"A": "${UNSET}"})


def test_names_that_entries_use_must_exist() -> None:
    found = refused(
        f"models:\n  gemma: {OK}\n  other:\n    source: x\n    profiles: [{{name: p, engine: vll}}]\n"
        "    fallbacks: [gema, alias, other, gemma, gemma]\naliases:\n  alias: gemna\n  second: alias\n"
    )
    assert [line.removeprefix("a.yaml:") for line in found] == [
        "5: models.other.profiles[0].engine: " + UNKNOWN_ENGINE,
        "6: models.other.fallbacks[0]: no model 'gema' in the files (did you mean 'gemma'?)",
        "6: models.other.fallbacks[1]: 'alias' is an alias (a.yaml:8); name a model",
        "6: models.other.fallbacks[2]: a model can't fall back to itself",
        "6: models.other.fallbacks[4]: 'gemma' is here a second time",
        "8: aliases.alias: no model 'gemna' in the files (did you mean 'gemma'?)",
        "9: aliases.second: 'alias' is an alias (a.yaml:8); name a model",
    ]


def test_fallbacks_have_no_loops_and_stay_with_the_task() -> None:
    head = "source: x, profiles: [{name: p, engine: vllm}]"
    found = refused(
        f"models:\n  a: {{{head}, fallbacks: [b]}}\n  b: {{{head}, fallbacks: [d, c]}}\n"
        f"  c: {{{head}, fallbacks: [a]}}\n  d: {{{head}, task: embed}}\n"
    )
    assert found == [
        "a.yaml:2: models.a.fallbacks[0]: fallbacks go round in a loop: 'a' -> 'b' -> 'c' -> 'a'",
        "a.yaml:3: models.b.fallbacks[0]: 'd' is for embed, this model for generate",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus_per_node: 4, nodes: 2, tensor_parallel: 4", "= 8 GPUs, but tensor_parallel 4 × pipeline_parallel 1 = 4"),
        ("gpus_per_node: 2", "gpus_per_node: nodes 1 × gpus_per_node 2 = 2 GPUs"),
        ("tensor_parallel: 2", "tensor_parallel: is 2, but gpus_per_node is 0"),
        ("gpus_per_node: 1, gpu_class: ''", "gpu_class: '' names no class"),
        ("gpu_class: a100", "gpu_class: says something of GPUs, but gpus_per_node is 0"),
        ("min_gpu_memory_gb: 4", "min_gpu_memory_gb: says something of GPUs"),
        ("min_memory_gb: -1", "-1 is not in 0.001 to 1000000 GB"),
        ("min_memory_gb: 0", "0 is not in 0.001 to 1000000 GB; leave it out to declare nothing"),
        ("min_memory_gb: 1e9", "1000000000 is not in"),
        ("context: 0", "0 is not in 1 to 100000000 tokens"),
        ("slots: -1", "-1 is not in 1 to 4096"),
        ("nodes: 0", "0 is not in 1 to 256"),
        ("start_s: 0", "0 is not in 1 to 604800 seconds"),
        ("drain_s: -1", "-1 is not in 0 to 604800 seconds"),
        ("args: [--host, 0.0.0.0]", "args[0]: '--host' can't be set here: the agent chooses"),
        ("args: ['--port=1']", "args[0]: '--port' can't be set here"),
        ("args: ['--temp 0.7']", "write the flag and its value as two list entries"),
        ("env: {VLLM_API_KEY: x}", "env.VLLM_API_KEY: 'VLLM_API_KEY' can't be set here: the agent makes"),
        ("env: {a-b: x}", "is not a variable's name"),
        ('args: ["a\\0b"]', "U+0000"),
        ('env: {A: "\\e[31m"}', "U+001B"),
        ('node_selector: {"a\\nb": x}', "control character"),
    ],
)
def test_profiles_add_up(text: str, says: str) -> None:
    (problem,) = profile(text)
    assert problem.startswith("a.yaml:5: models.m.profiles[0].")
    assert says in problem


@pytest.mark.parametrize("text", ["", "profiles: []", "profiles: ~", "profiles: {name: p}", "profiles: p"])
def test_a_model_needs_a_profile(text: str) -> None:
    (problem,) = refused(f"models:\n  m: {{source: x, {text}}}\n")
    assert problem.startswith("a.yaml:2: models.m.profiles: needs at least one profile")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("''", "is empty"),
        ("../x", "leaves the model_dirs"),
        ("a/../../x", "leaves the model_dirs"),
        ("a//b/", "(did you mean 'a/b'?)"),
        ("./a", "(did you mean 'a'?)"),
        ("https://example.org/x.gguf", "is a URL"),
        ('"a\\nb"', "U+000A"),
        ("x" * 2000, "is 2000 bytes long, the limit is 1024"),
    ],
)
def test_sources(source: str, says: str) -> None:
    (problem,) = refused(f"models:\n  m:\n    source: {source}\n    profiles: [{{name: p, engine: vllm}}]\n")
    assert problem.startswith("a.yaml:3: models.m.source:")
    assert says in problem


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ("{min: 3, max: 2}", "scaling.min: min 3 is above max 2"),
        ("{min: -1}", "-1 is not in 0 to 10000"),
        ("{max: 0}", "0 is not in 1 to 10000"),
        ("{min: 0, max: 0}", "scaling.max: 0 is not in 1 to 10000"),
        ("{target_load: 0}", "scaling.target_load: 0 is not in 0.01 to 1000000 requests; leave it out for the profile"),
        ("{target_load: -2}", "scaling.target_load: -2 is not in"),
        ("{target_load: many}", "scaling.target_load"),
        ("{idle_s: -1}", "scaling.idle_s: -1 is not in 0 to 2592000 seconds"),
        ("{idle_seconds: 60}", "did you mean 'idle_s'?"),
        ("{target: 2}", "did you mean 'target_load'?"),
    ],
)
def test_scaling(scaling: str, says: str) -> None:
    found = refused(f"models:\n  m: {{source: x, profiles: [{{name: p, engine: vllm}}], scaling: {scaling}}}\n")
    assert any(says in problem for problem in found)


def test_scaling_by_load_is_read_as_written() -> None:
    scaling = "{min: 0, max: 4, target_load: 2.5}"
    text = f"models:\n  m: {{source: x, profiles: [{{name: p, engine: vllm}}], scaling: {scaling}}}\n"
    spec = load_catalog([("a.yaml", text)]).catalog.models["m"]
    assert spec.scaling == Scaling(min=0, max=4, target_load=2.5, idle_s=900.0)
    spec = load_catalog([("a.yaml", text.replace("target_load: 2.5", "idle_s: 0"))]).catalog.models["m"]
    assert spec.scaling == Scaling(min=0, max=4, target_load=None, idle_s=0.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("''", "is empty"),
        ('"a\\u0007b"', "control character U+0007"),
        ('"cafe\\u0301"', "NFC form (did you mean 'café'?)"),
        ("x" * 256, "is 256 bytes long, the limit is 255"),
    ],
)
def test_names(name: str, says: str) -> None:
    (problem,) = refused(f"models:\n  {name}: {OK}\n")
    assert says in problem


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            "llamacpp: {version: b1}",
            "unknown engine 'llamacpp'; known are llama.cpp, sglang, vllm (did you mean 'llama.cpp'?)",
        ),
        ("vllm: {version: 'b 1'}", "'b 1' is not a version"),
        ("vllm: {version: b1, source: http://example.org/}", "(did you mean 'https://example.org/'?)"),
        ("vllm: {version: b1, source: githb}", "(did you mean 'github'?)"),
        ("vllm: {version: b1, source: relative/dir}", "is none of github"),
        ("vllm: {}", "version: is missing"),
    ],
)
def test_engines(engine: str, says: str) -> None:
    (problem,) = refused(f"engines:\n  {engine}\n")
    assert says in problem


def test_a12_an_object_too_large_for_a_record_is_refused_with_size_and_limit() -> None:
    (problem,) = profile(f"args: ['{'x' * (3 * 2**20)}']")
    assert problem.startswith("a.yaml:2: models.m: is 3146")
    assert f"bytes as a record, the limit is {RECORD_BYTES_MAX}" in problem
    assert len(problem) < 200


def test_no_problem_repeats_what_is_long_or_dangerous() -> None:
    found = refused('models:\n  "\\e[31mred": {source: x}\n  b: {source: x, task: "' + "y" * 1000 + '"}\n')
    assert all("\x1b" not in problem and len(problem) < 250 for problem in found)


@pytest.mark.parametrize("name", ["CPU", "-a", "a" * 64, "''", "a/b"])
def test_names_of_profiles(name: str) -> None:
    (problem,) = refused(f"models:\n  m:\n    source: x\n    profiles:\n      - {{name: {name}, engine: vllm}}\n")
    assert problem.startswith("a.yaml:5: models.m.profiles[0].name: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", ["a.yaml:2: not YAML"]),
        ("!x {models: {}}", ["a.yaml:1: tag '!x'"]),
        ("&x models", ["a.yaml:1: anchor '&x'"]),
        ("models: *x", ["a.yaml:1: models: alias '*x'"]),
        ("models: !x y", ["a.yaml:1: models: tag '!x'"]),
        ("models: text", ["a.yaml:1: models: must be a mapping of names"]),
        ("models: {m: text}", ["a.yaml:1: models.m: must be a mapping"]),
        ("models: {m: }", ["a.yaml:1: models.m: is empty and must be a mapping"]),
        ("models: {m: !x y}", ["a.yaml:1: models.m: tag '!x'"]),
        ("models: {m: {source: x, profiles: !x y}}", ["a.yaml:1: models.m.profiles: tag '!x'"]),
        ("models: {m: {source: x, profiles: [{name: p}]}}", ["a.yaml:1: models.m.profiles[0].engine: is missing"]),
        ("models: {m: {profiles: [{name: p, engine: vllm}]}}", ["a.yaml:1: models.m.source: is missing"]),
        ("aliases: {a: [m]}", ["a.yaml:1: aliases.a: must be text, not a list of 1"]),
        ("engines: {vllm: '1'}", ["a.yaml:1: engines.vllm: must be a mapping"]),
    ],
)
def test_wrong_shapes_are_told_once(text: str, told: list[str]) -> None:
    found = refused(text)
    assert len(found) == len(told)
    assert all(problem.startswith(start) for problem, start in zip(found, told, strict=True))


def test_an_alias_of_an_alias_of_nothing_is_told_without_a_guess() -> None:
    found = refused(f"models: {{m: {OK}}}\naliases: {{a: b, b: [m]}}\n")
    assert found == [
        "a.yaml:2: aliases.a: 'b' is an alias (a.yaml:2); name a model",
        "a.yaml:2: aliases.b: must be text, not a list of 1",
    ]


def test_what_could_be_read_is_judged_beside_what_could_not() -> None:
    text = """models:
  m:
    sorce: x
    scaling: {min: 2, max: 1}
    fallbacks: [m]
    profiles:
      - {nam: p, engine: vllm, slots: 0, tensor_parallel: 2}
      - {name: q, engin: vllm, context: 0, args: [--max-model-len]}
engines:
  vllm: {versio: 1, source: http://x/}
"""
    assert sorted(problem.split(": ")[1] for problem in refused(text)) == sorted(
        [
            "models.m.source",
            "models.m.sorce",
            "models.m.scaling.min",
            "models.m.fallbacks[0]",
            *(f"models.m.profiles[0].{field}" for field in ("name", "nam", "slots")),
            *(f"models.m.profiles[1].{field}" for field in ("engine", "engin", "context")),
            "engines.vllm.version",
            "engines.vllm.versio",
            "engines.vllm.source",
        ]
    )


def test_what_stands_for_an_unread_value_is_not_compared() -> None:
    text = """models:
  m: {source: x, task: embd, fallbacks: [n], scaling: {min: 2, max: two}, profiles: [{name: p, engine: vllm}]}
  n: {source: x, task: rerank, profiles: [{name: p, engine: vllm, gpus_per_node: one, tensor_parallel: 2}]}
"""
    told = refused(text)
    assert len(told) == 3
    assert all(" is not " in problem for problem in told)
