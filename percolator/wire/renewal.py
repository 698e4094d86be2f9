"""Reading files again when they change: certificates can be renewed without a restart.

Each new connection asks for the current content; existing connections are not checked again. Files
are replaced one after another, so for a moment they may not match each other: then the error is
logged, and the previous content stays in use until the files change once more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from percolator.errors import InvalidArgument

T = TypeVar("T")

_log = logging.getLogger(__name__)

FileState = tuple[int, int, int, int]
"""Differs from an earlier one if the file was replaced, or if its content, its owner or its
permissions have changed since."""


class Renewal(Generic[T]):
    """The content of some files, kept current. Thread-safe, since gRPC asks in its own threads."""

    def __init__(self, read: Callable[[], T], paths: Sequence[str]) -> None:
        """`read` raises `InvalidArgument` if the content is unusable, and so does this."""
        self._read = read
        self._paths = paths
        self._lock = threading.Lock()
        # Look at the files before reading them: a change in between then costs one extra read. The
        # other way round, it would go unnoticed.
        self._seen = self._state()
        self._current = read()

    def current(self) -> T:
        """The current content: the same object until a file changes. Costs one `stat` per file."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen = state
                try:
                    self._current = self._read()
                except InvalidArgument as error:
                    _log.error("cannot renew the credentials; keeping the previous ones: %s", error)
                else:
                    _log.info("credentials renewed")
            return self._current

    def _state(self) -> tuple[FileState | None, ...]:
        return tuple(map(_state_of, self._paths))


def file_state(path: str | Path) -> FileState:
    """The state of a file now. Raises `OSError`."""
    found = os.stat(path)
    # The change time, too: a file that could not be read may need nothing but a `chmod`.
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _state_of(path: str) -> FileState | None:
    try:
        return file_state(path)
    except (OSError, ValueError):
        return None
