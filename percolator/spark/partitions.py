"""Which rows each task of a read gets: those of one tablet, or a part of a large one."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from percolator import codecs
from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    SnapshotTooOld,
    TabletLocation,
)
from percolator.schema import Column, Table
from percolator.spark.connections import Connection
from percolator.spark.options import ReadOptions
from percolator.spark.row_ranges import RowRanges, RowsBetween
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.methods import PROPOSE_PARTS

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
    tablets = await connection.tablets(options.target)
    parts = [(options.rows.within(RowsBetween(one.start, one.end)), one) for one in tablets]
    cut = [_cut(connection, options, ranges, one) for ranges, one in parts if ranges]
    return [rows for some in await asyncio.gather(*cut) for rows in some]


async def _cut(
    connection: Connection,
    options: ReadOptions,
    ranges: tuple[RowsBetween, ...],
    tablet: TabletLocation,
) -> list[TableRows]:
    """The rows wanted from one tablet: in one part, or in several of `partition_bytes` each."""
    start, end = ranges[0].start, ranges[-1].end
    request = wire.ProposePartsRequest(
        target=wire.TabletTarget(tablet_id=tablet.tablet_id, epoch=tablet.epoch),
        range=RowRange(start=start, end=end),
        part_bytes=options.partition_bytes,
    )
    propose = connection.database.internal.engine.world.network.unary(tablet.address, PROPOSE_PARTS)
    try:
        inner = list((await propose(request, options.target.timeout_seconds)).rows)
    except (NotExecuted, ExecutionUnknown):
        inner = []  # it is moving right now; the task that reads it will find it
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
