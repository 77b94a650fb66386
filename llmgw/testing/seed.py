"""Chance that repeats: every draw of a simulated run comes from one number."""

from __future__ import annotations

from random import Random  # noqa: TID251  # always made from a seed, here alone

from llmgw.core.ids import SUFFIX_ALPHABET, SUFFIX_LEN, Secret

__all__ = ["Random", "SeededIds", "stream"]


def stream(seed: int, name: str) -> Random:
    """A source of its own for each purpose, so that one more draw in one place leaves all the others as they were."""
    return Random(f"{seed}/{name}")  # noqa: S311  # chance, not secrecy


class SeededIds:
    """Fresh ids from a seed. Implements `llmgw.core.ids.Ids`."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def suffix(self) -> str:
        """Five characters for a replica's id."""
        return "".join(self._random.choice(SUFFIX_ALPHABET) for _ in range(SUFFIX_LEN))

    def key(self) -> Secret:
        """An engine's key."""
        return Secret(f"{self._random.getrandbits(256):064x}")

    def token(self) -> str:
        """An opaque id."""
        return f"{self._random.getrandbits(128):032x}"
