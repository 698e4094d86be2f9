"""A transaction: reads at its start timestamp, and writes that appear all at once or not at all."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Mapping
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

from percolator.aio.awaiting import DONE, Written, must_be_awaited
from percolator.aio.engine import Engine
from percolator.aio.one_message import OneMessage
from percolator.aio.outcomes import settled
from percolator.aio.transaction_internals import TransactionInternals
from percolator.arguments import require_bool, require_seconds
from percolator.errors import ConflictError, OutcomeUnknown, UsageError
from percolator.protocol.commit import Commit
from percolator.protocol.contention.baton import Baton
from percolator.protocol.first_message import FirstMessage
from percolator.protocol.write_set import WriteSet
from percolator.protocol.write_steps import WriteSteps
from percolator.retries import Attempts
from percolator.routing.cells import CommitAnswer
from percolator.schema import Column
from percolator.timestamps import Timestamp

K = TypeVar("K")
T = TypeVar("T")


class Outcome(Enum):
    """The outcome of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """Its commit was sent and not answered: `resolve` finds out."""


_ENDINGS = {
    Outcome.COMMITTED: "has committed",
    Outcome.ABORTED: "was rolled back",
    Outcome.UNKNOWN: "has an unknown outcome",
}
_COMMITTING = "is being committed"


