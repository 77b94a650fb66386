"""Fixtures for every test: real etcd, both async backends, and Hypothesis made to repeat itself."""

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest

from llmgw.testing import tiny_gguf
from llmgw.testing.etcd import Etcd

ROOT = Path(__file__).resolve().parents[1]

# A run in CI draws the same examples every time; `HYPOTHESIS_PROFILE=explore` draws new ones, and more.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
# `make soak-property`: as many as it is told, drawn from the seed it prints (scripts/soak_property.py).
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "2000"))
hypothesis.settings.register_profile("soak", deadline=None, max_examples=EXAMPLES, print_blob=True, database=None)
# `make mutants`: the examples of CI, and no time spent on making a failing one smaller.
MUTANTS = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("ci"), phases=MUTANTS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# What a shell starts in the background ignores Ctrl-C, and so would every process that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

StartEtcd = Callable[..., Etcd]


@functools.cache
def why_no_engine() -> str:
    """Why the engine wheel can't run on this machine; empty when it can."""
    argv = [str(ROOT / "scripts" / "setup"), "--check-engine"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stderr.strip()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of the real engine is skipped, with the reason, where the processor can't run it."""
    if item.get_closest_marker("engine") is not None and why_no_engine():
        pytest.skip(why_no_engine())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that the real engine loads in 50 ms (see llmgw.testing.tiny_gguf)."""
    [file] = tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_gguf.TinyModel())
    return file


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Tests marked `anyio` run on both; a module that is for one only overrides this fixture."""
    backend: str = request.param
    return backend


@pytest.fixture(scope="session")
def start_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEtcd]:
    """`start_etcd(members=1, tls=…, auth=…, options=…)` starts a cluster of one's own; ended with the session."""
    started: list[Etcd] = []

    def start(*, members: int = 1, tls: bool = False, auth: bool = False, options: Sequence[str] = ()) -> Etcd:
        etcd = Etcd(tmp_path_factory.mktemp("etcd"), members=members, tls=tls, auth=auth, options=options)
        started.append(etcd)
        return etcd

    yield start
    for etcd in started:
        etcd.close()


@pytest.fixture(scope="session")
def _etcd_of_session(start_etcd: StartEtcd) -> Etcd:
    return start_etcd()


@pytest.fixture(scope="session")
def _etcd3_of_session(start_etcd: StartEtcd) -> Etcd:
    return start_etcd(members=3)


@pytest.fixture
def etcd(_etcd_of_session: Etcd) -> Etcd:
    """One member, shared by the session, healthy and empty at the start of each test."""
    _etcd_of_session.heal()
    return _etcd_of_session


@pytest.fixture
def etcd3(_etcd3_of_session: Etcd) -> Etcd:
    """Three members, shared by the session, all healthy and empty at the start of each test."""
    _etcd3_of_session.heal()
    return _etcd3_of_session
