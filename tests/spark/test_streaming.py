"""Spark streams the changes of a table: no row is lost or doubled, whatever is killed when.

A query's checkpoint is all that outlives it. So a query that was killed at some step of a batch is
one that is started with the checkpoint as it was then: `_killed` makes it so. Drivers that are
really killed are in test_killed_drivers.py.
"""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as spark_sql
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import (
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

import percolator
from percolator import codecs
from percolator.blocking import loop_thread
from percolator.services.local.cluster import LocalCluster
from percolator.spark import writers
from percolator.spark.chosen_rows import RowsBetween
from percolator.spark.options import StreamOptions
from percolator.spark.reader import TableRows
from percolator.spark.stream_reader import ChangeStreamReader, SnapshotRows
from percolator.spark.writers import Sink, sink_of
from percolator.v1.lockservice_pb2 import ListSessionsRequest
from percolator.wire.sessions import Sessions
from tests.spark.tables import CATALOG, PAGES, Followed, Pages, Read, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Write = Callable[..., DataFrameWriter]


class Stream:
    """A stream of a table, and a sink that replaces a batch when it gets it again."""

    def __init__(self, frame: DataFrame, checkpoint: Path) -> None:
        self.frame = frame
        self.checkpoint = checkpoint
        self.batches: dict[int, list[tuple[Any, ...]]] = {}
        self.write = self._keep
        self.runs = 0

    def _keep(self, frame: DataFrame, number: int) -> None:
        names = sorted(set(frame.columns) - {"commit_timestamp"})
        rows = sorted(map(tuple, frame.select("commit_timestamp", *names).collect()), key=repr)
        self.runs += 1
        assert self.batches.setdefault(number, rows) == rows, "a batch that is read again is equal"

    def start(self, **trigger: Any) -> Any:
        writing = self.frame.writeStream.option("checkpointLocation", str(self.checkpoint))
        return writing.foreachBatch(lambda *batch: self.write(*batch)).trigger(**trigger).start()

    def run(self) -> None:
        """Everything that is there by now."""
        self.start(availableNow=True).awaitTermination()

    def rows(self) -> list[tuple[Any, ...]]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]


@pytest.fixture
def stream(spark: SparkSession, cluster: LocalCluster, tmp_path: Path) -> Iterator[Any]:
    def streaming(table: str, **options: Any) -> Stream:
        given = {"address": cluster.address, "table": table, **options}
        frame = spark.readStream.format("percolator").options(**given).load()
        return Stream(frame, tmp_path / "checkpoint")

    yield streaming
    for query in spark.streams.active:
        query.stop()


def _cells(pages: Pages, after: int) -> list[tuple[Any, ...]]:
    """The changes that a program reads which follows the table, as `Stream` keeps them."""
    found = pages.db.changes(
        percolator.Table(pages.name, key=codecs.raw),
        after=percolator.Timestamp(after),
        until=pages.db.timestamp(),
        before=True,
    )
    return [
        (one.commit_timestamp, one.kind.value, one.column, one.key, one.raw_value) for one in found
    ]


def _killed(stream: Stream, step: str) -> None:
    """Takes the last batch back to an earlier step, as if the query had been killed there."""
    last = max(int(path.name) for path in (stream.checkpoint / "offsets").glob("[0-9]*"))
    logs = {"asked": ["commits", "offsets"], "planned": ["commits"]}
    for log in logs[step]:
        for name in (f"{last}", f".{last}.crc"):
            (stream.checkpoint / log / name).unlink(missing_ok=True)
    if step == "asked":
        del stream.batches[last]  # it was not even planned


def test_a_snapshot_then_changes_as_rows_of_the_catalogue(
    stream: Any, db: percolator.Database
) -> None:
    pages = Pages(db, 8, change_feed=True)
    found = stream(pages.name, catalog=CATALOG, starting_from="snapshot")
    names = ["url", "title", "visits", "change_kind", "commit_timestamp"]
    assert found.frame.columns == names
    found.run()
    by_url = {row[3]: (row[2], row[4], row[1]) for row in found.batches[0]}
    assert by_url == {
        url: (title, visits, "snapshot") for url, (title, visits) in pages.stored().items()
    }

    with db.transaction() as tx:
        tx.set("a00000", pages.visits, 100)
        tx.delete("b00000", pages.visits)
        tx.delete("b00000", pages.title)
        tx.set("e", pages.title, "new")
    with db.transaction() as tx:
        tx.set("a00000", pages.title, "renamed")
    found.run()
    assert [(row[1], row[3], row[2], row[4]) for row in found.batches[1]] == [
        ("delete", "b00000", None, None),
        ("insert", "e", "new", None),
        ("update", "a00000", "title of a00000", 100),
        ("update", "a00000", "renamed", 100),
    ]
    commits = {row[0] for row in found.batches[1]}
    assert len(commits) == 2
    found.run()
    assert sorted(found.batches) == [0, 1], "a trigger without changes makes no batch"


