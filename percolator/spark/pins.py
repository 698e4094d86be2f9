"""The snapshot of a read: one for all jobs of one DataFrame, and kept from being collected.

The timestamp is fixed on the driver, when the read is defined, and a pin (percolator/aio/pin.py)
holds back the collection of history from there on. It is renewed by the process that Spark
defined the read in; Spark may end that process when it was idle for a minute, and the pin outlives
it by its time to live. Tasks that are reading hold back history themselves. Between the two, a
read is safe for as long as the table's retention anyway.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from percolator import codecs
from percolator.aio.pin import PIN_TTL_SECONDS
from percolator.errors import InvalidArgument, PercolatorError, SnapshotTooOld
from percolator.schema import Table
from percolator.spark.connections import Connection, checked
from percolator.spark.options import ReadOptions
from percolator.timestamps import Timestamp

_log = logging.getLogger("percolator.spark")


def pinned_timestamp(options: ReadOptions) -> Timestamp:
    """Where the read is to look, from now on kept.

    Raises what is wrong with the options, and `SnapshotTooOld` for what is no longer there.
    """
    connection = checked(options.target)
    now = connection.call(connection.database.timestamp)
    if options.at is not None and options.at > now:
        raise InvalidArgument(
            options.at_option,
            f"{options.at.describe()} lies in the future: the oracle is at {now.describe()}",
        )
    at = now if options.at is None else options.at
    if options.pin_seconds:
        connection.call(lambda: _pin(connection, at, options))
    return at


async def _pin(connection: Connection, at: Timestamp, options: ReadOptions) -> None:
    table = Table(options.target.table, key=codecs.raw)
    what = f"Spark read on {socket.gethostname()}"
    pin = connection.database.pin(at, tables=[table], description=what, ttl=PIN_TTL_SECONDS)
    try:
        await pin.set()
    except SnapshotTooOld:
        raise
    except PercolatorError as error:
        # The table's retention keeps it for a while; if that is not enough, the read says so.
        _log.warning("the snapshot %s is not pinned: %s", at.describe(), error)
        return

    def end() -> None:
        _ending.add(task := asyncio.ensure_future(pin.close()))
        task.add_done_callback(_ending.discard)

    asyncio.get_running_loop().call_later(options.pin_seconds, end)


_ending: set[asyncio.Future[None]] = set()
"""Kept from being forgotten halfway."""
