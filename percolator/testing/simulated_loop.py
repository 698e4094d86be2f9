"""One event loop for many simulated processes, each of which can be paused and killed.

A process lives in a context variable: every task, timer and callback that its code starts inherits
it, so the loop knows whose turn each step is. While a process is paused its steps are put aside,
in order, and all run when it goes on: late timers, late answers. Nothing in its code takes part.

A killed process has its tasks cancelled until they are gone. Their clean-up code does run, which a
real `kill -9` would not let it; so whatever reaches outside (network, disks) must be dead to it,
and is expected to wait forever.

Steps run in the order in which they were scheduled, and timers of one instant in the order in which
they were set, so a run depends on its seed alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, TypeVarTuple

from percolator.errors import InvariantViolation
from percolator.testing.virtual_time import NothingLeftToHappen, VirtualTimeLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CANCELLED_TIMERS_MIN = 200
_CANCELLATIONS_MAX = 100
"""How often clean-up code may begin to wait anew before it counts as refusing to end."""


class Life:
    """The steps of one process, from its start to its end."""

    def __init__(self, loop: SimulationLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.held: deque[asyncio.Handle] = deque()
        """The steps put aside while paused."""
        self._loop = loop
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_before_tidying = 64
        self._endings: list[Callable[[], None]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a coroutine as part of the process."""
        return self._loop.create_task(coroutine, context=self.context())

    def context(self) -> contextvars.Context:
        """A context of its own for code that runs as part of the process."""
        context = contextvars.Context()
        context.run(CURRENT_LIFE.set, self)
        return context

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Called by the loop for each task that the process starts."""
        self._tasks.append(task)
        if len(self._tasks) >= self._tasks_before_tidying:
            self._tasks = self.tasks()
            self._tasks_before_tidying = 2 * len(self._tasks) + 64

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those not done, in the order in which they were started."""
        return [task for task in self._tasks if not task.done()]

    def at_end(self, callback: Callable[[], None]) -> None:
        """Called at the very instant the process ends, before any of its clean-up code runs."""
        self._endings.append(callback)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
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
        for _ in range(_CANCELLATIONS_MAX):
            tasks = self.tasks()
            if not tasks:
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


_Delivery = tuple[Callable[..., None], tuple[object, ...]]


def _is_cancelled(timer: asyncio.TimerHandle | _Delivery) -> bool:
    return not isinstance(timer, tuple) and timer.cancelled()


class SimulationLoop(VirtualTimeLoop):
    """A virtual-time loop that knows whose turn it is. Also several times faster than asyncio's."""

    _ready: deque[asyncio.Handle | _Delivery]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, int, asyncio.TimerHandle | _Delivery]] = []
        self._timers_set = 0
        self._timers_cancelled = 0

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        life = CURRENT_LIFE.get() if context is None else context.get(CURRENT_LIFE)
        if life is not None:
            life.adopt(task)
        return task

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        # Numbered, so that timers of one instant are never compared and keep their order.
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        timer._scheduled = True  # type: ignore[attr-defined]  # so that cancel() reports back
        return timer

    def deliver_at(
        self, when: float, callback: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        """Calls `callback` at that instant, as part of no process, and without fail.

        The cheap kind of timer, for messages: it cannot be cancelled and has no context.
        """
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, (callback, arguments)))

    def run_soon(self, handles: deque[asyncio.Handle]) -> None:
        """Appends steps that were put aside."""
        self._ready.extend(handles)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by asyncio. Most timers are time-outs of calls that were answered in time."""
        self._timers_cancelled += 1
        if self._timers_cancelled > max(_CANCELLED_TIMERS_MIN, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not _is_cancelled(timer[2])]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        """One turn: moves the clock if nothing is ready, then runs what is ready now."""
        ready = self._ready
        if not ready:
            self._jump()
        now = self._selector.now
        timers = self._timers
        while timers and timers[0][0] <= now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if type(handle) is tuple:
                callback, arguments = handle
                callback(*arguments)
                continue
            if handle._cancelled:
                continue
            life = handle._context.get(CURRENT_LIFE)
            if life is not None and life.paused:
                life.held.append(handle)
            else:
                handle._run()

    def _jump(self) -> None:
        timers = self._timers
        while timers and _is_cancelled(timers[0][2]):
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if timers:
            self._selector.now = max(self._selector.now, timers[0][0])
        elif not self._stopping:
            raise NothingLeftToHappen("every task waits, and no timer is set: a deadlock")


def run_simulation(main: Callable[[SimulationLoop], Coroutine[Any, Any, T]]) -> T:
    """Runs a simulation on a loop of its own, and cancels what it left running."""
    loop = SimulationLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
