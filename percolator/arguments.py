"""What programs pass in, checked where it comes in: so that an error names the argument at fault.

Types are checked for programs without a type checker: what is wrong must neither be taken for
something else nor surface as an error from the inside of the library.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterable
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from percolator.errors import InvalidArgument, UsageError
from percolator.schema import Column, Table

K = TypeVar("K")
R = TypeVar("R")

_MILLISECOND = timedelta(milliseconds=1)

SECONDS_MAX = 1e9
"""Thirty years: as good as no time-out, and no trouble for any clock."""

COLUMNS_MAX = 10_000
"""Named in one read: as many as a tablet server accepts."""


def require_seconds(seconds: object, field: str = "timeout") -> None:
    """A time-out. What is not a number is in no range."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgument(field, f"expected a number, got {type(seconds).__name__}")
    if not 0 < seconds <= SECONDS_MAX:
        shown = seconds if isinstance(seconds, float) or abs(seconds) < 10**12 else "more"
        raise InvalidArgument(
            field, f"expected a positive number, at most {SECONDS_MAX:.0f}, got {shown}"
        )


def require_whole(number: object, field: str, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgument(field, f"expected a whole number, got {type(number).__name__}")
    if number < least:
        raise InvalidArgument(field, f"expected at least {least}, got {number}")


def require_table(table: object) -> None:
    if not isinstance(table, Table):
        raise UsageError(f"expected a Table, got {type(table).__name__}")


def listed_columns(columns: object) -> list[Column[Any]]:
    """What was given, as a list: a generator can be looked at only once."""
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise InvalidArgument(
            "columns", f"expected a list of columns, got {type(columns).__name__}"
        )
    found = list(islice(columns, COLUMNS_MAX + 1))
    for column in found:
        if not isinstance(column, Column):
            raise InvalidArgument("columns", f"expected columns, found {type(column).__name__}")
    if len(found) > COLUMNS_MAX:
        raise InvalidArgument("columns", f"expected at most {COLUMNS_MAX}; leave it out for all")
    return found


def listed(rows: Iterable[K], field: str, most: int) -> list[K]:
    """What was given, as a list; at most one more than allowed, however endless it is."""
    if isinstance(rows, str | bytes | bytearray) or not isinstance(rows, Iterable):
        raise InvalidArgument(field, f"expected a list of row keys, got {type(rows).__name__}")
    return list(islice(rows, most + 1))


def finished(result: R) -> R:
    """What a function that ran in a transaction has returned. A coroutine has not even begun."""
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError("expected a function, got a coroutine function: those need percolator.aio")
    return result


def awaited(result: Awaitable[R]) -> Awaitable[R]:
    """What a coroutine function was called to."""
    if not inspect.isawaitable(result):
        raise UsageError(
            f"expected a coroutine function, got a function that returns {type(result).__name__}"
        )
    return result


def retention_milliseconds(retention: object) -> int:
    if not isinstance(retention, timedelta):
        raise InvalidArgument("retention", f"expected a timedelta, got {type(retention).__name__}")
    if retention < _MILLISECOND:
        raise InvalidArgument("retention", f"expected at least a millisecond, got {retention}")
    return retention // _MILLISECOND
