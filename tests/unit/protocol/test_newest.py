"""Reads of one cell as it is now: when they take a timestamp all the same."""

from __future__ import annotations

import pytest

from percolator.codecs import integer
from percolator.errors import CellAddress, InvalidArgument
from percolator.protocol.read import NOT_NOW, TIMESTAMPS_SECONDS, NewestReads
from percolator.routing.cells import FoundCell, RowResult
from percolator.routing.lanes import CellAnswer
from percolator.schema import Table
from percolator.testing import connect_async
from percolator.timestamps import NEWEST
from percolator.wire.timestamp_source import TimestampSource

_CELL = CellAddress(7, b"bob", b"balance")
_accounts = Table("accounts")
_balance = _accounts.column("balance", integer)


class Server:
    """Answers reads of cells as it is told to, at a time that it is told."""

    def __init__(self, answer: CellAnswer | Exception) -> None:
        self.answer = answer
        self.seconds = 100.0
        self.asked: list[int] = []

    async def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> CellAnswer:
        assert (table_id, row, column) == _CELL
        self.asked.append(timestamp)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def reads(self) -> NewestReads:
        return NewestReads(self, lambda: self.seconds)


async def test_the_tablet_says_what_is_newest() -> None:
    server = Server(FoundCell(8, b"new"))
    assert await server.reads().read(_CELL, 110.0) == FoundCell(8, b"new")
    assert server.asked == [NEWEST]


async def test_a_lock_takes_a_snapshot_and_later_reads_do_not() -> None:
    server = Server(RowResult())
    reads = server.reads()
    assert await reads.read(_CELL, 110.0) is NOT_NOW
    assert reads.are_possible


async def test_timestamps_are_used_for_a_while_after_a_server_of_an_older_release() -> None:
    server = Server(InvalidArgument("reads[3].timestamp", "was not handed out by the oracle"))
    reads = server.reads()
    assert await reads.read(_CELL, 110.0) is NOT_NOW
    server.seconds += TIMESTAMPS_SECONDS - 1
    assert not reads.are_possible
    server.seconds += 1
    assert reads.are_possible


async def test_another_bad_argument_is_the_callers() -> None:
    reads = Server(InvalidArgument("reads[0].columns", "reserved")).reads()
    with pytest.raises(InvalidArgument, match="columns"):
        await reads.read(_CELL, 110.0)
    assert reads.are_possible


async def test_a_single_read_asks_for_no_timestamp_unless_it_meets_a_lock() -> None:
    """The lock is that of a transaction that has been acknowledged and not yet cleaned up."""
    async with connect_async() as db:
        await db.create_table(_accounts)
        engine = db._engine
        async with db.transaction() as tx:
            await tx.set("bob", _balance, 1)
        timestamps = engine.timestamps
        assert isinstance(timestamps, TimestampSource)
        before = timestamps.requests_answered
        assert await db.get("bob", _balance) == 1
        assert await db.get("joe", _balance, default=5) == 5
        assert timestamps.requests_answered == before
        two = db.transaction()
        two._only_two_phases = True
        await two.set("amy", _balance, 2)
        await two.set("bob", _balance, 2)
        await two.commit()  # bob is committed in the background
        assert await db.get("bob", _balance) == 2
