"""Which engine arguments and environment variables a person may not set, and why not.

The launcher owns what decides where an engine listens, who may talk to it, which devices and how much memory it takes,
and which routes it opens: a user's value would break a claim, a promise of the catalog, or the node's safety. The
catalog is judged by this at load; an agent judges again at launch, since the store can be written by other means.

Source: llama-server --help (build 10434) and its tools/server/README.md; vLLM entrypoints/openai/cli_args.py and
engine/arg_utils.py; SGLang server_args.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

_NETWORK: Final = "the agent chooses where the engine listens"
_KEY: Final = "the agent makes the engine's key and hands it over unseen"
_WEIGHTS: Final = "the weights come from `source`"
_NAME: Final = "the engine's name for the model is the model's name"
_CONTEXT: Final = "write `context`"
_SLOTS: Final = "write `slots`"
_TASK: Final = "write `task`"
_SHAPE: Final = "write `nodes`, `gpus_per_node`, `tensor_parallel` and `pipeline_parallel`"
_DEVICES: Final = "the devices are those of the claim"
_MEMORY: Final = "it is set from the memory claim"
_ROUTES: Final = "it opens routes that must stay closed"
_COMMANDS: Final = "it lets clients run commands or touch files on the node"
_LOGS: Final = "the agent owns the engine's logs"
_HTTP: Final = "it is set from `slots` and the queue, or health checks starve"
_PROBES: Final = "readiness and draining are read from it"
_EXITS: Final = "the engine would print something and exit"
_FILE: Final = "it would bring in settings that nobody checked; write them here"


def _table(*groups: tuple[str, str]) -> dict[str, str]:
    return {flag: why for why, flags in groups for flag in flags.split()}


_LLAMA: Final = _table(
    (_NETWORK, "host port reuse-port"),
    (_WEIGHTS, "m model mu model-url dr docker-repo mmu mmproj-url offline spec-draft-hf"),
    (_NAME, "a alias tags"),
    (_CONTEXT, "c ctx-size"),
    (_SLOTS, "np parallel"),
    (_TASK, "embedding embeddings rerank reranking"),
    (_DEVICES, "dev device devd device-draft spec-draft-device rpc"),
    (_MEMORY, "fit fitt fit-target fitc fit-ctx"),
    (_ROUTES, "path api-prefix props"),
    (_COMMANDS, "tools tools-runtime ag agent media-path slot-save-path lcd lookup-cache-dynamic"),
    (_LOGS, "v verbose lv verbosity"),
    (_HTTP, "threads-http"),
    (_PROBES, "slots metrics"),
    (_EXITS, "h help usage version cl cache-list completion-bash list-devices"),
)
"""Without dashes, and without `no-`: what must not be switched on must not be switched off either."""

_LLAMA_FAMILIES: Final = (
    (re.compile(r"api-key.*"), _KEY),
    (re.compile(r"ssl-.*"), _NETWORK),
    (re.compile(r"models-.*"), _ROUTES),
    (re.compile(r"(web)?ui(-.*)?"), _ROUTES),
    (re.compile(r"mcp-.*"), _COMMANDS),
    (re.compile(r"log-.*"), _LOGS),
    (re.compile(r"hf.*"), _WEIGHTS),
    (re.compile(r"(embd|fim|gpt-oss|vision)-.*-(default|spec)|fim-qwen-1.*"), _WEIGHTS),
)

_PYTHON: Final = _table(
    (_NETWORK, "host port uds root-path fastapi-root-path ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs"),
    (_NETWORK, "master-addr master-port dist-init-addr nccl-init-addr nccl-port"),
    (_KEY, "api-key admin-api-key"),
    (_WEIGHTS, "model model-path"),
    (_NAME, "served-model-name"),
    (_CONTEXT, "max-model-len context-length"),
    (_SLOTS, "max-num-seqs max-running-requests"),
    (_SHAPE, "tensor-parallel-size tp-size tp pipeline-parallel-size pp-size pp nnodes node-rank headless"),
    (_SHAPE, "data-parallel-size dp-size dp distributed-executor-backend n r"),
    (_DEVICES, "base-gpu-id gpu-id-step device-ids"),
    (_MEMORY, "gpu-memory-utilization mem-fraction-static"),
    (_ROUTES, "middleware enable-sleep-mode"),
    (_COMMANDS, "allowed-local-media-path file-storage-path tool-server"),
    (_PROBES, "enable-metrics shutdown-timeout"),
    (_EXITS, "h help version"),
    (_FILE, "config"),
)

_ENV: Final = _table(
    (_KEY, "LLAMA_API_KEY VLLM_API_KEY HF_TOKEN"),
    (_DEVICES, "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER GGML_VK_VISIBLE_DEVICES HIP_VISIBLE_DEVICES"),
    (_DEVICES, "NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES"),
    (_NETWORK, "GLOO_SOCKET_IFNAME HOST_IP NCCL_IB_HCA NCCL_SOCKET_IFNAME SGLANG_HOST_IP VLLM_HOST_IP VLLM_PORT"),
    (_ROUTES, "VLLM_SERVER_DEV_MODE"),
    (_PROBES, "VLLM_ENGINE_READY_TIMEOUT_S"),
    (_WEIGHTS, "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"),
    ("the agent owns it", "GGML_NO_BACKTRACE HOME PATH VLLM_CACHE_ROOT"),
)
_ENV_FAMILIES: Final[Mapping[str, str]] = {
    "LLMGW_": "the agent marks its engines with it",
    "LLAMA_": "it stands for an argument; write it in `args`",
    "GGML_RPC": _DEVICES,
    "LD_": "it decides which code the engine loads",
}
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def args_problems(engine: str, args: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Every argument that `engine` must not be given, as (position, why)."""
    for i, arg in enumerate(args):
        if re.match(r"--?[A-Za-z][^=]*\s", arg):
            yield i, f"{arg!r} is one argument with a blank in it; write the flag and its value as two list entries"
        elif (why := arg_owner(engine, arg)) is not None:
            yield i, f"{arg.partition('=')[0]!r} can't be set here: {why}"


def arg_owner(engine: str, arg: str) -> str | None:
    """Why `arg` is the launcher's to set for `engine`; None for a person's flag, and for what is no flag."""
    flag = arg.partition("=")[0].lstrip("-").replace("_", "-")
    if not re.match(r"--?[A-Za-z]", arg):
        return None
    if arg.startswith("--"):
        flag = flag.lower()
    if engine == "llama.cpp":
        flag = flag.removeprefix("no-")
        families = (why for pattern, why in _LLAMA_FAMILIES if pattern.fullmatch(flag))
        return _LLAMA.get(flag) or next(families, None)
    exact = _PYTHON.get(flag)
    if exact is not None or len(flag) < 2:
        return exact
    # argparse takes any unambiguous beginning of a flag for the flag.
    return next((why for owned, why in _PYTHON.items() if owned.startswith(flag)), None)


def env_problem(name: str) -> str | None:
    """Why a profile can't set the variable `name`; None when it can."""
    if not _ENV_NAME.fullmatch(name):
        return "is not a variable's name (letters, digits and '_', no digit first)"
    upper = name.upper()
    why = _ENV.get(upper) or next((why for head, why in _ENV_FAMILIES.items() if upper.startswith(head)), None)
    if upper.endswith("_PROXY"):
        why = "engines are reached, and reach out, without a proxy"
    return None if why is None else f"can't be set here: {why}"
