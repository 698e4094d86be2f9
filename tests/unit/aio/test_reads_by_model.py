"""Every way to read shows what a list of commits says, whatever was written, and whatever is asked.

Keys lie at the borders of tablets, pages are small, values expire, columns are asked for twice, and
transactions read among writes of their own. Scans keep the rows that match a condition.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

from percolator import Limits, Outcome, Table, codecs, observes
from percolator.aio import Database, Snapshot, Transaction
from percolator.aio.observing import worker_context
from percolator.conditions import Condition
from percolator.errors import ConflictError
from percolator.formats.records import WriteRecord
from percolator.observers.registration import register
from percolator.schema import Column, Family
from percolator.timestamps import Timestamp, is_expired
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_NOTIFY, SPACE_WRITE, Space
from tests.simulation.virtual_time import run_virtually
from tests.unit import connected as where
from tests.unit.connected import Cluster, balance, connected

TABLE = Table("model")
NUMBER = TABLE.column("a", codecs.integer)
EXPIRING = TABLE.column("x", codecs.integer)
FAMILY = TABLE.family("f:", codecs.integer)
INNER = TABLE.family("f:1", codecs.integer)
COLUMNS = [NUMBER, EXPIRING, *(FAMILY.column(name) for name in ("1", "12", "2"))]
ASKED: list[list[Any] | None] = [
    None,
    [NUMBER],
    [NUMBER, NUMBER],
    [EXPIRING, FAMILY.column("2")],
    [FAMILY],
    [INNER, FAMILY],
    [FAMILY, NUMBER, FAMILY.column("1")],
]
TTL_MILLISECONDS = 5_000
KEYS = [f"{first}{rest}" for first in "abmz" for rest in ("", "0", "1", "\x00", "\U0010ffff")]
BOUNDS = [None, *KEYS]

Cell = tuple[str, Column[int]]
State = dict[Cell, int | None]
Found = list[tuple[str, dict[bytes, bytes]]]


class Model:
    """All commits, in their order."""

    def __init__(self, *, expires: bool) -> None:
        self.expires = expires
        self.commits: list[tuple[int, State]] = []

    def at(self, snapshot: int) -> State:
        found: State = {}
        for commit, writes in self.commits:
            if commit <= snapshot:
                ended = self.expires and is_expired(commit, snapshot, TTL_MILLISECONDS)
                for cell, value in writes.items():
                    found[cell] = None if ended and cell[1] == EXPIRING else value
        return found


def _rows(state: State, keys: Sequence[str], columns: Sequence[object] | None) -> Found:
    """These rows, with the values that are asked for."""

    def is_asked(column: Column[int]) -> bool:
        return columns is None or any(
            column.name.startswith(one.prefix) if isinstance(one, Family) else one == column
            for one in columns
        )

    return [
        (
            key,
            {
                column.name: codecs.integer.encode(value)
                for (row, column), value in state.items()
                if row == key and value is not None and is_asked(column)
            },
        )
        for key in keys
    ]


Values = dict[Column[int], int]
Predicate = Callable[[Values], bool]


def _condition(chance: random.Random, depth: int = 0) -> tuple[Condition, Predicate]:
    """A condition, and what it means."""
    if depth < 3 and chance.random() < 0.5:
        one, is_one = _condition(chance, depth + 1)
        other, is_other = _condition(chance, depth + 1)
        if chance.random() < 0.5:
            return one & other, lambda row: is_one(row) and is_other(row)
        return one | other, lambda row: is_one(row) or is_other(row)
    column, number = chance.choice(COLUMNS), chance.randrange(100)
    few = [chance.randrange(100) for _ in range(chance.choice([0, 1, 50]))]
    leaves: list[tuple[Condition, Predicate]] = [
        (column < number, lambda row: column in row and row[column] < number),
        (column <= number, lambda row: column in row and row[column] <= number),
        (column > number, lambda row: column in row and row[column] > number),
        (column >= number, lambda row: column in row and row[column] >= number),
        (column.equals(number), lambda row: column in row and row[column] == number),
        (column.differs_from(number), lambda row: column in row and row[column] != number),
        (column.is_in(few), lambda row: column in row and row[column] in few),
        (column.is_null(), lambda row: column not in row),
        (column.is_not_null(), lambda row: column in row),
    ]
    return chance.choice(leaves)


def _kept(state: State, keys: Sequence[str], holds: Predicate) -> list[str]:
    """The keys of the rows that exist and for which it holds."""
    rows: dict[str, Values] = {}
    for (row, column), value in state.items():
        if value is not None:
            rows.setdefault(row, {})[column] = value
    return [key for key in keys if key in rows and holds(rows[key])]


def _all_rows(_: Values) -> bool:
    return True


async def _check_scan(
    chance: random.Random, reader: Snapshot | Transaction, state: State, columns: Any
) -> None:
    condition: Condition | None = None
    holds: Predicate = _all_rows
    if chance.random() < 0.7:
        condition, holds = _condition(chance)
    start, end = chance.choice(BOUNDS), chance.choice(BOUNDS)
    prefix = chance.choice([None, None, "", "a", "m\x00", "z\U0010ffff"])
    limit = chance.choice([None, None, 0, 1, 2, 5, 2**40])
    reverse = chance.random() < 0.5
    keys = [
        key
        for key in sorted(KEYS, key=str.encode, reverse=reverse)
        if (start is None or key.encode() >= start.encode())
        and (end is None or key.encode() < end.encode())
        and key.startswith(prefix or "")
    ]
    keys = _kept(state, keys, holds)
    if chance.random() < 0.4:
        counted = await reader.count(TABLE, start=start, end=end, prefix=prefix, where=condition)
        assert counted == len(keys)
        return
    scan = reader.scan(
        TABLE,
        start=start,
        end=end,
        prefix=prefix,
        columns=columns,
        where=condition,
        reverse=reverse,
        limit=limit,
    )
    found = [(row.key, row.raw()) async for row in scan]
    assert found == [row for row in _rows(state, keys, columns) if row[1]][:limit]


async def _check(
    chance: random.Random, reader: Snapshot | Transaction, state: State, own: State
) -> None:
    """One read of some kind; `own` is what the reader has written itself."""
    shown = state | own
    columns = chance.choice(ASKED)
    match chance.randrange(6):
        case 0 | 4 | 5:
            await _check_scan(chance, reader, shown, columns)
        case 1:
            keys = chance.choices(KEYS, k=chance.randrange(8))
            rows = await reader.get_many(TABLE, keys, columns)
            assert [(row.key, row.raw()) for row in rows] == _rows(shown, keys, columns)
        case 2:
            cells = [(chance.choice(KEYS), chance.choice(COLUMNS)) for _ in range(9)]
            assert await reader.get_many(cells) == [shown.get(cell) for cell in cells]
        case _:
            row, column = chance.choice(KEYS), chance.choice(COLUMNS)
            expected = shown.get((row, column))
            assert await reader.get(row, column, -1) == (-1 if expected is None else expected)


async def _write(chance: random.Random, tx: Transaction, state: State, own: State) -> None:
    row, column = chance.choice(KEYS), chance.choice(COLUMNS)
    match chance.choice(["set", "set", "set", "delete", "delete row", "lock"]):
        case "set":
            own[row, column] = value = chance.randrange(100)
            await tx.set(row, column, value)
        case "delete":
            own[row, column] = None
            await tx.delete(row, column)
        case "delete row":
            own |= {cell: None for cell in state | own if cell[0] == row}
            await tx.delete_row(TABLE, row)
        case _:
            await tx.lock(row, column, shared=chance.random() < 0.5)


async def _commit(chance: random.Random, db: Database, model: Model) -> None:
    tx = db.transaction()
    state, own = model.at(await tx.timestamp()), State()
    for _ in range(chance.randrange(8)):
        await _write(chance, tx, state, own)
        await _check(chance, tx, state, own)
    if chance.random() < 0.2:
        tx.rollback()
    elif (commit := await tx.commit()) is not None:
        model.commits.append((commit, own))


@pytest.mark.usefixtures("engine_of_cells")
@pytest.mark.parametrize("cells_max", [0, 256], ids=["two phases", "one round"])
@pytest.mark.parametrize("seed", range(8))
async def test_reads_show_what_was_committed_and_what_they_have_written(
    seed: int, cells_max: int
) -> None:
    chance = random.Random(seed)
    limits = Limits(
        one_round_cells_max=cells_max,
        page_rows_max=chance.choice([1, 2, 3, 1000]),
        page_bytes_max=chance.choice([1, 50, 1 << 20]),
    )
    options: Mapping[str, Any] = {"ttl": {EXPIRING: timedelta(milliseconds=TTL_MILLISECONDS)}}
    async with connected(limits) as (db, _):
        splits = sorted(chance.sample(KEYS, chance.randrange(6)), key=str.encode)
        await db.create_table(TABLE, splits, **({} if where.over_rows else options))
        model = Model(expires=not where.over_rows)
        moments: list[Timestamp] = []
        for _ in range(30):
            await asyncio.sleep(chance.choice([0, 0, 0.001, 1, 3]))
            await _commit(chance, db, model)
            moments += [await db.timestamp(), *(Timestamp(c) for c, _ in model.commits[-1:])]
            for at in (None, chance.choice(moments)):
                async with db.snapshot(at=at) as snapshot:
                    state = model.at(await snapshot.timestamp())
                    await _check(chance, snapshot, state, {})
            row, column = chance.choice(KEYS), chance.choice(COLUMNS)
            now = await db.get(row, column)
            assert now == model.at(await db.timestamp()).get((row, column))


# Transactions that commit in one round leave the same history as those in two phases.


@observes(balance, name="watching")
async def watching(tx: Transaction, row: str) -> None:
    """Never runs: only its notifications count."""


_ROWS = ("a", "b", "z")
_STEPS = 60


class _Program:
    """Transactions that overlap, the same ones for the same seed."""

    def __init__(self, db: Database, seed: int) -> None:
        self._db = db
        self._chance = random.Random(seed)
        self.course: list[object] = []
        self.numbers: dict[int, int] = {}
        """The transactions in the order in which they began, by start timestamp."""

    async def run(self) -> None:
        open_ones: list[Transaction] = []
        for number in range(_STEPS):
            if len(open_ones) < 3:
                tx = self._db.transaction()
                self.numbers[await tx.timestamp()] = number
                open_ones.append(tx)
            tx = self._chance.choice(open_ones)
            await self._step(tx, number)
            if self._chance.random() < 0.4:
                open_ones.remove(tx)
                await self._end(tx)
        for tx in open_ones:
            await self._end(tx)

    async def _step(self, tx: Transaction, number: int) -> None:
        row = self._chance.choice(_ROWS)
        match self._chance.randrange(5):
            case 0 | 1:
                await tx.set(row, balance, number)
            case 2:
                await tx.delete(row, balance)
            case 3:
                await tx.lock(row, balance)
            case _:
                self.course.append(await tx.get(row, balance))

    async def _end(self, tx: Transaction) -> None:
        try:
            await tx.commit()
        except ConflictError:
            self.course.append("conflict")  # at any of its cells that another has written
        else:
            self.course.append(tx.outcome)
        await self._db.internal.engine.env.background.drain(1.0)


async def _stored(cluster: Cluster, space: Space) -> list[tuple[bytes, int, bytes]]:
    found = []
    for tablet in cluster.tablets.values():
        target = pb.TabletTarget(
            tablet_id=tablet.identity.tablet_id,
            epoch=tablet.identity.epoch,
            schema_version=tablet.schema_version,
        )
        request = pb.ScanCellsRequest(target=target, space=space)
        async for page in tablet.scan_cells(request):
            found += [(cell.row, cell.timestamp, cell.value) for cell in page.cells]
    return sorted(found)


async def _history(limits: Limits, seed: int) -> tuple[object, ...]:
    async with connected(limits) as (db, cluster):
        await register(worker_context(db.internal.engine), [watching])
        program = _Program(db, seed)
        await program.run()
        assert not await _stored(cluster, SPACE_LOCK)
        records = []
        notified = [(row, at) for row, at, _ in await _stored(cluster, SPACE_NOTIFY)]
        order = {at: place for place, at in enumerate(
            sorted({at for _, at, _ in await _stored(cluster, SPACE_WRITE)})
        )}  # fmt: skip
        for row, at, value in await _stored(cluster, SPACE_WRITE):
            record = WriteRecord.decode(value)
            if record.start_timestamp in program.numbers:
                number = program.numbers[record.start_timestamp]
                is_notified = (row, at) in notified
                records.append((row, order[at], number, record.kind, record.value, is_notified))
        assert Outcome.COMMITTED in program.course
        return program.course, records


@pytest.mark.parametrize("seed", range(10))
def test_both_ways_take_the_same_course_and_leave_the_same_records(seed: int) -> None:
    in_one_round = run_virtually(_history(Limits(), seed))
    in_two_phases = run_virtually(_history(Limits(one_round_cells_max=0), seed))
    assert in_one_round == in_two_phases
