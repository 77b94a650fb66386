"""What Prometheus is told: of living objects only, by the leader only, and nothing that is unknown."""

from dataclasses import dataclass, field

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llmgw.core.ids import Secret
from llmgw.core.live import LoadView, Seen
from llmgw.core.node import Facts, Fleet, Guard, Liveness, NodeState
from llmgw.core.record import Leader, Record
from llmgw.core.replica import Claim, EngineSecret, ModelState, Replica, ReplicaPhase, ReplicaShard, ScaleCause
from llmgw.core.snapshot import Change, Index, Kind, Ref
from llmgw.obs.metrics import registry
from llmgw.obs.status import ControllerStatus
from llmgw.store.port import StoreStats
from llmgw.testing.virtual import run_virtual


@dataclass
class Mirror:
    index: Index = field(default_factory=Index)
    ready: bool = True
    age_s: float | None = 1.5
    resets: dict[str, int] = field(default_factory=lambda: {"start": 1})


@dataclass
class Term:
    number: int = 7
    renewed_mono_s: float = -2.0


class Bench:
    def __init__(self) -> None:
        self.mirror = Mirror()
        leader = Leader(id="a", address="a:8800", version="1", pid=1)
        self.status = ControllerStatus(leader=leader, renew_within_s=5, term=Term(), mirror=self.mirror)
        self.registry = CollectorRegistry()
        self.registry = registry(self.status)

    def change(self, kind: Kind, name: str, record: Record | None, *, corrupt: str | None = None) -> None:
        revision = self.mirror.index.revision + 1
        one = Change(ref=Ref(kind, name), mod_revision=revision, record=record, corrupt=corrupt)
        self.mirror.index.apply([one], revision=revision)

    def scrape(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """llmgw's own samples: name -> labels -> number."""

        async def main() -> str:
            return generate_latest(self.registry).decode()

        text = run_virtual(main)
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("llmgw_"):
                    found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found


def replica(name: str, *, phase: ReplicaPhase = ReplicaPhase.READY, model: str = "m", node: str = "n0") -> Replica:
    return Replica(
        id=name,
        model=model,
        profile="cpu",
        engine="llama.cpp",
        launch="0",
        phase=phase,
        shards=(ReplicaShard(rank=0, node=node, claim=Claim(memory_bytes=10)),),
        created_at=0,
        phase_at=0,
    )


def state(name: str, *, liveness: Liveness = Liveness.READY) -> NodeState:
    return NodeState(name=name, liveness=liveness, since_at=0)


def facts(name: str, *, memory_bytes: int | None = 100, cpus: float | None = 4) -> Facts:
    return Facts(node=name, boot_id="b", memory_bytes=memory_bytes, cpus=cpus)


FLEET = ("llmgw_node", "llmgw_replica", "llmgw_model", "llmgw_guard")


def of_fleet(found: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> set[str]:
    return {name for name in found if name.startswith(FLEET)}


def test_h01_series_live_as_long_as_what_they_speak_of() -> None:
    bench = Bench()
    bench.change(Kind.NODE_STATE, "stays", state("stays"))
    bench.change(Kind.FACTS, "stays", facts("stays"))
    bench.status.writes["place"] = 3
    start = bench.scrape()
    for n in range(200):
        bench.change(Kind.NODE_STATE, f"n{n}", state(f"n{n}"))
        bench.change(Kind.FACTS, f"n{n}", facts(f"n{n}"))
    for n in range(500):
        bench.change(Kind.REPLICA, f"r{n}", replica(f"r{n}", node=f"n{n % 200}"))
        bench.change(Kind.MODEL_STATE, f"m{n}", ModelState(name=f"m{n}", wanted=1, placed=1, ready=1))
    for n in range(500):
        bench.change(Kind.REPLICA, f"r{n}", replica(f"r{n}", node=f"n{n % 200}", phase=ReplicaPhase.FAILED))
    full = bench.scrape()
    assert len(full["llmgw_replica_phase"]) == 500
    assert {(dict(labels)["phase"], number) for labels, number in full["llmgw_replica_phase"].items()} == {
        ("failed", 1)
    }
    assert len(full["llmgw_node_liveness"]) == len(full["llmgw_node_memory_bytes"]) == 201
    assert full["llmgw_replicas"] == {(("model", "m"), ("phase", "failed")): 500}
    for n in range(200):
        bench.change(Kind.NODE_STATE, f"n{n}", None)
        bench.change(Kind.FACTS, f"n{n}", None)
    for n in range(500):
        bench.change(Kind.REPLICA, f"r{n}", None)
        bench.change(Kind.MODEL_STATE, f"m{n}", None)
    assert bench.scrape() == start
    assert start["llmgw_controller_writes_total"] == {(("cause", "place"),): 3}


def test_h01_a_former_leader_exports_no_fleet() -> None:
    bench = Bench()
    bench.change(Kind.NODE_STATE, "n0", state("n0"))
    bench.change(Kind.REPLICA, "r0", replica("r0"))
    assert of_fleet(bench.scrape())
    bench.status.term = None
    found = bench.scrape()
    assert not of_fleet(found)
    assert "llmgw_controller_term" not in found
    assert found["llmgw_controller_leader"] == {(): 0}


def test_a_leader_that_has_read_nothing_yet_exports_no_fleet() -> None:
    bench = Bench()
    bench.mirror.ready = False
    assert not of_fleet(bench.scrape())


def test_what_is_unknown_has_no_sample() -> None:
    bench = Bench()
    bench.change(Kind.FACTS, "n0", facts("n0", memory_bytes=None, cpus=None))
    bench.mirror.age_s = None
    found = bench.scrape()
    assert "llmgw_node_memory_bytes" not in found
    assert "llmgw_node_cpus" not in found
    assert "llmgw_guard_on" not in found
    assert "llmgw_mirror_age_seconds" not in found


def test_what_cannot_be_has_no_sample() -> None:
    bench = Bench()
    bench.change(Kind.FACTS, "n0", facts("n0", memory_bytes=-5, cpus=-1))
    assert not {"llmgw_node_memory_bytes", "llmgw_node_cpus"} & bench.scrape().keys()


def test_the_fleet_in_numbers() -> None:
    bench = Bench()
    bench.change(Kind.NODE_STATE, "n0", state("n0"))
    bench.change(Kind.NODE_STATE, "n1", state("n1", liveness=Liveness.LOST))
    bench.change(Kind.FACTS, "n0", facts("n0"))
    bench.change(Kind.REPLICA, "r0", replica("r0"))
    bench.change(Kind.REPLICA, "r1", replica("r1", phase=ReplicaPhase.STARTING))
    bench.change(Kind.MODEL_STATE, "m", ModelState(name="m", wanted=3, placed=2, ready=1))
    bench.change(Kind.FLEET, "", Fleet(incarnation="1", guard=Guard(on=True, reason="x")))
    bench.change(Kind.ALIAS, "broken", None, corrupt="not JSON")
    found = bench.scrape()
    assert found["llmgw_node_memory_claimed_bytes"][(("node", "n0"),)] == 20
    assert found["llmgw_nodes"] == {
        (("liveness", "ready"),): 1,
        (("liveness", "unreachable"),): 0,
        (("liveness", "lost"),): 1,
        (("liveness", "returning"),): 0,
    }
    assert found["llmgw_model_wanted"] == {(("model", "m"),): 3}
    assert found["llmgw_model_ready"] == {(("model", "m"),): 1}
    assert found["llmgw_guard_on"] == {(): 1}
    assert found["llmgw_corrupt_records"] == {(("kind", "spec/aliases"),): 1}
    assert found["llmgw_controller_term"] == {(): 7}
    assert found["llmgw_controller_renewed_age_seconds"] == {(): 2}


def test_load_is_told_only_while_all_of_it_is_known() -> None:
    bench = Bench()
    seen = Seen(wanted=2, cause=ScaleCause.LOAD, load=7, target=4.0)
    assert not {"llmgw_load_known", "llmgw_model_load"} & bench.scrape().keys()
    bench.status.load = LoadView(models={"m": seen}, missing="")
    found = bench.scrape()
    assert found["llmgw_load_known"] == {(): 1}
    assert found["llmgw_model_load"] == {(("model", "m"),): 7}
    bench.status.load = LoadView(models={"m": seen}, missing="no gateway tells its load")
    found = bench.scrape()
    assert found["llmgw_load_known"] == {(): 0}
    assert "llmgw_model_load" not in found


def test_a_released_claim_is_not_counted() -> None:
    bench = Bench()
    shard = ReplicaShard(rank=0, node="n0", claim=Claim(memory_bytes=10), released=True)
    bench.change(Kind.FACTS, "n0", facts("n0"))
    bench.change(Kind.REPLICA, "r0", msgspec.structs.replace(replica("r0"), shards=(shard,)))
    assert bench.scrape()["llmgw_node_memory_claimed_bytes"] == {(("node", "n0"),): 0}


def test_the_stores_figures_are_passed_on() -> None:
    bench = Bench()
    stats = StoreStats(
        endpoint="http://user@host",
        calls=5,
        errors=4,
        rotations=3,
        logins=2,
        resyncs=0,
        watch_restarts=1,
        watch_progress_age_s=None,
    )
    bench.status.store = lambda: stats
    found = bench.scrape()
    assert found["llmgw_store_calls_total"] == {(): 5}
    assert found["llmgw_store_watch_restarts_total"] == {(): 1}
    assert "llmgw_store_watch_progress_age_seconds" not in found


@pytest.mark.parametrize("name", ['"} 1\nforged 1', "\\", "ü\u2028"])
def test_no_name_can_forge_a_sample(name: str) -> None:
    bench = Bench()
    bench.change(Kind.MODEL_STATE, name, ModelState(name=name, wanted=1, placed=1, ready=1))
    assert bench.scrape()["llmgw_model_ready"] == {(("model", name),): 1}


def test_no_secret_becomes_a_sample() -> None:
    bench = Bench()
    bench.change(Kind.SECRET, "r0", EngineSecret(replica="r0", key=Secret("canary")))

    async def main() -> bytes:
        return generate_latest(bench.registry)

    assert b"canary" not in run_virtual(main)
