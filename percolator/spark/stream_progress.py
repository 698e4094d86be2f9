"""The end of the next batch of a stream. Runs on the driver, in the event loop of its client.

A batch ends where every change is stored by now, and at a commit: nothing can be added to it later,
and it is the same however often it is read. A trigger that finds nothing new makes no batch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from percolator import codecs
from percolator.aio import Database
from percolator.aio.pin import Pin
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PercolatorError,
    SchemaError,
    SnapshotTooOld,
)
from percolator.protocol.change_reader import ChangeReader
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import ChangesSeen, StoredChange
from percolator.schema import Table
from percolator.spark.chosen_rows import NOW, SNAPSHOT, Wanted
from percolator.tasks import Tasks
from percolator.timestamps import Timestamp

_MEMBERS: dict[str, type] = {"timestamp": int, "table_id": int, "snapshot": bool, "after": int}


@dataclass(frozen=True)
class Offset:
    """The end of a batch, and the start of the next one.

        {"timestamp": 0}                                      nothing was delivered yet
        {"timestamp": 71, "table_id": 5, "snapshot": true}    the batch is the table as it was at 71
        {"timestamp": 98, "table_id": 5}                      the batch has the changes up to 98
        {"timestamp": 98, "table_id": 5, "after": 71}         as before, and it is the first batch

    The first batch says where it begins, because Spark keeps no other offset before it: if it asked
    again after a restart, "now" would be later.
    """

    timestamp: int = 0
    """Everything up to here was delivered; 0: nothing yet."""
    table_id: int = 0
    """The table that it belongs to: a later table may have the same name."""
    snapshot: bool = False
    """The batch that ends here is all of the table at `timestamp`."""
    after: int = 0
    """Where the batch that ends here begins, if it is the first one and not a snapshot."""

    @classmethod
    def parse(cls, found: object) -> Offset:
        """Raises `InvalidArgument` if the checkpoint was not written by this source."""
        members = found if isinstance(found, dict) else {}
        wrong = [name for name, value in members.items() if type(value) is not _MEMBERS.get(name)]
        if wrong or "timestamp" not in members:
            raise InvalidArgument(
                "checkpointLocation", f"{found!r} is not an offset of a stream from percolator"
            )
        return cls(**members)

    def json(self) -> dict[str, Any]:
        """A position always has one JSON: Spark compares its text."""
        found = {name: getattr(self, name) for name in _MEMBERS}
        return {name: value for name, value in found.items() if value or name == "timestamp"}


_log = logging.getLogger("percolator.spark")

MOVE_SECONDS = 10.0
"""How often the pin moves at most, and is tried again while no lock service answers."""


class HeldHistory:
    """The pin of one stream.

    A pin (percolator/aio/pin.py) is where the oldest batch begins that Spark may still read. It
    moves up as batches are committed, but not with each of them: a pin that is lower holds as well.
    """

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


IDLE_SECONDS = 0.1
"""Spark asks for the latest offset again and again. While nothing changes, the cluster is asked no
more often than this, and Spark waits."""

RowRange = tuple[bytes, bytes]


class WholeTable(NamedTuple):
    """A batch that is the table as it was at one timestamp."""

    at: int


class SomeChanges(NamedTuple):
    """A batch that is the changes with after < commit timestamp <= until."""

    table_id: int
    after: int
    until: int
    ranges: Sequence[RowRange]
    """The rows of the tablets that may have changes."""


Batch = WholeTable | SomeChanges | None
"""None for a batch without rows."""


class Progress:
    """The position of one stream, between Spark's questions."""

    def __init__(self, database: Database, wanted: Wanted) -> None:
        self._engine = database.internal.engine
        self._wanted = wanted
        self._timeout_seconds = wanted.timeout_seconds
        table = Table(wanted.table, key=codecs.stored)
        self._held = HeldHistory(database, table, wanted.timeout_seconds)
        self._last: int | None = None
        """Where the stream ends, if it has an end (`Trigger.AvailableNow`)."""
        self._seen: tuple[int, ChangesSeen] | None = None
        """The last look that has found changes, and above which timestamp it looked."""
        self._ask_at = 0.0

    async def end_here(self) -> None:
        """The stream ends with what is committed by now."""
        self._last = await self._now()

    async def latest(self, start: Offset, rows_max: int) -> Offset:
        """The end of the next batch; `start` if there is nothing new. `rows_max` is 0 for no limit.

        Raises `SnapshotTooOld` if what follows `start` is gone and the options do not allow that.
        """
        table = await self._table()
        if not start.timestamp:
            return await self._first(table, rows_max)
        try:
            async with self._same(table, start):
                await self._held.hold(start.timestamp)
                end = await self._newest(table, start.timestamp, rows_max)
        except SnapshotTooOld as error:
            self._require_allowed(error, start)
            table = await self._table()
            at = await self._now_of(table)
            _log.warning("a stream begins again, with a snapshot at %d: %s", at, error.message)
            return Offset(at, table.table_id, snapshot=True)
        return Offset(end, table.table_id) if end > start.timestamp else start

    async def batch(self, start: Offset, end: Offset) -> Batch:
        """The batch between two offsets. It has the same rows whenever it is asked for."""
        if start == end:
            return None
        table = await self._table()
        after = end.after or start.timestamp
        try:
            async with self._same(table, end):
                if end.snapshot:
                    await self._held.hold(end.timestamp)
                    return WholeTable(end.timestamp)
                await self._held.hold(after)
                if after == end.timestamp:
                    return None
                ranges = await self._ranges(table, after, end.timestamp)
        except SnapshotTooOld as error:
            self._require_allowed(error, start)
            return await self._instead_of_lost(await self._table(), end, error)
        return SomeChanges(table.table_id, after, end.timestamp, ranges) if ranges else None

    def committed(self, end: Offset) -> None:
        """Spark will not ask for this batch again."""
        if end.timestamp:
            self._held.move(end.timestamp)

    async def close(self) -> None:
        """Ends the stream: history need not be kept any longer."""
        await self._held.close()

    # ------------------------------------------------------------------ where it begins

    async def _first(self, table: TableInfo, rows_max: int) -> Offset:
        began, now = self._wanted.starting_from, await self._now()
        if began == SNAPSHOT:
            await self._held.hold(now)
            return Offset(now, table.table_id, snapshot=True)
        after = now if began == NOW else int(began)
        if after > now:
            raise InvalidArgument(
                "starting_from",
                f"{Timestamp(after).describe()} is in the future: the oracle is at "
                f"{Timestamp(now).describe()}",
            )
        if after < table.created_at:
            raise InvalidArgument(
                "starting_from",
                f"{Timestamp(after).describe()} is before table {table.name!r} was created",
            )
        try:
            await self._held.hold(after)
            end = await self._newest(table, after, rows_max) if after < now else after
        except SnapshotTooOld as error:
            raise InvalidArgument(
                "starting_from",
                f"{Timestamp(after).describe()} is too far back: {error.message}",
            ) from error
        return Offset(end, table.table_id, after=after)

    def _require_allowed(self, error: SnapshotTooOld, start: Offset) -> None:
        """Raises, unless the options say that lost changes are not an error."""
        if self._wanted.fail_on_data_loss:
            raise SnapshotTooOld(
                f"changes after {Timestamp(start.timestamp).describe()}, where the stream stopped, "
                f"are lost: {error.message}. With failOnDataLoss=false it begins again with a "
                "snapshot; so does a query with a new checkpoint and starting_from=snapshot",
                timestamp=error.timestamp,
                safe_point=error.safe_point,
            ) from error

    async def _instead_of_lost(
        self, table: TableInfo, end: Offset, error: SnapshotTooOld
    ) -> WholeTable:
        """The batch whose changes are gone: the table as it was at its end. If that is gone, too,
        the table as it is now: whatever follows, nothing is missing in the end."""
        _log.warning("a batch of a stream is replaced by a snapshot: %s", error.message)
        now = await self._now_of(table)
        try:
            _require_same(table, end)
            await self._held.hold(end.timestamp)
            await self._reader(table, end.timestamp).settled(now, self._timeout_seconds)
        except SnapshotTooOld:
            return WholeTable(now)
        return WholeTable(end.timestamp)

    # ------------------------------------------------------------------ how far it goes

    async def _newest(self, table: TableInfo, after: int, rows_max: int) -> int:
        """Where a batch above `after` ends; `after` if nothing has changed."""
        reader = self._reader(table, after)
        deadline, backoff = self._deadline(), self._engine.env.backoff()
        while True:
            if self._last is None:
                await self._pause()
            until = self._last or await self._now()
            if until <= after:
                return after
            seen = await reader.settled(until, self._timeout_seconds)
            end = min(seen.newest, seen.reached)
            if end > after:
                break
            if self._last is None:
                self._ask_at = self._engine.now() + IDLE_SECONDS
                return after
            if seen.reached >= until:
                return after
            if not await backoff.pause(deadline):
                raise DeadlineExceeded(
                    f"changes up to {until} may still come: a bulk load or a transaction is under "
                    "way; run the query again later"
                )
        self._seen = after, seen
        return await self._cut(reader, seen, end, rows_max) if rows_max else end

    async def _pause(self) -> None:
        seconds = self._ask_at - self._engine.now()
        if seconds > 0:
            await self._engine.world.clock.sleep(seconds)

    async def _cut(self, reader: ChangeReader, seen: ChangesSeen, end: int, rows_max: int) -> int:
        """The last commit up to which there are at most `rows_max` rows; at least the first one."""
        after = whole = commit = reader.position
        rows = 0
        last: tuple[object, ...] = ()
        found = reader.between(seen._replace(reached=end), self._timeout_seconds)
        async with aclosing(found) as pages:
            async for page in pages:
                for change in page:
                    if change.commit_timestamp != commit:
                        whole, commit = commit, change.commit_timestamp
                    if (row := self._row_of(change)) in (None, last):
                        continue
                    rows, last = rows + 1, row
                    if rows > rows_max and whole > after:
                        return whole
        return end

    def _row_of(self, change: StoredChange) -> tuple[object, ...] | None:
        """Which row of the stream a change belongs to; None if to none."""
        wanted = self._wanted
        if not wanted.rows.contains(change.row):
            return None
        if wanted.columns is None:
            return change[:3]
        return change[:2] if change.column in wanted.columns else None

    async def _ranges(self, table: TableInfo, after: int, until: int) -> Sequence[RowRange]:
        """The rows of the tablets that have changes in between, all of which are stored."""
        if self._seen is not None:
            looked_after, seen = self._seen
            if looked_after == after and until <= seen.reached:
                return seen.ranges
        reader = self._reader(table, after)
        deadline, backoff = self._deadline(), self._engine.env.backoff()
        while True:
            seen = await reader.settled(until, self._timeout_seconds)
            if seen.reached >= until:
                return seen.ranges
            if not await backoff.pause(deadline):
                raise DeadlineExceeded(f"locks below {until}, which was settled, are still there")

    # ------------------------------------------------------------------ the cluster

    async def _table(self) -> TableInfo:
        return await self._engine.catalog.table(self._wanted.table, self._deadline())

    @asynccontextmanager
    async def _same(self, table: TableInfo, offset: Offset) -> AsyncIterator[None]:
        """The table, if the offset belongs to it. Raises `SnapshotTooOld` if another one has its
        name by now."""
        _require_same(table, offset)
        try:
            yield
        except SchemaError:
            # This process may remember a table that was dropped, and ask for its tablets.
            await self._engine.catalog.describe(table.name, self._deadline())
            _require_same(await self._table(), offset)
            raise

    def _reader(self, table: TableInfo, after: int) -> ChangeReader:
        engine = self._engine
        return ChangeReader(engine.env, engine.cleanup, engine.router, table, after)

    async def _now(self) -> int:
        return self._last or await self._engine.env.timestamps.get(
            timeout_seconds=self._timeout_seconds
        )

    async def _now_of(self, table: TableInfo) -> int:
        """When a snapshot of the table is read. A stream that has an end may be older than it."""
        return max(await self._now(), table.created_at)

    def _deadline(self) -> float:
        return self._engine.now() + self._timeout_seconds


def _require_same(table: TableInfo, offset: Offset) -> None:
    if table.table_id != offset.table_id:
        raise SnapshotTooOld(
            f"table {table.name!r} is not the table that the stream was reading (id "
            f"{table.table_id}, was {offset.table_id}); start a new checkpoint",
            timestamp=offset.timestamp,
        )
