"""Writes: the rows end up the same, whether they were written once or several times."""

from __future__ import annotations

import asyncio
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
import percolator.spark
from percolator.errors import ConflictError
from percolator.services.local.cluster import LocalCluster
from percolator.spark import atomic_writer
from percolator.spark.atomic_writer import AtomicWriter, Locked
from percolator.spark.bulk_load import bulk_load
from percolator.spark.options import WriteOptions
from percolator.spark.transaction_writer import Transactions, Written, total
from percolator.spark.writers import writer_of
from tests.spark.tables import CATALOG, PAGES, Pages, Read, failing, frame_of, keys, rows_of

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def filled(db: percolator.Database) -> Pages:
    """A table of forty rows."""
    return Pages(db, 40)


def _rows(count: int, visits: int = 0) -> list[tuple[str, str, int]]:
    return [(key, f"title of {key}", visits + n) for n, key in enumerate(keys(count))]


def _writer(cluster: Any, pages: Pages, *, overwrite: bool = False, **more: str) -> Any:
    """A writer as a task gets it: pickled."""
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **more}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    parsed = WriteOptions.parse(options, overwrite=overwrite)
    return pickle.loads(pickle.dumps(writer_of(parsed, StructType(fields))))


def test_an_append_replaces_rows_with_the_same_key(
    write: Any, filled: Pages, spark: SparkSession
) -> None:
    frame = spark.createDataFrame(_rows(80, visits=500), PAGES).repartition(3)
    write(frame, filled.name, catalog=CATALOG, transaction_rows=7).save()
    assert filled.stored() == {key: (title, visits) for key, title, visits in _rows(80, 500)}


def test_fields_that_the_frame_does_not_have_stay_as_they_are(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 4)
    write(spark.createDataFrame([(9, "a00000")], "visits int, URL string"), pages.name,
          catalog=CATALOG).save()  # fmt: skip
    assert pages.stored()["a00000"] == ("title of a00000", 9)


def test_a_null_is_skipped_or_deleted_or_refused_as_the_option_says(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 4)
    frame = spark.createDataFrame([("a00000", None, 7), ("b00000", None, 8)], PAGES)
    with pytest.raises(Exception, match=r"field 'title' is null in . rows?; set the option nulls"):
        write(frame, pages.name, catalog=CATALOG).save()
    write(frame, pages.name, catalog=CATALOG, nulls="skip").save()
    assert pages.stored()["a00000"] == ("title of a00000", 7)
    write(frame, pages.name, catalog=CATALOG, nulls="delete").save()
    assert pages.stored()["a00000"] == (None, 7)
    with pytest.raises(Exception, match=r"field 'url' is null in 1 row, and a key cannot"):
        write(spark.createDataFrame([(None, "t", 7)], PAGES), pages.name, catalog=CATALOG).save()


def test_rows_and_single_fields_and_raw_cells_are_deleted(
    write: Any, read: Read, filled: Pages, spark: SparkSession
) -> None:
    some = read(filled.name, catalog=CATALOG).schema("url string").load()
    write(some.where("url < 'b'"), filled.name, catalog=CATALOG, operation="delete").save()
    assert sorted(filled.stored()) == keys(40)[10:]
    fields = {"operation": "delete", "columns": "title"}
    write(some.where("url like 'b%'"), filled.name, catalog=CATALOG, **fields).save()
    assert filled.stored()["b00000"] == (None, 10)
    raw = read(filled.name).load().where("row = X'643030303030' and column = X'766973697473'")
    write(raw, filled.name, operation="delete").save()
    assert filled.stored()["d00000"] == ("title of d00000", None)


def test_raw_cells_can_be_copied_as_they_are(
    write: Any, read: Read, db: percolator.Database
) -> None:
    pages, copy = Pages(db, 40), Pages(db)
    write(read(pages.name).load(), copy.name).save()
    assert copy.stored() == pages.stored()


def test_equal_values_are_not_written_again_on_request(
    write: Any, read: Read, filled: Pages, spark: SparkSession
) -> None:
    before = {bytes(r.row + r.column): r.commit_timestamp for r in _raw(read, filled)}
    rows = _rows(40)
    rows[3] = (rows[3][0], "another title", rows[3][2])
    frame = spark.createDataFrame(rows, PAGES)
    write(frame, filled.name, catalog=CATALOG, skip_equal="true").save()
    after = {bytes(r.row + r.column): r.commit_timestamp for r in _raw(read, filled)}
    assert [cell for cell in after if after[cell] != before[cell]] == [b"a00003meta:title"]


