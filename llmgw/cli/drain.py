"""`llmgw drain`: move everything away from a node, then let it be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from llmgw.cli.connection import Connection, store_options
from llmgw.cli.follow_tree import wait_until
from llmgw.cli.node_write import edit_nodes
from llmgw.cli.output import say
from llmgw.core.catalog import NodeSpec
from llmgw.core.inventory import node_inventory
from llmgw.core.reading import is_live
from llmgw.core.refusal_words import summarise
from llmgw.core.snapshot import Index
from llmgw.errors import Partial

if TYPE_CHECKING:
    from llmgw.store.port import Store


@click.command(name="drain", short_help="Move everything away from nodes.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@click.option("--wait", is_flag=True, help="Until nothing is left there; says what it waits for.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="With --wait: how long at most [default: as long as it takes].",
)
@store_options
def drain(*, connection: Connection, nodes: tuple[str, ...], wait: bool, timeout_s: float | None) -> None:
    """Move everything away from NODE, and place nothing new there.

    Each replica is replaced elsewhere first and then finishes its requests; one that fits nowhere else stays, and
    --wait says why. `llmgw uncordon` ends the drain; a restart of the agent does not.
    """
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout goes with --wait.")
    try:
        connection.run(lambda store: drain_nodes(store, nodes, wait=wait, timeout_s=timeout_s))
    except KeyboardInterrupt:
        say("llmgw: interrupted; what was begun goes on, `llmgw uncordon` ends it", err=True)
        raise


async def drain_nodes(store: Store, nodes: tuple[str, ...], *, wait: bool, timeout_s: float | None) -> None:
    """Drain the nodes. Raises: as `edit_nodes`; Partial, when the time was up before they were empty."""

    def edit(_: Index, spec: NodeSpec) -> NodeSpec:
        return msgspec.structs.replace(spec, drain=True)

    for name, changed in (await edit_nodes(store, nodes, edit)).items():
        say(f"{name}: draining" if changed else f"{name}: is draining already")
    if not wait:
        return
    left = await wait_until(
        store, lambda index: [line for name in nodes for line in _left(index, name)], timeout_s=timeout_s
    )
    if left:
        busy = {line.partition(":")[0] for line in left}
        why = f"not empty within {timeout_s:g} s, and still being drained: {'; '.join(left)}"
        raise Partial(done=len(set(nodes)) - len(busy), total=len(set(nodes)), why=why)
    say(f"nothing is left on {', '.join(dict.fromkeys(nodes))}")


def _left(index: Index, node: str) -> Iterator[str]:
    """What still runs on a node or claims something of it, and what keeps it there."""
    inventory = node_inventory(index, node)
    for holding in inventory.holdings:
        replica = index.replicas.record(holding.replica)
        if replica is None:
            yield f"{node}: {holding.replica} is stopping"
        elif not is_live(replica):
            yield f"{node}: {replica.id} is {replica.phase.value}"
        else:
            yield f"{node}: {replica.id} {_kept(index, replica.model, replica.id)}"
    for each in inventory.unclaimed:
        yield f"{node}: {each.replica} runs there without an order"
    held = {holding.replica for holding in inventory.holdings}
    for name in sorted(index.assignments_on.get(node, ())):
        order = index.assignments.record(name)
        if order is not None and order.replica not in held:
            yield f"{node}: {order.replica} is being cleared away"


def _kept(index: Index, model: str, replica: str) -> str:
    """What a replica that serves waits for."""
    stand_in = next((each for each in index.replicas.records() if each.replaces == replica and is_live(each)), None)
    if stand_in is not None:
        return f"serves until {stand_in.id} is ready ({stand_in.phase.value})"
    state = index.model_states.record(model)
    if state is not None and state.unplaced is not None:
        return f"stays until there is room: {summarise(state.unplaced)}"
    return "waits for another replica to take over"
