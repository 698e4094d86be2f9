"""Calls of one transaction may be gathered: a commit leaves out none that has succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from percolator import DeadlineExceeded, Table, UsageError, codecs
from percolator.aio import Transaction
from percolator.v1 import master_pb2
from tests.unit.connected import Cluster, accounts, balance, connected_to

visits = accounts.column("visits", codecs.integer)
number = Table("others").column("number", codecs.integer)

Write = Callable[[Transaction], Awaitable[object]]


class SlowMaster(Cluster):
    """Answers what a first write asks for when the test lets it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        await self._hold()
        return await super().describe_table(request)

    async def declare_codecs(
        self, request: master_pb2.DeclareCodecsRequest
    ) -> master_pb2.DeclareCodecsResponse:
        if visits.name in [one.column for one in request.codecs.columns]:
            await self._hold()
        return await super().declare_codecs(request)

    async def _hold(self) -> None:
        self.asked.set()
        await self.may_answer.wait()


@pytest.mark.parametrize(
    "write",
    [
        lambda tx: tx.set("bob", visits, 1),
        lambda tx: tx.set("bob", {visits: 1}),
        lambda tx: tx.delete("bob", number),
        lambda tx: tx.lock("bob", number),
    ],
)
async def test_a_commit_waits_until_earlier_writes_have_their_tables(write: Write) -> None:
    async with connected_to(SlowMaster) as (db, cluster):
        await cluster.create_table(master_pb2.CreateTableRequest(name="others"))
        tx = db.transaction()
        await tx.set("bob", balance, 1)
        writing = asyncio.ensure_future(write(tx))
        await cluster.asked.wait()
        committing = asyncio.create_task(tx.commit())
        await asyncio.sleep(0.1)
        assert not writing.done()
        assert not committing.done()
        cluster.may_answer.set()
        await writing
        await committing
        assert len(tx.internal.writes.cells) == 2


async def test_a_notification_that_is_refused_while_it_is_awaited_is_left_out() -> None:
    async with connected_to(SlowMaster) as (db, cluster):
        await cluster.create_table(master_pb2.CreateTableRequest(name="others"))
        tx = db.transaction()
        await tx.set("bob", balance, 1)
        notifying = asyncio.ensure_future(tx.notify("bob", number))
        await cluster.asked.wait()
        committing = asyncio.create_task(tx.commit())
        cluster.may_answer.set()
        with pytest.raises(UsageError, match="has no weak observer"):
            await notifying
        assert await committing is not None


async def test_a_read_that_runs_out_of_time_beside_an_awaited_write_does_not_lose_it() -> None:
    async with connected_to(SlowMaster) as (db, cluster):
        tx = db.transaction()
        await tx.set("bob", balance, 1)
        writing = asyncio.create_task(tx.set("bob", visits, 2))
        await cluster.asked.wait()
        with pytest.raises(DeadlineExceeded):
            await tx.get("bob", balance, timeout=0.5)
        cluster.may_answer.set()
        await writing
        await tx.commit()
        assert await db.get("bob", visits) == 2


async def test_an_increment_that_is_under_way_when_the_commit_begins_fails_it() -> None:
    async with connected_to(SlowMaster) as (db, cluster):
        tx = db.transaction()
        await tx.set("bob", balance, 1)
        incrementing = asyncio.ensure_future(tx.increment("bob", visits))
        await cluster.asked.wait()
        with pytest.raises(UsageError, match=r"tx\.increment\(.*is still running, so nothing is"):
            await tx.commit()
        cluster.may_answer.set()
        with pytest.raises(UsageError, match="this transaction was rolled back; begin a new one"):
            await incrementing
        assert await db.get("bob", balance) is None
