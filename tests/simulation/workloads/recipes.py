"""Recipes among faults: each is judged by what its users' transactions have committed.

    add ──> CombineQueue ── changed ──> a mirror of each value
    put ──> ExportQueue ── exporter ──> a receiver outside of the cluster
    add ──> ShardedCounter
    write ──> an Index in the same transaction, and one that an observer keeps

A mirror is written by the observer from what it is told, and has to agree with every change.
Readers note what they have read at their snapshot; at the end, it is compared with what had been
committed by then. The receiver takes what has a higher number than all before it of its key, as one
with effects exactly once does. It has to get everything, in the order of commits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from percolator import codecs
from percolator.aio import Transaction
from percolator.observers.dead_letters import DEAD_LETTERS
from percolator.observers.definition import Observer
from percolator.recipes import (
    CombineQueue,
    Export,
    ExportQueue,
    Index,
    KeyChange,
    ShardedCounter,
)
from tests.isolation.history import Put
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

_KEYS = [f"key {number}" for number in range(5)]
_WORDS = [b"ant", b"bee", b"cat", b"dog"]
_ATTEMPTS = 1_000
_FAILS_EVERY = 13
_BATCH = 3
"""So few that many runs leave something to the next one."""


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
    """A column with two indexes, one of each kind; each has words of a row's text."""

    def __init__(self) -> None:
        self._source = Cells("texts")
        self._columns = [self._source.column("a"), self._source.column("b")]
        self._indexes: list[Index[bytes, bytes, bytes]] = [
            Index(
                f"words of {column.name.decode()}",
                on=column,
                value=codecs.raw,
                values=bytes.split,
                by_observer=by_observer,
            )
            for column, by_observer in zip(self._columns, (False, True), strict=True)
        ]
        self.tables = (self._source, *(Cells(one.table.name) for one in self._indexes))
        self.observer = self._indexes[1].observer()

    async def step(self, session: Session) -> None:
        direct, _ = self._indexes
        chance = session.random
        row, word = chance.choice(_KEYS).encode(), chance.choice(_WORDS)
        text = b" ".join(chance.sample(_WORDS, 2)) if chance.random() < 0.8 else None
        reads = chance.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            if reads:
                if problems := await direct.check(tx.itself):
                    session.broken(f"in one transaction: {problems}")
                keys = await direct.find(tx.itself, word)
                if keys != sorted(keys):
                    session.broken(f"{word!r} leads to {keys}")
                return
            if text is None:
                await direct.delete(tx.itself, row)
                await tx.itself.delete(row, self._columns[1])
            else:
                await direct.set(tx.itself, row, text)
                await tx.itself.set(row, self._columns[1], text)
            tx.note_writes()

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        texts = ending.tables[self._source.name]
        for index in self._indexes:
            expected = {
                (word, row)
                for row, cells in texts.items()
                for word in cells.get(index.column.name, b"").split()
            }
            found = {
                (word, codecs.raw.decode_part(row, end)[0])
                for row in ending.tables[index.table.name]
                if row.startswith(b"i")
                for word, end in [codecs.raw.decode_part(row, 1)]
            }
            if found != expected:
                yield f"{index.table.name!r} differs: {sorted(found ^ expected)[:3]}"


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
