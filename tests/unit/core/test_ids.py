"""Names, ids and secrets."""

from __future__ import annotations

import pytest

from llmgw.core.ids import (
    MODEL_NAME_BYTES_MAX,
    NAME_LEN_MAX,
    SLUG_LEN_MAX,
    Secret,
    escape,
    model_name_problem,
    name_problem,
    replica_id,
    shard_name,
    slug,
    split_shard_name,
    unescape,
)


def test_a_secret_shows_itself_only_when_asked_to() -> None:
    secret = Secret("hush")
    assert "hush" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "hush"
    assert secret == Secret("hush")
    assert secret != Secret("other")
    assert secret != "hush"
    assert len({secret, Secret("hush")}) == 1


@pytest.mark.parametrize("name", ["a", "a.b", "0-9_z", "a" * NAME_LEN_MAX])
def test_good_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", ".", "a/b", "ä", "a b", "a" * (NAME_LEN_MAX + 1)])
def test_bad_names(name: str) -> None:
    assert name_problem(name) is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/Qwen 7B", None),
        ("é", None),
        ("", "is empty"),
        ("e\u0301", "NFC"),
        ("\ud800", "surrogate"),
        ("x" * (MODEL_NAME_BYTES_MAX + 1), "256 bytes"),
        ("a\nb", "U+000A"),
        ("a\u2028b", "U+2028"),
    ],
)
def test_model_names_are_any_text_that_a_line_can_hold(name: str, words: str | None) -> None:
    problem = model_name_problem(name)
    assert problem is None if words is None else words in (problem or "")


@pytest.mark.parametrize(
    ("name", "segment"),
    [("a.b", "a.b"), ("org/x", "org%2Fx"), ("%", "%25"), ("..", "%2E%2E"), (".", "%2E"), ("é", "%C3%A9"), ("A", "A")],
)
def test_names_become_one_segment_and_back(name: str, segment: str) -> None:
    assert escape(name) == segment
    assert unescape(segment) == name


@pytest.mark.parametrize("segment", ["", "a/b", "%2f", "%FF", "%41", "..", "%", "%0A"])
def test_what_no_name_was_escaped_to_is_none(segment: str) -> None:
    assert unescape(segment) is None


@pytest.mark.parametrize(
    ("model", "start"),
    [
        ("gemma-270m", "gemma-270m"),
        ("org/Qwen 7B!", "org-qwen-7b"),
        ("..", "m"),
        ("ä", "m"),
        ("-.a.-", "a"),
        ("x" * 99, "x" * SLUG_LEN_MAX),
    ],
)
def test_slugs(model: str, start: str) -> None:
    assert slug(model) == start
    assert replica_id(model, "ab2c7") == f"{start}-ab2c7"
    assert name_problem(replica_id(model, "ab2c7")) is None


def test_shard_names_split_at_the_last_dot() -> None:
    assert split_shard_name(shard_name("n1", "qwen-2.5-ab12c", 0)) == ("n1", "qwen-2.5-ab12c", 0)
    for bad in ("n1", "n1/x", "n1/x.01", "n1/x.-1", "N1/x.0", "n1/.0", "n1/a/b.0", "n1/x.10000", "/x.0"):
        assert split_shard_name(bad) is None
