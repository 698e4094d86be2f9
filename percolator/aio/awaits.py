"""Calls that must be awaited.

A write only fills a buffer, so it takes effect at the call. Other calls have to be awaited:
without `await`, Python only makes a coroutine, and a commit would leave out its work. So
`must_be_awaited` notes each call. A commit is refused if one has not begun, or is still running.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from itertools import islice
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar, cast

from percolator.errors import UsageError
from percolator.observers.time_limits import ClusterWaits
from percolator.schema import Column, Family, Table

R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])

_PRUNE_FROM = 64
_TURNS = 3
"""Turns of the event loop until a cancelled call has ended, even a gathered one."""


async def timed(waits: ClusterWaits, call: Coroutine[Any, Any, R]) -> R:
    """A call of an observer's run, whose time is counted."""
    with waits.call():
        return await call


_Call: TypeAlias = tuple[Any, CodeType, int, str]
"""A coroutine, the code and the instruction that made it, and the name of the function that was
called; with a dot before it for a method of the transaction. The frame would keep all its variables
alive."""


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
    name = owner + name if name.startswith(".") else name
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
    return call.cr_frame.f_locals["call"] if call.cr_code is timed.__code__ else call


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

    def _note_call(self, call: Any, frame: FrameType, name: str) -> None:  # noqa: ANN401 - a coroutine
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
        next to the error that says more. Tasks that were created may still begin, and see that the
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
    name = f".{method.__name__}"

    @wraps(method)
    def call(
        self: Awaits,
        /,
        *arguments: Any,  # noqa: ANN401 - the method's
        **keywords: Any,  # noqa: ANN401 - the method's
    ) -> Coroutine[Any, Any, Any]:
        made = method(self, *arguments, **keywords)
        if self._waits is not None:
            made = timed(self._waits, made)
        if not self._is_over():
            self._note_call(made, sys._getframe(1), name)
        return made

    return cast(M, call)
