"""A client's transactions, each written down for the checker beside the library that runs it.

A `Session` runs one transaction after the other; what a transaction does is a function of a
`RecordedTx`. Now and then a session is impatient: it gives a commit little time, abandons it in the
middle, or asks afterwards what became of it, and holds the library to what that says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from percolator.aio import Database, Transaction
from percolator.aio.transaction import Outcome
from percolator.codecs import raw
from percolator.errors import (
    ConflictError,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    SnapshotTooOld,
)
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.schema import Column, Table
from percolator.testing.history import (
    CellKey,
    Found,
    RecordedTransaction,
    Recorder,
    Scan,
    TransactionRecord,
)
from percolator.world import Random

_ABANDONED_SECONDS_MAX = 0.02
LIMIT_SECONDS = 3.5
_SHORT_SECONDS = (0.05, 0.3, 2.0)


@dataclass(frozen=True)
class Cells:
    """A table with one column of bytes, as most workloads need it."""

    name: str
    splits: tuple[bytes, ...] = ()

    @property
    def table(self) -> Table[bytes]:
        return Table(self.name, key=raw)

    def column(self, name: str = "v") -> Column[bytes]:
        return self.table.column(name, raw)


class RecordedTx:
    """A transaction, and beside it its record."""

    def __init__(self, transaction: Transaction, recorded: RecordedTransaction) -> None:
        self._transaction = transaction
        self._recorded = recorded

    async def get(self, row: bytes, column: Column[bytes]) -> bytes | None:
        value = await self._transaction.get(row, column)
        self._recorded.read(_key(row, column), value)
        return value

    async def get_many(
        self, rows: Sequence[bytes], column: Column[bytes]
    ) -> dict[bytes, bytes | None]:
        found = await self._transaction.get_many(column.table, rows, [column])
        values = {row: one.get(column) for row, one in zip(rows, found, strict=True)}
        for row, value in values.items():
            self._recorded.read(_key(row, column), value)
        return values

    async def set(self, row: bytes, column: Column[bytes], value: bytes) -> None:
        await self._transaction.set(row, column, value)
        self._recorded.put(_key(row, column), value)

    async def delete(self, row: bytes, column: Column[bytes]) -> None:
        await self._transaction.delete(row, column)
        self._recorded.delete(_key(row, column))

    async def lock(self, row: bytes, column: Column[bytes]) -> None:
        await self._transaction.lock(row, column)
        self._recorded.lock(_key(row, column))

    async def notify(self, row: bytes, column: Column[bytes]) -> None:
        await self._transaction.notify(row, column)
        self._recorded.notify(_key(row, column))

    async def scan(
        self,
        table: Table[bytes],
        start: bytes = b"",
        stop: bytes = b"",
        *,
        reverse: bool = False,
        limit: int = 0,
    ) -> dict[bytes, dict[bytes, bytes]]:
        """All columns of a range of rows, the transaction's own writes among them."""
        found: list[Found] = []
        rows = self._transaction.scan(
            table,
            start=start or None,
            end=stop or None,
            reverse=reverse,
            limit=limit or None,
        )
        async for row in rows:
            found.extend(Found(row.key, *cell) for cell in sorted(row.raw().items()))
        self._recorded.scan(
            Scan(table.name, start, stop, tuple(found), reverse=reverse, row_limit=limit)
        )
        by_row: dict[bytes, dict[bytes, bytes]] = {}
        for one in found:
            by_row.setdefault(one.row, {})[one.column] = one.value
        return by_row


Body = Callable[[RecordedTx], Awaitable[None]]


@dataclass
class Claim:
    """What the library said, after all, about a transaction that ended unknown."""

    record: TransactionRecord
    committed: bool


@dataclass
class Chronicle:
    """Everything that all clients have written down, whichever of them are still alive."""

    recorder: Recorder
    claims: list[Claim] = field(default_factory=list)
    doubled_share: float = 0.0
    """So many transactions have two committers."""
    doubled: set[int] = field(default_factory=set)
    """Start timestamps of transactions that two committers commit at once."""
    stopped: bool = False
    """The time is over: sessions begin nothing more."""
    left: dict[str, int] = field(default_factory=dict)
    """By session: transactions still to be run, whichever life of its client runs them."""
    broken: list[str] = field(default_factory=list)
    """Promises that the workload itself found broken."""


