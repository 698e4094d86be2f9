"""Collects what event loops report in a test: exceptions never retrieved, failed callbacks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_OF_GRPC = "PollerCompletionQueue._handle_events"
"""One poller of gRPC serves all event loops of a process, and may wake one that was closed just
now. That loop no longer has callers; the callback is gRPC's own. asyncio and uvloop name it
differently in the first line of a report."""


def _is_of_grpc(text: str) -> bool:
    first_line = text.partition("\n")[0]
    return first_line.startswith("Exception in callback") and _OF_GRPC in first_line


class _Reports(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if not _is_of_grpc(text):
            self.texts.append(text)


@contextmanager
def refused() -> Iterator[None]:
    """Fails if an event loop, in any thread, reports something to its default handler.

    A test whose subject is such a report sets its own exception handler.
    """
    reports = _Reports()
    loops = logging.getLogger("asyncio")
    outer, loops.handlers = loops.handlers, [reports]
    try:
        yield
        # The exception of a task in a reference cycle is reported when the task is freed. Only what
        # is new since the last test is looked through: all of it takes seconds in some modules.
        gc.collect(1)
    finally:
        loops.handlers = outer
    assert not reports.texts, "an event loop reported:\n" + "\n".join(reports.texts)
