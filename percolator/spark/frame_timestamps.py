"""The timestamp at which a DataFrame reads, kept where a program can see it.

Spark keeps nothing of a Python data source that a program could ask, but for its schema: the
timestamp is in the metadata of each field. It follows the field through selections, filters, joins
and groupings, and into Parquet files, whose rows are of that moment, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import StructField, StructType

from percolator.errors import UsageError
from percolator.timestamps import Timestamp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_METADATA = "percolator.snapshot_ts"


def stamped(schema: StructType, timestamp: int) -> StructType:
    """The schema of a read at a timestamp."""
    return StructType(
        [
            StructField(field.name, field.dataType, field.nullable, {_METADATA: int(timestamp)})
            for field in schema.fields
        ]
    )


def frame_timestamp(frame: DataFrame) -> Timestamp:
    """The one timestamp at which all tables of the frame are read."""
    found = {field.metadata[_METADATA] for field in frame.schema if _METADATA in field.metadata}
    if len(found) > 1:
        shown = ", ".join(str(one) for one in sorted(found))
        raise UsageError(f"the frame has fields of several snapshots: {shown}")
    if not found:
        raise UsageError(
            "no field of the frame carries its timestamp: all are computed, or were declared with "
            "schema(...); ask the frame that load() returned, or read through a snapshot"
        )
    return Timestamp(found.pop())
