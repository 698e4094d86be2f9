"""Jobs while tasks fail, tablets move and servers die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrameReader, SparkSession

import percolator
from percolator.blocking import loop_thread
from percolator.errors import CellAddress, InvalidArgument
from percolator.formats.records import KIND_PUT
from percolator.protocol.write_set import WriteSteps
from percolator.routing.cells import APPLIED
from percolator.services.local.cluster import LocalCluster
from percolator.v1 import master_pb2
from percolator.wire import methods
from tests.spark.gates import Gates
from tests.spark.tables import CATALOG, PAGES, Pages, failing, halting, keys

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


def test_the_rows_are_right_after_a_task_failed_at_its_end_and_ran_again(
    write: Any, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    pages = Pages(db)
    frame = failing(_frame(spark), tmp_path / "failed", attempts=1)
    write(frame, pages.name, catalog=CATALOG, transaction_rows=100).save()
    assert (tmp_path / "failed").exists()
    assert pages.stored() == _expected()


def test_a_job_that_fails_leaves_whole_transactions_and_can_be_run_again(
    write: Any, db: percolator.Database, spark: SparkSession, tmp_path: Path
) -> None:
    pages = Pages(db)
    some_written = tmp_path / "written"

    def look() -> None:
        while not pages.stored():
            pass
        some_written.touch()

    looking = threading.Thread(target=look)
    looking.start()
    frame = failing(_frame(spark), tmp_path / "failed", attempts=3, after=some_written)
    with pytest.raises(Exception, match="the task fails after all its rows"):
        write(frame, pages.name, catalog=CATALOG, transaction_rows=100).save()
    looking.join(60)
    expected = _expected()
    left = pages.stored()
    assert left
    assert all(expected[url] == cells for url, cells in left.items())
    write(_frame(spark), pages.name, catalog=CATALOG).save()
    assert pages.stored() == expected


def test_reads_settle_abandoned_locks(read: Read, db: percolator.Database) -> None:
    """They belong to a client that died after it had committed the primary."""
    pages = Pages(db, 40)
    engine = db._asynchronous.internal.engine

    async def leave_behind() -> None:
        deadline = engine.now() + 10
        info = await engine.catalog.table(pages.name, deadline)
        start = await engine.env.timestamps.get()
        writes = {
            CellAddress(info.table_id, url.encode(), b"visits"): (KIND_PUT, bytes(7) + b"\x63")
            for url in ("a00001", "c00001", "d00001")
        }
        write = WriteSteps(start, writes, 1024)
        steps = [write.prewrite(cell, start + 1, 50) for cell in write.cells]
        assert await engine.router.mutate(steps, deadline) == [APPLIED] * 3
        commit = await engine.env.timestamps.get()
        step = write.commit_primary(info.schema, start + 1, commit)
        assert await engine.router.mutate([step], deadline) == [APPLIED]

    loop_thread.shared().call(leave_behind)
    some = read(pages.name, catalog=CATALOG, keys='["a00001", "c00001"]').load()
    assert [row.visits for row in some.collect()] == [99, 99]
    frame = read(pages.name, catalog=CATALOG).load().where("visits = 99")
    assert sorted(row.url for row in frame.collect()) == ["a00001", "c00001", "d00001"]


def test_reads_follow_tablets_that_split_or_moved_after_planning(
    read: Read, db: percolator.Database, cluster: LocalCluster
) -> None:
    pages = Pages(db, ROWS)
    frame = read(pages.name, catalog=CATALOG).load()
    assert frame._jdf.queryExecution().executedPlan() is not None  # the plan is made here
    engine = db._asynchronous.internal.engine
    master = engine.world.network

    async def move() -> None:
        info = await engine.catalog.table(pages.name, engine.now() + 10)
        tablets = await engine.catalog.all_tablets(info.table_id, engine.now() + 10)
        call = master.unary(cluster.address, methods.MOVE_TABLET)
        servers = {cluster.processes[f"tabletserver-{n}"].address for n in (1, 2)}
        moved = next(one for one in tablets if one.start == b"c")
        (other,) = servers - {moved.address}
        request = master_pb2.MoveTabletRequest(tablet_id=moved.tablet_id, server=other)
        deadline = engine.now() + 20
        while True:
            try:
                await call(request, 20.0)
            except InvalidArgument:
                # Spark's processes may have kept a server silent for seconds.
                if engine.now() > deadline:
                    raise
                await engine.world.clock.sleep(0.1)
            else:
                return

    pages.split(cluster.address, b"b00500")
    loop_thread.shared().call(move)
    assert {row.url: (row.title, row.visits) for row in frame.collect()} == _expected()


def test_a_tablet_server_dies_while_spark_writes_and_no_row_is_lost(
    write: Any, db: percolator.Database, spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    pages = Pages(db)
    server_is_dead = tmp_path / "dead"
    failed: list[BaseException] = []

    def run() -> None:
        try:
            options = {"catalog": CATALOG, "transaction_rows": 20, "transactions_in_flight": 1}
            # Spark passes rows on in batches of this size; the first ones are written meanwhile.
            spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 500)
            frame = halting(_frame(spark, 4 * ROWS), 6_000, server_is_dead)
            write(frame, pages.name, **options).save()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failed.append(error)
        finally:
            spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")

    job = threading.Thread(target=run)
    job.start()
    while len(pages.stored()) < 500 and job.is_alive():
        pass
    cluster.processes["tabletserver-1"].kill()
    under_way = job.is_alive()
    server_is_dead.touch()
    job.join(100)
    cluster.restart("tabletserver-1")
    assert failed == []
    assert under_way
    assert pages.stored() == _expected(4 * ROWS)


def test_an_atomic_job_is_whole_though_its_tablets_move_and_a_server_dies(
    gates: Gates,
    read: Read,
    db: percolator.Database,
    spark: SparkSession,
    cluster: LocalCluster,
) -> None:
    """Both while its tasks have locked a part of their rows."""
    pages = Pages(db, 8)
    gate = f"{pages.name}.middle"
    gates.close(gate)
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    failed: list[BaseException] = []

    def run() -> None:
        try:
            writer = _frame(spark).write.format("gated").options(**given, atomic="true")
            writer.mode("overwrite").save()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failed.append(error)

    job = threading.Thread(target=run)
    job.start()

    def require_job() -> None:
        assert job.is_alive(), failed

    gates.wait(gate, require_job)
    old = pages.stored()
    pages.flush(cluster.address)
    cluster.processes["tabletserver-1"].kill()
    gates.open(gate)
    job.join(200)
    cluster.restart("tabletserver-1")
    assert failed == []
    assert set(old) == set(keys(8))
    assert pages.stored() == _expected()
    cells = read(pages.name).load().select("commit_timestamp").collect()
    assert len({cell.commit_timestamp for cell in cells}) == 1
