"""A process's config: file, environment, command line; everything wrong at once; secrets from files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.config import (
    AgentConfig,
    ClientConfig,
    Config,
    ControllerConfig,
    GatewayConfig,
    load_config,
    read_secret,
    read_text,
    split_listen,
)
from llmgw.errors import Invalid

AGENT = "name: n1\ndata_dir: state\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def refused(file: Path, kind: type[Config], text: str, **env: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(Invalid) as told:
        load_config(file, kind, env=env)
    return [str(problem).removeprefix(f"{file}:") for problem in told.value.problems]


def test_later_wins_file_environment_option(file: Path) -> None:
    file.write_text("etcd: {endpoints: [http://file:1], read_timeout_s: 1.5}\nlisten: 127.0.0.1:1\n")
    options: dict[str, str | tuple[str, ...]] = {
        "etcd.endpoints": ("http://option:3", "http://option:4"),
        "listen": "127.0.0.1:2",
    }
    assert load_config(file, GatewayConfig, env={}).etcd.endpoints == ("http://file:1",)
    env = {"LLMGW_ETCD": "http://env:2, https://env:3"}
    config = load_config(file, GatewayConfig, env=env)
    assert config.etcd.endpoints == ("http://env:2", "https://env:3")
    assert config.etcd.read_timeout_s == 1.5
    config = load_config(file, GatewayConfig, env=env, overrides=options)
    assert config.etcd.endpoints == ("http://option:3", "http://option:4")
    assert config.listen == "127.0.0.1:2"


def test_an_empty_file_and_no_file_are_the_defaults(file: Path) -> None:
    file.write_text("# nothing\n")
    assert load_config(file, ControllerConfig, env={}) == ControllerConfig()
    assert load_config(None, ControllerConfig, env={}) == ControllerConfig()


def test_paths_are_relative_to_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    file.write_text(
        "name: n1\ndata_dir: state\nmodel_dirs: [models, /srv/models]\nlabels: {key: a, data_dir: b}\n"
        "engines: [{engine: llama.cpp, version: b1, binary: bin/llama-server}]\n"
    )
    config = load_config(file, AgentConfig, env={})
    here = file.parent
    assert config.data_dir == str(here / "state")
    assert config.model_dirs == (str(here / "models"), "/srv/models")
    assert config.engines[0].binary == str(here / "bin/llama-server")
    assert config.labels == {"key": "a", "data_dir": "b"}


def test_e01_unknown_keys_at_every_level(file: Path) -> None:
    found = refused(file, AgentConfig, AGENT + "lables: {}\netcd: {endpoint: []}\nengines:\n  - {enginee: x}\n")
    assert [line.rpartition("(did you mean ")[2] for line in found if "unknown key" in line] == [
        "'labels'?)",
        "'endpoints'?)",
        "'engine'?)",
    ]
    assert [line.split(":")[0] for line in found] == ["3", "4", "6", "6", "6", "6"]


def test_everything_wrong_at_once(file: Path) -> None:
    found = refused(
        file,
        AgentConfig,
        """
