"""`llmgw status`: what it says of models that follow their load."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from llmgw.core.catalog import Scaling
from llmgw.core.record import Recover, StoreMeta
from llmgw.core.snapshot import Kind
from llmgw.testing.cluster import Cluster, model_spec
from llmgw.testing.load import Loads


def test_a_model_that_sleeps_is_as_wanted_and_said_to_be_asleep(
    on: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    c = Cluster()
    c.node("n1")
    c.apply_model(msgspec.structs.replace(model_spec("sleeps"), scaling=Scaling(min=0, max=4)))
    c.apply_model(msgspec.structs.replace(model_spec("grows"), scaling=Scaling(min=1, max=4)))
    c.settle()
    assert on(c, "status") == 0
    assert "models    2 of 2 as wanted, 1 asleep\n" in capsys.readouterr().out
    loads = Loads(c)
    loads.tell({"sleeps": (0, 1)})
    c.step()
    assert on(c, "status") == 0
    out = capsys.readouterr().out
    assert "models    1 of 2 as wanted\n" in out
    assert "sleeps: 0/1 (0-4) ready\n" in out


def test_a_restored_store_names_the_nodes_it_waits_for(
    on: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    c = Cluster()
    for name in ("n1", "n2"):
        c.node(name)
    c.settle()

    def told() -> tuple[str, list[str] | None]:
        assert on(c, "status") == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("restored")]
        assert on(c, "status", "-o", "json") == 0
        return "".join(lines), json.loads(capsys.readouterr().out)["waiting_for"]

    assert told() == ("", None)
    c.meddle((Kind.META, "", StoreMeta(incarnation="store-2")))
    c.back("n1")
    says = "restored  nothing is placed, stopped or pruned before these nodes have reported:"
    assert told() == (f"{says} n2", ["n2"])
    c.meddle((Kind.RECOVER, "", Recover(incarnation="store-2")))
    assert told() == (f"{says} none any more", [])
    c.settle()
    assert told() == ("", None)
