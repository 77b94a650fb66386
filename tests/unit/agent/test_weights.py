"""Which file a source names, and which sets lie below the model directories."""

from pathlib import Path

import pytest

from llmgw.testing.node import agent_config
from llmgw_agent.host import StartFailed
from llmgw_agent.linux import open_host
from llmgw_agent.weights import listing, resolve


def gguf(path: Path, size: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + b"\0" * (size - 4))
    return path


def test_a_relative_source_is_looked_for_in_each_directory(tmp_path: Path) -> None:
    file = gguf(tmp_path / "two" / "org" / "a.gguf")
    found = resolve("org/a.gguf", [str(tmp_path / "one"), str(tmp_path / "two")])
    assert (found.path, found.bytes) == (file, 100)


def test_an_absolute_source_is_taken_as_it_is(tmp_path: Path) -> None:
    file = gguf(tmp_path / "a.gguf")
    assert resolve(str(file), []).path == file


@pytest.mark.parametrize("source", ["../secret.gguf", "x/../../secret.gguf", "."])
def test_a_source_never_leads_out(tmp_path: Path, source: str) -> None:
    gguf(tmp_path / "secret.gguf")
    (tmp_path / "models" / "x").mkdir(parents=True)
    with pytest.raises(StartFailed, match="leads out of the model directories"):
        resolve(source, [str(tmp_path / "models")])


def test_nor_does_a_link(tmp_path: Path) -> None:
    secret = gguf(tmp_path / "secret.gguf")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").symlink_to(secret)
    with pytest.raises(StartFailed, match="is a link that leads out of"):
        resolve("a.gguf", [str(tmp_path / "models")])


def test_a_link_within_is_fine_also_where_the_directory_itself_is_one(tmp_path: Path) -> None:
    gguf(tmp_path / "disk" / "blobs" / "1.gguf")
    (tmp_path / "disk" / "a.gguf").symlink_to("blobs/1.gguf")
    (tmp_path / "models").symlink_to(tmp_path / "disk")
    assert resolve("a.gguf", [str(tmp_path / "models")]).bytes == 100


def test_what_is_missing_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"there is no 'a.gguf' in /x, /y"):
        resolve("a.gguf", ["/x", "/y"])
    with pytest.raises(StartFailed, match="is not there"):
        resolve(str(tmp_path / "a.gguf"), [])
    with pytest.raises(StartFailed, match=r"agent.yaml names no model_dirs"):
        resolve("a.gguf", [])


def test_what_is_no_gguf_is_refused_before_an_engine_is_started(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"<html>")
    with pytest.raises(StartFailed, match="is no GGUF file"):
        resolve("a.gguf", [str(tmp_path)])
    (tmp_path / "dir").mkdir()
    with pytest.raises(StartFailed, match=r"is a directory; name the .gguf file in it"):
        resolve("dir", [str(tmp_path)])


def test_a_split_set_is_one_thing(tmp_path: Path) -> None:
    parts = [gguf(tmp_path / f"m-0000{n}-of-00003.gguf") for n in (1, 2, 3)]
    assert resolve(parts[0].name, [str(tmp_path)]).bytes == 300
    with pytest.raises(StartFailed, match=r"is a further part of its set; name m-00001-of-00003.gguf"):
        resolve(parts[1].name, [str(tmp_path)])
    parts[2].unlink()
    with pytest.raises(StartFailed, match=r"m-00003-of-00003.gguf is missing from its set of 3"):
        resolve(parts[0].name, [str(tmp_path)])


def test_the_listing_names_sets_as_a_source_would(tmp_path: Path) -> None:
    gguf(tmp_path / "a" / "org" / "x.gguf")
    gguf(tmp_path / "b" / "org" / "x.gguf", 500)
    for n in (1, 2):
        gguf(tmp_path / "b" / f"m-0000{n}-of-00003.gguf")
    (tmp_path / "b" / "empty.gguf").touch()
    (tmp_path / "b" / "gone.gguf").symlink_to("nowhere")
    (tmp_path / "b" / "readme.txt").touch()
    (tmp_path / "b" / "\udcff.gguf").touch()  # no text: no catalog and no record could name it
    found = {item.source: item for item in listing([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none")])}
    assert sorted(found) == ["empty.gguf", "gone.gguf", "m-00001-of-00003.gguf", "org/x.gguf"]
    assert (found["org/x.gguf"].bytes, found["org/x.gguf"].complete) == (100, True)
    assert not found["m-00001-of-00003.gguf"].complete
    assert found["m-00001-of-00003.gguf"].why == "m-00003-of-00003.gguf: No such file or directory"
    assert not found["gone.gguf"].complete
    assert found["empty.gguf"].why == "empty.gguf is empty"


@pytest.mark.anyio
async def test_a_model_directory_that_is_not_there_is_a_warning_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").touch()
    dirs = ("/nowhere/nope", str(tmp_path / "file"), str(tmp_path / "models"))
    async with open_host(agent_config(data_dir=str(tmp_path / "data"), model_dirs=dirs)) as host:
        facts = [await host.facts() for _ in range(2)]
    wanted = [
        "no such model directory /nowhere/nope",
        f"the model directory {tmp_path / 'file'} can't be read: Not a directory",
    ]
    for seen in facts:
        assert [warning for warning in seen.warnings if "model directory" in warning] == wanted
        assert seen.weights is not None
        assert [item.source for item in seen.weights] == ["m.gguf"]
    assert [text for text in caplog.messages if "model directory" in text] == wanted
    assert resolve("m.gguf", dirs).path == tmp_path / "models" / "m.gguf"


def test_a_source_that_no_file_system_takes_is_a_start_that_failed(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="File name too long"):
        resolve("a" * 300, [str(tmp_path)])
