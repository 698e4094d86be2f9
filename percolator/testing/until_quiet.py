"""Running observers in a test until they have nothing left to do: in order, one after the other.

    run_observers(db, [index, count])

Always in the same order, the oldest change first, so that a test takes the same course each time.
What an observer raises comes out here; nothing is tried again, and nothing put aside. An observer
that the database did not know yet also runs for what was written before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from percolator import aio
from percolator.aio.observing import observers_client
from percolator.codecs import raw
from percolator.database import Database
from percolator.errors import ConflictError, UsageError
from percolator.observers.client import Client
from percolator.observers.dead_letter import DeadLetters, dead_letters_table
from percolator.observers.definition import Observer, checked
from percolator.observers.deletions import Deletions
from percolator.observers.registration import register
from percolator.observers.run import ObserverRun
from percolator.observers.watched import Watched
from percolator.observers.work import Work
from percolator.protocol.cleanup import MetLock
from percolator.schema import Table
from percolator.transaction import Transaction
from percolator.wire.notifications import LOCKS_OF_ANY_AGE, FoundWork, WorkQuestion, find_work

RUNS_MAX = 10_000

_OTHERS_SECONDS = 0.001
"""For whoever holds a lock, and is just committing."""


def run_observers(
    database: Database, observers: Sequence[Observer], *, runs_max: int = RUNS_MAX
) -> int:
    """Runs them until nothing is left to do; returns how many runs have committed.

    Blocking observers run in this thread. Raises `UsageError` when that many runs did not suffice:
    most likely an observer keeps on causing itself.
    """
    loop = database._loop_thread

    async def begin() -> _UntilQuiet:
        return await _UntilQuiet.over(database._database, observers, runs_max)

    quiet = loop.call(begin)
    while (run := loop.call(quiet.next)) is not None:
        if run.observer.is_async:
            loop.call(partial(run.observer.function, run.transaction, *run.arguments))
        else:
            run.observer.call_blocking(Transaction(loop, run.transaction), *run.arguments)
        loop.call(partial(quiet.finish, run))
    return quiet.runs


async def run_observers_async(
    database: aio.Database, observers: Sequence[Observer], *, runs_max: int = RUNS_MAX
) -> int:
    """As `run_observers`, for asyncio. Blocking observers run in a thread."""
    quiet = await _UntilQuiet.over(database, observers, runs_max)
    while (run := await quiet.next()) is not None:
        if run.observer.is_async:
            await run.observer.function(run.transaction, *run.arguments)
        else:
            await asyncio.to_thread(_call, run, quiet.client)
        await quiet.finish(run)
    return quiet.runs


def _call(run: _Begun, client: Client) -> None:
    run.observer.call_blocking(client.as_blocking(run.transaction), *run.arguments)


class _Begun:
    """A run whose function is to be called."""

    def __init__(self, work: Work, run: ObserverRun, transaction: aio.Transaction) -> None:
        self.work = work
        self.run = run
        self.transaction = transaction
        self.observer = work.watched.observer
        self.arguments: list[object] = [self.observer.table.key.decode(work.row)]
        if self.observer.wants_column:
            self.arguments.append(work.watched.column(work.column))


class _UntilQuiet:
    """What is left to do."""

    def __init__(self, database: aio.Database, runs_max: int) -> None:
        self._engine = database.engine
        self.client = observers_client(self._engine, self._begin)
        self._transaction = aio.Transaction(self._engine, None)
        self._deletions = Deletions(self.client.around)
        self._dead_letters = DeadLetters(self.client, 0)
        self._watched: list[Watched] = []
        self._waiting: list[Work] = []
        self._runs_max = runs_max
        self.runs = 0

    @classmethod
    async def over(
        cls, database: aio.Database, observers: Sequence[Observer], runs_max: int
    ) -> _UntilQuiet:
        quiet = cls(database, runs_max)
        chosen = checked(observers)
        known = {
            (table, one.name)
            for table in sorted({observer.table.name for observer in chosen})
            for one in (await quiet.client.describe(table)).observers
        }
        quiet._watched = await register(quiet.client, chosen)
        # A worker that ran before may have put something aside.
        quiet._dead_letters = DeadLetters(quiet.client, await dead_letters_table(quiet.client))
        for one in quiet._watched:
            if not one.observer.weak and (one.observer.table.name, one.observer.name) not in known:
                quiet._waiting += await _written_before(database, one)
        return quiet

    def _begin(self, work: Work | None) -> aio.Transaction:
        self._transaction = aio.Transaction(self._engine, None)
        return self._transaction

    async def next(self) -> _Begun | None:
        """The next run, begun. None when nothing is left to do."""
        while True:
            if not self._waiting:
                self._waiting = await self._find()
            if not self._waiting:
                return None
            work = self._waiting.pop(0)
            run = ObserverRun(self.client, self._dead_letters, work)
            if await run.begin():
                if self.runs >= self._runs_max:
                    self._transaction.rollback()
                    raise UsageError(
                        f"the observers have not come to rest after {self.runs} runs; the next one "
                        f"would be {work.watched.observer.name!r} for row {work.row!r}"
                    )
                return _Begun(work, run, self._transaction)
            await self._forget(work, run.start)

    async def finish(self, begun: _Begun) -> None:
        try:
            await begun.run.commit()
        except ConflictError:
            return  # with the test itself; it is found again
        self.runs += 1
        await self._forget(begun.work, begun.run.start)

    async def _forget(self, work: Work, seen: int) -> None:
        self._deletions.add(work, [one for one in sorted(work.timestamps) if one <= seen])
        await self._deletions.done()

    async def _find(self) -> list[Work]:
        """Everything that waits, the oldest first. Locks are settled before: they may hide more."""
        client = self.client
        while True:
            answers = [
                answer for question in self._questions() for answer in await self._ask(question)
            ]
            met = [
                MetLock.of(answer.question.table_id, lock)
                for answer in answers
                for lock in answer.locks
            ]
            if not met:
                break
            now = await client.around.timestamps.get()
            await client.cleanup.clear(
                met, deadline=client.deadline(), known_now=now, waited_seconds=0.0
            )
            await client.world.clock.sleep(_OTHERS_SECONDS)
        by_name = {(one.table_id, one.id): one for one in self._watched if one.is_active}
        found: list[Work] = []
        for waiting in (one for answer in answers for one in answer.waiting):
            watched = by_name.get((waiting.table_id, waiting.observer))
            if watched is not None:
                work = Work(watched, waiting.row, waiting.column, 0.0)
                work.note(waiting.timestamps)
                found.append(work)
        found.sort(key=_order)
        return found

    def _questions(self) -> list[WorkQuestion]:
        columns: dict[int, set[bytes]] = {}
        for one in self._watched:
            columns.setdefault(one.table_id, set()).update(one.columns)
        return [
            WorkQuestion(
                table_id, locked_columns=tuple(sorted(names)), locks_before=LOCKS_OF_ANY_AGE
            )
            for table_id, names in sorted(columns.items())
        ]

    async def _ask(self, question: WorkQuestion) -> list[FoundWork]:
        """All answers to it, page after page."""
        client = self.client
        answers: list[FoundWork] = []
        open_questions = [question]
        while open_questions:
            found = await find_work(client.world, client.tablets, open_questions, client.deadline())
            open_questions = []
            for answer in found:
                if answer.problem is not None:
                    raise answer.problem
                if answer.rest is not None:
                    start, end = answer.rest
                    open_questions.append(replace(question, start=start, end=end))
            answers += found
        return answers


async def _written_before(database: aio.Database, watched: Watched) -> list[Work]:
    """What `percolator observers backfill` would notify."""
    table = Table(watched.observer.table.name, key=raw)
    columns = [table.column(name, raw) for name in watched.columns]
    found: list[Work] = []
    async with database.snapshot() as snapshot:
        now = await snapshot.timestamp()
        async for row in snapshot.scan(table, columns=columns):
            for column in row:
                work = Work(watched, row.key, column, 0.0)
                work.timestamps.add(now)
                found.append(work)
    return found


def _order(work: Work) -> tuple[int, int, bytes, bytes, bytes]:
    return min(work.timestamps), work.watched.table_id, work.row, work.column, work.watched.id
