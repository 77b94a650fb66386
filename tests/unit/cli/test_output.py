"""What may reach a terminal or a pipe."""

from __future__ import annotations

import json
import sys

import pytest

from llmgw.cli.output import clean, fit, flow, json_bytes, table, width
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


def test_a_line_is_broken_on_a_terminal_and_goes_on_below_where_it_began(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "needs 9 GB; 16 GB in all, 9 GB promised to qwen-7b-abcde, \x1b[31m2 GB to gemma-fghij"
    flow("  - ", text)
    assert capsys.readouterr().out == "  - " + text.replace("\x1b", "\\x1b") + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    flow("  - ", text)
    flow("", "")
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == ""
    assert all(len(line) <= 40 for line in lines)
    assert [line[:4] for line in lines] == ["  - ", *["    "] * (len(lines) - 1)]
    assert " ".join(line[4:] for line in lines) == text.replace("\x1b", "\\x1b")
    monkeypatch.setenv("COLUMNS", "10")
    flow("  - ", text)
    assert capsys.readouterr().out.count("\n") == 1
