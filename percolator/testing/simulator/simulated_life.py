"""The life of a simulated process: which process does a step belong to, and may it run?

When a process is killed, its tasks are cancelled until they are gone. Their clean-up code does run,
which a real `kill -9` would prevent. So everything that reaches outside (network, disks) has to be
cut off from that code, and is expected to make it wait forever.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from percolator.errors import InvariantViolation
from percolator.testing.simulator.first_step import take_first_step

T = TypeVar("T")

ScheduledCall = (
    asyncio.Handle | tuple[Callable[..., object], tuple[Any, ...], contextvars.Context | None]
)
"""What a loop runs next: asyncio's own kind, or one that cannot be cancelled."""

_CANCELLATIONS_MAX = 100
"""How often clean-up code may start waiting again before it counts as refusing to end."""
_TASKS_BEFORE_TIDYING = 64


class Steps(Protocol):
    """The parts of the loop that a life needs."""

    paused_lives: int

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, context: contextvars.Context
    ) -> asyncio.Task[T]: ...
    def run_soon(self, steps: Iterable[ScheduledCall]) -> None: ...


class Life:
    """The steps of one process, from its start to its end."""

    def __init__(self, loop: Steps, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.held: deque[ScheduledCall] = deque()
        """The steps set aside while the process is paused."""
        self._loop = loop
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_before_tidying = _TASKS_BEFORE_TIDYING
        self._endings: list[Callable[[], None]] = []
        self.own_context = contextvars.Context()
        """The context of steps that need no separate one."""
        self.own_context.run(CURRENT_LIFE.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a coroutine as part of the process."""
        return self._loop.create_task(coroutine, context=self.own_context.copy())

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Runs a coroutine as part of the process, immediately. Returns a task if it waits.

        Called by the simulation itself, for example when a message arrives.
        """
        if self.paused:
            return self.spawn(coroutine)
        loop = self._loop
        task = take_first_step(loop, coroutine, self.own_context.copy())
        if task is not None and not self.alive:
            # It ended its own process, whose other tasks were cancelled before this became a task.
            task.cancel()
        return task

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task of the process because of a message that has arrived there.

        A paused process reads that message only when it goes on. Cancelling the task during the
        pause would also cancel the call it waits for, whose answer may arrive before the task has
        had its turn to give that call up.
        """
        if self.paused:
            self._loop.run_soon([(task.cancel, (), self.own_context)])
        else:
            task.cancel()

    def context(self) -> contextvars.Context:
        """A new context for code that runs as part of the process."""
        return self.own_context.copy()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Called by the loop for each task that the process starts."""
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) >= self._tasks_before_tidying:
            self._tasks = self.tasks()
            self._tasks_before_tidying = 2 * len(self._tasks) + _TASKS_BEFORE_TIDYING

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done, in the order in which they were started."""
        return [task for task in self._tasks if not task.done()]

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls it at the very instant the process ends, before any of its clean-up code runs."""
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
        """Ends the process: from this instant on it has no effect on anything."""
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
                # A task's done callbacks run one turn later, and may start another task.
                return
            # Clean-up code may wait again, for something that will never come.
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
        names = ", ".join(str(task.get_coro()) for task in self.tasks())
        raise InvariantViolation(f"tasks of {self.name} refuse to be cancelled: {names}")


CURRENT_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar(
    "current_life", default=None
)
"""The process whose code is running; None for the simulation itself."""
