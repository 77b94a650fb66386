"""`llmgw get`: objects of a kind, the catalog, or raw keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.cli.catalog_text import catalog_yaml
from llmgw.cli.catalog_write import CATALOG_KINDS, read_catalog
from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.kinds import KINDS
from llmgw.cli.output import emit, emit_as, say, table
from llmgw.cli.raw_key import key_object, parent, shown
from llmgw.core.catalog_dump import written
from llmgw.core.snapshot import Kind
from llmgw.core.yaml_tree import nearest
from llmgw.errors import NotFound, Partial, Refused
from llmgw.obs.clock import system_wall
from llmgw.store import keys
from llmgw.store.port import Listing

if TYPE_CHECKING:
    from llmgw.store.etcd import EtcdStore


@click.command(name="get", short_help="Print objects, the catalog, or raw keys.")
@click.argument("what", metavar="KIND|/KEY")
@click.argument("name", required=False)
@click.option("--prefix", is_flag=True, help="Of a raw key: everything that begins with it.")
@click.option("--rev", type=click.IntRange(min=1), metavar="N", help="Of a raw key: as it was at revision N.")
@click.option(
    "-o", "--output", "form", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True
)
@store_options
def get(*, connection: Connection, what: str, name: str | None, prefix: bool, rev: int | None, form: str) -> None:
    """Print objects.

    KIND is one of nodes, models, replicas, shards, aliases, engines, catalog; with NAME only that one. `get catalog`
    prints what `llmgw apply` reads. An argument that begins with / is a raw key, printed as etcdctl would (secrets
    left out).
    """
    if what.startswith("/"):
        if name is not None:
            raise click.UsageError("A raw key takes no NAME.")
        connection.run(lambda store: _raw(store, what, prefix=prefix, rev=rev, form=form))
        return
    if prefix or rev is not None:
        raise click.UsageError("--prefix and --rev are for raw keys, which begin with /.")
    if what == "catalog":
        if name is not None:
            raise click.UsageError("The catalog is one document and takes no NAME.")
        connection.run(lambda store: _catalog(store, form=form))
        return
    check_kind(what, [*KINDS, "catalog"])
    connection.run(lambda store: get_kind(store, what, name, form=form))


def check_kind(what: str, known: list[str]) -> None:
    """Raises: UsageError, with the nearest kind, when there is no such kind."""
    if what not in known:
        near = nearest(what, known)
        hint = f" Did you mean {near!r}?" if near else f" Known are {', '.join(known)}; raw keys begin with /."
        raise click.UsageError(f"No kind {what!r}.{hint}")


async def get_kind(store: EtcdStore, what: str, name: str | None, *, form: str) -> None:
    """Print one kind, or one object of it. Raises: NotFound."""
    view = KINDS[what]
    index = await read_index(store, view.kinds)
    names = view.names(index)
    if name is not None:
        if name not in names:
            raise NotFound(view.noun, name, nearest(name, names))
        names = [name]
    if form != "table":
        objects = [view.object(index, each) for each in names]
        emit_as(form, objects if name is None else objects[0])
    elif names:
        table(view.headers, view.rows(index, names, system_wall()))
    else:
        say(f"There are no {what}.", err=True)


async def _catalog(store: EtcdStore, *, form: str) -> None:
    index = await read_index(store, CATALOG_KINDS)
    catalog, corrupt = read_catalog(index)
    if form == "json":
        emit_as("json", written(catalog))
    else:
        emit(catalog_yaml(catalog).encode())
    if corrupt:
        places = ", ".join(sorted(f"{ref.kind.value}{ref.name}" for ref in corrupt))
        total = sum(1 for _ in index.rows())
        raise Partial(done=total - len(corrupt), total=total, why=f"left out because it can't be read: {places}")


async def _raw(store: EtcdStore, key: str, *, prefix: bool, rev: int | None, form: str) -> None:
    within = parent(key) if prefix else key
    listing = await _listing(store, within, rev)
    items = [item for item in listing.items if (item.key.startswith(key) if prefix else item.key == key)]
    if not prefix and not items:
        raise NotFound("key", key, "--prefix" if key.endswith("/") else None)
    if form == "table":
        for item in items:
            say(f"{item.key}\n{shown(item.key, item.value).text}")
    else:
        objects = [key_object(item) for item in items]
        emit_as(form, objects if prefix else objects[0])


async def _listing(store: EtcdStore, within: str, rev: int | None) -> Listing:
    if rev is None:
        return await store.list([within])
    now = (await store.list([keys.prefix(Kind.META)])).revision
    if rev > now:
        raise Refused(f"revision {rev} is in the future, the store is at {now}")
    return await store.list_at([within], revision=rev)
