"""Reading a table: a partition for each tablet, a batch for each page.

A partition is a list of row ranges and nothing else. When its task runs, the client finds the
tablets that have these rows by then, and resolves the locks that it meets.

Filters are not pushed down: there is no `pushFilters` here, and there must not be. Spark 4.3 keeps
the partitions and the read function that it planned with pushed filters on the relation of the
frame, and uses them for later queries of that frame, which then miss rows. What Spark keeps has to
be right for every query, so only the options of the frame choose rows: by their keys, or by an
index.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from percolator import aio, codecs
from percolator.aio.pin import Pin
from percolator.aio.snapshot import Snapshot
from percolator.errors import InvalidArgument, PercolatorError, SnapshotTooOld
from percolator.routing.cells import CellPage
from percolator.routing.range_scan import SentPage
from percolator.routing.ranges import TableRange
from percolator.schema import Column, Table
from percolator.spark.chosen_rows import RowRanges, RowsBetween
from percolator.spark.connections import Connection, checked
from percolator.spark.options import ReadOptions
from percolator.spark.shapes import shape_of
from percolator.tasks import Tasks
from percolator.timestamps import Timestamp, seconds_between

KEYS_PER_PAGE = 512


def cell_pages(
    snapshot: Snapshot,
    table: Table[Any],
    ranges: Sequence[RowsBetween],
    columns: tuple[bytes, ...] | None,
) -> AsyncGenerator[CellPage, None]:
    """As `sent_pages`, but all of them are lists."""
    pages = sent_pages(snapshot, table, ranges, columns, joined=False)
    return cast(AsyncGenerator[CellPage, None], pages)


async def sent_pages(
    snapshot: Snapshot,
    table: Table[Any],
    ranges: Sequence[RowsBetween],
    columns: tuple[bytes, ...] | None,
    *,
    joined: bool,
) -> AsyncGenerator[SentPage, None]:
    """Yields the cells of all ranges in turn; no row is in two pages. `joined` says whether pages
    may be blocks of memory."""
    scan = snapshot.scan_joined if joined else snapshot.scan_cells
    for single, some in groupby(ranges, attrgetter("is_one_row")):
        if single:
            keys = [one.start for one in some]
            for first in range(0, len(keys), KEYS_PER_PAGE):
                page_keys = keys[first : first + KEYS_PER_PAGE]
                yield await snapshot.get_cells(table, page_keys, columns=columns)
            continue
        for one in some:
            pages = scan(table, start=one.start, end=one.end, columns=columns)
            async with aclosing(pages):
                async for page in pages:
                    yield page


ANY_COLUMN = "any"


@dataclass
class TableRows(InputPartition):
    """The rows of one task, as ranges in order."""

    ranges: tuple[RowsBetween, ...]


async def plan(
    connection: Connection, options: ReadOptions, timestamp: Timestamp
) -> list[TableRows]:
    """All rows of the read, in order. Raises what would make every task fail."""
    if not options.rows.ranges:
        return []
    await _require_kept(connection, options, options.rows.ranges[0].start, timestamp)
    whole = await connection.ranges(options.target)
    wanted = options.rows
    if options.lookup is not None:
        wanted = await options.lookup.rows(
            connection.database.internal,
            options.target.table,
            timestamp,
            wanted,
            options.target.timeout_seconds,
        )
    parts = [(wanted.within(RowsBetween(one.start, one.end)), one) for one in whole]
    cut = [_cut(connection, options, ranges, one) for ranges, one in parts if ranges]
    return [rows for some in await asyncio.gather(*cut) for rows in some]


async def _cut(
    connection: Connection,
    options: ReadOptions,
    ranges: tuple[RowsBetween, ...],
    whole: TableRange,
) -> list[TableRows]:
    """The rows wanted from one range: in one part, or in several of `partition_bytes` each."""
    start, end = ranges[0].start, ranges[-1].end
    inner = await connection.database.internal.engine.ranges.cut(
        whole._replace(start=start, end=end),
        options.partition_bytes,
        options.target.timeout_seconds,
    )
    wanted = RowRanges(ranges)
    bounds = itertools.pairwise([start, *inner, end])
    parts = [wanted.within(RowsBetween(first, last)) for first, last in bounds]
    return [TableRows(part) for part in parts if part]


async def _require_kept(
    connection: Connection, options: ReadOptions, row: bytes, timestamp: Timestamp
) -> None:
    """Reads one cell at the timestamp: if one tablet still has the history, all do."""
    table = Table(options.target.table, key=codecs.stored)
    snapshot = connection.database.internal.snapshot(timestamp, options.target.timeout_seconds)
    async with snapshot:
        try:
            await snapshot.get(row, Column(table, ANY_COLUMN, codecs.raw))
        except SnapshotTooOld as error:
            name = options.at_option if options.at is not None else "pin_seconds"
            raise InvalidArgument(
                name, f"{timestamp.describe()} is too far back: {error.message}"
            ) from error


_log = logging.getLogger("percolator.spark")

SHARED_SECONDS = 10.0
"""How much older than the snapshot of a read its pin may be. So much more history is kept."""


def pinned_timestamp(options: ReadOptions) -> Timestamp:
    """The timestamp to read at, pinned from now on.

    Raises `InvalidArgument` if the options are wrong, `SnapshotTooOld` if the history is gone.

    The timestamp is chosen on the driver when the read is defined, and a pin
    (percolator/aio/pin.py) keeps the history from there on. The pin is renewed by the process in
    which Spark defined the read. Spark may end that process after a minute of idleness; the pin
    outlives it by its time to live. Tasks keep the history themselves while they read. Between the
    two, the table's retention does.

    Reads that are defined soon after each other share a pin, for a program may define thousands in
    an hour: each pin has a session that is renewed, and Spark searches all that it is made of for
    garbage after each read that the process has defined.
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


class TableReader(DataSourceReader):
    """Reads all rows of a table, or those that options choose, at one timestamp."""

    def __init__(self, options: ReadOptions, schema: StructType, timestamp: int) -> None:
        self._options = options
        self._schema = schema
        self._timestamp = Timestamp(timestamp)
        self._shape = shape_of(options.catalog)
        self._shape.check_read(schema)
        self._stored = self._shape.stored(schema, options.columns)
        self._target = to_arrow_schema(schema, timezone="UTC")

    def partitions(self) -> Sequence[InputPartition]:
        here = checked(self._options.target)
        return here.call(partial(plan, here, self._options, self._timestamp))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TableRows):
            return  # Spark makes one of its own when there is nothing to read
        options = self._options
        here = checked(options.target)
        snapshot = here.database.internal.snapshot(self._timestamp, options.target.timeout_seconds)
        table = Table(options.target.table, key=codecs.stored)
        pages = here.thread.iterate(
            sent_pages(snapshot, table, partition.ranges, self._stored, joined=self._shape.joined)
        )
        try:
            with closing(pages):
                for page in pages:
                    if len(page.rows):
                        yield self._shape.batch(page, self._schema, self._target)
        finally:
            here.call(snapshot.close)
