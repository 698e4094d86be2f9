"""A worker, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType

from percolator.blocking.loop_thread import LoopCalls
from percolator.observers import worker as asynchronous
from percolator.observers.watched import Counters


class Worker:
    """Runs observers in the background. As a block, it ends with `stop`.

    >>> with db.run_observers([index, count]) as worker: ...
    """

    def __init__(self, loop_thread: LoopCalls, worker: asynchronous.Worker) -> None:
        self._loop_thread = loop_thread
        self._worker = worker

    def start(self) -> None:
        """Registers the observers, and returns when they are running."""
        self._loop_thread.call(self._worker.start, self._worker.stop)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and neither stopped nor ended by an error."""
        return self._worker.is_running

    @property
    def counters(self) -> Mapping[tuple[str, str], Counters]:
        """What the observers have done, by table and observer."""
        return self._worker.counters

    @property
    def backlog(self) -> Mapping[tuple[str, str], int]:
        """The number of cells known to be queued or running here, by table and observer."""
        return self._worker.backlog

    def stop(self, *, drain_seconds: float | None = None) -> bool:
        """Starts no more runs, lets those in progress finish, and gives up after `drain_seconds`.

        Returns whether all have finished. Nothing is lost either way: another worker, or the next
        one, finds what was not finished.
        """
        return self._loop_thread.call(partial(self._worker.stop, drain_seconds=drain_seconds))

    def wait(self) -> None:
        """Returns when the worker was stopped."""
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
