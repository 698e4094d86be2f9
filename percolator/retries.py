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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from percolator.errors import InvalidArgument, PercolatorError, Retry, UsageError
from percolator.wire.backoff import Backoff
from percolator.world import Clock, Random

if TYPE_CHECKING:
    from percolator import aio
    from percolator.database import Database
    from percolator.transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long a transaction is tried.

    >>> percolator.connect(retry=RetryPolicy(deadline_seconds=5.0))
    >>> @transactional(retry=RetryPolicy(attempts_max=3))
    """

    attempts_max: int = 1_000
    deadline_seconds: float = 30.0
    """For all attempts together, and the pauses between them."""
    backoff_seconds_min: float = 0.002
    backoff_seconds_max: float = 1.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1:
            raise InvalidArgument("attempts_max", f"expected at least 1, got {self.attempts_max}")
        if self.deadline_seconds <= 0:
            raise InvalidArgument("deadline_seconds", "expected a positive number")
        if not 0 < self.backoff_seconds_min <= self.backoff_seconds_max:
            raise InvalidArgument("backoff_seconds_min", "expected 0 < min <= max")

    def allows(self, error: PercolatorError, attempts: int) -> bool:
        """Whether running again makes sense: never when it may be committed already."""
        return error.retry is Retry.SAFE and attempts < self.attempts_max


class Attempts:
    """The attempts at one transaction."""

    def __init__(self, policy: RetryPolicy, clock: Clock, random: Random) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = clock.monotonic_seconds() + policy.deadline_seconds
        self._backoff = Backoff(
            clock, random, policy.backoff_seconds_min, policy.backoff_seconds_max
        )
        self._attempts = 0

    def seconds_left(self) -> float:
        return max(self._deadline - self._clock.monotonic_seconds(), 0.001)

    async def again(self, error: PercolatorError) -> bool:
        """After a failed attempt: pauses and allows another one, or does not."""
        self._attempts += 1
        return self._policy.allows(error, self._attempts) and await self._backoff.pause(
            self._deadline
        )


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
