"""Running a transaction again when it lost against another one.

    @transactional
    def transfer(tx, source, target, amount): ...

    transfer(db, "bob", "joe", 7)      # a transaction of its own, run again on conflicts
    transfer(tx, "bob", "joe", 7)      # joins the caller's transaction

A function that is run again must not have effects outside of its transaction: it may run several
times, and only the last run counts. What is run again is the function, on a new snapshot, never the
writes of the old one: those were computed from what is no longer true.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from percolator.errors import UsageError
from percolator.retries import RetryPolicy

if TYPE_CHECKING:
    from percolator import aio
    from percolator.database import Database
    from percolator.transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")


class Runs(Protocol):
    """A database: what runs transactions."""

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,  # noqa: ANN401
        retry: RetryPolicy | None,
        keywords: dict[str, Any] | None,
    ) -> Any: ...  # noqa: ANN401


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
    """Makes a function whose first parameter is a transaction callable with a database too.

    Called with a `Database`, it runs in a transaction of its own, and again after a conflict, as
    the database's `RetryPolicy` says (or the one given here). Called with a `Transaction`, it joins
    it. Works for functions, and for coroutine functions with `percolator.aio`.
    """
    if function is None:
        return functools.partial(_transactional, retry=retry)
    return _transactional(function, retry=retry)


def _transactional(
    function: Callable[..., Any], *, retry: RetryPolicy | None
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(first: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        if getattr(first, "joins_transactions", False):
            return function(first, *arguments, **keywords)
        run = getattr(first, "run", None)
        if run is None:
            raise UsageError(
                f"{function.__qualname__} takes a Database or a Transaction first, "
                f"not {type(first).__name__}"
            )
        return cast(Runs, first).run(function, *arguments, retry=retry, keywords=keywords)

    return call


class _Decorator(Protocol):
    """`transactional(retry=...)`, waiting for its function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[aio.Transaction, P], Awaitable[R]]
    ) -> Callable[Concatenate[aio.Database | aio.Transaction, P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Transaction, P], R]
    ) -> Callable[Concatenate[Database | Transaction, P], R]: ...
