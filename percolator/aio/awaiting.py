"""Which calls a program has to await, and what becomes of a forgotten `await`.

A write only fills a buffer, so it takes effect at the call; what it returns may be awaited, and
need not be. If the client has to ask for the table first, the write waits in `LateWrites`, in
order, for the next read or the commit.

Everything else has to be awaited. Without `await`, Python only makes a coroutine: a commit would
leave out what the program meant to do. So `must_be_awaited` notes each call, and a commit is
refused if one has not begun, or is still running.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import wraps
from types import CodeType, FrameType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from percolator.errors import PercolatorError, UsageError
from percolator.observers.run_time import ClusterWaits
from percolator.schema import Column, Family, Table

A = TypeVar("A")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])

_PRUNE_FROM = 64
_TURNS = 3
"""How many turns of the event loop a cancelled call may need to end: a read that is gathered."""


class Done(Coroutine[Any, Any, None]):
    """What a write returns that has taken effect. A coroutine, so that it can become a task; there
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
    """What a write returns if there is more to do for it, which begins if this is awaited."""

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
        if self._begun is not None:
            self._begun.close()


Written: TypeAlias = Done | Later
"""What a write returns. It may be awaited, and need not be. (A union, which mypy's
`unused-awaitable` lets pass.)"""


class _LateWrite(Generic[A]):
    """A write whose cells the client has to ask for."""

    __slots__ = ("_find", "_found", "_write", "is_awaited", "is_done", "is_found", "refused")

    def __init__(self, find: Callable[[float], Awaitable[A]], write: Callable[[A], object]) -> None:
        self._find = find
        self._write = write
        self._found: A | None = None
        self.is_found = self.is_done = False
        self.is_awaited = False
        """Its error is somebody's, who may go on without it."""
        self.refused: PercolatorError | None = None
        """That error, if a read or the commit has asked first."""

    async def find(self, deadline: float) -> None:
        if not self.is_found:
            self._found = await self._find(deadline)
            self.is_found = True

    def take_effect(self) -> None:
        self._write(cast(A, self._found))
        self.is_done = True


class LateWrites:
    """The writes of a transaction that wait for an answer of the cluster, and all later ones, in
    the order in which they were made."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[_LateWrite[Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        find: Callable[[float], Awaitable[A]],
        write: Callable[[A], object],
        deadline: Callable[[], float],
        waits: ClusterWaits | None = None,
    ) -> Later:
        """`find` asks the cluster, and has no effect; `write` takes what it has found. `deadline`
        returns that of a write that is awaited now, and raises if nothing can be written."""
        late = _LateWrite(find, write)
        self._waiting.append(late)

        def awaited() -> Coroutine[Any, Any, None]:
            call = self._awaited(late, deadline)
            return call if waits is None else _timed(waits, call)

        return Later(awaited)

    async def settle(self, deadline: float) -> None:
        """Returns when all have taken effect. One that is refused stays: a commit must not leave
        it out."""
        while self._waiting:
            for late in tuple(self._waiting):
                try:
                    await late.find(deadline)
                except PercolatorError as error:
                    if not late.is_awaited:
                        raise
                    late.refused = error
                    self._withdraw(late)
            self._take_effect()

    async def _awaited(self, late: _LateWrite[Any], deadline: Callable[[], float]) -> None:
        if late not in self._waiting:
            return
        late.is_awaited = True
        try:
            await late.find(deadline())
            self._take_effect()
        except BaseException as error:
            self._withdraw(late)
            if not isinstance(error, PercolatorError):
                raise
            # A read or the commit may have asked, too, and may have had it take effect.
            if late.refused is not None:
                raise late.refused  # noqa: B904 - it has its cause already
            if not late.is_done:
                raise

    def _withdraw(self, late: _LateWrite[Any]) -> None:
        if late in self._waiting:
            self._waiting.remove(late)

    def _take_effect(self) -> None:
        """Not beyond the first that is still to be found: of two to a cell, the last one counts."""
        while self._waiting and self._waiting[0].is_found:
            self._waiting[0].take_effect()
            del self._waiting[0]


async def _timed(waits: ClusterWaits, call: Coroutine[Any, Any, R]) -> R:
    """A call of an observer's run, whose time is counted."""
    with waits.call():
        return await call


_Call: TypeAlias = tuple[Any, CodeType, int, str]
"""A coroutine that was made, the code where, the instruction there, and the name of the function;
empty for a method of the transaction. Not the frame, which would keep all variables there alive."""


def _is_unfinished(coroutine: Any) -> bool:  # noqa: ANN401 - a coroutine, with its frame
    """Whether it has not begun, or is in progress elsewhere. What has called the commit, such as a
    function that was joined, is running, and no other coroutine is."""
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
    lines = [line for first, last, line in code.co_lines() if first <= instruction < last]
    call = f"{name}({', '.join(shown) or '...'})"
    place = f"{code.co_filename}:{lines[0] if lines else code.co_firstlineno}"
    if _has_begun(coroutine):
        return UsageError(f"{call} at {place} is still running, so {end}: await it before")
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
    """Knows which of its calls have not ended."""

    _called = "tx"
    """What it is called in errors."""
    _end_of_unfinished = "nothing is committed"
    _ended = ""
    _waits: ClusterWaits | None = None
    """Counts the time of its calls, if it belongs to an observer's run."""
    _calls: list[_Call] | None = None
    _prune_at = _PRUNE_FROM

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
        """Notes that a function was called with it, by the wrapper whose frame this is."""
        if not self._ended:
            # A recipe's method has a private body; programs know the method.
            method = frame.f_code.co_qualname
            is_body = call.__name__.startswith("_") and "<locals>" not in method
            self._note_call(call, frame.f_back or frame, method if is_body else call.__qualname__)

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

    def _forget_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        """At the end. Python would warn of those that have not begun, beside the error that says
        more. Tasks that were created may still begin: they see that it has ended. It works in any
        thread."""
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
        if not self._ended:
            self._note_call(made, sys._getframe(1))
        return made

    return cast(M, call)
