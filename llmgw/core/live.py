"""What gateways tell of their load, and what a leader may conclude from it: records below `/llmgw-live/`, and samples.

These records decide nothing by themselves and lie outside the tree that controllers follow; they have a watcher of
their own, and losing it only means that nothing is known.

Invariant: unknown is not zero. A sample says of itself whether it is complete. Every gateway that told nothing lately,
can't be read, or was there a moment ago and is not any more makes it incomplete: then what it counts is a lower bound,
which may add replicas and never takes any away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from llmgw.core.record import Record
from llmgw.core.replica import ScaleCause
from llmgw.core.units import Now

LOAD_EVERY_S: Final = 10.0
"""How often a gateway writes its record, changed or not, seconds. A request for a model without any replica is written
at once."""

LOAD_STALE_S: Final = 60.0
"""A record not written for so long, by the reader's own clock, is not believed. Six times `LOAD_EVERY_S`."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class ModelLoad(Record, frozen=True, kw_only=True):
    """One model at one gateway.

    `in_flight`: requests that a replica works on. `queued`: requests that wait for one; those included that wait
    because there is none, and those that went to a fallback for that reason since the last writing. `idle_s`: since
    the end of the last request, by the gateway's monotonic clock; 0 while there are any, or where it does not say.
    """

    in_flight: Count = 0
    queued: Count = 0
    idle_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def requests(self) -> int:
        """All that are not over."""
        return self.in_flight + self.queued


class GatewayLoad(Record, frozen=True, kw_only=True):
    """`/llmgw-live/gateway/<id>`: one gateway, leased, rewritten every `LOAD_EVERY_S`.

    `models`: by name, each that has requests or had some within the last ten minutes; of one that is not here the
    gateway has nothing new to tell. `snapshot_age_s`: how old what it routes by is, None if it has nothing yet.
    `at`: when it was written, Unix seconds by the gateway's clock; for people, never judged.
    """

    gateway: str
    address: str = ""
    models: dict[str, ModelLoad] = {}
    snapshot_age_s: float | None = None
    at: float = 0.0


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's record as a reader has it. `load` None: it can't be read. `mono_s`: when it was last seen written."""

    load: GatewayLoad | None
    revision: int
    mono_s: float


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """One model at all gateways. `ended_mono_s`: when the last request ended, as far as they tell."""

    in_flight: int = 0
    queued: int = 0
    ended_mono_s: float = float("-inf")

    @property
    def requests(self) -> int:
        """All that are not over."""
        return self.in_flight + self.queued


NOTHING: Final = Total()


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """All gateways at one moment. `missing`: why it is not complete, empty when it is."""

    totals: Mapping[str, Total] = {}
    missing: str = ""

    @property
    def complete(self) -> bool:
        """Whether every gateway there is has its part in it."""
        return not self.missing


def take_sample(heard: Mapping[str, Heard], vanished: Mapping[str, float], *, now: Now, lost_after_s: float) -> Sample:
    """What the gateways' records say together.

    Args:
        heard: id -> record, of every gateway that has one.
        vanished: id -> when its record went (monotonic seconds). It may go on serving, cut off from the store, so it is
            missed for `lost_after_s`, as a node is.
        now: this moment.
        lost_after_s: after this, one that vanished is taken to be gone.
    """
    totals: dict[str, Total] = {}
    missing = "" if heard else "no gateway tells its load"
    for gateway, one in sorted(heard.items()):
        if one.load is None:
            missing = f"what gateway {gateway} tells can't be read"
        elif now.mono_s - one.mono_s > LOAD_STALE_S:
            missing = f"gateway {gateway} has told nothing for more than {LOAD_STALE_S:g} s"
        else:
            for model, load in one.load.models.items():
                before = totals.get(model, NOTHING)
                totals[model] = Total(
                    in_flight=before.in_flight + load.in_flight,
                    queued=before.queued + load.queued,
                    ended_mono_s=max(before.ended_mono_s, one.mono_s - load.idle_s),
                )
    for gateway, since_s in sorted(vanished.items()):
        if now.mono_s - since_s < lost_after_s:
            missing = f"gateway {gateway} was there a moment ago"
    return Sample(totals=totals, missing=missing)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one leader has seen of one model's load, and what it makes of it (`llmgw.core.autoscale.observe`).

    Moments are on its monotonic clock. `wanted`, `cause`: the advice, bounds apart. `load`: requests in the last
    sample; `target`: how many each replica is to have. `peaks`: (when, load), the highest loads of the window, each
    higher than those after it; zero is left out. `since_mono_s`: since when every sample was complete; None when the
    last was not. `idle_since_mono_s`: since when there has been no request; None while unknown, or at zero replicas.
    `unready_since_mono_s`: since when it should serve and does not; None when it does, or should not.
    """

    wanted: int
    cause: ScaleCause
    load: int
    target: float
    peaks: tuple[tuple[float, int], ...] = ()
    since_mono_s: float | None = None
    idle_since_mono_s: float | None = None
    unready_since_mono_s: float | None = None


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """What one leader has seen of all load; a new one may forget it, and then waits for a full window of its own.

    `models`: by name, those with a range to scale in. `missing`: as in the last `Sample`; None before the first.
    """

    models: Mapping[str, Seen] = {}
    missing: str | None = None
