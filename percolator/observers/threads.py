"""The threads in which blocking observers run: a bounded number, of which none is lost for good.

A thread cannot be stopped from outside. One whose run has taken too long is given up: it counts
against its observer until it comes back, which bounds how many there can be, and no longer against
the others, since another thread takes its place.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

_IDLE_SECONDS = 10.0
"""Then a thread ends; another one is started when it is needed."""


class TookTooLong(Exception):
    """The function has not returned by its deadline."""


class _Job:
    __slots__ = ("function", "future", "is_back", "is_given_up", "on_late_return")

    def __init__(self, function: Callable[[], object], future: asyncio.Future[None]) -> None:
        self.function = function
        self.future = future
        self.is_given_up = False
        self.is_back = False
        """The function has returned."""
        self.on_late_return: Callable[[], None] = _nothing


def _nothing() -> None:
    pass


class Threads:
    """Belongs to one event loop."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._places = asyncio.Semaphore(threads_max)
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        """Those that were not given up."""
        self._idle = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def call(
        self,
        function: Callable[[], object],
        seconds: float,
        on_late_return: Callable[[], None],
    ) -> None:
        """Returns when the function has. Raises what it raised, or `TookTooLong`.

        After the latter, `on_late_return` is called in the loop as soon as the function returns.
        Waiting for a thread does not count: others may have taken them all.
        """
        async with self._places:
            await self._call(_Job(function, self._loop.create_future()), seconds, on_late_return)

    async def _call(self, job: _Job, seconds: float, on_late_return: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._staff()
        try:
            done, _ = await asyncio.wait([job.future], timeout=seconds)
        except asyncio.CancelledError:
            self._give_up(job, _nothing)
            raise
        if not done:
            self._give_up(job, on_late_return)
            raise TookTooLong(f"it has not returned after {seconds:g} s")
        job.future.result()

    def _give_up(self, job: _Job, on_late_return: Callable[[], None]) -> None:
        with self._changed:
            if job in self._jobs:  # no thread has come to it
                self._jobs.remove(job)
                self._loop.call_soon(on_late_return)
                return
            job.is_given_up = True
            job.on_late_return = on_late_return
            if not job.is_back:
                self._threads -= 1
                self._staff()

    def _staff(self) -> None:
        """Sees to it that somebody comes to the last job, if the bound allows it."""
        if len(self._jobs) <= self._idle:
            self._changed.notify()
        elif self._threads < self._threads_max:
            self._threads += 1
            threading.Thread(target=self._serve, name="observer", daemon=True).start()

    def close(self) -> None:
        """Idle threads end; those that were given up, when they come back or with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ in the threads

    def _serve(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            error: BaseException | None = None
            try:
                job.function()
            except BaseException as problem:  # noqa: BLE001 - raised again in `call`
                error = problem
            with self._changed:
                job.is_back = True
                is_given_up = job.is_given_up
            try:
                self._loop.call_soon_threadsafe(_finish, job, error)
            except RuntimeError:  # the loop has ended, and nobody waits
                return
            if is_given_up:
                return  # another thread has taken this one's place

    def _next(self) -> _Job | None:
        with self._changed:
            self._idle += 1
            try:
                while not self._jobs:
                    # A job may come between the end of the wait and the return from it.
                    in_time = not self._closed and self._changed.wait(_IDLE_SECONDS)
                    if not in_time and not self._jobs:
                        self._threads -= 1
                        return None
                return self._jobs.popleft()
            finally:
                self._idle -= 1


def _finish(job: _Job, error: BaseException | None) -> None:
    """In the loop."""
    if job.is_given_up:
        job.on_late_return()
    elif error is None:
        job.future.set_result(None)
    elif isinstance(error, StopIteration):  # which no future can carry
        job.future.set_exception(RuntimeError("the observer raised StopIteration"))
    else:
        job.future.set_exception(error)
