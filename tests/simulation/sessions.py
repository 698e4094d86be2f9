"""A client's transactions, each written down for the checker beside the library that runs it.

A `Session` runs one transaction after another; what a transaction does is a function of a
`RecordedTx`. Now and then a session is impatient: it gives a commit little time, abandons it in the
middle, or asks afterwards for its outcome, and later checks that the library's answer was right.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from percolator.aio import Database, Transaction
from percolator.aio.engine import Engine
from percolator.aio.observing import ObserverTransaction, worker_context
from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import Outcome
from percolator.codecs import raw
from percolator.errors import (
    ConflictError,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    SnapshotTooOld,
)
from percolator.formats.records import KIND_DELETE, KIND_PUT, KIND_READ_LOCK, RecordKind
from percolator.observers.context import WorkerContext
from percolator.observers.definition import Observer
from percolator.observers.work_queue import Work
from percolator.observers.worker import Worker, WorkerLimits, start_in_advance
from percolator.protocol.environment import ROLLED_BACK
from percolator.retries import RetryPolicy
from percolator.routing.range_scan import JoinedPage, SentPage
from percolator.schema import Column, Family, Readable, Table
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2
from percolator.world import Random, World
from tests.isolation.checker import WatchedColumns
from tests.isolation.history import (
    CellKey,
    Found,
    History,
    RecordedTransaction,
    Recorder,
    Scan,
    TransactionRecord,
)
from tests.isolation.store_audit import StoredCells, StoredCommit

# A transaction that is written down for the checker while it runs, and the cells of workloads.


@dataclass(frozen=True)
class Cells:
    """A table with one column of bytes, which is what most workloads need."""

    name: str
    splits: tuple[bytes, ...] = ()

    @property
    def table(self) -> Table[bytes]:
        return Table(self.name, key=raw)

    def column(self, name: str = "v") -> Column[bytes]:
        return self.table.column(name, raw)


class RecordedTx:
    """A transaction together with its record."""

    def __init__(
        self, transaction: Transaction, recorded: RecordedTransaction, joined: JoinedScans
    ) -> None:
        self._transaction = transaction
        self._recorded = recorded
        self._joined = joined

    @property
    def itself(self) -> Transaction:
        """For cells that the workload judges itself, and the checker does not."""
        return self._transaction

    def note_writes(self) -> None:
        """Records everything that `itself` has written and announced so far. Call it once, at the
        end of the body."""
        tables = table_names(self._transaction)
        for address, (kind, value) in self._transaction.internal.writes.cells.items():
            key = (tables[address.table_id], address.row, address.column)
            if kind == KIND_PUT:
                self._recorded.put(key, value)
            elif kind == KIND_DELETE:
                self._recorded.delete(key)
        for address in sorted(self._transaction._buffer.weak or ()):
            self._recorded.notify((tables[address.table_id], address.row, address.column))

    def note_read_locks(self) -> None:
        """Records the read locks of a serializable transaction: it takes them if it writes."""
        tables, cells = table_names(self._transaction), self._transaction.internal.writes.cells
        locked = [address for address, (kind, _) in cells.items() if kind == KIND_READ_LOCK]
        for address in locked if len(locked) < len(cells) else ():
            self._recorded.read_lock((tables[address.table_id], address.row, address.column))

    async def get(
        self, row: bytes, column: Column[bytes], *, for_update: bool = False
    ) -> bytes | None:
        value = await self._transaction.get(row, column, for_update=for_update)
        self.note_start()
        self._recorded.read(_raw_key(row, column), value)
        if for_update:
            self._recorded.lock(_raw_key(row, column))
        return value

    async def get_many(
        self, rows: Sequence[bytes], column: Column[bytes]
    ) -> dict[bytes, bytes | None]:
        found = await self._transaction.get_many(column.table, rows, [column])
        self.note_start()
        values = {row: one.get(column) for row, one in zip(rows, found, strict=True)}
        for row, value in values.items():
            self._recorded.read(_raw_key(row, column), value)
        return values

    async def get_family(
        self, row: bytes, family: Family[bytes], columns: Sequence[Column[bytes]]
    ) -> None:
        """Reads a family of a row, whose columns are these."""
        (found,) = await self._transaction.get_many(family.table, [row], [family])
        self.note_start()
        values = {family.column(name).name: value for name, value in found.family(family).items()}
        for column in columns:
            self._recorded.read(_raw_key(row, column), values.pop(column.name, None))
        if values:
            raise RuntimeError(f"columns that are in no family: {sorted(values)}")

    def note_start(self) -> None:
        """Records the timestamp if the first read has fetched it, before what it has read."""
        start = self._transaction.start_timestamp
        if start is not None and not self._recorded.record.start_ts:
            self._recorded.began(start)

    async def set(self, row: bytes, column: Column[bytes], value: bytes) -> None:
        self._transaction.set(row, column, value)  # it takes effect, although it is not awaited
        self._recorded.put(_raw_key(row, column), value)

    async def delete(self, row: bytes, column: Column[bytes]) -> None:
        self._transaction.delete(row, column)
        self._recorded.delete(_raw_key(row, column))

    async def lock(self, row: bytes, column: Column[bytes], *, shared: bool = False) -> None:
        self._transaction.lock(row, column, shared=shared)
        note = self._recorded.read_lock if shared else self._recorded.lock
        note(_raw_key(row, column))

    async def notify(self, row: bytes, column: Column[bytes]) -> None:
        await self._transaction.notify(row, column)
        self._recorded.notify(_raw_key(row, column))

    async def scan(
        self,
        table: Table[bytes],
        start: bytes = b"",
        stop: bytes = b"",
        *,
        reverse: bool = False,
        limit: int = 0,
    ) -> dict[bytes, dict[bytes, bytes]]:
        """All columns of a range of rows, including the transaction's own writes.

        Some ranges are read as joined pages, too: before that, when locks may be in the way, and
        again after it. With other columns and rows written, they are read by a condition.
        """
        has_written = self._transaction.internal.writes.cells or self._transaction._reader.late
        is_due = self._joined.is_due()
        also_joined = is_due and not has_written
        if also_joined:
            await self._scan_joined(table, start, stop)
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
        self.note_start()
        self._recorded.scan(
            Scan(table.name, start, stop, tuple(found), reverse=reverse, row_limit=limit)
        )
        if also_joined:
            await self._scan_joined(table, start, stop)
        by_row: dict[bytes, dict[bytes, bytes]] = {}
        for one in found:
            by_row.setdefault(one.row, {})[one.column] = one.value
        if is_due:
            for at in range(3):
                await self._require_same_by_condition(table, found, at)
        return by_row

    async def _scan_joined(self, table: Table[bytes], start: bytes, stop: bytes) -> None:
        """Only snapshots can be scanned like this: nothing must have been written yet."""
        at = await self._transaction.timestamp()
        self.note_start()
        async with Snapshot(self._transaction._engine, at, None) as snapshot:
            self._recorded.scan(await self._joined.scan(snapshot, table, start, stop))

    async def _require_same_by_condition(
        self, table: Table[bytes], known: Sequence[Found], at: int
    ) -> None:
        """A scan with a condition shows, and counts, the rows of another scan that match: of what
        is stored by now, whoever has locked it, and of what a transaction has written itself."""
        values = sorted({one.value for one in known}) or [b"1"]
        least = values[len(values) // 2]
        probe = Transaction(self._transaction._engine, None)
        try:
            columns = sorted({one.column for one in known}) or [b"v"]
            column = table.column(columns[at % len(columns)], raw)
            # Tablets look for an equality among all entries, and not for what may hold for a null.
            looked_for = at % 2 == 1
            where = column.equals(least) if looked_for else (column >= least) | column.is_null()
            written = dict.fromkeys((one.row for one in known[at::3]), b"" if at % 2 else least)
            written[b"new"] = least
            for row, value in written.items():
                probe.set(row, column, value)
            found = {row.key: row.raw() async for row in probe.scan(table, where=where)}
            counted = await probe.count(table, where=where)
            rows = {row.key: row.raw() async for row in probe.scan(table)}
        finally:
            probe.rollback()
        expected = {
            row: cells
            for row, cells in rows.items()
            if (
                cells.get(column.name) == least
                if looked_for
                else cells.get(column.name, least) >= least
            )
        }
        if found != expected or counted != len(expected):
            raise RuntimeError(
                f"a condition keeps {sorted(found)} and counts {counted}, of {sorted(expected)}"
            )


Body = Callable[[RecordedTx], Awaitable[None]]


def table_names(transaction: Transaction) -> dict[int, str]:
    """The names of the tables that a transaction has used, by their ids."""
    return {info.table_id: name for name, info in transaction._reader.tables.items()}


def _raw_key(row: bytes, column: Column[bytes]) -> CellKey:
    return (column.table.name, row, column.name)


# Scans whose pages may be joined to blocks of memory, as a batch reader asks for them.

JOINED = "page of joined cells"
_COLUMNS = (None, None, (b"v",), (b"v", b"w"))
"""Which columns are asked for: rows have the same ones more often if there is only one."""


class JoinedScans:
    """Which scans of a session are made with joined pages, too."""

    def __init__(self, share: float, random: Random, occurred: Counter[str]) -> None:
        self._share = share
        self._random = random
        self._occurred = occurred

    def is_due(self) -> bool:
        """True if the next scan is made with joined pages, too."""
        return self._share > 0 and self._random.random() < self._share

    async def scan(
        self, snapshot: Snapshot, table: Table[bytes], start: bytes = b"", stop: bytes = b""
    ) -> Scan:
        """The rows of the range, in all columns or in some of them."""
        columns = self._random.choice(_COLUMNS)
        found: list[Found] = []
        pages = snapshot.scan_joined(table, start=start, end=stop, columns=columns)
        async with aclosing(pages):
            async for page in pages:
                self._occurred[JOINED] += isinstance(page, JoinedPage)
                found.extend(_cells(page))
        return Scan(table.name, start, stop, tuple(found), columns)


def _cells(page: SentPage) -> Iterator[Found]:
    if not isinstance(page, JoinedPage):
        yield from map(Found, page.rows, page.columns, page.values)
        return
    columns = {name: values.cut() for name, values in page.columns.items()}
    for at, row in enumerate(page.rows.cut()):
        for name, values in columns.items():
            yield Found(row, name, values[at])


# Workers in the simulated cluster: the real ones, with every run written down.
#
# Each run of an observer is a transaction like any other. It is recorded as a separate session,
# since the runs of a worker overlap. The acknowledgement is internal to the run and is not written
# down; the audit allows for that.

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

    A strong notification at a timestamp at which its cell was not changed is a backfill's. A worker
    that has lost its lock, but does not know it yet, writes it again when another worker has
    completed the backfill. Nothing is left to do for it if a run began after the newest change of
    the cell.
    """
    weak = {one.observer for one in observers if one.weak}
    last_run: dict[tuple[str, CellKey], int] = {}
    for record in history:
        for trigger in record.triggers if record.committed else ():
            run = (record.observer, trigger)
            last_run[run] = max(last_run.get(run, 0), record.start_ts)

    def is_left(key: CellKey, name: str, timestamp: int) -> bool:
        began = last_run.get((name, key), 0)
        changes = [commit.commit_ts for commit in commits.get(key, ())]
        if name not in weak and timestamp not in changes:
            return began <= max(changes, default=timestamp)
        return began <= timestamp or not (name in weak or on_rows)

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

    def __init__(
        self, engine: Engine, recorded: RecordedTransaction, work: Work | None = None
    ) -> None:
        super().__init__(engine, work)
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
        for_update: bool = False,
        timeout: float | None = None,
    ) -> Any:
        value = await super().get(row, column, for_update=for_update, timeout=timeout)
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
        self._recorded.record.triggers = tuple(
            (one.watched.observer.table.name, one.row, one.column) for one in self.works
        )
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
        observer = work.watched.observer.name
        return RecordedRun(engine, recorder.begin(session, observer=observer), work)

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
                await context.catalog.change_observers(request, context.env.deadline())
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


