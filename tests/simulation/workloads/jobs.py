"""Shared transactions among ordinary ones: a job is seen as a whole, with the writes of the
attempts that its driver has chosen, or not at all.

A driver puts its tasks on a board, from which the sessions of all clients take them. Attempts are
slow, die, are run again and run twice at the same time; each writes other values, and sometimes to
other rows, even after the job has ended: then it must not lock anything. Some write only changes:
then they sometimes write what is there, and lock it. For the checker, a job is one transaction,
which has read the values that it kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from percolator.aio import Database
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, Share, SharedTransaction, Ticket
from percolator.errors import (
    CellAddress,
    ConflictError,
    OtherDriverCommitted,
    OutcomeUnknown,
    PercolatorError,
    UsageError,
    WrittenTwice,
)
from percolator.protocol.shared.attempt import KEPT
from percolator.protocol.shared.participant import CLOSED
from percolator.protocol.write_set import Write
from percolator.schema import SHARED_NAME, Index
from tests.isolation.history import RecordedTransaction
from tests.simulation.sessions import Body, Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"row-%02d" % number for number in range(24)]
_COLUMN = b"v"
_JOB_SECONDS = 3.0
_PATIENCE_SECONDS = 0.15
"""A task without a result is put on the board again after this."""
_POLL_SECONDS = 0.02
_REPLACE_AFTER_SECONDS = 0.5
_REPLACES = 0.2
"""The share of jobs that delete all rows that they do not write."""
_DUPLICATES = 0.05
"""The share of jobs of which two tasks write the same row."""
_SHORT_SECONDS = 0.3
"""How long an impatient driver tries to commit."""
_ONLY_CHANGES = 0.4
"""The share of attempts that leave rows as they are that have their values already."""

_LEFT = "was left to expire"
_CLOSED = ("has committed", "was rolled back")

Writes = dict[bytes, bytes | None]


class Result(NamedTuple):
    """Cells that a finished attempt has locked."""

    receipt: Receipt
    writes: Writes
    kept: frozenset[bytes] = frozenset()
    """Rows that it did not write again: they had these values already."""


@dataclass
class Task:
    """One task of a job, until the job has ended."""

    ticket: Ticket
    name: str
    rows: list[bytes]
    is_alone: bool
    """No other task has one of its rows."""
    result: Result | None = None
    """The result of the first attempt that has finished."""
    ended: bool = False
    closed: bool = False
    """The driver knows how the job has ended."""


def _noted_kept(attempt: Share) -> set[bytes]:
    """Fills in the rows that the attempt keeps."""
    kept: set[bytes] = set()
    lock = attempt._attempt._lock

    async def noting(
        given: Mapping[CellAddress, Write], deadline: float
    ) -> Mapping[CellAddress, Write]:
        locked = await lock(given, deadline)
        kept.update(cell.row for cell, write in locked.items() if write is KEPT)
        return locked

    attempt._attempt._lock = noting  # type: ignore[method-assign]
    return kept


class Jobs(Workload):
    """Shared transactions, readers and small writers on the same rows."""

    def __init__(self) -> None:
        self.cells = Cells("jobs", (_ROWS[6], _ROWS[12], _ROWS[18]))
        self._value = self.cells.column()
        self._waiting: list[Task] = []
        """The board."""

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells, Cells(SHARED_NAME))

    async def step(self, session: Session) -> None:
        if self._waiting and session.random.random() < 0.9:
            session.skip()
            await self._attempt(session, self._waiting.pop(0))
            return
        chance = session.random.random()
        if chance < 0.3:
            await self._drive(session)
        elif chance < 0.65:
            await session.run(self._scan)
        else:
            await session.run(self._writing(session))

    # ------------------------------------------------------------------ drivers

    async def _drive(self, session: Session) -> None:
        recorded = session.begin_alone()
        database = session.database
        tasks: list[Task] = []
        shared: SharedTransaction | None = None
        try:
            since = None
            if session.random.random() < 0.5:
                since = await database.timestamp()
                recorded.began(since)
            shared = database.shared_transaction(unchanged_since=since)
            await shared.begin()
            tasks = self._tasks(session, shared.ticket)
            if await self._finished(session, tasks) and session.random.random() < 0.9:
                results = [task.result for task in tasks if task.result is not None]
                if session.random.random() < _REPLACES:
                    results.append(await self._rest(session, shared.ticket, results))
                await self._commit(session, recorded, shared, results)
        except PercolatorError as error:
            session.expect(error)
        finally:
            for task in tasks:
                task.ended = True
            if shared is not None and not shared._ended:
                await self._abort(session, shared, recorded)
            for task in tasks:
                task.closed = shared is not None and shared._ended in _CLOSED

    def _tasks(self, session: Session, ticket: Ticket) -> list[Task]:
        random = session.random
        count = random.randint(1, 4)
        rows = random.sample(_ROWS, count * 2)
        duplicates = count > 1 and random.random() < _DUPLICATES
        if duplicates:
            rows[2] = rows[0]
        return [
            Task(ticket, str(n), rows[2 * n : 2 * n + 2], not (duplicates and n < 2))
            for n in range(count)
        ]

    async def _finished(self, session: Session, tasks: Sequence[Task]) -> bool:
        """Waits until every task has a result; false if the time runs out first. The driver runs
        attempts, too, in the end."""
        loop = asyncio.get_running_loop()
        until, again = loop.time() + _JOB_SECONDS, loop.time()
        while loop.time() < until:
            left = [task for task in tasks if task.result is None]
            if not left:
                return True
            if loop.time() >= again:
                self._waiting += left
                again = loop.time() + _PATIENCE_SECONDS * (1 + 4 * session.random.random())
            await asyncio.sleep(_POLL_SECONDS)
            if session.random.random() < 0.1 and self._waiting:
                await self._attempt(session, self._waiting.pop(0))
        return False

    async def _commit(
        self,
        session: Session,
        recorded: RecordedTransaction,
        shared: SharedTransaction,
        results: Sequence[Result],
    ) -> None:
        parts = [part for result in results for part in result.receipt.parts]
        if not recorded.record.start_ts:
            # It saw nothing, and nothing was committed to any of its cells since its last part.
            recorded.began(max(part.start for part in parts))
        for receipt, writes, kept in results:
            for row, value in writes.items():
                key = (self.cells.name, row, _COLUMN)
                if row in kept:
                    recorded.lock(key)
                elif value is None:
                    recorded.delete(key)
                else:
                    recorded.put(key, value)
            for part in receipt.parts:
                recorded.lock((SHARED_NAME, receipt.row, part.column))
        ticket = shared.ticket
        recorded.lock((SHARED_NAME, ticket.row, CLOSED))
        starts = [ticket.began, *(part.start for part in parts)]
        session.note_parts(recorded.record.start_ts, starts)
        recorded.commit_called()
        receipts = [result.receipt for result in results]
        timeout = _SHORT_SECONDS if session.random.random() < 0.3 else None
        try:
            commit = await shared.commit(receipts, timeout=timeout)
        except OutcomeUnknown as error:
            recorded.unknown()
            if session.random.random() < 0.5:
                await session.resolved(recorded, error)
        except ConflictError:
            recorded.aborted()
        except PercolatorError:
            recorded.aborted()
            if session.random.random() < 0.5:
                shared._end(_LEFT)  # a program that goes on to something else
            raise
        else:
            # Only now: before a rollback, others may have committed what it was to keep.
            for _, writes, kept in results:
                for row in kept:
                    recorded.read((self.cells.name, row, _COLUMN), writes[row])
            recorded.committed(commit or 0)
            rows = [row for result in results for row in result.writes]
            if len(set(rows)) < len(rows):
                session.broken(f"two tasks that write one row were committed together: {rows}")

    async def _rest(self, session: Session, ticket: Ticket, results: Sequence[Result]) -> Result:
        """Deletes the rows that the job does not write."""
        written = {row for result in results for row in result.writes}
        table = self.cells.table
        async with session.database.snapshot() as snapshot:
            receipt = await rest_deleted(
                session.database.internal,
                ticket,
                [result.receipt for result in results],
                snapshot,
                table,
                task="rest",
                timeout=3.0,
            )
            found = [row.key async for row in snapshot.scan(table)]
        return Result(receipt, {row: None for row in found if row not in written})

    async def _abort(
        self, session: Session, shared: SharedTransaction, recorded: RecordedTransaction
    ) -> None:
        """Ends what has not committed, or is not known to have."""
        called = recorded.record.commit_called is not None
        try:
            commit = await shared.abort()
        except PercolatorError as error:
            session.expect(error)
            shared._end(_LEFT)
            return
        if called:
            session.claim(recorded, committed=commit is not None)
        elif commit is not None:
            session.broken("a job that was never to be committed is committed")

    # ------------------------------------------------------------------ attempts

    async def _attempt(self, session: Session, task: Task) -> None:
        random = session.random
        if task.ended and random.random() < 0.7:
            return
        only_changes = random.random() < _ONLY_CHANGES
        attempt = session.database.internal.share(
            task.ticket,
            task.name,
            0,
            3.0,
            replace_after_seconds=_REPLACE_AFTER_SECONDS,
            only_changes=only_changes,
        )
        kept = _noted_kept(attempt)
        rows = task.rows if random.random() < 0.7 else random.sample(task.rows, 1)
        writes: Writes = {row: None if random.random() < 0.1 else session.unique() for row in rows}
        comes_late = task.closed
        try:
            if only_changes:
                await self._repeat_some(session, writes)
            await attempt.begin()
            await self._write(session, attempt, writes)
            if random.random() < 0.1:
                return  # it dies: nothing is rolled back
            receipt = await attempt.finish()
            if comes_late:
                session.broken(f"task {task.name} has begun after its job had ended")
            if random.random() < 0.1:
                return  # the driver is never told
            await asyncio.sleep(random.random() ** 4 * 0.5)
        except WrittenTwice as twice:
            if task.is_alone:
                session.broken(f"no row is in two tasks: {twice}")
            return
        except UsageError:
            return  # the job has been committed without it
        except PercolatorError as error:
            session.expect(error)
            after_all = await self._refused(session, attempt)
            if after_all is None:
                return
            receipt = after_all
        finally:
            attempt._leave()
        if task.result is None:
            task.result = Result(receipt, writes, frozenset(kept))

    async def _repeat_some(self, session: Session, writes: Writes) -> None:
        """Some of the rows are to have the values that they have now."""
        for row in writes:
            if session.random.random() < 0.6:
                writes[row] = await session.database.get(row, self._value)

    async def _refused(self, session: Session, attempt: Share) -> Receipt | None:
        """Receipt of a program that continues after an error: None, unless there is a bug."""
        try:
            return await attempt.finish()
        except UsageError:
            return None
        except PercolatorError as error:
            session.expect(error)
            return None

    async def _write(self, session: Session, attempt: Share, writes: Writes) -> None:
        for row, value in writes.items():
            if value is None:
                await attempt.delete(row, self._value)
            else:
                await attempt.set(row, self._value, value)
            if session.random.random() < 0.5:
                await attempt._flush()
                await asyncio.sleep(session.random.random() ** 4)

    # ------------------------------------------------------------------ others

    async def _scan(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def _writing(self, session: Session) -> Body:
        rows = session.random.sample(_ROWS, 2)
        value = session.unique()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.get(row, self._value)
                await tx.set(row, self._value, value)

        return body


_LOOKS = 0.15
"""The share of steps that look up the index."""


class IndexedJobs(Jobs):
    """Jobs in a table with an index, which finds the rows that a scan finds."""

    leaves_behind = True

    def __init__(self) -> None:
        super().__init__()
        self._by_value = Index(self.cells.table, "by value", (self._value,))

    async def load(self, session: Session) -> None:
        await session.database.create_index(self._by_value, timeout=30.0)

    async def step(self, session: Session) -> None:
        if session.random.random() >= _LOOKS:
            await super().step(session)
            return
        session.skip()
        try:
            async with session.database.snapshot() as snapshot:
                found = [row.raw() async for row in snapshot.find(self._by_value)]
                scanned = [row.raw() async for row in snapshot.scan(self.cells.table)]
        except PercolatorError as error:
            session.expect(error)
        else:
            if found != sorted(scanned, key=lambda cells: cells[_COLUMN]):
                session.broken(f"the index finds {found}, and the table has {scanned}")

    async def rest(self, session: Session) -> None:
        for problem in await session.database.check_index(self._by_value, timeout=30.0):
            session.broken(f"the index of the jobs' table: {problem}")


# Two drivers of one shared transaction, in different clients, which commit different parts of it.
#
# That is misuse, and must do no harm: a driver that is told of a commit finds all that it has
# named, and what another one is told was left out never appears. Each transaction writes rows of
# its own.

LOST_TO_ANOTHER = "a driver of a shared transaction has lost to another one"
_TASKS = ("a", "b", "c")
_DECIDERS_ROWS = 2
"""Rows of each task."""
_SECONDS = 2.0
_LATER_SECONDS = 0.3


class Deciders(Workload):
    """Only with the real master, as it creates a table of its own."""

    def __init__(self) -> None:
        self.cells = Cells("decided", (b"c",))
        self._value = self.cells.column()
        self._numbers = count()
        self._waiting: list[tuple[str, int, Ticket, list[Receipt]]] = []
        """Transactions that need a second driver, each with the client that has the first one."""

    @property
    def tables(self) -> tuple[Cells, ...]:
        return ()  # what it writes is judged here

    async def create(self, database: Database) -> None:
        await database.create_table(self.cells.table, self.cells.splits, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.skip()
        try:
            for one in self._waiting:
                if one[0] != session.client:
                    self._waiting.remove(one)
                    _, number, ticket, chosen = one
                    internal = session.database.internal
                    shared = internal.shared_transaction(None, None, _SECONDS, ticket)
                    await shared.begin()
                    await self._drive(session, number, shared, chosen)
                    return
            if session.random.random() < 0.3:
                await self._begin(session)
        except PercolatorError as error:
            session.expect(error)

    async def _begin(self, session: Session) -> None:
        database, number = session.database, next(self._numbers)
        shared = database.shared_transaction(timeout=_SECONDS)
        await shared.begin()
        receipts = []
        for task in _TASKS:
            attempt = database.internal.share(shared.ticket, task, 0, _SECONDS)
            try:
                await attempt.begin()
                for row in _rows(task, number):
                    await attempt.set(row, self._value, session.unique())
                receipts.append(await attempt.finish())
            finally:
                attempt._leave()
        chosen = [session.random.sample(receipts, session.random.randint(1, 3)) for _ in range(2)]
        self._waiting.append((session.client, number, shared.ticket, chosen[1]))
        await asyncio.sleep(session.random.random() * 0.2)
        await self._drive(session, number, shared, chosen[0])

    async def _drive(
        self, session: Session, number: int, shared: SharedTransaction, chosen: Sequence[Receipt]
    ) -> None:
        database, named = session.database, [one.task for one in chosen]
        commit: int
        try:
            commit = await shared.commit(chosen) or 0
            there, gone = named, []
        except OtherDriverCommitted as lost:
            session.count(LOST_TO_ANOTHER)
            commit = lost.commit_timestamp
            gone = [task for task in named if any(f"task {task!r}" in one for one in lost.without)]
            there = [task for task in named if task not in gone]
            if not gone:
                session.broken(f"nothing is missing of what lost: {lost}")
        except ConflictError:
            commit, there, gone = 0, [], named
        finally:
            if not shared._ended:
                shared._end("was left")
        for _ in range(2):
            seen = await self._seen(database, number)
            if not seen.issuperset(there) or not seen.isdisjoint(gone):
                session.broken(
                    f"of a transaction committed at {commit}, {sorted(seen)} is there; a driver "
                    f"was told that {there} is, and that {gone} never will be"
                )
            await asyncio.sleep(_LATER_SECONDS)  # until tablets were told

    async def _seen(self, database: Database, number: int) -> set[str]:
        """The tasks of which all rows are there, or only some."""
        rows = [(task, row) for task in _TASKS for row in _rows(task, number)]
        async with database.snapshot(timeout=_SECONDS) as snapshot:
            found = await snapshot.get_many([(row, self._value) for _, row in rows])
        return {task for (task, _), value in zip(rows, found, strict=True) if value is not None}


def _rows(task: str, number: int) -> list[bytes]:
    return [b"%s-%d-%d" % (task.encode(), number, at) for at in range(_DECIDERS_ROWS)]
