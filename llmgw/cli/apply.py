"""`llmgw apply`: make the stored catalog what the files say. The whole of it is judged before anything is written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from llmgw.cli.apply_text import left_alone, shown, summary
from llmgw.cli.catalog_files import load_files
from llmgw.cli.catalog_write import Progress, read_plan, write_plan
from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.output import ReaderGone, say
from llmgw.core.apply import Action, ApplyPlan
from llmgw.core.catalog import ModelSpec
from llmgw.core.catalog_load import Loaded
from llmgw.core.feasible import Doubt, doubts
from llmgw.core.inventory import Inventory
from llmgw.core.snapshot import Kind

if TYPE_CHECKING:
    from llmgw.store.etcd import EtcdStore


@click.command(name="apply", short_help="Store a catalog.")
@click.option(
    "-f", "--file", "files", multiple=True, required=True, metavar="FILE", help="May be repeated; - is stdin."
)
@click.option("--prune", is_flag=True, help="Delete what is stored and in none of the files.")
@click.option("--dry-run", is_flag=True, help="Only say what would be changed; see `plan` as well.")
@store_options
def apply(*, connection: Connection, files: tuple[str, ...], prune: bool, dry_run: bool) -> None:
    """Store the catalog in FILE.

    All files together are one catalog, and are refused whole if anything in them is wrong. What is stored and not in
    the files stays unless --prune is given; a section (models, aliases, engines) that no file has is never touched.
    `llmgw plan` says beforehand what that would place, move, restart and what would not fit.
    """
    wanted = load_files(files)
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


async def _apply(store: EtcdStore, wanted: Loaded, progress: Progress, *, prune: bool, dry_run: bool) -> None:
    index, plan = await read_plan(store, wanted, prune=prune)
    teller = _Teller()
    for line in left_alone(plan, prune=prune):
        teller.tell(line, err=True)
    for doubt in await _doubts(store, plan):
        teller.tell(f"warning: {doubt}", err=True)
    if dry_run:
        for edit in plan.edits:
            teller.tell(f"would {edit}")
        if plan.edits:
            teller.tell("`llmgw plan`, with the same files, says what that would move, restart and not fit", err=True)
    else:
        going = [shown(edit.ref) for edit in plan.edits if edit.action is Action.DELETE]
        if going:
            teller.tell(f"deleting {len(going)}: {', '.join(going)}", err=True)
        await write_plan(store, index, plan, progress, tell=lambda edit: teller.tell(str(edit)))
    teller.tell(summary(plan, wanted, would=dry_run))


async def _doubts(store: EtcdStore, plan: ApplyPlan) -> list[Doubt]:
    """What the models that are created or changed ask for, and no node has."""
    specs = [edit.record for edit in plan.edits if isinstance(edit.record, ModelSpec)]
    if not specs:
        return []
    fleet = await read_index(store, (Kind.FACTS, Kind.NODE_SPEC))
    return list(doubts(Inventory(fleet).nodes(), specs))


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
