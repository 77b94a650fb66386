"""`llmgw recover`: after a restore of the store, act without waiting for nodes that have not reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.output import agree, say
from llmgw.core.fleet import is_restoring, unreported
from llmgw.core.record import Recover
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.errors import Refused
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.port import PutOp, unchanged

if TYPE_CHECKING:
    from llmgw.store.port import Store

_READ = (Kind.META, Kind.FLEET, Kind.NODE_SPEC, Kind.NODE_STATE, Kind.SESSION, Kind.FACTS, Kind.RECOVER)


@click.command(name="recover", short_help="After a restore: do not wait for silent nodes.")
@click.option("--yes", is_flag=True, help="Without asking.")
@store_options
def recover(*, connection: Connection, yes: bool) -> None:
    """After a restore of etcd: place and stop again, without waiting for nodes that have not reported yet.

    A restored store knows nothing of what was placed since its backup. So nothing is placed, stopped or pruned until
    every node has said what runs there, or is lost. This ends the wait; what runs on the silent nodes is not known.
    """
    connection.run(lambda store: recover_store(store, yes=yes))


async def recover_store(store: Store, *, yes: bool) -> None:
    """Let the leader go on. Raises: Refused."""
    index = await read_index(store, _READ)
    meta = index.meta
    if meta is None or meta.record is None:
        raise Refused("no controller has set up this store yet: there is nothing to recover")
    incarnation = meta.record.incarnation
    if not is_restoring(index, incarnation):
        say("nothing waits: the store was not restored, or every node has reported since")
        return
    silent = unreported(index, incarnation)
    say(_waiting(index, silent), err=True)
    if not yes:
        agree("Go on without them?")
    put = PutOp(key=keys.key(Ref(Kind.RECOVER)), value=encode_stored(Recover(incarnation=incarnation)))
    if not (await store.txn([unchanged(keys.key(Ref(Kind.META)), meta.mod_revision)], [put])).ok:
        raise Refused("the store was restored once more meanwhile; nothing was changed, run it again")
    say("the leader goes on")


def _waiting(index: Index, silent: list[str]) -> str:
    shown = ", ".join(silent[:10]) + (f" and {len(silent) - 10} more" if len(silent) > 10 else "")
    return f"{len(silent)} of {len(index.nodes())} nodes have not reported since the restore: {shown}"
