"""`llmgw plan`: what an apply, or the loss of nodes, would lead to, before it happens. Only reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import click

from llmgw.cli.apply_text import left_alone, summary
from llmgw.cli.catalog_files import load_files
from llmgw.cli.catalog_write import plan_for
from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.output import emit_as, flow, say
from llmgw.cli.plan_text import lines, tally
from llmgw.core.apply import ApplyPlan, Edit
from llmgw.core.catalog import ModelSpec
from llmgw.core.catalog_diff import describe_changes
from llmgw.core.catalog_load import Loaded
from llmgw.core.feasible import doubts
from llmgw.core.forecast import Forecast, forecast, writes_of
from llmgw.core.inventory import Inventory
from llmgw.core.snapshot import Index, Kind
from llmgw.core.units import Now
from llmgw.core.yaml_tree import nearest
from llmgw.errors import NotFound
from llmgw.obs.clock import system_wall
from llmgw.store import codec

NOT_WHOLE: Final = 6
"""Exit code where not all that is wanted would run: as for whatever is done in part."""


@click.command(name="plan", short_help="Print what an apply or the loss of nodes would do.")
@click.option("-f", "--file", "files", multiple=True, metavar="FILE", help="A catalog; may be repeated; - is stdin.")
@click.option("--prune", is_flag=True, help="As if what is stored and in none of the files were deleted.")
@click.option("--without", multiple=True, metavar="NODE", help="As if this node were gone for good; may be repeated.")
@click.option("-o", "--output", "form", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
@store_options
def plan(*, connection: Connection, files: tuple[str, ...], prune: bool, without: tuple[str, ...], form: str) -> int:
    """Print what would happen: what is placed, moved, restarted, removed, what would not fit, and why.

    With -f as `llmgw apply` of that catalog, with --without as if those nodes were gone and already given up (which
    takes some minutes when it happens), with both as if both happened. Nothing is written. The leader's own rules are
    run on a copy of everything there is, and agents are taken to start and stop at once whatever they are told; real
    ones need their time, and may fail.

    Exit code 6 says that then not all that is wanted would run, or that the outcome could not be worked out to its end;
    0 that all of it would. 2, 3 and 4 are as `llmgw apply` has them.
    """
    if not files and not without:
        raise click.UsageError("Say what is to be imagined: -f FILE, --without NODE, or both.")
    if prune and not files:
        raise click.UsageError("--prune goes with -f FILE.")
    wanted = load_files(files) if files else None
    index = connection.run(lambda store: read_index(store, tuple(Kind)))
    edits = None if wanted is None else plan_for(index, wanted, prune=prune)
    told = foretell(index, edits, without, wall_s=system_wall())
    specs = [] if edits is None else [edit.record for edit in edits.edits if isinstance(edit.record, ModelSpec)]
    warnings = [str(doubt) for doubt in doubts(Inventory(index).nodes(), specs)]
    if form == "text":
        if edits is not None and wanted is not None:
            _print_edits(edits, wanted, warnings, prune=prune)
        for head, text in lines(told):
            flow(head, text)
        say(tally(told))
    else:
        emit_as(form, {"warnings": warnings, **as_object(told, edits)})
    return 0 if told.whole else NOT_WHOLE


def foretell(index: Index, edits: ApplyPlan | None, without: Iterable[str], *, wall_s: float) -> Forecast:
    """The forecast for an apply, for nodes gone, or both. `wall_s`: this moment. Raises: NotFound, of a node."""
    known, names = index.nodes(), tuple(without)
    for name in names:
        if name not in known:
            raise NotFound("node", name, nearest(name, known))
    change = () if edits is None else writes_of(edits, index)
    return forecast(index, change, without=names, now=Now(wall_s=wall_s, mono_s=0.0))


def as_object(told: Forecast, edits: ApplyPlan | None) -> dict[str, Any]:
    """The forecast for programs, with what would be written."""
    return {
        "whole": told.whole,
        "edits": [] if edits is None else [_edit(edit) for edit in edits.edits],
        "left": [] if edits is None else [f"{ref.kind.value}{ref.name}" for ref in edits.left],
        **codec.to_public(told),
        "models": [{"whole": model.whole, **codec.to_public(model)} for model in told.models],
    }


def _edit(edit: Edit) -> dict[str, Any]:
    changes = "" if edit.before is None or edit.record is None else describe_changes(edit.before, edit.record)
    return {"action": edit.action.value, "record": f"{edit.ref.kind.value}{edit.ref.name}", "changes": changes}


def _print_edits(edits: ApplyPlan, wanted: Loaded, warnings: Iterable[str], *, prune: bool) -> None:
    """What `llmgw apply` would say."""
    for line in left_alone(edits, prune=prune):
        say(line, err=True)
    for line in warnings:
        say(f"warning: {line}", err=True)
    for edit in edits.edits:
        flow("", f"would {edit}")
    say(summary(edits, wanted, would=True))
    say()
