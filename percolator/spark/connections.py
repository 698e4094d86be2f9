"""One connection to each cluster in every Python process that Spark starts, made when needed.

Connections are never pickled: each executor process makes its own. Spark forks these processes
before they have used anything of the library, and runs many tasks in each.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from percolator import aio
from percolator.blocking import loop_thread
from percolator.blocking.loop_thread import LoopThread
from percolator.codec_names import CodecNames
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    SchemaError,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.ranges import TableRange
from percolator.spark.catalog.declared_codecs import require_declared
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.options import Target
from percolator.spark.python_workers import leave_out_of_collections

R = TypeVar("R")

DRAIN_SECONDS = 10.0
BATCH_ROWS_MAX = 1_024
"""Cells per call to a tablet server, and so the most that a transaction can commit in one round."""
PAGE_ROWS_MAX = 4_096


class Connection:
    """An asyncio database, and the thread in which its event loop runs."""

    def __init__(self, thread: LoopThread, database: aio.Database) -> None:
        self.thread = thread
        self.database = database

    def call(self, function: Callable[[], Awaitable[R]]) -> R:
        return self.thread.call(function)

    def deadline(self, target: Target) -> float:
        """The deadline of a call that begins now."""
        return self.database.internal.engine.now() + target.timeout_seconds

    async def ranges(self, target: Target) -> list[TableRange]:
        """The natural ranges of the table as they are now, in order. Runs in the event loop."""
        engine, deadline = self.database.internal.engine, self.deadline(target)
        info = await engine.catalog.table(target.table, deadline)
        return await engine.ranges.of_table(info.table_id, deadline)


_connections: dict[tuple[str, float], Connection] = {}
_guard = threading.Lock()


def connection_to(target: Target) -> Connection:
    """The connection of this process, made on first use."""
    key = target.address, target.timeout_seconds
    with _guard:
        found = _connections.get(key)
        if found is None:
            found = _connections[key] = _connect(target)
        return found


def _connect(target: Target) -> Connection:
    thread = loop_thread.shared()
    limits = Limits(
        call_seconds=target.timeout_seconds,
        batch_rows_max=BATCH_ROWS_MAX,
        one_round_cells_max=BATCH_ROWS_MAX,
        page_rows_max=PAGE_ROWS_MAX,
    )

    async def connect() -> aio.Database:
        return await aio.connect(
            target.address,
            limits=limits,
            description=f"Spark on {socket.gethostname()}",
            timeout=target.timeout_seconds,
        )

    try:
        database = thread.open(connect)
    except (Unavailable, DeadlineExceeded) as error:
        raise Unavailable(
            f"address: no cluster answers at {target.address} from {socket.gethostname()}: "
            f"{error.message}"
        ) from error
    found = Connection(thread, database)
    thread.close_at_exit(found, database.close)
    leave_out_of_collections()
    return found


def checked(target: Target, catalogue: FrameCatalog | None = None) -> Connection:
    """This process's connection to the table's cluster, after a check that the table exists, and
    has the codecs with which a frame of this catalogue is read or written.

    The check is made every time: the process may remember a table of that name that was dropped
    since. Raises `InvalidArgument` if there is no such table, and `Unavailable`, which names the
    option `address`, if no cluster answers.
    """
    found = connection_to(target)
    catalog, deadline = found.database.internal.engine.catalog, found.deadline(target)
    try:
        table = found.call(lambda: catalog.describe(target.table, deadline))
    except SchemaError:
        raise InvalidArgument(
            "table", f"there is no table {target.table!r} at {target.address}"
        ) from None
    if catalogue is not None:
        require_declared(target.table, CodecNames.of(table.codecs), catalogue)
    return found