def test_a_query_that_is_killed_at_any_step_loses_and_doubles_nothing(
    stream: Any, db: percolator.Database
) -> None:
    pages = Pages(db, change_feed=True)
    begin = int(db.timestamp())
    found = stream(pages.name, starting_from=str(begin), rows_per_batch=6)
    number = 0

    def commit_some() -> None:
        nonlocal number
        for _ in range(4):
            number += 1
            with db.transaction() as tx:
                for letter in "abcd"[: number % 4 + 1]:
                    tx.set(f"{letter}{number % 3}", pages.visits, number)
                tx.delete(f"d{number % 2}", pages.title)

    def fails_before(frame: DataFrame, batch: int) -> None:
        raise RuntimeError("before the batch is written")

    def fails_after(frame: DataFrame, batch: int) -> None:
        found._keep(frame, batch)
        raise RuntimeError("after the batch was written")

    for step in ("asked", "planned"):
        commit_some()
        found.run()
        _killed(found, step)
    for write in (fails_before, fails_after):
        commit_some()
        found.write = write
        with pytest.raises(Exception, match="the batch"):
            found.run()
        found.write = found._keep
    commit_some()
    found.run()
    assert sorted(found.rows(), key=repr) == sorted(_cells(pages, begin), key=repr)
    assert found.runs > len(found.batches) > 6, "batches were read again"


def test_into_a_table_while_tablets_split_and_a_server_dies(
    stream: Any,
    write: Write,
    spark: SparkSession,
    cluster: LocalCluster,
    db: percolator.Database,
    tmp_path: Path,
) -> None:
    """The copy is what plain Python computes from the source, and so is its own stream."""
    source, copy = Pages(db, 40, change_feed=True), Pages(db, change_feed=True)
    found = stream(source.name, catalog=CATALOG, starting_from="snapshot", timeout_seconds=60)
    latest = spark_sql.struct("commit_timestamp", "change_kind", "title", "visits")

    def upsert(frame: DataFrame, number: int) -> None:
        newest = frame.groupBy("url").agg(spark_sql.max(latest).alias("row")).select("url", "row.*")
        gone = newest.where("change_kind = 'delete'").select("url")
        rows = newest.where("change_kind <> 'delete'").select("url", "title", "visits")
        write(rows, copy.name, catalog=CATALOG, nulls="delete", timeout_seconds=60).save()
        write(gone, copy.name, catalog=CATALOG, operation="delete", timeout_seconds=60).save()

    found.write = upsert
    query = found.start(processingTime="0 seconds")
    stop = threading.Event()

    def work() -> None:
        for number in range(150):
            with db.transaction() as tx:
                letter = "abcd"[number % 4]
                tx.set(f"{letter}{number % 7:05}", source.visits, number)
                tx.set(f"{letter}-new-{number % 10}", source.title, f"title {number}")
                if number % 5 == 0:
                    tx.delete(f"{letter}{number % 7:05}", source.visits)
                    tx.delete(f"{letter}{number % 7:05}", source.title)
        stop.set()

    working = threading.Thread(target=work)
    working.start()
    source.split(cluster.address, b"b00003")
    copy.split(cluster.address, b"c00003")
    cluster.processes["tabletserver-1"].kill()
    cluster.restart("tabletserver-1")
    working.join(120)
    assert stop.is_set()
    query.processAllAvailable()
    assert copy.stored() == source.stored()
    query.stop()
    shutil.rmtree(tmp_path / "checkpoint")
    chained = stream(copy.name, catalog=CATALOG, starting_from="snapshot")
    chained.run()
    assert {row[3]: (row[2], row[4]) for row in chained.rows()} == source.stored()


