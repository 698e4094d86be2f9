"""What a dead shared transaction has locked is settled in batches, by whoever meets it first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator.aio import Database
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.aio.shared_attempts import TTL_SECONDS, dies, receipt_of, values_of
from tests.unit.connected import Cluster, balance, connected, written_out

ROWS = 3_000
MESSAGES_MAX = ROWS // 100
"""Far fewer than locks: one round trip for each would stop a reader of a large job for minutes."""


class Counted:
    """The messages with mutations that the cluster has got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages = 0
        self.mutations = 0
        mutate = Cluster.mutate

        async def counting(cluster: Cluster, request: pb.MutateRequest) -> pb.MutateResponse:
            self.messages += 1
            self.mutations += sum(len(written_out(batch)) for batch in request.batches)
            return await mutate(cluster, request)

        monkeypatch.setattr(Cluster, "mutate", counting)


@asynccontextmanager
async def _left_behind(*, committed: bool) -> AsyncIterator[Database]:
    """A table whose rows are locked by two tasks of a job that nobody keeps alive."""
    async with connected() as (db, _):
        whole = db.shared_transaction()
        whole._tell_tablets = _dead  # type: ignore[assignment, method-assign]
        await whole.begin()
        receipts = [await receipt_of(db, whole.ticket, task, **_rows(task)) for task in ("a", "z")]
        if committed:
            await whole.commit(receipts)
        else:
            dies(whole)
            await asyncio.sleep(TTL_SECONDS + 1.0)
        # What this client knows of the job would spare it the questions.
        verdicts = db.internal.engine.env.verdicts
        verdicts._newer.clear()
        verdicts._older.clear()
        yield db


async def _dead(_: int) -> None:
    """The driver: it has not told the tablets of its commit."""


def _rows(task: str) -> dict[str, int]:
    return {f"{task}{number:05}": number for number in range(ROWS // 2)}


@pytest.mark.parametrize("committed", [False, True])
async def test_a_scan_settles_all_locks_with_few_messages(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    # Tablets that are told of the commit do it without any (test_rolling_in_bulk.py).
    monkeypatch.setattr("percolator.protocol.roll_forward.MANY", ROWS)
    async with _left_behind(committed=committed) as db:
        counted = Counted(monkeypatch)
        found = await values_of(db)
        assert found == (_rows("a") | _rows("z") if committed else {})
        assert counted.messages <= MESSAGES_MAX
        await db.internal.engine.env.background.drain(10.0)
        assert counted.mutations >= ROWS, "the locks were settled, not passed"
        settled = counted.messages
        assert await values_of(db) == found
        assert counted.messages == settled


@pytest.mark.parametrize("committed", [False, True])
async def test_a_writer_settles_the_locks_of_all_its_rows_with_few_messages(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    async with _left_behind(committed=committed) as db:
        counted = Counted(monkeypatch)
        written = dict.fromkeys(_rows("a"), -1)
        async with db.transaction() as tx:
            for row in written:
                await tx.set(row, balance, -1)
        assert counted.messages <= MESSAGES_MAX
        rest = _rows("z") if committed else {}
        assert await values_of(db) == written | rest