class Session:
    """One after the other, as a program's thread would."""

    def __init__(
        self, chronicle: Chronicle, name: str, life: int, database: Database, random: Random
    ) -> None:
        self.name = name
        self.random = random
        self._recorded_as = f"{name} #{life}"
        self._chronicle = chronicle
        self._database = database

    @property
    def goes_on(self) -> bool:
        return not self._chronicle.stopped and self._chronicle.left[self.name] > 0

    def broken(self, promise: str) -> None:
        """The workload has seen what it must never see."""
        self._chronicle.broken.append(f"{self._recorded_as}: {promise}")

    @property
    def database(self) -> Database:
        """For what is no transaction."""
        return self._database

    def begin_alone(self) -> RecordedTransaction:
        """The record of something that the workload runs by itself instead of a transaction."""
        self._chronicle.left[self.name] -= 1
        return self._chronicle.recorder.begin(self._recorded_as)

    def expect(self, error: PercolatorError) -> None:
        """Raises what a client cannot expect from a cluster in trouble."""
        self._expected(error)

    def unique(self) -> bytes:
        """A value that nobody else ever writes."""
        return b"%s %d" % (self._recorded_as.encode(), self.random.getrandbits(40))

    async def run(self, body: Body) -> bool:
        """Whether it is known to have committed. Raises nothing that clients have to expect."""
        self._chronicle.left[self.name] -= 1
        impatience = self.random.random()
        timeout = self.random.choice(_SHORT_SECONDS) if impatience < 0.1 else None
        transaction = self._database.transaction(timeout=timeout)
        recorded = self._chronicle.recorder.begin(self._recorded_as)
        try:
            recorded.began(await transaction.timestamp())
            await body(RecordedTx(transaction, recorded))
        except PercolatorError as error:
            transaction.rollback()
            recorded.aborted()
            return self._expected(error)
        recorded.commit_called()
        if impatience > 0.96:
            return await self._abandon(transaction, recorded)
        doubled = self.random.random() < self._chronicle.doubled_share
        if doubled and recorded.record.locked():
            return await self._commit_twice(transaction, recorded)
        return await self._commit(transaction, recorded)

    async def _commit_twice(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        """As a gateway does whose caller asked another gateway for the same again."""
        self._chronicle.doubled.add(recorded.record.start_ts)
        transaction._alone = False
        other = transaction._prepare_commit()
        now = self._database._engine.now

        async def again() -> None:
            await asyncio.sleep(self.random.random() ** 3 * _ABANDONED_SECONDS_MAX)
            try:
                await other.run(now() + LIMIT_SECONDS)
            except OutcomeUnknown:
                return
            except PercolatorError as error:
                if self._is_final(transaction, error):
                    self._claim(recorded, committed=False)
                self._expected(error)
            else:
                self._claim(recorded, committed=True)

        second = asyncio.ensure_future(again())
        committed = await self._commit(transaction, recorded)
        await second
        return committed

    async def _commit(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        try:
            commit = await transaction.commit()
        except OutcomeUnknown as error:
            recorded.unknown()
            await self._ask(transaction, recorded, error)
            return False
        except PercolatorError as error:
            if self._is_final(transaction, error):
                recorded.aborted()
            return self._expected(error)
        recorded.committed(commit or 0)
        return True

    async def _abandon(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        """The program loses interest in the middle of its commit."""
        seconds = self.random.random() * _ABANDONED_SECONDS_MAX
        committing = asyncio.ensure_future(self._commit(transaction, recorded))
        await asyncio.wait([committing], timeout=seconds)
        if committing.done():
            return committing.result()
        committing.cancel()
        await asyncio.wait([committing])
        if transaction.outcome is Outcome.ABORTED:
            self._claim(recorded, committed=False)
        return False

    async def _ask(
        self, transaction: Transaction, recorded: RecordedTransaction, error: OutcomeUnknown
    ) -> None:
        """What became of it: the transaction itself is asked, or the database, or nobody."""
        chance = self.random.random()
        try:
            if chance < 0.4:
                outcome = await transaction.resolve(timeout=2.0)
            elif chance < 0.8:
                outcome = await self._database.resolve(error, timeout=2.0)
            else:
                return
        except PercolatorError as problem:
            self._expected(problem)
            return
        self._claim(recorded, committed=outcome is Outcome.COMMITTED)

    def _is_final(self, transaction: Transaction, error: PercolatorError) -> bool:
        """Whether what was given up will never be committed.

        Of two committers one may give up for lack of time what the other commits. As for a gateway,
        only a durable marker rules that out, or somebody else's newer commit of the primary.
        """
        start = transaction.start_timestamp
        if start not in self._chronicle.doubled:
            return True
        if self._database._engine.around.verdicts.get(start) == ROLLED_BACK:
            return True
        if isinstance(error, ConflictError) and error.other_commit_timestamp:
            return error.cell == min(transaction.writes.cells)
        return False

    def _claim(self, recorded: RecordedTransaction, *, committed: bool) -> None:
        self._chronicle.claims.append(Claim(recorded.record, committed))

    @staticmethod
    def _expected(error: PercolatorError) -> bool:
        """Lets through what a client cannot expect from a cluster in trouble.

        History is kept for hardly longer than it takes a session to tell what it needs: too old a
        snapshot is to be expected, too.
        """
        expected = ConflictError | OutcomeUnknown | SnapshotTooOld
        if error.retry is Retry.USELESS and not isinstance(error, expected):
            raise error
        return False


def _key(row: bytes, column: Column[bytes]) -> CellKey:
    return (column.table.name, row, column.name)
