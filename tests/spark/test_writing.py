"""Writes: rows arrive, once or many times over, and are the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
from percolator.spark.bulk_loading import bulk_load
from percolator.spark.options import WriteOptions
from percolator.spark.transactions import Transactions
from percolator.spark.writing import Written, total, writer_of
from services.local.cluster import LocalCluster
from tests.spark.tables import CATALOG, PAGES, Pages, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]


def _rows(count: int, visits: int = 0) -> list[tuple[str, str, int]]:
    return [(key, f"title of {key}", visits + n) for n, key in enumerate(keys(count))]


def test_an_append_puts_rows_in_the_place_of_those_with_the_same_key(
    write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    pages = Pages(db, 40)
    frame = spark.createDataFrame(_rows(80, visits=500), PAGES).repartition(3)
    write(frame, pages.name, catalog=CATALOG, transaction_rows=7).save()
    assert pages.stored() == {key: (title, visits) for key, title, visits in _rows(80, 500)}


def test_a_field_that_is_not_in_the_frame_stays_as_it_is(
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
    with pytest.raises(Exception, match=r"field 'title' is null in . rows; option nulls says"):
        write(frame, pages.name, catalog=CATALOG).save()
    write(frame, pages.name, catalog=CATALOG, nulls="skip").save()
    assert pages.stored()["a00000"] == ("title of a00000", 7)
    write(frame, pages.name, catalog=CATALOG, nulls="delete").save()
    assert pages.stored()["a00000"] == (None, 7)
    with pytest.raises(Exception, match=r"field 'url' is null in 1 rows, and it is the key"):
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


def test_what_is_equal_is_not_written_again_when_that_is_wanted(
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


def test_two_attempts_at_one_time_both_succeed_and_the_rows_are_right(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    options |= {"transaction_rows": "100", "transactions_in_flight": "2"}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    writer: Any = writer_of(WriteOptions.parse(options), StructType(fields), overwrite=False)
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
    assert total(list(done)).transactions == 80
    expected = {url: n for batch in batches for n, url in enumerate(batch["url"].to_pylist())}
    assert {url: visits for url, (_, visits) in pages.stored().items()} == expected


def test_of_rows_with_one_key_in_a_task_the_last_one_stays_whichever_commit_is_slow(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    writer: Any = writer_of(WriteOptions.parse(options), StructType(fields), overwrite=False)
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


def test_observed_columns_notify_when_spark_writes_them(
    write: Any, db: percolator.Database, cluster: Any, spark: SparkSession
) -> None:
    pages = Pages(db)
    pages.observe(cluster.address)
    write(spark.createDataFrame(_rows(40), PAGES), pages.name, catalog=CATALOG).save()
    assert pages.notifications() == 40


def test_a_table_that_was_dropped_and_made_again_is_another_one(
    write: Any, read: Any, db: percolator.Database, spark: SparkSession, cluster: LocalCluster
) -> None:
    """Spark's Python processes are used again, and have known the first one."""
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
