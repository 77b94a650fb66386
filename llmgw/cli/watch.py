"""`llmgw watch`: changes as they happen, until Ctrl-C or until nobody reads them any more."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import click

from llmgw.cli.connection import Connection, store_options
from llmgw.cli.get import check_kind
from llmgw.cli.kinds import KINDS
from llmgw.cli.output import emit, json_bytes, say
from llmgw.cli.raw_key import event_object, event_text, parent
from llmgw.core.snapshot import Kind
from llmgw.store import keys

if TYPE_CHECKING:
    from llmgw.store.etcd import EtcdStore


@click.command(name="watch", short_help="Print changes as they happen.")
@click.argument("what", metavar="KIND|/KEY")
@click.option("--prefix", is_flag=True, help="Of a raw key: everything that begins with it.")
@click.option("--rev", type=click.IntRange(min=1), metavar="N", help="Begin with what happened at revision N.")
@click.option(
    "-o", "--output", "form", type=click.Choice(["text", "json"]), help="Of a raw key [default: text, as etcdctl]."
)
@store_options
def watch(*, connection: Connection, what: str, prefix: bool, rev: int | None, form: str | None) -> None:
    """Print every change of a kind, one JSON object a line: type (put or delete), key, mod_revision, value.

    KIND is one of nodes, models, replicas, shards, aliases, engines. An argument that begins with / is a raw key, whose
    changes are printed as etcdctl would. Secrets are left out.
    """
    if what.startswith("/"):
        within = (parent(what) if prefix else what,)

        def wanted(key: str) -> bool:
            return key.startswith(what) if prefix else key == what

        _begin(what)
        connection.run(lambda store: _watch(store, within, rev, wanted=wanted, as_json=form == "json"))
        return
    if prefix:
        raise click.UsageError("--prefix is for raw keys, which begin with /.")
    if form == "text":
        raise click.UsageError("A kind is printed as JSON, one object a line.")
    check_kind(what, list(KINDS))
    prefixes = tuple(keys.prefix(kind) for kind in KINDS[what].watched)
    _begin(what)
    connection.run(lambda store: _watch(store, prefixes, rev, wanted=lambda _: True, as_json=True))


def _begin(what: str) -> None:
    """To a person, who may see nothing else for long, say what goes on."""
    if sys.stderr.isatty():
        say(f"watching {what}; Ctrl-C ends it", err=True)


async def _watch(
    store: EtcdStore,
    prefixes: tuple[str, ...],
    rev: int | None,
    *,
    wanted: Callable[[str], bool],
    as_json: bool,
) -> None:
    if rev is None:
        rev = (await store.list([keys.prefix(Kind.META)])).revision + 1
    async with anyio.create_task_group() as group:
        group.start_soon(_until_unread, group.cancel_scope)
        async with store.watch(prefixes, from_revision=rev) as batches:
            async for batch in batches:
                for event in batch.events:
                    if not wanted(event.key):
                        continue
                    if as_json:
                        emit(json_bytes(event_object(event)))
                    else:
                        say(event_text(event))


async def _until_unread(scope: anyio.CancelScope) -> None:
    """End the watch when the reader of a pipe has gone, without waiting for the next change to write to it."""
    output = sys.stdout.fileno()
    if stat.S_ISFIFO(os.fstat(output).st_mode):
        await anyio.wait_readable(output)  # the writing end only ever becomes "readable" by an error
        scope.cancel()
