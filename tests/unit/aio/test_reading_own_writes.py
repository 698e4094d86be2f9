"""What a transaction reads where it has written or deleted much itself, and what that costs."""

from __future__ import annotations

import pytest

from percolator import Limits
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
