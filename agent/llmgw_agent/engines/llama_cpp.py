"""llama.cpp's server: argv and environment as a pure function of the order.

Source of every flag: llama-server's `--help` at build 10434, and its behaviour, both looked at in 2026-12.
`context` is what one request may use, so every slot gets all of it: `-c` is context × slots, and with an explicit `-np`
the server gives each slot its equal part. What it really gave is read back from `/props` (`llama_probe`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llmgw.core.catalog import Task
from llmgw.core.engine_flags import arg_owner
from llmgw.core.ids import slug
from llmgw.core.replica import Assignment
from llmgw.core.startable import unstartable
from llmgw_agent.engines.launch import Binary, Launch, NodeView, base_env, refuse_owned_env
from llmgw_agent.host import StartFailed

NAME: Final = "llama.cpp"

CACHE_RAM_MIB_MAX: Final = 8192
"""Largest prompt cache in host memory, MiB: the server's own default, which it would take without being asked."""

CACHE_RAM_PART: Final = 4
"""One in so many bytes that the claim leaves beside the weights goes to that cache; the rest is for KV and buffers."""

HTTP_THREADS_EXTRA: Final = 80
"""HTTP threads beside one a slot, for requests that wait and for probes: with too few of them `/health` took 0.9 to
6 s at 24 concurrent requests, with 64 it took 2 ms (measured)."""

_TASK_FLAGS: Final = {Task.GENERATE: (), Task.EMBED: ("--embeddings",), Task.RERANK: ("--reranking",)}


def launch(
    order: Assignment, *, binary: Binary, weights: Path, weights_bytes: int, node: NodeView, port: int
) -> Launch:
    """How to start the engine of `order` on CPUs.

    Raises:
        StartFailed: the profile asks for what the launcher does not allow, for GPUs, or for several nodes.
    """
    want = order.launch
    nodes = max(want.nodes, 1 if order.gang is None else 2)
    if (why := unstartable(nodes=nodes, gpus_per_node=max(want.gpus_per_node, len(order.claim.gpus)))) is not None:
        raise StartFailed(why)
    refuse_owned_args(want.args)
    refuse_owned_env(want.env)
    set_by_user = {_flag(arg) for arg in want.args}
    argv = [str(binary.path), "-m", str(weights), "--alias", alias(order)]
    argv += ["--host", node.address, "--port", str(port)]
    argv += ["-c", str(want.context * want.slots), "-np", str(want.slots)]
    if not set_by_user & {"t", "threads"}:
        argv += ["-t", str(node.threads)]
    if not set_by_user & {"cram", "cache-ram"}:
        argv += ["--cache-ram", str(cache_ram_mib(order.claim.memory_bytes, weights_bytes))]
    argv += ["--threads-http", str(want.slots + HTTP_THREADS_EXTRA), "--device", "none", "--fit", "off"]
    argv += ["--offline", "--no-ui", "--metrics", *_TASK_FLAGS[want.task], *want.args]
    env = base_env(node, binary)
    env |= want.env
    # An aborting server starts a debugger for its backtrace, where one is installed, and takes seconds to die.
    env |= {"LLAMA_API_KEY": order.engine_key.reveal(), "GGML_NO_BACKTRACE": "1"}
    return Launch(argv=tuple(argv), env=env)


def alias(order: Assignment) -> str:
    """The name the server answers with: the model's, or its slug where that has a comma (which splits aliases)."""
    return slug(order.model) if "," in order.model else order.model


def cache_ram_mib(memory_bytes: int | None, weights_bytes: int) -> int:
    """The prompt cache in host memory, MiB; 0 (none) where nothing was claimed that it could be part of."""
    if memory_bytes is None:
        return 0
    return min(max(0, memory_bytes - weights_bytes) // CACHE_RAM_PART // 2**20, CACHE_RAM_MIB_MAX)


def refuse_owned_args(args: tuple[str, ...]) -> None:
    """Raises StartFailed for a flag that is the launcher's."""
    for arg in args:
        if (why := arg_owner(NAME, arg)) is not None:
            raise StartFailed(f"the profile's args hold {arg.split('=')[0]}, which only the launcher may set: {why}")


def _flag(arg: str) -> str | None:
    """The name of a flag without dashes, `no-` and value; None for a value (negative numbers are values)."""
    if not arg.startswith("-") or arg.lstrip("-")[:1].isdigit():
        return None
    return arg.split("=", maxsplit=1)[0].lstrip("-").replace("_", "-").lower().removeprefix("no-")
