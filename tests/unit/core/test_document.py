"""Trees become values by the type that is wanted, and everything wrong is found in one run."""

from __future__ import annotations

import enum

import msgspec
import pytest

from llmgw.core.document import Reader, read
from llmgw.errors import Invalid, Problem


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size_gb: float | None = None


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    text: str = ""
    count: int = 0
    share: float = 0.0
    on: bool = False
    colour: Colour = Colour.RED
    pair: tuple[int, int] = (1, 2)
    words: tuple[str, ...] = ()
    pairs: dict[str, str] = {}
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()


def problems(text: str) -> list[Problem]:
    with pytest.raises(Invalid) as told:
        read(text, Outer, file="f")
    return list(told.value.problems)


def test_every_type_is_read() -> None:
    text = """
text: no
count: -7
share: 1e-3
on: True
colour: green
pair: [3, 4]
words: [true, "x", 08]
pairs: {a: 1.0, B: ""}
inner: {name: 12:30, size_gb: .5}
inners: [{name: a, size_gb: }, {name: b, size_gb: 2}]
"""
    assert read(text, Outer, file="f") == Outer(
        text="no",
        count=-7,
        share=0.001,
        on=True,
        colour=Colour.GREEN,
        pair=(3, 4),
        words=("true", "x", "08"),
        pairs={"a": "1.0", "B": ""},
        inner=Inner(name="12:30", size_gb=0.5),
        inners=(Inner(name="a"), Inner(name="b", size_gb=2.0)),
    )


def test_an_empty_document_is_an_empty_mapping() -> None:
    assert read("# all commented out\n", Outer, file="f") == Outer()


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("count: 1e3", "count", "'1e3' is not a whole number"),
        ("count: 007", "count", "'007' is not a whole number"),
        ("count: 1_000", "count", "'1_000' is not a whole number"),
        ("count: 0x10", "count", "'0x10' is not a whole number"),
        ("count: 1.0", "count", "'1.0' is not a whole number"),
        ("count: 20GiB", "count", "'20GiB' is not a whole number"),
        ("count: " + "9" * 30, "count", "is not a whole number"),
        ("share: nan", "share", "'nan' is not a number"),
        ("share: .inf", "share", "'.inf' is not a number"),
        ("share: 1e999", "share", "'1e999' is not a number"),
        ("share: 1_0", "share", "'1_0' is not a number"),
        ("on: yes", "on", "'yes' is not true or false"),
        ("colour: gren", "colour", "one of red, green (did you mean 'green'?)"),
        ("pair: [1]", "pair", "a list of exactly 2, not a list of 1"),
        ("pair: [1, x]", "pair[1]", "'x' is not a whole number"),
        ("words: x", "words", "must be a list, not the text 'x'"),
        ("words: [a, ~]", "words[1]", "is ~ and must be text"),
        ("pairs: {a: }", "pairs.a", "is empty and must be text"),
        ("pairs: [a]", "pairs", "must be a mapping (key: value), not a list of 1"),
        ("text: null", "text", "write 'null' with the quotes"),
        ("text: {a: 1}", "text", "must be text, not a mapping"),
        ("count:", "count", "is empty and must be a whole number"),
        ("inner: {size_gb: 1}", "inner.name", "is missing"),
        ("inner: {name: x, sise_gb: 1}", "inner.sise_gb", "(did you mean 'size_gb'?)"),
        ("inners: [{name: x}, {nam: y}]", "inners[1].nam", "(did you mean 'name'?)"),
        ("- a", None, "must be a mapping (key: value), not a list of 1"),
        ("just text", None, "must be a mapping (key: value), not the text"),
    ],
)
def test_wrong_values(text: str, path: str | None, says: str) -> None:
    found = problems(text)
    assert path in {problem.path for problem in found}
    assert any(says in str(problem) for problem in found)


def test_everything_wrong_is_told_at_once_in_the_order_of_the_lines() -> None:
    found = problems("cuont: 1\nshare: x\non: maybe\ninner:\n  nane: 1\nwords: [a, {}]\n")
    assert [(problem.line, problem.path) for problem in found] == [
        (1, "cuont"),
        (2, "share"),
        (3, "on"),
        (5, "inner.nane"),
        (5, "inner.name"),
        (6, "words[1]"),
    ]


def test_what_is_refused_as_yaml_is_not_complained_about_twice() -> None:
    assert [problem.path for problem in problems("inner: &x {name: 1}\nwords: [*x]\nshare: z\n")] == [
        "inner",
        "words[0]",
        "share",
    ]


def test_synonyms_help_where_spelling_does_not() -> None:
    reader = Reader(synonyms={"replica": "count"})
    tree = reader.parse("replica: 2", file="f")
    assert tree is not None
    reader.convert(tree, Outer)
    (problem,) = reader.problems
    assert problem.nearest == "count"


def test_a_given_field_is_not_written() -> None:
    reader = Reader()
    tree = reader.parse("size_gb: 1", file="f")
    assert tree is not None
    assert reader.convert(tree, Inner, given={"name": "x"}) == Inner(name="x", size_gb=1.0)
    tree = reader.parse("name: y", file="f")
    assert tree is not None
    reader.convert(tree, Inner, given={"name": "x"})
    with pytest.raises(Invalid, match="unknown key 'name'"):
        reader.finish()


def test_a_type_that_has_no_reading_is_a_bug_and_says_so() -> None:
    with pytest.raises(NotImplementedError, match="no reading"):
        read("1", bytes, file="f")
