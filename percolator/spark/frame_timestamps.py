"""The timestamp at which a DataFrame reads, kept where a program can see it.

Spark keeps nothing of a Python data source that a program could ask, but for its schema: the
timestamp is in the metadata of each field. It follows the field through selections, filters, joins
and groupings, and into Parquet files, whose rows are of that moment, too.

The fields that are left in a frame may be those of one snapshot alone, though its rows depend on
others: Spark takes the fields of a union from the first of its frames, and a semi-join or a
subquery leaves none of its own. So the plan is asked, too, for what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructField, StructType

from percolator.errors import SchemaError, UsageError
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
    found = _timestamps(frame.schema)
    if found:
        for schema in _read_by(frame):
            found |= _timestamps(schema)
    if len(found) > 1:
        shown = ", ".join(str(one) for one in sorted(found))
        raise UsageError(
            f"the frame is computed from fields of several snapshots: {shown}; ask the frames that "
            "load() returned, or read all of them through one snapshot"
        )
    if not found:
        raise UsageError(
            "no field of the frame carries its timestamp: all are computed, or were declared with "
            "schema(...); ask the frame that load() returned, or read through a snapshot"
        )
    return Timestamp(found.pop())


def require_own(schema: StructType, timestamp: int) -> None:
    """Refuses a schema, for a read at this timestamp, that is taken from another frame: the new one
    would seem to be as old as that."""
    for field in schema.fields:
        if field.metadata.get(_METADATA, timestamp) != timestamp:
            raise SchemaError(
                f"field {field.name!r} of the schema is that of a frame which reads at "
                f"{field.metadata[_METADATA]}, and timestamp_of would take this one for that: give "
                "schema(...) names and types alone, such as 'url string'"
            )


def _timestamps(schema: StructType) -> set[int]:
    return {field.metadata[_METADATA] for field in schema.fields if _METADATA in field.metadata}


def _read_by(frame: DataFrame) -> Iterator[StructType]:
    """The schemas of all that the frame's plan reads. Spark Connect does not show plans."""
    java: Any = getattr(frame, "_jdf", None)
    if java is None:
        return
    plan = java.queryExecution().analyzed()
    for one in (plan, *_each(plan.subqueriesAll())):
        for leaf in _each(one.collectLeaves()):
            yield StructType.fromJson(json.loads(leaf.schema().json()))


def _each(found: Any) -> Iterator[Any]:  # noqa: ANN401 - a sequence of Scala's
    return (found.apply(place) for place in range(found.size()))
