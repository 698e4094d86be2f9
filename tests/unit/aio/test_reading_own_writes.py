"""What a transaction reads where it has written or deleted much itself, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from percolator import Limits
from percolator.errors import CellAddress
from percolator.protocol.write_set import Write
from tests.unit.connected import accounts, balance, connected

pytestmark = pytest.mark.usefixtures("engine_of_cells")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [1, 10])
async def test_a_limited_scan_over_many_own_deletions_takes_few_calls(
    limit: int, reverse: bool
) -> None:
    async with connected(Limits()) as (db, _):
        keys = [f"a{number:03}" for number in range(400)]
        await db.set_many((key, {balance: 1}) for key in keys)
        async with db.transaction() as tx:
            await tx.timestamp()
            left = sorted(keys, reverse=reverse)
            for key in left[:300]:
                await tx.delete(key, balance)
            before = tx.statistics.round_trips
            scan = tx.scan(accounts, limit=limit, reverse=reverse)
            assert [row.key async for row in scan] == left[300 : 300 + limit]
            assert tx.statistics.round_trips - before <= 12
            tx.rollback()


class Counted(dict[CellAddress, Write]):
    """Writes that count how often all of them are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[CellAddress]:
        self.looks += 1
        return super().__iter__()

    def items(self) -> Any:
        self.looks += 1
        return super().items()


async def test_all_reads_of_rows_together_look_once_at_what_the_transaction_has_written() -> None:
    async with connected(Limits()) as (db, _), db.transaction() as tx:
        keys = [f"a{number:03}" for number in range(100)]
        for number, key in enumerate(keys):
            await tx.set(key, balance, number)
        cells = tx.internal.writes.cells = Counted(tx.internal.writes.cells)
        for number, key in enumerate(keys):
            assert [row[balance] for row in await tx.get_many(accounts, [key])] == [number]
        assert [row[balance] for row in await tx.get_many(accounts, keys)] == list(range(100))
        assert [row.key async for row in tx.scan(accounts, start="a010", end="a020")] == keys[10:20]
        assert cells.looks == 1
        tx.rollback()