_ABANDONED_SECONDS_MAX = 0.02
_LATE_SHARE = 0.5
"""The share of transactions that fetch no timestamp unless they need it, as those of programs."""
_DELAYED_SHARE = 0.3
_DELAY_SECONDS_MAX = 0.02
LIMIT_SECONDS = 3.5
_SHORT_SECONDS = (0.05, 0.3, 2.0)


@dataclass
class Claim:
    """Outcome that the library later reported for a transaction of unknown outcome."""

    record: TransactionRecord
    committed: bool


@dataclass
class Chronicle:
    """Everything that all clients have written down, dead or alive."""

    recorder: Recorder
    claims: list[Claim] = field(default_factory=list)
    doubled_share: float = 0.0
    """The share of transactions that have two committers."""
    switches_feeds: bool = False
    """True if followers of change feeds have them switched on."""
    one_round_share: float = 0.0
    """The share of transactions that try to commit in one round."""
    committed_in_one_round: int = 0
    joined_share: float = 0.0
    """The share of scans that are made with joined pages, too."""
    occurred: Counter[str] = field(default_factory=Counter)
    """Rare situations that clients have met, by name: a run of many seeds must have met each."""
    doubled: set[int] = field(default_factory=set)
    """Start timestamps of transactions that two committers commit concurrently."""
    stopped: bool = False
    """True when the time is up: sessions begin no more transactions."""
    left: dict[str, int] = field(default_factory=dict)
    """The number of transactions still to be run, by session; any life of its client runs them."""
    parts: dict[int, int] = field(default_factory=dict)
    """The start timestamps of the chosen parts of shared transactions, and those of the whole."""
    broken: list[str] = field(default_factory=list)
    """Promises that the workload itself found broken."""


