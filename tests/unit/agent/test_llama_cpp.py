"""llama.cpp's launch as a pure function of the order."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmgw.core.catalog import Task
from llmgw.core.replica import Claim, Gang, GpuClaim
from llmgw.testing.node import assignment
from llmgw_agent.engines.launch import Binary, Launch, NodeView
from llmgw_agent.engines.llama_cpp import cache_ram_mib, launch
from llmgw_agent.host import StartFailed

BINARY = Binary(path=Path("/opt/llama-server"), env={"LD_LIBRARY_PATH": "/opt"})
NODE = NodeView(address="10.0.0.1", threads=6, home=Path("/data/home"))


def launched(**changes: Any) -> Launch:
    order = assignment(**changes)
    return launch(order, binary=BINARY, weights=Path("/m/a.gguf"), weights_bytes=10**9, node=NODE, port=20001)


def pairs(plan: Launch) -> dict[str, str]:
    return dict(pairwise(plan.argv))


def test_the_whole_command() -> None:
    plan = launched(memory_bytes=5 * 10**9, launch={"context": 4096, "slots": 4, "args": ("--flash-attn", "on")})
    assert plan.argv == (
        "/opt/llama-server", "-m", "/m/a.gguf", "--alias", "m", "--host", "10.0.0.1", "--port", "20001",
        "-c", "16384", "-np", "4", "-t", "6", "--cache-ram", "953", "--threads-http", "84", "--device", "none",
        "--fit", "off", "--offline", "--no-ui", "--metrics", "--flash-attn", "on",
    )  # fmt: skip


def test_the_environment_is_explicit_and_holds_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    plan = launched(launch={"env": {"OMP_NUM_THREADS": "2"}})
    assert plan.env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/data/home",
        "XDG_CACHE_HOME": "/data/home/cache",
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "LD_LIBRARY_PATH": "/opt",
        "OMP_NUM_THREADS": "2",
        "LLAMA_API_KEY": "ab" * 32,
        "GGML_NO_BACKTRACE": "1",
    }
    assert not [arg for arg in plan.argv if "ab" * 32 in arg]


@pytest.mark.parametrize(
    ("task", "flags"), [(Task.GENERATE, set()), (Task.EMBED, {"--embeddings"}), (Task.RERANK, {"--reranking"})]
)
def test_the_task_decides_the_endpoints(task: Task, flags: set[str]) -> None:
    assert set(launched(launch={"task": task}).argv) & {"--embeddings", "--reranking"} == flags


def test_an_alias_with_a_comma_would_be_two() -> None:
    assert pairs(launched(model="org/a,b"))["--alias"] == "org-a-b"
    assert pairs(launched(model="org/a b"))["--alias"] == "org/a b"


def test_threads_and_cache_are_the_operators_to_change() -> None:
    argv = launched(launch={"args": ("--threads", "2", "-cram", "64")}).argv
    assert "-t" not in argv
    assert "--cache-ram" not in argv


@pytest.mark.parametrize(("memory_gb", "weights_gb", "mib"), [(None, 1, 0), (1, 2, 0), (5, 1, 953), (400, 10, 8192)])
def test_the_prompt_cache_is_a_part_of_the_claim(memory_gb: int | None, weights_gb: int, mib: int) -> None:
    memory = None if memory_gb is None else memory_gb * 10**9
    assert cache_ram_mib(memory, weights_gb * 10**9) == mib


@pytest.mark.parametrize(
    "arg",
    [
        "--host", "--port=1", "--api-key", "--api-key-file", "--alias", "-a", "-m", "--model", "-c", "-np",
        "--device", "-dev", "--rpc", "--fit", "--no-fit", "--tools", "--agent", "--no-agent", "--mcp-servers-config",
        "--ui", "--webui", "--ui-mcp-proxy", "--media-path", "--slot-save-path", "--props", "--no-slots", "--log-file",
        "--log-prompts-dir", "--models-dir", "--path", "--api-prefix", "--ssl-key-file", "-hf", "--hf_repo", "--HOST",
        "--threads-http", "--verbose", "-mu", "--reuse-port", "--embeddings", "-cl",
    ],
)  # fmt: skip
def test_what_is_the_launchers_is_refused(arg: str) -> None:
    with pytest.raises(StartFailed, match="which only the launcher may set"):
        launched(launch={"args": (arg, "x")})


@pytest.mark.parametrize(
    "args",
    [
        ("--temp", "-1"), ("--dry-multiplier", "0.5"), ("--draft-max", "4"), ("--mlock",), ("-ub", "512"),
        ("--chat-template", "chatml"), ("--jinja",), ("--mmproj", "/m/mm.gguf"), ("-md", "/m/draft.gguf"),
        ("--no-mmap",), ("--cache-type-k", "q8_0"), ("--lora", "/m/l.gguf"), ("--seed", "-5"), ("--pooling", "mean"),
    ],
)  # fmt: skip
def test_what_is_the_operators_passes(args: tuple[str, ...]) -> None:
    assert launched(launch={"args": args}).argv[-len(args) :] == args


@pytest.mark.parametrize(
    "name",
    ["LLAMA_API_KEY", "LLAMA_ARG_HOST", "LD_PRELOAD", "LD_LIBRARY_PATH", "LLMGW_SHARD", "CUDA_VISIBLE_DEVICES",
     "https_proxy", "HF_TOKEN"],
)  # fmt: skip
def test_variables_that_are_the_launchers_are_refused(name: str) -> None:
    with pytest.raises(StartFailed, match=f"the profile's env sets {name}"):
        launched(launch={"env": {name: "x"}})


def test_what_this_agent_cannot_start_is_refused() -> None:
    with pytest.raises(StartFailed, match=r"CPUs of one node only, and this asks for 1 GPU a node$"):
        launched(launch={"gpus_per_node": 1})
    with pytest.raises(StartFailed, match="1 GPU a node"):
        launch(
            assignment(claim=Claim(gpus=(GpuClaim(uuid="GPU-1"),))),
            binary=BINARY,
            weights=Path("/m/a.gguf"),
            weights_bytes=1,
            node=NODE,
            port=1,
        )
    with pytest.raises(StartFailed, match="2 nodes"):
        launched(gang=Gang(fabric="ib", peers=(), ports=()))
    with pytest.raises(StartFailed, match="asks for 3 nodes and 2 GPUs a node"):
        launched(launch={"nodes": 3, "gpus_per_node": 2})