def _raw(read: Read, pages: Pages) -> list[Any]:
    return read(pages.name).load().collect()


def test_two_concurrent_attempts_of_a_task_both_succeed(cluster: Any, pages: Pages) -> None:
    writer = _writer(cluster, pages, transaction_rows="100", transactions_in_flight="2")
    batches = [
        pa.record_batch({"url": part, "visits": list(range(len(part)))})
        for part in (keys(4000)[start::4] for start in range(4))
    ]
    together = threading.Barrier(2)
    done: list[Written] = []

    def attempt() -> None:
        together.wait(30)
        done.append(writer.write(iter(batches)))

    attempts = [threading.Thread(target=attempt) for _ in range(2)]
    for one in attempts:
        one.start()
    for one in attempts:
        one.join(100)
    assert [one.rows for one in done] == [4000, 4000]
    # In each batch, 250 rows of each of four tablets.
    assert total(list(done)).transactions == 2 * 4 * 4 * 3
    expected = {url: n for batch in batches for n, url in enumerate(batch["url"].to_pylist())}
    assert {url: visits for url, (_, visits) in pages.stored().items()} == expected


def test_the_last_row_of_a_key_in_a_task_wins_even_if_an_earlier_commit_is_slow(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages
) -> None:
    writer = _writer(cluster, pages)
    batches = [pa.record_batch({"url": ["a"], "visits": [number]}) for number in range(3)]
    commit, wait = Transactions._commit, Transactions._wait
    go_on = threading.Event()
    begun: list[Any] = []
    others: list[Any] = []

    async def commit_slowly(self: Transactions, writes: Any) -> None:
        begun.append(writes)
        if len(begun) == 1:  # until the task waits for this one alone, or the others are through
            await asyncio.to_thread(go_on.wait, 100)
            await commit(self, writes)
            return
        await commit(self, writes)
        others.append(writes)
        if len(others) == len(batches) - 1:
            go_on.set()

    def wait_for_it(self: Transactions) -> None:
        if len(self._in_flight) == 1:
            go_on.set()
        wait(self)

    monkeypatch.setattr(Transactions, "_commit", commit_slowly)
    monkeypatch.setattr(Transactions, "_wait", wait_for_it)
    writer.write(iter(batches))
    assert pages.stored() == {"a": (None, 2)}


