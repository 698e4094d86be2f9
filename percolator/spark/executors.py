"""The client in functions that Spark's executors run: one connection for each Python process.

An executor starts several Python processes and runs many tasks in each. A connection is more than
a socket (a session, channels, a thread), so it is made once in each process, not once in each task.
"""

from __future__ import annotations

import os
import socket
import threading

from percolator import aio
from percolator.blocking import loop_thread
from percolator.blocking.database import Database
from percolator.spark.python_workers import leave_out_of_collections
from percolator.wire.cluster import default_addresses, parse_addresses

_databases: dict[tuple[int, str], tuple[aio.Database, Database]] = {}
"""By process, too: a connection does not survive a fork, and its copy here would be dead."""
_guard = threading.Lock()


def shared_database(address: str | None) -> Database:
    """The connection of this process to the cluster at the address, made on first use."""
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
