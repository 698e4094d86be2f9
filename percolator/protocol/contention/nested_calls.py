"""Calls inside of calls: a function that runs in a transaction may start another one, and wait.

If it does so in its turn at a hot cell (hot_cells.py), an inner call that stood in line there would
wait for the outer one, which waits for it. So a call inside of one that stands in line takes no
turns. It is found by the context of the running code, which tasks and `asyncio.to_thread` inherit.
"""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol


class Call(Protocol):
    """A function that is being run in a transaction, again after conflicts."""

    is_running: bool
    """Whether one of its attempts is being made. A task that it has started may outlast it."""

    @property
    def in_line(self) -> bool:
        """Whether it stands in line at hot cells, or has its turn there."""
        ...


_LIBRARY = "percolator."
_outer: ContextVar[tuple[Call, ...]] = ContextVar("outer calls", default=())


def outer_calls() -> tuple[Call, ...]:
    """The calls that the running code is inside of."""
    return _outer.get()


def warn_of_inner_call() -> None:
    """Warns of a transaction of its own that a function runs inside of another one.

    It commits even if the other one fails or is run again, and that is seldom meant.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARY):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "a transaction is run inside of another one, and is no part of it: it commits even if the "
        "other one does not. Pass the transaction (tx) instead of the database to join it",
        RuntimeWarning,
        stacklevel=level,
    )


class Inside:
    """A block of code that runs inside of this call."""

    __slots__ = ("_before", "_call")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._before: tuple[Call, ...] = ()

    def __enter__(self) -> None:
        self._before = _outer.get()
        _outer.set((*self._before, self._call))
        self._call.is_running = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.is_running = False
        # Not by its token: a coroutine that was dropped is ended in any context.
        _outer.set(self._before)