def test_a_value_that_has_expired_is_not_in_the_rows_of_later_commits(
    stream: Any, db: percolator.Database
) -> None:
    pages = Pages(db, change_feed=True)
    db.set_ttl(pages.title, timedelta(milliseconds=1))
    began = int(db.timestamp())
    for value in (pages.title, "short"), (pages.visits, 7), (pages.title, "again"):
        while db.get("a", pages.title) is not None:
            pass
        db.set_many([("a", dict([value]))])
    found = stream(pages.name, catalog=CATALOG, starting_from=str(began))
    found.run()
    assert [row[1:] for row in found.rows()] == [
        ("insert", "short", "a", None),
        ("insert", None, "a", 7),
        ("update", "again", "a", 7),
    ]


def test_to_be_away_for_too_long_is_an_error_unless_the_stream_may_begin_again(
    stream: Any, db: percolator.Database
) -> None:
    pages = Pages(db, 4, change_feed=True)
    options = {"catalog": CATALOG, "starting_from": "snapshot"}
    found = stream(pages.name, **options)
    found.run()
    # Without its feed for a moment, the table has no history from which the stream can continue.
    db.set_change_feed(pages.table, on=False)
    db.set_many([("a00000", {pages.visits: 7})])
    db.set_change_feed(pages.table, on=True)
    db.set_many([("b00000", {pages.visits: 8})])
    with pytest.raises(Exception, match=r"(?s)SnapshotTooOld.*failOnDataLoss=false"):
        stream(pages.name, **options).run()
    again = stream(pages.name, failOnDataLoss="false", **options)
    again.run()
    assert {row[3]: (row[2], row[4]) for row in again.rows()} == pages.stored()
    assert {row[1] for row in again.rows()} == {"snapshot"}


def test_a_process_that_remembers_a_dropped_table_reads_a_snapshot_of_its_successor(
    cluster: LocalCluster, db: percolator.Database
) -> None:
    """Spark uses the processes of its tasks again, for the query that begins again, too."""
    pages = Pages(db, 4, change_feed=True)
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    options = StreamOptions.parse(given | {"starting_from": "snapshot"})
    reader = ChangeStreamReader(options, StructType([StructField("url", StringType())]))

    def urls() -> list[str]:
        at = int(db.timestamp())
        batches = reader.read(SnapshotRows(TableRows((RowsBetween(b"", b""),)), at))
        return [url for batch in batches for url in batch.column("url").to_pylist()]

    assert urls() == keys(4)
    db.drop_table(pages.table)
    db.create_table(pages.table, change_feed=True)
    db.set_many([("new", {pages.visits: 1})])
    assert urls() == ["new"]


def test_a_running_query_holds_history_by_a_pin(stream: Any, db: percolator.Database) -> None:
    pages = Pages(db, 4, change_feed=True)
    found = stream(pages.name, catalog=CATALOG, starting_from="snapshot")
    seen = threading.Event()
    found.write = lambda frame, number: seen.set()
    query = found.start(processingTime="0 seconds")
    assert seen.wait(60)
    assert any(p.startswith("Spark stream on") for p in _pins(db))
    query.stop()


def _pins(db: percolator.Database) -> list[str]:
    owners = db._asynchronous.internal.engine.env.owners
    assert isinstance(owners, Sessions)

    async def listed() -> list[str]:
        request = ListSessionsRequest()
        page = await owners.calls.call(lambda stub: stub.list_sessions, request, 5.0)
        return [one.info.description for one in page.sessions if one.info.pin]

    return loop_thread.shared().call(listed)


def test_mistakes_are_reported_at_load(stream: Any, pages: Pages) -> None:
    with pytest.raises(Exception, match=r"(?s)has no change feed.*change-feed .* --on"):
        stream(pages.name, starting_from="now")
    with pytest.raises(Exception, match="there is no table 'nowhere'"):
        stream("nowhere", starting_from="now")
    with pytest.raises(Exception, match="neither a number nor"):
        stream(pages.name, starting_from="yesterday")


def test_a_stream_with_a_schema_is_checked_when_it_begins(
    cluster: LocalCluster, db: percolator.Database
) -> None:
    """Spark does not ask for a schema then, which is when others are checked."""
    pages, followed = Pages(db, 4), Pages(db, 4, change_feed=True)
    given = {"address": cluster.address, "starting_from": "now"}
    other = CATALOG.replace('"integer"', '"float"')

    def begin(table: str, catalog: str, visits: DataType) -> Any:
        options = StreamOptions.parse(given | {"table": table, "catalog": catalog})
        schema = StructType([StructField("url", StringType()), StructField("visits", visits)])
        reader = ChangeStreamReader(options, schema)
        return reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())

    with pytest.raises(percolator.InvalidArgument, match="has no change feed"):
        begin(pages.name, CATALOG, LongType())
    with pytest.raises(percolator.SchemaError, match="declares the codec float"):
        begin(followed.name, other, DoubleType())
    assert begin(followed.name, CATALOG, LongType())["after"]


