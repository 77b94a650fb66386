"""What a store refuses before anything is sent: both implementations ask here, so that they refuse the same.

Rules and numbers are etcd's, checked on 3.4.23; `REQUEST_BYTES_MAX` is less than etcd's own limit, so sizes here may be
estimates as long as they are not far too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmgw.errors import TooLarge
from llmgw.store.port import (
    REQUEST_BYTES_MAX,
    TXN_COMPARES_MAX,
    TXN_OPS_MAX,
    Compare,
    DeleteOp,
    Operation,
    PutOp,
    range_end,
)

PART_OVERHEAD_BYTES: Final = 48
"""What one compare or operation costs beside its key and value. Source: etcd's protobuf; five tags with varints."""


def check_key(key: str, *, prefix: bool = False) -> None:
    """Raises ValueError for a key that is empty or not ASCII, or a prefix that does not end with `/`."""
    if not key:
        raise ValueError("a key can't be empty")
    if not key.isascii():
        raise ValueError(f"key {key!r} is not ASCII")
    range_end(key, prefix=prefix)


def check_txn(compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation]) -> None:
    """Raises TooLarge for a transaction that etcd would refuse, ValueError for a bad key or one written twice."""
    for what, parts, limit, unit in (
        ("transaction", compares, TXN_COMPARES_MAX, "compares"),
        ("transaction", ops, TXN_OPS_MAX, "operations"),
        ("transaction's other branch", or_else, TXN_OPS_MAX, "operations"),
    ):
        if len(parts) > limit:
            raise TooLarge(what=what, size=len(parts), limit=limit, unit=unit)
    size = 0
    for part in (*compares, *ops, *or_else):
        prefix = False if isinstance(part, PutOp) else part.prefix
        check_key(part.key, prefix=prefix)
        size += PART_OVERHEAD_BYTES + len(part.key) + (len(part.value) if isinstance(part, PutOp) else 0)
    if size > REQUEST_BYTES_MAX:
        raise TooLarge(what="transaction", size=size, limit=REQUEST_BYTES_MAX, unit="bytes")
    for branch in (ops, or_else):
        _check_written_once(branch)


def writes(operations: Sequence[Operation]) -> bool:
    """Whether any of `operations` may write."""
    return any(isinstance(op, (PutOp, DeleteOp)) for op in operations)


def _check_written_once(operations: Sequence[Operation]) -> None:
    """A key may be put once, and then not be deleted in the same branch, in any order. Deleting twice is fine."""
    put: set[str] = set()
    for op in operations:
        if isinstance(op, PutOp):
            if op.key in put:
                raise ValueError(f"key {op.key!r} is written twice in one transaction")
            put.add(op.key)
    for op in operations:
        if not isinstance(op, DeleteOp):
            continue
        hit = next((key for key in sorted(put) if key == op.key or (op.prefix and key.startswith(op.key))), None)
        if hit is not None:
            raise ValueError(f"key {hit!r} is written and deleted in one transaction")
