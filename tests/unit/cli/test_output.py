"""What may reach a terminal or a pipe."""

from __future__ import annotations

import json

import pytest

from llmgw.cli.output import clean, fit, json_bytes, table, width
from llmgw.core.ids import Secret


def test_text_for_people_has_no_control_characters() -> None:
    nasty = "a\x1b[31mb\r\x00\x9b\u202ec\ud800d\te\u2028"
    assert clean(nasty) == "a\\x1b[31mb\\r\\x00\\x9b\\u202ec\\ud800d\te\\u2028"
    assert clean("Größe 日本 🦙") == "Größe 日本 🦙"


@pytest.mark.parametrize("indent", [0, 2])
def test_json_is_safe_to_look_at_and_still_the_same_value(indent: int) -> None:
    value = {"name": 'a\x1b\x7f\x9b\u202eb\n"\\', "list": [1, None, "日本"]}
    data = json_bytes(value, indent=indent)
    assert json.loads(data) == value
    text = data.decode()
    assert not set(text) & {"\x1b", "\x7f", "\x9b", "\u202e"}
    assert "日本" in text
    assert text.count("\n") == (1 if indent == 0 else text.count("\n"))


def test_secrets_are_redacted() -> None:
    assert json_bytes({"key": Secret("hunter2")}) == b'{"key":"***"}\n'


def test_a_table_off_a_terminal_is_aligned_whole_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    table(("NAME", "WHY"), [("a", "x" * 300), ("日本", "\x1b[31mred"), ("e\u0301", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["NAME  WHY", "a     " + "x" * 300, "日本  \\x1b[31mred", "e\u0301"]


def test_width_is_what_a_screen_shows() -> None:
    assert [width(text) for text in ("abc", "日本", "e\u0301", "")] == [3, 4, 1, 0]


def test_the_widest_columns_give_way_first() -> None:
    assert fit([5, 60, 8], 100) == [5, 60, 8]
    assert fit([5, 60, 8], 33) == [5, 20, 8]
    assert fit([5, 60, 40], 45) == [5, 20, 20]
    assert fit([5, 5], 1) == [1, 1]
