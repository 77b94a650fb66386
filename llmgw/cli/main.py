"""The command `llmgw`: finds the command's module, and turns every outcome into one exit code and one clear word.

Exit codes: 0 done, 1 failed, 2 wrong usage or an invalid file, 3 not found, 4 valid but refused, 5 store unreachable,
6 done in part, 130 interrupted. A reader that goes away early (`| head`) is no failure and makes no noise.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from llmgw.cli.connection import Unreachable
from llmgw.cli.output import ReaderGone, say
from llmgw.core.yaml_tree import nearest
from llmgw.errors import Conflict, Invalid, LlmgwError, NotFound, Partial, Refused

COMMANDS: Final[Mapping[str, str]] = {
    "apply": "llmgw.cli.apply",
    "cordon": "llmgw.cli.cordon",
    "dev": "llmgw.cli.dev",
    "drain": "llmgw.cli.drain",
    "explain": "llmgw.cli.explain",
    "get": "llmgw.cli.get",
    "guard": "llmgw.cli.guard",
    "node": "llmgw.cli.node",
    "nodes": "llmgw.cli.nodes",
    "plan": "llmgw.cli.plan",
    "recover": "llmgw.cli.recover",
    "status": "llmgw.cli.status",
    "uncordon": "llmgw.cli.cordon",
    "watch": "llmgw.cli.watch",
}
"""Command -> the module that holds it, under the command's name. Loaded when it is asked for."""

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

EXIT_CODES: Final[Mapping[type[LlmgwError], int]] = {
    Invalid: USAGE,
    NotFound: 3,
    Refused: 4,
    Conflict: 4,
    Unreachable: 5,
    Partial: 6,
}
"""Exit code of each family; any other error of ours is 1."""

HELP_EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or an invalid file, 3 not found, 4 valid but refused, "
    "5 store unreachable, 6 done in part, 130 interrupted."
)

EXPECTED: Final = (click.ClickException, click.Abort, LlmgwError, KeyboardInterrupt, ReaderGone)
"""What may end a command. Anything else is a bug, and keeps its traceback."""


class Commands(click.Group):
    """The commands, each loaded only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Every command's name."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # as above
        """The command, None when there is none."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest command in the error."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = nearest(name, COMMANDS)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=HELP_EXIT_CODES)
@click.version_option(package_name="llmgw", prog_name="llmgw", message="%(prog)s %(version)s")
def cli() -> None:
    """Run language models on a private fleet of machines, behind one OpenAI-compatible address."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if sys.stdout is None:  # started with it closed (`>&-`)
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # the process's own, to its end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(argv)
        sys.stdout.flush()
    except (ReaderGone, BrokenPipeError):
        # Nobody reads any more. The interpreter would flush once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say(f"llmgw: can't write: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="llmgw", standalone_mode=False)
    except EXPECTED as error:
        return _outcome(error)
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if not all(isinstance(leaf, EXPECTED) for leaf in leaves):
            raise
        return _outcome(leaves[0])
    return code if isinstance(code, int) else 0


def _outcome(error: BaseException) -> int:
    """Say what happened; returns the exit code."""
    match error:
        case click.ClickException():
            error.show()
            return error.exit_code
        case LlmgwError():
            for line in str(error).split("\n"):
                say(f"llmgw: {line}", err=True)
            return next((code for family, code in EXIT_CODES.items() if isinstance(error, family)), FAILED)
        case click.Abort() | KeyboardInterrupt():
            return INTERRUPTED
        case _:
            raise error


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
