"""`llmgw nodes`: the machines, what is promised of them, what they can run."""

from __future__ import annotations

import click

from llmgw.cli.connection import Connection, store_options
from llmgw.cli.get import get_kind


@click.command(name="nodes")
@click.option(
    "-o", "--output", "form", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True
)
@store_options
def nodes(*, connection: Connection, form: str) -> None:
    """Print the nodes. `-` is unknown.

    MEM is what is promised of a node's memory, and what there is. GPUS is how many there are, and what keeps some of
    them from being given out. A node whose NOTES say that its facts can't be true takes nothing new.
    """
    connection.run(lambda store: get_kind(store, "nodes", None, form=form))
