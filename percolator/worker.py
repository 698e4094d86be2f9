"""A worker, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType

from percolator.loop_thread import LoopCalls
from percolator.observers import worker as asynchronous
from percolator.observers.counters import Counters


class Worker:
    """Runs observers in the background. A block of it ends with `stop`.

    >>> with db.run_observers([index, count]) as worker: ...
    """

    def __init__(self, loop_thread: LoopCalls, worker: asynchronous.Worker) -> None:
        self._loop_thread = loop_thread
        self._worker = worker

    def start(self) -> None:
        """Registers the observers, and returns when they are being run."""
        self._loop_thread.call(self._worker.start)

    @property
    def counters(self) -> Mapping[tuple[str, str], Counters]:
        """What has been done, by table and observer."""
        return self._worker.counters

    @property
    def backlog(self) -> Mapping[tuple[str, str], int]:
        """What is known to wait or to be running here, by table and observer."""
        return self._worker.backlog

    def stop(self, *, drain_seconds: float | None = None) -> bool:
        """Begins nothing more, lets what runs end, and gives up the rest after `drain_seconds`.

        Whether everything has ended by itself. Nothing is lost either way: what was not finished is
        found by another worker, or by the next one.
        """
        return self._loop_thread.call(partial(self._worker.stop, drain_seconds=drain_seconds))

    def wait(self) -> None:
        """Returns when it was stopped."""
        self._loop_thread.call(self._worker.wait)

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
