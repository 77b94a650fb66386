"""What a person may not hand to an engine, with the reason; and what may pass."""

from __future__ import annotations

import pytest

from llmgw.core.engine_flags import args_problems, env_problem


@pytest.mark.parametrize(
    ("engine", "args", "refused"),
    [
        ("llama.cpp", ("--host", "::1"), {0}),
        ("llama.cpp", ("--temp", "0.7", "--port", "1"), {2}),
        ("llama.cpp", ("-c", "1"), {0}),
        ("llama.cpp", ("-np", "1"), {0}),
        ("llama.cpp", ("--ctx_size", "1"), {0}),  # llama.cpp takes underscores for dashes
        ("llama.cpp", ("--api-key-file", "x"), {0}),
        ("llama.cpp", ("--ssl-key-file", "x"), {0}),
        ("llama.cpp", ("--log-file", "x"), {0}),
        ("llama.cpp", ("--tools", "all"), {0}),
        ("llama.cpp", ("--mcp-servers-json", "x"), {0}),
        ("llama.cpp", ("--no-ui-mcp-proxy",), {0}),
        ("llama.cpp", ("--webui",), {0}),
        ("llama.cpp", ("--models-dir", "x"), {0}),
        ("llama.cpp", ("--rpc", "x"), {0}),
        ("llama.cpp", ("--slot-save-path", "x"), {0}),
        ("llama.cpp", ("--fim-qwen-7b-default",), {0}),
        ("llama.cpp", ("--fit", "on"), {0}),
        ("llama.cpp", ("--no-fit",), {0}),
        ("llama.cpp", ("--HOST", "x"), {0}),
        ("llama.cpp", ("-C", "0xff", "-cram", "64"), set()),
        ("llama.cpp", ("--host=x",), {0}),
        ("llama.cpp", ("--port 1",), {0}),
        ("llama.cpp", ("--temp", "-1", "--chat-template", "{% if x %}-m{% endif %}", "-ngl", "20", "-t", "4"), set()),
        ("llama.cpp", ("--spec-default", "--chat-template-file", "t.jinja", "--reasoning-budget", "-1"), set()),
        ("vllm", ("--max-model-len=1",), {0}),
        ("vllm", ("--max_model_len", "1"), {0}),
        ("vllm", ("--served-model-n", "x"), {0}),  # argparse takes any beginning
        ("vllm", ("--config", "x"), {0}),
        ("vllm", ("--max-num-batched-tokens", "1", "--enable-prefix-caching"), set()),
        ("sglang", ("--tp", "2"), {0}),
        ("sglang", ("--admin-api-key", "x"), {0}),
        ("sglang", ("--chunked-prefill-size", "4096"), set()),
    ],
)
def test_arguments(engine: str, args: tuple[str, ...], refused: set[int]) -> None:
    assert {position for position, _ in args_problems(engine, args)} == refused
    assert all(why for _, why in args_problems(engine, args))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("OMP_NUM_THREADS", True),
        ("NCCL_DEBUG", True),
        ("VLLM_ATTENTION_BACKEND", True),
        ("_x1", True),
        ("LLAMA_API_KEY", False),
        ("LLAMA_ARG_TOOLS", False),
        ("LLMGW_SHARD", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("LD_PRELOAD", False),
        ("GGML_RPC_DEBUG", False),
        ("https_proxy", False),
        ("path", False),
        ("1X", False),
        ("A=B", False),
        ("", False),
    ],
)
def test_variables(name: str, allowed: bool) -> None:
    assert (env_problem(name) is None) is allowed
