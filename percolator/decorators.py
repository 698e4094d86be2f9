"""`@transactional` and `@observes`: functions that run in transactions.

    @transactional
    def transfer(tx, source, target, amount): ...

    transfer(db, "bob", "joe", 7)      # its own transaction, retried on conflicts
    transfer(tx, "bob", "joe", 7)      # joins the caller's transaction

The function must not have effects outside of its transaction: it may run several times, and only
the last run counts. A retry runs the function again on a new snapshot. It never repeats the writes
of the previous run, which were computed from values that have changed.

    @observes(contents)
    def index(tx, row): ...            # run by a worker when `contents` changes in a row
"""

from __future__ import annotations

import functools
import sys
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Coroutine
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from percolator.arguments import require_function
from percolator.errors import UsageError
from percolator.observers.definition import (
    ATTEMPTS,
    DEADLINE_SECONDS,
    Observer,
    check_choices,
    observer_of,
)
from percolator.retries import RetryPolicy, require_policy
from percolator.schema import Column

if TYPE_CHECKING:
    from percolator import aio
    from percolator.blocking.database import Database
    from percolator.blocking.transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")


class Runs(Protocol):
    """A database, which runs transactions."""

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,  # noqa: ANN401 - the function's
        retry: RetryPolicy | None,
        keywords: dict[str, Any] | None,
    ) -> Any: ...  # noqa: ANN401 - the function's


@overload
def transactional(
    function: Callable[Concatenate[aio.Transaction, P], Awaitable[R]],
) -> Callable[Concatenate[aio.Database | aio.Transaction, P], Coroutine[Any, Any, R]]: ...
@overload
def transactional(
    function: Callable[Concatenate[Transaction, P], R],
) -> Callable[Concatenate[Database | Transaction, P], R]: ...
@overload
def transactional(*, retry: RetryPolicy) -> _Decorator: ...
def transactional(function: Any = None, *, retry: RetryPolicy | None = None) -> Any:
    """Lets a function whose first parameter is a transaction be called with a database, too.

    Called with a `Database`, it runs in its own transaction, and again after a conflict, according
    to the database's `RetryPolicy` (or the one given here). Called with a `Transaction`, it joins
    it. Works for functions, and with `percolator.aio` for coroutine functions.
    """
    require_policy(retry)
    if function is None:
        return functools.partial(_transactional, retry=retry)
    return _transactional(function, retry=retry)


def _transactional(
    function: Callable[..., Any], *, retry: RetryPolicy | None
) -> Callable[..., Any]:
    require_function(function)

    @functools.wraps(function)
    def call(first: Any, /, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as the function
        if getattr(first, "joins_transactions", False):
            made = function(first, *arguments, **keywords)
            if iscoroutine(made) and hasattr(first, "_note_function"):
                first._note_function(made, sys._getframe())
            return made
        # An object of the program, such as a method's `self`, may have a method `run`, too.
        if not hasattr(first, "run_observers"):
            name = getattr(function, "__qualname__", repr(function))  # a partial has none
            raise UsageError(
                f"{name} takes a Database or a Transaction as its first argument, got "
                f"{type(first).__name__}"
            )
        return cast(Runs, first).run(function, *arguments, retry=retry, keywords=keywords)

    return call


class _Decorator(Protocol):
    """The result of `transactional(retry=...)`, which is then called with the function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[aio.Transaction, P], Awaitable[R]]
    ) -> Callable[Concatenate[aio.Database | aio.Transaction, P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Transaction, P], R]
    ) -> Callable[Concatenate[Database | Transaction, P], R]: ...


def observes(
    *columns: Column[Any],
    weak: bool = False,
    deletes: bool = True,
    backfill: bool | None = None,
    name: str | None = None,
    concurrency: int | None = None,
    deadline: float = DEADLINE_SECONDS,
    attempts: int = ATTEMPTS,
    pause: float = 0.0,
) -> Callable[[Callable[..., Any]], Observer]:
    """Makes an observer from a function of a transaction and a row (and optionally the column).

    Its name is the function's, unless `name` is given. A column may have several observers, each of
    which runs for every change; avoid that if they write the same cells, since they then conflict.
    With `deletes=False`, it never runs for a cell without a value, so it may delete its trigger.
    When it is registered for the first time, it also runs for the cells that are there already,
    unless it is weak; with `backfill=False`, it runs only for what is written from then on.
    With a `pause`, a worker waits so many seconds before it runs for the same cell again, and one
    run handles all changes that came meanwhile.

    >>> @observes(contents)
    ... async def index(tx, row):
    ...     tx.set(row, words, len(await tx.get(row, contents, default="")))
    """
    check_choices(
        columns,
        weak=weak,
        deletes=deletes,
        backfill=backfill,
        concurrency=concurrency,
        deadline=deadline,
        attempts=attempts,
        pause=pause,
    )

    def decorate(function: Callable[..., Any]) -> Observer:
        return observer_of(
            function,
            columns,
            weak=weak,
            deletes=deletes,
            backfill=backfill,
            name=name,
            concurrency=concurrency,
            deadline=deadline,
            attempts=attempts,
            pause=pause,
            blocking_transactions=_blocking_transactions,
        )

    return decorate


def _blocking_transactions(
    loop: AbstractEventLoop, thread_ident: int | None
) -> Callable[[aio.Transaction], Transaction]:
    # Imported here, since most workers have no blocking observers.
    from percolator.blocking.loop_thread import LoopCalls
    from percolator.blocking.transaction import Transaction

    return functools.partial(Transaction, LoopCalls(loop, thread_ident))