# Streams into a table: every batch is written once, wherever its query was killed.
#
# A query that was killed after a batch was committed, and before its checkpoint said so, is one
# that is started again with a checkpoint that lacks the entry of that batch.

Run = Callable[[Pages], None]


@pytest.fixture
def run(spark: SparkSession, cluster: LocalCluster, tmp_path: Path) -> Iterator[Run]:
    """Writes what the files have into the table, each file in a batch of its own."""
    (tmp_path / "files").mkdir()

    def running(pages: Pages) -> None:
        given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
        files = spark.readStream.schema(PAGES).option("maxFilesPerTrigger", 1)
        writing = files.json(str(tmp_path / "files")).writeStream.format("percolator")
        writing = writing.options(**given, checkpointLocation=str(tmp_path / "checkpoint"))
        writing.trigger(availableNow=True).start().awaitTermination()

    yield running
    for query in spark.streams.active:
        query.stop()


def _file(directory: Path, number: int, *urls: str) -> None:
    rows = [{"url": url, "title": f"in {number}", "visits": number} for url in urls]
    text = "\n".join(json.dumps(row) for row in rows)
    (directory / "files" / f"{number}.json").write_text(text)


def _commits(read: Read, pages: Pages) -> dict[str, set[int]]:
    """When each row's cells were committed."""
    found: dict[str, set[int]] = {}
    for cell in read(pages.name).load().collect():
        found.setdefault(bytes(cell.row).decode(), set()).add(cell.commit_timestamp)
    return found


def test_a_batch_that_is_repeated_after_a_restart_writes_nothing(
    run: Run, read: Read, pages: Pages, db: percolator.Database, tmp_path: Path
) -> None:
    _file(tmp_path, 1, "a", "b", "c")
    run(pages)
    commits = _commits(read, pages)
    assert commits["a"] == commits["b"] == commits["c"]
    assert len(commits["a"]) == 1
    with db.transaction() as tx:  # a batch that is written again would write over this
        tx.set("a", pages.visits, 77)
    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)

    _file(tmp_path, 2, "d")
    run(pages)
    rows = pages.stored()
    assert rows == {
        "a": ("in 1", 77), "b": ("in 1", 1), "c": ("in 1", 1), "d": ("in 2", 2)
    }  # fmt: skip
    assert _commits(read, pages)["b"] == commits["b"]


def _sink(cluster: Any, pages: Pages) -> Sink:
    """A sink as a process of Spark's gets it."""
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    fields = [StructField("url", StringType()), StructField("visits", LongType())]
    made = sink_of({**options, "checkpointLocation": "x"}, StructType(fields), complete=False)
    found = pickle.loads(pickle.dumps(made))
    assert isinstance(found, Sink)
    return found


def _batch(visits: int, *urls: str) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"url": urls, "visits": pa.array([visits] * len(urls), pa.int64())})


def test_of_two_drivers_that_write_the_same_batch_one_commits_it(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages
) -> None:
    """The first one had looked which batches are committed when the second one took over. They have
    other rows, so only the number of the batch tells."""
    monkeypatch.setattr(writers, "_query", lambda: "two-drivers")
    before = _sink(cluster, pages)
    before.commit([before.write(_batch(0, "a"))], 0)
    first, second = _sink(cluster, pages), _sink(cluster, pages)
    locked = first.write(_batch(1, "a", "b"))
    look = Sink._marks

    def look_too_early(self: Sink, *given: Any) -> Any:
        seen = look(self, *given)
        if self is first:
            second.commit([second.write(_batch(2, "c", "d"))], 1)
        return seen

    monkeypatch.setattr(Sink, "_marks", look_too_early)
    with pytest.raises(percolator.ConflictError, match="was committed at"):
        first.commit([locked], 1)
    first.abort([locked], 1)
    assert {url: visits for url, (_, visits) in pages.stored().items()} == {"a": 0, "c": 2, "d": 2}