def test_a_task_that_fails_says_what_it_has_committed(
    cluster: Any, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    good = pa.record_batch({"url": keys(40), "visits": list(range(40))})
    bad = pa.record_batch({"url": ["z"], "visits": pa.array([None], pa.int64())})
    writer = _writer(cluster, pages, transaction_rows="10")
    with pytest.raises(percolator.SchemaError, match="null") as raised:
        writer.write(iter([good, bad]))
    (note,) = raised.value.__notes__
    assert "what it committed stays: 40 cells in 4 transactions, of 41 rows" in note
    assert len(pages.stored()) == 40
    writer.abort([Written(cells=7, transactions=1, rows=7), None])
    assert "1 of 2 tasks reported 7 cells in 1 transaction, of 7 rows" in caplog.text


def test_giving_up_names_the_option_the_attempts_and_the_time(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages
) -> None:
    async def lose(*_: object, **__: object) -> int:
        raise percolator.ConflictError("another transaction has written the row")

    monkeypatch.setattr(Transactions, "_attempt", lose)
    writer = _writer(cluster, pages, retry_seconds="0.2")
    with pytest.raises(percolator.DeadlineExceeded) as raised:
        writer.write(iter([pa.record_batch({"url": ["a"], "visits": [1]})]))
    assert re.fullmatch(
        r"gave up on a transaction after \d+ attempts in \d\.\d s; the option retry_seconds is 0.2;"
        r" last error: another transaction has written the row",
        raised.value.message,
    )


def test_observed_columns_notify_when_spark_writes_them(
    write: Any, pages: Pages, cluster: Any, spark: SparkSession
) -> None:
    pages.observe(cluster.address)
    write(spark.createDataFrame(_rows(40), PAGES), pages.name, catalog=CATALOG).save()
    assert pages.notifications() == 40


def test_a_table_that_was_dropped_and_created_again_is_a_new_one(
    write: Any,
    read: Any,
    pages: Pages,
    db: percolator.Database,
    spark: SparkSession,
    cluster: LocalCluster,
) -> None:
    """Spark reuses its Python processes, and these remember the first table."""
    frame = spark.createDataFrame([("a", "b", 1), ("d", "e", 2)], PAGES)
    options = {"catalog": CATALOG}
    write(frame, pages.name, **options).save()
    assert read(pages.name, **options).load().count() == 2
    db.drop_table(pages.table)
    db.create_table(pages.table, ["c"])
    assert read(pages.name, **options).load().count() == 0
    bulk_load(frame, address=cluster.address, table=pages.name, **options)
    assert len(pages.stored()) == 2


# Atomic jobs: all rows at one moment or none, whatever happens to tasks and to the driver.

ROWS = 400


def _atomic_writer(cluster: Any, pages: Pages, **more: Any) -> AtomicWriter:
    made = _writer(cluster, pages, atomic="true", **more)
    assert isinstance(made, AtomicWriter)
    return made


@pytest.fixture
def writer(cluster: Any, pages: Pages) -> AtomicWriter:
    """The writer of an atomic job into `pages`."""
    return _atomic_writer(cluster, pages)


def _batch(visits: int, urls: list[str] | None = None) -> pa.RecordBatch:
    urls = keys(40) if urls is None else urls
    return pa.record_batch({"url": urls, "visits": pa.array([visits] * len(urls), pa.int64())})


def _visits(pages: Pages) -> dict[str, int]:
    return {url: visits for url, (_, visits) in pages.stored().items()}


def test_a_task_that_failed_and_ran_again_leaves_every_row_at_one_timestamp(
    write: Any, read: Read, pages: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    frame = failing(frame_of(spark, ROWS), tmp_path / "failed", attempts=1)
    write(frame, pages.name, catalog=CATALOG, atomic="true").save()
    assert (tmp_path / "failed").exists()
    assert pages.stored() == rows_of(ROWS)
    cells = read(pages.name).load().select("commit_timestamp").collect()
    assert len(cells) == 2 * ROWS
    assert len({cell.commit_timestamp for cell in cells}) == 1


def test_a_job_that_fails_leaves_nothing_that_is_in_the_way(
    write: Any, pages: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    """Not even briefly, although its locks could live for an hour."""
    frame = failing(frame_of(spark, ROWS), tmp_path / "failed", attempts=3)
    with pytest.raises(Exception, match="the task fails after all its rows"):
        write(frame, pages.name, catalog=CATALOG, atomic="true", keep_seconds="3600").save()
    assert pages.stored() == {}
    pages.fill(40)
    assert pages.stored() == rows_of(40)


def test_an_atomic_job_deletes(write: Any, filled: Pages, spark: SparkSession) -> None:
    frame = spark.createDataFrame([(key,) for key in keys(40)[:15]], "url string")
    write(frame, filled.name, catalog=CATALOG, atomic="true", operation="delete").save()
    assert sorted(filled.stored()) == sorted(keys(40)[15:])


def test_a_key_in_two_tasks_fails_the_job_and_nothing_is_written(
    write: Any, pages: Pages, spark: SparkSession
) -> None:
    frame = spark.createDataFrame([("a", "t", 1), ("a", "u", 2)], PAGES).repartition(2, "visits")
    with pytest.raises(Exception, match=r"tasks '.' and '.' both write|twice"):
        write(frame, pages.name, catalog=CATALOG, atomic="true").save()
    assert pages.stored() == {}


def test_a_key_that_a_task_has_twice_is_refused_unless_its_rows_are_equal(
    cluster: Any, writer: AtomicWriter, pages: Pages
) -> None:
    writer.commit([writer.write(iter([_batch(1, ["a", "a"]), _batch(1, ["a"])]))])
    assert _visits(pages) == {"a": 1}
    with pytest.raises(percolator.WrittenTwice, match="task '0' writes"):
        _atomic_writer(cluster, pages).write(iter([_batch(1, ["b"]), _batch(2, ["b"])]))
    assert _visits(pages) == {"a": 1}


def test_an_attempt_that_another_one_has_overtaken_fails_and_the_other_counts_alone(
    monkeypatch: pytest.MonkeyPatch, writer: AtomicWriter, pages: Pages
) -> None:
    """As with speculation. They write other values, to tell them apart."""
    monkeypatch.setattr(atomic_writer, "FLUSH_CELLS", 10)
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
    writer: AtomicWriter, pages: Pages
) -> None:
    writer.commit([writer.write(iter([_batch(1)]))])
    for urls in (["y", "z"], keys(40)):
        with pytest.raises(percolator.UsageError, match="was committed while task '0' was writing"):
            writer.write(iter([_batch(2, urls)]))
    assert _visits(pages) == dict.fromkeys(keys(40), 1)


def test_a_task_that_goes_on_after_its_job_has_failed_is_refused_and_locks_nothing(
    cluster: Any, pages: Pages
) -> None:
    """Spark kills tasks later than it gives up their job."""
    writer = _atomic_writer(cluster, pages, keep_seconds="3600")
    writer.abort([None])
    with pytest.raises(percolator.ConflictError, match="comes too late"):
        writer.write(iter([_batch(1)]))
    pages.fill(40)
    assert pages.stored() == rows_of(40)


def test_a_driver_that_is_gone_before_the_commit_leaves_no_row(
    writer: AtomicWriter, pages: Pages
) -> None:
    writer.write(iter([_batch(1)]))
    assert _visits(pages) == {}


def test_a_job_that_is_given_up_can_be_run_again_at_once(
    cluster: Any, writer: AtomicWriter, pages: Pages
) -> None:
    writer.abort([writer.write(iter([_batch(1)])), None])
    again = _atomic_writer(cluster, pages)
    again.commit([again.write(iter([_batch(2)]))])
    assert _visits(pages) == dict.fromkeys(keys(40), 2)


def test_what_was_given_up_cannot_be_committed_and_what_was_committed_not_given_up(
    cluster: Any, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    writer = _atomic_writer(cluster, pages)
    locked = writer.write(iter([_batch(1)]))
    writer.abort([locked])
    with pytest.raises(percolator.ConflictError, match="none of it is committed"):
        writer.commit([locked])
    writer = _atomic_writer(cluster, pages)
    locked = writer.write(iter([_batch(2)]))
    writer.commit([locked])
    writer.abort([locked])
    assert "was committed at" in caplog.text
    assert _visits(pages) == dict.fromkeys(keys(40), 2)


def test_a_commit_without_the_message_of_a_task_is_refused(
    writer: AtomicWriter, pages: Pages
) -> None:
    with pytest.raises(percolator.UsageError, match="only 1 of 2 tasks"):
        writer.commit([writer.write(iter([_batch(1)])), None])
    assert _visits(pages) == {}


# `mode("overwrite")`: the new rows appear at the moment at which the old ones go.


def _overwriting_writer(cluster: Any, pages: Pages) -> AtomicWriter:
    made = _writer(cluster, pages, overwrite=True)
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
    write: Any, filled: Pages, spark: SparkSession, cluster: Any
) -> None:
    filled.observe(cluster.address)
    same = [(url, *values) for url, values in filled.stored().items()]
    frame = spark.createDataFrame([*same, ("z", "new", 1)], PAGES)
    write(frame, filled.name, catalog=CATALOG, atomic="true", notify="changed").save()
    assert len(filled.stored()) == 41
    _notified(filled, 1)


def _notified(pages: Pages, count: int) -> None:
    """Waits until so many cells have notified: a reader's client rolls them forward behind it."""
    until = time.monotonic() + 30.0
    while pages.notifications() < count and time.monotonic() < until:
        time.sleep(0.1)
    assert pages.notifications() == count


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
    write: Any, filled: Pages, spark: SparkSession
) -> None:
    for visits in (1, 2):
        frame = spark.createDataFrame([("a", "t", visits), (f"b{visits}", "t", visits)], PAGES)
        write(frame, filled.name, catalog=CATALOG).mode("overwrite").save()
        assert filled.stored() == {"a": ("t", visits), f"b{visits}": ("t", visits)}
    nothing = spark.createDataFrame([], PAGES)
    write(nothing, filled.name, catalog=CATALOG).mode("overwrite").save()
    assert filled.stored() == {}


def test_a_table_that_was_dropped_and_created_again_is_overwritten(
    write: Any, filled: Pages, db: percolator.Database, spark: SparkSession
) -> None:
    """Spark uses the process again that has committed, and this remembers the first table."""
    frame = spark.createDataFrame([("a", "t", 1), ("d", "t", 2)], PAGES)
    for _ in range(2):
        write(frame, filled.name, catalog=CATALOG).mode("overwrite").save()
        assert filled.stored() == {"a": ("t", 1), "d": ("t", 2)}
        db.drop_table(filled.table)
        db.create_table(filled.table, ["b"])
        db.set_many([("old", {filled.title: "old"})])


def test_raw_cells_replace_all_cells(write: Any, filled: Pages, spark: SparkSession) -> None:
    schema = "row binary, column binary, value binary"
    frame = spark.createDataFrame([(b"a", b"meta:title", b"new")], schema)
    write(frame, filled.name).mode("overwrite").save()
    assert filled.stored() == {"a": ("new", None)}


def test_a_job_that_fails_leaves_the_old_rows(
    write: Any, filled: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    old = filled.stored()
    frame = spark.createDataFrame([(key, "new", 1) for key in keys(80)], PAGES).repartition(2)
    frame = failing(frame, tmp_path / "failed", attempts=3)
    writer = write(frame, filled.name, catalog=CATALOG, keep_seconds="3600").mode("overwrite")
    with pytest.raises(Exception, match="the task fails after all its rows"):
        writer.save()
    assert filled.stored() == old
    filled.fill(80)  # and nothing is in the way


def test_a_driver_that_is_gone_before_the_swap_leaves_the_old_rows_and_after_it_the_new(
    cluster: Any, filled: Pages
) -> None:
    old = filled.stored()
    writer = _overwriting_writer(cluster, filled)
    writer.write(iter([_batch(1, ["a00001", "z"])]))
    assert filled.stored() == old
    again = _overwriting_writer(cluster, filled)
    writer.abort([None])  # without it, what is locked expires
    locked = again.write(iter([_batch(2, ["a00002", "z"])]))
    again.commit([locked])
    again.abort([locked])
    assert filled.stored() == {"a00002": (None, 2), "z": (None, 2)}


def test_of_two_jobs_that_overwrite_one_table_the_later_one_replaces_what_the_first_has_written(
    cluster: Any, filled: Pages
) -> None:
    first, second = _overwriting_writer(cluster, filled), _overwriting_writer(cluster, filled)
    locked = second.write(iter([_batch(2, ["z"])]))
    first.commit([first.write(iter([_batch(1, ["a00001", "y"])]))])
    assert filled.stored() == {"a00001": (None, 1), "y": (None, 1)}
    second.commit([locked])
    assert filled.stored() == {"z": (None, 2)}


# Several writes as one job: all of their rows appear at one moment, or none of them.


def _together_frame(spark: SparkSession, visits: int, *urls: str) -> Any:
    return spark.createDataFrame([(url, "t", visits) for url in urls], PAGES).repartition(2)


def _save(job: Any, frame: Any, pages: Pages, mode: str) -> None:
    given = {**job.options, "table": pages.name, "catalog": CATALOG}
    frame.write.format("percolator").options(**given).mode(mode).save()


def test_tables_are_replaced_and_appended_to_at_one_moment(
    read: Read, db: percolator.Database, spark: SparkSession, cluster: Any
) -> None:
    replaced, grown = Pages(db, 40), Pages(db)
    old = replaced.stored()
    with percolator.spark.together(address=cluster.address) as job:
        _save(job, _together_frame(spark, 1, "a00001", "z"), replaced, "overwrite")
        _save(job, _together_frame(spark, 2, "a", "b", "c"), grown, "append")
        assert job.commit_timestamp is None
        assert (replaced.stored(), grown.stored()) == (old, {})
    assert replaced.stored() == {"a00001": ("t", 1), "z": ("t", 1)}
    assert grown.stored() == {"a": ("t", 2), "b": ("t", 2), "c": ("t", 2)}
    cells = [*read(replaced.name).load().collect(), *read(grown.name).load().collect()]
    assert {cell.commit_timestamp for cell in cells} == {job.commit_timestamp}


def test_an_error_in_the_block_gives_up_all_writes(
    filled: Pages, spark: SparkSession, cluster: Any
) -> None:
    old = filled.stored()

    def run() -> None:
        with percolator.spark.together(address=cluster.address, keep_seconds=3600) as job:
            _save(job, _together_frame(spark, 1, "a00001"), filled, "overwrite")
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        run()
    assert filled.stored() == old
    filled.fill(40)  # nothing is in the way


def test_a_job_of_which_a_write_has_failed_cannot_commit(
    db: percolator.Database, spark: SparkSession, cluster: Any, tmp_path: Path
) -> None:
    first, second = Pages(db), Pages(db)
    frame = failing(_together_frame(spark, 1, *keys(40)), tmp_path / "failed", attempts=3)

    def run() -> None:
        with percolator.spark.together(address=cluster.address) as job:
            _save(job, _together_frame(spark, 1, "a"), first, "append")
            with pytest.raises(Exception, match="the task fails after all its rows"):
                _save(job, frame, second, "append")

    with pytest.raises(ConflictError, match="none of it is committed"):
        run()
    assert (first.stored(), second.stored()) == ({}, {})


def test_a_write_after_the_end_of_its_job_is_refused(
    pages: Pages, spark: SparkSession, cluster: Any
) -> None:
    with percolator.spark.together(address=cluster.address) as job:
        given = {**job.options, "table": pages.name, "catalog": CATALOG}
    frame = _together_frame(spark, 1, "a")
    with pytest.raises(Exception, match="comes too late"):
        frame.write.format("percolator").options(**given).mode("append").save()
    assert pages.stored() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"together": "x", "atomic": "true"}, "together: is not from percolator.spark.together"),
        ({"together": "x"}, "together: needs atomic=true"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    db: percolator.Database, spark: SparkSession, cluster: Any, options: dict[str, str],
    message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": Pages(db).name, "catalog": CATALOG, **options}
    writer = _together_frame(spark, 1, "a").write.format("percolator").options(**given)
    with pytest.raises(AnalysisException, match=message):
        writer.mode("append").save()


# `saveAsTable` and its like are refused before a row is written, and `save()` nowhere.

NAME = "made_in_sparks_catalog"
CREATED_ROWS = [("a", "title", 1), ("c", "title", 2)]


def _save_as_table(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("percolator").options(**options).mode("append").saveAsTable(NAME)


def _create(frame: DataFrame, options: dict[str, str]) -> None:
    frame.writeTo(NAME).using("percolator").options(**options).create()


def _load(frame: DataFrame, options: dict[str, str]) -> None:
    _save_as_table(frame, options | {"operation": "bulk_load"})


@pytest.mark.parametrize("create", [_save_as_table, _create, _load])
def test_a_table_in_sparks_catalog_is_refused_and_nothing_written(
    spark: SparkSession,
    given: dict[str, str],
    pages: Pages,
    create: Callable[[DataFrame, dict[str, str]], None],
) -> None:
    frame = spark.createDataFrame(CREATED_ROWS, PAGES)
    with pytest.raises(Exception, match="nothing was written: saveAsTable and create"):
        create(frame, given)
    assert pages.stored() == {}
    assert not spark.catalog.tableExists(NAME)
    bulk_load(frame, **given)
    assert len(pages.stored()) == 2, "the range of a refused load is open"


def test_a_table_that_was_declared_says_why_it_cannot_be_read(
    spark: SparkSession, cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db, 4)
    with pytest.raises(Exception, match="table: is missing: Spark does not pass the options"):
        spark.sql(f"CREATE TABLE {NAME} USING percolator OPTIONS (table '{pages.name}')")
    spark.sql(f"CREATE TABLE {NAME} ({PAGES}) USING percolator OPTIONS (table '{pages.name}')")
    try:
        with pytest.raises(Exception, match="Spark does not pass the options of a table"):
            spark.table(NAME).collect()
    finally:
        spark.sql(f"DROP TABLE {NAME}")


def test_batches_of_a_stream_are_saved(
    spark: SparkSession, given: dict[str, str], pages: Pages, tmp_path: Path
) -> None:
    """They run inside the execution of their query, as the write of `saveAsTable` does."""
    spark.createDataFrame(CREATED_ROWS, PAGES).write.json(str(tmp_path / "rows"))

    def save(batch: DataFrame, _: int) -> None:
        batch.write.format("percolator").options(**given).mode("append").save()

    stream = spark.readStream.schema(PAGES).json(str(tmp_path / "rows"))
    started = stream.writeStream.foreachBatch(save).trigger(availableNow=True)
    query = started.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert pages.stored() == {url: (title, visits) for url, title, visits in CREATED_ROWS}
