"""deploy/etcd/start: what llmgw needs of etcd is in every command, and what would go wrong is refused first."""

import socket
import subprocess
from pathlib import Path

import pytest

from llmgw.testing.etcd import DEPLOY


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(DEPLOY / "start"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **environment},
    )


def command(*arguments: str, **environment: str) -> list[str]:
    done = start(*arguments, "--print", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def follows(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def fake_etcd(directory: Path, version: str) -> str:
    binary = directory / "etcd"
    binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    binary.chmod(0o755)
    return str(binary)


def test_every_member_compacts_prevotes_and_tells_progress() -> None:
    argv = command("--data", "/var/lib/x")
    assert argv[0].endswith("etcd")
    assert follows(argv, "--data-dir") == "/var/lib/x"
    assert follows(argv, "--auto-compaction-mode") == "periodic"
    assert follows(argv, "--auto-compaction-retention") == "10m"
    assert follows(argv, "--experimental-watch-progress-notify-interval") == "2s"
    assert "--pre-vote" in argv
    assert follows(argv, "--initial-cluster") == "m0=http://127.0.0.1:2380"


def test_progress_notify_has_another_name_from_3_6_on(tmp_path: Path) -> None:
    argv = command("--data", "x", "--etcd-bin", fake_etcd(tmp_path, "3.6.9"))
    assert follows(argv, "--watch-progress-notify-interval") == "2s"
    assert "--experimental-watch-progress-notify-interval" not in argv


def test_files_come_from_the_environment_too(tmp_path: Path) -> None:
    file = tmp_path / "pem"
    file.touch()
    argv = command(
        "--data",
        "x",
        "--client-url",
        "https://10.0.0.1:2379",
        LLMGW_ETCD_CERT=str(file),
        LLMGW_ETCD_KEY=str(file),
        LLMGW_ETCD_CA=str(file),
    )
    assert "--client-cert-auth" in argv
    assert follows(argv, "--trusted-ca-file") == str(file)


def test_arguments_after_two_dashes_are_etcds_own() -> None:
    done = start("--data", "x", "--print", "--", "--log-level", "info")
    assert done.stdout.splitlines()[-2:] == ["--log-level", "info"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data DIR is required"),
        (("--data",), "--data needs a value"),
        (("--data", "x", "--dat", "y"), "unknown option '--dat'"),
        (("--data", "x", "--cluster", "a=http://127.0.0.1:1"), "does not hold this member, m0=http://127.0.0.1:2380"),
        (("--data", "x", "--client-url", "http://10.0.0.1:2379"), "plain HTTP on a network"),
        (("--data", "x", "--peer-url", "http://10.0.0.1:2380"), "plain HTTP on a network"),
        (("--data", "x", "--client-url", "https://127.0.0.1:2379"), "give its certificate"),
        (("--data", "x", "--client-url", "127.0.0.1:2379"), "no http:// or https:// URL"),
        (("--data", "x", "--cert", "a"), "--cert and --key go together"),
        (("--data", "x", "--ca", "a"), "--ca needs --cert and --key"),
        (("--data", "x", "--peer-cert", "a", "--peer-key", "b"), "go together"),
        (("--data", "x", "--cert", "/none", "--key", "/none"), "can't read /none"),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str) -> None:
    done = start(*arguments, "--print")
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("version", ["3.3.25", "2.3.7", "4.0.0"])
def test_an_etcd_of_another_age_is_refused(tmp_path: Path, version: str) -> None:
    done = start("--data", "x", "--etcd-bin", fake_etcd(tmp_path, version), "--print")
    assert done.returncode == 2
    assert f"is version {version}" in done.stderr.replace("'", "")


def test_plain_http_on_a_network_can_be_allowed() -> None:
    argv = command("--data", "x", "--client-url", "http://10.0.0.1:2379", "--plaintext")
    assert follows(argv, "--advertise-client-urls") == "http://10.0.0.1:2379"


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = start("--data", str(tmp_path / "data"), "--client-url", url)
    assert done.returncode == 2
    assert f"something listens on {url.removeprefix('http://')} already; give another --client-url" in done.stderr
    assert not (tmp_path / "data").exists()
