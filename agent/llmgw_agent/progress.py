"""Whether an engine that loads gets on, as far as it can be seen from outside: what it writes and what it takes.

A load may take longer than anybody thought and still be well; one that hangs shows nothing. An engine's processor time
is no sign: a rank that waits in vain for its peers spins.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from llmgw_agent import enginelog, proc

MEMORY_STEP_BYTES: Final = 16 * 2**20
"""Growth of an engine's resident memory that counts. Answering our probes costs a llama-server a few MB at most."""


class Progress:
    """What was seen of one start of an engine, look by look."""

    def __init__(self) -> None:
        self._steps = 0
        self._log_end = 0
        self._memory_bytes = 0

    def look(self, logs: Path, pids: Iterable[int]) -> int:
        """Look at its log and the memory of its processes; returns how many looks so far have found something new."""
        self._log_end, wrote = enginelog.read_on(logs, self._log_end)
        memory_bytes = sum(proc.memory_bytes(pid) for pid in pids)
        grew = memory_bytes >= self._memory_bytes + MEMORY_STEP_BYTES
        if grew:
            self._memory_bytes = memory_bytes
        self._steps += wrote or grew
        return self._steps
