"""While the oracle answers nothing, a transaction has done nothing, and its policy decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from percolator import RetryPolicy, Timestamp
from percolator.aio import Database, Transaction
from percolator.errors import DeadlineExceeded, Retry, Unauthenticated
from percolator.v1 import oracle_pb2
from tests.unit.connected import Cluster, balance, connected_to


class Paused(Cluster):
    """Its oracle answers nothing until a moment."""

    until = 0.0

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        if asyncio.get_running_loop().time() < self.until:
            await asyncio.sleep(1.0)
            raise DeadlineExceeded("silence")
        return await super().get_timestamps(request)


def now() -> float:
    return asyncio.get_running_loop().time()


async def read(tx: Transaction) -> int | None:
    return await tx.get("a", balance)


async def write(tx: Transaction) -> None:
    await tx.set("a", balance, 1)


@pytest.mark.parametrize("work", [read, write])
async def test_a_transaction_is_tried_until_its_own_deadline(work: object) -> None:
    async with connected_to(Paused) as (db, cluster):
        await db.run(write)
        began, cluster.until = now(), inf
        with pytest.raises(DeadlineExceeded, match="gave up after") as late:
            await db.run(work, retry=RetryPolicy(deadline_seconds=20.0))  # type: ignore[arg-type]
        assert late.value.retry is Retry.SAFE
        assert 19.0 < now() - began < 21.0
        cluster.until = 0.0


async def test_a_transaction_outlasts_a_pause_that_is_shorter_than_its_deadline() -> None:
    async with connected_to(Paused) as (db, cluster):
        await db.run(write)
        cluster.until = now() + 15.0
        assert await db.run(read, retry=RetryPolicy(deadline_seconds=20.0)) == 1


async def test_several_readers_are_told_that_a_missing_timestamp_is_harmless() -> None:
    async with connected_to(Paused) as (db, cluster):
        await db.run(write)
        cluster.until = inf
        tx = db.transaction(timeout=2.0)
        errors = await asyncio.gather(
            tx.get("a", balance), tx.get("b", balance), return_exceptions=True
        )
        assert [(type(one), getattr(one, "retry", None)) for one in errors] == [
            (DeadlineExceeded, Retry.SAFE)
        ] * 2
        tx.rollback()
        cluster.until = 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda db, at: db.timestamp(timeout=2.0),
        lambda db, at: db.snapshot(at=at, timeout=2.0).get("a", balance),
        lambda db, at: db.pin(timeout=2.0).set(),
    ],
    ids=["timestamp", "snapshot of the past", "pin"],
)
async def test_whatever_only_misses_a_timestamp_can_be_repeated(
    call: Callable[[Database, Timestamp], Awaitable[object]],
) -> None:
    async with connected_to(Paused) as (db, cluster):
        await db.run(write)
        at = await db.timestamp()
        cluster.until = inf
        with pytest.raises(DeadlineExceeded) as late:
            await call(db, at)
        assert late.value.retry is Retry.SAFE
        cluster.until = 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda db: db.timestamp(),
        lambda db: db.transaction().get("a", balance),
        lambda db: db.run(write),
    ],
    ids=["timestamp", "read", "write"],
)
async def test_an_error_of_the_oracle_is_not_its_own_cause(
    call: Callable[[Database], Awaitable[object]],
) -> None:
    """Programs that follow causes to the first one would never get there."""
    async with connected_to(Paused) as (db, cluster):
        await db.run(write)

        async def refuses(request: oracle_pb2.GetTimestampsRequest) -> object:
            raise Unauthenticated("who are you?")

        cluster.get_timestamps = refuses  # type: ignore[assignment, method-assign]
        with pytest.raises(Unauthenticated, match="who are you") as refused:
            await call(db)
        assert refused.value.__cause__ is None
