"""Every way to read shows what a list of commits says, whatever was written, and whatever is asked.

Keys lie at the borders of tablets, pages are small, values expire, columns are asked for twice, and
transactions read among writes of their own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

from percolator import Limits, Table, codecs
from percolator.aio import Database, Snapshot, Transaction
from percolator.schema import Column, Family
from percolator.timestamps import Timestamp, is_expired
from tests.unit import connected as where
from tests.unit.connected import connected

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


async def _check_scan(
    chance: random.Random, reader: Snapshot | Transaction, state: State, columns: Any
) -> None:
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
    scan = reader.scan(
        TABLE, start=start, end=end, prefix=prefix, columns=columns, reverse=reverse, limit=limit
    )
    found = [(row.key, row.raw()) async for row in scan]
    assert found == [row for row in _rows(state, keys, columns) if row[1]][:limit]


async def _check(
    chance: random.Random, reader: Snapshot | Transaction, state: State, own: State
) -> None:
    """One read of some kind; `own` is what the reader has written itself."""
    shown = state | own
    columns = chance.choice(ASKED)
    match chance.randrange(4):
        case 0:
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
