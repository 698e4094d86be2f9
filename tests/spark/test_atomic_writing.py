"""Atomic jobs: all rows at one moment or none, whatever happens to tasks and to the driver."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
from percolator.spark import atomic_writer
from percolator.spark.atomic_writer import AtomicWriter, Locked
from percolator.spark.options import WriteOptions
from percolator.spark.writers import writer_of
from tests.spark.tables import CATALOG, PAGES, Pages, failing, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]
ROWS = 400


def _frame(spark: SparkSession, rows: int = ROWS) -> Any:
    found = [(key, f"title of {key}", number) for number, key in enumerate(keys(rows))]
    return spark.createDataFrame(found, PAGES).repartitionByRange(2, "url")


def _expected(rows: int = ROWS) -> dict[str, tuple[str, int]]:
    return {key: (f"title of {key}", number) for number, key in enumerate(keys(rows))}


def _writer(cluster: Any, pages: Pages, **more: str) -> AtomicWriter:
    """A writer as a task gets it: pickled."""
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **more}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    parsed = WriteOptions.parse({**options, "atomic": "true"})
    made = pickle.loads(pickle.dumps(writer_of(parsed, StructType(fields))))
    assert isinstance(made, AtomicWriter)
    return made


def _batch(visits: int, urls: list[str] | None = None) -> pa.RecordBatch:
    urls = keys(40) if urls is None else urls
    return pa.record_batch({"url": urls, "visits": pa.array([visits] * len(urls), pa.int64())})


def _visits(pages: Pages) -> dict[str, int]:
    return {url: visits for url, (_, visits) in pages.stored().items()}


def test_a_task_that_failed_and_ran_again_leaves_every_row_at_one_timestamp(
    write: Any, read: Read, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    pages = Pages(db)
    frame = failing(_frame(spark), tmp_path / "failed", attempts=1)
    write(frame, pages.name, catalog=CATALOG, atomic="true").save()
    assert (tmp_path / "failed").exists()
    assert pages.stored() == _expected()
    cells = read(pages.name).load().select("commit_timestamp").collect()
    assert len(cells) == 2 * ROWS
    assert len({cell.commit_timestamp for cell in cells}) == 1


def test_a_job_that_fails_leaves_nothing_that_is_in_the_way(
    write: Any, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    """Not even for a moment, although its locks could live for an hour."""
    pages = Pages(db)
    frame = failing(_frame(spark), tmp_path / "failed", attempts=3)
    with pytest.raises(Exception, match="the task fails after all its rows"):
        write(frame, pages.name, catalog=CATALOG, atomic="true", keep_seconds="3600").save()
    assert pages.stored() == {}
    pages.fill(40)
    assert pages.stored() == _expected(40)


def test_an_atomic_job_deletes(write: Any, db: percolator.Database, spark: SparkSession) -> None:
    pages = Pages(db, 40)
    frame = spark.createDataFrame([(key,) for key in keys(40)[:15]], "url string")
    write(frame, pages.name, catalog=CATALOG, atomic="true", operation="delete").save()
    assert sorted(pages.stored()) == sorted(keys(40)[15:])


def test_a_key_in_two_tasks_fails_the_job_and_nothing_is_written(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db)
    frame = spark.createDataFrame([("a", "t", 1), ("a", "u", 2)], PAGES).repartition(2, "visits")
    with pytest.raises(Exception, match=r"tasks '.' and '.' both write|twice"):
        write(frame, pages.name, catalog=CATALOG, atomic="true").save()
    assert pages.stored() == {}


def test_a_key_that_a_task_has_twice_is_refused_unless_its_rows_are_equal(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    writer = _writer(cluster, pages)
    writer.commit([writer.write(iter([_batch(1, ["a", "a"]), _batch(1, ["a"])]))])
    assert _visits(pages) == {"a": 1}
    with pytest.raises(percolator.WrittenTwice, match="task '0' writes"):
        _writer(cluster, pages).write(iter([_batch(1, ["b"]), _batch(2, ["b"])]))
    assert _visits(pages) == {"a": 1}


def test_an_attempt_that_another_one_has_overtaken_fails_and_the_other_counts_alone(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    """As with speculation. They write other values, to tell them apart."""
    monkeypatch.setattr(atomic_writer, "FLUSH_CELLS", 10)
    pages = Pages(db)
    writer = _writer(cluster, pages)
    later: list[Locked] = []

    def batches() -> Iterator[pa.RecordBatch]:
        yield _batch(1)
        later.append(writer.write(iter([_batch(2)])))
        yield _batch(1, ["z"])

    with pytest.raises(percolator.ConflictError, match="another attempt has taken its place"):
        writer.write(batches())
    writer.commit(list(later))
    assert _visits(pages) == dict.fromkeys(keys(40), 2)


def test_an_attempt_that_writes_after_the_commit_is_refused(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    writer = _writer(cluster, pages)
    writer.commit([writer.write(iter([_batch(1)]))])
    for urls in (["y", "z"], keys(40)):
        with pytest.raises(percolator.UsageError, match="was committed while task '0' was writing"):
            writer.write(iter([_batch(2, urls)]))
    assert _visits(pages) == dict.fromkeys(keys(40), 1)


def test_a_task_that_goes_on_after_its_job_has_failed_is_refused_and_locks_nothing(
    cluster: Any, db: percolator.Database
) -> None:
    """Spark kills tasks later than it gives up their job."""
    pages = Pages(db)
    writer = _writer(cluster, pages, keep_seconds="3600")
    writer.abort([None])
    with pytest.raises(percolator.ConflictError, match="comes too late"):
        writer.write(iter([_batch(1)]))
    pages.fill(40)
    assert pages.stored() == _expected(40)


def test_a_driver_that_is_gone_before_the_commit_leaves_no_row(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    writer = _writer(cluster, pages)
    writer.write(iter([_batch(1)]))
    assert _visits(pages) == {}


def test_a_job_that_is_given_up_can_be_run_again_at_once(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    writer = _writer(cluster, pages)
    writer.abort([writer.write(iter([_batch(1)])), None])
    again = _writer(cluster, pages)
    again.commit([again.write(iter([_batch(2)]))])
    assert _visits(pages) == dict.fromkeys(keys(40), 2)


def test_what_was_given_up_cannot_be_committed_and_what_was_committed_not_given_up(
    cluster: Any, db: percolator.Database, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages(db)
    writer = _writer(cluster, pages)
    locked = writer.write(iter([_batch(1)]))
    writer.abort([locked])
    with pytest.raises(percolator.ConflictError, match="none of it is committed"):
        writer.commit([locked])
    writer = _writer(cluster, pages)
    locked = writer.write(iter([_batch(2)]))
    writer.commit([locked])
    writer.abort([locked])
    assert "was committed at" in caplog.text
    assert _visits(pages) == dict.fromkeys(keys(40), 2)


def test_a_commit_without_the_message_of_a_task_is_refused(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    writer = _writer(cluster, pages)
    with pytest.raises(percolator.UsageError, match="only 1 of 2 tasks"):
        writer.commit([writer.write(iter([_batch(1)])), None])
    assert _visits(pages) == {}
