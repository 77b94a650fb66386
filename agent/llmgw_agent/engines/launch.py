"""What an engine is started with, and the rules that hold for every engine.

The environment is explicit: nothing of the agent's own leaks in, and nothing that a profile says can take the place of
what the launcher decides. The engine's key is in the environment only, never in argv.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from llmgw.core.engine_flags import env_problem
from llmgw_agent.host import StartFailed

MARK: Final = "LLMGW_SHARD"
PORT: Final = "LLMGW_PORT"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch needs to know of the node. `threads`: CPUs within the node's limits; `home`: HOME and caches."""

    address: str
    threads: int
    home: Path


class Binary(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's program; `env`: what it needs to find its own libraries."""

    path: Path
    env: Mapping[str, str] = {}


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start. `env` is all of its environment but the mark, and holds the key."""

    argv: tuple[str, ...]
    env: dict[str, str]


def base_env(node: NodeView, binary: Binary) -> dict[str, str]:
    """The environment every engine gets."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(node.home),
        "XDG_CACHE_HOME": str(node.home / "cache"),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **binary.env,
    }


def refuse_owned_env(env: Mapping[str, str]) -> None:
    """Raises StartFailed for a variable that is the launcher's."""
    for name in sorted(env):
        if (why := env_problem(name)) is not None:
            raise StartFailed(f"the profile's env sets {name}, which {why}")
