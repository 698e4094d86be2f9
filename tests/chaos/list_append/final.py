"""The last reading of all lists, and the verdict on everything that clients did with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from percolator import aio
from tests.chaos.list_append.judge import judge, lost_appends
from tests.chaos.list_append.lists import elements, lists, loaded
from tests.chaos.list_append.log import read_logs
from tests.chaos.list_append.transactions import Outcome, Read, Transaction

_PROGRAM = "tests.chaos.appender"


class Logs(Protocol):
    def logs_of(self, program: str) -> Sequence[Path]: ...


async def judge_lists(database: aio.Database, clients: Logs, directory: Path) -> list[str]:
    """What is wrong, after all clients have stopped, on a healthy cluster. The logs stay."""
    last = await _last_reading(database)
    history = [*read_logs(clients.logs_of(_PROGRAM)), last]
    final = {read.key: read.elements for read in last.reads()}
    committed = sum(one.outcome is Outcome.COMMITTED for one in history)
    if committed < len(final):
        return [f"only {committed} transactions on {len(final)} lists: this proves nothing"]
    found = [*judge(history), *lost_appends(history, final)]
    return [f"lists: {one} (logs: {directory})" for one in found]


async def _last_reading(database: aio.Database) -> Transaction:
    called = time.monotonic()
    async with database.transaction() as tx:
        start = await tx.timestamp()
        returned = time.monotonic()
        found = [Read(row.key.decode(), loaded(row[elements])) async for row in tx.scan(lists)]
    return Transaction(
        "last reading",
        tuple(found),
        Outcome.COMMITTED,
        start,
        begin_called=called,
        begin_returned=returned,
    )
