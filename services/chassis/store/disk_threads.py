"""Threads that wait for the disk, so that the event loop does not have to.

Waking a thread, and being woken by it, costs more than the rest of a small write. So all work that
the event loop asks for in one of its rounds is distributed together: each idle thread gets an equal
share, does it in order, and reports once. Work that arrives while all threads are busy waits, and
is distributed when the first thread is done. In this way many tablets cost few wake-ups.

A call may hang, on a mount that is gone or slow. If that must not hold up other calls, a share is
a single call (`share_max`), and when all threads have been stuck for a second, one more is
started, up to `threads_max`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

STUCK_SECONDS = 1.0
"""If no thread has reported for this long and calls are waiting, another thread is started."""

_CLOSE_SECONDS = 2.0
"""A thread that is stuck in a call is left behind. It is a daemon, and ends with the process."""

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_Result = tuple["asyncio.Future[Any]", Any, BaseException | None]


class DiskThreads:
    """A pool of threads. Belongs to the event loop that first asks for something."""

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        threads_max: int | None = None,
        share_max: int | None = None,
    ) -> None:
        """`threads_max` includes threads that replace stuck ones; None: they are not replaced."""
        self._name = name
        self._threads_max = threads_max or threads
        self._share_max = share_max
        self._waiting: deque[_Job] = deque()
        self._dealing = False
        self._idle = [_DiskThread(f"{name}-{number}") for number in range(threads)]
        self._threads = list(self._idle)
        self._reports = 0
        self._watching = False

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` in one of the threads; the future has its result, or its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._waiting.append((work, done))
        if self._idle:
            if not self._dealing:
                self._dealing = True
                # At the end of this round of the loop, so that all it asks for goes together.
                loop.call_soon(self._deal, loop)
        elif not self._watching and len(self._threads) < self._threads_max:
            self._watch(loop)
        return done

    def close(self) -> None:
        """Lets the threads end once they have done their work."""
        for thread in self._threads:
            thread.shares.put(None)
        patience_seconds = _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(patience_seconds)
            if thread.is_alive():
                # The others have had the same time.
                patience_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _deal(self, loop: asyncio.AbstractEventLoop) -> None:
        self._dealing = False
        while self._waiting and self._idle:
            share = -(-len(self._waiting) // len(self._idle))
            if self._share_max is not None:
                share = min(share, self._share_max)
            jobs = [self._waiting.popleft() for _ in range(share)]
            thread = self._idle.pop()
            thread.shares.put((jobs, loop, self._done))
        if self._waiting and not self._watching and len(self._threads) < self._threads_max:
            self._watch(loop)

    def _done(
        self,
        thread: _DiskThread,
        results: list[_Result],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._idle.append(thread)
        self._reports += 1
        for future, result, error in results:
            if future.done():
                # Its caller was cancelled and no longer waits for the result.
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        if self._waiting and not self._dealing:
            self._deal(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watching = True
        loop.call_later(STUCK_SECONDS, self._relieve, loop, self._reports)

    def _relieve(self, loop: asyncio.AbstractEventLoop, reports: int) -> None:
        self._watching = False
        if not self._waiting or self._idle:
            return
        if reports == self._reports:
            thread = _DiskThread(f"{self._name}-{len(self._threads)}")
            self._threads.append(thread)
            self._idle.append(thread)
            self._deal(loop)
        elif len(self._threads) < self._threads_max:
            self._watch(loop)


_Report = Callable[["_DiskThread", list[_Result], asyncio.AbstractEventLoop], None]
_Share = tuple[list[_Job], asyncio.AbstractEventLoop, _Report]


class _DiskThread(threading.Thread):
    """Does one share of work after another."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.shares: SimpleQueue[_Share | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (share := self.shares.get()) is not None:
            jobs, loop, report = share
            results = [_attempted(work, future) for work, future in jobs]
            try:
                loop.call_soon_threadsafe(report, self, results, loop)
            except RuntimeError:
                # The loop is closed: the process ended while this thread was stuck.
                return


def _attempted(work: Callable[[], Any], future: asyncio.Future[Any]) -> _Result:
    try:
        return future, work(), None
    except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
        return future, None, error
