"""What of the machine this agent, and so its engines, may use: the limits of its control groups, v1 and v2.

The machine's own figures are wrong inside a limited container or service: an engine sized by them is killed, or
crawls with too many threads. Source: kernel docs cgroup-v2.rst (memory.max, cpu.max), cgroup-v1/memory.rst, sched-bwc.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

UNLIMITED_BYTES: Final = 1 << 60
"""v1 writes a huge number for "no limit"; no machine has so much."""


class Cgroups:
    """The groups this process is in. `root`: where `/proc` and `/sys` are, another place in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._sys = root / "sys/fs/cgroup"
        self._paths: dict[str, str] = {}
        """Controller (empty for v2) -> path of our group in its hierarchy."""
        try:
            lines = (root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                self._paths[controller] = path

    def memory_bytes(self) -> int | None:
        """The lowest memory limit above this process; None when there is none."""
        limits = [_whole(text) for text in self._read("", "memory.max")]
        limits += [_whole(text) for text in self._read("memory", "memory.limit_in_bytes")]
        return min((limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES), default=None)

    def cpus(self) -> float | None:
        """The lowest CPU quota above this process, in CPUs; None when there is none."""
        limits = []
        for text in self._read("", "cpu.max"):
            quota, _, period = text.partition(" ")
            limits.append(_quota(quota, period))
        for quota, period in zip(
            self._read("cpu", "cpu.cfs_quota_us"), self._read("cpu", "cpu.cfs_period_us"), strict=False
        ):
            limits.append(_quota(quota, period))
        return min((limit for limit in limits if limit is not None), default=None)

    def oom_kills(self) -> int | None:
        """How many processes of our group the kernel has killed for memory; None when it does not say."""
        counts = []
        for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
            for text in self._read(controller, name, up=False):
                fields = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
                counts.append(_whole(fields.get("oom_kill", "")))
        return next((count for count in counts if count is not None), None)

    def _read(self, controller: str, name: str, *, up: bool = True) -> Iterator[str]:
        """The file in our group and, with `up`, in each above it, the innermost first."""
        path = self._paths.get(controller)
        if path is None:
            return
        for base in self._bases(controller):
            group = base / path.lstrip("/")
            # In a container the path may be the host's, and our group is what is mounted at the base.
            groups = [group, *group.parents] if group.is_dir() else [base]
            for directory in groups if up else groups[:1]:
                if not directory.is_relative_to(base):
                    break
                try:
                    yield (directory / name).read_text().strip()
                except OSError:
                    continue

    def _bases(self, controller: str) -> list[Path]:
        if not controller:
            return [self._sys / "unified", self._sys]
        names = [path for path in self._sys.glob("*") if controller in path.name.split(",")] if controller else []
        return names[:1]


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _quota(quota: str, period: str) -> float | None:
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)
