"""One exit code for each outcome, and no traceback for what can be expected."""

from __future__ import annotations

import sys

import click
import pytest

from llmgw.cli import main as cli_main
from llmgw.cli.connection import Connection, Unreachable
from llmgw.controller.run import main as controller
from llmgw.errors import Conflict, Denied, Invalid, LlmgwError, NotFound, Partial, Problem, Refused, TooLarge
from llmgw.gateway.run import main as gateway


def outcome(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> int:
    @click.command(name="get")
    def command() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(cli_main.Commands, "get_command", lambda *_: command)
    return cli_main.main(["get"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (Denied("no"), 1),
        (TooLarge(what="x", size=2, limit=1, unit="bytes"), 1),
        (Invalid((Problem(message="wrong", file="f", line=1), Problem(message="wrong", file="g"))), 2),
        (click.UsageError("wrong"), 2),
        (click.BadParameter("wrong"), 2),
        (NotFound("model", "m"), 3),
        (Refused("no"), 4),
        (Conflict("no"), 4),
        (Unreachable(("http://127.0.0.1:1",), "refused"), 5),
        (Partial(done=1, total=2, why="stopped"), 6),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (BaseExceptionGroup("group", [ExceptionGroup("inner", [NotFound("model", "m")])]), 3),
        (BaseExceptionGroup("group", [KeyboardInterrupt()]), 130),
    ],
)
def test_h05_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException | None, code: int
) -> None:
    assert outcome(monkeypatch, error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    if isinstance(error, LlmgwError):
        assert captured.err == "".join(f"llmgw: {line}\n" for line in str(error).split("\n"))


@pytest.mark.parametrize("error", [ValueError("bug"), ExceptionGroup("group", [NotFound("a", "b"), ValueError("bug")])])
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(type(error)):
        outcome(monkeypatch, error)


def test_every_command_is_there_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli_main.COMMANDS)
    assert "..." not in text.partition("Commands:")[2], "each first line fits"
    for code in {0, cli_main.FAILED, cli_main.INTERRUPTED, *cli_main.EXIT_CODES.values()}:
        assert f" {code} " in text.partition("Exit codes:")[2]


@pytest.mark.parametrize("command", [controller, gateway, cli_main.cli])
def test_help_has_a_short_option(command: click.Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["-h"], standalone_mode=False)
    assert "-h, --help" in capsys.readouterr().out


def test_a_mistyped_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["aply"]) == 2
    assert "Did you mean 'apply'?" in capsys.readouterr().err
    assert cli_main.main(["get", "modles"]) == 2
    assert "Did you mean 'models'?" in capsys.readouterr().err


def test_control_characters_in_an_error_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(monkeypatch, Refused("a\x1b[31mb\nc")) == 4
    assert capsys.readouterr().err == "llmgw: a\\x1b[31mb\nllmgw: c\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watch_on_a_terminal_says_that_it_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(Connection, "run", lambda *_: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert cli_main.main(["watch", "models"]) == 0
    assert capsys.readouterr() == ("", "watching models; Ctrl-C ends it\n" if terminal else "")
