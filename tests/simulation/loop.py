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
from typing import Any, Protocol, TypeVar, TypeVarTuple

from percolator.errors import InvariantViolation
from tests.simulation.virtual_time import NothingLeftToHappen, VirtualTimeLoop

# Runs the first step of a coroutine before there is a task: often there is no second step.
#
# A server answers many calls without waiting, and creating an asyncio task costs more than such an
# answer. Only a coroutine that waits becomes a task, which continues where the first step stopped.


class _Beginning:
    """The result of `asyncio.current_task` in the first step: it stands for the later task."""

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def cancel(self, message: object = None) -> bool:
        return self.task is not None and self.task.cancel(message)

    def cancelling(self) -> int:
        return 0 if self.task is None else self.task.cancelling()

    def uncancel(self) -> int:
        return 0 if self.task is None else self.task.uncancel()


def take_first_step(
    loop: Any,  # a `Steps`, which asyncio does not know as a loop
    coroutine: Coroutine[Any, Any, None],
    context: contextvars.Context,
) -> asyncio.Task[None] | None:
    """Runs the coroutine until it waits. If anything is left then, a task continues with it.

    Called by a callback of the loop, not by a task.
    """
    beginning: Any = _Beginning()
    asyncio.tasks._enter_task(loop, beginning)
    try:
        waited = context.run(coroutine.send, None)
    except StopIteration:
        return None
    finally:
        asyncio.tasks._leave_task(loop, beginning)
    task: asyncio.Task[None] = loop.create_task(_Rest(coroutine, waited), context=context)
    beginning.task = task
    return task


class _Rest(Coroutine[Any, Any, None]):
    """The rest of a coroutine that has begun and waits: it first tells its task what it waits for.

    It is not a generator: since Python 3.12, asyncio does not accept generators as tasks.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], waited: object) -> None:
        self._coroutine = coroutine
        self._waited = waited

    def send(self, value: None) -> object:
        self._go_on()
        return self._waited

    def throw(self, *error: Any) -> object:  # as many forms as `raise` once had
        self._go_on()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise InvariantViolation("only a task may continue it")

    def _go_on(self) -> None:
        """From now on the task drives the coroutine itself, which is the fastest way."""
        self.send = self._coroutine.send  # type: ignore[method-assign, assignment]


# When a process is killed, its tasks are cancelled until they are gone. Their clean-up code does
# run, which a real `kill -9` would prevent. So everything that reaches outside (network, disks) has
# to be cut off from that code, and is expected to make it wait forever.

T = TypeVar("T")

ScheduledCall = (
    asyncio.Handle | tuple[Callable[..., object], tuple[Any, ...], contextvars.Context | None]
)
"""A step of the loop: asyncio's own kind, or one that cannot be cancelled."""

_CANCELLATIONS_MAX = 100
"""How often clean-up code may start waiting again before it counts as refusing to end."""
_TASKS_OF_LIFE_BEFORE_TIDYING = 64


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
        self._tasks_before_tidying = _TASKS_OF_LIFE_BEFORE_TIDYING
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
        if not self.alive:
            # A timer of a process that was killed: nobody else would ever end the task.
            self._loop.run_soon([(task.cancel, (), self.own_context)])
        if len(tasks) >= self._tasks_before_tidying:
            self._tasks = self.tasks()
            self._tasks_before_tidying = 2 * len(self._tasks) + _TASKS_OF_LIFE_BEFORE_TIDYING

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


def _register_of_tasks() -> Any:  # a weak set, one of whose methods is replaced
    """The set to which asyncio adds each task when it is started."""
    if sys.version_info >= (3, 12):
        # Except for eager tasks, which came with 3.12: a simulation has none.
        return asyncio.tasks._scheduled_tasks
    else:
        return asyncio.tasks._all_tasks  # type: ignore[attr-defined]


def _is_unheard(task: asyncio.Task[Any]) -> bool:
    """True if it has failed, and its exception has not been retrieved. asyncio would report that
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


# The time-outs of simulated calls, nearly all of which end long before.
#
# If each had a timer, these would fill most of a simulation's heap, where each step moves timers.
# So time-outs wait in slots of time. Only the calls that are still waiting when a slot begins get
# their own timers, for their exact instants.

_SLOTS_PER_SECOND = 4


class TimedCall(Protocol):
    """A call, as its time-out sees it."""

    is_over: bool
    context: contextvars.Context
    """The context of the time-out: while the caller is paused, no time passes for it."""

    def time_out(self) -> None: ...


class TimeOuts:
    """The time-outs of all calls of a simulation."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop
        self._slots: dict[int, list[tuple[float, TimedCall]]] = {}
        """The slots that have not begun, by number, counted from the beginning of time."""

    def set(self, when: float, call: TimedCall) -> None:
        """Calls `call.time_out()` at that instant, unless the call has ended before."""
        number = int(when * _SLOTS_PER_SECOND)
        slot = self._slots.get(number)
        if slot is not None:
            slot.append((when, call))
            return
        begin = number / _SLOTS_PER_SECOND
        if begin > self._loop.now:
            self._slots[number] = [(when, call)]
            self._loop.deliver_at(begin, self._begin, (number,))
        else:
            self._loop.deliver_at(when, call.time_out, (), call.context)

    def _begin(self, number: int) -> None:
        for when, call in self._slots.pop(number):
            if not call.is_over:
                self._loop.deliver_at(when, call.time_out, (), call.context)
