"""This node's part of the store, read linearizably and whole, as the only thing that orders are taken from.

A reading that is older than one seen before of the same incarnation is no reading; one of a store that nobody has set
up is none either. Both are said and waited out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from llmgw.core.record import StoreMeta
from llmgw.core.replica import Assignment
from llmgw.core.snapshot import Change, Kind, Ref
from llmgw.store import codec, keys
from llmgw.store.port import KeyValue, Store
from llmgw_agent.event import Order
from llmgw_agent.saying import Sayings


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """At one revision: the keys that were asked for, the store's incarnation, the orders by shard."""

    revision: int
    items: Mapping[str, KeyValue]
    meta: StoreMeta
    orders: Mapping[str, Order]


class TreeReader:
    """Reads for one node."""

    def __init__(self, store: Store, node: str, sayings: Sayings) -> None:
        self._store, self._sayings = store, sayings
        self._meta = keys.key(Ref(Kind.META))
        self._assignments = keys.prefix(Kind.ASSIGNMENT) + f"{node}/"
        self._seen: tuple[str, int] = ("", 0)
        """The newest reading this process has had: incarnation and revision."""

    async def read(self, also: Iterable[str]) -> Tree | None:
        """This node's orders and what else is asked for; None, said why, while there is nothing to go by.

        Raises: StoreError.
        """
        listing = await self._store.list([self._meta, self._assignments, *also])
        items = {item.key: item for item in listing.items}
        meta_item = items.get(self._meta)
        meta = None if meta_item is None else codec.change(meta_item)
        if meta is None or not isinstance(meta.record, StoreMeta):
            why = "no controller has set it up yet" if meta is None else f"{self._meta}: {meta.corrupt}"
            self._sayings.say("meta", "waiting for the store's incarnation", why=why)
            return None
        seen_incarnation, seen_revision = self._seen
        if meta.record.incarnation == seen_incarnation and listing.revision < seen_revision:
            self._sayings.say("old", "the store shows an older state than before; ignored", revision=listing.revision)
            return None
        self._seen = (meta.record.incarnation, listing.revision)
        orders = {}
        for key, item in items.items():
            change = codec.change(item) if key.startswith(self._assignments) else None
            if change is not None:
                orders[change.ref.name.partition("/")[2]] = self._order(key, change)
        return Tree(revision=listing.revision, items=items, meta=meta.record, orders=orders)

    def _order(self, key: str, change: Change) -> Order:
        if change.corrupt is not None:
            why = change.corrupt
            self._sayings.say(key, "an order that can't be read; what runs goes on", key=key, why=why)
        record = change.record
        return Order(rev=change.mod_revision, assignment=record if isinstance(record, Assignment) else None)
