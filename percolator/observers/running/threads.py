"""The threads in which blocking observers run: a bounded number, none of which is lost for good.

A thread cannot be stopped from outside. If a run takes too long, its thread is given up. Until it
returns, it counts against its own observer's concurrency, which bounds how many there can be. It no
longer counts against other observers, since another thread takes its place.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from percolator.observers.run_time import RunTime
from percolator.observers.running.time_limits import TookTooLong

_IDLE_SECONDS = 10.0
"""How long an idle thread is kept; another one is started when needed."""


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
    """A pool of threads that belongs to one event loop."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._places = asyncio.Semaphore(threads_max)
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        """Threads that have not been given up."""
        self._idle = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def call(
        self,
        function: Callable[[], object],
        seconds: float,
        on_late_return: Callable[[], None],
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Returns when the function has returned. Raises what it raised, or `TookTooLong`.

        `waited` returns the seconds so far that do not count.

        After `TookTooLong`, `on_late_return` is called in the loop once the function returns. Time
        spent waiting for a thread does not count, since others may be using all of them.
        """
        async with self._places:
            job = _Job(function, self._loop.create_future())
            await self._call(job, seconds, on_late_return, waited)

    async def _call(
        self,
        job: _Job,
        seconds: float,
        on_late_return: Callable[[], None],
        waited: Callable[[], float],
    ) -> None:
        with self._changed:
            self._jobs.append(job)
            try:
                self._staff()
            except RuntimeError:  # there is no room for another thread: the caller tries again
                self._jobs.remove(job)
                raise
        try:
            time = RunTime(seconds, waited)
            while not job.future.done() and (left := time.look_again_seconds()):
                await asyncio.wait([job.future], timeout=left)
        except asyncio.CancelledError:
            self._give_up(job, _nothing)
            raise
        if not job.future.done():
            self._give_up(job, on_late_return)
            raise TookTooLong(f"it did not return within {seconds:g} s")
        job.future.result()

    def _give_up(self, job: _Job, on_late_return: Callable[[], None]) -> None:
        with self._changed:
            if job in self._jobs:  # no thread has taken it yet
                self._jobs.remove(job)
                self._loop.call_soon(on_late_return)
                return
            job.is_given_up = True
            job.on_late_return = on_late_return
            if not job.is_back:
                self._threads -= 1
                with suppress(RuntimeError):  # no room for another thread: the next job tries again
                    self._staff()

    def _staff(self) -> None:
        """Makes sure that a thread takes the newest job, if the bound allows one."""
        if len(self._jobs) <= self._idle:
            self._changed.notify()
        elif self._threads < self._threads_max:
            threading.Thread(target=self._serve, name="observer", daemon=True).start()
            self._threads += 1  # not before: the machine may have no room for it

    def close(self) -> None:
        """Ends idle threads. Those that were given up end when they return, or with the process."""
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
            except RuntimeError:  # the loop has ended, so nothing waits for the result
                return
            if is_given_up:
                return  # another thread has taken this one's place

    def _next(self) -> _Job | None:
        with self._changed:
            self._idle += 1
            try:
                while not self._jobs:
                    # A job may arrive after the wait has timed out and before it returns.
                    in_time = not self._closed and self._changed.wait(_IDLE_SECONDS)
                    if not in_time and not self._jobs:
                        self._threads -= 1
                        return None
                return self._jobs.popleft()
            finally:
                self._idle -= 1


def _finish(job: _Job, error: BaseException | None) -> None:
    """Delivers the result of a job. Runs in the event loop."""
    if job.is_given_up:
        job.on_late_return()
    elif error is None:
        job.future.set_result(None)
    elif isinstance(error, StopIteration | KeyboardInterrupt):
        # No future can carry the first. The second was not Ctrl-C, which only the main thread gets,
        # and would end the event loop.
        job.future.set_exception(RuntimeError(f"the observer raised {type(error).__name__}"))
    else:
        job.future.set_exception(error)
