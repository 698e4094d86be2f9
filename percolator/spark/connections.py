"""One connection to each cluster for every Python process that Spark starts, made when needed.

Never pickled: a task on an executor connects by itself. Spark forks its Python processes before
anything of the library was used in them, and uses each for many tasks.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from percolator import aio, loop_thread
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    SchemaError,
    TabletLocation,
    Unavailable,
)
from percolator.limits import Limits
from percolator.loop_thread import LoopThread
from percolator.spark.options import Target

R = TypeVar("R")

DRAIN_SECONDS = 10.0
BATCH_ROWS_MAX = 1_024
"""Rows of one call to a tablet server: whole transactions of the usual size."""
PAGE_ROWS_MAX = 4_096


class Connection:
    """A database of asyncio, and the thread in which its event loop runs."""

    def __init__(self, thread: LoopThread, database: aio.Database) -> None:
        self.thread = thread
        self.database = database

    def call(self, function: Callable[[], Awaitable[R]]) -> R:
        return self.thread.call(function)

    def deadline(self, target: Target) -> float:
        """Of a call that begins now."""
        return self.database.engine.now() + target.timeout_seconds

    async def tablets(self, target: Target) -> list[TabletLocation]:
        """Of the table, in the order of their rows, as they are now. In the event loop."""
        catalog, deadline = self.database.engine.catalog, self.deadline(target)
        info = await catalog.table(target.table, deadline)
        return await catalog.all_tablets(info.table_id, deadline)


_connections: dict[tuple[str, float], Connection] = {}
_guard = threading.Lock()


def _connection(target: Target) -> Connection:
    """Made when it is asked for first."""
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
        database = thread.call(connect)
    except (Unavailable, DeadlineExceeded) as error:
        raise Unavailable(
            f"address: no cluster answers at {target.address} from {socket.gethostname()}: "
            f"{error.message}"
        ) from error
    found = Connection(thread, database)
    thread.close_at_exit(found, database.close)
    return found


def checked(target: Target) -> Connection:
    """This process's connection to the table's cluster, once the table is known to exist.

    Asked anew each time: the process may have been used for another table of that name, which is
    gone. Raises `InvalidArgument` when there is none, and `Unavailable`, in the words of the option
    `address`, when nobody answers.
    """
    found = _connection(target)
    catalog, deadline = found.database.engine.catalog, found.deadline(target)
    try:
        found.call(lambda: catalog.describe(target.table, deadline))
    except SchemaError:
        raise InvalidArgument(
            "table", f"there is no table {target.table!r} at {target.address}"
        ) from None
    return found
