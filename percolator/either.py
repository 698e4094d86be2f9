"""Functions that take both kinds of transactions, snapshots and databases, and are written once.

    @both_kinds
    async def move(tx: aio.Transaction, source: str, target: str, amount: int) -> int: ...

    move(tx, "bob", "joe", 7)          # tx is blocking
    await move(tx, "bob", "joe", 7)    # tx is from percolator.aio

The body is a coroutine function of the asyncio kind. Called with the asyncio kind, the function
returns the coroutine. Called with the blocking kind, it runs the body in the event loop, in one
trip, and returns its result.

`both_kinds` is for programs. Methods of the library write their overloads themselves, so that each
has a docstring and a signature of its own. The implementation below those takes `Any`, since no
type says that a result is a coroutine if the argument is the asyncio kind; so the functions here
check the kind, and raise `UsageError` for anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from percolator import aio
from percolator.blocking.database import Database
from percolator.blocking.snapshot import Snapshot
from percolator.blocking.transaction import Transaction
from percolator.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

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

    @wraps(function)
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
