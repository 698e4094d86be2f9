"""Cells in bulk: what a snapshot returns as parallel lists, for programs that move many of them."""

from __future__ import annotations

from tests.unit.connected import accounts, balance, connected


async def test_cells_of_single_rows_are_those_that_a_scan_finds_there() -> None:
    async with connected() as (db, _):
        await db.set_many((f"{number}", {balance: number}) for number in range(10))
        async with db.transaction() as tx:
            await tx.delete("7", balance)
        async with db.snapshot() as snapshot:
            await snapshot.get("0", balance)
            await db.set_many([("3", {balance: 33})])
            page = await snapshot.get_cells(accounts, [b"3", b"7", b"9", b"nothing"])
            scanned = [page async for page in snapshot.scan_cells(accounts, columns=[b"balance"])]
            assert page.rows == [b"3", b"9"]
            assert page.columns == [b"balance"] * 2
            for row, value, commit in zip(
                page.rows, page.values, page.commit_timestamps, strict=True
            ):
                place = scanned[0].rows.index(row)
                assert value == scanned[0].values[place]
                assert commit == scanned[0].commit_timestamps[place]
            none = await snapshot.get_cells(accounts, [b"3"], columns=[b"another"])
            assert none.rows == []
