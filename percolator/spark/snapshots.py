"""Several tables at one instant, and views that are moved to a later one.

with percolator.spark.snapshot(spark) as snapshot:
    pages = snapshot.table("pages", catalog=catalog)
    links = snapshot.table("links", catalog=others)
    pages.join(links, "url").write.parquet("joined")
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from percolator.arguments import as_timestamp, require_text
from percolator.blocking.pin import Pin
from percolator.errors import InvalidArgument, UsageError
from percolator.schema import Table
from percolator.spark.executors import shared_database
from percolator.timestamps import Timestamp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
        """Sets the pin. For a moment of the past, this needs a table that still has it."""
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
