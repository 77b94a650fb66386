"""Writing what people say of nodes: one record a node, changed only as it was read.

All names are judged before anything is written. More nodes than one transaction holds go in batches, each of them
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from llmgw.cli.connection import read_index
from llmgw.core.catalog import NodeSpec
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.yaml_tree import nearest
from llmgw.errors import LlmgwError, NotFound, OutcomeUnknown, Partial, Refused, Unavailable
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.port import Compare, Operation, PutOp, Store, unchanged

NODE_KINDS: Final = (Kind.NODE_SPEC, Kind.NODE_STATE, Kind.SESSION, Kind.FACTS)

BATCH_MAX: Final = 50
"""Nodes changed in one transaction: two compares and one write each, of the 128 that a transaction holds."""

ATTEMPTS_MAX: Final = 5
"""How often a change is tried that somebody else's change overtook."""

Edit = Callable[[Index, NodeSpec], NodeSpec]
"""The wanted record of a node, from everything read and its present record. Raises: Refused."""


async def edit_nodes(
    store: Store, names: Sequence[str], edit: Edit, *, compares: Callable[[str], Iterable[Compare]] | None = None
) -> dict[str, bool]:
    """Change what people say of these nodes; returns for each whether anything had to be changed.

    Args:
        store: where.
        names: the nodes; every one must be known, or nothing is written.
        edit: the change.
        compares: more that must hold of a node at the moment of writing.

    Raises:
        NotFound: no such node.
        Refused: `edit` refuses, the record can't be read, or others change it all the time.
        Partial: a later batch failed after earlier ones were written.
        Unavailable, OutcomeUnknown, Denied: of the store.
    """
    wanted = list(dict.fromkeys(names))
    index = await read_index(store, NODE_KINDS)
    specs = _judged(index, wanted, edit)
    changed: dict[str, bool] = {}
    for start in range(0, len(wanted), BATCH_MAX):
        batch = {name: specs[name] for name in wanted[start : start + BATCH_MAX]}
        try:
            changed |= await _write(store, index, batch, edit, compares)
        except (Refused, Unavailable, OutcomeUnknown) as error:
            if not changed:
                raise
            raise Partial(done=len(changed), total=len(wanted), why=str(error)) from error
    return changed


def _judged(index: Index, names: Sequence[str], edit: Edit) -> dict[str, NodeSpec]:
    known = index.nodes()
    for name in names:
        if name not in known:
            raise NotFound("node", name, nearest(name, known))
    specs: dict[str, NodeSpec] = {}
    for name in names:
        row = index.node_specs.get(name)
        if row is not None and (row.corrupt is not None or row.record is None):
            place = keys.key(Ref(Kind.NODE_SPEC, name))
            raise Refused(f"{place} can't be read ({row.corrupt}); nothing was changed, repair or delete it first")
        present = NodeSpec(name=name) if row is None or row.record is None else row.record
        specs[name] = edit(index, present)
    return specs


async def _write(
    store: Store,
    index: Index,
    specs: Mapping[str, NodeSpec],
    edit: Edit,
    compares: Callable[[str], Iterable[Compare]] | None,
) -> dict[str, bool]:
    lost: LlmgwError | None = None
    for _ in range(ATTEMPTS_MAX):
        new = {
            name: spec for name, spec in specs.items() if spec != (index.node_specs.record(name) or NodeSpec(name=name))
        }
        if not new:
            return dict.fromkeys(specs, False)
        refs = {name: Ref(Kind.NODE_SPEC, name) for name in new}
        checks = [unchanged(keys.key(ref), _revision(index, ref)) for ref in refs.values()]
        checks += [check for name in new for check in (compares(name) if compares is not None else ())]
        ops: list[Operation] = [PutOp(key=keys.key(refs[name]), value=encode_stored(new[name])) for name in new]
        try:
            result = await store.txn(checks, ops)
        except OutcomeUnknown as error:  # the same once more: what was done already is seen as nothing left to do
            lost = error
        else:
            if result.ok:
                return {name: name in new for name in specs}
            lost = None
        index = await read_index(store, NODE_KINDS)
        specs = _judged(index, list(specs), edit)
    raise lost or Refused(f"somebody else keeps changing {', '.join(specs)}; run it again")


def _revision(index: Index, ref: Ref) -> int:
    row = index.row(ref)
    return 0 if row is None else row.mod_revision
