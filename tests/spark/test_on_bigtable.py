"""Spark on a cluster whose cells are in Google's emulator of Bigtable: the same programs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrameReader, DataFrameWriter, SparkSession

import percolator
import percolator.spark
from percolator import Limits, Transaction, observes
from percolator.errors import InvalidArgument
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import abandon_load, bulk_load
from percolator.spark.options import ReadOptions
from percolator.spark.reader import TableReader
from percolator.spark.shapes import shape_of
from tests.bigtable.emulator_process import emulator
from tests.spark.tables import CATALOG, PAGES, Pages, failing

pytestmark = [
    pytest.mark.spark,
    pytest.mark.bigtable,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module", name="cluster")
def _cluster(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGTABLE_EMULATOR_HOST", address)
        store = f"bigtable://clusters/i{uuid.uuid4().hex[:20]}"
        data = tmp_path_factory.mktemp("cluster")
        with LocalCluster(data, store=store, tablet_servers=0, start_seconds=60.0) as started:
            yield started
            percolator.spark.database(started.address).close()


@pytest.fixture(scope="module", name="db")
def _db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address, limits=Limits(call_seconds=60.0)) as database:
        yield database


@pytest.fixture(name="write")
def _write(cluster: LocalCluster) -> Callable[..., DataFrameWriter]:
    def writing(frame: Any, table: str, **options: Any) -> DataFrameWriter:
        given = {"address": cluster.address, "table": table, **options}
        return frame.write.format("percolator").options(**given)  # type: ignore[no-any-return]

    return writing


@pytest.fixture(name="read")
def _read(spark: SparkSession, cluster: LocalCluster) -> Callable[..., DataFrameReader]:
    def reading(table: str, **options: Any) -> DataFrameReader:
        given = {"address": cluster.address, "table": table, **options}
        return spark.read.format("percolator").options(**given)

    return reading


def _saved(write: Any, frame: Any, pages: Pages, mode: str = "append", **options: Any) -> None:
    write(frame, pages.name, catalog=CATALOG, **options).mode(mode).save()


def test_parts_are_divided_by_sampled_keys(db: percolator.Database, cluster: LocalCluster) -> None:
    pages = Pages(db, 600)  # the emulator draws every hundredth row as a sample
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    options = replace(ReadOptions.parse(given), partition_bytes=1_000)  # far below what is allowed
    schema = shape_of(options.catalog).schema(options.columns)
    reader = TableReader(options, schema, db.timestamp())
    parts = reader.partitions()
    assert len(parts) > 1
    urls = [
        url
        for part in parts
        for batch in reader.read(part)
        for url in batch.column("url").to_pylist()
    ]
    assert urls == sorted(pages.stored())


def test_frames_are_read_and_written_and_merged_into(
    write: Any, read: Any, db: percolator.Database, spark: SparkSession, cluster: LocalCluster
) -> None:
    pages, copy = Pages(db, 40), Pages(db)
    old = pages.stored()
    _saved(write, read(pages.name, catalog=CATALOG).load(), copy)
    assert copy.stored() == old

    since = int(db.timestamp())
    changes = spark.createDataFrame([("a00000", "new", -1), ("x", "new", 3)], PAGES)
    merging = {"address": cluster.address, "table": copy.name, "catalog": CATALOG}
    percolator.spark.merge(changes, delete_where="visits < 0", **merging)
    merged = {url: row for url, row in old.items() if url != "a00000"} | {"x": ("new", 3)}
    assert copy.stored() == merged
    with pytest.raises(PySparkException, match="RowChanged: row"):
        _saved(write, changes, copy, if_unchanged_since=since)
    with percolator.spark.snapshot(
        spark, address=cluster.address, at=percolator.Timestamp(since)
    ) as s:
        rows = s.table(copy.name, catalog=CATALOG).collect()
    assert {row.url: (row.title, row.visits) for row in rows} == old


def test_functions_on_executors_have_a_database(
    db: percolator.Database, spark: SparkSession, cluster: LocalCluster
) -> None:
    pages, address = Pages(db), cluster.address
    name, visits = pages.name, pages.visits

    def store(rows: Any) -> None:
        database = percolator.spark.database(address)
        for row in rows:
            with database.transaction() as tx:
                tx.set(f"row-{row.id}", visits, row.id)

    spark.range(8).repartition(2).foreachPartition(store)
    assert {url: row[1] for url, row in Pages.stored(pages).items()} == {
        f"row-{number}": number for number in range(8)
    }, name


def test_a_job_appears_as_a_whole_and_its_observers_run(
    write: Any, read: Any, db: percolator.Database, spark: SparkSession, cluster: LocalCluster,
    tmp_path: Path,
) -> None:  # fmt: skip
    pages, grown = Pages(db, 40), Pages(db)
    seen = pages.table.column("seen", percolator.codecs.text)

    @observes(pages.title, name="watch")
    def watch(tx: Transaction, row: str) -> None:
        tx.set(row, seen, tx.get(row, pages.title, default="gone"))

    old = pages.stored()
    before = db.timestamp()
    db.register_observers([watch])
    with db.run_observers([watch]):
        frame = spark.createDataFrame([("a00001", "t", 1), ("z", "t", 1)], PAGES).repartition(2)
        with percolator.spark.together(address=cluster.address) as job:
            for target, mode in ((pages, "overwrite"), (grown, "append")):
                given = {**job.options, "table": target.name, "catalog": CATALOG}
                frame.write.format("percolator").options(**given).mode(mode).save()
            assert (pages.stored(), grown.stored()) == (old, {})
        assert pages.stored() == grown.stored() == {"a00001": ("t", 1), "z": ("t", 1)}
        db.wait_for_observers(timeout=120)
    with db.snapshot() as snapshot:
        found = {row.key: row[seen] for row in snapshot.scan(pages.table, columns=[seen])}
    assert found == dict.fromkeys(old, "gone") | {"a00001": "t", "z": "t"}
    cells = [*read(pages.name).load().collect(), *read(grown.name).load().collect()]
    titles = {cell.commit_timestamp for cell in cells if bytes(cell.column) == b"meta:title"}
    assert titles == {job.commit_timestamp}

    again = spark.createDataFrame([("a", "t", 9), ("b", "t", 9)], PAGES).repartition(2)
    _saved(write, failing(again, tmp_path / "failed", attempts=1), grown, atomic="true")
    assert (tmp_path / "failed").exists()
    with db.snapshot(at=before) as snapshot:
        assert list(snapshot.scan(grown.table)) == []
    assert grown.stored()["a"] == grown.stored()["b"] == ("t", 9)


def test_a_stream_is_written_batch_by_batch(
    given: dict[str, str], pages: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    for number in (1, 2):
        row = {"url": f"in {number}", "title": "t", "visits": number}
        (tmp_path / "files" / f"{number}.json").write_text(json.dumps(row))
    files = spark.readStream.schema(PAGES).option("maxFilesPerTrigger", 1)
    writing = files.json(str(tmp_path / "files")).writeStream.format("percolator")
    writing = writing.options(**given, checkpointLocation=str(tmp_path / "checkpoint"))
    writing.trigger(availableNow=True).start().awaitTermination()
    assert pages.stored() == {"in 1": ("t", 1), "in 2": ("t", 2)}


def test_what_a_row_store_does_not_have_is_refused_before_any_task(
    given: dict[str, str], pages: Pages, spark: SparkSession
) -> None:
    frame = spark.createDataFrame([("a", "t", 1)], PAGES)
    with pytest.raises(InvalidArgument, match="in a row store, where Spark cannot load in bulk"):
        bulk_load(frame, **given)
    with pytest.raises(InvalidArgument, match="in a row store, where Spark cannot load in bulk"):
        abandon_load(**given, load_name="some")
    loading = frame.write.format("percolator").options(**given, operation="bulk_load")
    with pytest.raises(AnalysisException, match="in a row store, where Spark cannot load in bulk"):
        loading.mode("append").save()
    with pytest.raises(AnalysisException, match="which has no change feeds to stream"):
        spark.readStream.format("percolator").options(**given, starting_from="now").load()
    assert pages.stored() == {}
