"""The life of a simulated process: whose step is it, and may it run?

A killed process has its tasks cancelled until they are gone. Their clean-up code does run, which a
real `kill -9` would not let it; so whatever reaches outside (network, disks) must be dead to it,
and is expected to wait forever.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from percolator.errors import InvariantViolation
from percolator.testing.first_step import take_first_step

T = TypeVar("T")

Step = asyncio.Handle | tuple[Callable[..., object], tuple[Any, ...], contextvars.Context | None]
"""What a loop runs next: asyncio's own kind, or one that nobody can cancel."""

_CANCELLATIONS_MAX = 100
"""How often clean-up code may begin to wait anew before it counts as refusing to end."""
_TASKS_BEFORE_TIDYING = 64


class Steps(Protocol):
    """The loop, as a life needs it."""

    paused_lives: int

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, context: contextvars.Context
    ) -> asyncio.Task[T]: ...
    def run_soon(self, steps: Iterable[Step]) -> None: ...


class Life:
    """The steps of one process, from its start to its end."""

    def __init__(self, loop: Steps, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.held: deque[Step] = deque()
        """The steps put aside while paused."""
        self._loop = loop
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_before_tidying = _TASKS_BEFORE_TIDYING
        self._endings: list[Callable[[], None]] = []
        self.own_context = contextvars.Context()
        """Of steps that need no context of their own."""
        self.own_context.run(CURRENT_LIFE.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a coroutine as part of the process."""
        return self._loop.create_task(coroutine, context=self.own_context.copy())

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Runs a coroutine as part of the process, at once; a task if it waits for something.

        Called by the simulation itself, as by a message that arrives.
        """
        if self.paused:
            return self.spawn(coroutine)
        loop = self._loop
        task = take_first_step(loop, coroutine, self.own_context.copy())
        if task is not None and not self.alive:
            # It ended its own process, whose other tasks were cancelled before this was one.
            task.cancel()
        return task

    def context(self) -> contextvars.Context:
        """A context of its own for code that runs as part of the process."""
        return self.own_context.copy()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Called by the loop for each task that the process starts."""
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) >= self._tasks_before_tidying:
            self._tasks = self.tasks()
            self._tasks_before_tidying = 2 * len(self._tasks) + _TASKS_BEFORE_TIDYING

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those not done, in the order in which they were started."""
        return [task for task in self._tasks if not task.done()]

    def at_end(self, callback: Callable[[], None]) -> None:
        """Called at the very instant the process ends, before any of its clean-up code runs."""
        self._endings.append(callback)

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self._loop.paused_lives += 1

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self._loop.paused_lives -= 1
            self._loop.run_soon(self.held)
            self.held.clear()

    def end(self) -> None:
        """From this instant on the process has no effect on anything."""
        if not self.alive:
            return
        self.alive = False
        for callback in self._endings:
            callback()
        self.resume()
        for task in self.tasks():
            task.cancel()

    async def ended(self) -> None:
        """Returns when nothing of an ended process is left, at the same virtual instant."""
        quiet_turns = 0
        for _ in range(_CANCELLATIONS_MAX):
            tasks = self.tasks()
            quiet_turns = 0 if tasks else quiet_turns + 1
            if quiet_turns > 1:
                # What a task calls at its end is called a turn later, and may begin another one.
                return
            # Clean-up code may wait for something again, which will never come.
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
        names = ", ".join(str(task.get_coro()) for task in self.tasks())
        raise InvariantViolation(f"tasks of {self.name} refuse to be cancelled: {names}")


CURRENT_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar(
    "current_life", default=None
)
"""Whose code is running; None for the simulation itself."""
