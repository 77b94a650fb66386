"""Ports on loopback for processes that tests start.

A port found free may be taken before the process binds it, or while it restarts. So a port is *held* here: bound, never
listening, with SO_REUSEADDR. A server that binds with SO_REUSEADDR too (Go, uvloop and Python's servers do) may listen
on it, and the kernel hands it to nobody else. Source: Linux, socket(7); tried on 6.18.
"""

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """One TCP port of 127.0.0.1, held until closed."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Lets go of the port."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
