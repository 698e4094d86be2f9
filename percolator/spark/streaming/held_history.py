"""Keeps the history that a stream still needs, while its query runs and for a minute afterwards.

A pin (percolator/aio/pin.py) is where the oldest batch begins that Spark may still read. It moves
up as batches are committed, but not with each of them: a pin that is lower holds as well.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from percolator.aio import Database
from percolator.aio.pin import Pin
from percolator.errors import PercolatorError, SnapshotTooOld
from percolator.schema import Table
from percolator.tasks import Tasks
from percolator.timestamps import Timestamp

_log = logging.getLogger("percolator.spark")

MOVE_SECONDS = 10.0
"""How often the pin moves at most, and is tried again while no lock service answers."""


class HeldHistory:
    """The pin of one stream."""

    def __init__(self, database: Database, table: Table[bytes], timeout_seconds: float) -> None:
        self._database = database
        self._table = table
        self._timeout_seconds = timeout_seconds
        self._now = database.internal.engine.now
        self._pin: Pin | None = None
        self._move_at = 0.0
        self._moving = Tasks()

    async def hold(self, at: int) -> None:
        """From now on, history is kept from here. Raises `SnapshotTooOld` if it is gone.

        If no lock service answers, that is only logged: the table's retention keeps history for a
        while, and if that is too short, reading fails loudly.
        """
        pin = self._pin
        if pin is not None and not pin.is_lost and pin.at <= at:
            return
        if pin is not None or self._now() >= self._move_at:
            await self._set(at)

    def move(self, at: int) -> None:
        """Nothing below this is still needed. Does not wait for the pin to move."""
        if self._now() >= self._move_at and not len(self._moving):
            self._moving.start(self._move(at))

    async def close(self) -> None:
        """Releases the pin."""
        await self._moving.cancel()
        pin, self._pin = self._pin, None
        if pin is not None:
            await pin.close()

    async def _move(self, at: int) -> None:
        try:
            await self._set(at)
        except SnapshotTooOld as error:
            _log.warning("history was collected while a stream needed it: %s", error)

    async def _set(self, at: int) -> None:
        self._move_at = self._now() + MOVE_SECONDS
        what = f"Spark stream on {socket.gethostname()}"
        pin = self._database.pin(Timestamp(at), tables=[self._table], description=what)
        try:
            await asyncio.wait_for(pin.set(), self._timeout_seconds)
        except SnapshotTooOld:
            raise
        except (PercolatorError, TimeoutError) as error:
            _log.warning("the position %d of a stream is not pinned: %s", at, error)
            return
        old, self._pin = self._pin, pin
        if old is not None:
            await old.close()
