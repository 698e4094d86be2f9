"""`@transactional`, `@observes` and `@both_kinds`: functions that run in transactions.

    @transactional
    def transfer(tx, source, target, amount): ...

    transfer(db, "bob", "joe", 7)      # its own transaction, retried on conflicts
    transfer(tx, "bob", "joe", 7)      # joins the caller's transaction

The function must not have effects outside of its transaction: it may run several times, and only
the last run counts. A retry runs the function again on a new snapshot. It never repeats the writes
of the previous run, which were computed from values that have changed.

    @observes(contents)
    def index(tx, row): ...            # run by a worker when `contents` changes in a row

    @both_kinds                        # written once, for blocking and asyncio programs
    async def move(tx: aio.Transaction, source: str, target: str, amount: int) -> int: ...

    move(tx, "bob", "joe", 7)          # tx is blocking: the body runs in the client's event loop
    await move(tx, "bob", "joe", 7)    # tx is from percolator.aio
"""

from __future__ import annotations

import functools
import sys
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Coroutine
from inspect import iscoroutine, iscoroutinefunction
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from percolator import aio
from percolator.arguments import require_bool, require_function
from percolator.blocking.api import Database, Snapshot, Transaction
from percolator.blocking.loop_thread import LoopCalls
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

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@overload
def transactional(
    function: Callable[Concatenate[aio.Transaction, P], Awaitable[R]],
) -> Callable[Concatenate[aio.Database | aio.Transaction, P], Coroutine[Any, Any, R]]: ...
@overload
def transactional(
    function: Callable[Concatenate[Transaction, P], R],
) -> Callable[Concatenate[Database | Transaction, P], R]: ...
@overload
def transactional(
    *, retry: RetryPolicy | None = None, serializable: bool = False
) -> _Decorator: ...
def transactional(
    function: Any = None, *, retry: RetryPolicy | None = None, serializable: bool = False
) -> Any:
    """Lets a function whose first parameter is a transaction be called with a database, too.

    Called with a `Database`, it runs in its own transaction, and again after a conflict, according
    to the database's `RetryPolicy` (or the one given here). Called with a `Transaction`, it joins
    it; a `serializable` function joins only transactions that are serializable. Works for
    functions, and with `percolator.aio` for coroutine functions.
    """
    require_policy(retry)
    require_bool(serializable, "serializable")
    if function is None:
        return functools.partial(_transactional, retry=retry, serializable=serializable)
    return _transactional(function, retry=retry, serializable=serializable)


