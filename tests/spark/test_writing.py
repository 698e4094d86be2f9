"""Writes: the rows end up the same, whether they were written once or several times."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import bulk_load
from percolator.spark.options import WriteOptions
from percolator.spark.transaction_writer import Transactions, Written, total
from percolator.spark.writers import writer_of
from tests.spark.tables import CATALOG, PAGES, Pages, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]


def _rows(count: int, visits: int = 0) -> list[tuple[str, str, int]]:
    return [(key, f"title of {key}", visits + n) for n, key in enumerate(keys(count))]


def test_an_append_replaces_rows_with_the_same_key(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 40)
    frame = spark.createDataFrame(_rows(80, visits=500), PAGES).repartition(3)
    write(frame, pages.name, catalog=CATALOG, transaction_rows=7).save()
    assert pages.stored() == {key: (title, visits) for key, title, visits in _rows(80, 500)}


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
    write: Any, read: Read, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 40)
    some = read(pages.name, catalog=CATALOG).schema("url string").load()
    write(some.where("url < 'b'"), pages.name, catalog=CATALOG, operation="delete").save()
    assert sorted(pages.stored()) == keys(40)[10:]
    fields = {"operation": "delete", "columns": "title"}
    write(some.where("url like 'b%'"), pages.name, catalog=CATALOG, **fields).save()
    assert pages.stored()["b00000"] == (None, 10)
    raw = read(pages.name).load().where("row = X'643030303030' and column = X'766973697473'")
    write(raw, pages.name, operation="delete").save()
    assert pages.stored()["d00000"] == ("title of d00000", None)


def test_raw_cells_can_be_copied_as_they_are(
    write: Any, read: Read, db: percolator.Database
) -> None:
    pages, copy = Pages(db, 40), Pages(db)
    write(read(pages.name).load(), copy.name).save()
    assert copy.stored() == pages.stored()


def test_equal_values_are_not_written_again_on_request(
    write: Any, read: Read, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 40)
    before = {bytes(r.row + r.column): r.commit_timestamp for r in _raw(read, pages)}
    rows = _rows(40)
    rows[3] = (rows[3][0], "another title", rows[3][2])
    frame = spark.createDataFrame(rows, PAGES)
    write(frame, pages.name, catalog=CATALOG, skip_equal="true").save()
    after = {bytes(r.row + r.column): r.commit_timestamp for r in _raw(read, pages)}
    assert [cell for cell in after if after[cell] != before[cell]] == [b"a00003meta:title"]


def _raw(read: Read, pages: Pages) -> list[Any]:
    return read(pages.name).load().collect()


def test_two_concurrent_attempts_of_a_task_both_succeed(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    options |= {"transaction_rows": "100", "transactions_in_flight": "2"}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    writer: Any = writer_of(WriteOptions.parse(options), StructType(fields))
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
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    writer: Any = writer_of(WriteOptions.parse(options), StructType(fields))
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


def _writer(cluster: Any, pages: Pages, **more: str) -> Any:
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **more}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    return writer_of(WriteOptions.parse(options), StructType(fields))


def test_a_task_that_fails_says_what_it_has_committed(
    cluster: Any, db: percolator.Database, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages(db)
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
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)

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
    write: Any, db: percolator.Database, cluster: Any, spark: SparkSession
) -> None:
    pages = Pages(db)
    pages.observe(cluster.address)
    write(spark.createDataFrame(_rows(40), PAGES), pages.name, catalog=CATALOG).save()
    assert pages.notifications() == 40


def test_a_table_that_was_dropped_and_created_again_is_a_new_one(
    write: Any, read: Any, db: percolator.Database, spark: SparkSession, cluster: LocalCluster
) -> None:
    """Spark reuses its Python processes, and these remember the first table."""
    pages = Pages(db)
    frame = spark.createDataFrame([("a", "b", 1), ("d", "e", 2)], PAGES)
    options = {"catalog": CATALOG}
    write(frame, pages.name, **options).save()
    assert read(pages.name, **options).load().count() == 2
    db.drop_table(pages.table)
    db.create_table(pages.table, ["c"])
    assert read(pages.name, **options).load().count() == 0
    bulk_load(frame, address=cluster.address, table=pages.name, **options)
    assert len(pages.stored()) == 2
