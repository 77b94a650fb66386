"""A controller's metrics, computed from its status and its mirror at each scrape; nothing is kept between two scrapes.

So a series lives exactly as long as what it speaks of: a removed node is gone from the next scrape, and a controller
that stopped leading exports no fleet at all, which keeps sums over controllers right. What is unknown has no sample.
Labels are names of living objects and words of ours, never text from a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import anyio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmgw.core.inventory import node_inventory
from llmgw.core.live import LoadView
from llmgw.core.node import Liveness, credible
from llmgw.core.snapshot import Index
from llmgw.obs.status import ControllerStatus, StoreFigures

Sample = tuple[tuple[str, ...], float | None]
"""Label values, and the number; None: unknown."""


def registry(status: ControllerStatus) -> CollectorRegistry:
    """A registry of its own for one controller: its process, itself, its store and, while it leads, the fleet."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    made.register(ControllerCollector(status))
    return made


class ControllerCollector(Collector):
    """Everything llmgw knows, as of the scrape. `collect` must run in the controller's event loop."""

    def __init__(self, status: ControllerStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield from _controller(status, anyio.current_time())
        if status.store is not None:
            yield from store(status.store())
        if status.mirror is not None and status.mirror.ready:
            if status.term is not None:
                yield from fleet(status.mirror.index)
                yield from _load(status.load)
            corrupt = Counter(ref.kind.value.rstrip("/") for ref, _ in status.mirror.index.corrupt())
            yield _gauge("llmgw_corrupt_records", "Keys whose value can't be read.", ("kind",), _counts(corrupt))


def _controller(status: ControllerStatus, mono_s: float) -> Iterator[Metric]:
    term, mirror = status.term, status.mirror
    yield _gauge("llmgw_controller_leader", "1 while this controller leads.", (), [((), float(term is not None))])
    if term is not None:
        yield _gauge("llmgw_controller_term", "The term it leads.", (), [((), term.number)])
        age_s = mono_s - term.renewed_mono_s
        yield _gauge("llmgw_controller_renewed_age_seconds", "Since the last good keepalive.", (), [((), age_s)])
    yield _counter("llmgw_controller_terms", "Elections won.", (), [((), status.terms)])
    yield _counter("llmgw_controller_passes", "Passes, by what they did.", ("outcome",), _counts(status.passes))
    yield _counter("llmgw_controller_pass_seconds", "Time spent deciding.", (), [((), status.pass_s)])
    yield _counter("llmgw_controller_commits", "Plans, by what became of them.", ("outcome",), _counts(status.commits))
    yield _counter("llmgw_controller_writes", "Groups of writes landed.", ("cause",), _counts(status.writes))
    yield _counter("llmgw_controller_rejected", "Groups that fit no transaction.", (), [((), status.rejected)])
    if mirror is not None:
        yield _gauge("llmgw_mirror_ready", "1 once everything was listed.", (), [((), float(mirror.ready))])
        yield _gauge("llmgw_mirror_age_seconds", "Since the store's last word.", (), [((), mirror.age_s)])
        yield _counter("llmgw_mirror_resets", "Whole listings, by cause.", ("cause",), _counts(mirror.resets))


def store(figures: StoreFigures) -> Iterator[Metric]:
    """What a store tells of itself; the same names in every process."""
    for name, text, number in (
        ("calls", "Calls made.", figures.calls),
        ("errors", "Calls that failed.", figures.errors),
        ("rotations", "Changes to another endpoint.", figures.rotations),
        ("logins", "Logins.", figures.logins),
        ("watch_restarts", "Watches opened again.", figures.watch_restarts),
    ):
        yield _counter(f"llmgw_store_{name}", text, (), [((), number)])
    age_s = figures.watch_progress_age_s
    yield _gauge("llmgw_store_watch_progress_age_seconds", "Since the watch's last word.", (), [((), age_s)])


def fleet(index: Index) -> Iterator[Metric]:
    """Nodes, replicas and models, of the leader's mirror."""
    yield from _nodes(index)
    replicas = list(index.replicas.records())
    yield _gauge(
        "llmgw_replica_phase",
        "1 for the phase a replica is in.",
        ("replica", "model", "phase"),
        (((one.id, one.model, one.phase.value), 1) for one in replicas),
    )
    phases = Counter((one.model, one.phase.value) for one in replicas)
    yield _gauge("llmgw_replicas", "Replicas by model and phase.", ("model", "phase"), phases.items())
    states = list(index.model_states.records())
    for name, text, samples in (
        ("wanted", "Replicas a model should have.", [((one.name,), one.wanted) for one in states]),
        ("ready", "Replicas of a model that serve.", [((one.name,), one.ready) for one in states]),
    ):
        yield _gauge(f"llmgw_model_{name}", text, ("model",), samples)
    known = None if index.fleet is None else index.fleet.record
    yield _gauge(
        "llmgw_guard_on",
        "1 while mass loss is doubted and nobody is declared Lost.",
        (),
        [((), None if known is None else float(known.guard.on))],
    )


def _load(load: LoadView | None) -> Iterator[Metric]:
    """What was sampled of the models that follow their load. No sample for what is known in part: that is unknown."""
    known = load is not None and load.missing == ""
    seen = load.models if load is not None and known else {}
    yield _gauge(
        "llmgw_load_known",
        "1 while every gateway tells its load; else no replica is taken away.",
        (),
        [((), None if load is None else float(known))],
    )
    text = "Requests in flight and queued at all gateways, of a model that follows its load."
    yield _gauge("llmgw_model_load", text, ("model",), (((name,), each.load) for name, each in sorted(seen.items())))


def _nodes(index: Index) -> Iterator[Metric]:
    states = list(index.node_states.records())
    facts = list(index.facts.records())
    yield _gauge(
        "llmgw_node_liveness",
        "1 for what the leader makes of a node.",
        ("node", "liveness"),
        (((one.name, one.liveness.value), 1) for one in states),
    )
    counts = Counter(one.liveness for one in states)
    yield _gauge("llmgw_nodes", "Nodes by liveness.", ("liveness",), (((one.value,), counts[one]) for one in Liveness))
    yield _gauge("llmgw_node_cpus", "Cores of a node.", ("node",), (((one.node,), credible(one.cpus)) for one in facts))
    memory = (((one.node,), credible(one.memory_bytes)) for one in facts)
    yield _gauge("llmgw_node_memory_bytes", "Memory of a node.", ("node",), memory)
    yield _gauge(
        "llmgw_node_memory_claimed_bytes",
        "Memory of a node promised to replicas.",
        ("node",),
        (((node,), node_inventory(index, node).claimed_bytes) for node in index.nodes()),
    )


def _counts(numbers: Mapping[str, float]) -> list[Sample]:
    return [((name,), number) for name, number in sorted(numbers.items())]


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    return _fill(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    return _fill(CounterMetricFamily(name, text, labels=labels), samples)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for labels, number in samples:
        if number is not None:
            family.add_metric(labels, number)
    return family
