"""What is read from files, and read again when they change: certificates are renewed in operation.

Whoever opens a connection asks for the present ones; connections that stand are not looked at
again. Files are replaced one after the other, so for a moment they may not belong together: what
cannot be used is told, and the former ones hold until the files change once more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from percolator.errors import InvalidArgument

T = TypeVar("T")

_log = logging.getLogger(__name__)

_State = tuple[tuple[int, int, int] | None, ...]


class Renewal(Generic[T]):
    """For any thread: gRPC asks in threads of its own."""

    def __init__(self, read: Callable[[], T], paths: Sequence[str]) -> None:
        """`read` raises `InvalidArgument` for what it cannot use: here, too."""
        self._read = read
        self._paths = paths
        self._lock = threading.Lock()
        # Before they are read: what changes meanwhile is read once too often, and not never.
        self._seen = self._state()
        self._current = read()

    def current(self) -> T:
        """The same object as long as nothing has changed. Costs a `stat` of each file."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen = state
                try:
                    self._current = self._read()
                except InvalidArgument as error:
                    _log.error("the credentials cannot be renewed; the former ones hold: %s", error)
                else:
                    _log.info("credentials renewed")
            return self._current

    def _state(self) -> _State:
        return tuple(map(_state_of, self._paths))


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
