"""Jobs while tasks fail, tablets move and servers die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import DataFrameReader, SparkSession

import percolator
import percolator.spark
from percolator.blocking import loop_thread
from percolator.errors import CellAddress, InvalidArgument
from percolator.formats.records import KIND_PUT
from percolator.protocol.write_set import WriteSteps
from percolator.routing.cells import APPLIED
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import bulk_load
from percolator.v1 import master_pb2
from percolator.wire import methods
from tests.spark.driver_program import start_stream, write_batch
from tests.spark.drivers import Driver, killed
from tests.spark.gates import Gates
from tests.spark.tables import (
    CATALOG,
    PAGES,
    Followed,
    Pages,
    Read,
    Rows,
    failing,
    frame_of,
    halting,
    keys,
    rows_of,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = 4_000


def test_the_rows_are_right_after_a_task_failed_at_its_end_and_ran_again(
    write: Any, pages: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    frame = failing(frame_of(spark, ROWS), tmp_path / "failed", attempts=1)
    write(frame, pages.name, catalog=CATALOG, transaction_rows=100).save()
    assert (tmp_path / "failed").exists()
    assert pages.stored() == rows_of(ROWS)


def test_a_job_that_fails_leaves_whole_transactions_and_can_be_run_again(
    write: Any, pages: Pages, spark: SparkSession, tmp_path: Path
) -> None:
    some_written = tmp_path / "written"

    def look() -> None:
        while not pages.stored():
            pass
        some_written.touch()

    looking = threading.Thread(target=look)
    looking.start()
    frame = failing(frame_of(spark, ROWS), tmp_path / "failed", attempts=3, after=some_written)
    with pytest.raises(Exception, match="the task fails after all its rows"):
        write(frame, pages.name, catalog=CATALOG, transaction_rows=100).save()
    looking.join(60)
    expected = rows_of(ROWS)
    left = pages.stored()
    assert left
    assert all(expected[url] == cells for url, cells in left.items())
    write(frame_of(spark, ROWS), pages.name, catalog=CATALOG).save()
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
        steps = [write.prewrite_step(cell, start + 1, 50) for cell in write.cells]
        assert await engine.router.mutate(steps, deadline) == [APPLIED] * 3
        commit = await engine.env.timestamps.get()
        step = write.commit_primary_step(info.schema, start + 1, commit)
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
    assert {row.url: (row.title, row.visits) for row in frame.collect()} == rows_of(ROWS)


def test_a_tablet_server_dies_while_spark_writes_and_no_row_is_lost(
    write: Any, pages: Pages, spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    server_is_dead = tmp_path / "dead"
    failed: list[BaseException] = []

    def run() -> None:
        try:
            options = {"catalog": CATALOG, "transaction_rows": 20, "transactions_in_flight": 1}
            # Spark passes rows on in batches of this size; the first ones are written meanwhile.
            spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 500)
            frame = halting(frame_of(spark, 4 * ROWS), 6_000, server_is_dead)
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
    assert pages.stored() == rows_of(4 * ROWS)


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
            writer = frame_of(spark, ROWS).write.format("gated").options(**given, atomic="true")
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
    assert pages.stored() == rows_of(ROWS)
    cells = read(pages.name).load().select("commit_timestamp").collect()
    assert len({cell.commit_timestamp for cell in cells}) == 1


# The library inside Spark executors, which fork: each process opens its own channels.

PARTITIONS = 4
TIMESTAMPS_EACH = 200


class Relay:
    """A second address for a server, until the relay is closed."""

    def __init__(self, server: str) -> None:
        self._host, _, self._port = server.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._listening = loop_thread.shared().call(self._listen)
        self.address = f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        async def close() -> None:
            self._listening.close()
            for writer in self._writers:
                writer.close()

        loop_thread.shared().call(close)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._join, "127.0.0.1", 0)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, there_writer]
        await asyncio.gather(_pass_on(reader, there_writer), _pass_on(there_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except ConnectionError:
        pass  # one of the two sides has closed
    writer.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_executors_that_cannot_reach_the_cluster_name_the_option_and_the_address(
    read: Callable[..., DataFrameReader], db: percolator.Database, cluster: LocalCluster
) -> None:
    pages, relay = Pages(db, 4), Relay(cluster.address)
    options = {"address": relay.address, "catalog": CATALOG, "timeout_seconds": 2}
    frame = read(pages.name, **options).load().where("url = 'a00000'")
    assert (
        frame._jdf.queryExecution().executedPlan() is not None
    )  # the driver has reached the cluster
    relay.close()
    with pytest.raises(Exception, match=f"address: no cluster answers at {relay.address} from"):
        frame.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_timestamps_taken_by_executors_are_unique_and_increase(
    spark: SparkSession, cluster: LocalCluster
) -> None:
    address = cluster.processes["oracle"].address

    # Inside the test, so that it is pickled by value: executors do not know this module.
    def take(partition: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        import asyncio

        from percolator.wire.channels import GrpcNetwork
        from percolator.wire.timestamp_source import TimestampSource
        from percolator.world import MachineClock, World, machine_random

        async def timestamps() -> list[int]:
            network = GrpcNetwork()
            source = TimestampSource(World(MachineClock(), network, machine_random()), [address])
            try:
                return [await source.get() for _ in range(TIMESTAMPS_EACH)]
            finally:
                await source.close()
                await network.close()

        for number in partition:
            yield number, asyncio.run(timestamps())

    numbers = spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS)
    taken = dict(numbers.mapPartitions(take).collect())

    assert sorted(taken) == list(range(PARTITIONS))
    everything = [timestamp for timestamps in taken.values() for timestamp in timestamps]
    assert len(set(everything)) == PARTITIONS * TIMESTAMPS_EACH
    assert all(timestamps == sorted(timestamps) for timestamps in taken.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_python_worker_has_one_connection_for_all_its_tasks(
    spark: SparkSession, cluster: LocalCluster, db: percolator.Database
) -> None:
    pages, address = Pages(db, 4), cluster.address
    name = pages.name

    def look(numbers: Iterable[int]) -> Iterator[tuple[int, int, bool, int]]:
        import gc
        import os

        import percolator.spark
        from percolator import Table, codecs

        found = percolator.spark.database(address)
        with found.snapshot() as snapshot:
            titles = Table(name).column("meta:title", codecs.text)
            read = snapshot.get("a00000", titles) == "title of a00000"
        yield os.getpid(), id(found), read, gc.get_freeze_count()

    looked = []
    for _ in range(2):
        numbers = spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS)
        looked += numbers.mapPartitions(look).collect()
    assert all(read for _, _, read, _ in looked)
    processes = {process for process, *_ in looked}
    assert len({(process, database) for process, database, *_ in looked}) == len(processes)
    assert len(processes) < len(looked)
    assert all(frozen for *_, frozen in looked), "Spark collects garbage after each task"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_connection_that_a_task_has_closed_is_made_again(cluster: LocalCluster) -> None:
    """`with percolator.spark.database() as db` is easily written, and closes it for all others."""
    with percolator.spark.database(cluster.address) as first:
        assert percolator.spark.database(cluster.address) is first
    again = percolator.spark.database(cluster.address)
    assert again.timestamp()
    assert percolator.spark.database(cluster.address) is again


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_captures_a_database_is_refused_with_what_to_use_instead(
    spark: SparkSession, db: percolator.Database
) -> None:
    frame = spark.range(2)
    with pytest.raises(Exception, match=r"call percolator\.spark\.database\(\) instead"):
        frame.foreachPartition(lambda rows: db.close())


# Executors that are processes of their own, on two hosts: killed, and raced by speculation.

PROCESSES_ROWS = 400


def _plan(pages: Pages, cluster: LocalCluster) -> dict[str, Any]:
    rows = [(key, f"new {key}", 1) for key in keys(PROCESSES_ROWS)]
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    return {"rows": rows, "mode": "overwrite", "options": options}


def _new() -> Rows:
    return {key: (f"new {key}", 1) for key in keys(PROCESSES_ROWS)}


def _executor_of(worker: int) -> psutil.Process:
    """The executor that has started this Python worker."""
    parents = psutil.Process(worker).parents()
    return next(one for one in parents if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))


def test_jobs_are_whole_though_tasks_run_twice_and_an_executor_is_killed(
    gates: Gates, db: percolator.Database, cluster: LocalCluster, tmp_path: Path
) -> None:
    """A task of the first job halts for good: speculation runs it again. When both tasks of the
    second job have locked some rows, the executor of one is killed."""
    slow, other = Pages(db, 8), Pages(db, 8)
    first = f"{slow.name}.middle.0.0"
    tasks = [f"{other.name}.middle.{task}" for task in (0, 1)]
    for gate in (first, f"{tasks[0]}.0", f"{tasks[1]}.0"):
        gates.close(gate)
    plans = [_plan(slow, cluster), _plan(other, cluster)]
    with Driver(gates, tmp_path, writes=plans, cluster=True) as driver:
        attempts = {driver.halted(first), driver.halted(f"{slow.name}.middle.0.1")}
        assert len(attempts) == 2
        executors = [_executor_of(driver.halted(f"{task}.0")) for task in tasks]
        assert executors[0] != executors[1]
        assert killed(executors[1])
        gates.forget(f"{tasks[1]}.0")
        for task in tasks:
            gates.open(f"{task}.0")
        assert driver.ended() == {slow.name: "", other.name: ""}
    # It ran again as attempt 1, or as attempt 0 of the whole stage, whose input was lost.
    assert gates.reached(f"{tasks[1]}.0") or gates.reached(f"{tasks[1]}.1")
    for pages in (slow, other):
        assert pages.stored() == _new()
        assert len(driver.moments[pages.name]) == 2 * PROCESSES_ROWS
        assert len(set(driver.moments[pages.name])) == 1


# `kill -9` of a driver, with all that it has started, while it writes and while its streams run.
#
# One driver has several writes and streams, each of which halts at another step. One kill ends
# all of them: each test of a step counts that it was halted there.

KILLED_ROWS = 400
WRITE_STEPS = ("middle", "before", "after")
SOURCE_STEPS = ("asked", "planned", "noted")
SINK_STEPS = ("middle", "before", "after")
COMMITS = 4
KEEP_SECONDS = 15
"""The least. Only time tells others that a driver is dead."""


@dataclass
class Write:
    """An atomic write that replaces a table, and where it halts."""

    pages: Pages
    old: Rows
    plan: dict[str, Any]

    @property
    def new(self) -> Rows:
        return {url: (title, visits) for url, title, visits in self.plan["rows"]}


@dataclass
class Stream:
    """A stream from one table into another one, and where it halts."""

    source: Followed
    copy: Followed
    plan: dict[str, Any]


class Interrupted:
    """The work of the driver when it was killed."""

    def __init__(self) -> None:
        self.writes: dict[str, Write] = {}
        self.streams: dict[str, Stream] = {}
        self.halted: dict[str, int] = {}
        """The process at each gate."""
        self.killed: set[int] = set()


def _write(db: percolator.Database, address: str, number: int) -> Write:
    pages = Pages(db, 8)
    rows = [(key, f"new {key}", number) for key in keys(KILLED_ROWS)]
    options = {"address": address, "table": pages.name, "catalog": CATALOG, "atomic": "true"}
    options["keep_seconds"] = str(KEEP_SECONDS)
    return Write(pages, pages.stored(), {"rows": rows, "mode": "overwrite", "options": options})


def _stream(db: percolator.Database, address: str, checkpoint: Path) -> Stream:
    source, copy = Followed(db), Followed(db)
    given = {"address": address, "catalog": CATALOG}
    began = {"table": source.name, "starting_from": str(int(source.began))}
    sink = {
        "table": copy.name,
        "checkpointLocation": str(checkpoint),
        "keep_seconds": str(KEEP_SECONDS),
    }
    _commit_some(source)
    return Stream(source, copy, {"source": given | began, "sink": given | sink})


def _commit_some(source: Followed) -> None:
    """Each commit has eight rows of one tablet, of which a task locks the first before the last."""
    for number in range(COMMITS):
        with source.db.transaction() as tx:
            for row in range(number, number + 8):
                tx.set(f"a{row}", source.title, f"title {number}")
                tx.set(f"a{row}", source.visits, number)


@pytest.fixture(scope="module")
def interrupted(
    gates: Gates,
    db: percolator.Database,
    cluster: LocalCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Interrupted:
    directory, found, address = tmp_path_factory.mktemp("driver"), Interrupted(), cluster.address
    closed: list[str] = []
    for number, step in enumerate(WRITE_STEPS):
        write = found.writes[step] = _write(db, address, number)
        closed.append(f"{write.pages.name}.{step}")
    for place, steps in (("source", SOURCE_STEPS), ("sink", SINK_STEPS)):
        for step in steps:
            stream = _stream(db, address, directory / f"{place}-{step}")
            found.streams[f"{place} {step}"] = stream
            halts = stream.source if place == "source" else stream.copy
            closed.append(f"{halts.name}.{step}")
    for gate in closed:
        gates.close(gate)
    writes = [one.plan for one in found.writes.values()]
    streams = [one.plan for one in found.streams.values()]
    with Driver(gates, directory, writes=writes, streams=streams) as driver:
        for gate in closed:
            found.halted[gate] = driver.halted(gate)
        found.killed = driver.kill()
    for gate in closed:
        gates.open(gate)
    return found


def test_the_driver_was_killed_at_every_step(interrupted: Interrupted) -> None:
    assert len(interrupted.halted) == len(WRITE_STEPS) + len(SOURCE_STEPS) + len(SINK_STEPS)
    assert set(interrupted.halted.values()) <= interrupted.killed


@pytest.mark.parametrize("step", WRITE_STEPS)
def test_a_driver_that_is_killed_leaves_all_rows_or_none_and_its_job_can_be_run_again(
    step: str, interrupted: Interrupted, spark: SparkSession
) -> None:
    write = interrupted.writes[step]
    assert write.pages.stored() == (write.new if step == "after" else write.old)
    write_batch(spark, write.plan)
    assert write.pages.stored() == write.new


@pytest.mark.parametrize(
    "step", [f"source {s}" for s in SOURCE_STEPS] + [f"sink {s}" for s in SINK_STEPS]
)
def test_a_stream_that_is_killed_and_restarted_writes_each_commit_once(
    step: str, interrupted: Interrupted, spark: SparkSession
) -> None:
    stream = interrupted.streams[step]
    assert len(stream.copy.history()) < COMMITS
    _commit_some(stream.source)
    start_stream(spark, stream.plan).awaitTermination()
    assert stream.copy.history() == stream.source.history()


# Frames, writers, views and helpers are used again, also after the whole cluster restarted.

SECOND_ROWS = 8


@pytest.fixture
def restart(cluster: LocalCluster) -> Callable[[], None]:
    """Kills all processes of the cluster, and starts them again."""

    def restarting() -> None:
        for process in cluster.processes.values():
            process.kill()
        for name in cluster.processes:
            cluster.restart(name)

    return restarting


def test_whatever_was_made_before_a_restart_of_the_cluster_works_after_it(
    spark: SparkSession,
    cluster: LocalCluster,
    db: percolator.Database,
    restart: Callable[[], None],
    tmp_path: Path,
) -> None:
    pages, copy, followed = (
        Pages(db, SECOND_ROWS),
        Pages(db),
        Pages(db, SECOND_ROWS, change_feed=True),
    )
    address = cluster.address
    given = {"address": address, "table": pages.name, "catalog": CATALOG}
    frame = spark.read.format("percolator").options(**given).load()
    rows = sorted(map(tuple, frame.collect()))
    new = spark.createDataFrame([("a00000", "new", 100), ("z", "new", 1)], PAGES)
    target = {**given, "table": copy.name}
    # Each of these is one object, which is used before and after.
    writers = {
        "append": new.write.format("percolator").options(**target).mode("append"),
        "atomic": new.write.format("percolator").options(**target, atomic="true").mode("append"),
        "overwrite": frame.write.format("percolator").options(**target).mode("overwrite"),
    }
    view = percolator.spark.view(
        spark, "used_twice", lambda snapshot: snapshot.table(pages.name, catalog=CATALOG),
        address=address,
    )  # fmt: skip
    seen: list[tuple[Any, ...]] = []
    stream = spark.readStream.format("percolator").options(**{**given, "table": followed.name})
    changes = stream.option("starting_from", "snapshot").load()
    following = changes.writeStream.option("checkpointLocation", str(tmp_path)).foreachBatch(
        lambda batch, _: seen.extend(map(tuple, batch.select("url", "change_kind").collect()))
    )

    def use(time: int) -> None:
        assert sorted(map(tuple, frame.collect())) == rows, "the frame reads at its snapshot"
        for name in ("append", "atomic"):
            writers[name].save()
            assert copy.stored()["z"] == ("new", 1)
            assert copy.stored()["a00000"] == ("new", 100)
        writers["overwrite"].save()
        assert sorted((url, *both) for url, both in copy.stored().items()) == rows
        with percolator.spark.together(address=address) as job:
            writer = new.write.format("percolator").options(**job.options, **_without(target))
            writer.mode("append").save()
        assert copy.stored()["z"] == ("new", 1)
        merged = {"table": copy.name, "catalog": CATALOG, "address": address}
        percolator.spark.merge(new, delete_where="url = 'z'", **merged)
        assert "z" not in copy.stored()
        with percolator.spark.snapshot(spark, address=address) as snapshot:
            table = snapshot.table(pages.name, catalog=CATALOG, columns="visits")
            assert table.count() == table.union(table).count() // 2 == len(pages.stored())
        with db.transaction() as tx:
            tx.set(f"used-{time}", pages.visits, time)
            tx.set(f"used-{time}", followed.visits, time)
        view.refresh()
        assert spark.table("used_twice").count() == SECOND_ROWS + time
        following.trigger(availableNow=True).start().awaitTermination()
        assert len(seen) == SECOND_ROWS + time
        loaded = Pages(db)
        bulk_load(new, **{**given, "table": loaded.name}, load_name=f"load-{time}")
        assert loaded.stored()["z"] == ("new", 1)
        assert new.rdd.mapPartitions(_timestamps(address)).count() == new.rdd.getNumPartitions()

    use(1)
    restart()
    use(2)
    view.drop()


def _without(options: dict[str, str]) -> dict[str, str]:
    """Options that `together` does not give."""
    return {name: value for name, value in options.items() if name != "address"}


def _timestamps(address: str) -> Callable[[Iterable[Any]], Iterable[int]]:
    def take(_: Iterable[Any]) -> Iterator[int]:
        yield int(percolator.spark.database(address).timestamp())

    return take
