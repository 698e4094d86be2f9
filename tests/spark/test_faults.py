"""Jobs among tasks that fail, tablets that move and servers that die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrameReader, SparkSession

import percolator
from percolator import loop_thread
from percolator.errors import CellAddress
from percolator.protocol.records import KIND_PUT
from percolator.protocol.write_steps import WriteSteps
from percolator.v1 import master_pb2
from percolator.wire import methods
from percolator.wire.questions import APPLIED
from services.local.cluster import LocalCluster
from tests.spark.tables import CATALOG, PAGES, Pages, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]
ROWS = 4_000


def _frame(spark: SparkSession, rows: int = ROWS) -> Any:
    found = [(key, f"title of {key}", number) for number, key in enumerate(keys(rows))]
    return spark.createDataFrame(found, PAGES).repartitionByRange(2, "url")


def _expected(rows: int = ROWS) -> dict[str, tuple[str, int]]:
    return {key: (f"title of {key}", number) for number, key in enumerate(keys(rows))}


def _failing(frame: Any, marker: Path, attempts: int) -> Any:
    """The same rows; one partition fails after its last row, so many times."""

    def some(rows: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        yield from rows
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and context.attemptNumber() < attempts:
            marker.touch()
            raise RuntimeError("the task fails after all its rows")

    return frame.sparkSession.createDataFrame(frame.rdd.mapPartitions(some), frame.schema)


def test_a_task_that_fails_at_its_end_is_run_again_and_the_rows_are_right(
    write: Any, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    pages = Pages(db)
    frame = _failing(_frame(spark), tmp_path / "failed", attempts=1)
    write(frame, pages.name, catalog=CATALOG, transaction_rows=100).save()
    assert (tmp_path / "failed").exists()
    assert pages.stored() == _expected()


def test_a_job_that_fails_leaves_whole_transactions_and_can_be_run_again(
    write: Any, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    pages = Pages(db)
    frame = _failing(_frame(spark), tmp_path / "failed", attempts=3)
    with pytest.raises(Exception, match="the task fails after all its rows"):
        write(frame, pages.name, catalog=CATALOG, transaction_rows=100).save()
    expected = _expected()
    left = pages.stored()
    assert left
    assert all(expected[url] == cells for url, cells in left.items())
    write(_frame(spark), pages.name, catalog=CATALOG).save()
    assert pages.stored() == expected


def test_locks_that_were_left_behind_are_settled(read: Read, db: percolator.Database) -> None:
    """A transaction that has committed its first cell, and died."""
    pages = Pages(db, 40)
    engine = db._database.engine

    async def leave_behind() -> None:
        deadline = engine.now() + 10
        info = await engine.catalog.table(pages.name, deadline)
        start = await engine.around.timestamps.get()
        writes = {
            CellAddress(info.table_id, url.encode(), b"visits"): (KIND_PUT, bytes(7) + b"\x63")
            for url in ("a00001", "c00001", "d00001")
        }
        write = WriteSteps(start, writes, b"", 1024)
        steps = [write.prewrite(cell, start + 1, 50) for cell in write.cells]
        assert await engine.router.mutate(steps, deadline) == [APPLIED] * 3
        commit = await engine.around.timestamps.get()
        step = write.commit_primary(info.schema, start + 1, commit)
        assert await engine.router.mutate([step], deadline) == [APPLIED]

    loop_thread.shared().call(leave_behind)
    frame = read(pages.name, catalog=CATALOG).load().where("visits = 99")
    assert sorted(row.url for row in frame.collect()) == ["a00001", "c00001", "d00001"]


def test_tablets_that_split_and_moved_since_the_plan_was_made_are_followed(
    read: Read, db: percolator.Database, cluster: LocalCluster
) -> None:
    pages = Pages(db, ROWS)
    frame = read(pages.name, catalog=CATALOG).load()
    assert frame._jdf.queryExecution().executedPlan() is not None  # from here on it is planned
    engine = db._database.engine
    master = engine.world.network

    async def split_and_move() -> None:
        info = await engine.catalog.table(pages.name, engine.now() + 10)
        tablets = await engine.catalog.all_tablets(info.table_id, engine.now() + 10)
        split = master.unary(cluster.address, methods.SPLIT_TABLET)
        move = master.unary(cluster.address, methods.MOVE_TABLET)
        request = master_pb2.SplitTabletRequest(tablet_id=tablets[1].tablet_id, row=b"b00500")
        await split(request, 20.0)
        servers = {cluster.processes[f"tabletserver-{n}"].address for n in (1, 2)}
        (other,) = servers - {tablets[2].address}
        await move(master_pb2.MoveTabletRequest(tablet_id=tablets[2].tablet_id, server=other), 20.0)

    loop_thread.shared().call(split_and_move)
    assert {row.url: (row.title, row.visits) for row in frame.collect()} == _expected()


def test_a_tablet_server_dies_while_spark_writes_and_no_row_is_lost(
    write: Any, db: percolator.Database, spark: SparkSession, cluster: LocalCluster
) -> None:
    pages = Pages(db)
    engine = db._database.engine
    failed: list[BaseException] = []

    def run() -> None:
        try:
            options = {"catalog": CATALOG, "transaction_rows": 50, "transactions_in_flight": 1}
            write(_frame(spark, 8 * ROWS), pages.name, **options).save()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failed.append(error)

    async def written() -> int:
        call = engine.world.network.unary(cluster.address, methods.LIST_TABLETS)
        found = await call(master_pb2.ListTabletsRequest(table=pages.name), 5.0)
        return sum(tablet.statistics.cells for tablet in found.tablets)

    async def some_are_written() -> None:
        while await written() < 1_000:
            await engine.world.clock.sleep(0.02)

    job = threading.Thread(target=run)
    job.start()
    loop_thread.shared().call(some_are_written)
    killed = cluster.processes["tabletserver-1"]
    killed.kill()
    under_way = job.is_alive()
    job.join(100)
    cluster.restart("tabletserver-1")
    assert failed == []
    assert under_way
    assert pages.stored() == _expected(8 * ROWS)