name: Node_1
data_dir: ~/x
etcd: {endpoints: [127.0.0.1:2379], user: me}
address: 0.0.0.0
listen: 127.0.0.1:99999
memory_gb: -1
share: 2
on_exit: kep
engine_ports: [21500, 20000]
gang_ports: [0, 10]
restart_backoff_s: -1
stable_s: 0
log_format: jsn
fabrics: [{name: ib0}, {name: ib0}, {name: IB, rate_gbps: 0}]
engines: [{engine: lama.cpp, version: '', binary: x}]
""",
    )
    assert [line.split(": ", 2)[:2] for line in found] == [
        ["2", "name"],
        ["3", "data_dir"],
        ["4", "etcd.endpoints[0]"],
        ["4", "etcd.user"],
        ["5", "address"],
        ["6", "listen"],
        ["7", "memory_gb"],
        ["8", "share"],
        ["9", "on_exit"],
        ["10", "engine_ports"],
        ["11", "gang_ports"],
        ["12", "restart_backoff_s"],
        ["13", "stable_s"],
        ["14", "log_format"],
        ["15", "fabrics[2].rate_gbps"],
        ["15", "fabrics[1].name"],
        ["15", "fabrics[2].name"],
        ["16", "engines[0].engine"],
        ["16", "engines[0].version"],
    ]


def test_what_is_missing_and_what_can_not_be_read(file: Path, tmp_path: Path) -> None:
    assert refused(file, AgentConfig, "labels: {}") == ["1: name: is missing", "1: data_dir: is missing"]
    with pytest.raises(Invalid, match="No such file or directory"):
        load_config(tmp_path / "none.yaml", AgentConfig, env={})
    with pytest.raises(Invalid, match="Is a directory"):
        load_config(tmp_path, AgentConfig, env={})
    file.write_bytes(b"name: n1\ndata_dir: \xff\n")
    with pytest.raises(Invalid, match=r"config\.yaml:2: is not UTF-8"):
        load_config(file, AgentConfig, env={})
    assert refused(file, AgentConfig, "- a") == ["1: must be a mapping (key: value), not a list of 1"]
    assert refused(file, AgentConfig, "a: [\n")[0].startswith("2: not YAML")


def test_a_bom_is_no_part_of_the_text(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfname: n1\n")
    assert read_text(file) == "name: n1\n"


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(Invalid, match="larger than"):
        read_text(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("margin_s: 2", "margin_s: 2 must be at least the store's call time-out, 3 s"),
        ("keepalive_s: 4", "keepalive_s: 4 must be at most (ttl_s - margin_s) / 2 = 3.5"),
        ("ttl_s: 0", "ttl_s: 0 must be more than zero"),
        ("address: nowhere", "address: 'nowhere' is not host:port"),
        ("listen: '8800'", "listen: '8800' is not host:port"),
    ],
)
def test_controllers(file: Path, text: str, says: str) -> None:
    assert any(says in line for line in refused(file, ControllerConfig, text))


def test_one_mistake_is_told_once(file: Path) -> None:
    says = "1: metrics_listen: 'nonsense' is not host:port"
    assert refused(file, GatewayConfig, "metrics_listen: nonsense\n") == [says]


def test_zero_where_it_means_something(file: Path) -> None:
    file.write_text("queue_max: 0\nqueue_wait_s: 0\n")
    assert load_config(file, GatewayConfig, env={}).queue_max == 0
    assert refused(file, GatewayConfig, "attempts_max: 0\n") == ["1: attempts_max: 0 must be more than zero"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "an endpoint is empty"),
        ("127.0.0.1:2379", "(did you mean 'http://127.0.0.1:2379'?)"),
        ("http://host", "names no port (did you mean 'http://host:2379'?)"),
        ("ftp://host:1", "is not a URL"),
        ("http://host:99999", "is not a URL"),
        ("http://host:1/v3", "something after the port (did you mean 'http://host:1'?)"),
        ("http://[::1", "is not a URL"),
    ],
)
def test_endpoints_of_the_environment(url: str, says: str) -> None:
    with pytest.raises(Invalid) as told:
        load_config(None, ClientConfig, env={"LLMGW_ETCD": url})
    (problem,) = told.value.problems
    assert problem.file == "LLMGW_ETCD"
    assert says in str(problem)


def test_e06_a_password_is_never_in_a_url_nor_in_the_error() -> None:
    with pytest.raises(Invalid) as told:
        load_config(None, ClientConfig, env={"LLMGW_ETCD": "http://me:hunter2@host:1"})
    assert "hunter2" not in str(told.value)
    assert "password_file" in str(told.value)


def test_encryption_asked_for_is_not_left_out(file: Path, tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("pem\n")
    found = refused(
        file, ControllerConfig, "etcd: {endpoints: [https://a:1, http://b:2], ca: ca, cert: cert, key: key}"
    )
    assert found == [
        "1: etcd.endpoints[1]: 'http://b:2' is not encrypted, although ca or cert is set (did you mean 'https://b:2'?)"
    ]
    found = refused(file, ControllerConfig, "etcd: {endpoints: [https://a:1], cert: cert}")
    assert found == ["1: etcd.cert: needs key as well"]


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file or directory"), (b"", "is empty"), (b"\n", "is empty"), (b"a\0b", "NUL")]
)
def test_e06_a_missing_or_empty_secret_file_is_an_error_that_names_it(
    file: Path, tmp_path: Path, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "pw").write_bytes(content)
    (problem,) = refused(file, GatewayConfig, "listen: 127.0.0.1:1\netcd: {user: me, password_file: pw}\n")
    assert problem.startswith(f"2: etcd.password_file: {tmp_path / 'pw'}: ")
    assert says in problem


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"a: b # c\n", "a: b # c"),
        (b"'quoted'", "'quoted'"),
        (b'"\n', '"'),
        (b" blank \n\n", " blank \n"),
        (b"x\r\n", "x"),
        (b"${X}$$\n", "${X}$$"),
        ("pä\n".encode(), "pä"),
    ],
)
def test_e06_a_secret_is_one_value_without_its_last_newline(tmp_path: Path, content: bytes, secret: str) -> None:
    (tmp_path / "pw").write_bytes(content)
    read = read_secret(tmp_path / "pw")
    assert read.reveal() == secret
    assert secret not in repr(read)


def test_e06_nothing_is_substituted(file: Path) -> None:
    file.write_text(AGENT + "labels: {a: '${HOME}', b: $$, c: $HOME}\n")
    assert load_config(file, AgentConfig, env={"HOME": "/h"}).labels == {"a": "${HOME}", "b": "$$", "c": "$HOME"}


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:8800", ("::1", 8800)),
        ("localhost:65535", ("localhost", 65535)),
        ("gpu-1.example.org:80", ("gpu-1.example.org", 80)),
    ],
)
def test_listen(listen: str, expected: tuple[str, int]) -> None:
    assert split_listen(listen) == expected


@pytest.mark.parametrize(
    "listen", ["", ":80", "host", "host:", "host:x", "host:65536", "::1:80", "[host]:80", "a b:1", "-:1"]
)
def test_listen_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r"host|port"):
        split_listen(listen)


def test_what_is_wrong_by_itself_in_an_agent(file: Path) -> None:
    found = refused(
        file,
        AgentConfig,
        "name: n1\ndata_dir: ''\naddress: a b\netcd: {endpoints: []}\nengine_ports: [20000, 21500]\n",
    )
    assert [line.split(": ", 2)[:2] for line in found] == [
        ["1", "gang_ports"],
        ["2", "data_dir"],
        ["3", "address"],
        ["4", "etcd.endpoints"],
    ]


def test_an_option_does_not_repair_what_is_no_mapping(file: Path) -> None:
    file.write_text("etcd: nonsense\n")
    with pytest.raises(Invalid, match="etcd: must be a mapping"):
        load_config(file, GatewayConfig, env={"LLMGW_ETCD": "http://a:1"})


def test_what_could_be_read_is_judged_beside_what_could_not(file: Path) -> None:
    text = "name: node 1\ndatadir: x\nengine_ports: [2, 1]\non_exit: kep\n"
    text += "engines:\n  - {engine: lama.cpp, versio: 1, binary: x}\n"
    assert [problem.split(": ")[1] for problem in refused(file, AgentConfig, text)] == [
        "data_dir",
        "name",
        "datadir",
        "engine_ports",
        "on_exit",
        "engines[0].versio",
        "engines[0].version",
        "engines[0].engine",
    ]
