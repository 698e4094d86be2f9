"""Bulk loads among transactions: a load is seen as a whole or not at all, and has no conflicts.

Buckets of rows are loaded now and then, read and scanned all the time, and written in transactions,
after which later loads of the same bucket are refused. A loader may die in the middle; the next
loader of that bucket takes over, and the last loads are ended when everything is at rest. For the
checker, a load is a transaction that writes all of its rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from percolator.aio.bulk_load import BulkLoad, LoadPlan, LoadTimestamps
from percolator.aio.row_load import RowLoad
from percolator.changes import Change, ChangeKind
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SchemaError,
    SnapshotTooOld,
    UsageError,
)
from percolator.schema import Column
from percolator.timestamps import Timestamp
from tests.isolation.history import History
from tests.simulation.sessions import Body, Cells, RecordedTx, Session
from tests.simulation.workloads.transactions import Predicates, Registers
from tests.simulation.workloads.workload import Ending, Workload

_BUCKETS = 24
_ROWS = 6
_COLUMN = b"v"
_INTERRUPTED = 0.3
"""The share of loads that another run continues."""


class Loads(Workload):
    """A bucket holds the rows of one load, and what transactions have written over them."""

    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("loads", (_row(5, 3), _row(11, 0), _row(17, 2)))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        bucket = session.random.randrange(_BUCKETS)
        if chance < 0.35:
            await self._load(session, bucket)
        elif chance < 0.6:
            await session.run(self._scan)
        elif chance < 0.9:
            await session.run(self._reading(bucket))
        else:
            await session.run(self._writing(session, bucket))

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left: until then, their ranges are closed to all transactions."""
        for bucket in range(_BUCKETS):
            await self._bulk_load(session, bucket).abandon()

    async def _load(self, session: Session, bucket: int) -> None:
        load = self._bulk_load(session, bucket)
        recorded = session.begin_alone()
        record = recorded.record
        try:
            timestamps = await load.begin()
            recorded.began(timestamps.start)
            value = session.unique()
            for number in range(_ROWS):
                recorded.put((self.cells.name, _row(bucket, number), _COLUMN), value)
            recorded.commit_called()
            # Both timestamps were taken at the beginning.
            record.commit_called = record.begin_called
            cells = [(_row(bucket, number), _COLUMN, value) for number in range(_ROWS)]
            half = session.random.randrange(_ROWS)
            await load.load(cells[half:], timestamps)
            if session.random.random() < _INTERRUPTED:
                # What another process, which knows which part is loaded, does a while later.
                await asyncio.sleep(session.random.random())
                load = self._bulk_load(session, bucket)
                if not await load.resume(timestamps):
                    raise UsageError("another run has taken over")
            await load.load(cells[:half], timestamps)
            await load.finish(timestamps)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument):
                session.expect(error)
            if record.start_ts:
                recorded.unknown()
            else:
                recorded.aborted()
            if session.random.random() < 0.5:
                await self._abandon(session, load)
            return
        recorded.committed(timestamps.commit)

    async def _abandon(self, session: Session, load: BulkLoad) -> None:
        try:
            await load.abandon()
        except InvalidArgument:
            return  # another run has taken it over
        except PercolatorError as error:
            session.expect(error)

    async def _scan(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def _reading(self, bucket: int) -> Body:
        async def body(tx: RecordedTx) -> None:
            await tx.get_many([_row(bucket, number) for number in range(_ROWS)], self._value)

        return body

    def _writing(self, session: Session, bucket: int) -> Body:
        rows = {session.random.randrange(_ROWS) for _ in range(2)}
        value = session.unique()

        async def body(tx: RecordedTx) -> None:
            for number in sorted(rows):
                await tx.get(_row(bucket, number), self._value)
                await tx.set(_row(bucket, number), self._value, value)

        return body

    def _bulk_load(self, session: Session, bucket: int) -> BulkLoad:
        plan = LoadPlan(
            table=self.cells.name,
            name=f"bucket-{bucket}",
            start=_row(bucket, 0),
            end=_row(bucket + 1, 0),
            notify=False,
        )
        return BulkLoad(session.database, plan)


def _row(bucket: int, number: int) -> bytes:
    return b"bucket-%02d-row-%d" % (bucket, number)


# Several loaders of one tablet, beside transactions of its other rows, which commit in one round.
#
# All clients work on the same few ranges for a while, then on the next ones: so transactions hold
# rows of a range when it is closed, and loads of one range overlap. Most
# transactions also write a row outside of all ranges.
#
# When the trouble is over, loaders load without a pause, while transactions commit one after the
# other. None of them may wait longer than `_PATIENCE_SECONDS`, or fail, or be told that the outcome
# is unknown; nor may they keep the loaders out.

_LOADERS_ROWS = 4
_RANGES_PER_SECOND = 10.0
_RANGES_AT_ONCE = 2
_AT_REST = 900_000
"""The range that is loaded when the trouble is over; those after it are closed and opened."""
_OUTSIDE = 8
_LOADERS = 4
_LOOKS = 5
_PROGRESS_SECONDS = 1.0
_PATIENCE_SECONDS = 0.5
"""Far above what a commit takes beside one load, and far below the time for which they load."""
_SHARE_MIN = 0.6
"""The least share of the commits beside one loader that there are beside several: a batch comes
between any two loads, so only what comes after it may take longer."""


class Loaders(Workload):
    """See the module's docstring."""

    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("loaders")
        self._value = self.cells.column()
        self._begun: set[int] = set()
        """The ranges of which a load was begun."""
        self._problems: list[str] = []

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        recent = int(asyncio.get_running_loop().time() * _RANGES_PER_SECOND)
        number = 1 + recent - session.random.randrange(_RANGES_AT_ONCE)
        if chance < 0.3:
            await self._load(session, number)
        elif chance < 0.4:
            await session.run(self._scan)
        else:
            await session.run(self._writing(session, number))

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left; then judges progress, with nothing in the way but loads."""
        for number in sorted(self._begun):
            await self._bulk_load(session, number).abandon()
        await self._write_all_rows(session)
        await self._progress(session)

    def check(self, ending: Ending) -> Iterable[str]:
        return self._problems

    # ------------------------------------------------------------------ in trouble

    async def _load(self, session: Session, number: int) -> None:
        self._begun.add(number)
        load = self._bulk_load(session, number)
        recorded = session.begin_alone()
        try:
            timestamps = await load.begin()
            recorded.began(timestamps.start)
            value = session.unique()
            for place in range(_LOADERS_ROWS):
                recorded.put((self.cells.name, _loader_row(number, place), _COLUMN), value)
            recorded.commit_called()
            # Both timestamps were taken at the beginning.
            recorded.record.commit_called = recorded.record.begin_called
            await asyncio.gather(
                *(
                    self._bulk_load(session, number).load(
                        [(_loader_row(number, place), _COLUMN, value)], timestamps
                    )
                    for place in range(_LOADERS_ROWS)
                )
            )
            await load.finish(timestamps)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument):
                session.expect(error)
            if recorded.record.start_ts:
                recorded.unknown()
            else:
                recorded.aborted()
            return
        recorded.committed(timestamps.commit)

    async def _scan(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def _writing(self, session: Session, number: int) -> Body:
        """Writes a row of the range, or one outside, or both."""
        rows = [_loader_row(number, session.random.randrange(_LOADERS_ROWS)), _outside(session)]
        rows = rows if session.random.random() < 0.4 else [session.random.choice(rows)]
        blindly, value = session.random.random() < 0.7, session.unique()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                if not blindly:
                    await tx.get(row, self._value)
                await tx.set(row, self._value, value)

        return body

    # ------------------------------------------------------------------ at rest

    async def _write_all_rows(self, session: Session) -> None:
        """Whatever has waited for a row and was given up must not stand in its line."""
        for number in range(_OUTSIDE):
            row, value = b"outside-%d" % number, session.unique()

            async def body(tx: RecordedTx, row: bytes = row, value: bytes = value) -> None:
                await tx.set(row, self._value, value)

            # The first attempt may wait for locks that a client has left.
            if not (await session.run_again(body) or await session.run_again(body)):
                self._problems.append(f"{row!r} cannot be written")

    async def _progress(self, session: Session) -> None:
        """Loads one range with one loader, then with several; then closes and opens ranges."""
        recorded = session.begin_alone()
        load = self._bulk_load(session, _AT_REST)
        timestamps = await load.begin()
        recorded.began(timestamps.start)
        value = session.unique()
        for place in range(_LOADERS):
            recorded.put((self.cells.name, _loader_row(_AT_REST, place), _COLUMN), value)
        recorded.commit_called()
        recorded.record.commit_called = recorded.record.begin_called

        def load_row(place: int) -> Awaitable[object]:
            cells = [(_loader_row(_AT_REST, place), _COLUMN, value)]
            return self._bulk_load(session, _AT_REST).load(cells, timestamps)

        alone = await self._commits_beside(session, load_row, 1)
        together = await self._commits_beside(session, load_row, _LOADERS)
        if together < alone * _SHARE_MIN:
            self._problems.append(
                f"{together} commits beside {_LOADERS} loaders, {alone} beside one"
            )
        await load.finish(timestamps)
        recorded.committed(timestamps.commit)

        async def close_and_open(place: int) -> None:
            other = self._bulk_load(session, _AT_REST + 1 + place)
            await other.begin()
            await other.abandon()

        await self._commits_beside(session, close_and_open, _LOADERS)

        async def close_and_look(place: int) -> None:
            other = self._bulk_load(session, _AT_REST + 1 + place)
            if not await other.resume(await other.begin()):
                self._problems.append(f"the range of load {place} is open although it has begun")
            await other.abandon()

        for _ in range(_LOOKS):
            await asyncio.gather(*map(close_and_look, range(_LOADERS)))

    async def _commits_beside(
        self, session: Session, work: Callable[[int], Awaitable[object]], workers: int
    ) -> int:
        """Has so many repeat the work, each with its number; returns how many transactions, one
        after the other, have committed meanwhile."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _PROGRESS_SECONDS

        async def repeat(place: int) -> int:
            count = 0
            while loop.time() < ends:
                await work(place)
                count += 1
            return count

        working = [asyncio.ensure_future(repeat(place)) for place in range(workers)]
        commits = 0
        while loop.time() < ends:
            began = loop.time()
            committed = await session.run_again(self._committing(session))
            commits += 1
            seconds = loop.time() - began
            if not committed or seconds > _PATIENCE_SECONDS:
                what = "was committed" if committed else "failed"
                self._problems.append(
                    f"a transaction beside {workers} loaders {what} after {seconds:.2f} s"
                )
        counts = await asyncio.gather(*working)
        if sum(counts) < commits / 4 or min(counts) < max(counts) / 4:
            self._problems.append(f"beside {commits} commits, loaders worked {counts} times")
        return commits

    def _committing(self, session: Session) -> Body:
        """Writes a row on which no lock was left."""
        row, value = b"progress-%d" % session.random.randrange(_OUTSIDE), session.unique()

        async def body(tx: RecordedTx) -> None:
            await tx.set(row, self._value, value)

        return body

    def _bulk_load(self, session: Session, number: int) -> BulkLoad:
        plan = LoadPlan(
            table=self.cells.name,
            name=f"range-{number}",
            start=_loader_row(number, 0),
            end=_loader_row(number + 1, 0),
            notify=False,
        )
        return BulkLoad(session.database, plan)


def _loader_row(number: int, place: int) -> bytes:
    return b"range-%06d-row-%d" % (number, place)


def _outside(session: Session) -> bytes:
    return b"outside-%d" % session.random.randrange(_OUTSIDE)


# Bulk loads into a row store, among transactions: tables appear as a whole, or not at all.
#
# Each table is loaded once. Loaders die, take over from each other, resume, and go on writing when
# they have been taken over. Some of what a finished load has written is written again much later,
# as by a call that was given up. For the checker, a load is a transaction that writes all of its
# rows.

_TABLES = 12
"""The share of loads that another run continues."""
_LATE = 0.7
"""The share of loads of which a part is written again later."""
_LATE_SECONDS_MAX = 4.0


class Arrivals(Workload):
    """A table holds the rows of one load, and what transactions have made of them."""

    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("arrivals")
        self._arrived: list[Cells] = []

    @property
    def tables(self) -> tuple[Cells, ...]:
        """At the end, with those that have arrived."""
        return (self.cells, *self._arrived)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError  # most tables have not arrived yet
        chance = session.random.random()
        cells = _cells(session.random.randrange(_TABLES))
        if chance < 0.35:
            await self._load(session, cells)
        elif chance < 0.5:
            await session.run(self._scanning(cells))
        elif chance < 0.7:
            await session.run(self._reading(cells))
        else:
            await session.run(self._writing(session, cells))

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left, and sees what has arrived."""
        for number in range(_TABLES):
            await _load_of(session, _cells(number)).abandon()
        names = set(await session.database.tables()) - {self.cells.name}
        self._arrived = [Cells(name) for name in sorted(names)]

    async def _load(self, session: Session, cells: Cells) -> None:
        load = _load_of(session, cells)
        recorded = session.begin_alone()
        record = recorded.record
        value, column = session.unique(), cells.column()
        loaded = [(_arrived_row(number), column.name, value) for number in range(_ROWS)]
        half = session.random.randrange(1, _ROWS)
        try:
            timestamps = await load.begin()
            recorded.began(timestamps.start)
            for row, _, _ in loaded:
                recorded.put((cells.name, row, column.name), value)
            recorded.commit_called()
            # Both timestamps were taken at the beginning.
            record.commit_called = record.begin_called
            await load.load(loaded[half:], timestamps)
            if session.random.random() < _INTERRUPTED:
                # What another process, which knows which part is loaded, does a while later.
                await asyncio.sleep(session.random.random())
                load = _load_of(session, cells)
                if not await load.resume(timestamps):
                    raise UsageError("another run has taken over")
            await load.load(loaded[:half], timestamps)
            await load.finish(timestamps)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument | SchemaError):
                session.expect(error)
            if record.start_ts:
                recorded.unknown()
            else:
                recorded.aborted()
            if session.random.random() < 0.3:
                await self._abandon(session, load)
            return
        recorded.committed(timestamps.commit)
        if session.random.random() < _LATE:
            await self._write_late(session, load, loaded[half:], timestamps)

    async def _write_late(
        self,
        session: Session,
        load: RowLoad,
        loaded: list[tuple[bytes, bytes, bytes]],
        timestamps: LoadTimestamps,
    ) -> None:
        await asyncio.sleep(session.random.random() * _LATE_SECONDS_MAX)
        try:
            await load.load(loaded, timestamps)
        except PercolatorError as error:
            session.expect(error)

    async def _abandon(self, session: Session, load: RowLoad) -> None:
        try:
            await load.abandon()
        except PercolatorError as error:
            session.expect(error)

    def _scanning(self, cells: Cells) -> Body:
        async def body(tx: RecordedTx) -> None:
            await tx.scan(cells.table)

        return body

    def _reading(self, cells: Cells) -> Body:
        async def body(tx: RecordedTx) -> None:
            await tx.get_many([_arrived_row(number) for number in range(_ROWS)], cells.column())

        return body

    def _writing(self, session: Session, cells: Cells) -> Body:
        """A row of the table, and one of a table that is there from the beginning."""
        row, value = _arrived_row(session.random.randrange(_ROWS)), session.unique()
        deletes = session.random.random() < 0.6

        async def body(tx: RecordedTx) -> None:
            await tx.get(row, cells.column())
            if deletes:
                await tx.delete(row, cells.column())
            else:
                await tx.set(row, cells.column(), value)
            other: Column[bytes] = self.cells.column()
            await tx.set(row, other, value)

        return body


def _cells(number: int) -> Cells:
    return Cells(f"arrival-{number:02}")


def _load_of(session: Session, cells: Cells) -> RowLoad:
    plan = LoadPlan(cells.name, "arrival", start=b"", end=b"", notify=False)
    return RowLoad(session.database, plan)


def _arrived_row(number: int) -> bytes:
    return b"row-%d" % number


# Followers of change feeds among writers and loads: each change once, in the order of commits.
#
# Each session follows one table. Now and then it reads on from where it was, in a new reading, and
# keeps what it has read up to the last whole commit: a reading may fail at any place. At the end,
# what each follower has read is compared with everything that was committed in its table. Under the
# real master, tables begin without a feed, and a follower has it switched on before it begins.

_FOLLOWING = 0.2
"""The share of steps in which a session reads on."""

_LEAVING = 0.05
"""The share of changes inside a commit at which a session leaves, and goes on in a new reading."""

Entry = tuple[int, bytes, bytes, bytes | None]
"""Commit timestamp, row, column and value."""


@dataclass
class Stretch:
    """Changes that a follower has read without a gap."""

    after: int
    until: int
    """All commits up to here were read as a whole."""
    entries: list[Entry] = field(default_factory=list)
    before: dict[tuple[int, bytes, bytes], bytes | None] = field(default_factory=dict)
    """Former values of cells, before some of these changes."""


@dataclass
class Follower:
    """The reader of one table. It outlives the client that runs it."""

    cells: Cells
    stretches: list[Stretch] = field(default_factory=list)


class Feeds(Workload):
    """Several kinds of writers, and a follower in every session."""

    leaves_behind = True
    change_feed = True

    def __init__(self) -> None:
        self._loads = Loads()
        self._parts: list[Workload] = [Registers(), Predicates(), self._loads]
        self.cells = self._parts[0].cells
        self._followers: dict[str, Follower] = {}

    @property
    def tables(self) -> tuple[Cells, ...]:
        return tuple(table for part in self._parts for table in part.tables)

    async def step(self, session: Session) -> None:
        if session.random.random() < _FOLLOWING:
            session.skip()
            await self._read_on(session, self._follower(session))
        else:
            await session.random.choice(self._parts).step(session)

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left, and reads all feeds to their end."""
        await self._loads.rest(session)
        for follower in self._followers.values():
            end = await session.database.timestamp()
            while not follower.stretches or follower.stretches[-1].until < end:
                await self._read_on(session, follower)

    def _follower(self, session: Session) -> Follower:
        found = self._followers.get(session.name)
        if found is None:
            tables = self.tables
            found = Follower(tables[len(self._followers) % len(tables)])
            self._followers[session.name] = found
        return found

    async def _read_on(self, session: Session, follower: Follower) -> None:
        try:
            if not follower.stretches:
                await self._begin(session, follower)
            await self._read(session, follower, follower.stretches[-1])
        except SnapshotTooOld:
            # History is kept hardly longer than a session needs to say what it needs.
            await self._begin_again(session, follower)
        except PercolatorError as error:
            session.expect(error)

    async def _begin_again(self, session: Session, follower: Follower) -> None:
        try:
            await self._begin(session, follower)
        except PercolatorError as error:
            session.expect(error)

    async def _begin(self, session: Session, follower: Follower) -> None:
        database = session.database
        if session.switches_feeds:
            await database.set_change_feed(follower.cells.table, on=True)
        now = await database.timestamp()
        follower.stretches.append(Stretch(now, now))

    async def _read(self, session: Session, follower: Follower, stretch: Stretch) -> None:
        database, with_before = session.database, session.random.random() < 0.5
        until = await database.timestamp()
        commit: list[Change[bytes]] = []
        changes = database.changes(
            follower.cells.table, after=Timestamp(stretch.until), until=until, before=with_before
        )
        try:
            async with changes:
                async for change in changes:
                    if change.commit_timestamp <= stretch.until:
                        session.broken(f"{change} came after the end of its commit")
                    commit.append(change)
                    if change.ends_commit:
                        _take(stretch, commit, with_before=with_before)
                        commit = []
                    elif session.random.random() < _LEAVING:
                        return
        finally:
            # Also after an error, and from the middle of a commit: it goes on from here.
            stretch.until = max(stretch.until, changes.reached)
        if commit:
            session.broken(f"a reading ended inside the commit at {commit[0].commit_timestamp}")
        if stretch.until != until:
            session.broken(f"a reading up to {until} has reached {stretch.until}")

    def check(self, ending: Ending) -> Iterable[str]:
        for part in self._parts:
            yield from part.check(ending)
        for name, follower in self._followers.items():
            expected = _entries(ending.history, follower.cells.name)
            for stretch in follower.stretches:
                yield from _wrong(f"{name} on {follower.cells.name}", stretch, expected)


def _take(stretch: Stretch, commit: list[Change[bytes]], *, with_before: bool) -> None:
    for change in commit:
        at = int(change.commit_timestamp)
        stretch.entries.append((at, change.key, change.column, change.raw_value))
        if with_before:
            before = change.raw_before
            stretch.before[at, change.key, change.column] = before
            if (change.kind is ChangeKind.INSERT) and before is not None:
                raise AssertionError("an insertion over a value")
    stretch.until = int(commit[-1].commit_timestamp)


def _entries(history: History, table: str) -> list[Entry]:
    """Everything that was committed in a table, in the order of a feed."""
    return sorted(
        (record.commit_ts, row, column, value)
        for record in history
        if record.committed and record.commit_ts
        for (name, row, column), value in record.writes().items()
        if name == table
    )


def _wrong(who: str, stretch: Stretch, committed: list[Entry]) -> Iterable[str]:
    expected = [entry for entry in committed if stretch.after < entry[0] <= stretch.until]
    if stretch.entries != expected:
        missing = [entry[:3] for entry in expected if entry not in stretch.entries]
        strange = [entry[:3] for entry in stretch.entries if entry not in expected]
        yield (
            f"the feed read by {who} above {stretch.after} is wrong: missing {missing[:3]}, "
            f"not committed {strange[:3]}, {len(stretch.entries)} entries for {len(expected)}"
        )
        return
    values: dict[tuple[bytes, bytes], bytes | None] = {}
    for at, row, column, value in committed:
        known = stretch.before.get((at, row, column), _UNKNOWN)
        if known is not _UNKNOWN and known != values.get((row, column)):
            yield f"the feed read by {who} has a wrong value before the change at {at}: {known!r}"
        values[row, column] = value


_UNKNOWN = b"not read"