def _transactional(
    function: Callable[..., Any], *, retry: RetryPolicy | None, serializable: bool
) -> Callable[..., Any]:
    require_function(function)

    @functools.wraps(function)
    def call(first: Any, /, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as the function
        if getattr(first, "joins_transactions", False):
            if serializable and not first.serializable:
                raise UsageError(
                    f"{getattr(function, '__qualname__', function)} is serializable, and the "
                    "transaction that it would join is not: begin that one with serializable=True"
                )
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
        return first.run(
            function, *arguments, retry=retry, serializable=serializable, keywords=keywords
        )

    return call


class _Decorator(Protocol):
    """The result of `transactional(...)` with options, which is then called with the function."""

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
    batch: int | None = None,
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
    With a `batch`, the function takes a list of up to so many rows, which share one transaction.
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
        batch=batch,
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
            batch=batch,
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
    return functools.partial(Transaction, LoopCalls(loop, thread_ident))


# ---------------------------------------------------------------------------- both kinds

# Methods of the library write their overloads themselves, so that each has a docstring and a
# signature of its own. The implementation below those takes `Any`, since no type says that a result
# is a coroutine if the argument is the asyncio kind; so the functions here check the kind.

AsyncReads = aio.Snapshot | aio.Transaction
BlockingReads = Snapshot | Transaction


class ForTransactions(Protocol[P, R_co]):
    """A function of transactions of both kinds."""

    @overload
    def __call__(
        self, tx: aio.Transaction, /, *arguments: P.args, **keywords: P.kwargs
    ) -> Coroutine[Any, Any, R_co]: ...
    @overload
    def __call__(self, tx: Transaction, /, *arguments: P.args, **keywords: P.kwargs) -> R_co: ...


class ForReads(Protocol[P, R_co]):
    """A function of snapshots and transactions of both kinds."""

    @overload
    def __call__(
        self, reads: AsyncReads, /, *arguments: P.args, **keywords: P.kwargs
    ) -> Coroutine[Any, Any, R_co]: ...
    @overload
    def __call__(
        self, reads: BlockingReads, /, *arguments: P.args, **keywords: P.kwargs
    ) -> R_co: ...


@overload
def both_kinds(
    function: Callable[Concatenate[AsyncReads, P], Coroutine[Any, Any, R]],
) -> ForReads[P, R]: ...
@overload
def both_kinds(
    function: Callable[Concatenate[aio.Transaction, P], Coroutine[Any, Any, R]],
) -> ForTransactions[P, R]: ...
def both_kinds(function: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Makes a function of both kinds of transactions from a coroutine function of the asyncio kind.

    If its first parameter is an `aio.Transaction | aio.Snapshot`, it takes snapshots, too. Called
    with a blocking transaction, the body runs in the client's event loop, which serves all threads:
    it must not block, and is one trip there, however many reads and writes it makes.

    >>> @both_kinds
    ... async def total(reads: aio.Transaction | aio.Snapshot, names: Sequence[str]) -> int:
    ...     return sum([await reads.get(name, balance, default=0) for name in names])
    >>> total(tx, names)        # in a program with blocking transactions
    >>> await total(tx, names)  # in one with percolator.aio
    """
    if not iscoroutinefunction(function):
        raise UsageError(f"both_kinds takes an async function, got {function!r:.80}")

    @functools.wraps(function)
    def call(reads: Any, /, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - either kind
        return on_reads(reads, function, *arguments, **keywords)

    return call


def on_transaction(
    tx: aio.Transaction | Transaction,
    body: Callable[Concatenate[aio.Transaction, P], Coroutine[Any, Any, R]],
    *arguments: P.args,
    **keywords: P.kwargs,
) -> Any:  # noqa: ANN401 - R, or a coroutine that returns it
    """Runs the body with a transaction of either kind."""
    if isinstance(tx, Transaction):
        return tx.call_inside(body, *arguments, **keywords)
    if not isinstance(tx, aio.Transaction):
        raise UsageError(f"expected a transaction, got {type(tx).__name__}")
    call = body(tx, *arguments, **keywords)
    tx._note_function(call, sys._getframe(1))
    return call


def on_reads(
    reads: AsyncReads | BlockingReads,
    body: Callable[Concatenate[AsyncReads, P], Coroutine[Any, Any, R]],
    *arguments: P.args,
    **keywords: P.kwargs,
) -> Any:  # noqa: ANN401 - R, or a coroutine that returns it
    """Runs the body with a snapshot or transaction of either kind."""
    if isinstance(reads, BlockingReads):
        return reads.call_inside(body, *arguments, **keywords)
    if not isinstance(reads, AsyncReads):
        raise UsageError(f"expected a snapshot or a transaction, got {type(reads).__name__}")
    call = body(reads, *arguments, **keywords)
    reads._note_function(call, sys._getframe(1))
    return call


def on_database(
    database: aio.Database | Database,
    body: Callable[Concatenate[aio.Database, P], Coroutine[Any, Any, R]],
    *arguments: P.args,
    **keywords: P.kwargs,
) -> Any:  # noqa: ANN401 - R, or a coroutine that returns it
    """Runs the body with a database of either kind."""
    if isinstance(database, Database):
        return database.call_inside(body, *arguments, **keywords)
    if not isinstance(database, aio.Database):
        raise UsageError(f"expected a database, got {type(database).__name__}")
    return body(database, *arguments, **keywords)
