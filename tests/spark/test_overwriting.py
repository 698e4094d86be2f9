"""`mode("overwrite")`: the new rows appear at the moment at which the old ones go."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
from percolator.spark.atomic_writer import AtomicWriter
from percolator.spark.options import WriteOptions
from percolator.spark.writers import writer_of
from tests.spark.tables import CATALOG, PAGES, Pages, failing, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]


def _writer(cluster: Any, pages: Pages) -> AtomicWriter:
    """A writer as a task gets it: pickled."""
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    parsed = WriteOptions.parse(options, overwrite=True)
    made = pickle.loads(pickle.dumps(writer_of(parsed, StructType(fields))))
    assert isinstance(made, AtomicWriter)
    return made


@pytest.mark.parametrize("notify", ["all", "changed"])
def test_observers_are_notified_of_all_cells_or_of_those_that_change(
    write: Any, read: Read, db: percolator.Database, cluster: Any, notify: str
) -> None:
    """In a table whose rows stay but for one that changes, one that goes and one that is new."""
    pages = Pages(db, 400)
    pages.observe(cluster.address)
    old, before = pages.stored(), db.timestamp()
    first, second, *_ = sorted(old)
    frame = read(pages.name, catalog=CATALOG).load().where(f"url <> '{first}'")
    changed = f"CASE WHEN url = '{second}' THEN 'new' ELSE title END AS title"
    frame = frame.selectExpr("url", changed, "visits")
    more = frame.sparkSession.createDataFrame([("z", "new", 1)], PAGES)
    frame = frame.union(more)
    write(frame, pages.name, catalog=CATALOG, notify=notify).mode("overwrite").save()

    new = old | {second: ("new", old[second][1]), "z": ("new", 1)}
    del new[first]
    assert pages.stored() == new
    _notified(pages, 3 if notify == "changed" else len(old) + 1)
    committed = [one for one in read(pages.name).load().collect() if one.commit_timestamp > before]
    # A title and visits of "z", and the title of the row that changes.
    assert len(committed) == (3 if notify == "changed" else 2 * len(new))


def test_an_atomic_append_of_what_is_there_notifies_nobody(
    write: Any, db: percolator.Database, spark: SparkSession, cluster: Any
) -> None:
    pages = Pages(db, 40)
    pages.observe(cluster.address)
    same = [(url, *values) for url, values in pages.stored().items()]
    frame = spark.createDataFrame([*same, ("z", "new", 1)], PAGES)
    write(frame, pages.name, catalog=CATALOG, atomic="true", notify="changed").save()
    assert len(pages.stored()) == 41
    _notified(pages, 1)


def _notified(pages: Pages, count: int) -> None:
    """Waits until so many cells have notified: a reader's client rolls them forward behind it."""
    until = time.monotonic() + 30.0
    while pages.notifications() < count and time.monotonic() < until:
        time.sleep(0.1)
    assert pages.notifications() == count


def _batch(visits: int, *urls: str) -> pa.RecordBatch:
    return pa.record_batch({"url": urls, "visits": pa.array([visits] * len(urls), pa.int64())})


def test_the_table_has_exactly_the_rows_of_the_frame_from_one_moment_on(
    write: Any, read: Read, db: percolator.Database, spark: SparkSession, cluster: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Also if a task fails and runs again, and if the frame is made of the table's own rows."""
    pages = Pages(db, 400)
    pages.observe(cluster.address)
    before = db.timestamp()
    old = pages.stored()
    raised = read(pages.name, catalog=CATALOG).load().where("visits % 2 = 0")
    raised = raised.selectExpr("url", "visits + 1000 AS visits").repartition(2)
    frame = failing(raised, tmp_path / "failed", attempts=1)
    write(frame, pages.name, catalog=CATALOG).mode("overwrite").save()

    assert (tmp_path / "failed").exists()
    # The frame has no titles, so none is left.
    new = {url: (None, visits + 1000) for url, (_, visits) in old.items() if visits % 2 == 0}
    assert pages.stored() == new
    commits = {one.commit_timestamp for one in read(pages.name).load().collect()}
    assert len(commits) == 1
    swapped = commits.pop()
    assert swapped > before
    for at, expected in ((swapped - 1, old), (swapped, new)):
        rows = read(pages.name, catalog=CATALOG, snapshot_ts=at).load().collect()
        assert {row.url: (row.title, row.visits) for row in rows} == expected
    assert pages.notifications() == len(old)  # all titles were deleted


def test_a_table_can_be_overwritten_again_and_with_nothing(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 40)
    for visits in (1, 2):
        frame = spark.createDataFrame([("a", "t", visits), (f"b{visits}", "t", visits)], PAGES)
        write(frame, pages.name, catalog=CATALOG).mode("overwrite").save()
        assert pages.stored() == {"a": ("t", visits), f"b{visits}": ("t", visits)}
    nothing = spark.createDataFrame([], PAGES)
    write(nothing, pages.name, catalog=CATALOG).mode("overwrite").save()
    assert pages.stored() == {}


def test_a_table_that_was_dropped_and_created_again_is_overwritten(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    """Spark uses the process again that has committed, and this remembers the first table."""
    pages = Pages(db, 40)
    frame = spark.createDataFrame([("a", "t", 1), ("d", "t", 2)], PAGES)
    for _ in range(2):
        write(frame, pages.name, catalog=CATALOG).mode("overwrite").save()
        assert pages.stored() == {"a": ("t", 1), "d": ("t", 2)}
        db.drop_table(pages.table)
        db.create_table(pages.table, ["b"])
        db.set_many([("old", {pages.title: "old"})])


def test_raw_cells_replace_all_cells(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 40)
    schema = "row binary, column binary, value binary"
    frame = spark.createDataFrame([(b"a", b"meta:title", b"new")], schema)
    write(frame, pages.name).mode("overwrite").save()
    assert pages.stored() == {"a": ("new", None)}


def test_a_job_that_fails_leaves_the_old_rows(
    write: Any, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    pages = Pages(db, 40)
    old = pages.stored()
    frame = spark.createDataFrame([(key, "new", 1) for key in keys(80)], PAGES).repartition(2)
    frame = failing(frame, tmp_path / "failed", attempts=3)
    writer = write(frame, pages.name, catalog=CATALOG, keep_seconds="3600").mode("overwrite")
    with pytest.raises(Exception, match="the task fails after all its rows"):
        writer.save()
    assert pages.stored() == old
    pages.fill(80)  # and nothing is in the way


def test_a_driver_that_is_gone_before_the_swap_leaves_the_old_rows_and_after_it_the_new(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db, 40)
    old = pages.stored()
    writer = _writer(cluster, pages)
    writer.write(iter([_batch(1, "a00001", "z")]))
    assert pages.stored() == old
    again = _writer(cluster, pages)
    writer.abort([None])  # without it, what is locked expires
    locked = again.write(iter([_batch(2, "a00002", "z")]))
    again.commit([locked])
    again.abort([locked])
    assert pages.stored() == {"a00002": (None, 2), "z": (None, 2)}


def test_of_two_jobs_that_overwrite_one_table_the_later_one_replaces_what_the_first_has_written(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db, 40)
    first, second = _writer(cluster, pages), _writer(cluster, pages)
    locked = second.write(iter([_batch(2, "z")]))
    first.commit([first.write(iter([_batch(1, "a00001", "y")]))])
    assert pages.stored() == {"a00001": (None, 1), "y": (None, 1)}
    second.commit([locked])
    assert pages.stored() == {"z": (None, 2)}
