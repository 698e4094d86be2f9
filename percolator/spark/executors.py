"""The client in functions that Spark's executors run: one connection for each Python process.

An executor starts several Python processes and runs many tasks in each. A connection is more than
a socket (a session, channels, a thread), so it is made once in each process, not once in each task.
"""

from __future__ import annotations

import os
import socket
import threading

from percolator.blocking.database import Database, connect
from percolator.spark.python_workers import leave_out_of_collections
from percolator.wire.cluster import default_addresses, parse_addresses

_databases: dict[tuple[int, str], Database] = {}
"""By process, too: a connection does not survive a fork, and its copy here would be dead."""
_guard = threading.Lock()


def shared_database(address: str | None) -> Database:
    """The connection of this process to the cluster at the address, made on first use."""
    addresses = default_addresses() if address is None else parse_addresses(address)
    key = os.getpid(), ",".join(addresses)
    with _guard:
        found = _databases.get(key)
        if found is None:
            description = f"Spark on {socket.gethostname()}"
            found = _databases[key] = connect(key[1], description=description)
            leave_out_of_collections()
        return found
