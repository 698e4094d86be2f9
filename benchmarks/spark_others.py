"""The comparison of `make bench-spark`: executors that upsert the same rows into PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

UPSERT = "INSERT INTO pairs VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


def upsert(frame: DataFrame, socket_directory: Path, transaction_rows: int) -> None:
    """Each task upserts its rows over a connection of its own, in transactions of so many rows."""
    frame.foreachPartition(partial(_upsert, str(socket_directory), transaction_rows))


def _upsert(socket_directory: str, transaction_rows: int, rows: Iterator[Any]) -> None:
    import psycopg

    where = f"host={socket_directory} user=postgres dbname=postgres"
    with psycopg.connect(where, autocommit=True) as connection, connection.cursor() as cursor:
        while some := list(islice(rows, transaction_rows)):
            with connection.transaction():
                # One statement per row, without a round trip for each: psycopg's own way.
                cursor.executemany(UPSERT, [(row.key, row.value) for row in some])
