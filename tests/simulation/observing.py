"""Workers in the simulated cluster: the real ones, with every run written down.

Each run of an observer is a transaction like any other. It is recorded as a separate session, since
the runs of a worker overlap. The acknowledgement is internal to the run and is not written down;
the audit allows for that.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from percolator.aio import Database
from percolator.aio.engine import Engine
from percolator.aio.observing import ObserverTransaction, worker_context
from percolator.errors import OutcomeUnknown, PercolatorError
from percolator.formats.records import KIND_DELETE, KIND_PUT, RecordKind
from percolator.observers.context import WorkerContext
from percolator.observers.definition import Observer
from percolator.observers.work_queue import Work
from percolator.observers.worker import Worker, WorkerLimits, start_in_advance
from percolator.schema import Readable
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2
from percolator.world import World
from tests.isolation.checker import WatchedColumns
from tests.isolation.history import CellKey, History, RecordedTransaction, Recorder
from tests.isolation.stored_cells import StoredCells, StoredCommit
from tests.simulation.recorded_tx import table_names

WORKER_LIMITS = WorkerLimits(
    concurrency_max=8, queue_rows_max=64, threads_max=1, scan_pause_seconds_max=1.0
)
_AGAIN_SECONDS = 0.3
_RESERVED = b"\x00"


def watched_columns(observers: list[Observer]) -> list[WatchedColumns]:
    """The observers in the form that checker and audit take."""
    return [
        WatchedColumns(
            one.name,
            frozenset((column.table.name, column.name) for column in one.columns),
            weak=one.weak,
            deletes=one.deletes,
        )
        for one in observers
    ]


def left_to_run(
    notifications: Mapping[CellKey, Sequence[tuple[str, int]]],
    history: History,
    observers: Iterable[WatchedColumns],
    commits: Mapping[CellKey, Sequence[StoredCommit]],
    *,
    on_rows: bool = False,
) -> set[str]:
    """The observers that have something to do for stored notifications.

    A message that writes a weak notification has no condition, and neither has one that announces
    changes in a row store. So a late copy of it writes it again. Nothing is left to do for it if a
    run began after its timestamp: a commit takes that timestamp when it holds all its locks, so the
    run has seen the commit's outcome.

    A notification at a timestamp at which its cell was not changed is a backfill's. A worker that
    has lost its lock, but does not know it yet, writes it again when another worker has completed
    the backfill. Nothing is left to do for it if a run began after the newest change of the cell.
    """
    rewritten = {one.observer for one in observers if one.weak or on_rows}
    last_run: dict[tuple[str, CellKey], int] = {}
    for record in history:
        if record.trigger is not None and record.committed:
            run = (record.observer, record.trigger)
            last_run[run] = max(last_run.get(run, 0), record.start_ts)

    def is_left(key: CellKey, name: str, timestamp: int) -> bool:
        began = last_run.get((name, key), 0)
        if name in rewritten:
            return began <= timestamp
        changes = [commit.commit_ts for commit in commits.get(key, ())]
        return timestamp in changes or began <= max(changes, default=timestamp)

    return {
        name
        for key, found in notifications.items()
        for name, timestamp in found
        if is_left(key, name, timestamp)
    }


def registered(observers: list[Observer], table: str) -> list[master_pb2.Observer]:
    """The observers in the form that a table's schema has."""
    return [
        master_pb2.Observer(
            name=one.name, columns=[column.name for column in one.columns], weak=one.weak
        )
        for one in observers
        if one.table.name == table
    ]


