"""Catalog files as a person names them on a command line, read and judged as one catalog."""

from __future__ import annotations

import sys
from pathlib import Path

from llmgw.config import decode_text, read_text
from llmgw.config.file import FILE_BYTES_MAX
from llmgw.core.catalog_load import Loaded, load_catalog
from llmgw.errors import Invalid, Problem


def load_files(files: tuple[str, ...]) -> Loaded:
    """The catalog in `files`, `-` being stdin. Raises: Invalid, with every problem of every file."""
    return load_catalog(_read(files))


def _read(files: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every file's text. Raises: Invalid, naming every one that can't be read."""
    texts: list[tuple[str, str]] = []
    problems: list[Problem] = []
    for file in files:
        try:
            if file == "-":
                texts.append(("<stdin>", decode_text(sys.stdin.buffer.read(FILE_BYTES_MAX + 1), shown="<stdin>")))
            else:
                texts.append((file, read_text(Path(file))))
        except Invalid as error:
            problems += error.problems
    if problems:
        raise Invalid(tuple(problems))
    return texts
