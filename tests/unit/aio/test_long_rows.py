"""Rows that are longer than the tablet servers allow: they are refused, and block nothing."""

from __future__ import annotations

import pytest

from percolator import InvalidArgument, Limits
from tests.unit.connected import balance, connected


@pytest.mark.parametrize("one_round_cells_max", [0, 256])
@pytest.mark.parametrize(
    ("long", "other"),
    [("a" * 5_000, "z"), ("z" * 5_000, "a")],
    ids=["as the primary", "as another cell"],
)
async def test_a_transaction_with_a_refused_row_leaves_no_lock_that_nobody_can_settle(
    long: str, other: str, one_round_cells_max: int
) -> None:
    """The two are in different tablets: one refuses its cell, and the other one locks its own."""
    limits = Limits(row_bytes_max=8_192, one_round_cells_max=one_round_cells_max)
    async with connected(limits) as (db, _):
        tx = db.transaction()
        await tx.set(long, balance, 1)
        await tx.set(other, balance, 1)
        with pytest.raises(InvalidArgument, match="5000 bytes, at most 4096 allowed"):
            await tx.commit()
        async with db.transaction() as later:
            assert [await later.get(row, balance) for row in (long, other)] == [None, None]
            await later.set(other, balance, 2)
        assert await db.get(other, balance) == 2


async def test_a_row_that_no_server_could_store_is_refused_when_it_is_written() -> None:
    async with connected(Limits(row_bytes_max=65_536)) as (db, _), db.transaction() as tx:
        with pytest.raises(InvalidArgument, match="row: has 65537 bytes, at most 65536"):
            await tx.set("a" * 65_537, balance, 1)
