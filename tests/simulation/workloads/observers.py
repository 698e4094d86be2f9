"""Watched columns, chained: a change is copied, the copy counted, and each run counts once.

    source ── copy ──> copy ── count ──> a counter per row, and one that all rows share
       ├───── gather, for several rows at once ──> counters like these
       └───── note (writes nothing else; deletes do not wake it)
    poke  ── poked (weak)

A run that committed twice, or never, shows in the counters; one that read too early, in the copies.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from percolator import Column, codecs, observes
from percolator.aio import Transaction
from percolator.aio.observing import worker_context
from percolator.errors import NotExecuted, PercolatorError
from percolator.observers.dead_letters import DEAD_LETTERS
from percolator.observers.definition import Observer
from percolator.observers.registration import register
from percolator.recipes import (
    CombineQueue,
    Export,
    ExportQueue,
    Index,
    KeyChange,
    ShardedCounter,
)
from tests.isolation.history import Delete, Put
from tests.simulation.sessions import Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Ending, Workload, preferred

_ROWS = [b"row-%02d" % number for number in range(9)]
_SHARED = b"shared"
_PAUSE_SECONDS = 0.05
_FAILS_EVERY = 13
_BATCH = 3
"""So few that many runs leave something to the next one."""
_ATTEMPTS = 1_000
"""So many that an observer that fails now and then never leaves a dead letter."""


class Chains(Workload):
    """Every change leads to exactly one run."""

    def __init__(self, *, gathers: bool = True) -> None:
        """`gathers`: with an observer of several rows at once, which only tablets have."""
        self._gathers = gathers
        self.cells = Cells("chains", (_ROWS[3], _ROWS[6]))
        self._source = self.cells.column("source")
        self._copy = self.cells.column("copy")
        self._count = self.cells.column("count")
        self._gathered = self.cells.column("gathered")
        self._poke = self.cells.column("poke")
        self._poked = self.cells.column("poked")
        self._observers = self._define()

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells, Cells(DEAD_LETTERS.name))

    @property
    def observers(self) -> list[Observer]:
        return self._observers

    def _define(self) -> list[Observer]:
        @observes(self._source, name="copy", pause=_PAUSE_SECONDS, attempts=_ATTEMPTS)
        async def copy(tx: Transaction, row: bytes) -> None:
            value = await tx.get(row, self._source)
            if value is None:
                await tx.delete(row, self._copy)
            else:
                await tx.set(row, self._copy, value)

        @observes(self._copy, name="count", attempts=_ATTEMPTS)
        async def count(tx: Transaction, row: bytes) -> None:
            if await tx.timestamp() % _FAILS_EVERY == 0:
                raise ValueError("now and then")
            for counter in (row, _SHARED):
                await _add(tx, counter, self._count, 1)

        @observes(self._source, name="gather", batch=_BATCH, concurrency=1, attempts=_ATTEMPTS)
        async def gather(tx: Transaction, rows: Sequence[bytes]) -> None:
            if await tx.timestamp() % _FAILS_EVERY == 0:
                raise ValueError("now and then")
            for row in rows:
                await _add(tx, row, self._gathered, 1)
            await _add(tx, _SHARED, self._gathered, len(rows))

        @observes(self._source, self._copy, name="note", deletes=False, attempts=_ATTEMPTS)
        async def note(tx: Transaction, row: bytes, column: Column[bytes]) -> None:
            await tx.get(row, column)

        @observes(self._poke, name="poked", weak=True, attempts=_ATTEMPTS)
        async def poked(tx: Transaction, row: bytes) -> None:
            value = await tx.get(row, self._source)
            if value is not None:
                await tx.set(row, self._poked, value)

        return [copy, count, *((gather,) if self._gathers else ()), note, poked]

    async def step(self, session: Session) -> None:
        rows = session.random.sample(_ROWS, session.random.choice((1, 1, 1, 2)))
        chance = session.random.random()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                if chance < 0.1:
                    await tx.delete(row, self._source)
                else:
                    await tx.set(row, self._source, session.unique())
                if chance > 0.8:
                    await tx.notify(row, self._poke)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        rows = ending.tables[self.cells.name]
        for row in _ROWS:
            cells = rows.get(row, {})
            if cells.get(b"source") != cells.get(b"copy"):
                yield f"{row!r} holds {cells.get(b'source')!r}, and its copy {cells.get(b'copy')!r}"
        counters = (("count", b"count"), ("gather", b"gathered"))
        for observer, column in counters[: 1 + self._gathers]:
            handled = Counter(
                key[1]
                for record in ending.committed()
                for key in record.triggers
                if record.observer == observer
            )
            handled[_SHARED] = handled.total()
            for row, times in handled.items():
                found = int(rows.get(row, {}).get(column, b"0"))
                if found != times:
                    yield f"{row!r} has counted {found} runs of {observer}, of {times}"


async def _add(tx: Transaction, row: bytes, counter: Column[bytes], number: int) -> None:
    before = await tx.get(row, counter, default=b"0")
    await tx.set(row, counter, b"%d" % (int(before) + number))


# An index that its observers keep by what they are told: what the cell held when they last ran, and
# what it holds. They pause for so long that what they have seen is below the safe point by then.
#
#     source ─┬─ invert ──────────────────────────> VALUE: its row
#             ├─ invert many, several rows at once ─> the same in another column
#             └─ skim (deletes do not wake it) runs rarely, so that what it has seen lies under
#                deletions that nobody waits for

_LONG_PAUSE_SECONDS = 2.0
_DELETED_SHARE = 0.25
_WAITS_EVERY = 5
_WAITS_SECONDS = 0.5
"""So that another run for the change may overtake one before it asks."""


class _Told(NamedTuple):
    """The arguments of one attempt to run."""

    observer: str
    at: int
    row: bytes
    was: bytes | None


class Inverted(Workload):
    """Each value leads to its row, and nothing else leads anywhere."""

    def __init__(self, *, gathers: bool = True) -> None:
        """`gathers`: with an observer of several rows at once, which only tablets have."""
        self.cells = Cells("inverted", (_ROWS[3], _ROWS[6]))
        self._source = self.cells.column("source")
        self._index = Cells("values")
        self._told: list[_Told] = []

        @observes(self._source, name="invert", pause=_LONG_PAUSE_SECONDS, attempts=_ATTEMPTS)
        async def invert(tx: Transaction, row: bytes) -> None:
            await self._invert(tx, "invert", [row])

        @observes(self._source, name="invert many", batch=_BATCH, attempts=_ATTEMPTS)
        async def invert_many(tx: Transaction, rows: Sequence[bytes]) -> None:
            await self._invert(tx, "invert many", rows)

        @observes(
            self._source,
            name="skim",
            deletes=False,
            pause=_LONG_PAUSE_SECONDS,
            attempts=_ATTEMPTS,
        )
        async def skim(tx: Transaction, row: bytes) -> None:
            await tx.get(row, self._source)

        self._keepers = (
            {"invert": invert, "invert many": invert_many} if gathers else {"invert": invert}
        )
        self._observers = [*self._keepers.values(), skim]

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells, self._index, Cells(DEAD_LETTERS.name))

    @property
    def observers(self) -> list[Observer]:
        return self._observers

    async def _invert(self, tx: Transaction, name: str, rows: Sequence[bytes]) -> None:
        at = await tx.timestamp()
        if at % _WAITS_EVERY == 0:
            await asyncio.sleep(_WAITS_SECONDS)
        entry = self._index.column(name)
        for row in rows:
            was, now = await tx.previous(row, self._source), await tx.get(row, self._source)
            self._told.append(_Told(name, at, row, was))
            if was is not None and was != now:
                await tx.delete(was, entry)
            if now is not None:
                await tx.set(now, entry, row)
        if at % _FAILS_EVERY == 0:
            raise ValueError("now and then")

    async def step(self, session: Session) -> None:
        rows = session.random.sample(_ROWS, session.random.choice((1, 1, 1, 2)))
        deletes = session.random.random() < _DELETED_SHARE

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                if deletes:
                    await tx.itself.delete_row(self.cells.table, row)
                else:
                    await tx.itself.set(row, self._source, session.unique())
            tx.note_writes()

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        source = {
            (cells[b"source"], row)
            for row, cells in ending.tables[self.cells.name].items()
            if b"source" in cells
        }
        for name in self._keepers:
            column = name.encode()
            found = {
                (value, cells[column])
                for value, cells in ending.tables[self._index.name].items()
                if column in cells
            }
            if found != source:
                yield f"the index of {name!r} differs: {sorted(found ^ source)[:3]}"
        yield from self._wrongly_told(ending)

    def _wrongly_told(self, ending: Ending) -> Iterable[str]:
        """Values that runs, committed or not, were told as seen before, where the last run that had
        committed by then has seen others."""
        values: dict[bytes, list[tuple[int, bytes | None]]] = defaultdict(list)
        runs: dict[tuple[str, bytes], list[tuple[int, int]]] = defaultdict(list)
        for record in ending.committed():
            for operation in record.operations:
                if isinstance(operation, Put | Delete) and operation.key[0] == self.cells.name:
                    value = operation.value if isinstance(operation, Put) else None
                    values[operation.key[1]].append((record.commit_ts, value))
            for _, row, _ in record.triggers:
                runs[record.observer, row].append((record.commit_ts, record.start_ts))
        for told in self._told:
            seen = [run for run in runs[told.observer, told.row] if run[0] <= told.at]
            _, start = max(seen, default=(0, 0))
            before = [one for one in values[told.row] if one[0] <= start]
            _, was = max(before, key=itemgetter(0), default=(0, None))
            if told.was != was:
                yield (
                    f"{told.observer!r} was told at {told.at} that {told.row!r} had held "
                    f"{told.was!r}, and it had seen {was!r} at {start}"
                )


# Observers that are registered when their cells are there already, or before their table is.
#
#     first    by the workers, before clients write
#     amid     by a client, or by the workers, while clients write and servers and workers die
#     last     when the trouble is over, just before it is waited for observers
#     arrived  before its table exists: it wants nothing older than itself, and must miss nothing
#
# Nothing is deleted: a cell that is gone when its observer is registered needs no run.

_NEWCOMERS_ROWS = [b"row-%02d" % number for number in range(60)]
_LOADED_AT_ONCE = 15
_OF_CLIENTS = (_NEWCOMERS_ROWS[:20], _NEWCOMERS_ROWS[20:40], _NEWCOMERS_ROWS[40:], _NEWCOMERS_ROWS)
"""The rows to which each client writes. One that writes to all tablets soon learns of a new
observer. The others write to the only tablet that they use as long as it has not heard of it."""
_FRESH_SHARE = 0.5
"""The share of writes into rows that were empty: no backfill from before such a write knows their
cells. It notifies of all others, and an observer reads what is newest."""
_CREATED_SHARE = 0.3
_CALL_SECONDS = 3.0
_STEPS_BEFORE = 40
_AGAIN_SECONDS = 0.2
_LATER = "created-late"


class Newcomers(Workload):
    """The newest value of each cell is copied, whenever it was written."""

    registers_late = True
    leaves_behind = True

    def __init__(self, *, creates: bool = False) -> None:
        """`creates`: clients create a table in the midst of the trouble."""
        self.cells = Cells("newcomers", (_NEWCOMERS_ROWS[20], _NEWCOMERS_ROWS[40]))
        self._later = Cells(_LATER)
        self._text = self.cells.column("text")
        self._other = self.cells.column("other")
        self._creates = creates
        self.created_late = {_LATER} if creates else ()
        self._is_created = False
        self._is_over = False
        self._steps = 0
        self._first = self._copying("first", self._text)
        self._amid = self._copying("amid", self._text)
        self._last = self._copying("last", self._text, self._other)
        self._arrived = self._copying("arrived", self._later.column("text"), backfill=False)

    @property
    def tables(self) -> tuple[Cells, ...]:
        later = (self._later,) if self._creates else ()
        return (self.cells, *later, Cells(DEAD_LETTERS.name))

    @property
    def observers(self) -> list[Observer]:
        return [self._first, self._amid, self._last] + [self._arrived] * self._creates

    def observers_of(self, worker: str) -> list[Observer]:
        """One worker waits for the table that does not exist yet, and the other one does not."""
        waits = self._creates and worker.startswith("worker-1")
        is_amid = self._steps >= _STEPS_BEFORE
        later = [self._amid] * is_amid + [self._last] * self._is_over
        return [self._first, *later] + [self._arrived] * waits

    def _copying(self, name: str, *columns: Column[bytes], backfill: bool = True) -> Observer:
        @observes(*columns, name=name, backfill=backfill)
        async def copy(tx: Transaction, row: bytes, column: Column[bytes]) -> None:
            copied = column.table.column(f"{column.name.decode()} by {name}", column.codec)
            value = await tx.get(row, column)
            if value is not None:
                await tx.set(row, copied, value)

        return copy

    async def load(self, session: Session) -> None:
        for at in range(0, len(_NEWCOMERS_ROWS), _LOADED_AT_ONCE):
            rows = _NEWCOMERS_ROWS[at : at + _LOADED_AT_ONCE]

            async def body(tx: RecordedTx, rows: list[bytes] = rows) -> None:
                for row in rows:
                    await tx.set(row, self._text, session.unique())
                    await tx.set(row, self._other, session.unique())

            await session.run(body)

    async def step(self, session: Session) -> None:
        self._steps += 1
        if self._steps == _STEPS_BEFORE:
            await self._register(session)
        elif self._creates and session.random.random() < _CREATED_SHARE:
            if self._is_created:
                await self._write(session, self._later.column("text"))
            else:
                await self._create(session)
        else:
            await self._write(session, session.random.choice((self._text, self._other)))

    async def _write(self, session: Session, column: Column[bytes]) -> None:
        chosen = preferred(session, _OF_CLIENTS)
        rows = session.random.sample(chosen, session.random.choice((1, 1, 2)))
        if session.random.random() < _FRESH_SHARE:
            rows = [b"%s %d" % (row, self._steps) for row in rows]

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.set(row, column, session.unique())

        await session.run(body)

    async def _register(self, session: Session) -> None:
        """While this waits for the tablets, workers start that find the observer registered."""
        session.skip()
        try:
            await register(worker_context(session.database.internal.engine), [self._amid])
        except PercolatorError as error:
            session.expect(error)

    async def _create(self, session: Session) -> None:
        """Only once a worker waits for it: otherwise the observer may be younger than cells."""
        session.skip()
        catalog = session.database.internal.engine.catalog
        deadline = session.database.internal.engine.now() + _CALL_SECONDS
        try:
            if await catalog.awaited(deadline):
                await session.database.create_table(
                    self._later.table, exist_ok=True, timeout=_CALL_SECONDS
                )
                self._is_created = True
        except PercolatorError:
            return  # it may be created all the same: the next attempt finds it

    async def rest(self, session: Session) -> None:
        """Registers the last observer, which no worker knew until now."""
        context = worker_context(session.database.internal.engine)
        while not self._is_over:
            try:
                if self._creates:
                    await session.database.create_table(self._later.table, exist_ok=True)
                    self._is_created = True
                await register(context, [self._last])
                self._is_over = True
            except NotExecuted:  # masters take a while to find that the store answers again
                await context.world.clock.sleep(_AGAIN_SECONDS)

    def check(self, ending: Ending) -> Iterable[str]:
        copies = [(self._text, name) for name in ("first", "last")] + [(self._other, "last")]
        if self._steps >= _STEPS_BEFORE:
            copies.append((self._text, "amid"))
        tables = [(self.cells, copies)]
        if self._is_created:
            tables.append((self._later, [(self._later.column("text"), "arrived")]))
        for cells, copied in tables:
            for row, found in ending.tables[cells.name].items():
                for column, observer in copied:
                    value = found.get(column.name)
                    copy = found.get(column.name + b" by " + observer.encode())
                    if value != copy:
                        yield f"{row!r} of {cells.name} holds {value!r}, {observer} copied {copy!r}"


# Recipes among faults: each is judged by what its users' transactions have committed.
#
#     add ──> CombineQueue ── changed ──> a mirror of each value
#     put ──> ExportQueue ── exporter ──> a receiver outside of the cluster
#     add ──> ShardedCounter
#     write ──> an Index that an observer keeps
#
# A mirror is written by the observer from what it is told, and has to agree with every change.
# Readers note what they have read at their snapshot; at the end, it is compared with what had been
# committed by then. The receiver takes what has a higher number than all before it of its key, as
# one with effects exactly once does. It has to get everything, in the order of commits.

_KEYS = [f"key {number}" for number in range(5)]
_WORDS = [b"ant", b"bee", b"cat", b"dog"]


def _sum(values: Iterable[bytes]) -> bytes | None:
    return b"%d" % total if (total := sum(map(int, values))) else None


class _Seen(NamedTuple):
    """A value that was read at a snapshot."""

    at: int
    key: str
    value: int


class Combining:
    """One queue, used with several numbers of buckets."""

    def __init__(self) -> None:
        self._queues = [
            CombineQueue("sums", key=codecs.text, value=codecs.raw, combine=_sum, buckets=buckets)
            for buckets in (2, 7)
        ]
        self._table = self._queues[0].table
        self._mirrors = Cells("mirrors")
        self._mirror = self._mirrors.column("mirror")
        self._torn = self._mirrors.column("torn")
        self.tables = (Cells("sums", (b"e\x80", b"v")), self._mirrors)
        as_observer = self._queues[0].changed(batch=_BATCH, attempts=_ATTEMPTS)
        self.observer = as_observer(self._reflect)
        self._seen: list[_Seen] = []

    async def _reflect(self, tx: Transaction, changes: Sequence[KeyChange[str, bytes]]) -> None:
        if await tx.timestamp() % _FAILS_EVERY == 0:
            raise ValueError("now and then")
        for key, old, new in changes:
            row = key.encode()
            before = await tx.get(row, self._mirror)
            if before != old:
                await tx.set(row, self._torn, b"%r was told to be %r" % (before, old))
            if new is None:
                await tx.delete(row, self._mirror)
            else:
                await tx.set(row, self._mirror, new)

    async def step(self, session: Session) -> None:
        chance = session.random
        queue = chance.choice(self._queues)
        keys = chance.choices(_KEYS, k=chance.choice((1, 1, 2, 3)))
        amount = chance.choice((-1, 1, 1, 2))
        reads = chance.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            if reads:
                value = await queue.get(tx.itself, keys[0], b"0")
                self._seen.append(_Seen(await tx.itself.timestamp(), keys[0], int(value or 0)))
                return
            for key in keys:
                await queue.add(tx.itself, key, b"%d" % amount)
            tx.note_writes()

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        added: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for record in ending.committed():
            for operation in () if record.observer else record.operations:
                if isinstance(operation, Put) and operation.key[0] == self._table.name:
                    added[_key_of(operation.key[1])].append(
                        (record.commit_ts, int(operation.value))
                    )
        for at, key, value in self._seen:
            expected = sum(amount for commit, amount in added[key] if commit <= at)
            if value != expected:
                yield f"{key!r} was {value} at {at}, and {expected} had been added"
        rows = ending.tables[self._table.name]
        found: Counter[str] = Counter()
        for row, cells in rows.items():
            if row.startswith(b"e"):
                yield f"{row!r} was not combined"
            elif b"value" in cells:
                found[_key_of(row)] = int(cells[b"value"])
        mirrors = ending.tables[self._mirrors.name]
        for key in _KEYS:
            expected = sum(amount for _, amount in added[key])
            if found[key] != expected:
                yield f"{key!r} is {found[key]}, and {expected} was added"
            mirror = mirrors.get(key.encode(), {})
            if b"torn" in mirror:
                yield f"changes of {key!r} are no chain: {mirror[b'torn']!r}"
            if int(mirror.get(b"mirror", b"0")) != expected:
                yield f"{key!r} is {mirror.get(b'mirror')!r} by what was told, not {expected}"


def _key_of(row: bytes) -> str:
    return codecs.text.decode_part(row, 3)[0]


class Exporting:
    """One queue, used with several numbers of buckets, and its receiver."""

    def __init__(self) -> None:
        self._queues = [
            ExportQueue("out", key=codecs.text, value=codecs.raw, buckets=buckets)
            for buckets in (3, 5)
        ]
        self._table = self._queues[0].table
        self.tables = (Cells("out", (b"e\x80",)),)
        as_observer = self._queues[1].exporter(batch=_BATCH, attempts=_ATTEMPTS)
        self.observer = as_observer(self._receive)
        self._received: dict[str, list[bytes]] = defaultdict(list)
        self._last: dict[str, int] = {}
        self._in_no_order: list[str] = []

    async def _receive(self, exports: Sequence[Export[str, bytes]]) -> None:
        await asyncio.sleep(0.001 * len(exports))
        if exports[0].sequence % _FAILS_EVERY == 0 and exports[0].sequence > self._last.get("", 0):
            self._last[""] = exports[0].sequence
            raise ValueError("now and then")
        numbers: dict[str, int] = {}
        for key, sequence, value in exports:
            if sequence <= numbers.get(key, -1):
                self._in_no_order.append(f"{sequence} of {key!r} came after {numbers[key]}")
            numbers[key] = sequence
            if sequence > self._last.get(key, -1):
                self._last[key] = sequence
                self._received[key].append(value)

    async def step(self, session: Session) -> None:
        queue = session.random.choice(self._queues)
        keys = session.random.choices(_KEYS, k=session.random.choice((1, 1, 2)))

        async def body(tx: RecordedTx) -> None:
            for key in keys:
                await queue.put(tx.itself, key, session.unique())
            tx.note_writes()

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        yield from self._in_no_order
        expected: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for record in ending.committed():
            for operation in () if record.observer else record.operations:
                if isinstance(operation, Put) and operation.key[0] == self._table.name:
                    key = _key_of(operation.key[1])
                    expected[key].append((record.commit_ts, operation.value))
        for key in _KEYS:
            put = [value for _, value in sorted(expected[key], key=itemgetter(0))]
            if self._received[key] != put:
                missing = [one for one in put if one not in self._received[key]]
                yield (
                    f"of {len(put)} values put for {key!r}, {len(self._received[key])} arrived, "
                    f"without {missing[:3]}"
                )
        for row in ending.tables[self._table.name]:
            if row.startswith(b"e"):
                yield f"{row!r} was not exported"


class Counting:
    """One counter, used with several numbers of shards."""

    def __init__(self) -> None:
        self._counters = [ShardedCounter("counts", shards=shards) for shards in (2, 5)]
        self.tables = (Cells("counts", (b"\x80",)),)
        self._added: list[tuple[int, int]] = []
        """Start timestamp and amount of each transaction that was sent."""
        self._seen: list[_Seen] = []

    async def step(self, session: Session) -> None:
        counter = session.random.choice(self._counters)
        amount, reads = session.random.randint(-3, 9), session.random.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            at = await tx.itself.timestamp()
            if reads:
                self._seen.append(_Seen(at, "", await counter.value(tx.itself, "all")))
                return
            await counter.add(tx.itself, "all", amount)
            self._added.append((at, amount))
            tx.note_writes()

        run = session.random.choice((session.run, session.run_again))
        await run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        commits = {record.start_ts: record.commit_ts for record in ending.committed()}
        added = [(commits[start], amount) for start, amount in self._added if start in commits]
        for at, _, value in self._seen:
            expected = sum(amount for commit, amount in added if commit <= at)
            if value != expected:
                yield f"the counter was {value} at {at}, and {expected} had been added"
        rows = ending.tables["counts"].values()
        value = sum(codecs.integer.decode(cells[b"count"]) for cells in rows)
        if value != sum(amount for _, amount in added):
            yield f"the counter is {value}, not {sum(amount for _, amount in added)}"


class Indexing:
    """A column with an index that has the words of its texts."""

    def __init__(self) -> None:
        self._source = Cells("texts")
        self._column = self._source.column("a")
        self._index: Index[bytes, bytes, bytes] = Index(
            "words", on=self._column, value=codecs.raw, values=bytes.split
        )
        self.tables = (self._source, Cells(self._index.table.name))
        self.observer = self._index.observer()

    async def step(self, session: Session) -> None:
        chance = session.random
        row, word = chance.choice(_KEYS).encode(), chance.choice(_WORDS)
        text = b" ".join(chance.sample(_WORDS, 2)) if chance.random() < 0.8 else None
        reads = chance.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            if reads:
                keys = await self._index.find(tx.itself, word)
                if keys != sorted(keys):
                    session.broken(f"{word!r} leads to {keys}")
                return
            if text is None:
                await tx.itself.delete(row, self._column)
            else:
                await tx.itself.set(row, self._column, text)
            tx.note_writes()

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        expected = {
            (word, row)
            for row, cells in ending.tables[self._source.name].items()
            for word in cells.get(self._column.name, b"").split()
        }
        found = {
            (word, codecs.raw.decode_part(row, end)[0])
            for row in ending.tables[self._index.table.name]
            if row.startswith(b"i")
            for word, end in [codecs.raw.decode_part(row, 1)]
        }
        if found != expected:
            yield f"the index differs: {sorted(found ^ expected)[:3]}"


class Recipes(Workload):
    """All recipes, each in its own tables."""

    def __init__(self) -> None:
        self._combining, self._exporting, self._indexing = Combining(), Exporting(), Indexing()
        self._parts = (self._combining, self._exporting, Counting(), self._indexing)
        self.cells = self._combining.tables[0]

    @property
    def tables(self) -> tuple[Cells, ...]:
        tables = [table for part in self._parts for table in part.tables]
        return (*tables, Cells(DEAD_LETTERS.name))

    @property
    def observers(self) -> list[Observer]:
        return [self._combining.observer, self._exporting.observer, self._indexing.observer]

    async def step(self, session: Session) -> None:
        await session.random.choice(self._parts).step(session)

    def check(self, ending: Ending) -> Iterable[str]:
        for part in self._parts:
            yield from part.check(ending)
