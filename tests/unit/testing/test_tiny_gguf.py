"""The model of nearly every test: the same bytes each time, a valid file, and as many parts as asked for."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from llmgw.testing import tiny_gguf
from llmgw.testing.tiny_gguf import TinyModel


def test_same_model_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    assert tiny_gguf.write(first, TinyModel()) == [first]
    tiny_gguf.write(second, TinyModel())
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[:4] == b"GGUF"


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    tiny_gguf.write(first, TinyModel(seed=1, layers=1))
    tiny_gguf.write(second, TinyModel(seed=2, layers=1))
    assert first.read_bytes() != second.read_bytes()


def test_parts_hold_the_tensors_of_the_whole(tmp_path: Path) -> None:
    [whole] = tiny_gguf.write(tmp_path / "whole.gguf", TinyModel())
    parts = tiny_gguf.write(tmp_path / "part.gguf", TinyModel(split=3))
    assert [part.name for part in parts] == [f"part-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    wanted = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(whole).tensors}
    found = {tensor.name: np.array(tensor.data) for part in parts for tensor in gguf.GGUFReader(part).tensors}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_command_takes_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny.gguf"
    tiny_gguf.main([str(out), "--layers", "1", "--f32", "--pad-mb", "1", "--name", "other"])
    assert out.stat().st_size > 1 << 20
    name = gguf.GGUFReader(out).fields["general.name"]
    assert bytes(name.parts[name.data[0]]).decode() == "other"
    assert capsys.readouterr().err.startswith(f"{out} ")
