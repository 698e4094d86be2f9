"""Bulk load: all rows at once or none, and an abandoned load can always be ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import percolator
from percolator import errors
from percolator.aio.bulk_load import BulkLoad, LoadPlan, LoadTimestamps
from percolator.blocking import loop_thread
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import BulkLoadWriter, abandon_load, bulk_load
from percolator.spark.options import WriteOptions
from percolator.v1 import master_pb2
from percolator.v1.tabletserver_pb2 import FenceRequest
from percolator.wire import methods
from tests.spark.tables import CATALOG, PAGES, Pages, rows_of

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = 4_000


def _rows() -> list[tuple[str, str, int]]:
    return [(key, title, visits) for key, (title, visits) in rows_of(ROWS).items()]


def _frame(spark: SparkSession) -> Any:
    return spark.createDataFrame(_rows(), PAGES)


def _options(cluster: LocalCluster, pages: Pages, **more: object) -> dict[str, Any]:
    return {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **more}


def _cells(frame: list[tuple[str, str, int]]) -> list[tuple[bytes, bytes, bytes]]:
    return [(key.encode(), b"meta:title", title.encode()) for key, title, _ in frame]


def _writer(cluster: LocalCluster, pages: Pages, name: str, **more: object) -> Any:
    """The writer as the driver makes it, which closes the range."""
    given = _options(cluster, pages, operation="bulk_load", load_name=name) | more
    return BulkLoadWriter(WriteOptions.parse({k: v for k, v in given.items() if v is not None}))


def _left_behind(
    db: percolator.Database, pages: Pages, name: str
) -> tuple[BulkLoad, LoadTimestamps]:
    """Remains of a driver that died: the first half of the rows."""
    plan = LoadPlan(pages.name, name, b"", b"", notify=False)
    load = BulkLoad(db._asynchronous, plan)
    loop = loop_thread.shared()
    timestamps = loop.call(load.begin)
    loop.call(lambda: load.load(_cells(_rows()[: ROWS // 2]), timestamps))
    return load, timestamps


def test_all_rows_appear_at_one_timestamp(
    pages: Pages, db: percolator.Database, cluster: LocalCluster, spark: SparkSession
) -> None:
    before = db.timestamp()
    bulk_load(_frame(spark), **_options(cluster, pages))
    assert pages.stored() == rows_of(ROWS)
    read = spark.read.format("percolator").options(address=cluster.address, table=pages.name)
    commits = read.load().select("commit_timestamp").distinct().collect()
    assert len(commits) == 1
    with db.snapshot(at=percolator.Timestamp(commits[0][0] - 1)) as snapshot:
        assert list(snapshot.scan(pages.table)) == []
    assert commits[0][0] > before


def test_frames_that_are_not_arranged_and_tasks_that_fail_load_the_same_rows(
    write: Any, pages: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    def some(rows: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        yield from rows
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and context.attemptNumber() == 0:
            (tmp_path / "failed").touch()
            raise RuntimeError("the task fails after all its rows")

    frame = _frame(spark).repartition(3)
    failing = spark.createDataFrame(frame.rdd.mapPartitions(some), frame.schema)
    write(failing, pages.name, catalog=CATALOG, operation="bulk_load").save()
    assert (tmp_path / "failed").exists()
    assert pages.stored() == rows_of(ROWS)


def test_a_job_that_fails_leaves_nothing_and_the_table_open(
    pages: Pages, cluster: LocalCluster, spark: SparkSession
) -> None:
    twice = _frame(spark).unionAll(_frame(spark).limit(1))
    with pytest.raises(Exception, match="row 'a00000' appears twice in the frame"):
        bulk_load(twice, **_options(cluster, pages))
    assert pages.stored() == {}
    pages.fill(4)
    assert len(pages.stored()) == 4


def test_a_row_that_ends_one_batch_and_begins_the_next_is_a_repeated_row(
    pages: Pages, cluster: LocalCluster
) -> None:
    writer = _writer(cluster, pages, "twice")
    batches = [pa.record_batch({"url": urls, "title": urls}) for urls in (["a", "b"], ["b", "c"])]
    with pytest.raises(errors.SchemaError, match="row 'b' appears twice in the frame"):
        writer.write(iter(batches))
    writer.abort([])
    deleting = _writer(cluster, pages, "nulls", nulls="delete")
    nulls = pa.record_batch({"url": ["a", "b"], "title": ["t", None]})
    with pytest.raises(errors.SchemaError, match=r"row 'b', column 'meta:title': .* load a null"):
        deleting.write(iter([nulls]))
    deleting.abort([])
    raw = _writer(cluster, pages, "cells", catalog=None)
    cells = [
        pa.record_batch({"row": [b"a"], "column": [column], "value": [b"x"]})
        for column in (b"meta:title", b"other", b"other")
    ]
    raw.write(iter(cells[:2]))
    with pytest.raises(errors.SchemaError, match="appears twice in the frame"):
        raw.write(iter(cells[1:]))
    raw.abort([])
    assert pages.stored() == {}


def test_a_run_that_fails_after_another_took_over_does_not_undo_it(
    pages: Pages, cluster: LocalCluster
) -> None:
    former, later = (_writer(cluster, pages, "crawl") for _ in range(2))
    batch = pa.record_batch({"url": ["a"], "title": ["later"], "visits": [1]})
    done = later.write(iter([batch]))
    with pytest.raises(errors.InvalidArgument, match="another run has taken"):
        former.write(iter([batch]))
    former.abort([])
    later.commit([done])
    assert pages.stored() == {"a": ("later", 1)}


def test_bulk_load_refuses_another_operation(
    pages: Pages, cluster: LocalCluster, spark: SparkSession
) -> None:
    with pytest.raises(
        errors.InvalidArgument, match="operation: expected 'bulk_load', found 'delete'"
    ):
        bulk_load(_frame(spark), **_options(cluster, pages, operation="delete"))
    bulk_load(_frame(spark), **_options(cluster, pages, load_name=None, notify=None))
    assert pages.stored() == rows_of(ROWS)


def test_a_table_with_rows_or_living_locks_is_refused_and_stays_open(
    db: percolator.Database, cluster: LocalCluster, spark: SparkSession
) -> None:
    pages = Pages(db, 4)
    with pytest.raises(Exception, match="is not empty where rows are to be loaded"):
        bulk_load(_frame(spark), **_options(cluster, pages))
    pages.fill(8)
    assert len(pages.stored()) == 8
    rest = {"load_from": "d1", "load_to": "e"}
    above = spark.createDataFrame([("d1", "x", 1), ("dz", "y", 2)], PAGES)
    bulk_load(above, **_options(cluster, pages, **rest))
    assert len(pages.stored()) == 10


def test_the_same_load_takes_over_from_a_driver_that_died(
    pages: Pages, db: percolator.Database, cluster: LocalCluster, spark: SparkSession
) -> None:
    former, timestamps = _left_behind(db, pages, "crawl")
    with pytest.raises(errors.DeadlineExceeded, match="closed for the bulk load 'crawl'"):
        db.snapshot().get("a00000", pages.title, timeout=0.5)
    bulk_load(_frame(spark).where("visits >= 100"), **_options(cluster, pages, load_name="crawl"))
    assert len(pages.stored()) == ROWS - 100
    cells = _cells(_rows()[:1])
    with pytest.raises(errors.InvalidArgument, match="it was lifted, or another run has taken"):
        loop_thread.shared().call(lambda: former.load(cells, timestamps))


def test_abandoning_a_load_deletes_its_rows_unless_it_was_complete(
    pages: Pages, db: percolator.Database, cluster: LocalCluster
) -> None:
    _left_behind(db, pages, "crawl")
    where = {"address": cluster.address, "table": pages.name, "load_name": "crawl"}
    assert not abandon_load(**where)
    assert pages.stored() == {}
    load, timestamps = _left_behind(db, pages, "crawl")
    # This is how far a driver gets that dies while it finishes the load.
    run, commit = timestamps
    loop_thread.shared().call(lambda: load._each(FenceRequest.ACTION_FINISH, run, commit=commit))
    assert abandon_load(**where)
    assert len(pages.stored()) == ROWS // 2


def test_tablets_may_split_and_move_under_a_load(
    pages: Pages, db: percolator.Database, cluster: LocalCluster
) -> None:
    load, timestamps = _left_behind(db, pages, "moving")
    engine = db._asynchronous.internal.engine

    async def split_and_move() -> None:
        info = await engine.catalog.table(pages.name, engine.now() + 10)
        tablets = await engine.catalog.all_tablets(info.table_id, engine.now() + 10)
        split = engine.world.network.unary(cluster.address, methods.SPLIT_TABLET)
        move = engine.world.network.unary(cluster.address, methods.MOVE_TABLET)
        servers = {cluster.processes[f"tabletserver-{n}"].address for n in (1, 2)}
        await split(
            master_pb2.SplitTabletRequest(tablet_id=tablets[3].tablet_id, row=b"d00500"), 20.0
        )
        for tablet in tablets[1:3]:
            (other,) = servers - {tablet.address}
            await move(master_pb2.MoveTabletRequest(tablet_id=tablet.tablet_id, server=other), 20.0)
        await load.load(_cells(_rows()[ROWS // 2 :]), timestamps)
        await load.finish(timestamps)

    loop_thread.shared().call(split_and_move)
    found = {key: title for key, (title, _) in pages.stored().items()}
    assert found == {key: title for key, title, _ in _rows()}


def test_names_of_fields_may_have_dots_and_another_case(
    pages: Pages, cluster: LocalCluster, spark: SparkSession
) -> None:
    dotted = CATALOG.replace('"url"', '"page.url"').replace('"title":', '"page.`title`":')
    frame = _frame(spark).limit(40).toDF("Page.URL", "page.`title`", "visits")
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        bulk_load(frame, **_options(cluster, pages, catalog=dotted))
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert len(pages.stored()) == 40


def test_observers_are_notified_on_request(
    pages: Pages, cluster: LocalCluster, spark: SparkSession
) -> None:
    pages.observe(cluster.address)
    bulk_load(_frame(spark).limit(40), **_options(cluster, pages, notify="true"))
    assert pages.notifications() == 40
