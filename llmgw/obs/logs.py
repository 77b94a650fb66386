"""One line a record, for people (`text`) or programs (`json`), and nothing in it that could not be shown.

Log calls pass a constant message and their facts apart: `log.info("pass", extra={"fields": {"revision": 7}})`. A value
reaches the line only as text, so a `Secret` shows as `***`; control characters are escaped, so no name can forge a line
or drive a terminal.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

_COLOURS: Final[Mapping[int, str]] = {
    logging.DEBUG: "\x1b[2m",
    logging.INFO: "\x1b[32m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_DIM: Final = "\x1b[2m"
_OFF: Final = "\x1b[0m"

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN: Final = re.compile(r"[^\s\"=]+")

_JSON: Final = msgspec.json.Encoder(enc_hook=str)


def configure(form: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send everything from `level` up to `stream` (stderr if None), as `text` or `json`.

    Colours only on a terminal, and not with NO_COLOR.

    Raises ValueError for another form.
    """
    if form not in ("text", "json"):
        raise ValueError(f"no log format named {form!r}: text or json")
    stream = stream or sys.stderr
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(colour=colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "hypercorn", "hypercorn.error"):
        logging.getLogger(chatty).setLevel(max(level, logging.WARNING))


class TextFormatter(logging.Formatter):
    """`2026-12-01T12:00:00.123Z INFO  store.election leading term=7 id=a`."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        name = record.name.removeprefix("llmgw.")
        facts = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        if self._colour:
            level = f"{_COLOURS.get(record.levelno, '')}{level}{_OFF}"
            name = f"{_DIM}{name}{_OFF}"
        line = f"{_moment(record)} {level} {name} {_escape(record.getMessage())}{facts}"
        if record.exc_info:
            line += "\n" + "\n".join(_escape(part) for part in self.formatException(record.exc_info).splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """The same as one JSON object: at, level, logger, message, then the record's own fields, then `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in _fields(record).items() if key not in line}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", _JSON.encode(line).decode())


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _escape(text: str) -> str:
    """`text` without anything that moves a cursor or ends a line."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _value(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else _escape(str(value))
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
