"""Writes take effect without `await`, and a forgotten `await` of any other call is an error.

A write only fills a buffer, so it takes effect at the call; its result may be awaited, and need not
be. If the client has to ask for the table first, the write waits in `LateWrites`, in order, for the
next read or the commit.

Everything else has to be awaited. Without `await`, Python only makes a coroutine, and a commit
would leave out the work of the call. So `must_be_awaited` notes each call, and a commit is refused
if a call has not begun, or is still running.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import wraps
from itertools import islice
from types import CodeType, FrameType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from percolator.errors import DeadlineExceeded, UsageError
from percolator.observers.time_limits import ClusterWaits
from percolator.schema import Column, Family, Table

A = TypeVar("A")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])

_PRUNE_FROM = 64
_TURNS = 3
"""Turns of the event loop until a cancelled call has ended, even a gathered one."""


class Done(Coroutine[Any, Any, None]):
    """The result of a write that has taken effect: a coroutine, so that it can become a task. There
    is only one, which any number of tasks may await."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return cast("Generator[Any, Any, None]", iter(()))

    def send(self, value: object) -> Any:  # noqa: ANN401 - as declared by Coroutine
        raise StopIteration

    def throw(self, kind: Any, error: Any = None, traceback: Any = None) -> Any:  # noqa: ANN401 - see above
        raise kind if error is None else error

    def close(self) -> None: ...


DONE = Done()