class RecordedRun(ObserverTransaction):
    """The transaction of one run."""

    def __init__(self, engine: Engine, recorded: RecordedTransaction) -> None:
        super().__init__(engine)
        self._recorded = recorded

    async def timestamp(self) -> Timestamp:
        known = self.start_timestamp
        timestamp = await super().timestamp()
        if known is None:
            self._recorded.began(timestamp)
        return timestamp

    async def get(
        self,
        row: object,
        column: Readable[Any],
        default: Any = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        value = await super().get(row, column, timeout=timeout)
        self._recorded.read(_key(row, column), value)
        return default if value is None else value

    async def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        tables = table_names(self)
        for address, (kind, value) in self.internal.writes.cells.items():
            if not address.column.startswith(_RESERVED):
                key = (tables[address.table_id], address.row, address.column)
                if kind == KIND_PUT:
                    self._recorded.put(key, value)
                elif kind == KIND_DELETE:
                    self._recorded.delete(key)
        self._recorded.commit_called()
        try:
            commit = await super().commit(timeout=timeout)
        except OutcomeUnknown:
            self._recorded.unknown()
            raise
        except PercolatorError:
            self._recorded.aborted()
            raise
        self._recorded.committed(commit or 0)
        return commit

    def rollback(self) -> None:
        super().rollback()
        self._recorded.aborted()


def _key(row: object, column: Readable[Any]) -> CellKey:
    return column.table.name, column.table.key.encode(row), column.name


def recording_context(database: Database, recorder: Recorder, name: str) -> WorkerContext:
    """The context of a worker, whose runs are written down as those of `name`."""
    engine = database._engine
    numbers = itertools.count(1)

    def begin(work: Work | None) -> RecordedRun:
        session = f"{name} run {next(numbers)}"
        if work is None:
            return RecordedRun(engine, recorder.begin(session))
        table = work.watched.observer.table.name
        observer = work.watched.observer.name
        trigger = (table, work.row, work.column)
        recorded = recorder.begin(session, observer=observer, trigger=trigger)
        return RecordedRun(engine, recorded)

    return worker_context(engine, begin)


async def work(
    database: Database, recorder: Recorder, name: str, observers: Callable[[], list[Observer]]
) -> None:
    """The program of a worker, until it is killed. As if it were deployed anew, it starts again
    when it has other observers."""
    context = recording_context(database, recorder, name)
    while True:
        chosen = observers()
        worker = Worker(context, chosen, WORKER_LIMITS)
        while chosen == observers() and not worker.is_running:
            try:
                await start_in_advance(worker)
            except PercolatorError:
                await asyncio.sleep(_AGAIN_SECONDS)
        waiting = asyncio.create_task(worker.wait()) if worker.is_running else None
        while waiting is not None and chosen == observers():
            done, _ = await asyncio.wait([waiting], timeout=_AGAIN_SECONDS)
            if done:
                waiting.result()
        await worker.stop()


# An observer that is registered in the midst of the trouble, and that no worker runs.
#
# Once its registration has returned, every commit of its columns has to notify it, whichever client
# sends it and whatever that client knows. Since no worker runs it, all its notifications are still
# there at the end.

NAME = "late"
_LATE_OBSERVER_AGAIN_SECONDS = 0.2
_CHANGES = (RecordKind.PUT, RecordKind.PUT_IN_DATA, RecordKind.DELETE)


class LateObserver:
    """An observer of everything that these observers observe."""

    def __init__(self, observers: list[Observer]) -> None:
        strong = [one for one in observers if not one.weak]
        self._table = strong[0].table.name
        self._columns = {
            column.name
            for one in strong
            for column in one.columns
            if column.table.name == self._table
        }
        self._since: int | None = None
        """A timestamp that was taken after the registration had returned."""
        self._problem: PercolatorError | None = None
        """Why the last attempt failed."""

    async def register(self, world: World, database: Database) -> None:
        """Tries until it succeeds. The observer is paused, so that nothing waits for it."""
        context = worker_context(database.internal.engine)
        observer = master_pb2.Observer(name=NAME, columns=sorted(self._columns))
        request = master_pb2.ChangeObserversRequest(table=self._table, add=[observer], pause=[NAME])
        while self._since is None:
            try:
                await context.catalog.change_observers(request, context.deadline())
                self._since = await context.env.timestamps.get(timeout_seconds=10.0)
            except PercolatorError as error:
                self._problem = error
                await world.clock.sleep(_LATE_OBSERVER_AGAIN_SECONDS)

    def missed(self, stored: StoredCells) -> Iterator[str]:
        """Changes after the registration that did not notify it."""
        if self._since is None:
            yield f"an observer is not registered on a healed cluster, last {self._problem!r}"
            return
        for key, commits in stored.commits.items():
            if key[0] != self._table or key[2] not in self._columns:
                continue
            notified = set(stored.notifications.get(key, ()))
            for commit in commits:
                is_late = commit.commit_ts > self._since and commit.record.kind in _CHANGES
                if is_late and (NAME, commit.commit_ts) not in notified:
                    yield (
                        f"{key} was changed at {commit.commit_ts}, after an observer was "
                        f"registered at {self._since}, and did not notify it"
                    )
