"""Steps of `make bench-spark` that read or write the same rows, and what each costs."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import DataFrame

import percolator
from benchmarks.postgresql import Postgresql
from benchmarks.spark_floor import Floor
from benchmarks.spark_others import upsert
from percolator import Table
from percolator.spark.bulk_load import arranged, bulk_load
from percolator.spark.options import BULK_LOAD

ROWS = 200_000
TABLETS = 4
SPLITS = ["2500000000", "5000000000", "7500000000"]
TRANSACTION_ROWS = 1_000
CATALOG = json.dumps(
    {"key": {"name": "key", "type": "text"}, "columns": {"value": {"type": "text"}}}
)
PARTS = {
    "append": ("write", "postgresql"),
    "bulk-load": ("bulk load", "floor of a load", "parquet write"),
    "scan": ("full scan", "floor of a scan", "parquet scan"),
    "atomic": ("write", "atomic", "scan after atomic"),
    "overwrite": ("overwrite",),
    "stream": (),
}
"""The measurement of each part. `stream` measures latencies, in a way of its own."""


class Cost:
    """The cost of one slice: wall time, and CPU by kind of process."""

    def __init__(self, seconds: float, cpu_seconds: dict[str, float]) -> None:
        self.rate = ROWS / seconds
        self.micros = {kind: cpu / ROWS * 1e6 for kind, cpu in cpu_seconds.items()}


def measured(work: Callable[[], None]) -> Cost:
    """The cost to this process and to all processes that it has started."""
    before, began = _cpu(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    after = _cpu()
    return Cost(seconds, {kind: after[kind] - before.get(kind, 0.0) for kind in after})


def _cpu() -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue  # it has ended
        found[_kind(command)] += times.user + times.system
        if "pyspark.daemon" in command:
            # Worker processes that have ended.
            found[_kind(command)] += times.children_user + times.children_system
    return dict(found)


def _kind(command: str) -> str:
    if " serve tabletserver " in command:
        return "tablet server"
    if " serve " in command and "org.apache.spark" not in command:
        return "other services"
    return "Spark, Python" if "pyspark.daemon" in command else "Spark, Java and driver"


class Steps:
    """One run of the measurements, in tables and files of its own."""

    def __init__(
        self,
        db: percolator.Database,
        address: str,
        frame: DataFrame,
        files: Path,
        server: Postgresql | None,
    ) -> None:
        self._db = db
        self._address = address
        self._frame = frame
        self._spark = frame.sparkSession
        self._files = str(files)
        self._server = server

    def run(self, wanted: set[str], number: int) -> dict[str, Cost]:
        """Measures the steps. A step that needs rows gets them first, which is not measured."""
        found: dict[str, Cost] = {}
        written, locked, loaded = (f"{name}-{number}" for name in ("written", "locked", "loaded"))

        def step(name: str, work: Callable[[], None]) -> None:
            if name in wanted:
                found[name] = measured(work)

        with self._table(written):
            if wanted & {"write", "full scan", "overwrite"}:
                size = TRANSACTION_ROWS
                found["write"] = measured(lambda: self._write(written, transaction_rows=size))
            step("full scan", lambda: _drain(self._read(written)))
            step("overwrite", lambda: self._write(written, mode="overwrite"))
        with self._table(locked):
            if wanted & {"atomic", "scan after atomic"}:
                found["atomic"] = measured(lambda: self._write(locked, atomic="true"))
            step("scan after atomic", lambda: _drain(self._read(locked)))
        with self._table(loaded):
            step("floor of a load", lambda: self._discard(loaded))
            step("bulk load", lambda: bulk_load(self._frame, **self._options(loaded)))
        step("floor of a scan", lambda: _drain(self._ready()))
        if wanted & {"parquet write", "parquet scan"}:
            found["parquet write"] = measured(lambda: self._frame.write.parquet(self._files))
        step("parquet scan", lambda: _drain(self._spark.read.parquet(self._files)))
        if self._server is not None:
            found["postgresql"] = self._upsert(self._server)
        return {name: cost for name, cost in found.items() if name in wanted}

    @contextmanager
    def _table(self, name: str) -> Iterator[None]:
        """A new table, which has all rows or none at the end."""
        self._db.create_table(Table(name), SPLITS)
        yield
        found = self._read(name).count()
        if found not in (0, ROWS):
            raise SystemExit(f"table {name} has {found} rows, not {ROWS}")
        self._db.drop_table(Table(name))

    def _options(self, table: str) -> dict[str, Any]:
        return {"address": self._address, "table": table, "catalog": CATALOG}

    def _read(self, table: str) -> DataFrame:
        return self._spark.read.format("percolator").options(**self._options(table)).load()

    def _write(self, table: str, mode: str = "append", **more: object) -> None:
        options = self._options(table) | more
        self._frame.write.format("percolator").options(**options).mode(mode).save()

    def _discard(self, table: str) -> None:
        """Arranges the rows for a load, and hands them to a process that drops them."""
        self._spark.dataSource.register(Floor)
        rows = arranged(self._frame, self._options(table) | {"operation": BULK_LOAD})
        rows.write.format(Floor.name()).mode("append").save()

    def _ready(self) -> DataFrame:
        self._spark.dataSource.register(Floor)
        return self._spark.read.format(Floor.name()).options(rows=ROWS, partitions=TABLETS).load()

    def _upsert(self, server: Postgresql) -> Cost:
        server.create_pairs()
        before = server.server_seconds()
        cost = measured(lambda: upsert(self._frame, server.socket_directory, TRANSACTION_ROWS))
        # It is no child of this process.
        cost.micros["PostgreSQL"] = (server.server_seconds() - before) / ROWS * 1e6
        return cost


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()