class Later(Coroutine[Any, Any, None]):
    """The result of a write for which more is to be done, such as asking for its table. Awaited, it
    does that at once; otherwise the next read or the commit does."""

    __slots__ = ("_begun", "_work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._begun: Coroutine[Any, Any, None] | None = None

    def _begin(self) -> Coroutine[Any, Any, None]:
        if self._begun is None:
            self._begun = self._work()
        return self._begun

    def __await__(self) -> Generator[Any, Any, None]:
        return self._work().__await__()

    def send(self, value: object) -> Any:  # noqa: ANN401 - as declared by Coroutine
        return self._begin().send(value)

    def throw(self, kind: Any, error: Any = None, traceback: Any = None) -> Any:  # noqa: ANN401 - see above
        return self._begin().throw(kind if error is None else error)

    def close(self) -> None:
        self._begin().close()


Written: TypeAlias = Done | Later
"""The result of a write. It may be awaited, and need not be. (It is a union because mypy's
`unused-awaitable` accepts a union that is not awaited.)"""


class _LateWrite(Generic[A]):
    """A write that waits: its cells have to be asked for, or an earlier write waits."""

    __slots__ = ("find", "found", "turn", "write")

    def __init__(
        self, find: Callable[[float], Awaitable[A]], found: A | None, write: Callable[[A], object]
    ) -> None:
        self.find = find
        self.found = found
        self.write = write
        self.turn = asyncio.Lock()
        """Held by the one call that asks."""


class LateWrites:
    """The writes of a transaction that wait for an answer of the cluster, and all later ones, in
    the order in which they were made."""

    __slots__ = ("_now", "_waiting")

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is the clock by which deadlines are given."""
        self._now = now
        self._waiting: list[_LateWrite[Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        find: Callable[[float], Awaitable[A]],
        write: Callable[[A], object],
        deadline: Callable[[], float],
        *,
        found: A | None = None,
        waits: ClusterWaits | None = None,
    ) -> Later:
        """`find` asks the cluster, and has no effect; `write` is called with its result, `found` if
        that is known already. `deadline` returns the deadline of a write that is awaited now, and
        raises if the transaction has ended."""
        late = _LateWrite(find, found, write)
        self._waiting.append(late)

        def awaited() -> Coroutine[Any, Any, None]:
            call = self._awaited(late, deadline)
            return call if waits is None else _timed(waits, call)

        return Later(awaited)

    async def settle(self, deadline: float) -> None:
        """Returns when all have taken effect. One that is refused stays: a commit must not leave
        it out."""
        while self._waiting:
            await self._ask(self._waiting[0], deadline)

    async def _awaited(self, late: _LateWrite[Any], deadline: Callable[[], float]) -> None:
        if late in self._waiting:
            try:
                await self._ask(late, deadline())
            except BaseException:
                # The caller knows, and may go on without it.
                if late in self._waiting:
                    self._waiting.remove(late)
                raise

    async def _ask(self, late: _LateWrite[Any], deadline: float) -> None:
        """Asks for the cells of one write, and writes what need not wait any longer.

        Only one call at a time asks for a write. If a read asked beside the call that awaits it,
        one could be refused and the other not: the write would be lost after its caller was told
        that it has taken effect, or be committed after its caller was told that it was refused.
        """
        try:
            async with asyncio.timeout(max(deadline - self._now(), 0.0)):
                await late.turn.acquire()
        except TimeoutError:
            text = "the deadline passed while a write waited for its table"
            raise DeadlineExceeded(text) from None
        try:
            if late in self._waiting and late.found is None:
                late.found = await late.find(deadline)
            # Not beyond the first write that has still to ask: of two to a cell, the last counts.
            while self._waiting and self._waiting[0].found is not None:
                self._waiting[0].write(self._waiting[0].found)
                del self._waiting[0]
        finally:
            late.turn.release()


async def _timed(waits: ClusterWaits, call: Coroutine[Any, Any, R]) -> R:
    """A call of an observer's run, whose time is counted."""
    with waits.call():
        return await call


_Call: TypeAlias = tuple[Any, CodeType, int, str]
"""A coroutine, the code and the instruction that made it, and the name of the function that was
called (empty for a method of the transaction). The frame would keep all its variables alive."""


def _is_unfinished(coroutine: Any) -> bool:  # noqa: ANN401 - a coroutine, with its frame
    """True if it has not begun, or waits for something. A function that joined the transaction and
    calls the commit is not: it is running now, and no other coroutine is."""
    return coroutine.cr_frame is not None and not coroutine.cr_running


def _has_begun(coroutine: Any) -> bool:  # noqa: ANN401 - see above
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED


def _as_error(called: _Call, owner: str, end: str) -> UsageError:
    """`end`: what becomes of it, such as that nothing is committed."""
    coroutine, code, instruction, name = called
    method = _method(coroutine)
    name = name or f"{owner}.{method.__name__}"
    given = method.cr_frame.f_locals
    shown = [_shown(given[one]) for one in ("table", "row", "column") if one in given]
    line = next(islice(code.co_positions(), instruction // 2, None))[0]
    call = f"{name}({', '.join(shown) or '...'})"
    place = f"{code.co_filename}:{line}"
    if _has_begun(coroutine):
        return UsageError(f"{call} at {place} is still running, so {end}: await it first")
    return UsageError(
        f"{call} at {place} was called without await, so it has done nothing, and {end}: "
        f"write await {name}(...)"
    )


def _method(call: Any) -> Any:  # noqa: ANN401 - a coroutine, with its frame
    """The coroutine of the method itself, if the call is timed."""
    return call.cr_frame.f_locals["call"] if call.cr_code is _timed.__code__ else call


def _shown(value: object) -> str:
    if isinstance(value, Table):
        return f"table {value.name!r}"
    if isinstance(value, Column):
        return f"{value.table.name!r}:{value.name.decode(errors='replace')!r}"
    if isinstance(value, Family):
        return f"{value.table.name!r}:{value.prefix.decode(errors='replace')!r}"
    return f"{value!r:.100}"


class Awaits:
    """Base of transactions and the like, which note the calls that have not ended."""

    _called = "tx"
    """Its name in errors."""
    _end_of_unfinished = "nothing is committed"
    _waits: ClusterWaits | None = None
    """Counts the time of its calls, if it belongs to an observer's run."""
    _calls: list[_Call] | None = None
    _prune_at = _PRUNE_FROM

    def _is_over(self) -> bool:
        """True once it has ended, so that no commit would leave a call out."""
        return False

    def _note_call(self, call: Any, frame: FrameType, name: str = "") -> None:  # noqa: ANN401 - a coroutine
        """Notes a call, made in this frame, that has to end before the commit."""
        calls = self._calls
        if calls is None:
            calls = self._calls = []
        elif len(calls) >= self._prune_at:
            calls = self._calls = [one for one in calls if one[0].cr_frame is not None]
            self._prune_at = max(_PRUNE_FROM, 2 * len(calls))
        calls.append((call, frame.f_code, frame.f_lasti, name))

    def _note_function(self, call: Any, frame: FrameType) -> None:  # noqa: ANN401 - a coroutine
        """Notes the call of a function that was given this transaction. `frame` is that of the
        wrapper of the function."""
        if not self._is_over():
            # The body of a recipe's method is private: the error has to name the method.
            method = frame.f_code.co_qualname
            is_body = call.__name__.startswith("_") and "<locals>" not in method
            name = method if is_body else call.__qualname__.rpartition("<locals>.")[2]
            self._note_call(call, frame.f_back or frame, name)

    def _unfinished(self) -> _Call | None:
        for call in self._calls or ():
            if _is_unfinished(call[0]):
                return call
        return None

    async def _forgotten(self) -> UsageError | None:
        """The error for a call that has not ended. Calls that were cancelled are given time to end,
        and tasks that were created time to begin."""
        for _ in range(_TURNS):
            if self._unfinished() is None:
                return None
            await asyncio.sleep(0)
        call = self._unfinished()
        return None if call is None else _as_error(call, self._called, self._end_of_unfinished)

    async def _leave_block(
        self,
        kind: type[BaseException] | None,
        leave: Callable[[type[BaseException] | None], Awaitable[None]],
    ) -> None:
        """Ends a block by `leave`, and raises the error for a forgotten call, unless the block has
        failed: then its own error says more."""
        forgotten = None
        try:
            if kind is None:
                forgotten = await self._forgotten()
        finally:
            await leave(kind)
        if forgotten is not None:
            raise forgotten

    def _forget_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes the calls that have not begun, at the end: Python would warn of each of them,
        beside the error that says more. Tasks that were created may still begin, and see that the
        transaction has ended. Works in any thread."""
        calls, self._calls = self._calls, None
        if calls and not loop.is_closed():
            forgotten = [one[0] for one in calls if _is_unfinished(one[0])]
            if forgotten:
                loop.call_soon_threadsafe(_close, forgotten)


def _close(calls: list[Any]) -> None:
    for call in calls:
        if not _has_begun(call):
            _method(call).close()
            call.close()


def must_be_awaited(method: M) -> M:
    """A method that does nothing before it is awaited: a forgotten `await` is an error."""

    @wraps(method)
    def call(
        self: Awaits,
        /,
        *arguments: Any,  # noqa: ANN401 - the method's
        **keywords: Any,  # noqa: ANN401 - the method's
    ) -> Coroutine[Any, Any, Any]:
        made = method(self, *arguments, **keywords)
        if self._waits is not None:
            made = _timed(self._waits, made)
        if not self._is_over():
            self._note_call(made, sys._getframe(1))
        return made

    return cast(M, call)
