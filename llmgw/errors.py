"""Every error llmgw raises on purpose, in families by what the caller can do about it.

The invariant: an error carries its facts as fields and builds its message from them, so that a log line, an exit code
and a test all read the same data. Foreign exceptions are translated into these at one place per adapter.
"""

from __future__ import annotations

from dataclasses import dataclass


class LlmgwError(Exception):
    """Root of all errors raised on purpose."""


# --- the store: what may the caller assume, and what may it do next? ------------------------------------------------


class StoreError(LlmgwError):
    """Something between us and the store went wrong."""


class Unavailable(StoreError):
    """The dead-line was spent without an answer that decides anything; retry with backoff."""


class NotApplied(Unavailable):
    """The store certainly did not do it (refused, no leader, too many requests): safe to retry elsewhere at once."""


class OutcomeUnknown(StoreError):
    """A write was sent and no answer came: it may have happened, or may still happen. Re-read; never retry blindly."""


class LeaseLost(StoreError):
    """The lease is gone, and with it every key that hung on it."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"lease {lease:x} is gone")


class Compacted(StoreError):
    """The asked revision is no longer in the store's history; list again and watch from there.

    `revision` is the compact revision the store named, 0 when it named none.
    """

    def __init__(self, revision: int) -> None:
        self.revision = revision
        super().__init__(f"history below revision {revision} is compacted")


class WentBack(StoreError):
    """A store answered with a revision or raft term below one already seen: a stale member, or a restored store."""

    def __init__(self, *, seen: int, got: int, what: str = "revision") -> None:
        self.seen, self.got, self.what = seen, got, what
        super().__init__(f"the store's {what} went back from {seen} to {got}")


class Denied(StoreError):
    """The store knows us and says no; retrying does not help, a person must change a role or a password."""


class TooLarge(StoreError):
    """A request breaks one of the store's limits; it never fits, so retrying is pointless.

    `limit` and `size` are in `unit`: bytes, compares or operations.
    """

    def __init__(self, *, what: str, size: int, limit: int, unit: str) -> None:
        self.what, self.size, self.limit, self.unit = what, size, limit, unit
        super().__init__(f"{what}: {size} {unit}, the limit is {limit}")


class CorruptRecord(StoreError):
    """A key holds something that is not a record of its kind. Never fatal, and never the same as absent."""

    def __init__(self, key: str, why: str) -> None:
        self.key, self.why = key, why
        super().__init__(f"{key}: {why}")


# --- leading --------------------------------------------------------------------------------------------------------


class Conflict(LlmgwError):
    """A compare failed: somebody else wrote first. Re-read and decide again."""


class LostTerm(Conflict):
    """This process no longer leads; stop leading at once."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"no longer leading: {why}")


class Outdated(Conflict):
    """What was decided rests on something that is not so any more, and our own view has missed it: list afresh."""


# --- people's input -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong in something a person wrote.

    Args:
        message: what is wrong, with the value, in one sentence.
        file: the file as the person named it; None when there is none (an argument, an environment variable).
        line: 1-based line in that file; None when unknown.
        path: where in the document, such as `models.gemma.profiles[0].engine`.
        nearest: the nearest thing that would have been right, None when nothing is near.
    """

    message: str
    file: str | None = None
    line: int | None = None
    path: str | None = None
    nearest: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        head = ": ".join(part for part in (place, self.path) if part)
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest is not None else ""
        return f"{head}: {self.message}{hint}" if head else f"{self.message}{hint}"


class Invalid(LlmgwError):
    """What a person wrote can't be used. Carries every problem found, not only the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class Refused(LlmgwError):
    """Valid, but not done: a concurrent apply, a deletion without --prune, the guard. `why` says what to do next."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Partial(LlmgwError):
    """Done in part, and what was done is valid by itself: `done` of `total` things, then `why` it ended."""

    def __init__(self, *, done: int, total: int, why: str) -> None:
        self.done, self.total, self.why = done, total, why
        super().__init__(f"{why} ({done} of {total} done)")


class NotFound(LlmgwError):
    """The named object does not exist; `nearest` is the closest name that does."""

    def __init__(self, kind: str, name: str, nearest: str | None = None) -> None:
        self.kind, self.name, self.nearest = kind, name, nearest
        hint = f" (did you mean {nearest!r}?)" if nearest is not None else ""
        super().__init__(f"no {kind} named {name!r}{hint}")


# --- ourselves ------------------------------------------------------------------------------------------------------


class InvariantError(LlmgwError):
    """A bug: one of the system's invariants does not hold. `number` is its number in ARCHITECTURE.md."""

    def __init__(self, number: int, what: str) -> None:
        self.number, self.what = number, what
        super().__init__(f"invariant {number}: {what}")
