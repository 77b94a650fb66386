"""`llmgw cordon` and `llmgw uncordon`: whether anything new may be placed on a node."""

from __future__ import annotations

import click
import msgspec

from llmgw.cli.connection import Connection, store_options
from llmgw.cli.node_write import edit_nodes
from llmgw.cli.output import say
from llmgw.core.catalog import NodeSpec
from llmgw.core.snapshot import Index


@click.command(name="cordon", short_help="Place nothing new on nodes.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@store_options
def cordon(*, connection: Connection, nodes: tuple[str, ...]) -> None:
    """Place nothing new on NODE.

    What runs there goes on. Only `llmgw uncordon` ends it: a restart of the agent or of the machine does not.
    """

    def edit(_: Index, spec: NodeSpec) -> NodeSpec:
        return msgspec.structs.replace(spec, cordon=True)

    for name, changed in connection.run(lambda store: edit_nodes(store, nodes, edit)).items():
        say(f"{name}: cordoned" if changed else f"{name}: is cordoned already")


@click.command(name="uncordon", short_help="Let nodes take new replicas again.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@store_options
def uncordon(*, connection: Connection, nodes: tuple[str, ...]) -> None:
    """Let NODE take new replicas again: ends a cordon and a drain. What a drain has moved away stays where it is."""

    def edit(_: Index, spec: NodeSpec) -> NodeSpec:
        return msgspec.structs.replace(spec, cordon=False, drain=False)

    for name, changed in connection.run(lambda store: edit_nodes(store, nodes, edit)).items():
        say(f"{name}: takes new replicas again" if changed else f"{name}: is not cordoned")
