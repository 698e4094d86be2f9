"""One event loop for many simulated processes, each of which can be paused and killed.

A context variable names the process: every task, timer and callback that its code starts inherits
it, so the loop knows to which process each step belongs. While a process is paused, its steps are
set aside in order, and all run when it resumes: late timers, late responses. Its code needs nothing
for this.

Steps run in the order in which they were scheduled, and timers of one instant in the order in which
they were set, so a run depends only on its seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from percolator.errors import InvariantViolation
from percolator.testing.simulator.simulated_life import CURRENT_LIFE, ScheduledCall
from percolator.testing.simulator.virtual_time import NothingLeftToHappen, VirtualTimeLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CANCELLED_TIMERS_MIN = 200
_NAMELESS = "simulation"
_TASKS_BEFORE_TIDYING = 256


class _Irrevocable(asyncio.Handle):
    """The handle of all steps that cannot be cancelled: those that drive tasks and futures."""

    def cancel(self) -> None:
        raise InvariantViolation("a step with a context of its own cannot be cancelled")


class SimulationLoop(VirtualTimeLoop):
    """A virtual-time loop that knows to which process a step belongs, and is several times faster
    than asyncio's."""

    _ready: deque[ScheduledCall]
    _stopping: bool

    get_debug = staticmethod(bool)
    """Always returns False. Every future calls it, and a built-in function is the fastest."""

    _asyncgen_firstiter_hook = staticmethod(callable)
    """Does nothing when an asynchronous generator begins. asyncio would keep it in a weak set, to
    close it at the very end, when the processes that iterate over it are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.paused_lives = 0
        self._timers: list[tuple[float, int, ScheduledCall]] = []
        self._timers_set = 0
        self._timers_cancelled = 0
        self._irrevocable = _Irrevocable(_nothing, (), self)
        self._tasks: list[asyncio.Task[Any]] = []
        """Tasks of this loop: all that are not done, all that failed and whose exception has not
        been retrieved, and some others."""
        self._tasks_before_tidying = _TASKS_BEFORE_TIDYING

    # ------------------------------------------------------------------ scheduling

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        life = CURRENT_LIFE.get() if context is None else context.get(CURRENT_LIFE)
        if name is None:
            # Without a name, asyncio would make one up, with a number.
            name = _NAMELESS if life is None else life.name
        task = asyncio.Task(coro, loop=self, name=str(name), context=context)
        if life is not None:
            life.adopt(task)
        if len(self._tasks) > self._tasks_before_tidying:
            self._tasks[:] = [one for one in self._tasks if not one.done() or _is_unheard(one)]
            self._tasks_before_tidying = 2 * len(self._tasks) + _TASKS_BEFORE_TIDYING
        return task

    @contextmanager
    def keeping_tasks(self) -> Iterator[None]:
        """While it is entered, new tasks are kept in a list of the loop, not in asyncio's weak set.

        That set is written in Python and runs twice for each task: a twentieth of a simulation's
        time. At the end, the tasks that are not done are added to it, so that they can be
        cancelled. Tasks that other threads start meanwhile, on their own loops, are also added
        only then.
        """
        register = _register_of_tasks()
        register.add = self._tasks.append
        try:
            yield
        finally:
            del register.add
            for task in self._tasks:
                if not task.done():
                    register.add(task)
                elif _is_unheard(task):
                    text = "a task's exception was never retrieved"
                    context = {"message": text, "exception": task.exception(), "future": task}
                    self.call_exception_handler(context)
            self._tasks.clear()

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if context is not None:
            self._ready.append((callback, args, context))
            return self._irrevocable
        handle = asyncio.Handle(callback, args, self)
        self._ready.append(handle)
        return handle

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
        self,
        when: float,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
        context: contextvars.Context | None = None,
    ) -> None:
        """Calls `callback` at that instant: the cheap kind of timer, which cannot be cancelled.

        Without a context it belongs to no process, so that it is always called: messages arrive
        in this way.
        """
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, (callback, arguments, context)))

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        """A future that is done after `seconds`: like `asyncio.sleep`, at a third of its cost."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self.deliver_at(self.now + seconds, _finish, (future,))
        return future

    def run_soon(self, steps: Iterable[ScheduledCall]) -> None:
        """Appends steps that were set aside."""
        self._ready.extend(steps)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by asyncio."""
        self._timers_cancelled += 1
        if self._timers_cancelled > max(_CANCELLED_TIMERS_MIN, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not _is_cancelled(timer[2])]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    # ------------------------------------------------------------------ running

    def _run_once(self) -> None:
        """Runs turn after turn until the loop is stopped. If nothing is ready, moves the clock."""
        ready, pop = self._ready, heapq.heappop
        while not self._stopping:
            timers = self._timers
            if not ready:
                # The first timer is nearly always one that cannot be cancelled.
                if not timers or type(timers[0][2]) is not tuple:
                    self._drop_cancelled()
                if timers[0][0] > self.now:
                    self.now = timers[0][0]
            now = self.now
            while timers and timers[0][0] <= now:
                ready.append(pop(timers)[2])
            for _ in range(len(ready)):
                step: Any = ready.popleft()
                if type(step) is tuple:
                    callback, arguments, context = step
                    if context is None:
                        callback(*arguments)
                        continue
                elif step._cancelled:
                    continue
                else:
                    callback, arguments, context = step._callback, step._args, step._context
                if self.paused_lives and self._is_held(step, context):
                    continue
                try:
                    context.run(callback, *arguments)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  # as asyncio does
                    text = f"{callback} failed"
                    self.call_exception_handler({"message": text, "exception": error})

    @staticmethod
    def _is_held(step: ScheduledCall, context: contextvars.Context) -> bool:
        """Sets the step aside if it belongs to a paused process."""
        life = context.get(CURRENT_LIFE)
        if life is None or not life.paused:
            return False
        life.held.append(step)
        return True

    def _drop_cancelled(self) -> None:
        """Drops cancelled timers at the head, so that time does not jump to them. Raises if no
        timer is left."""
        timers = self._timers
        while timers and _is_cancelled(timers[0][2]):
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if not timers:
            raise NothingLeftToHappen("every task waits, and no timer is set: a deadlock")


def _register_of_tasks() -> Any:  # noqa: ANN401  # a weak set, one of whose methods is replaced
    """The set to which asyncio adds each task when it is started."""
    if sys.version_info >= (3, 12):
        # Except for eager tasks, which came with 3.12: a simulation has none.
        return asyncio.tasks._scheduled_tasks
    else:
        return asyncio.tasks._all_tasks  # type: ignore[attr-defined]


def _is_unheard(task: asyncio.Task[Any]) -> bool:
    """Whether it has failed, and its exception has not been retrieved. asyncio would report that
    when the task is collected, and a simulation runs without a garbage collector."""
    return task._log_traceback


def _is_cancelled(step: ScheduledCall) -> bool:
    return isinstance(step, asyncio.Handle) and step.cancelled()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _nothing() -> None:
    """A callback that is never called."""


def run_simulation(main: Callable[[SimulationLoop], Coroutine[Any, Any, T]]) -> T:
    """Runs a simulation on a new loop, and cancels what it left running."""
    loop = SimulationLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, loop.keeping_tasks():
        return runner.run(main(loop))
