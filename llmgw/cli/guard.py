"""`llmgw guard release`: an operator's word that nodes are really gone, where the guard doubts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.node_write import edit_nodes
from llmgw.cli.output import say
from llmgw.core.catalog import NodeSpec
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.errors import Refused
from llmgw.store import keys
from llmgw.store.port import absent

if TYPE_CHECKING:
    from llmgw.store.port import Store


@click.group(name="guard", short_help="Judge nodes that the guard doubts.")
def guard() -> None:
    """The guard is on while many nodes have gone at once: none of them is given up, as it may be the network."""


@guard.command(name="release", short_help="Say that nodes are really gone.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@store_options
def release(*, connection: Connection, nodes: tuple[str, ...]) -> None:
    """Say that NODE is really gone, so that it may be declared lost and its replicas be replaced.

    It speaks of the present absence only: once the node has been back, the guard protects it again.
    """
    connection.run(lambda store: release_nodes(store, nodes))


async def release_nodes(store: Store, nodes: tuple[str, ...]) -> None:
    """Release the nodes from the guard. Raises: as `edit_nodes`."""

    def edit(index: Index, spec: NodeSpec) -> NodeSpec:
        state = index.node_states.record(spec.name)
        if spec.name in index.sessions:
            raise Refused(f"{spec.name} is there: it has a session; nothing was changed")
        if state is None or state.lease is None:
            raise Refused(f"no controller has seen {spec.name} yet; nothing was changed, try again when one leads")
        return msgspec.structs.replace(spec, release=state.lease)

    gone = await edit_nodes(store, nodes, edit, compares=lambda name: [absent(keys.key(Ref(Kind.SESSION, name)))])
    for name, changed in gone.items():
        say(f"{name}: released" if changed else f"{name}: was released already")
    index = await read_index(store, (Kind.FLEET,))
    fleet = None if index.fleet is None else index.fleet.record
    if fleet is not None and not fleet.guard.on:
        say("the guard is off, so they would have been declared lost in their time anyway", err=True)
