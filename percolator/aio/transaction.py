"""A transaction: reads at its start, writes that appear all at once, or not at all."""

from __future__ import annotations

from collections.abc import Coroutine
from enum import Enum
from types import TracebackType
from typing import Any, TypeVar

from percolator.aio.engine import Engine
from percolator.aio.reading import Reading
from percolator.arguments import require_seconds
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvalidArgument,
    OutcomeUnknown,
    PercolatorError,
    UsageError,
)
from percolator.protocol import steps
from percolator.protocol.commit import Commit
from percolator.protocol.write_set import WriteSet
from percolator.protocol.write_steps import WriteSteps
from percolator.schema import Column
from percolator.timestamps import Timestamp
from percolator.wire.questions import Step

T = TypeVar("T")


class Outcome(Enum):
    """What has become of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """Its commit was sent and not answered: `resolve` finds out."""


class Transaction(Reading):
    """Reads and writes that appear to happen at one instant.

    Writes are kept in the program until `commit`; leaving the block commits, an exception rolls
    back. It is one attempt: a `ConflictError` leaves the block. Use `@transactional` for functions
    that are run again.

    >>> async with db.transaction() as tx:
    ...     left = await tx.get("bob", balance, default=0)
    ...     await tx.set("bob", balance, left - 7)
    """

    joins_transactions = True
    """A `@transactional` function called with it joins it."""

    outcome = Outcome.OPEN
    commit_timestamp: Timestamp | None = None
    """Set by a commit that wrote something."""
    _weak: set[CellAddress] | None = None
    _commit: Commit | None = None
    _alone = True
    """Nobody else commits this transaction."""

    def __init__(self, engine: Engine, timeout_seconds: float | None) -> None:
        super().__init__(engine, timeout_seconds)
        self.writes = self._own = WriteSet(engine.limits)
        self._begun_seconds = self._started_seconds = engine.now()

    @property
    def start_timestamp(self) -> Timestamp | None:
        """The snapshot that it reads; None before the first read."""
        return Timestamp(self._start) if self._start else None

    def _set_start(self, start: int) -> None:
        super()._set_start(start)
        self._started_seconds = self._engine.now()

    def resume(self, start: int, started_seconds: float) -> None:
        """Before anything else: goes on with a transaction that was begun elsewhere.

        For a gateway, whose caller keeps the start timestamp. `started_seconds` is when that was
        handed out, on this machine's monotonic clock: locks live from then on.
        """
        self._set_start(start)
        self._started_seconds = started_seconds
        self._alone = False

    # ------------------------------------------------------------------ writes

    async def set(self, row: object, column: Column[T], value: T) -> None:
        """Writes a value. A value of no bytes is a value."""
        deadline = self._deadline(None)
        address = self.known_address(row, column) or await self._address(row, column, deadline)
        self.put(address, column, value)

    def put(self, address: CellAddress, column: Column[T], value: T) -> None:
        """As `set`, of a cell whose table is known. May be called in any one thread."""
        data = column.codec.encode(value)
        if len(data) > self._engine.limits.value_bytes_max:
            raise InvalidArgument(
                "value",
                f"has {len(data)} bytes, at most {self._engine.limits.value_bytes_max}",
            )
        self.writes.put(address, data)

    async def delete(self, row: object, column: Column[Any]) -> None:
        """Removes the cell, if it is there."""
        deadline = self._deadline(None)
        address = self.known_address(row, column) or await self._address(row, column, deadline)
        self.writes.delete(address)

    async def lock(self, row: object, column: Column[Any]) -> None:
        """Conflicts with every other writer of the cell, without changing it.

        Snapshots allow *write skew*: two transactions that each read what the other one writes both
        commit. Locking what was read, and what the decision rests on, rules it out.
        """
        deadline = self._deadline(None)
        address = self.known_address(row, column) or await self._address(row, column, deadline)
        self.writes.lock(address)

    async def notify(self, row: object, column: Column[Any]) -> None:
        """Asks the column's weak observers to look at the row, once this is committed."""
        deadline = self._deadline(None)
        address = self.known_address(row, column) or await self._address(row, column, deadline)
        schema = await self._engine.around.schema(address.table_id, deadline)
        if column.name not in schema.weak_observers:
            raise UsageError(f"{column!r} has no weak observer")
        self.notify_cell(address)

    def notify_cell(self, address: CellAddress) -> None:
        """As `notify`, of a column that is known to have a weak observer."""
        if self._weak is None:
            self._weak = set()
        if len(self._weak) >= self._engine.limits.transaction_cells_max:
            raise InvalidArgument("notify", "more notifications than a transaction may have cells")
        self._weak.add(address)

    # ------------------------------------------------------------------ the end

    async def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """Makes all writes visible at once; returns when that is durable.

        Returns the commit timestamp, or None when there was nothing to write: then nothing is sent.
        Raises `ConflictError` when another transaction was first, and `OutcomeUnknown` when it
        cannot tell.
        """
        deadline = self._deadline(timeout)
        if not self.writes.cells and not self._weak:
            self._end(Outcome.COMMITTED)
            return None
        self._ended = "being committed"
        try:
            if not self._start:
                await self._begin(deadline)
            if self.writes.cells:
                self._commit = self._prepare_commit()
                commit = await self._commit.run(deadline)
            else:
                commit = await self._only_notify(deadline)
        except OutcomeUnknown:
            self._end(Outcome.UNKNOWN)
            raise
        except BaseException:
            # Whoever is cancelled in the middle does not learn it here; `resolve` may.
            sent = self._commit is not None and self._commit.may_be_committed
            self._end(Outcome.UNKNOWN if sent else Outcome.ABORTED)
            raise
        self.commit_timestamp = Timestamp(commit)
        self._end(Outcome.COMMITTED)
        return self.commit_timestamp

    def _prepare_commit(self) -> Commit:
        engine = self._engine
        around = engine.around
        write = WriteSteps(
            self._start,
            self.writes.cells,
            around.owners.session_id or b"",
            around.limits.value_inline_bytes_max,
        )
        return Commit(
            around,
            engine.cleanup,
            engine.heartbeats,
            write,
            weak_notifications=sorted(self._weak) if self._weak else (),
            started_seconds=self._started_seconds,
            statistics=self.statistics,
            alone=self._alone,
        )

    async def _only_notify(self, deadline: float) -> int:
        """No write, no lock, nothing to decide: only notifications at a fresh timestamp."""
        around = self._engine.around
        left = max(deadline - self._engine.now(), 0.001)
        now = await around.timestamps.get(timeout_seconds=left)
        questions = []
        for table_id, row, column in sorted(self._weak or ()):
            schema = await around.schema(table_id, deadline)
            observers = schema.weak_observers.get(column, ())
            questions.append(Step(table_id, steps.notify(row, column, now, observers)))
        self.statistics.round_trips += 2
        for answer in await around.cells.mutate(questions, deadline):
            if isinstance(answer, PercolatorError):
                raise answer
        return now

    def rollback(self) -> None:
        """Forgets the writes. Nothing of them has left the program."""
        if self._ended == "being committed":
            raise UsageError("it is being committed")
        if not self._ended:
            self._end(Outcome.ABORTED)

    async def resolve(self, *, timeout: float | None = None) -> Outcome:
        """After `OutcomeUnknown`: finds out, by sending the very same commit again.

        Returns COMMITTED or ABORTED; raises `OutcomeUnknown` when still nobody answers.
        """
        self._engine.require_usable()
        if timeout is not None:
            require_seconds(timeout)
        if self.outcome is not Outcome.UNKNOWN or self._commit is None:
            return self.outcome
        seconds = timeout or self._timeout_seconds
        try:
            commit = await self._commit.settle(self._engine.now() + seconds)
        except ConflictError:
            self.outcome = Outcome.ABORTED
        else:
            self.commit_timestamp = Timestamp(commit)
            self.outcome = Outcome.COMMITTED
        return self.outcome

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._ended = outcome.value
        self._over = True
        self._engine.open_starts.discard(self)
        seconds = self._engine.now() - self._begun_seconds
        if seconds >= self._engine.limits.slow_transaction_seconds:
            self._engine.slow_log.note(
                "slow transaction: %s after %.3f s, start %d, %d cells, %s",
                outcome.value,
                seconds,
                self._start,
                len(self.writes.cells),
                self.statistics,
            )

    async def __aenter__(self) -> Transaction:
        self._require_open()
        return self

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Coroutine[None, None, object]:
        """No coroutine of its own: it would be one more to wake up with every answer."""
        if kind is None and not self._ended:
            return self.commit()
        return self._leave()

    async def _leave(self) -> None:
        if not self._ended:
            self.rollback()

    def __del__(self) -> None:
        """Dropped without an end: a rollback, for nothing has left the program."""
        if self._start and not self._ended:
            self._engine.open_starts.discard(self)
