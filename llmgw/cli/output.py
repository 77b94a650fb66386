"""What goes to stdout and how: text for people, JSON and YAML for programs, and never a terminal's control codes.

Names and reasons come from elsewhere, so text for people is cleaned of control and direction-changing characters. JSON
and YAML are UTF-8 whatever the locale says. Only tables on a terminal are drawn by rich; everything else has no colour.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

import click
import msgspec

from llmgw.cli.catalog_text import to_yaml
from llmgw.errors import Refused
from llmgw.store import codec

_UNSAFE: Final = re.compile(
    "[\\x00-\\x08\\x0a-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
"""Control characters other than a tab, what reorders text on a screen, and halves of surrogate pairs."""

FLOW_MIN: Final = 20
"""Narrower than this, in columns, nothing is broken: the terminal does that as well."""


class ReaderGone(Exception):
    """Nobody reads what is written any more (`| head`). Not an OSError: click would make a failure of that."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


def clean(text: str) -> str:
    """`text` with everything that a terminal would act on written as an escape."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def say(text: str = "", *, err: bool = False) -> None:
    """One or more lines for people. What the locale can't show is escaped. Raises: ReaderGone, OSError."""
    stream: IO[str] = sys.stderr if err else sys.stdout
    lines = (clean(line) for line in text.split("\n"))
    with _writing():
        print("\n".join(lines), file=stream, flush=True)


def flow(head: str, text: str) -> None:
    """A line for people, after `head`. On a terminal it is broken to fit, and goes on below where it began."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    room = columns - width(head)
    parts = textwrap.wrap(clean(text), room, break_on_hyphens=False) if room >= FLOW_MIN else [text]
    for i, part in enumerate(parts or [""]):
        say(f"{head if i == 0 else ' ' * width(head)}{part}".rstrip())


def agree(question: str) -> None:
    """Ask a person, who must say yes. Raises: click.UsageError where nobody can be asked; Refused after a no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{question} Say so with --yes.")
    if not click.confirm(question, err=True):
        raise Refused("nothing was changed")


def emit(data: bytes) -> None:
    """Bytes for programs, to stdout. Raises: ReaderGone, OSError."""
    with _writing():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def json_bytes(value: Any, *, indent: int = 0) -> bytes:
    """Any value or record as JSON with `***` for secrets, in UTF-8, safe to look at on a terminal."""
    data = codec.encode_public(value)
    text = (msgspec.json.format(data, indent=indent) if indent else data).decode()
    # Outside of strings JSON has no such character but the line feeds of its layout.
    return re.sub(f"(?!\\n){_UNSAFE.pattern}", lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"


def emit_as(form: str, value: Any) -> None:
    """`value` to stdout as `json` or `yaml`."""
    emit(json_bytes(value, indent=2) if form == "json" else to_yaml(codec.to_public(value)).encode())


def width(text: str) -> int:
    """How many columns `text` takes on a screen."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: drawn to fit on a terminal; aligned, whole and plain anywhere else. Raises: ReaderGone, OSError."""
    cells = [[clean(cell).replace("\t", " ") for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(headers, cells)
        return
    widths = [max(map(width, column)) for column in zip(headers, *cells, strict=True)]
    with _writing():
        for row in (headers, *cells):
            padded = (cell + " " * (room - width(cell)) for cell, room in zip(row, widths, strict=True))
            print("  ".join(padded).rstrip())
        sys.stdout.flush()


def _draw(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console  # noqa: PLC0415  # a tenth of a second, and only terminals need it
    from rich.table import Table  # noqa: PLC0415  # as above
    from rich.text import Text  # noqa: PLC0415  # as above

    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") in ("dumb", "")
    columns, lines = shutil.get_terminal_size()
    console = Console(color_system=None if plain else "auto", highlight=False, emoji=False, width=columns, height=lines)
    widths = [max(map(width, column)) for column in zip(headers, *cells, strict=True)]
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header, room in zip(headers, fit(widths, columns - 2 * (len(headers) - 1)), strict=True):
        drawn.add_column(header, no_wrap=True, overflow="ellipsis", width=room)
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    with _writing():
        console.print(drawn)


def fit(widths: Sequence[int], room: int) -> list[int]:
    """Column widths that need no more than `room` in all, taken from the widest columns first; none falls below 1."""
    made = list(widths)
    while sum(made) > room and max(made) > 1:
        made[made.index(max(made))] -= 1
    return made
