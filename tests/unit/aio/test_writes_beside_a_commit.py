"""Calls of one transaction may be gathered: what its commit leaves out has not succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from percolator import Table, UsageError, codecs
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
        lambda tx: tx.increment("bob", visits),
        lambda tx: tx.delete("bob", number),
        lambda tx: tx.lock("bob", number),
        lambda tx: tx.notify("bob", number),
    ],
)
async def test_a_write_that_is_under_way_when_the_commit_begins_is_refused(write: Write) -> None:
    async with connected_to(SlowMaster) as (db, cluster):
        await cluster.create_table(master_pb2.CreateTableRequest(name="others"))
        tx = db.transaction()
        await tx.set("bob", balance, 1)
        writing = asyncio.ensure_future(write(tx))
        await cluster.asked.wait()
        await tx.commit()
        cluster.may_answer.set()
        with pytest.raises(UsageError, match="this transaction has committed; begin a new one"):
            await writing
