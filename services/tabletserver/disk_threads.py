"""Threads that wait for the disk, so that the event loop need not.

Waking a thread, and being woken by it, costs more than the rest of a small write. So whatever the
event loop asked for in one of its rounds is dealt out together: each idle thread gets an equal
share, works it off in order, and reports once. What is asked for while all are busy waits, and is
dealt out when the first of them is done: many tablets cost few wake-ups.
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

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_Result = tuple["asyncio.Future[Any]", Any, BaseException | None]


class DiskThreads:
    """A fixed number of threads. Belongs to the event loop that first asks for something."""

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: deque[_Job] = deque()
        self._dealing = False
        self._idle = [_DiskThread(f"{name}-{number}") for number in range(threads)]
        self._threads = tuple(self._idle)

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` in one of the threads; the future has its result, or its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._waiting.append((work, done))
        if not self._dealing and self._idle:
            self._dealing = True
            # At the end of this round of the loop, so that all that it asks for goes together.
            loop.call_soon(self._deal, loop)
        return done

    def close(self) -> None:
        """Lets the threads end once they have done what they were given."""
        for thread in self._threads:
            thread.shares.put(None)
        for thread in self._threads:
            thread.join()

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
            jobs = [self._waiting.popleft() for _ in range(share)]
            thread = self._idle.pop()
            thread.shares.put((jobs, loop, self._done))

    def _done(
        self,
        thread: _DiskThread,
        results: list[_Result],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._idle.append(thread)
        for future, result, error in results:
            if future.done():
                # Its caller was cancelled: nobody waits for the answer any more.
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        if self._waiting and not self._dealing:
            self._deal(loop)


_Report = Callable[["_DiskThread", list[_Result], asyncio.AbstractEventLoop], None]
_Share = tuple[list[_Job], asyncio.AbstractEventLoop, _Report]


class _DiskThread(threading.Thread):
    """Works off one share after another."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.shares: SimpleQueue[_Share | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (share := self.shares.get()) is not None:
            jobs, loop, report = share
            results = [_attempted(work, future) for work, future in jobs]
            loop.call_soon_threadsafe(report, self, results, loop)


def _attempted(work: Callable[[], Any], future: asyncio.Future[Any]) -> _Result:
    try:
        return future, work(), None
    except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
        return future, None, error
