"""One connection to each cluster in every Python process that Spark starts, made when needed.

Connections are never pickled: each executor process makes its own. Spark forks these processes
before they have used anything of the library, and runs many tasks in each.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from percolator import aio, codecs
from percolator.blocking import loop_thread
from percolator.blocking.api import Database
from percolator.blocking.loop_thread import LoopThread
from percolator.codecs.names import CodecNames
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    SchemaError,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.ranges import TableRange
from percolator.schema import CATALOGUES_NAME, Table
from percolator.spark.catalog import FrameCatalog, declared_catalog, require_declared
from percolator.spark.options import Target
from percolator.v1.master_pb2 import TableOptions
from percolator.wire.cluster import default_addresses, parse_addresses

_RUNTIME, _PYTHON_WORKER = "SPARK_PYTHON_RUNTIME", "PYTHON_WORKER"
"""A variable that Spark sets in their environment."""


def leave_out_of_collections() -> None:
    """Garbage collections skip everything that exists by now, if this is a process of Spark's.

    Spark collects all garbage of such a process after each task, and after each step of planning.
    That takes 20 to 40 ms, nearly all of it for code that stays.
    """
    if os.environ.get(_RUNTIME) == _PYTHON_WORKER:
        gc.freeze()


_databases: dict[tuple[int, str], tuple[aio.Database, Database]] = {}
"""By process, too: a connection does not survive a fork, and its copy here would be dead."""
_guard = threading.Lock()


def shared_database(address: str | None) -> Database:
    """The connection of this process to the cluster at the address, made on first use.

    An executor starts several Python processes and runs many tasks in each. A connection is more
    than a socket (a session, channels, a thread), so it is made once in each process, not once in
    each task.
    """
    addresses = default_addresses() if address is None else parse_addresses(address)
    key = os.getpid(), ",".join(addresses)
    with _guard:
        opened, found = _databases.get(key, (None, None))
        if found is None or opened is None or opened.internal.engine.closed:
            # A task that closes it, as `with` does, must not be the last one of its process.
            opened, found = _databases[key] = _connected(key[1])
            leave_out_of_collections()
        return found


def _connected(address: str) -> tuple[aio.Database, Database]:
    async def connect() -> aio.Database:
        return await aio.connect(address, description=f"Spark on {socket.gethostname()}")

    thread = loop_thread.shared()
    opened = thread.open(connect)
    return opened, Database(thread, opened)


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


CATALOGUES = Table(CATALOGUES_NAME)
CATALOGUE = CATALOGUES.column("catalog", codecs.text)
STORED = "stored"


def store(table: str, catalog: str, address: str | None) -> None:
    """Keeps the catalogue for all who read or write the table with `catalog="stored"`. Raises
    `SchemaError` if it contradicts the codecs that the table's schema keeps."""
    parsed = FrameCatalog.parse(catalog)
    given = {"table": table} if address is None else {"table": table, "address": address}
    target = Target.parse(given)
    here = checked(target, parsed)

    async def keep() -> None:
        tables, deadline = here.database.internal.engine.catalog, here.deadline(target)
        try:
            await tables.table(CATALOGUES.name, deadline)
        except SchemaError:
            await tables.create(
                CATALOGUES.name, (), TableOptions(), exist_ok=True, deadline=deadline
            )
        async with here.database.transaction() as tx:
            tx.set(table, CATALOGUE, catalog)

    here.call(keep)


def with_stored_catalog(options: Mapping[str, str]) -> dict[str, str]:
    """The options, with the catalogue of the table in place of the word `stored`.

        table   percolator.catalogues
        row     the name of the table
        catalog the option `catalog`, as text

    The catalogue is looked up when a read or write begins, and is the same for all its jobs. If
    none is stored, it comes from the codecs that the table's schema keeps.
    """
    found = {name.lower(): str(value) for name, value in options.items()}
    if found.get("catalog", "").strip().lower() == STORED:
        target = Target.parse(found)
        here = checked(target)
        found["catalog"] = here.call(lambda: _stored(here, target.table))
    return found


async def _stored(here: Connection, table: str) -> str:
    try:
        async with here.database.snapshot() as snapshot:
            found = await snapshot.get(table, CATALOGUE)
    except SchemaError:  # the table of catalogues is made with the first of them
        found = None
    if found is None:
        engine = here.database.internal.engine
        info = await engine.catalog.table(table, engine.now() + engine.limits.call_seconds)
        found = declared_catalog(info.codecs.names)
    if found is None:
        raise InvalidArgument(
            "catalog",
            f"none is stored for table {table!r}, and none of its columns has a codec yet; "
            "percolator.spark.store_catalog stores one",
        )
    return found
