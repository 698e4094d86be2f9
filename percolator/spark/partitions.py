"""Which ranges of rows the tasks of a read get: those of the tablets, large ones cut further."""

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
from percolator.spark.key_range import RowsBetween
from percolator.spark.options import ReadOptions
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.methods import PROPOSE_PARTS

ANY_COLUMN = "any"


@dataclass
class TableRows(InputPartition):
    """The rows of one task: from start (included) to end (excluded; empty: to the last row)."""

    start: bytes
    end: bytes


async def plan(
    connection: Connection, options: ReadOptions, wanted: RowsBetween, timestamp: Timestamp
) -> list[TableRows]:
    """One after the other, all of the wanted rows. Raises what would make every task fail."""
    if wanted.nothing:
        return []
    await _require_kept(connection, options, wanted.start, timestamp)
    tablets = await connection.tablets(options.target)
    parts = [(RowsBetween(one.start, one.end).intersected(wanted), one) for one in tablets]
    cut = [_cut(connection, options, rows, one) for rows, one in parts if not rows.nothing]
    return [rows for some in await asyncio.gather(*cut) for rows in some]


async def _cut(
    connection: Connection, options: ReadOptions, rows: RowsBetween, tablet: TabletLocation
) -> list[TableRows]:
    """The rows of one tablet, in as many parts as they are large."""
    request = wire.ProposePartsRequest(
        target=wire.TabletTarget(tablet_id=tablet.tablet_id, epoch=tablet.epoch),
        range=RowRange(start=rows.start, end=rows.end),
        part_bytes=options.partition_bytes,
    )
    propose = connection.database.engine.world.network.unary(tablet.address, PROPOSE_PARTS)
    try:
        inner = list((await propose(request, options.target.timeout_seconds)).rows)
    except (NotExecuted, ExecutionUnknown):
        inner = []  # it moves at this moment: whoever reads it will find it
    bounds = [rows.start, *inner, rows.end]
    return [TableRows(start, end) for start, end in itertools.pairwise(bounds)]


async def _require_kept(
    connection: Connection, options: ReadOptions, row: bytes, timestamp: Timestamp
) -> None:
    """Reads nothing, at the timestamp: one tablet that answers speaks for the table."""
    table = Table(options.target.table, key=codecs.raw)
    snapshot = connection.database.new_snapshot(timestamp, options.target.timeout_seconds)
    async with snapshot:
        try:
            await snapshot.get(row, Column(table, ANY_COLUMN, codecs.raw))
        except SnapshotTooOld as error:
            name = options.at_option if options.at is not None else "pin_seconds"
            raise InvalidArgument(
                name, f"{timestamp.describe()} is too far back: {error.message}"
            ) from error
