"""What a controller knows of itself: written by its loop, read by its page, its health check and its metrics.

One object a process, owned by one event loop; readers see it between two steps of the loop and change nothing. It holds
facts and counters, no judgement: `unhealthy` is the one rule, and the health check's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from llmgw.core.live import LoadView
from llmgw.core.record import Leader
from llmgw.core.snapshot import Index, Kind, Ref

_NEEDED: Final = (Kind.META, Kind.HEAD, Kind.FLEET)
"""Records without which a leader decides nothing, or nothing about nodes."""


class Reign(Protocol):
    """A term that runs, as the election hands it out. Moments are on this process's monotonic clock."""

    @property
    def number(self) -> int:
        """The create revision of the election key."""
        ...

    @property
    def renewed_mono_s(self) -> float:
        """When the last good keepalive was sent."""
        ...


class Reflection(Protocol):
    """A mirror of `/llmgw/`."""

    @property
    def index(self) -> Index:
        """The decoded tree."""
        ...

    @property
    def ready(self) -> bool:
        """Whether there was a whole listing yet; until then an empty index means nothing."""
        ...

    @property
    def age_s(self) -> float | None:
        """Seconds since the store's last word, None before its first."""
        ...

    @property
    def resets(self) -> Mapping[str, int]:
        """How often everything was listed, by cause."""
        ...


class StoreFigures(Protocol):
    """What a store tells of itself: counters since start, and the age of its watch (None: nothing is watched)."""

    @property
    def calls(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def rotations(self) -> int: ...
    @property
    def logins(self) -> int: ...
    @property
    def watch_restarts(self) -> int: ...
    @property
    def watch_progress_age_s(self) -> float | None: ...


@dataclass(kw_only=True)
class ControllerStatus:
    """The state of one controller.

    `renew_within_s`: a leader whose last good keepalive is older is not renewing. `term` None: does not lead; `mirror`,
    `store` None: not connected yet. Counters are since the start of the process: `terms` won, `passes` by what they did
    (`wrote`, `idle`), `commits` by outcome (`landed`, `conflict`, `failed`), `rejected` groups that no transaction can
    hold, `writes` groups landed by cause. `pass_s`: seconds spent deciding, in all. `load`: what was sampled of the
    models' load in this term; None before the first sample, and while it does not lead.
    """

    leader: Leader
    renew_within_s: float
    term: Reign | None = None
    mirror: Reflection | None = None
    store: Callable[[], StoreFigures] | None = None
    terms: int = 0
    passes: dict[str, int] = field(default_factory=lambda: {"wrote": 0, "idle": 0})
    commits: dict[str, int] = field(default_factory=lambda: {"landed": 0, "conflict": 0, "failed": 0})
    writes: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    pass_s: float = 0.0
    load: LoadView | None = None

    def unhealthy(self, mono_s: float) -> str | None:
        """Why this controller needs attention at `mono_s`, None when it does not. A standby is healthy."""
        if self.term is None:
            return None
        age_s = mono_s - self.term.renewed_mono_s
        if age_s > self.renew_within_s:
            return f"leads, but its last good keepalive was {age_s:.1f} s ago (more than {self.renew_within_s:g} s)"
        for place in _NEEDED if self.mirror is not None else ():
            row = self.mirror.index.row(Ref(place)) if self.mirror is not None else None
            if row is not None and row.corrupt is not None:
                return f"leads, but can decide little: {place.value} can't be read ({row.corrupt})"
        return None
