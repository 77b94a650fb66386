"""What the command says before it runs, and instead of running."""

import fcntl
import os
from pathlib import Path

import pytest

from llmgw.obs import logs
from llmgw_agent import run
from llmgw_agent.linux import LOCK


def ended(*argv: str) -> object:
    with pytest.raises(SystemExit) as caught:
        run.main(argv)
    return caught.value.code


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The process of the tests is to bury its own children.
    monkeypatch.setattr(run, "become_subreaper", lambda: None)
    monkeypatch.setattr(logs, "configure", lambda _: None)
    path = tmp_path / "agent.yaml"
    path.write_text(f"name: n1\ndata_dir: {tmp_path / 'data'}\n")
    return path


def test_help_says_what_it_does_and_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Start, watch and stop engines on this node" in said
    assert "Exit codes: 0 told to end, 1 failed, 2 a configuration that can't be used, 4 the data directory" in said


def test_a_data_directory_that_is_a_file_is_one_clear_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "data").touch()
    assert ended("--config", str(config)) == 2
    assert capsys.readouterr().err == f"llmgw-agent: data_dir: {config.parent / 'data'} can't be used: File exists\n"


def test_a_data_directory_in_use_is_one_clear_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = config.parent / "data"
    data.mkdir()
    with (data / LOCK).open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert ended("--config", str(config)) == 4
    assert capsys.readouterr().err == f"llmgw-agent: {data} is in use by another agent (pid 4711)\n"


def test_a_configuration_that_is_not_there_is_one_clear_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = config.with_name("nope.yaml")
    assert ended("--config", str(missing)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"llmgw-agent: {missing}")
    assert said.count(os.linesep) == 1