def test_a_batch_that_failed_is_written_when_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages
) -> None:
    monkeypatch.setattr(writers, "_query", lambda: "failed-once")
    first = _sink(cluster, pages)
    first.abort([first.write(_batch(1, "a", "b")), None], 0)
    assert pages.stored() == {}
    again = _sink(cluster, pages)
    _sink(cluster, pages).commit([again.write(_batch(1, "a", "b"))], 0)
    assert pages.stored() == {"a": (None, 1), "b": (None, 1)}
    _sink(cluster, pages).commit([], 1)


def test_a_copy_of_a_checkpoint_writes_into_another_table(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    """It has the id of the same query. Its batches are not those of the first table."""
    monkeypatch.setattr(writers, "_query", lambda: "copied")
    one, other = Pages(db), Pages(db)
    for number in range(3):
        made = _sink(cluster, one)
        made.commit([made.write(_batch(number, f"a{number}"))], number)
    for number in (1, 1, 2):  # copied after the first batch; the next one is repeated
        made = _sink(cluster, other)
        made.commit([made.write(_batch(number, f"b{number}"))], number)
    assert sorted(one.stored()) == ["a0", "a1", "a2"]
    assert sorted(other.stored()) == ["b1", "b2"]


def test_a_batch_that_is_older_than_the_newest_one_is_refused_and_not_lost_in_silence(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages
) -> None:
    monkeypatch.setattr(writers, "_query", lambda: "taken-back")
    for number in range(2):
        made = _sink(cluster, pages)
        made.commit([made.write(_batch(number, f"a{number}"))], number)
    old = _sink(cluster, pages)
    with pytest.raises(percolator.InvalidArgument, match=r"batch 0 .* was not written") as raised:
        old.commit([old.write(_batch(7, "b"))], 0)
    assert raised.value.field == "checkpointLocation"
    assert sorted(pages.stored()) == ["a0", "a1"]


# Two streams in a chain, each from a table into a table, compared with plain Python.

Chain = Callable[[Pages, Any, tuple[str, str]], StreamingQuery]


@pytest.fixture
def chain(spark: SparkSession, cluster: LocalCluster, tmp_path: Path) -> Iterator[Chain]:
    def chaining(source: Pages, sink: Followed, expressions: tuple[str, str]) -> StreamingQuery:
        given = {"address": cluster.address, "catalog": CATALOG, "timeout_seconds": "60"}
        reader = spark.readStream.format("percolator").options(**given, table=source.name)
        # A commit is never cut, so each is a batch of its own, and has each row once.
        reader = reader.options(starting_from=str(int(sink.began)), rows_per_batch=1)
        rows = reader.load().selectExpr("url", *expressions)
        writing = rows.writeStream.format("percolator").options(**given, table=sink.name)
        writing = writing.options(nulls="delete", checkpointLocation=str(tmp_path / sink.name))
        return writing.trigger(processingTime="0 seconds").start()

    yield chaining
    for query in spark.streams.active:
        query.stop()


def test_two_streams_do_what_plain_python_does_for_each_commit(
    chain: Chain, db: percolator.Database, cluster: LocalCluster
) -> None:
    """A server dies and tablets move meanwhile. Each commit of the first table is one of the second
    and of the third."""
    first, second, third = (Followed(db) for _ in range(3))
    queries = [
        chain(first, second, ("upper(title) AS title", "visits")),
        chain(second, third, ("title", "visits * 2 AS visits")),
    ]

    def commit(number: int) -> None:
        with db.transaction() as tx:
            for letter in "abcd"[: number % 4 + 1]:
                tx.set(f"{letter}{number % 2}", first.title, f"title {number}")
                tx.set(f"{letter}{number % 2}", first.visits, number)
            if number % 3 == 2:
                for column in (first.title, first.visits):
                    tx.delete("a0", column)

    for number in range(3):
        commit(number)
    cluster.processes["tabletserver-1"].kill()
    for number in range(3, 6):
        commit(number)
    cluster.restart("tabletserver-1")
    second.flush(cluster.address)
    commit(6)
    for query in queries:
        query.processAllAvailable()

    history = first.history()
    assert len(history) == 7
    upper = [
        {url: (title.upper(), visits) for url, (title, visits) in rows.items()} for rows in history
    ]
    assert second.history() == upper
    twice = [{url: (title, 2 * visits) for url, (title, visits) in rows.items()} for rows in upper]
    assert third.history() == twice
    assert third.stored() == twice[-1]
