"""The event loop behind the blocking API: one daemon thread per process, for all databases.

A blocking call goes to the loop and back, which costs about 40 µs, so calls are coarse. Threads
whose calls end in one turn of the loop are woken together, and their next calls are started
together (`Rounds`).

After `fork()`, the client cannot be used in the child: its thread does not exist there, and gRPC
does not survive a fork. Any use, and any new connection, raises `UsageError` there; nothing hangs.
A process that has not used the client may fork freely.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from percolator.aio.engine import Closes
from percolator.errors import UsageError
from percolator.process import new_event_loop

# ------------------------------------------------------------------ rounds of threads
# The event loop handles the calls of threads that it woke together in one go.
#
# A thread that gets its result often calls again at once: for a commit, or for the next
# transaction. Threads take turns at the interpreter, so their calls arrive one after another. If
# the loop looked at once, it would find one call, or three, and send them; their answers would wake
# just as few threads; and a call to a server costs as much as thirty rows. So the loop does not
# look before the threads that it has woken have called, or the time of the round is over.
#
# It only waits for threads that usually call in time: waiting for a thread that does something else
# first would cost the others that time again and again.

ROUND_SECONDS = 0.002
ROUND_SECONDS_PER_THREAD = 0.0001
"""How long a round may last: time for waking, and for each thread's turn at the interpreter."""
TRUSTED_AFTER = 4
"""The loop waits for a thread once this many of its calls in a row were in time."""


class Caller:
    """A thread that waits for each of its calls."""

    __slots__ = ("due", "in_time")

    def __init__(self) -> None:
        self.due = 0.0
        """Until when its next call is in time; 0 if it was not woken since its last call."""
        self.in_time = 0
        """How many of its calls in a row were in time."""


