"""The snapshot of a read: one for all jobs of a DataFrame, and kept from being collected.

The timestamp is chosen on the driver when the read is defined, and a pin (percolator/aio/pin.py)
keeps the history from there on. The pin is renewed by the process in which Spark defined the read.
Spark may end that process after a minute of idleness; the pin outlives it by its time to live.
Tasks keep the history themselves while they read. Between the two, the table's retention does.

Reads that are defined soon after each other share a pin, for a program may define thousands in an
hour: each pin has a session that is renewed, and Spark searches all that it is made of for garbage
after each read that the process has defined.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

from percolator import aio, codecs
from percolator.aio.pin import Pin
from percolator.errors import InvalidArgument, PercolatorError, SnapshotTooOld
from percolator.schema import Table
from percolator.spark.connections import Connection, checked
from percolator.spark.options import ReadOptions
from percolator.tasks import Tasks
from percolator.timestamps import Timestamp, seconds_between

_log = logging.getLogger("percolator.spark")

SHARED_SECONDS = 10.0
"""How much older than the snapshot of a read its pin may be. So much more history is kept."""


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
        pins = _pins.get(connection)
        if pins is None:
            pins = _pins[connection] = ReadPins(connection.database)
        connection.call(
            lambda: pins.hold(
                at, options.target.table, options.pin_seconds, is_new=options.at is None
            )
        )
    return at


@dataclass
class _Held:
    """A pin, and how long the reads need it that share it."""

    pin: Pin
    until: float

    def holds(self, at: Timestamp) -> bool:
        first = self.pin.at
        return not self.pin.is_lost and first <= at and seconds_between(first, at) < SHARED_SECONDS


class ReadPins:
    """The pins of this process at one cluster. Runs in the event loop."""

    def __init__(self, database: aio.Database) -> None:
        self._database = database
        self._newest: _Held | None = None
        self._ending = Tasks()

    async def hold(self, at: Timestamp, table: str, seconds: float, *, is_new: bool) -> None:
        """Keeps history from here on for so long. `is_new`: the timestamp was handed out just now,
        so no table can have lost it. Raises `SnapshotTooOld` if it is gone."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if is_new and self._newest is not None and self._newest.holds(at):
            self._newest.until = max(self._newest.until, until)
            return
        tables, what = [Table(table, key=codecs.stored)], f"Spark read on {socket.gethostname()}"
        pin = self._database.pin(at, tables=tables, description=what)
        try:
            await pin.set()
        except SnapshotTooOld:
            raise
        except PercolatorError as error:
            # The table's retention keeps it for a while. If that is too short, reads fail loudly.
            _log.warning("the snapshot %s is not pinned: %s", at.describe(), error)
            return
        held = _Held(pin, until)
        if is_new:
            self._newest = held
        loop.call_at(until, self._release, held)

    def _release(self, held: _Held) -> None:
        """Closes the pin, unless other reads need it for longer."""
        loop = asyncio.get_running_loop()
        if held.until > loop.time():
            loop.call_at(held.until, self._release, held)
            return
        if self._newest is held:
            self._newest = None
        self._ending.start(held.pin.close())


_pins: dict[Connection, ReadPins] = {}
