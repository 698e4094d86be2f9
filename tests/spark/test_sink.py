"""Streams into a table: every batch is written once, wherever its query was killed.

A query that was killed after a batch was committed, and before its checkpoint said so, is one that
is started again with a checkpoint that lacks the entry of that batch.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
from percolator.services.local.cluster import LocalCluster
from percolator.spark import writers
from percolator.spark.writers import Sink, sink_of
from tests.spark.tables import CATALOG, PAGES, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]
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
    run: Run, read: Read, db: percolator.Database, tmp_path: Path
) -> None:
    pages = Pages(db)
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
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    """The first one had looked which batches are committed when the second one took over. They have
    other rows, so only the number of the batch tells."""
    monkeypatch.setattr(writers, "_query", lambda: "two-drivers")
    pages = Pages(db)
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
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    monkeypatch.setattr(writers, "_query", lambda: "failed-once")
    pages = Pages(db)
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
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    monkeypatch.setattr(writers, "_query", lambda: "taken-back")
    pages = Pages(db)
    for number in range(2):
        made = _sink(cluster, pages)
        made.commit([made.write(_batch(number, f"a{number}"))], number)
    old = _sink(cluster, pages)
    with pytest.raises(percolator.InvalidArgument, match=r"batch 0 .* was not written") as raised:
        old.commit([old.write(_batch(7, "b"))], 0)
    assert raised.value.field == "checkpointLocation"
    assert sorted(pages.stored()) == ["a0", "a1"]