class Transaction(OneMessage):
    """Reads from one snapshot, and writes that take effect all at once.

    It reads the store as of its first read, not as of entering the block; `timestamp` counts as a
    read. Writes stay in the program until `commit`; of several to a cell, the last one counts.
    Leaving the block commits; an exception rolls back. This is one attempt: a `ConflictError`
    leaves the block. Use `@transactional` for functions that are run again.

    >>> async with db.transaction() as tx:
    ...     left = await tx.get("bob", balance, default=0)
    ...     tx.set("bob", balance, left - 7)
    """

    joins_transactions = True
    """A `@transactional` function that is called with this transaction joins it."""

    outcome = Outcome.OPEN
    commit_timestamp: Timestamp | None = None
    """Set by a commit that wrote something."""

    def __init__(
        self, engine: Engine, timeout_seconds: float | None, attempts: Attempts | None = None
    ) -> None:
        """`attempts`: it is one of these, and the last one if it commits."""
        super().__init__(engine, timeout_seconds)
        self._attempts = attempts
        self._writes = self._own = WriteSet(engine.limits)
        self._begun_seconds = engine.now()

    @property
    def start_timestamp(self) -> Timestamp | None:
        """The timestamp of the snapshot that it reads; None before the first read.

        If it has read nothing, it has one from its commit on.
        """
        return Timestamp(self._start) if self._start else None

    @property
    def internal(self) -> TransactionInternals:
        """For other parts of the library: programs do not need it, and it may change any time."""
        return TransactionInternals(self)

    # ------------------------------------------------------------------ writes

    @overload
    def set(self, row: K, column: Mapping[Column[Any, K], Any]) -> Written: ...
    @overload
    def set(self, row: K, column: Column[T, K], value: T) -> Written: ...
    def set(self, row: object, column: Any, value: Any = ...) -> Written:
        """Writes a value, or all values of a mapping from columns. A value may be empty.

        It takes effect at the call, awaited or not. What only the cluster knows, such as that there
        is no such table, is raised where it is awaited, or else by the next read or the commit.
        """
        self._require_open()
        if value is ...:
            return self._set_row(row, column)
        address = self._known_target(row, column)
        if address is not None and not self._late:
            self._put(address, row, column, value)
            return DONE
        write = partial(self._writes.put, value=self._encoded(row, column, value))
        return self._write(address, partial(self._target, row, column), write)

    def delete(self, row: K, column: Column[Any, K]) -> Written:
        """Deletes the cell, if it exists. It takes effect at the call, as `set` does."""
        self._require_open()
        address = self._known_written(row, column)
        find = partial(self._written_address, row, column)
        return self._write(address, find, self._writes.delete)

    def lock(self, row: K, column: Column[Any, K], *, shared: bool = False) -> Written:
        """Conflicts with every other writer of the cell, without changing it.

        Snapshots allow *write skew*: two transactions that each read what the other writes may both
        commit. Locking the cells that a decision is based on rules it out. With `shared`, it is a
        read lock: any number of transactions may hold one on the same cell.

        The commit takes the lock. So this takes effect at the call, as `set` does.
        """
        self._require_open()
        require_bool(shared, "shared")
        address = self._known_written(row, column)
        find = partial(self._written_address, row, column)
        return self._write(address, find, self._writes.read_lock if shared else self._writes.lock)

    # ------------------------------------------------------------------ the end

    @must_be_awaited
    async def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """Makes all writes visible at once. Returns when they are durable.

        Returns the commit timestamp, or None if there was nothing to write: then nothing is sent.
        Raises `ConflictError` if another transaction was first, `OutcomeUnknown` if it cannot find
        out whether it committed, and `UsageError` if a call was not awaited that must be.
        """
        deadline = self._deadline(timeout)
        if self._late or self._unfinished() is not None:
            await self._complete(deadline)
        if not self._writes.cells and not self._weak:
            self._end(Outcome.COMMITTED)
            return None
        self._ended = _COMMITTING
        first: FirstMessage | None = None
        try:
            if self._starting is not None or self._taking_turn is not None:
                await self._begin(deadline)  # a read is waiting for the timestamp already
            first = self._first_message(deadline)
            answer = None if first is None else await self._answer_to(first)
            if isinstance(answer, int):
                commit = answer
                self.statistics.round_trips += 1
                self._env.verdicts.put(self._start, commit)
            else:
                commit = await self._go_on(answer, deadline)
        except OutcomeUnknown:
            self._end(Outcome.UNKNOWN)
            raise
        except BaseException as error:
            self._end_uncommitted(first, is_cancelled=isinstance(error, asyncio.CancelledError))
            if isinstance(error, ConflictError):
                self._env.tally.lost_at(error.cell)
            raise
        self.commit_timestamp = Timestamp(commit)
        self._env.tally.commits += 1
        self._end(Outcome.COMMITTED)
        if self._attempts is not None:
            # At once, rather than when the caller's thread has woken up.
            self._attempts.end(Baton.after(commit, self._writes.cells))
        return self.commit_timestamp

    async def _complete(self, deadline: float) -> None:
        """Has all writes take effect. Refuses calls that have done nothing so far, or not all."""
        error: BaseException | None
        try:
            error = await self._forgotten()
            if error is None and self._late:
                await self._late.settle(deadline)
        except BaseException as refused:  # noqa: BLE001 - raised below
            error = refused
        if error is not None:
            if not self._ended:
                self.rollback()
            raise error
        self._require_open()

    def _end_uncommitted(self, first: FirstMessage | None, *, is_cancelled: bool) -> None:
        """If it was cancelled or interrupted in the middle, the outcome is not known here;
        `resolve` can find out."""
        if first is not None and not first.is_sent:
            first.answer.cancel()  # it must not leave any more
        elif first is not None and self._commit is None:
            self._commit = self._prepare_commit()
            self._commit.left()
            if is_cancelled:
                self._commit.go_on_alone()
        sent = self._commit is not None and self._commit.may_be_committed
        self._end(Outcome.UNKNOWN if sent else Outcome.ABORTED)

    async def _go_on(self, answer: CommitAnswer | None, deadline: float) -> int:
        """Commits with more than the first message, or without it: then there is no answer."""
        if not self._start:
            await self._begin(deadline)
        self._require_older_tables()
        if not self._writes.cells:
            return await self._only_notify(deadline)
        commit = self._prepare_commit()
        reaching = commit.run(deadline, answer)
        self._commit = commit  # not before it knows of the first message: this may be interrupted
        return await reaching

    def _prepare_commit(self) -> Commit:
        engine = self._engine
        env = engine.env
        write = WriteSteps(
            self._start,
            self._writes.stored(self._start),
            env.owners.session_id or b"",
            env.limits.value_inline_bytes_max,
            weak_notifications=sorted(self._weak) if self._weak else (),
            tables=self._bound_tables,
        )
        return Commit(
            env,
            engine.cleanup,
            engine.heartbeats,
            write,
            started_seconds=self._started_seconds,
            statistics=self.statistics,
            alone=self._alone,
            only_two_phases=self._only_two_phases,
            is_followed=self._attempts is not None and self._attempts.is_followed,
        )

    def rollback(self) -> None:
        """Discards the writes. None of them has left the program yet. It is refused after a commit,
        since it could not change the outcome."""
        if self._ended and self.outcome is not Outcome.ABORTED:
            raise UsageError(f"this transaction {self._ended}, so it cannot be rolled back")
        if not self._ended:
            self._end(Outcome.ABORTED)

    async def resolve(self, *, timeout: float | None = None) -> Outcome:
        """Finds out the outcome after `OutcomeUnknown`, by sending exactly the same commit again.

        Returns COMMITTED or ABORTED; raises `OutcomeUnknown` if there is still no answer, and
        `OutcomeLost` if there can never be one again.
        """
        self._engine.require_usable()
        if timeout is not None:
            require_seconds(timeout)
        if self.outcome is not Outcome.UNKNOWN or self._commit is None:
            return self.outcome
        deadline = self._engine.now() + (timeout or self._timeout_seconds)
        try:
            commit = await self._commit.settle(deadline)
        except ConflictError:
            commit = 0
        except OutcomeUnknown as unknown:
            if unknown.primary is None or self._engine.now() >= deadline:
                raise
            # The same commit cannot be sent again, perhaps because it has become too old.
            commit = await settled(self._env, self._start, unknown.primary, deadline)
        if commit:
            self.commit_timestamp = Timestamp(commit)
        self.outcome = Outcome.COMMITTED if commit else Outcome.ABORTED
        return self.outcome

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._ended = _ENDINGS[outcome]
        self._finished = True
        self._engine.open_starts.discard(self)
        self._late = None
        self._forget_calls(self._engine.loop)
        seconds = self._engine.now() - self._begun_seconds
        if seconds >= self._engine.limits.slow_transaction_seconds:
            self._engine.slow_log.note(
                "slow transaction: %s after %.3f s, start %d, %d cells%s, %s",
                outcome.value,
                seconds,
                self._start,
                len(self._writes.cells),
                self._whose(),
                self.statistics,
            )

    def _whose(self) -> str:
        """On whose behalf it is, for a log."""
        return ""

    async def __aenter__(self) -> Transaction:
        self._require_open()
        return self

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Coroutine[None, None, object]:
        """Not a coroutine itself: that would be one more to wake with every answer."""
        if kind is None and not self._ended:
            return self.commit()
        return self._leave()

    async def _leave(self) -> None:
        if not self._ended:
            self.rollback()

    def __del__(self) -> None:
        """A transaction dropped without an end is rolled back: nothing has left the program."""
        # `_own` is None if it was refused when it was made.
        if not self._ended and self._own is not None and (self._own.cells or self._late):
            lost = len(self._own.cells) + len(self._late or ())
            warnings.warn(
                f"the writes of a dropped transaction are lost (cells: {lost}): "
                "leave its block, or call commit() or rollback()",
                RuntimeWarning,  # Python shows it by default, as for what nobody has awaited
                stacklevel=2,
                source=self,
            )
        if self._start and not self._ended:
            self._engine.open_starts.discard(self)
