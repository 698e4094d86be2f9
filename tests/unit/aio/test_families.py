"""Reads of families, past locks."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import Limits, codecs
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from tests.unit.connected import TWO_PHASES, accounts, balance, connected

edges = accounts.family("edge:", codecs.integer)


class Died(BaseException):
    """The client has gone no further."""


@pytest.mark.parametrize("page_rows_max", [1, 3, 1000])
@pytest.mark.parametrize("reverse", [False, True])
async def test_only_the_family_is_found_and_limits_count_only_its_rows(
    page_rows_max: int, reverse: bool
) -> None:
    async with connected(Limits(page_rows_max=page_rows_max)) as (db, _):
        async with db.transaction() as tx:
            for row in "abcdefghijklmnopqrst":
                await tx.set(row, balance, 1)
                if row in "dmps":
                    await tx.set(row, edges.column("x"), 2)
            await tx.delete("m", balance)
        wanted = ["s", "p", "m", "d"] if reverse else ["d", "m", "p", "s"]
        async with db.snapshot() as snapshot:
            for limit in (None, 4, 3, 1):
                found = snapshot.scan(accounts, columns=[edges], reverse=reverse, limit=limit)
                rows = [row async for row in found]
                assert [row.key for row in rows] == wanted[:limit]
                assert all(list(row) == [b"edge:x"] for row in rows)
            got = await snapshot.get_many(accounts, ["a", "d", "m"], [edges])
            assert [row.raw() for row in got] == [
                {},
                *2 * [{b"edge:x": codecs.integer.encode(2)}],
            ]


async def test_a_family_is_read_past_the_lock_of_a_client_that_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dies(*_: Any) -> int:
        raise Died

    async def removes_nothing(*_: Any) -> None:
        pass

    async with connected(TWO_PHASES) as (db, _):
        async with db.transaction() as tx:
            await tx.set("a", edges.column("x"), 1)
            await tx.set("a", balance, 1)
            await tx.set("b", edges.column("x"), 1)
        with monkeypatch.context() as patch:
            patch.setattr(commit, "roll_back_all", removes_nothing)
            patch.setattr(Commit, "commit_primary", dies)
            lost = db.transaction()
            await lost.set("a", edges.column("x"), 2)
            await lost.set("a", edges.column("y"), 2)
            await lost.set("z", edges.column("y"), 2)
            with pytest.raises(Died):
                await lost.commit()
        async with db.snapshot() as snapshot:
            for _ in range(2):
                found = [row async for row in snapshot.scan(accounts, columns=[edges])]
                assert [(row.key, row.family(edges)) for row in found] == [
                    ("a", {"x": 1}),
                    ("b", {"x": 1}),
                ]
                assert list(found[0]) == [b"edge:x"]


@pytest.mark.parametrize("read", ["scan", "get_many"])
async def test_a_lock_outside_of_the_family_is_not_in_the_way(
    read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: Any) -> int:
        raise Died

    async def removes_nothing(*_: Any) -> None:
        pass

    async with connected(TWO_PHASES) as (db, _):
        monkeypatch.setattr(commit, "roll_back_all", removes_nothing)
        monkeypatch.setattr(Commit, "commit_primary", dies)
        lost = db.transaction()
        await lost.set("a", balance, 2)
        with pytest.raises(Died):
            await lost.commit()
        async with db.snapshot() as snapshot:
            if read == "scan":
                assert [row async for row in snapshot.scan(accounts, columns=[edges])] == []
            else:
                (row,) = await snapshot.get_many(accounts, ["a"], [edges])
                assert not row
            assert snapshot.statistics.lock_waits == []


@pytest.mark.usefixtures("engine_of_cells")
async def test_any_number_of_single_cells_of_a_row_is_read_at_once() -> None:
    async with connected() as (db, _):
        cells = [("hub", edges.column(f"{number}")) for number in range(10_001)]
        async with db.transaction() as tx:
            for row, column in (cells[0], cells[-1]):
                await tx.set(row, column, 1)
        async with db.snapshot() as snapshot:
            found = await snapshot.get_many(cells)
            assert (found[0], found[-1], found.count(None)) == (1, 1, 9_999)
