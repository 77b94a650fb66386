"""What the gateway counts, and how Prometheus is told. Plain integers on the data path, text only when asked.

Invariant: label values come from closed sets: models of the table in force, HTTP status codes (any odd one is `other`),
and words of this program. What a caller makes up never becomes a series, and what is unknown has no sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CLIENT_CLOSED: Final = "client_closed"
"""Outcome of a request whose client left before the answer was whole."""

CUT: Final = "cut"
"""Outcome of a request whose answer had begun and could not be finished."""

_CODES: Final = {status.value: str(status.value) for status in HTTPStatus}

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of both histograms: from a cached token to the longest answer."""


class Histogram:
    """Seconds, in buckets."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), as Prometheus wants them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class ModelFigures:
    """All that is counted of one model. `chunks`: pieces of streams, finished or cut."""

    __slots__ = ("chunks", "ejections", "first_byte", "in_flight", "probes", "requests", "retries", "seconds")

    def __init__(self) -> None:
        self.in_flight = 0
        self.chunks = 0
        self.ejections = 0
        self.probes = 0
        self.requests: dict[int | str, int] = {}
        self.retries: dict[str, int] = {}
        self.seconds = Histogram()
        self.first_byte = Histogram()

    def finished(self, outcome: int | str, seconds: float) -> None:
        """Count a request that is over: by its status, or a word of this program where that does not say it."""
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        histogram = self.seconds
        histogram.counts[bisect_left(BUCKETS_S, seconds)] += 1
        histogram.sum_s += seconds

    def retried(self, why: str) -> None:
        """Count one more try of a request; `why` is a word of this program."""
        self.retries[why] = self.retries.get(why, 0) + 1


def _by_code(counts: dict[int | str, int]) -> dict[str, int]:
    """Counts by label value: registered statuses and our own words as they are, odd statuses together."""
    found: dict[str, int] = {}
    for code, count in dict(counts).items():
        name = code if isinstance(code, str) else _CODES.get(code, "other")
        found[name] = found.get(name, 0) + count
    return found


class GroupGauge:
    """How a model's replicas are now."""

    __slots__ = ("ejected", "held", "queued", "ready")

    def __init__(self, *, ready: int, ejected: int, held: int, queued: int) -> None:
        self.ready = ready
        self.ejected = ejected
        self.held = held
        self.queued = queued


class Figures:
    """The counters of this process."""

    def __init__(self) -> None:
        self.models: dict[str, ModelFigures] = {}
        self.rejected: dict[int | str, int] = {}
        """Requests that never got as far as a model, by status code."""

    def of(self, model: str) -> ModelFigures:
        """The counters of `model`, which must come from the table."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelFigures()
        return found

    def reject(self, status: int) -> None:
        """Count a request refused before it was whole."""
        self.rejected[status] = self.rejected.get(status, 0) + 1

    def retain(self, names: Iterable[str]) -> None:
        """Forget models that the table no longer has, once nothing of theirs runs."""
        kept = set(names)
        self.models = {name: each for name, each in self.models.items() if name in kept or each.in_flight}


class Exposition:
    """The text for Prometheus, made in two steps: `gather` in the event loop, `text` in a thread."""

    def __init__(self, figures: Figures, groups: Callable[[], dict[str, GroupGauge]]) -> None:
        self._figures = figures
        self._groups = groups
        self.extra: list[Callable[[], Iterable[Metric]]] = []
        """More families, from other parts of the process."""

    def gather(self) -> list[Metric]:
        """What must be read in the event loop."""
        families = list(self._gauges(self._groups()))
        for each in self.extra:
            families += each()
        return families

    def text(self, gathered: list[Metric]) -> bytes:
        """Everything in Prometheus's text format. May run in a thread: it copies each table before it reads it."""
        models = dict(self._figures.models)
        rejected = counter("requests_rejected", "Requests refused before they were whole, by status.", "code")
        for code, count in _by_code(self._figures.rejected).items():
            rejected.add_metric([code], count)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*self._requests(models), *self._histograms(models), rejected, *gathered]))
        return generate_latest(registry)

    def _requests(self, models: dict[str, ModelFigures]) -> Iterator[Metric]:
        requests = counter("requests", "Requests that are over, by status or client_closed or cut.", "model", "code")
        retries = counter("retries", "Further tries before the first byte, by what made them due.", "model", "reason")
        chunks = counter("chunks", "Pieces of streams handed on, as engines framed them (tokens).", "model")
        ejections = counter("ejections", "Replicas taken out of rotation after faults.", "model")
        probes = counter("probes", "Connections made to see whether an ejected replica is back.", "model")
        for name, each in models.items():
            probes.add_metric([name], each.probes)
            for code, count in _by_code(each.requests).items():
                requests.add_metric([name, code], count)
            for why, count in dict(each.retries).items():
                retries.add_metric([name, why], count)
            chunks.add_metric([name], each.chunks)
            ejections.add_metric([name], each.ejections)
        yield from (requests, retries, chunks, ejections, probes)

    def _histograms(self, models: dict[str, ModelFigures]) -> Iterator[Metric]:
        seconds = HistogramMetricFamily(
            f"{PREFIX}_request_seconds", "From a whole request to the end of its answer.", labels=["model"]
        )
        first = HistogramMetricFamily(
            f"{PREFIX}_first_byte_seconds", "From a whole request to the first byte of its answer.", labels=["model"]
        )
        for name, each in models.items():
            seconds.add_metric([name], each.seconds.cumulative(), each.seconds.sum_s)
            first.add_metric([name], each.first_byte.cumulative(), each.first_byte.sum_s)
        yield from (seconds, first)

    def _gauges(self, groups: dict[str, GroupGauge]) -> Iterator[Metric]:
        in_flight = gauge("in_flight", "Requests that have begun and are not over.", "model")
        for name, each in self._figures.models.items():
            in_flight.add_metric([name], each.in_flight)
        queued = gauge("queued", "Requests that wait for a replica.", "model")
        held = gauge("held", "Requests whose client left while the engine goes on with them.", "model")
        replicas = gauge("replicas", "Routable replicas, by whether they are in rotation.", "model", "state")
        for name, now in groups.items():
            queued.add_metric([name], now.queued)
            held.add_metric([name], now.held)
            replicas.add_metric([name, "in_rotation"], now.ready)
            replicas.add_metric([name, "ejected"], now.ejected)
        yield from (in_flight, queued, held, replicas)


class _Families(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


PREFIX: Final = "llmgw_gateway"


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """An empty counter family of the gateway."""
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """An empty gauge family of the gateway."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
