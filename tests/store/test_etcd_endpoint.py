"""Everything wrong in the `etcd:` settings is said at once, and secrets stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from llmgw.config import EtcdConfig
from llmgw.errors import Denied, Invalid
from llmgw.store.etcd_endpoint import login, tls_context
from llmgw.testing.etcd import Certificates


def problems(settings: Mapping[str, Any]) -> list[str]:
    with pytest.raises(Invalid) as told:
        tls_context(EtcdConfig(**settings))
    return [str(problem) for problem in told.value.problems]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "127.0.0.1:2379",
            "etcd.endpoints[0]: '127.0.0.1:2379' is no http:// or https:// URL (did you mean 'http://127.0.0.1:2379'?)",
        ),
        ("ftp://h:1", "no http:// or https:// URL"),
        ("http://", "no http:// or https:// URL"),
        ("", "no http:// or https:// URL"),
        ("http://h:port", "is no URL"),
        ("http://h", "has no port (did you mean 'http://h:2379'?)"),
        ("http://h:1/v3", "has more than host and port (did you mean 'http://h:1'?)"),
        ("http://h:1?x=1", "has more than host and port"),
    ],
)
def test_endpoints(url: str, words: str) -> None:
    assert [words in problem for problem in problems({"endpoints": (url,)})] == [True]


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    (problem,) = problems({"endpoints": ("http://u:s3cret@h:1",)})
    assert "etcd.password_file" in problem
    assert "s3cret" not in problem


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    found = problems({"endpoints": ("x",), "ca": missing, "cert": missing, "user": "u", "read_timeout_s": 0.0})
    assert [problem.split(":", 1)[0] for problem in found] == [
        "etcd.endpoints[0]",
        "etcd.cert",
        "etcd.ca",
        "etcd.cert",
        "etcd.user",
        "etcd.read_timeout_s",
    ]
    assert f"can't read {missing}: No such file or directory" in found[2]
    assert problems({"endpoints": ()}) == ["etcd.endpoints: at least one URL is needed"]


def test_certificates(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    https = ("https://127.0.0.1:1",)
    good: dict[str, Any] = {
        "endpoints": https,
        "ca": str(made.ca),
        "cert": str(made.client),
        "key": str(made.client_key),
    }
    assert tls_context(EtcdConfig(**good)).cert_store_stats()["x509_ca"] == 1  # ours, and no other authority
    (plain,) = problems({**good, "endpoints": ("http://127.0.0.1:1",)})
    assert "plain HTTP" in plain
    (swapped,) = problems({**good, "key": str(made.server_key)})
    assert swapped.startswith("etcd.cert")
    (no_pem,) = problems({**good, "ca": str(made.client_key)})
    assert no_pem.startswith("etcd.ca")


def test_the_password_is_read_when_it_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "password"
    config = EtcdConfig(user="u", password_file=str(file))
    (missing,) = problems({"user": "u", "password_file": str(file)})
    assert "can't read" in missing
    who = login(config)
    assert who is not None
    file.write_text("s3cret \n")
    assert anyio.run(who.password).reveal() == "s3cret "  # only the newline goes
    assert "s3cret" not in repr(who)
    file.unlink()
    with pytest.raises(Denied, match=r"password_file .*No such file"):
        anyio.run(who.password)
    assert login(EtcdConfig()) is None
