"""`llmgw apply`: make the stored catalog what the files say. The whole of it is judged before anything is written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.cli.catalog_write import Progress, read_plan, write_plan
from llmgw.cli.connection import Connection, store_options
from llmgw.cli.output import ReaderGone, say
from llmgw.config import decode_text, read_text
from llmgw.config.file import FILE_BYTES_MAX
from llmgw.core.apply import Action, ApplyPlan
from llmgw.core.catalog_load import Loaded, load_catalog
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Invalid, Problem

if TYPE_CHECKING:
    from llmgw.store.etcd import EtcdStore


@click.command(name="apply", short_help="Store a catalog.")
@click.option(
    "-f", "--file", "files", multiple=True, required=True, metavar="FILE", help="May be repeated; - is stdin."
)
@click.option("--prune", is_flag=True, help="Delete what is stored and in none of the files.")
@click.option("--dry-run", is_flag=True, help="Only say what would be changed.")
@store_options
def apply(*, connection: Connection, files: tuple[str, ...], prune: bool, dry_run: bool) -> None:
    """Store the catalog in FILE.

    All files together are one catalog, and are refused whole if anything in them is wrong. What is stored and not in
    the files stays unless --prune is given; a section (models, aliases, engines) that no file has is never touched.
    """
    wanted = load_catalog(_read(files))
    progress = Progress()
    # Both ways to be told to stop end in KeyboardInterrupt, and so in a word of how far it got.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        connection.run(lambda store: _apply(store, wanted, progress, prune=prune, dry_run=dry_run))
    except KeyboardInterrupt:
        if progress.total:
            state = f"interrupted: {progress.done} of {progress.total} changes are known to be stored"
            say(f"llmgw: {state}; the stored catalog is valid, run it again to finish", err=True)
        raise


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


async def _apply(store: EtcdStore, wanted: Loaded, progress: Progress, *, prune: bool, dry_run: bool) -> None:
    index, plan = await read_plan(store, wanted, prune=prune)
    teller = _Teller()
    if plan.left:
        names = ", ".join(_shown(ref) for ref in plan.left)
        teller.tell(f"not in the files, left as it is (--prune deletes): {names}", err=True)
    for section, count in plan.untouched.items() if prune else ():
        teller.tell(
            f"no file has {section}: {count} stored left as they are (to delete them: '{section}: {{}}')", err=True
        )
    if dry_run:
        for edit in plan.edits:
            teller.tell(f"would {edit}")
    else:
        going = [_shown(edit.ref) for edit in plan.edits if edit.action is Action.DELETE]
        if going:
            teller.tell(f"deleting {len(going)}: {', '.join(going)}", err=True)
        await write_plan(store, index, plan, progress, tell=lambda edit: teller.tell(str(edit)))
    teller.tell(_summary(plan, wanted, dry_run=dry_run))


def _summary(plan: ApplyPlan, wanted: Loaded, *, dry_run: bool) -> str:
    counts = Counter(edit.action for edit in plan.edits)
    size = len(wanted.catalog.models) + len(wanted.catalog.aliases) + len(wanted.catalog.engines)
    same = size - counts[Action.CREATE] - counts[Action.UPDATE]
    words = [f"{counts[action]} {past}" for action, past in _PAST.items()]
    return f"{'would be ' if dry_run else ''}{', '.join(words)}, {same} unchanged"


_PAST = {Action.CREATE: "created", Action.UPDATE: "updated", Action.DELETE: "deleted"}
_NOUN = {Kind.MODEL: "model", Kind.ALIAS: "alias", Kind.ENGINE: "engine"}


def _shown(ref: Ref) -> str:
    return f"{_NOUN[ref.kind]} {ref.name}"


class _Teller:
    """Says what happens. An apply that was begun is ended, also when nobody reads any more."""

    def __init__(self) -> None:
        self._heard = True

    def tell(self, line: str, *, err: bool = False) -> None:
        """One line, if anybody listens."""
        if not self._heard:
            return
        try:
            say(line, err=err)
        except ReaderGone:
            self._heard = False
            with contextlib.suppress(OSError):  # what is buffered has no reader either
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
