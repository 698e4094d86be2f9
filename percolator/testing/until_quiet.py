"""Runs observers in a test until they have nothing left to do: in order, one after the other.

    run_observers(db, [index, count])

The order is always the same, the oldest change first, so that a test takes the same course each
time. What an observer raises is raised here, with a note that names the observer and the cell;
nothing is retried, and nothing becomes a dead letter. An observer that the database did not know
yet also runs for what was written before, unless it is declared with `backfill=False`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType

from percolator import aio
from percolator.aio.observing import ObserverTransaction, worker_context
from percolator.blocking.api import Database, Transaction
from percolator.errors import CellAddress, ConflictError, UsageError
from percolator.observers.backfill import backfill_owed
from percolator.observers.context import LOCKS_OF_ANY_AGE, FoundWork, WorkRequest
from percolator.observers.dead_letters import DeadLetters, dead_letters_table
from percolator.observers.definition import Observer, checked
from percolator.observers.registration import register
from percolator.observers.runs import Deletions, ObserverRun
from percolator.observers.watched import Watched
from percolator.observers.work_queue import Work
from percolator.protocol.conflicts import MetLock

RUNS_MAX = 10_000

_OTHERS_SECONDS = 0.001
"""How long to wait for another transaction that holds a lock and is about to commit."""


def run_observers(
    database: Database, observers: Sequence[Observer], *, runs_max: int = RUNS_MAX
) -> int:
    """Runs them until nothing is left to do; returns how many runs have committed.

    Blocking observers run in this thread. What one raises is raised here; a note of the error says
    which observer it was, and for which cell. Raises `UsageError` if `runs_max` runs were not
    enough: most likely an observer keeps triggering itself.
    """
    if not isinstance(database, Database):
        raise _wrong_kind(database, "percolator.testing.connect")
    loop = database._loop_thread

    async def begin() -> _UntilQuiet:
        return await _UntilQuiet.over(database._asynchronous, observers, runs_max)

    quiet = loop.call(begin)
    while (run := loop.call(quiet.next)) is not None:
        with run:
            if run.observer.is_async:
                loop.call(partial(run.observer.function, run.transaction, *run.arguments))
            else:
                run.observer.call_blocking(Transaction(loop, run.transaction), *run.arguments)
            loop.call(partial(quiet.finish, run))
    return quiet.runs


async def run_observers_async(
    database: aio.Database, observers: Sequence[Observer], *, runs_max: int = RUNS_MAX
) -> int:
    """Like `run_observers`, for asyncio. Blocking observers run in a thread."""
    if not isinstance(database, aio.Database):
        raise _wrong_kind(database, "percolator.testing.connect_async")
    quiet = await _UntilQuiet.over(database, observers, runs_max)
    while (run := await quiet.next()) is not None:
        with run:
            if run.observer.is_async:
                await run.observer.function(run.transaction, *run.arguments)
            else:
                call = quiet.context.blocking.call
                await asyncio.to_thread(call, run.observer, run.transaction, run.arguments)
            await quiet.finish(run)
    return quiet.runs


def _wrong_kind(database: object, opened_by: str) -> UsageError:
    kind = "one of the other API" if isinstance(database, Database | aio.Database) else database
    return UsageError(f"expected a database, as {opened_by} returns it, got {kind!s:.80}")


class _Begun:
    """A run whose function is to be called. Leaving its block rolls back what has not ended."""

    def __init__(
        self, work: Work, run: ObserverRun, transaction: aio.Transaction, cell: str
    ) -> None:
        self.work = work
        self.run = run
        self.transaction = transaction
        self._cell = cell
        self.observer = work.watched.observer
        self.arguments = work.watched.arguments([work.row], work.column)

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.transaction.ended:
            self.transaction.rollback()
        if error is not None:  # of many runs, the traceback does not say which one this was
            error.add_note(f"observer {self.observer.name!r}, {self._cell}")


class _UntilQuiet:
    """Work that is left."""

    def __init__(self, database: aio.Database, runs_max: int) -> None:
        self._engine = database.internal.engine
        self.context = worker_context(self._engine, self._begin)
        self._transaction = ObserverTransaction(self._engine)
        self._deletions = Deletions(self.context)
        self._dead_letters = DeadLetters(self.context, 0)
        self._watched: list[Watched] = []
        self._waiting: list[Work] = []
        self._runs_max = runs_max
        self.runs = 0
        self._lost = 0
        """Runs that another transaction was faster than. An observer that writes one of its cells
        past its own transaction conflicts with itself, each time."""

    @classmethod
    async def over(
        cls, database: aio.Database, observers: Sequence[Observer], runs_max: int
    ) -> _UntilQuiet:
        quiet = cls(database, runs_max)
        chosen = checked(observers)
        quiet._watched = await register(quiet.context, chosen)
        # A worker that ran before may have left dead letters.
        quiet._dead_letters = DeadLetters(quiet.context, await dead_letters_table(quiet.context))
        for one in quiet._watched:
            # As stored notifications: what a run leaves undone must be found again.
            await backfill_owed(quiet.context, one)
        return quiet

    def _begin(self, work: Work | None) -> ObserverTransaction:
        self._transaction = ObserverTransaction(self._engine)
        return self._transaction

    async def next(self) -> _Begun | None:
        """The next run, begun. None when nothing is left to do."""
        while True:
            if not self._waiting:
                self._waiting = await self._find()
            if not self._waiting:
                return None
            work = self._waiting.pop(0)
            run = ObserverRun(self.context, self._dead_letters, work)
            if await run.begin():
                if self.runs + self._lost >= self._runs_max:
                    self._transaction.rollback()
                    raise self._endless(work)
                return _Begun(work, run, self._transaction, self._described(work))
            await self._forget(work, run.start)

    def _endless(self, work: Work) -> UsageError:
        lost = f", {self._lost} of which have lost to other transactions" if self._lost else ""
        return UsageError(
            f"the observers have not come to rest after {self.runs + self._lost} runs{lost}; the "
            f"next one would be {work.watched.observer.name!r} for {self._described(work)}"
        )

    def _described(self, work: Work) -> str:
        cell = CellAddress(work.watched.table_id, work.row, work.column)
        return self.context.env.described(cell)

    async def finish(self, begun: _Begun) -> None:
        try:
            await begun.run.commit()
        except ConflictError:
            self._lost += 1
            return  # a conflict with the test itself; the work is found again
        self.runs += 1
        await self._forget(begun.work, begun.run.start)

    async def _forget(self, work: Work, seen: int) -> None:
        self._deletions.add(work, [one for one in sorted(work.timestamps) if one <= seen])
        await self._deletions.done()

    async def _find(self) -> list[Work]:
        """Everything that waits, the oldest first. Resolves locks before: they may hide more."""
        context = self.context
        while True:
            answers = [
                answer for request in self._requests() for answer in await self._ask(request)
            ]
            met = [
                MetLock.of(answer.request.table_id, lock)
                for answer in answers
                for lock in answer.locks
            ]
            if not met:
                break
            now = await context.env.timestamps.get()
            await context.cleanup.resolve(
                met, deadline=context.env.deadline(), known_now=now, waited_seconds=0.0
            )
            await context.world.clock.sleep(_OTHERS_SECONDS)
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

    def _requests(self) -> list[WorkRequest]:
        columns: dict[int, set[bytes]] = {}
        for one in self._watched:
            columns.setdefault(one.table_id, set()).update(one.columns)
        return [
            WorkRequest(
                table_id, locked_columns=tuple(sorted(names)), locks_before=LOCKS_OF_ANY_AGE
            )
            for table_id, names in sorted(columns.items())
        ]

    async def _ask(self, request: WorkRequest) -> list[FoundWork]:
        """All work that is found for the request, page after page."""
        survey = self.context.notifications.survey(request)
        async with aclosing(survey) as found:
            return [answer async for answer in found]


def _order(work: Work) -> tuple[int, int, bytes, bytes, bytes]:
    return min(work.timestamps), work.watched.table_id, work.row, work.column, work.watched.id
