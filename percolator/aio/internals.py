"""What the rest of the library needs from a database, and programs do not: `Database.internal`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from percolator.aio.engine import Engine
from percolator.aio.following import Following
from percolator.aio.pin import Pin
from percolator.aio.share import REPLACE_AFTER_SECONDS, Share
from percolator.aio.shared import SharedTransaction, checked_ttl, new_ticket
from percolator.aio.snapshot import Snapshot
from percolator.aio.tickets import Ticket
from percolator.aio.transaction import Transaction
from percolator.arguments import require_seconds
from percolator.errors import UsageError
from percolator.retries import Attempts, RetryPolicy, require_policy
from percolator.schema import Table
from percolator.timestamps import Timestamp

K = TypeVar("K")


class DatabaseInternals:
    """The inner side of `Database`. Unlike the methods of that class, most work in any thread."""

    def __init__(self, engine: Engine, retry: RetryPolicy) -> None:
        self.engine = engine
        self._retry = retry

    def transaction(self, timeout: float | None) -> Transaction:
        """As `Database.transaction`."""
        self.check_timeout(timeout)
        return Transaction(self.engine, timeout)

    def snapshot(self, at: Timestamp | datetime | None, timeout: float | None) -> Snapshot:
        """As `Database.snapshot`."""
        self.check_timeout(timeout)
        return Snapshot(self.engine, at, timeout)

    def following(
        self,
        table: Table[K],
        after: Timestamp | datetime | None,
        until: Timestamp | datetime | None,
        *,
        before: bool,
        timeout: float | None,
    ) -> Following[K]:
        """What `Database.changes` goes through. In the event loop only."""
        return Following(self.engine, table, after, until, before=before, timeout=timeout)

    def pin(
        self,
        at: Timestamp | datetime | None,
        tables: Sequence[Table[Any]],
        description: str,
        ttl: float | None,
        timeout: float | None,
    ) -> Pin:
        """As `Database.pin`."""
        self.check_timeout(timeout)
        seconds = timeout or self.engine.limits.call_seconds
        return Pin(self.engine, at, tables, description or "a pin", ttl, seconds)

    def shared_transaction(
        self,
        unchanged_since: Timestamp | datetime | None,
        ttl: float | None,
        timeout: float | None,
        ticket: Ticket | None = None,
    ) -> SharedTransaction:
        """As `Database.shared_transaction`; with a ticket, one that another process has begun."""
        self.check_timeout(timeout)
        seconds = timeout or self.engine.limits.call_seconds
        return SharedTransaction(self.engine, unchanged_since, ttl, seconds, ticket)

    async def shared_ticket(self, ttl: float, timeout: float) -> Ticket:
        """The ticket of a new shared transaction, on which another process is to decide."""
        self.check_timeout(timeout)
        return await new_ticket(self.engine, 0, checked_ttl(self.engine, ttl), timeout)

    def share(
        self,
        ticket: Ticket,
        task: str,
        generation: int,
        timeout: float | None,
        replace_after_seconds: float = REPLACE_AFTER_SECONDS,
        chosen: Set[int] = frozenset(),
        *,
        only_changes: bool = False,
    ) -> Share:
        """As `Database.share`. `chosen`: start timestamps of parts whose cells it leaves alone.
        `only_changes`: cells that have their values already are locked, but not written."""
        self.check_timeout(timeout)
        return Share(
            self.engine,
            ticket,
            task,
            generation,
            timeout or self.engine.limits.call_seconds,
            replace_after_seconds,
            chosen,
            only_changes,
        )

    def attempts(
        self, retry: RetryPolicy | None, function: Callable[..., object] | None = None
    ) -> Attempts:
        """The attempts at `function` that `Database.run` makes. Call `end` after the last one."""
        require_policy(retry)
        return Attempts(retry or self._retry, self.engine.env, _code(function))

    def attempt(self, attempts: Attempts, retries: int) -> Transaction:
        """The transaction of the next attempt."""
        seconds = min(attempts.seconds_left(), self.engine.limits.call_seconds)
        transaction = Transaction(self.engine, seconds, attempts)
        transaction.statistics.retries = retries
        return transaction

    def deadline(self, timeout: float | None) -> float:
        """When a call that starts now times out, by the monotonic clock. Checks the call, too."""
        self.engine.require_usable()
        self.check_timeout(timeout)
        return self.engine.now() + (timeout or self.engine.limits.call_seconds)

    def check_timeout(self, timeout: float | None) -> None:
        """Raises `UsageError` after the database was closed, and for a bad time-out."""
        if self.engine.closed:
            raise UsageError("the database is closed")
        if timeout is not None:
            require_seconds(timeout)


def _code(function: Callable[..., object] | None) -> object:
    """What stays the same if a function is defined again for each call: its code. A wrapper's code
    is shared by all that it wraps: functions that only read would wait with the others.
    """
    if function is None:
        return None
    while isinstance(unwrapped := inspect.unwrap(function), partial):
        function = unwrapped.func
    return getattr(unwrapped, "__code__", type(unwrapped))
