"""Which rows each task of a read gets: a range of the table, or a part of a large one."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from percolator import codecs
from percolator.errors import InvalidArgument, SnapshotTooOld
from percolator.routing.ranges import TableRange
from percolator.schema import Column, Table
from percolator.spark.choosing.row_ranges import RowRanges, RowsBetween
from percolator.spark.connections import Connection
from percolator.spark.options import ReadOptions
from percolator.timestamps import Timestamp

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
    parts = [(options.rows.within(RowsBetween(one.start, one.end)), one) for one in whole]
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
