"""Loading a DataFrame in bulk into an empty range of rows: much faster than transactions.

    from percolator.spark.bulk_loading import bulk_load

    bulk_load(frame, table="pages", catalog=catalog, load_name="crawl-7")

The range (all rows, or those from `load_from` to `load_to`) is closed during the load: other reads
and writes there wait. All rows appear at one timestamp. If the job fails, what it loaded is deleted
and the range opens again. If the driver dies, the range stays closed: run the same load again under
the same `load_name` to take over, or open the range with `abandon_load`.

A row may appear only once in the frame. `bulk_load` arranges the frame so that each task has the
rows of one tablet, in order, and finds rows that appear twice. A frame that is not arranged, and
is written with `operation=bulk_load`, loads as well, but more slowly, and of rows that appear twice
only neighbours are found: of others, any one stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from percolator.aio.bulk_load import BulkLoad
from percolator.errors import InvalidArgument
from percolator.spark.connections import checked
from percolator.spark.options import BULK_LOAD, WriteOptions
from percolator.spark.shapes.raw_cells import COLUMN
from percolator.spark.shapes.shape import shape_of
from percolator.spark.stored_catalogs import with_stored_catalog
from percolator.spark.writing.bulk_load_writer import plan_of, require_bulk_loads

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def bulk_load(frame: DataFrame, **options: object) -> None:
    """Arranges the rows by tablet and loads them. Takes the options of the data source."""
    given = _given(options)
    writer = arranged(frame, given).write.format("percolator").options(**given)
    writer.mode("append").save()


def abandon_load(**options: object) -> bool:
    """Opens the range of an abandoned load, after deleting what was loaded.

    Takes `load_name` and the options that said where the rows were to go: `table`, `address`,
    `load_from`, `load_to`, and the `catalog` if these two are given. Returns True if the load
    turned out to be complete; its rows then stay.
    """
    given = _given(options)
    parsed = WriteOptions.parse(given)
    if not parsed.load_name:
        raise InvalidArgument("load_name", "is missing: give the name of the load")
    here = checked(parsed.target)
    require_bulk_loads(here)
    return here.call(BulkLoad(here.database, plan_of(parsed)).abandon)


def _given(options: Mapping[str, object]) -> dict[str, str]:
    """The options as Spark passes them. None means that an option was not given."""
    if options.get("operation", BULK_LOAD) != BULK_LOAD:
        raise InvalidArgument(
            "operation", f"expected {BULK_LOAD!r}, found {options['operation']!r}"
        )
    given = {name: str(value) for name, value in options.items() if value is not None}
    return with_stored_catalog(given | {"operation": BULK_LOAD})


def arranged(frame: DataFrame, options: dict[str, str]) -> DataFrame:
    """The frame with the rows of each tablet in one partition, in order."""
    from pyspark.sql import functions as spark_sql

    parsed = WriteOptions.parse(options)
    keys = shape_of(parsed.catalog).key_fields
    # Raw cells that appear twice have to be neighbours as well, to be found.
    names = keys if parsed.catalog is not None else (*keys, COLUMN)
    by, order = [_column(frame, name) for name in keys], [_column(frame, name) for name in names]
    here = checked(parsed.target)
    require_bulk_loads(here)
    starts = [one.start for one in here.call(lambda: here.ranges(parsed.target))]
    kinds = ["raw"] if parsed.catalog is None else [field.type for field in parsed.catalog.key]
    if kinds[0] == "ordered_integer" or len(kinds) > 1:
        # Spark cannot compare such keys with the tablets' bounds: partitions of equal size instead.
        return frame.repartitionByRange(len(starts), *by).sortWithinPartitions(*order)
    key = by[0].cast("binary")
    tablet = spark_sql.lit(0)
    for start in starts[1:]:
        tablet = tablet + (key >= spark_sql.lit(start)).cast("int")
    return frame.repartitionById(len(starts), tablet).sortWithinPartitions(*order)


def _column(frame: DataFrame, name: str) -> Column:
    """The column of that name, in whatever case. Without quotes, a dot would ask for a part of
    one."""
    from pyspark.sql import functions as spark_sql

    found = next((one for one in frame.columns if one.lower() == name.lower()), name)
    quoted = found.replace("`", "``")
    return spark_sql.col(f"`{quoted}`")
