"""The commands about nodes as people and scripts meet them, on a real etcd without a controller."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from llmgw.cli.connection import read_index
from llmgw.cli.node_write import NODE_KINDS
from llmgw.config import EtcdConfig
from llmgw.core.catalog import NodeSpec
from llmgw.core.node import Facts, Liveness, NodeState, Session
from llmgw.core.record import Record, StoreMeta
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.store import keys
from llmgw.store.codec import encode_stored
from llmgw.store.etcd import open_etcd
from llmgw.store.port import PutOp
from llmgw.testing.etcd import Etcd

pytestmark = [pytest.mark.e2e, pytest.mark.etcd]

LLMGW = Path(sys.executable).with_name("llmgw")
WAIT_S = 60.0
"""Dead-line for anything awaited here, seconds."""


class Operator:
    """`llmgw` on one etcd, and a hand in what it stores."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.env = {**os.environ, "LLMGW_ETCD": etcd.endpoints[0], "LANG": "C.UTF-8"}

    def __call__(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end, with nobody to ask."""
        return subprocess.run(
            [LLMGW, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env=self.env,
            check=False,
            timeout=WAIT_S,
        )

    def put(self, *records: tuple[Kind, str, Record]) -> None:
        """Write records past everybody."""

        async def main() -> None:
            async with open_etcd(EtcdConfig(endpoints=self.etcd.endpoints)) as store:
                ops = [
                    PutOp(key=keys.key(Ref(kind, name)), value=encode_stored(record)) for kind, name, record in records
                ]
                await store.txn([], ops)

        anyio.run(main, backend="trio")

    def index(self) -> Index:
        """What is stored of nodes."""

        async def main() -> Index:
            async with open_etcd(EtcdConfig(endpoints=self.etcd.endpoints)) as store:
                return await read_index(store, (*NODE_KINDS, Kind.RECOVER))

        return anyio.run(main, backend="trio")


@pytest.fixture
def operator(etcd: Etcd) -> Operator:
    """Two nodes: one that is there and one that is away."""
    made = Operator(etcd)
    there = Session(
        node="here",
        boot_id="b1",
        data="8:1",
        lease=7,
        store="s",
        address="10.0.0.1",
        version="1",
        pid=1,
        started_at=0.0,
    )
    made.put(
        (Kind.META, "", StoreMeta(incarnation="s")),
        (Kind.FACTS, "here", Facts(node="here", boot_id="b1")),
        (Kind.SESSION, "here", there),
        (Kind.FACTS, "away", Facts(node="away", boot_id="b2")),
        (Kind.NODE_STATE, "away", NodeState(name="away", liveness=Liveness.UNREACHABLE, since_at=0.0, lease=9)),
    )
    return made


def test_a_cordon_and_its_end_change_nothing_else(operator: Operator) -> None:
    operator.put((Kind.NODE_SPEC, "here", NodeSpec(name="here", labels={"rack": "7"})))
    first = operator("cordon", "here", "away")
    assert (first.returncode, first.stdout) == (0, "here: cordoned\naway: cordoned\n")
    again = operator("cordon", "here")
    assert (again.returncode, again.stdout) == (0, "here: is cordoned already\n")
    assert operator.index().node_specs.record("here") == NodeSpec(name="here", labels={"rack": "7"}, cordon=True)
    assert operator("drain", "here").stdout == "here: draining\n"
    ended = operator("uncordon", "here", "away")
    assert (ended.returncode, ended.stdout.count("takes new replicas again")) == (0, 2)
    assert operator.index().node_specs.record("here") == NodeSpec(name="here", labels={"rack": "7"})


def test_an_unknown_node_changes_nothing_and_names_the_nearest(operator: Operator) -> None:
    for command in (["cordon"], ["uncordon"], ["drain"], ["guard", "release"]):
        done = operator(*command, "here", "awya")
        assert (done.returncode, done.stdout) == (3, "")
        assert "'away'" in done.stderr
    assert not operator.index().node_specs


def test_what_a_node_that_is_there_refuses(operator: Operator) -> None:
    for command in (["guard", "release", "here"], ["node", "forget", "here", "--yes"]):
        done = operator(*command)
        assert (done.returncode, done.stdout) == (4, "")
        assert "it has a session" in done.stderr
    assert not operator.index().node_specs


def test_a_release_speaks_of_the_session_that_was_last(operator: Operator) -> None:
    assert operator("guard", "release", "away").returncode == 0
    assert operator.index().node_specs.record("away") == NodeSpec(name="away", release=9)


def test_what_can_not_be_undone_wants_a_word_and_a_leader(operator: Operator) -> None:
    asked = operator("node", "forget", "away")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "--yes" in asked.stderr
    done = operator("node", "forget", "away", "--yes", "--timeout", "1")
    assert (done.returncode, done.stdout) == (6, "away: declared gone\n")
    assert "no controller leads" in done.stderr
    assert operator.index().facts.record("away") is not None


def test_recover_says_when_there_is_nothing_to_recover(operator: Operator) -> None:
    done = operator("recover")
    assert (done.returncode, "nothing waits" in done.stdout) == (0, True)
    assert operator.index().recover is None


def test_an_unreadable_word_on_a_node_is_left_for_people_to_repair(operator: Operator) -> None:
    async def spoil() -> None:
        async with open_etcd(EtcdConfig(endpoints=operator.etcd.endpoints)) as store:
            await store.txn([], [PutOp(key=keys.key(Ref(Kind.NODE_SPEC, "here")), value=b"{")])

    anyio.run(spoil, backend="trio")
    done = operator("cordon", "away", "here")
    assert (done.returncode, done.stdout) == (4, "")
    assert "/llmgw/spec/nodes/here can't be read" in done.stderr
    assert operator.index().node_specs.record("away") is None
