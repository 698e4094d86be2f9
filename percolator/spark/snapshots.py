"""Several tables at one instant, views that are moved to a later one.

Spark keeps nothing of a Python data source that a program could ask, but for its schema: the
timestamp of a read is in the metadata of each field. It follows the field through selections,
filters, joins and groupings, and into Parquet files, whose rows are of that time, too.

The fields that are left in a frame may be those of one snapshot alone, though its rows depend on
others: Spark takes the fields of a union from the first of its frames, and a semi-join or a
subquery leaves none of its own. So the plan is asked, too, for what it reads.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructField, StructType

from percolator.arguments import as_timestamp, require_text
from percolator.blocking.api import Pin
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.schema import Table
from percolator.spark.connections import shared_database
from percolator.timestamps import Timestamp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


_OWN = ("as_of", "path", "pin_seconds", "snapshot_ts", "table", "address")


class SparkSnapshot:
    """Frames of tables as they were at one instant, which a pin of this process keeps."""

    def __init__(
        self, spark: SparkSession, address: str | None, at: Timestamp | datetime | None
    ) -> None:
        self._spark = spark
        self._address = address
        self._wanted = None if at is None else as_timestamp(at, "at")
        self._at = self._wanted
        self._pin: Pin | None = None
        self._entered = False
        self._ended = False

    @property
    def timestamp(self) -> Timestamp:
        """The instant at which all tables are read."""
        if self._at is None:
            raise UsageError("the snapshot begins with its block: use it in a with statement")
        return self._at

    def table(self, name: str, **options: Any) -> DataFrame:  # noqa: ANN401 - as Spark takes them
        """The table as it was at the snapshot; takes the options of a read."""
        if self._ended:
            raise UsageError("the snapshot has ended: take its frames inside its block")
        require_text(name, "name")
        for option in options:
            if option.lower() in _OWN:
                raise InvalidArgument(option, "is the snapshot's to give: leave it out")
        at = self.timestamp
        self._keep(name)
        given = {option: value for option, value in options.items() if value is not None}
        given |= {"table": name, "snapshot_ts": str(int(at)), "pin_seconds": "0"}
        if self._address is not None:
            given["address"] = self._address
        return self._spark.read.format("percolator").options(**given).load()

    def begin(self) -> None:
        """Chooses the instant, if none was given, and keeps it from being collected."""
        if self._wanted is None:
            self._keep(None)

    def end(self) -> None:
        """Lets go of the history. Ending twice is harmless."""
        self._ended = True
        if self._pin is not None:
            self._pin.close()

    def _keep(self, table: str | None) -> None:
        """Sets the pin. For a time in the past, this needs a table that still has it."""
        if self._pin is not None:
            self._pin.check()
            return
        pin = shared_database(self._address).pin(
            self._wanted,
            tables=[] if table is None else [Table(table)],
            description=f"Spark snapshot on {socket.gethostname()}",
        )
        pin.__enter__()
        self._pin, self._at = pin, pin.at

    def __enter__(self) -> SparkSnapshot:
        if self._entered:
            raise UsageError("the snapshot has begun already: make a new one for another block")
        self._entered = True
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class SnapshotView:
    """A temporary view of one snapshot, until `refresh` moves it to a new one."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        frame_of: Callable[[SparkSnapshot], DataFrame],
        address: str | None,
    ) -> None:
        self._spark = spark
        self._name = name
        self._frame_of = frame_of
        self._address = address
        self._snapshot: SparkSnapshot | None = None
        self.refresh()

    @property
    def timestamp(self) -> Timestamp:
        """The instant that the view shows."""
        if self._snapshot is None:
            raise UsageError(f"the view {self._name!r} was dropped")
        return self._snapshot.timestamp

    def refresh(self) -> Timestamp:
        """Shows the tables as they are now. Running queries keep what they have."""
        fresh = SparkSnapshot(self._spark, self._address, None)
        fresh.begin()
        try:
            self._frame_of(fresh).createOrReplaceTempView(self._name)
        except BaseException:
            fresh.end()
            raise
        before, self._snapshot = self._snapshot, fresh
        if before is not None:
            before.end()
        return fresh.timestamp

    def drop(self) -> None:
        """Removes the view. Dropping twice is harmless."""
        if self._snapshot is not None:
            self._spark.catalog.dropTempView(self._name)
            self._snapshot.end()
            self._snapshot = None
