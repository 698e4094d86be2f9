"""Percolator in Spark: tables as DataFrames, and DataFrames into tables.

    catalog = '''{"key": {"name": "url", "type": "text"},
                  "columns": {"title": {"type": "text"}, "visits": {"type": "integer"}}}'''
    pages = spark.read.format("percolator").options(table="pages", catalog=catalog).load()
    pages.write.format("percolator").options(table="copy", catalog=catalog).mode("append").save()

Spark finds the data source by itself (`pyspark_percolator`), in the driver and the executors, if
`percolator-store[spark]` is installed there. `options.py` lists the options; `data_source.py` is
what Spark calls, and the file to open first.

    reading    reader.py, chosen_rows.py; snapshots.py: several tables at one instant
    streams    stream_reader.py, stream_progress.py, change_rows.py
    writing    writers.py chooses: transaction_writer.py (many transactions in each task),
               atomic_writer.py (one for the job), bulk_load.py (none)
    rows       catalog.py names fields and types, shapes.py makes rows, values.py converts

In functions that executors run, `percolator.spark.database()` is the connection to use. The other
functions here are for the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

# Spark imports this module in every session: whatever is not always needed is imported when it is.
if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from percolator.blocking.api import Database
    from percolator.schema import Column, Table
    from percolator.spark.atomic_writer import Together
    from percolator.spark.snapshots import SnapshotView, SparkSnapshot
    from percolator.timestamps import Timestamp


def database(address: str | None = None) -> Database:
    """The connection of this Python process: made on first use, then shared by all its tasks.

    For functions that Spark's executors run, where a connection of the driver cannot be. Do not
    close it: other tasks use it. The address is that of masters or gateways; without one, it is
    PERCOLATOR_ADDRESS of the executor's environment, or localhost:7100.

    >>> def store(rows):
    ...     db = percolator.spark.database("masters:7100")
    ...     for row in rows: ...
    >>> frame.foreachPartition(store)
    """
    from percolator.spark.connections import shared_database

    return shared_database(address)


def snapshot(
    spark: SparkSession, *, address: str | None = None, at: Timestamp | datetime | None = None
) -> SparkSnapshot:
    """Several tables at one instant: now, or `at`. A pin keeps it until the block ends.

    >>> with percolator.spark.snapshot(spark) as snapshot:
    ...     pages = snapshot.table("pages", catalog=catalog)
    ...     links = snapshot.table("links", catalog=others)
    ...     pages.join(links, "url").write.parquet("joined")
    """
    from percolator.spark.snapshots import SparkSnapshot

    return SparkSnapshot(spark, address, at)


def timestamp_of(frame: DataFrame) -> Timestamp:
    """The timestamp at which a frame that was loaded from Percolator reads.

    Works for frames that are derived from it, too, as long as one of its fields is left. Raises
    `UsageError` if the frame is computed from several snapshots, or no field knows its timestamp.
    """
    from percolator.spark.snapshots import frame_timestamp

    return frame_timestamp(frame)


def view(
    spark: SparkSession,
    name: str,
    frame_of: Callable[[SparkSnapshot], DataFrame],
    *,
    address: str | None = None,
) -> SnapshotView:
    """A temporary view that shows one snapshot, until its `refresh()` moves it to a new one.

    >>> pages = percolator.spark.view(spark, "pages", lambda s: s.table("pages", catalog=catalog))
    >>> pages.refresh()
    """
    from percolator.arguments import require_function, require_text
    from percolator.spark.snapshots import SnapshotView

    require_text(name, "name")
    require_function(frame_of, "frame_of")
    return SnapshotView(spark, name, frame_of, address)


def spark_catalog(
    table: Table[Any],
    key: str | Sequence[str],
    columns: Mapping[str, Column[Any]],
    *,
    types: Mapping[str, str] | None = None,
) -> str:
    """The option `catalog` for a table: the names of its key and of its columns in a DataFrame.

    `types` has Spark's type for fields that could have several: `int` for integers, and
    `struct<...>`, `array<...>` or `map<string,...>` for JSON and for dataclasses, which are bytes
    if nothing is said, and JSON as text if they are said to be `string`.

    >>> spark_catalog(pages, "url", {"title": title, "place": place},
    ...               types={"place": "struct<lat:double,lon:double>"})
    """
    from percolator.arguments import require_table
    from percolator.spark.catalog import catalog_of

    require_table(table)
    return catalog_of(table, key, columns, types or {})


def store_catalog(table: Table[Any], catalog: str, *, address: str | None = None) -> None:
    """Stores a catalogue in the cluster: from then on, `catalog="stored"` means it for the table.

    The first call creates the table `percolator.catalogues`, for which a client needs the role
    `admin`.
    """
    from percolator.arguments import require_table, require_text
    from percolator.spark.connections import store

    require_table(table)
    require_text(catalog, "catalog")
    store(table.name, catalog, address)


def together(*, address: str | None = None, keep_seconds: float = 60.0) -> Together:
    """Several writes that appear at once, when the block ends, or not at all.

    Each write takes the job's options. They can be of any mode, and each table may be in one of
    them. If the driver dies, its locks last for another `keep_seconds`.

    >>> with percolator.spark.together() as job:
    ...     for name, frame in {"pages": pages, "links": links}.items():
    ...         write = frame.write.format("percolator").options(**job.options, table=name)
    ...         write.mode("overwrite").save()
    """
    from percolator.spark.atomic_writer import Together

    return Together(address, keep_seconds)


def merge(
    frame: DataFrame,
    *,
    table: str,
    catalog: str,
    delete_where: str | None = None,
    matched: str = "update",
    not_matched: str = "insert",
    **options: object,
) -> None:
    """Inserts, updates and deletes rows of a table by the keys of a frame, each key once.

    `delete_where` is a condition in SQL: a row of the frame for which it is true deletes the row of
    the table, if there is one. Other rows update the row of the table, or are inserted, unless
    `matched` or `not_matched` is `skip`. Takes the options of a write, too, such as `nulls` and
    `if_unchanged_since`.

    >>> merge(changes, table="pages", catalog=catalog, delete_where="op = 'D'")
    """
    from percolator.arguments import require_text
    from percolator.spark.writers import merge_frame

    require_text(table, "table")
    require_text(catalog, "catalog")
    if delete_where is not None:
        require_text(delete_where, "delete_where")
    given = {"table": table, "catalog": catalog, "matched": matched, "not_matched": not_matched}
    merge_frame(frame, delete_where, given | options)
