"""YAML as written: nothing converted, nothing dropped, every refusal with its line."""

from __future__ import annotations

import pytest

from llmgw.core.yaml_tree import Fields, Items, Text, Tree, locate, nearest, parse, path_text
from llmgw.errors import Problem


def tree_of(text: str) -> Tree:
    tree, problems = parse(text, file="f")
    assert problems == []
    assert tree is not None
    return tree


def problems_of(text: str) -> list[Problem]:
    return parse(text, file="f")[1]


def plain(tree: Tree) -> object:
    match tree:
        case Text():
            return tree.text
        case Items():
            return [plain(item) for item in tree.items]
        case Fields():
            return {key.text: plain(value) for key, value in tree.entries}
        case _:
            return tree


WORDS = ["no", "on", "y", "null", "~", "1e3", "007", "1_000", "12:30", "2024-01-01", "0x10", "true", "1.0", "08", ".5"]


@pytest.mark.parametrize("word", WORDS)
def test_e04_a_plain_word_stays_as_written_as_key_and_as_value(word: str) -> None:
    assert plain(tree_of(f"{word}: {word}")) == {word: word}
    assert plain(tree_of(f"- {word}")) == [word]


@pytest.mark.parametrize("text", ["${UNSET}", "$$", "${X}", "$X", "%(x)s", "{{ x }}"])
def test_e06_nothing_is_substituted(text: str) -> None:
    assert plain(tree_of(f"a: '{text}'")) == {"a": text}


def test_only_plain_scalars_can_be_null() -> None:
    tree = tree_of("a:\nb: ~\nc: null\nd: ''\ne: 'null'\nf: \"~\"\ng: |\n  null\n")
    assert isinstance(tree, Fields)
    assert [key.text for key, value in tree.entries if isinstance(value, Text) and value.null] == ["a", "b", "c"]


def test_lines_are_those_of_the_text() -> None:
    tree = tree_of("# comment\na:\n  - b\n  -\n    c: >\n      folded\n      text\n")
    assert locate(tree, ("a", 0)).line == 3
    assert locate(tree, ("a", 1, "c")).line == 5
    assert locate(tree, ("a", 1, "d")).line == 5  # what is missing: where it would have been
    assert locate(tree, ("a", 7)).line == 3


@pytest.mark.parametrize(
    ("text", "line", "path", "says"),
    [
        ("a: &x 1\n", 1, "a", "anchor '&x'"),
        ("a: 1\nb: [1, *x]\n", 2, "b[1]", "alias '*x'"),
        ("a: {b: 1}\nc:\n  <<: {d: 1}\n", 3, "c['<<']", "merge keys"),
        ("a: !!str 1\n", 1, "a", "tag 'tag:yaml.org,2002:str'"),
        ("a: !x [1]\n", 1, "a", "tag '!x'"),
        ("a: ! 1\n", 1, "a", "tag '!'"),
        ("a: 1\n---\nb: 2\n", 2, None, "second document"),
        ("a: 1\n...\n---\n", 3, None, "second document"),
        ("? [a]\n: 1\n", 1, None, "a key must be text"),
        ("a: 1\n*x : 2\n", 2, None, "alias '*x'"),
        ("a: [1, 2\n", 2, None, "not YAML"),
        ("a: 'x\n", 2, None, "not YAML"),
        ("\ta: 1\n", 1, None, "not YAML"),
        ("a: 1\nb: \x07\n", 2, None, "U+0007"),
        ("a: b: c\n", 1, None, "not YAML"),
    ],
)
def test_what_is_refused_and_where(text: str, line: int, path: str | None, says: str) -> None:
    # Where an alias has no anchor at all, libyaml's events still tell where it stands.
    problem = problems_of(text)[0]
    assert (problem.file, problem.line, problem.path) == ("f", line, path)
    assert says in problem.message


@pytest.mark.parametrize(
    ("first", "second"),
    [("gemma", "gemma"), ("gemma", "Gemma"), ("caf\u00e9", "cafe\u0301"), ("\ufb01", "fi"), ("stra\u00dfe", "STRASSE")],
)
def test_e03_the_same_key_twice_names_both_lines(first: str, second: str) -> None:
    (problem,) = problems_of(f"models:\n  {first}: 1\n  other: 2\n  {second}: 3\n")
    assert problem.line == 4
    assert "first on line 2" in problem.message
    assert problem.path is not None
    assert problem.path.startswith("models")


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    (problem,) = problems_of("[" * 100_000)
    assert "not YAML" in problem.message
    assert isinstance(tree_of("[" * 900 + "]" * 900), Items)


def test_a_file_without_a_document_has_no_tree() -> None:
    for text in ("", "\n\n", "# only a comment\n", "---\n...\n"):
        tree, problems = parse(text, file="f")
        assert tree is None or (isinstance(tree, Text) and tree.null)
        assert problems == []


def test_all_problems_at_once() -> None:
    assert [problem.line for problem in problems_of("a: &x 1\nb: !t 2\na: 3\n")] == [1, 2, 3]


def test_paths_quote_what_is_more_than_a_word() -> None:
    assert path_text(("models", "gemma-270m", "profiles", 0, "engine")) == "models.gemma-270m.profiles[0].engine"
    assert path_text(("engines", "llama.cpp", "version")) == "engines['llama.cpp'].version"
    assert path_text(("a\x1b[31m",)) == "['a\\x1b[31m']"


def test_nearest_is_near_or_nothing() -> None:
    known = ["min_gpu_memory_gb", "min_memory_gb", "source", "scaling"]
    assert nearest("gpu_memmory", known) == "min_gpu_memory_gb"
    assert nearest("SOURCE", known) == "source"
    assert nearest("zzz", known) is None
