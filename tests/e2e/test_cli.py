"""The installed `llmgw` as people and scripts meet it: files, pipes, terminals, exit codes, on a real etcd."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from llmgw.cli.catalog_write import CATALOG_KINDS, read_catalog
from llmgw.cli.connection import read_index
from llmgw.config import EtcdConfig
from llmgw.core.apply import Entry, problems
from llmgw.core.node import Facts
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.etcd import EtcdStore, open_etcd
from llmgw.store.port import PutOp
from llmgw.testing.cluster import Cluster, cpu_profile
from llmgw.testing.etcd import Etcd

pytestmark = [pytest.mark.e2e, pytest.mark.etcd]

T = TypeVar("T")

LLMGW = Path(sys.executable).with_name("llmgw")
WAIT_S = 60.0
"""Dead-line for anything awaited here, seconds."""

OK = "{source: x, profiles: [{name: cpu, engine: llama.cpp}]}"
UNICODE = "org/Größe 日本"


class Cli:
    """`llmgw` on one etcd, run from one folder."""

    def __init__(self, etcd: Etcd, directory: Path) -> None:
        self.etcd, self.directory = etcd, directory
        self.started: list[subprocess.Popen[bytes]] = []
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "LLMGW_"))
        }
        self.env = {**inherited, "LLMGW_ETCD": etcd.endpoints[0], "LANG": "C.UTF-8"}

    def __call__(self, *args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [LLMGW, *args],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env={**self.env, **env},
            cwd=self.directory,
            check=False,
            timeout=WAIT_S,
        )

    def start(self, *args: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start it, with pipes from it; ended with the test at the latest."""
        process = subprocess.Popen(
            [LLMGW, *args],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=self.env,
            cwd=self.directory,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """End what still runs."""
        for process in self.started:
            process.kill()
            process.communicate()

    def revision(self) -> int:
        """Where the store stands."""
        return self.index().revision

    def write(self, name: str, text: str) -> str:
        """Put a file into the folder; returns its name."""
        (self.directory / name).write_text(text)
        return name

    def apply(self, text: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Apply a catalog, given as text."""
        return self("apply", "-f", self.write("catalog.yaml", text), *args)

    def on_store(self, act: Callable[[EtcdStore], Awaitable[T]]) -> T:
        """Run an async function on the store itself."""

        async def main() -> T:
            async with open_etcd(EtcdConfig(endpoints=self.etcd.endpoints)) as store:
                return await act(store)

        return anyio.run(main, backend="trio")

    def index(self) -> Index:
        """The stored catalog, which must be valid."""
        index = self.on_store(lambda store: read_index(store, (*CATALOG_KINDS, Kind.GENERATION)))
        catalog, _ = read_catalog(index)
        state: dict[Ref, Entry | None] = {
            **{Ref(Kind.MODEL, name): model for name, model in catalog.models.items()},
            **{Ref(Kind.ALIAS, name): alias for name, alias in catalog.aliases.items()},
        }
        assert not list(problems(state))
        return index

    def generation(self) -> int:
        """How many batches were ever applied."""
        row = self.index().generation
        return 0 if row is None or row.record is None else row.record.number


@pytest.fixture
def cli(etcd: Etcd, tmp_path: Path) -> Iterator[Cli]:
    made = Cli(etcd, tmp_path)
    yield made
    made.close()


def await_(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition of the world outside, which tells nobody when it becomes true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def fleet(size: int) -> str:
    """300 models of four replicas each need several transactions."""
    models = [
        f"  model-{i:04}: {{source: x, profiles: [{{name: cpu, engine: llama.cpp}}], scaling: {{min: 4, max: 4}}}}"
        for i in range(size)
    ]
    return "\n".join(["models:", *models, "aliases:", *(f"  alias-{i:04}: model-{i:04}" for i in range(size))]) + "\n"


# --- files ----------------------------------------------------------------------------------------------------------


def test_e01_mistyped_keys_stop_the_whole_apply(cli: Cli) -> None:
    assert cli.apply(f"models:\n  before: {OK}\n").returncode == 0
    done = cli.apply(
        f"models:\n  good: {OK}\n  m:\n    source: x\n    replica: 2\n    profiles:\n"
        "      - {name: p, engine: vllm, gpu_memmory: 20GiB}\n    scaling: {mim: 1}\nalias: {}\n"
        "engines: {vllm: {version: '1', sauce: github}}\n"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    for told, near in {
        "catalog.yaml:5: models.m.replica: ": "'scaling'",
        "catalog.yaml:7: models.m.profiles[0].gpu_memmory: ": "'min_gpu_memory_gb'",
        "catalog.yaml:8: models.m.scaling.mim: ": "'min'",
        "catalog.yaml:9: alias: ": "'aliases'",
        "catalog.yaml:10: engines.vllm.sauce: ": "'source'",
    }.items():
        (line,) = (line for line in done.stderr.splitlines() if told in line)
        assert f"did you mean {near}?" in line
    assert list(cli.index().models) == ["before"]


def test_e03_the_same_name_twice_names_both_places(cli: Cli) -> None:
    a, b = cli.write("a.yaml", f"models:\n  gemma: {OK}\n"), cli.write("b.yaml", f"models:\n\n  Gemma: {OK}\n")
    done = cli("apply", "-f", a, "-f", b)
    assert done.returncode == 2
    assert "b.yaml:3: models.Gemma:" in done.stderr
    assert "a.yaml:2" in done.stderr
    done = cli.apply(f"models:\n  m: {OK}\n  m: {OK}\naliases:\n  x: m\n  x: m\n")
    assert done.returncode == 2
    assert "catalog.yaml:3: models.m: 'm' is here a second time, first on line 2" in done.stderr
    assert "catalog.yaml:6: aliases.x: 'x' is here a second time, first on line 5" in done.stderr
    assert cli.generation() == 0


def test_e04_words_and_odd_names_come_back_as_they_went_in(cli: Cli) -> None:
    words = ["no", "on", "y", "'null'", "'~'", "1e3", "007", "1_000", "12:30", "2024-01-01", "0x10", f"'{UNICODE}'"]
    models = "".join(
        f"  {word}: {{source: 012, profiles: [{{name: '08', engine: vllm, args: [true, 1.0, 08], env: {{A: no}}}}]}}\n"
        for word in words
    )
    done = cli.apply(f"models:\n{models}aliases:\n  yes: no\n  off: 12:30\n")
    assert (done.returncode, done.stderr) == (0, "")
    first = cli("get", "catalog")
    assert first.returncode == 0
    again = cli("apply", "-f", "-", "--prune", stdin=first.stdout)
    assert again.stdout == "0 created, 0 updated, 0 deleted, 14 unchanged\n"
    assert cli("get", "catalog").stdout == first.stdout
    names = [one["name"] for one in json.loads(cli("get", "models", "-o", "json").stdout)]
    assert sorted(names) == sorted(word.strip("'") for word in words)
    profile = json.loads(cli("get", "models", "007", "-o", "json").stdout)["spec"]["profiles"][0]
    assert (profile["args"], profile["env"]) == (["true", "1.0", "08"], {"A": "no"})


def test_e06_placeholders_are_text_and_secrets_stay_in_their_files(cli: Cli) -> None:
    text = "models: {m: {source: '${X}', profiles: [{name: p, engine: vllm, args: [$$], env: {A: '${UNSET}'}}]}}\n"
    assert cli("apply", "-f", cli.write("c.yaml", text), X="substituted").returncode == 0
    spec = json.loads(cli("get", "models", "m", "-o", "json").stdout)["spec"]
    assert (spec["source"], spec["profiles"][0]["args"]) == ("${X}", ["$$"])
    assert spec["profiles"][0]["env"] == {"A": "${UNSET}"}
    login = ("--user", "me", "--password-file")
    done = cli("get", "models", *login, "missing")
    assert done.returncode == 2
    assert "missing: can't be read" in done.stderr
    done = cli("get", "models", *login, cli.write("empty", "\n"))
    assert done.returncode == 2
    assert "empty: is empty" in done.stderr
    secret = f'{{"replica":"m-aaaaa","key":"{"f00d" * 16}"}}'.encode()

    async def put(store: EtcdStore) -> None:
        await store.txn([], [PutOp(key="/llmgw/plan/secrets/m-aaaaa", value=secret)])

    cli.on_store(put)
    for args in (["get", "--prefix", "/llmgw/"], ["get", "/llmgw/plan/secrets/m-aaaaa", "-o", "json"]):
        done = cli(*args)
        assert done.returncode == 0
        assert "f00d" not in done.stdout
        assert "***" in done.stdout


def test_an_empty_or_truncated_file_deletes_nothing(cli: Cli) -> None:
    assert cli.apply(f"models: {{m: {OK}}}\n").returncode == 0
    for text in ("", "models:\n"):
        done = cli.apply(text, "--prune")
        assert done.returncode == 2
        assert "catalog.yaml:1: " in done.stderr
    assert list(cli.index().models) == ["m"]


def test_what_no_node_has_is_a_warning_and_is_stored(cli: Cli) -> None:
    facts = Facts(node="n1", boot_id="b", memory_bytes=16 * 10**9, labels={"zone": "north"}, gpus=())

    async def register(store: EtcdStore) -> None:
        await store.txn([], [PutOp(key=keys.key(Ref(Kind.FACTS, "n1")), value=encode_stored(facts))])

    cli.on_store(register)
    profile = "{name: cpu, engine: llama.cpp, min_memory_gb: 99, node_selector: {zine: north}}"
    done = cli.apply(f"models: {{m: {{source: x, profiles: [{profile}]}}}}\n")
    assert (done.returncode, done.stdout) == (0, "create model m\n1 created, 0 updated, 0 deleted, 0 unchanged\n")
    assert done.stderr.splitlines() == [
        "warning: m (cpu): no node has the label zine (did you mean 'zone'?)",
        "warning: m (cpu): needs 99 GB of memory, and the largest node has 16 GB",
    ]
    again = cli("apply", "-f", "catalog.yaml")
    assert (again.returncode, again.stderr) == (0, "")


def test_deleting_takes_prune_and_says_what_goes(cli: Cli) -> None:
    assert cli.apply(f"models: {{a: {OK}, b: {OK}}}\naliases: {{x: a}}\n").returncode == 0
    done = cli.apply(f"models: {{b: {OK}}}\n")
    assert done.returncode == 0
    assert done.stderr == "not in the files, left as it is (--prune deletes): model a\n"
    done = cli.apply(f"models: {{a: {OK}, b: {OK}}}\n", "--prune")
    assert done.stderr == "no file has aliases: 1 stored left as they are (to delete them: 'aliases: {}')\n"
    assert sorted(cli.index().models) == ["a", "b"]
    done = cli.apply(f"models: {{b: {OK}}}\naliases: {{}}\n", "--prune", "--dry-run")
    assert done.stdout.splitlines() == [
        "would delete alias x",
        "would delete model a",
        "would be 0 created, 0 updated, 2 deleted, 1 unchanged",
    ]
    assert sorted(cli.index().models) == ["a", "b"]
    done = cli.apply(f"models: {{b: {OK}}}\naliases: {{}}\n", "--prune")
    assert done.returncode == 0
    assert "deleting 2: alias x, model a" in done.stderr
    assert list(cli.index().models) == ["b"]


# --- many, at once, interrupted -------------------------------------------------------------------------------------


def narrow_pipe() -> tuple[int, int]:
    """A pipe of one page: whoever writes a few lines more than are read waits."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def begin_large_apply(cli: Cli) -> tuple[subprocess.Popen[bytes], int]:
    """An apply of 600 records that waits somewhere between its batches, since nobody reads what it says."""
    name = cli.write("fleet.yaml", fleet(300))
    reader, writer = narrow_pipe()
    process = cli.start("apply", "-f", name, stdout=writer)
    os.close(writer)
    await_(lambda: cli.generation() >= 2 or process.poll() is not None, "the second batch is never written")
    assert process.poll() is None
    return process, reader


def test_a12_an_apply_killed_between_batches_leaves_what_is_valid_and_a_rerun_ends_it(cli: Cli) -> None:
    process, reader = begin_large_apply(cli)
    process.kill()
    process.wait(WAIT_S)
    os.close(reader)
    index = cli.index()
    assert 0 < len(index.models) + len(index.aliases) < 600
    assert cli("apply", "-f", "fleet.yaml").returncode == 0
    index = cli.index()
    assert (len(index.models), len(index.aliases)) == (300, 300)
    assert cli("apply", "-f", "fleet.yaml").stdout == "0 created, 0 updated, 0 deleted, 600 unchanged\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_apply_says_how_far_it_got(cli: Cli, sent: signal.Signals) -> None:
    process, reader = begin_large_apply(cli)
    process.send_signal(sent)
    _, told = process.communicate(timeout=WAIT_S)
    os.close(reader)
    assert process.returncode == 130
    assert b"of 600 changes are known to be stored; the stored catalog is valid, run it again" in told
    assert b"Traceback" not in told


def test_an_apply_overtaken_by_another_ends_in_part_and_says_so(cli: Cli) -> None:
    process, reader = begin_large_apply(cli)
    assert cli.apply(f"models: {{other: {OK}}}\n").returncode == 0
    with os.fdopen(reader, "rb") as output:
        output.read()
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 6
    assert b"somebody else changed the catalog" in told
    assert b"of 600 done" in told
    assert "other" in cli.index().models


def test_a_reader_that_leaves_does_not_stop_an_apply(cli: Cli) -> None:
    process, reader = begin_large_apply(cli)
    os.close(reader)
    _, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, told) == (0, b"")
    index = cli.index()
    assert (len(index.models), len(index.aliases)) == (300, 300)


# --- pipes, terminals, codes ----------------------------------------------------------------------------------------


def test_h05_a_reader_that_leaves_early_is_no_failure(cli: Cli) -> None:
    start = cli.revision() + 1
    assert cli.apply(fleet(300)).returncode == 0
    for args in (
        ["get", "models", "-o", "json"],
        ["get", "models"],
        ["get", "--prefix", "/"],
        ["watch", "models", "--rev", str(start)],
    ):
        process = cli.start(*args)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
        process.stderr.close()
        assert (process.wait(WAIT_S), told) == (0, b""), args


def test_h05_stdout_is_only_the_result(cli: Cli) -> None:
    assert cli.apply(f"models: {{m: {OK}}}\n").returncode == 0
    done = cli("get", "models", "-o", "json", PYTHONWARNINGS="always", PYTHONDEVMODE="1")
    assert [one["name"] for one in json.loads(done.stdout)] == ["m"]
    assert json.loads(cli("get", "replicas", "-o", "json").stdout) == []
    assert json.loads(cli("status", "-o", "json").stdout)["models"] == {"m": None}
    assert cli("get", "replicas").stdout == ""


def test_h05_each_outcome_has_its_own_code(cli: Cli) -> None:
    assert cli.apply(f"models: {{m: {OK}}}\naliases: {{a: m}}\n").returncode == 0
    assert cli("get", "models", "mm").returncode == 3
    assert cli("get", "/llmgw/none").returncode == 3
    assert cli.apply("models: {}\n", "--prune").returncode == 4  # the alias that is left needs its model
    assert cli("get").returncode == 2
    assert cli("get", "nodez").returncode == 2
    assert cli("get", "models", "--rev", "1").returncode == 2

    async def damage(store: EtcdStore) -> None:
        await store.txn([], [PutOp(key=keys.key(Ref(Kind.MODEL, "bad")), value=b"{")])

    cli.on_store(damage)
    done = cli("get", "catalog")
    assert done.returncode == 6
    assert "spec/models/bad" in done.stderr
    assert "can't be read" in cli("get", "models").stdout
    assert "/llmgw/spec/models/bad" in cli("status").stdout


def test_h05_an_unreachable_store_is_one_clear_line(cli: Cli) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cli.env, "LLMGW_ETCD", "http://127.0.0.1:1,http://127.0.0.1:2")
        for args in (["watch", "models"], ["apply", "-f", cli.write("c", "models: {}")]):
            done = cli(*args)
            assert done.returncode == 5, args
            assert done.stdout == ""
            (line,) = done.stderr.splitlines()
            assert line.startswith("llmgw: the store is not reachable at http://127.0.0.1:1, http://127.0.0.1:2: ")