class Session:
    """Runs one transaction after another, as a thread of a program would."""

    def __init__(
        self, chronicle: Chronicle, name: str, life: int, database: Database, random: Random
    ) -> None:
        self.name = name
        self.random = random
        self.also_expected: tuple[type[PercolatorError], ...] | type[PercolatorError] = ()
        """An error that is useless to retry, and which this workload's transactions may meet."""
        self._recorded_as = f"{name} #{life}"
        # Separate, so that the share of one kind does not change what the transactions do.
        self._phases = Random(f"phases of {self._recorded_as}")
        self._delays = Random(f"delays of {self._recorded_as}")
        self._starts = Random(f"starts of {self._recorded_as}")
        self._joined = JoinedScans(
            chronicle.joined_share,
            Random(f"joined scans of {self._recorded_as}"),
            chronicle.occurred,
        )
        self._chronicle = chronicle
        self._database = database

    def another(self, number: int) -> Session:
        """One more session of the same client, for work at the same time."""
        name, chronicle = f"{self.client} {number}", self._chronicle
        chronicle.left[name] = chronicle.left[self.name]
        return Session(chronicle, name, 1, self._database, Random(name))

    @property
    def client(self) -> str:
        """The client that it belongs to: its address, whichever life it is in."""
        return self.name.partition(" ")[0]

    @property
    def goes_on(self) -> bool:
        return not self._chronicle.stopped and self._chronicle.left[self.name] > 0

    def broken(self, promise: str) -> None:
        """Called by a workload that has seen what it must never see."""
        self._chronicle.broken.append(f"{self._recorded_as}: {promise}")

    @property
    def database(self) -> Database:
        """The database, for operations that are not transactions."""
        return self._database

    def count(self, name: str) -> None:
        """Counts something that the workload has met, and a run of many seeds must not miss."""
        self._chronicle.occurred[name] += 1

    @property
    def switches_feeds(self) -> bool:
        return self._chronicle.switches_feeds

    def skip(self) -> None:
        """Takes the place of a transaction without one."""
        self._chronicle.left[self.name] -= 1

    def begin_alone(self) -> RecordedTransaction:
        """A record for something that the workload does itself instead of running a transaction."""
        self._chronicle.left[self.name] -= 1
        return self._chronicle.recorder.begin(self._recorded_as)

    def note_parts(self, whole: int, parts: Sequence[int]) -> None:
        """Notes which parts a shared transaction of that start timestamp is to commit."""
        self._chronicle.parts.update(dict.fromkeys(parts, whole))

    def claim(self, recorded: RecordedTransaction, *, committed: bool) -> None:
        """Notes what the library has said about a transaction of unknown outcome."""
        self._claim(recorded, committed=committed)

    async def resolved(self, recorded: RecordedTransaction, error: OutcomeUnknown) -> None:
        """Asks the database for the outcome, and notes what it says."""
        try:
            outcome = await self._database.resolve(error, timeout=2.0)
        except PercolatorError as problem:
            self._expected(problem)
        else:
            self._claim(recorded, committed=outcome is Outcome.COMMITTED)

    def expect(self, error: PercolatorError) -> None:
        """Raises the error unless clients have to expect it from a cluster in trouble."""
        self._expected(error)

    def unique(self) -> bytes:
        """A value that no other transaction ever writes."""
        return b"%s %d" % (self._recorded_as.encode(), self.random.getrandbits(40))

    async def run(self, body: Body, *, serializable: bool = False) -> bool:
        """Runs a transaction. Returns whether it is known to have committed. Raises no error that
        clients have to expect."""
        self._chronicle.left[self.name] -= 1
        impatience = self.random.random()
        timeout = self.random.choice(_SHORT_SECONDS) if impatience < 0.1 else None
        transaction = self._database.transaction(serializable=serializable, timeout=timeout)
        transaction._only_two_phases = self._takes_two_phases()
        try:
            return await self._run(transaction, body, impatience)
        finally:
            # The process may end in the middle: its transaction is not dropped by mistake.
            await transaction._leave()

    async def _run(self, transaction: Transaction, body: Body, impatience: float) -> bool:
        recorded = self._chronicle.recorder.begin(self._recorded_as)
        recorded.record.serializable = transaction.serializable
        begins_late = self._starts.random() < _LATE_SHARE
        doubled = False
        try:
            if not begins_late:
                recorded.began(await transaction.timestamp())
            recorded_tx = RecordedTx(transaction, recorded, self._joined)
            await body(recorded_tx)
            if impatience <= 0.96:
                doubled = self.random.random() < self._chronicle.doubled_share
            if doubled:
                await transaction.timestamp()
            recorded_tx.note_start()
            if transaction.serializable:
                recorded_tx.note_read_locks()
        except PercolatorError as error:
            transaction.rollback()
            recorded.aborted()
            return self._expected(error)
        self._note_commit(transaction, recorded)
        if impatience > 0.96:
            return await self._abandon(transaction, recorded)
        if doubled and recorded.record.locked():
            return await self._commit_twice(transaction, recorded)
        return await self._commit(transaction, recorded)

    async def run_again(self, body: Body) -> bool:
        """As `run`, but again after conflicts, as `Database.run` does. Each attempt is recorded."""
        self._chronicle.left[self.name] -= 1
        policy = RetryPolicy(deadline_seconds=LIMIT_SECONDS)
        try:
            return await self._database.run(self._attempt, body, retry=policy)
        except PercolatorError as error:
            return self._expected(error)

    async def _attempt(self, transaction: Transaction, body: Body) -> bool:
        transaction._only_two_phases = self._takes_two_phases()
        if self._delays.random() < _DELAYED_SHARE:
            # It is older than transactions that have begun to read before it.
            await asyncio.sleep(self._delays.random() * _DELAY_SECONDS_MAX)
        recorded = self._chronicle.recorder.begin(self._recorded_as)
        try:
            recorded_tx = RecordedTx(transaction, recorded, self._joined)
            await body(recorded_tx)  # its first read may wait for its turn
            if self._starts.random() >= _LATE_SHARE:
                await transaction.timestamp()
            recorded_tx.note_start()
        except PercolatorError:
            recorded.aborted()
            raise
        self._note_commit(transaction, recorded)
        try:
            commit = await transaction.commit()
        except OutcomeUnknown:
            recorded.unknown()
            raise
        except PercolatorError:
            recorded.aborted()
            raise
        recorded.committed(commit or 0)
        return True

    async def _commit_twice(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        """Commits like a gateway whose caller has sent the same commit to another gateway, too."""
        if transaction._reader.late:
            # `commit` would do so first. The other gateway is sent all writes.
            try:
                await transaction._complete(self._database._engine.now() + LIMIT_SECONDS)
            except PercolatorError as error:
                recorded.aborted()
                return self._expected(error)
        self._chronicle.doubled.add(recorded.record.start_ts)
        transaction._alone = False
        try:
            kept = await transaction._with_entries(self._database._engine.now() + LIMIT_SECONDS)
        except PercolatorError as error:
            transaction.rollback()
            recorded.aborted()
            return self._expected(error)
        other = transaction._prepare_commit(kept)
        transaction._only_two_phases = self._takes_two_phases()
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
        if commit and (transaction._commit is None or transaction._commit.in_one_round):
            self._chronicle.committed_in_one_round += 1
        return True

    def _takes_two_phases(self) -> bool:
        return self._phases.random() >= self._chronicle.one_round_share

    async def _abandon(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        """Cancels the transaction in the middle of its commit."""
        seconds = self.random.random() * _ABANDONED_SECONDS_MAX
        committing = asyncio.ensure_future(self._commit(transaction, recorded))
        await asyncio.wait([committing], timeout=seconds)
        if committing.done():
            return committing.result()
        committing.cancel()
        await asyncio.wait([committing])
        if transaction.outcome is Outcome.ABORTED:
            if recorded.record.commit_called is None:  # it was cancelled before its timestamp came
                recorded.aborted()
            self._claim(recorded, committed=False)
        return False

    async def _ask(
        self, transaction: Transaction, recorded: RecordedTransaction, error: OutcomeUnknown
    ) -> None:
        """Asks the transaction for its outcome, or the database, or does not ask."""
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
        """True if a transaction that was given up will never be committed.

        One of two committers may run out of time and give up a transaction that the other commits.
        As for a gateway, only a durable marker rules that out, or another transaction's newer
        commit of the primary.
        """
        start = transaction.start_timestamp
        if start not in self._chronicle.doubled:
            return True
        if self._database._engine.env.verdicts.get(start) == ROLLED_BACK:
            return True
        if isinstance(error, ConflictError) and error.other_commit_timestamp:
            return error.cell == min(transaction.internal.writes.stored(start))
        return False

    def _claim(self, recorded: RecordedTransaction, *, committed: bool) -> None:
        self._chronicle.claims.append(Claim(recorded.record, committed))

    def _expected(self, error: PercolatorError) -> bool:
        """Raises the error unless clients have to expect it from a cluster in trouble.

        History is kept hardly longer than a session takes to report what it needs, so an error
        about a snapshot that is too old has to be expected, too.
        """
        expected = ConflictError | OutcomeUnknown | SnapshotTooOld
        if error.retry is not Retry.USELESS or isinstance(error, expected):
            return False
        if not isinstance(error, self.also_expected):
            raise error
        return False

    def _note_commit(self, transaction: Transaction, recorded: RecordedTransaction) -> None:
        """Notes that the transaction is being committed. If it is given its start timestamp for
        that, it is noted then: nothing is sent before."""
        writes = transaction.internal.writes.cells or transaction._reader.late
        if transaction.start_timestamp is not None or not writes:
            recorded.commit_called()
            return
        reader = transaction._reader
        set_start = reader.set_start

        def noted(start: int) -> None:
            set_start(start)
            recorded.began(start)
            recorded.commit_called()

        reader.set_start = noted  # type: ignore[method-assign]
