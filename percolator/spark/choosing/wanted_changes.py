"""What a stream should deliver: which table, which of its rows, and since when.

It knows nothing of Spark, and neither does what decides with it (`streaming/progress.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from percolator.spark.choosing.row_ranges import ALL_ROWS, RowRanges
from percolator.timestamps import Timestamp

SNAPSHOT, NOW = "snapshot", "now"


@dataclass(frozen=True)
class Wanted:
    """The changes that a stream delivers."""

    table: str
    starting_from: str | Timestamp = SNAPSHOT
    """`SNAPSHOT`, `NOW`, or the timestamp above which a new query begins."""
    rows: RowRanges = ALL_ROWS
    columns: frozenset[bytes] | None = None
    """The stream has a row for each row of the table that a commit has changed in one of these
    columns. With None, it has one for each cell."""
    fail_on_data_loss: bool = True
    timeout_seconds: float = 10.0
