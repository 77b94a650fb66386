"""`llmgw node forget`: an operator's word that a machine will not come back, so that what it held is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from llmgw.cli.connection import Connection, store_options
from llmgw.cli.follow_tree import wait_until
from llmgw.cli.node_write import edit_nodes
from llmgw.cli.output import agree, say
from llmgw.core.catalog import NodeSpec
from llmgw.core.inventory import node_inventory
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.errors import Partial, Refused
from llmgw.store import keys
from llmgw.store.port import DeleteOp, Operation, absent

if TYPE_CHECKING:
    from llmgw.store.port import Store

TIMEOUT_S = 60.0
"""Default of --timeout. A leader acts within a second; a change of leader takes ten."""


@click.group(name="node", short_help="Clear away nodes that are gone.")
def node() -> None:
    """Nodes come by themselves, when their agent starts. They go only by an operator's word."""


@node.command(name="forget", short_help="Say that a machine is gone for good.")
@click.argument("name", metavar="NODE")
@click.option("--yes", is_flag=True, help="Without asking.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the leader.",
)
@store_options
def forget(*, connection: Connection, name: str, yes: bool, timeout_s: float) -> None:
    """Say that the machine NODE is gone for good: what it held is free at once, and its records are deleted.

    Only say so of a machine that is off. If it still runs engines, they go on and use what others may now be given.
    Refused while its agent has a session. Its labels and cordon are forgotten with it.
    """
    if not yes:
        agree(f"Is the machine {name} switched off, and not to come back as it was?")
    connection.run(lambda store: forget_node(store, name, timeout_s=timeout_s))


async def forget_node(store: Store, name: str, *, timeout_s: float) -> None:
    """Forget a node. Raises: as `edit_nodes`; Partial, when no leader cleared it away in time."""

    def edit(index: Index, spec: NodeSpec) -> NodeSpec:
        state, facts = index.node_states.record(name), index.facts.record(name)
        boot_id = next((each.boot_id for each in (state, facts) if each is not None and each.boot_id), None)
        if name in index.sessions:
            raise Refused(f"{name} is there: it has a session. Stop its agent first; nothing was changed")
        if boot_id is None:
            raise Refused(f"what machine {name} was can't be read; nothing was changed")
        return msgspec.structs.replace(spec, forget=boot_id)

    away = absent(keys.key(Ref(Kind.SESSION, name)))
    await edit_nodes(store, [name], edit, compares=lambda _: [away])
    say(f"{name}: declared gone")
    left = await wait_until(store, lambda index: list(_left(index, name)), timeout_s=timeout_s)
    if left:
        raise Partial(
            done=1,
            total=2,
            why=f"declared gone, but not cleared away within {timeout_s:g} s: {'; '.join(left)}; run it again",
        )
    own: list[Operation] = [DeleteOp(key=keys.key(Ref(kind, name))) for kind in (Kind.FACTS, Kind.NODE_SPEC)]
    own.append(DeleteOp(key=keys.shards_of(name), prefix=True))
    if not (await store.txn([away], own)).ok:
        raise Refused(f"{name} has come back meanwhile: it was declared gone, and is a node again")
    say(f"{name}: forgotten")


def _left(index: Index, name: str) -> Iterator[str]:
    """What a leader still has to clear away."""
    for holding in node_inventory(index, name).holdings:
        yield f"{name}: {holding.replica} still holds its claim" + ("" if index.leader else "; no controller leads")
    if name in index.node_states:
        yield f"{name}: still counts as a node" + ("" if index.leader else "; no controller leads")
