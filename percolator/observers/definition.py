"""Observers: functions that run once a column they watch has changed.

    @observes(contents)
    async def index(tx, row): ...           # the row whose `contents` changed

    @observes(title, contents, name="index", attempts=3)
    def index(tx, row, column): ...         # a third parameter: which of the columns it was

A function has no effect but through its transaction: it may be run again after a conflict or a
crash, and only one run for a change commits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from percolator.arguments import require_seconds, require_whole
from percolator.errors import InvalidArgument, UsageError
from percolator.schema import OBSERVER_BYTES_MAX, Column, Table

ASYNC_CONCURRENCY = 128
BLOCKING_CONCURRENCY = 16
DEADLINE_SECONDS = 30.0
ATTEMPTS = 5

_WITHOUT_COLUMN, _WITH_COLUMN = 2, 3
"""Parameters of an observer's function."""


@dataclass(frozen=True, eq=False)
class Observer:
    """A function, and when and how it is run. Calling it calls the function, as a test may."""

    function: Callable[..., Any]
    columns: tuple[Column[Any], ...]
    """Of one table. Their changes are its triggers."""
    name: str
    """Under which the store knows it: what it has seen is remembered by this name."""
    weak: bool
    """Is run by `tx.notify` only, and maybe more than once."""
    concurrency: int
    """Runs at one time in one worker."""
    deadline_seconds: float
    """For the function. A run that takes longer is given up, and has failed."""
    attempts: int
    """A change for which so many runs have failed is put aside as a dead letter."""
    is_async: bool
    wants_column: bool

    @property
    def table(self) -> Table[Any]:
        """Of its columns."""
        return self.columns[0].table

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - the function's
        return self.function(*arguments, **keywords)

    def call_blocking(self, *arguments: Any) -> None:  # noqa: ANN401 - the function's
        """Raises `UsageError` when that has run nothing: a `def` around an `async def` only makes a
        coroutine, and the change would count as answered."""
        made = self.function(*arguments)
        if inspect.isawaitable(made) or inspect.isgenerator(made) or inspect.isasyncgen(made):
            if inspect.iscoroutine(made):
                made.close()
            raise UsageError(
                f"observer {self.name!r} has returned a {type(made).__name__} and run nothing: "
                "what awaits has to be an async def, and nothing may be yielded"
            )

    def __repr__(self) -> str:
        return f"Observer({self.name!r}, {list(self.columns)!r})"


def observes(
    *columns: Column[Any],
    weak: bool = False,
    name: str | None = None,
    concurrency: int | None = None,
    deadline: float = DEADLINE_SECONDS,
    attempts: int = ATTEMPTS,
) -> Callable[[Callable[..., Any]], Observer]:
    """Makes an observer of a function of a transaction and a row (and, if it wants, the column).

    Without a `name`, it has the function's. A column may have several observers, each of which runs
    for each change; that is best avoided, since they conflict where they write the same cells.

    >>> @observes(contents)
    ... async def index(tx, row):
    ...     await tx.set(row, words, len(await tx.get(row, contents, default="")))
    """
    _check_columns(columns)
    if concurrency is not None:
        require_whole(concurrency, "concurrency", 1)
    require_seconds(deadline, "deadline")
    require_whole(attempts, "attempts", 1)

    def decorate(function: Callable[..., Any]) -> Observer:
        if isinstance(function, Observer):
            raise UsageError(f"{function!r} is an observer already: name all its columns at once")
        is_async = inspect.iscoroutinefunction(function)
        own_name = _checked_name(getattr(function, "__name__", "") if name is None else name)
        return Observer(
            function,
            tuple(columns),
            own_name,
            weak,
            concurrency or (ASYNC_CONCURRENCY if is_async else BLOCKING_CONCURRENCY),
            deadline,
            attempts,
            is_async,
            _wants_column(function, own_name),
        )

    return decorate


def _check_columns(columns: Sequence[object]) -> None:
    if not columns:
        raise UsageError("an observer watches at least one column: @observes(column)")
    tables = []
    for column in columns:
        if not isinstance(column, Column):
            raise UsageError(f"an observer watches columns, not {column!r}")
        tables.append(column.table.name)
    if len(set(tables)) > 1:
        raise UsageError(f"an observer watches columns of one table, not of {sorted(set(tables))}")
    if len(set(columns)) != len(columns):
        raise UsageError("an observer watches each column once")


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidArgument("name", f"expected a str, got {type(name).__name__}")
    if not 1 <= len(name.encode()) <= OBSERVER_BYTES_MAX:
        raise InvalidArgument(
            "name", f"an observer's has 1 to {OBSERVER_BYTES_MAX} bytes: {name!r}"
        )
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument("name", f"{name!r} has characters that cannot be seen")
    return name


def _wants_column(function: Callable[..., Any], name: str) -> bool:
    """Whether it takes (tx, row, column), and not just (tx, row)."""
    try:
        signature = inspect.signature(function)
        for arguments in (_WITHOUT_COLUMN, _WITH_COLUMN):
            try:
                signature.bind(*(None,) * arguments)
            except TypeError:
                continue
            return arguments == _WITH_COLUMN
    except (TypeError, ValueError):  # no function, or one that tells nothing of its parameters
        pass
    raise UsageError(f"observer {name!r} has to take (tx, row) or (tx, row, column)")


def checked(observers: object, field: str = "observers") -> list[Observer]:
    """A list of observers that can be run together, or an error that names which cannot and why."""
    if isinstance(observers, Observer) or not isinstance(observers, Sequence):
        raise InvalidArgument(field, f"expected a list of observers, got {observers!r:.80}")
    if not observers:
        raise InvalidArgument(field, "is empty: there is nothing to run")
    found: dict[tuple[str, str], Observer] = {}
    for place, one in enumerate(observers):
        if not isinstance(one, Observer):
            raise InvalidArgument(
                f"{field}[{place}]", f"{one!r:.80} is no observer: decorate it with @observes"
            )
        if found.setdefault((one.table.name, one.name), one) is not one:
            raise InvalidArgument(
                f"{field}[{place}]",
                f"table {one.table.name!r} has an observer {one.name!r} already",
            )
    if len(found) != len(observers):
        raise InvalidArgument(field, "has the same observer twice")
    return list(found.values())
