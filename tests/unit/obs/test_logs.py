"""What reaches a log line, and what can't."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from llmgw.core.ids import Secret
from llmgw.obs import logs

log = logging.getLogger("llmgw.test.logs")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _root_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(form: str, *, stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    logs.configure(form, stream=stream)
    return stream


def fields(**values: object) -> dict[str, object]:
    return {"fields": values}


def test_text_is_one_line_with_the_facts_behind_the_message() -> None:
    stream = written("text")
    log.info("pass", extra=fields(revision=7, share=0.5, cause="two words", empty="", nothing=None, said='a="b"'))
    line = stream.getvalue()
    assert line.endswith(
        ' INFO    test.logs pass revision=7 share=0.5 cause="two words" empty="" nothing=- said="a=\\"b\\""\n'
    )
    assert line.count("\n") == 1


def test_json_is_one_object_a_line() -> None:
    stream = written("json")
    log.warning("odd", extra=fields(revision=7, names=("a", "b"), level="mine"))
    log.info("next")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first | {"at": ""} == {
        "at": "",
        "level": "warning",
        "logger": "llmgw.test.logs",
        "message": "odd",
        "revision": 7,
        "names": ["a", "b"],
    }
    assert second["message"] == "next"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_secret_is_never_written(form: str) -> None:
    stream = written(form)
    key = Secret("canary-value")
    log.info("key %s", key, extra=fields(key=key, nested={"deep": [key]}, shown=repr(key)))
    log.error("failed", exc_info=ValueError(key))
    assert "canary-value" not in stream.getvalue()
    assert "***" in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_name_can_forge_a_line_or_drive_a_terminal(form: str) -> None:
    stream = written(form)
    log.info("model %s", "a\nERROR forged", extra=fields(name="\x1b[2J\r\nx\x9b31m\u2028y"))
    text = stream.getvalue()
    assert len(text.splitlines()) == 1
    assert not set("\x1b\r\x9b\u2028") & set(text)


def test_a_trace_follows_its_line() -> None:
    stream = written("text")
    log.error("failed", exc_info=KeyError("gone"))
    first, *trace = stream.getvalue().splitlines()
    assert " ERROR   test.logs failed" in first
    assert trace[-1] == "KeyError: 'gone'"


def test_colours_only_on_a_terminal_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, terminal = written("text"), None
    log.info("x")
    assert "\x1b" not in plain.getvalue()
    terminal = written("text", stream=Terminal())
    log.info("x")
    assert "\x1b[32m" in terminal.getvalue()
    assert "\x1b" not in written("json", stream=Terminal()).getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    colourless = written("text", stream=Terminal())
    log.info("x")
    assert "\x1b" not in colourless.getvalue()


def test_others_chatter_stays_out() -> None:
    stream = written("text")
    logging.getLogger("httpx2").info("HTTP Request: GET http://…")
    assert stream.getvalue() == ""


def test_the_stream_is_the_present_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("text")
    log.info("here")
    assert "here" in stream.getvalue()


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="yaml"):
        logs.configure("yaml")
