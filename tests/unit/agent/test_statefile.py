"""The state on disk: whole or not at all, damaged is not empty."""

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest

from llmgw.testing.node import DATA, assignment
from llmgw_agent import statefile
from llmgw_agent.state import Process, SavedShard, SavedState, decode_state


def state(port: int = 20000) -> SavedState:
    process = Process(pid=7, started=8, boot_id="boot-1", mark="m")
    shard = SavedShard(name="m-aaaaa.0", stage="ready", order=assignment(), port=port, process=process)
    return SavedState(node="n1", data=DATA, boot_id="boot-1", lease=2**62, shards=(shard,), resting={20001: 1.5})


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    statefile.save(tmp_path, state())
    loaded = statefile.load(tmp_path)
    assert loaded.state == state()
    assert not loaded.damage
    assert not loaded.lost


def test_nothing_there_is_nothing_lost(tmp_path: Path) -> None:
    loaded = statefile.load(tmp_path)
    assert (loaded.state, loaded.damage, loaded.lost) == (None, (), False)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    for _ in range(2):
        statefile.save(tmp_path, state())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"state.json": 0o600, "state.previous.json": 0o600}


def test_b14_truncated_anywhere_it_is_kept_aside_and_never_taken_for_empty(tmp_path: Path) -> None:
    statefile.save(tmp_path, state())
    whole = (tmp_path / "state.json").read_bytes()
    for length in range(len(whole)):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / "state.json").write_bytes(whole[:length])
        loaded = statefile.load(directory)
        assert (loaded.state, loaded.lost) == (None, True)
        assert "state.json is damaged" in loaded.damage[0]
        assert (directory / "state.json.damaged-1").read_bytes() == whole[:length]
        assert not (directory / "state.json").exists()


def test_b14_the_copy_before_serves_where_the_newest_is_damaged(tmp_path: Path) -> None:
    statefile.save(tmp_path, state(20000))
    statefile.save(tmp_path, state(20001))
    (tmp_path / "state.json").write_bytes(b"")
    loaded = statefile.load(tmp_path)
    assert loaded.state == state(20000)
    assert loaded.lost
    assert len(loaded.damage) == 1


def test_b14_a_stray_temporary_file_is_of_no_account(tmp_path: Path) -> None:
    statefile.save(tmp_path, state())
    (tmp_path / "state.json.tmp").write_bytes(b"{half")
    assert statefile.load(tmp_path).state == state()
    (tmp_path / "state.json.tmp").write_bytes(b"{half")
    statefile.save(tmp_path, state(20001))
    assert statefile.load(tmp_path).state == state(20001)
    assert not (tmp_path / "state.json.tmp").exists()


def test_b14_a_full_disk_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statefile.save(tmp_path, state(20000))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            statefile.save(tmp_path, state(20001))
    assert statefile.load(tmp_path).state == state(20000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json"]


def test_damaged_files_do_not_pile_up(tmp_path: Path) -> None:
    for n in range(1, 25):
        (tmp_path / "state.json").write_bytes(b"x" * n)
        statefile.load(tmp_path)
    kept = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir())
    assert kept == list(range(15, 25))


def test_a_state_of_a_newer_agent_is_not_guessed_at() -> None:
    raw = msgspec.json.encode({"format": 2, "node": "n1", "data": "1:2", "boot_id": "b"})
    with pytest.raises(ValueError, match="is of format 2, this agent reads up to 1"):
        decode_state(raw)


def test_fields_of_a_newer_agent_are_tolerated() -> None:
    raw = msgspec.json.encode({"node": "n1", "data": "1:2", "boot_id": "b", "novel": 1})
    assert decode_state(raw) == SavedState(node="n1", data="1:2", boot_id="b")