class Rounds:
    """The rounds of one event loop. Other threads read `missing`, and call `back`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start_calls: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        """`start_calls` is called when the time of a round is over. `now` is the time in seconds,
        for all threads: the loop's own may stand still while the loop waits."""
        self._loop = loop
        self._now = now
        self._start_calls = start_calls
        self.missing: set[Caller] = set()
        """Woken threads that the loop waits for. While there are any, it does not look."""
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_until = 0.0

    def begin(self, woken: Sequence[Caller], waiting: int) -> None:
        """Begins a round. Called before these are woken; `waiting` calls are already waiting."""
        until = self._until if self.missing else self._now() + ROUND_SECONDS
        until += len(woken) * ROUND_SECONDS_PER_THREAD
        for caller in woken:
            caller.due = until
        trusted = [caller for caller in woken if caller.in_time >= TRUSTED_AFTER]
        # The loop does not wait for a lone thread: its call could not be sent along with others.
        if trusted and (self.missing or len(trusted) + waiting > 1):
            self.missing.update(trusted)
            self._until = until
            self._set_timer()

    def back(self, caller: Caller) -> None:
        """Notes that a thread has called. Runs in that thread."""
        if caller.due:
            caller.in_time = caller.in_time + 1 if self._now() <= caller.due else 0
            caller.due = 0.0
        self.missing.discard(caller)

    def _set_timer(self) -> None:
        """Sets the timer. The last round's may still be set: most rounds end long before it."""
        if self._timer is not None:
            if self._timer_until <= self._until:
                return
            self._timer.cancel()
        self._timer_until = self._until
        self._timer = self._loop.call_later(self._until - self._now(), self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._timer = None
        if not self.missing:
            return
        if self._now() < self._until:
            self._set_timer()
            return
        self.missing.clear()
        self._start_calls()


R = TypeVar("R")
C = TypeVar("C", bound=Closes)

_log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 1.0
"""How long to wait for an interrupted call to end."""
EXIT_SECONDS = 10.0
"""How long a program that ends waits for background work."""


class Pending(Generic[R]):
    """A call that was sent to the loop."""

    __slots__ = (
        "_context",
        "_done",
        "_error",
        "_function",
        "_loop_thread",
        "_result",
        "_task",
        "_undo",
        "caller",
    )

    def __init__(
        self,
        loop_thread: LoopCalls,
        function: Callable[[], Awaitable[R]],
        caller: Caller | None,
        undo: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`caller` is given if it does nothing else until it has the result. `undo` runs after the
        call if its caller gives up: the call may just have ended, with a result that is lost."""
        self._loop_thread = loop_thread
        self._function = function
        self._task: asyncio.Task[None] | None = None
        self._undo = undo
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()  # `wait` acquires it again, which is cheaper than an Event
        # The loop would start it in the context of whichever thread has woken it.
        self._context = copy_context()
        self.caller = caller

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the call. Runs in the loop's thread."""
        self._task = loop.create_task(self._run(), context=self._context)

    async def _run(self) -> None:
        try:
            self._result = await self._function()
        except asyncio.CancelledError:
            self._error = UsageError("the call was cancelled")
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
            self._error = error
        finally:
            self._loop_thread.ended(self)

    def wake(self) -> None:
        """Wakes the caller."""
        self._done.release()

    def wait(self) -> R:
        """Waits for the result. Runs in the caller's thread."""
        try:
            self.wait_for_end()
        except BaseException:  # such as KeyboardInterrupt
            self.abandon()
            raise
        return self.result()

    def wait_for_end(self) -> None:
        """Returns when there is a result. Whoever is interrupted here gives the call up."""
        self._done.acquire()
        self._done.release()

    def result(self) -> R:
        """The result, or the error, of a call that has ended."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # otherwise its traceback keeps this frame and all its callers' alive
        result: R = self._result
        return result

    def abandon(self) -> None:
        """Gives up the call, and waits a moment for its end. Runs in the caller's thread.

        It waits so that the code that handles the interrupt finds, for instance, a transaction that
        has an outcome.
        """
        has_ended = threading.Event()

        async def give_up() -> None:
            await self.cancel()
            has_ended.set()
            if self._undo is not None:
                await self._undo()

        self._loop_thread.start_and_forget(give_up)
        has_ended.wait(GIVE_UP_SECONDS)

    async def cancel(self) -> None:
        """Cancels the call, and returns when it has ended. Runs in the loop's thread."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


class LoopCalls:
    """Calls into an event loop from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ident: int | None) -> None:
        """`ident` is the ident of the thread in which the loop runs."""
        self._forks = _forks
        self._loop = loop
        self._ident = ident
        self._calls: deque[Pending[Any]] = deque()
        self._woken = False
        self._ended: list[Pending[Any]] = []
        """Calls that have ended, and whose callers are still to be woken."""
        self._rounds = Rounds(loop, self._start_all, time.monotonic)
        self._of_thread = threading.local()

    def start(self, function: Callable[[], Awaitable[R]]) -> Pending[R]:
        """Starts an asynchronous call. Call `wait` on the result later."""
        self.require_usable()
        pending = Pending(self, function, None)
        try:
            self._enqueue(pending)
        except BaseException:  # an interrupt: the loop has it, or finds it with the next call
            pending.abandon()
            raise
        return pending

    def call(
        self,
        function: Callable[[], Awaitable[R]],
        undo: Callable[[], Awaitable[object]] | None = None,
    ) -> R:
        """Runs an asynchronous call to its end, and returns its result. If the caller is
        interrupted, `undo` follows, whatever has been done by then."""
        caller: Caller | None = getattr(self._of_thread, "caller", None)
        if caller is None:
            caller = self._of_thread.caller = Caller()
        self.require_usable()
        pending = Pending(self, function, caller, undo)
        try:
            self._enqueue(pending)
            pending.wait_for_end()
        except BaseException:  # an interrupt: wherever it comes, the call may run already
            pending.abandon()
            raise
        return pending.result()

    def open(self, start: Callable[[], Awaitable[C]]) -> C:
        """Opens something by an asynchronous call. It is closed if the caller is interrupted."""
        opened: list[C] = []

        async def call() -> C:
            opened.append(await start())
            return opened[0]

        async def undo() -> None:
            for one in opened:
                await one.close()

        return self.call(call, undo)

    def _enqueue(self, pending: Pending[Any]) -> None:
        self._calls.append(pending)
        if pending.caller is not None:
            self._rounds.back(pending.caller)
        if not self._woken and not self._rounds.missing:
            try:
                self._woken = True
                self._loop.call_soon_threadsafe(self._look)
            except BaseException:
                self._woken = False  # otherwise, after an interrupt here, the loop is never woken
                raise

    def iterate(
        self,
        pages: AsyncGenerator[R, None],
        *,
        ahead: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> Generator[R, None, None]:
        """Yields pages. With `ahead`, each is fetched while the previous one is used. Without,
        `check` is called before each request but the first.
        """

        async def next_page() -> R | _NoMore:
            return await anext(pages, _NO_MORE)

        page = self.start(next_page)
        try:
            while not isinstance(found := page.wait(), _NoMore):
                if ahead:
                    page = self.start(next_page)
                    yield found
                else:
                    yield found
                    check()
                    page = self.start(next_page)
        finally:
            last_page = page

            async def stop() -> None:
                await last_page.cancel()
                await pages.aclose()

            self.start_and_forget(stop)

    def start_and_forget(self, function: Callable[[], Awaitable[None]]) -> None:
        """Starts a call for cleaning up, from anywhere: Python's garbage collector may find a scan
        that was left while it runs in the loop's own thread. Does nothing if the loop has ended."""
        if self._forks == _forks and self._is_alive():
            self._enqueue(Pending(self, function, None))

    def _look(self) -> None:
        self._woken = False  # before looking, so that later calls wake the loop again
        if not self._rounds.missing:  # otherwise the last of them, or the timer, wakes the loop
            self._start_all()

    def _start_all(self) -> None:
        calls = self._calls
        while calls:
            calls.popleft().start(self._loop)

    def ended(self, pending: Pending[Any]) -> None:
        """Notes that a call has ended. Runs in the loop's thread."""
        if not self._ended:
            self._loop.call_soon(self._wake_all)
        self._ended.append(pending)

    def _wake_all(self) -> None:
        """Wakes all callers, one turn later: if woken earlier, they compete with the loop for the
        interpreter."""
        ended, self._ended = self._ended, []
        woken = [pending.caller for pending in ended if pending.caller is not None]
        self._rounds.begin(woken, len(self._calls))
        for pending in ended:
            pending.wake()

    def require_usable(self) -> None:
        if self._forks != _forks:
            raise UsageError(FORKED)
        if threading.get_ident() == self._ident:
            raise UsageError(
                "a blocking call inside the client's own event loop would never return"
            )
        if not self._is_alive():
            raise UsageError("the program is ending")

    def _is_alive(self) -> bool:
        """True if a call would run."""
        return not self._loop.is_closed()


class Leaves(Protocol):
    """An object of the asyncio API, which is used as a block."""

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Awaitable[object]: ...


A = TypeVar("A", bound=Leaves)


class Wrapper(Generic[A]):
    """An object of the asyncio API, for threads."""

    def __init__(self, loop_thread: LoopCalls, asynchronous: A) -> None:
        self._loop_thread = loop_thread
        self._asynchronous = asynchronous

    def _check(self) -> None:
        """Checks a call before it is made: some never reach the event loop and its checks."""
        self._loop_thread.require_usable()

    def _call(self, function: Callable[[], Awaitable[R]]) -> R:
        self._check()
        return self._loop_thread.call(function)

    def call_inside(
        self,
        body: Callable[..., Awaitable[R]],
        *arguments: Any,  # noqa: ANN401 - the body's
        **keywords: Any,  # noqa: ANN401 - the body's
    ) -> R:
        """Runs a coroutine function with the asynchronous namesake of this, in one trip to the
        loop. For other parts of the library: the body must not block."""
        return self._call(partial(body, self._asynchronous, *arguments, **keywords))

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop_thread.call(partial(self._asynchronous.__aexit__, kind, error, traceback))


class LoopThread(LoopCalls):
    """A thread with a running event loop."""

    def __init__(self) -> None:
        super().__init__(new_event_loop(), None)
        self._running = True
        self._thread = threading.Thread(target=self._run, name="percolator", daemon=True)
        self._thread.start()
        self._ident = self._thread.ident
        self._closing: dict[object, Callable[[], Awaitable[None]]] = {}
        atexit.register(self._at_exit)

    def _run(self) -> None:
        try:
            while not self._run_until_stopped():
                pass
        finally:
            self._running = False

    def _run_until_stopped(self) -> bool:
        """Runs the loop. True if it was stopped, and not left by an error."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # Of a task that an observer has started, for instance: no signal comes here. As in any
            # thread but the main one, it ends nothing else: all callers would wait forever.
            _log.exception("a task was to end the process, and has only ended itself")
            return False
        return True

    def _is_alive(self) -> bool:
        # Every call checks this more than once, and `Thread.is_alive` would take locks.
        return self._running

    # ------------------------------------------------------------------ the end

    def close_at_exit(self, owner: object, close: Callable[[], Awaitable[None]]) -> None:
        self._closing[owner] = close

    def closed(self, owner: object) -> None:
        self._closing.pop(owner, None)

    def _at_exit(self) -> None:
        """Finishes what was committed, so that others do not meet its locks."""
        if self._forks != _forks:
            return
        while self._closing:
            _, close = self._closing.popitem()
            try:
                self.call(close)
            except Exception:  # noqa: BLE001 - other databases have commits to finish, too
                _log.exception("a database could not be closed")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(EXIT_SECONDS)


class _NoMore:
    """Stands for the end, after the last page."""


_NO_MORE = _NoMore()

FORKED = (
    "the client was used before this process was forked, and does not survive a fork: start "
    "processes with spawn or forkserver, or connect only after the fork"
)

_shared: LoopThread | None = None
_forked = False
_forks = 0
"""How many forks lead to this process. Every call looks whether there was one since its loop was
made, several times; `os.getpid` would be a system call each time."""
_guard = threading.Lock()


def shared() -> LoopThread:
    """The loop thread of this process, started when it is first needed."""
    global _shared  # noqa: PLW0603 - one per process is the point
    if _forked:
        raise UsageError(FORKED)
    with _guard:
        if _shared is None:
            _shared = LoopThread()
        return _shared


def _after_fork_in_child() -> None:
    global _forked, _forks, _guard  # noqa: PLW0603 - the module is what a fork copies
    _forks += 1
    _forked = _forked or _shared is not None
    _guard = threading.Lock()  # the old one may have been held by a thread that does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
