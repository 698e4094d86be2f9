"""Merging a DataFrame of changes into a table: insert, update and delete by key.

The decision is made row by row, in the transaction that writes the row: see `reviews.merged`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from percolator.errors import InvalidArgument, SchemaError
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.options import MERGE
from percolator.spark.stored_catalogs import with_stored_catalog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FLAG = "percolator_delete"


def merge_frame(frame: DataFrame, delete_where: str | None, options: Mapping[str, object]) -> None:
    """Writes the frame with `operation=merge`."""
    if options.get("operation", MERGE) != MERGE:
        raise InvalidArgument("operation", f"expected {MERGE!r}, found {options['operation']!r}")
    given = {name: str(value) for name, value in options.items() if value is not None}
    given = with_stored_catalog(given | {"operation": MERGE})
    if "catalog" not in given:
        raise InvalidArgument("catalog", "is missing: a merge needs one")
    if delete_where is not None:
        if "delete_field" in given:
            raise InvalidArgument("delete_field", "cannot be given together with delete_where")
        frame = _flagged(frame, FrameCatalog.parse(given["catalog"]), delete_where)
        given["delete_field"] = _FLAG
    frame.write.format("percolator").options(**given).mode("append").save()


def _flagged(frame: DataFrame, catalogue: FrameCatalog, condition: str) -> DataFrame:
    """The frame with the condition as a field, without the fields that only the condition needs."""
    from pyspark.sql import functions as spark_sql

    fields = {field.name.lower() for field in catalogue.key}
    fields |= {field.name.lower() for field in catalogue.values}
    words = {word.lower() for word in re.findall(r"\w+", condition)}
    unknown = [name for name in frame.columns if name.lower() not in fields]
    for name in unknown:
        if not set(re.findall(r"\w+", name.lower())) <= words:
            raise SchemaError(f"field {name!r} is not in the catalogue, nor used by delete_where")
    return frame.withColumn(_FLAG, spark_sql.expr(condition).cast("boolean")).drop(*unknown)
