"""Fixtures for the store: etcd clusters that tell progress often, so that silence limits can be short."""

from collections.abc import Callable

import pytest

from llmgw.testing.etcd import Etcd

pytest.register_assert_rewrite(
    "llmgw.testing.conformance", "llmgw.testing.conformance_rig", "llmgw.testing.conformance_time"
)

OPTIONS = ("--", "--experimental-watch-progress-notify-interval", "300ms")
"""The later of two equal flags counts. With it a watch may be taken for dead after 2 s of silence."""


@pytest.fixture(scope="session")
def _lively3_of_session(start_etcd: Callable[..., Etcd]) -> Etcd:
    return start_etcd(members=3, options=OPTIONS)


@pytest.fixture
def lively3(_lively3_of_session: Etcd) -> Etcd:
    """Three members with short progress, shared by the session, all healthy and empty at the start of each test."""
    _lively3_of_session.heal()
    return _lively3_of_session
