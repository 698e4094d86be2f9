"""The snapshot of a read: one for all jobs of a DataFrame, and kept from being collected.

The timestamp is chosen on the driver when the read is defined, and a pin (percolator/aio/pin.py)
keeps the history from there on. The pin is renewed by the process in which Spark defined the read.
Spark may end that process after a minute of idleness; the pin outlives it by its time to live.
Tasks keep the history themselves while they read. Between the two, the table's retention does.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from percolator import codecs
from percolator.errors import InvalidArgument, PercolatorError, SnapshotTooOld
from percolator.schema import Table
from percolator.spark.connections import Connection, checked
from percolator.spark.options import ReadOptions
from percolator.tasks import Tasks
from percolator.timestamps import Timestamp

_log = logging.getLogger("percolator.spark")


def pinned_timestamp(options: ReadOptions) -> Timestamp:
    """The timestamp to read at, pinned from now on.

    Raises `InvalidArgument` if the options are wrong, `SnapshotTooOld` if the history is gone.
    """
    connection = checked(options.target, options.catalog)
    now = connection.call(connection.database.timestamp)
    if options.at is not None and options.at > now:
        raise InvalidArgument(
            options.at_option,
            f"{options.at.describe()} is in the future: the oracle is at {now.describe()}",
        )
    at = now if options.at is None else options.at
    if options.pin_seconds:
        connection.call(lambda: _pin(connection, at, options))
    return at


async def _pin(connection: Connection, at: Timestamp, options: ReadOptions) -> None:
    table = Table(options.target.table, key=codecs.stored)
    what = f"Spark read on {socket.gethostname()}"
    pin = connection.database.pin(at, tables=[table], description=what)
    try:
        await pin.set()
    except SnapshotTooOld:
        raise
    except PercolatorError as error:
        # The table's retention keeps it for a while. If that is too short, the read fails loudly.
        _log.warning("the snapshot %s is not pinned: %s", at.describe(), error)
        return

    loop = asyncio.get_running_loop()
    loop.call_later(options.pin_seconds, lambda: _ending.start(pin.close()))


_ending = Tasks()