def on_terminal(cli: Cli, *args: str, columns: int = 60, **env: str) -> bytes:
    """What a terminal of some width is sent."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [LLMGW, *args],
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=secondary,
        env={**cli.env, "TERM": "xterm-256color", **env},
    )
    os.close(secondary)
    seen = b""
    while True:
        try:
            part = os.read(primary, 4096)
        except OSError:  # the last writer closed it
            break
        if not part:
            break
        seen += part
    os.close(primary)
    assert process.wait(WAIT_S) == 0
    return seen


def test_h05_escape_codes_go_to_a_terminal_only_and_tables_fit_it(cli: Cli) -> None:
    name = "a-model-with-a-name-that-is-longer-than-the-terminal-is-wide-by-far"
    assert cli.apply(f"models: {{{name}: {OK}, m: {OK}}}\n").returncode == 0
    drawn = on_terminal(cli, "get", "models")
    assert b"\x1b[" in drawn
    for plain in (on_terminal(cli, "get", "models", NO_COLOR="1"), on_terminal(cli, "get", "models", TERM="dumb")):
        assert b"\x1b" not in plain
        lines = plain.decode().splitlines()
        assert len(lines) == 3
        assert all(len(line) <= 60 for line in lines)
    piped = cli("get", "models")
    assert "\x1b" not in piped.stdout
    assert name in piped.stdout


@pytest.mark.parametrize(
    "locale",
    [
        {"LANG": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["C", "ascii"],
)
def test_h05_unicode_names_in_any_locale(cli: Cli, locale: dict[str, str]) -> None:
    assert cli.apply(f"models: {{'{UNICODE}': {OK}}}\n").returncode == 0
    for args in (["get", "models"], ["get", "catalog"]):
        done = cli(*args, **locale)
        assert (done.returncode, done.stderr) == (0, ""), args
    done = cli("get", "models", "-o", "json", **locale)
    assert json.loads(done.stdout)[0]["name"] == UNICODE


def test_h05_control_characters_in_what_others_wrote_do_not_reach_a_terminal(cli: Cli) -> None:
    report = b'{"name":"m","wanted":1,"placed":0,"ready":0,"reason":"\\u001b[31mred\\u001b]0;title\\u0007"}'

    async def put(store: EtcdStore) -> None:
        await store.txn([], [PutOp(key=keys.key(Ref(Kind.MODEL_STATE, "m")), value=report)])

    cli.on_store(put)
    for args in (["get", "models"], ["status"], ["get", "models", "-o", "json"]):
        seen = on_terminal(cli, *args, NO_COLOR="1", columns=200)
        assert b"\x1b" not in seen
        assert b"\x07" not in seen
        assert b"red" in seen


# --- why, and what if -----------------------------------------------------------------------------------------------


def grown(cli: Cli) -> Cluster:
    """A cluster of three nodes and a model that has come to rest, written into the store as it is."""
    c = Cluster()
    for name in ("node-1", "node-2", "node-3"):
        c.node(name)
    c.settle()
    c.model("a", cpu_profile(9.0), replicas=2)
    c.settle()

    async def put(store: EtcdStore) -> None:
        for ref, row in c.index.rows():
            assert row.record is not None
            await store.txn([], [PutOp(key=keys.key(ref), value=encode_stored(row.record))])

    cli.on_store(put)
    return c


def test_explain_and_plan_only_read_and_fit_the_terminal(cli: Cli) -> None:
    c = grown(cli)
    before = cli.revision()
    node = c.replicas("a")[0].shards[0].node
    for args, code, said in (
        (["explain", "a"], 0, f"  claims    9 GB of memory on {node}\n"),
        (["explain", "aa"], 3, ""),
        (["plan", "--without", node], 0, f"{node} is gone\n"),
        (["plan", "--without", "node-1", "--without", "node-2"], 6, "the guard would hold: 2 of 3 nodes"),
        (["plan", "--without", "node-4"], 3, ""),
        (["plan", "-f", cli.write("c.yaml", f"models: {{b: {OK}}}\n"), "--prune"], 0, "the model was removed\n"),
    ):
        done = cli(*args)
        assert (done.returncode, said in done.stdout) == (code, True), (args, done)
        assert "Traceback" not in done.stderr
    drawn = on_terminal(cli, "explain", "a", columns=50)
    assert b"\x1b" not in drawn
    assert all(len(line) <= 50 for line in drawn.decode().splitlines())
    assert cli.revision() == before


# --- looking and watching -------------------------------------------------------------------------------------------


def test_watch_tells_changes_as_lines_of_json_until_it_is_interrupted(cli: Cli) -> None:
    process = cli.start("watch", "models", "--rev", str(cli.revision() + 1))
    assert process.stdout is not None
    assert cli.apply(f"models: {{m: {OK}}}\naliases: {{a: m}}\n").returncode == 0
    put = json.loads(process.stdout.readline())
    assert (put["type"], put["key"], put["value"]["source"]) == ("put", "/llmgw/spec/models/m", "x")
    assert cli.apply("models: {}\naliases: {}\n", "--prune").returncode == 0
    gone = json.loads(process.stdout.readline())
    assert gone == {"type": "delete", "key": put["key"], "mod_revision": put["mod_revision"] + 1, "value": None}
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, rest, told) == (130, b"", b"")


def test_raw_keys_as_etcdctl_shows_them(cli: Cli) -> None:
    assert cli.apply("engines: {vllm: {version: '1'}}\n").returncode == 0
    assert cli.apply("engines: {vllm: {version: '2'}, sglang: {version: '1'}}\n").returncode == 0
    key = "/llmgw/spec/engines/vllm"
    done = cli("get", key)
    assert done.stdout == f'{key}\n{{"name":"vllm","version":"2","source":"github"}}\n'
    item = json.loads(cli("get", key, "-o", "json").stdout)
    assert (item["value"]["version"], item["version"]) == ("2", 2)
    old = cli("get", key, "--rev", str(item["create_revision"]), "-o", "json")
    assert json.loads(old.stdout)["value"]["version"] == "1"
    assert cli("get", key, "--rev", "999999999").returncode == 4
    done = cli("get", "/llmgw/spec/")
    assert (done.returncode, done.stderr) == (3, "llmgw: no key named '/llmgw/spec/' (did you mean '--prefix'?)\n")
    found = json.loads(cli("get", "--prefix", "/llmgw/spec/engines/s", "-o", "json").stdout)
    assert [each["key"] for each in found] == ["/llmgw/spec/engines/sglang"]
    assert cli("get", "--prefix", "/llmgw/spec/enginesx").stdout == ""
    process = cli.start("watch", "--prefix", "/llmgw/spec/engines/v", "--rev", str(item["create_revision"]))
    assert process.stdout is not None
    lines = [process.stdout.readline().decode().strip() for _ in range(6)]
    assert lines[::3] == ["PUT", "PUT"]
    assert lines[1::3] == [key, key]
    assert [json.loads(line)["version"] for line in lines[2::3]] == ["1", "2"]
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 130
    process.communicate()


def test_an_operator_with_tls_and_a_password(start_etcd: Callable[..., Etcd], tmp_path: Path) -> None:
    etcd = start_etcd(tls=True, auth=True)
    assert etcd.certificates is not None
    assert etcd.passwords is not None
    cli, files = Cli(etcd, tmp_path), etcd.certificates
    options = ["--ca", str(files.ca), "--cert", str(files.client), "--key", str(files.client_key)]
    login = ["--user", "llmgw-operator", "--password-file", str(etcd.passwords / "llmgw-operator")]
    name = cli.write("catalog.yaml", f"models: {{m: {OK}}}\n")
    done = cli("apply", "-f", name, *options, *login)
    assert (done.returncode, done.stderr) == (0, "")
    assert cli("get", "models", "m", *options, *login).returncode == 0
    wrong = cli("get", "models", *options, *login[:3], cli.write("wrong", "hunter2\n"))
    assert wrong.returncode == 1
    assert "hunter2" not in wrong.stderr
    reader = ["--user", "llmgw-gateway", "--password-file", str(etcd.passwords / "llmgw-gateway")]
    denied = cli("apply", "-f", name, *options, *reader)
    assert denied.returncode == 1
    (line,) = denied.stderr.splitlines()
    assert "permission denied" in line
