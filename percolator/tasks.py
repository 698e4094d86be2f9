"""Tasks that are kept until they end, and cancelled together.

The event loop holds only a weak reference to a task: if nothing else refers to a task, it may
vanish in the middle of its work. So tasks that their starter does not wait for are kept here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from percolator.errors import InvariantViolation, PercolatorError

_log = logging.getLogger(__name__)

T = TypeVar("T")

Failed = Callable[[asyncio.Task[Any], BaseException], None]


class Tasks:
    """Running tasks of one event loop."""

    def __init__(self, failed: Failed | None = None) -> None:
        """`failed` is called with every task that raises. Without it, the exception reaches the
        code that awaits the task; if none does, asyncio reports it."""
        self._failed = failed
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """The tasks in the order in which they began, in which they are also cancelled."""

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Starts a task. It may be awaited; with `outlasting` if it is to survive that caller."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def run_to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of the work. The work continues if this caller is cancelled.

        When a client gives up a call, the call's handler is cancelled. Use this for work that must
        not be cut in two by that.
        """
        return await outlasting(self.start(work))

    async def cancel(self) -> None:
        """Cancels all tasks, and waits for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def drain(self, seconds: float, *, cancelled_seconds: float | None = None) -> bool:
        """Waits for all tasks, and for those that they start, then cancels the rest.

        Waits at most `cancelled_seconds` for tasks that it has cancelled. Returns whether all
        tasks ended by themselves.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._tasks and loop.time() < deadline:
            await asyncio.wait(list(self._tasks), timeout=deadline - loop.time())
        late = list(self._tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=cancelled_seconds)
        return not late

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if self._failed is None or task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failed(task, error)


class NextTurn(Generic[T]):
    """Work that callers leave to one task, which begins in the next turn of the loop: one task for
    each of them would cost more than what most have to do."""

    def __init__(self) -> None:
        self._left: list[T] = []
        self._task: asyncio.Task[None] | None = None
        self._in_progress = 0

    def __len__(self) -> int:
        """How much is left or in progress, besides one for each task."""
        return self._in_progress + max(len(self._left) - 1, 0)

    def add(
        self, one: T, tasks: Tasks, work: Callable[[list[T]], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Returns the task, which does `work` for all that was left to it."""
        if self._task is None or self._task.done():  # done, if it was cancelled before it began
            self._task = tasks.start(self._run(work))
        self._left.append(one)
        return self._task

    async def _run(self, work: Callable[[list[T]], Coroutine[Any, Any, None]]) -> None:
        some, self._left, self._task = self._left, [], None
        self._in_progress += len(some) - 1
        try:
            await work(some)
        finally:
            self._in_progress -= len(some) - 1


async def outlasting(task: asyncio.Future[T]) -> T:
    """The result of a task that continues when this caller is cancelled."""
    try:
        if not task.done():
            # From Python 3.14 on, asyncio.shield reports a later failure of the task as a bug.
            await asyncio.wait([task])
        return task.result()
    except asyncio.CancelledError:
        stop_waiting_for(task)
        raise


def stop_waiting_for(task: asyncio.Future[Any]) -> None:
    """For the only caller that waits for this task, before it leaves without the result.

    If the task fails, no caller is left to hear of it: a cluster's error is only logged, and a
    bug is reported to the event loop's exception handler.
    """
    if task.done():
        _ended_unheard(task)
    else:
        task.add_done_callback(_ended_unheard)


def _ended_unheard(task: asyncio.Future[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    if isinstance(error, PercolatorError) and not isinstance(error, InvariantViolation):
        _log.debug("failed after its caller had left: %s", error)
        return
    text = "a task failed after its caller had left"
    task.get_loop().call_exception_handler({"message": text, "exception": error, "future": task})
