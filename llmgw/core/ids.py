"""Names and ids: what may be called what, and how any text becomes part of a key.

Invariant: `unescape(escape(name)) == name` for every valid name, an escaped name holds no `/`, and two different names
never share a key. Nothing here draws random numbers: suffixes and keys come from an `Ids` source handed in.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Protocol

NAME_LEN_MAX: Final = 63
"""Longest node, replica, engine or key name, in characters. Source: a DNS label (RFC 1035 §2.3.4)."""

MODEL_NAME_BYTES_MAX: Final = 255
"""Longest model or alias name, in bytes of UTF-8."""

SLUG_LEN_MAX: Final = 40
SUFFIX_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
SUFFIX_LEN: Final = 5

_NAME = re.compile(r"[a-z0-9]([-._a-z0-9]*[a-z0-9])?")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9._-]|%[0-9A-F]{2})+")


class Secret:
    """A value that must not be shown. Only the store's encoder writes it out; everything else sees `***`.

    msgspec does not know this type, so an encoder without a hook refuses it instead of leaking it.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself, for the one place that has to hand it on."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(("Secret", self._value))


class Ids(Protocol):
    """Where fresh ids come from: the system's randomness in a process, a seed in a test."""

    def suffix(self) -> str:
        """`SUFFIX_LEN` characters of `SUFFIX_ALPHABET`: the last part of a replica's id."""
        ...

    def key(self) -> Secret:
        """An engine's key: 32 random bytes in hex."""
        ...

    def token(self) -> str:
        """A fresh opaque id (incarnations, lock holders): 32 hex digits."""
        ...


class CountedIds:
    """Ids that count up: the same each time, unknown to nobody, so for what is only imagined. Implements `Ids`.

    Suffixes come in order, so that replicas placed at one moment rank as they were placed. `used`: suffixes left out,
    so that what comes is never taken for what went. `count`: how many were given.
    """

    def __init__(self, *, count: int = 0, used: frozenset[str] = frozenset()) -> None:
        self.count = count
        self._used = used

    def suffix(self) -> str:
        """The next suffix."""
        while True:
            self.count += 1
            left, text = self.count, ""
            for _ in range(SUFFIX_LEN):
                left, digit = divmod(left, len(SUFFIX_ALPHABET))
                text = SUFFIX_ALPHABET[digit] + text
            if text not in self._used:
                return text

    def key(self) -> Secret:
        """A key that names the number of the suffix before it: no secret, and nothing real is started with it."""
        return Secret(f"{self.count:064x}")

    def token(self) -> str:
        """The next number, as 32 hex digits."""
        self.count += 1
        return f"{self.count:032x}"


def name_problem(name: str) -> str | None:
    """Why `name` can't name a node, replica, engine or key; None when it can."""
    if len(name) > NAME_LEN_MAX:
        return f"is {len(name)} characters long, the limit is {NAME_LEN_MAX}"
    if not _NAME.fullmatch(name):
        return "may hold a-z, 0-9, '-', '.' and '_' only, and must begin and end with a letter or digit"
    return None


def model_name_problem(name: str) -> str | None:
    """Why `name` can't name a model or an alias; None when it can."""
    if not name:
        return "is empty"
    if unicodedata.normalize("NFC", name) != name:
        return "is not in Unicode's NFC form"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "holds a lone surrogate, which is no text"
    if size > MODEL_NAME_BYTES_MAX:
        return f"is {size} bytes long, the limit is {MODEL_NAME_BYTES_MAX}"
    bad = next((c for c in name if unicodedata.category(c) in ("Cc", "Zl", "Zp")), None)
    return None if bad is None else f"holds the control character U+{ord(bad):04X}"


def escape(name: str) -> str:
    """`name` as one segment of a key: bytes outside `[A-Za-z0-9._-]` as `%XX`, dots too where there is nothing else."""
    if name.strip(".") == "":
        return "%2E" * len(name)
    return "".join(chr(b) if b in _PLAIN else f"%{b:02X}" for b in name.encode())


def unescape(segment: str) -> str | None:
    """The name that `escape` made `segment` from; None when it did not make it."""
    if not _ESCAPED.fullmatch(segment):
        return None
    try:
        name = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), segment.encode()).decode()
    except UnicodeDecodeError:
        return None
    return name if escape(name) == segment and model_name_problem(name) is None else None


def slug(model: str) -> str:
    """A model's name as the beginning of a replica's id: at most `SLUG_LEN_MAX` characters, never empty."""
    text = re.sub(r"[^a-z0-9.]+", "-", model.lower())[:SLUG_LEN_MAX]
    return re.sub(r"^[^a-z0-9]+|[^a-z0-9]+$", "", text) or "m"


def replica_id(model: str, suffix: str) -> str:
    """The id of a new replica of `model`."""
    return f"{slug(model)}-{suffix}"


def shard_name(node: str, replica: str, rank: int) -> str:
    """How a shard and its assignment are named below their prefix: `<node>/<replica>.<rank>`."""
    return f"{node}/{replica}.{rank}"


def split_shard_name(name: str) -> tuple[str, str, int] | None:
    """(node, replica, rank) of a shard's name; None when it is none. Replica ids may hold dots: the last one splits."""
    node, slash, rest = name.partition("/")
    replica, dot, rank = rest.rpartition(".")
    if not slash or not dot or name_problem(node) or name_problem(replica):
        return None
    if not re.fullmatch(r"0|[1-9][0-9]{0,3}", rank):
        return None
    return node, replica, int(rank)
