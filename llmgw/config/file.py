"""Files that people wrote, read with the error they deserve; and secrets, which come from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llmgw.core.ids import Secret
from llmgw.errors import Invalid, Problem

FILE_BYTES_MAX: Final = 16 * 2**20
"""Largest file that is read as a document or a secret, bytes. Ours are small; a wrong path may be a disk."""


def read_text(path: Path, *, shown: str | None = None) -> str:
    """The text of a file that a person wrote. Raises: Invalid (naming it as `shown`), also when it is no UTF-8."""
    name = shown or str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Invalid((Problem(message=f"can't be read: {error.strerror}", file=name),)) from error
    return decode_text(raw, shown=name)


def decode_text(raw: bytes, *, shown: str) -> str:
    """`raw` as text. Raises: Invalid, when it is too large or no UTF-8."""
    if len(raw) > FILE_BYTES_MAX:
        raise Invalid((Problem(message=f"is larger than {FILE_BYTES_MAX} bytes, the limit", file=shown),))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Invalid((Problem(message="is not UTF-8 text", file=shown, line=line),)) from error


def read_secret(path: str | Path) -> Secret:
    """What a `*_file` setting names: the file without one trailing newline. Raises: Invalid, also when it is empty."""
    text = read_text(Path(path))
    text = text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")
    if not text:
        raise Invalid((Problem(message="is empty", file=str(path)),))
    if "\0" in text:
        raise Invalid((Problem(message="holds a NUL byte, which no secret can", file=str(path)),))
    return Secret(text)
