"""Writes that depend on what is there: rows that changed meanwhile are refused, changes merged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

import percolator
from percolator import aio
from percolator.errors import InvalidArgument, RowChanged, SchemaError, SnapshotTooOld
from percolator.spark import merge, timestamp_of
from percolator.spark.options import WriteOptions
from percolator.spark.transaction_writer import Transactions
from percolator.spark.writers import writer_of
from tests.spark.tables import CATALOG, Pages, Read

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FIELDS = [StructField("url", StringType()), StructField("visits", LongType())]


@pytest.fixture
def pages(db: percolator.Database) -> Pages:
    """A table of eight rows."""
    return Pages(db, 8)


def _write(cluster: Any, pages: Pages, rows: Mapping[str, int | None], **options: Any) -> Any:
    """Writes as one task does, without Spark."""
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    given |= {name: str(value) for name, value in options.items()}
    writer: Any = writer_of(WriteOptions.parse(given), StructType(FIELDS))
    visits = pa.array(list(rows.values()), pa.int64())
    return writer.write(iter([pa.record_batch([pa.array(list(rows)), visits], ["url", "visits"])]))


# ---------------------------------------------------------------------------- if_unchanged_since


def test_a_lost_update_is_refused(
    read: Read, write: Any, pages: Pages, db: percolator.Database, spark: SparkSession
) -> None:
    frame = read(pages.name, catalog=CATALOG).load()
    raised = frame.selectExpr("url", "visits + 100 AS visits")
    since = timestamp_of(frame)
    with db.transaction() as tx:
        tx.set("c00000", pages.visits, 7)
    options = {"catalog": CATALOG, "if_unchanged_since": int(since)}
    with pytest.raises(Exception, match=f"row 'c00000' of table '{pages.name}' was written at"):
        write(raised.where("url < 'd'"), pages.name, **options).save()
    assert pages.stored()["c00000"] == ("title of c00000", 7)
    write(raised.where("url >= 'd'"), pages.name, **options).save()
    assert pages.stored()["d00001"] == ("title of d00001", 107)
    with pytest.raises(Exception, match=r"row 'd0000.' of table"):
        write(raised.where("url >= 'd'"), pages.name, **options).save()


def test_what_was_created_or_deleted_or_written_in_another_column_is_refused(
    cluster: Any, pages: Pages, db: percolator.Database
) -> None:
    since = int(db.timestamp())
    with db.transaction() as tx:
        tx.set("a-new", pages.visits, 1)
        tx.delete("b00000", pages.visits)
        tx.set("c00000", pages.title, "another")
    for row in ("a-new", "b00000", "c00000"):
        with pytest.raises(RowChanged) as raised:
            _write(cluster, pages, {"a00000": 5, row: 5}, if_unchanged_since=since)
        assert raised.value.row == row.encode()
    assert pages.stored()["a00000"] == ("title of a00000", 0), "the transaction is refused whole"
    _write(cluster, pages, {"a00000": 5, "z": 5}, if_unchanged_since=since)
    assert (pages.stored()["a00000"][1], pages.stored()["z"]) == (5, (None, 5))


def test_a_row_is_refused_that_changes_between_the_look_and_the_commit(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages, db: percolator.Database
) -> None:
    """Even in a column that the frame does not have."""
    since = int(db.timestamp())
    reviewed = Transactions._reviewed
    raced: list[bool] = []

    async def overtaken(self: Transactions, *arguments: Any, **named: Any) -> Any:
        left = await reviewed(self, *arguments, **named)
        if not raced:
            raced.append(True)
            async with self._here.database.transaction() as other:
                await other.set("a00000", pages.title, "meanwhile")
        return left

    monkeypatch.setattr(Transactions, "_reviewed", overtaken)
    with pytest.raises(RowChanged, match="column 'meta:title'"):
        _write(cluster, pages, {"a00000": 5}, if_unchanged_since=since)
    assert pages.stored()["a00000"] == ("meanwhile", 0)


def test_a_later_attempt_leaves_what_the_first_one_has_written(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], pages: Pages, db: percolator.Database
) -> None:
    since = int(db.timestamp())
    options = WriteOptions.parse(given | {"if_unchanged_since": str(since)})
    writer: Any = writer_of(options, StructType(FIELDS))
    batches = [pa.record_batch({"url": [url], "visits": [9]}) for url in ("a00000", "b00000")]
    assert writer.write(iter(batches[:1])).cells == 1
    monkeypatch.setattr("percolator.spark.transaction_writer._is_first_attempt", lambda: False)
    again = writer.write(iter(batches))
    assert (again.cells, again.equal) == (1, 1)
    with db.transaction() as tx:
        tx.set("a00000", pages.title, "another's")
    with pytest.raises(RowChanged):
        writer.write(iter(batches))


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ({"skip_equal": "true"}, {"title": "title of a00000", "visits": 9}),
        ({"operation": "merge", "delete_field": "gone"}, {"visits": 9, "gone": True}),
    ],
    ids=["equal cells", "deletions of nothing"],
)
def test_a_later_attempt_knows_the_first_one_without_what_that_has_left_out(
    monkeypatch: pytest.MonkeyPatch,
    cluster: Any,
    pages: Pages,
    db: percolator.Database,
    more: Any,
    row: Any,
) -> None:
    with db.transaction() as tx:
        if "gone" in row:
            tx.delete("a00000", pages.title)
    since = str(int(db.timestamp()))
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **more}
    options = WriteOptions.parse(given | {"if_unchanged_since": since})
    batch = pa.record_batch({"url": ["a00000"], **{name: [value] for name, value in row.items()}})
    writer: Any = writer_of(options, from_arrow_schema(batch.schema))
    assert writer.write(iter([batch])).cells == 1
    monkeypatch.setattr("percolator.spark.transaction_writer._is_first_attempt", lambda: False)
    assert writer.write(iter([batch])).cells == 0


def test_an_unknown_outcome_is_not_taken_for_the_write_of_another(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages, db: percolator.Database
) -> None:
    commit = aio.Transaction.commit
    answers: list[Any] = []

    async def commit_without_answer(self: aio.Transaction, **named: Any) -> Any:
        answers.append(await commit(self, **named))
        if len(answers) == 1:
            raise percolator.OutcomeUnknown("no answer")
        return answers[-1]

    async def resolve(self: aio.Transaction, **_: Any) -> Any:
        raise percolator.Unavailable("no answer either")

    monkeypatch.setattr(aio.Transaction, "commit", commit_without_answer)
    monkeypatch.setattr(aio.Transaction, "resolve", resolve)
    _write(cluster, pages, {"a00000": 5}, if_unchanged_since=int(db.timestamp()))
    assert pages.stored()["a00000"] == ("title of a00000", 5)


def test_history_that_is_gone_is_not_taken_for_unchanged(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, pages: Pages, db: percolator.Database
) -> None:
    """A cell that is not there may have been deleted, and its deletion collected."""

    async def gone(*_: Any, **__: Any) -> Any:
        raise SnapshotTooOld("the history is gone")

    monkeypatch.setattr(aio.Snapshot, "get_cells", gone)
    since = int(db.timestamp())
    with pytest.raises(SnapshotTooOld):
        _write(cluster, pages, {"new": 5}, if_unchanged_since=since)
    _write(cluster, pages, {"a00000": 5}, if_unchanged_since=since)


# ---------------------------------------------------------------------------- merge


CHANGES = "url string, op string, visits bigint"


def test_changes_are_merged_by_key(
    given: dict[str, str], pages: Pages, spark: SparkSession
) -> None:
    changes = [("a00000", "U", 50), ("b00000", "D", None), ("e", "I", 5), ("f", "D", None)]
    frame = spark.createDataFrame(changes, CHANGES)
    stored: dict[str, Any] = {}
    for _ in range(2):  # a merge may be repeated
        merge(frame, **given, delete_where="op = 'D'")
        stored = pages.stored()
        assert stored["a00000"] == ("title of a00000", 50)
        assert stored["e"] == (None, 5)
        assert sorted(stored) == ["a00000", "a00001", "b00001", "c00000", "c00001", "d00000",
                                  "d00001", "e"]  # fmt: skip
    with pytest.raises(SchemaError, match="field 'op' is not in the catalogue, nor used"):
        merge(frame, **given, delete_where="visits IS NULL")
    with pytest.raises(Exception, match="key appears twice"):
        merge(frame.union(frame).coalesce(1), **given, delete_where="op = 'D'")
    assert pages.stored() == stored


def test_a_merge_inserts_only_or_updates_only(cluster: Any, pages: Pages) -> None:
    rows = {"a00000": 5, "new": 5}
    _write(cluster, pages, rows, operation="merge", matched="skip", nulls="skip")
    assert (pages.stored()["a00000"][1], pages.stored()["new"][1]) == (0, 5)
    rows = {"a00000": 6, "newer": 6}
    done = _write(cluster, pages, rows, operation="merge", not_matched="skip")
    assert (pages.stored()["a00000"][1], "newer" in pages.stored()) == (6, False)
    assert (done.cells, done.equal) == (1, 1)


def test_a_merge_that_only_inserts_leaves_rows_alone_of_which_it_has_nulls(
    cluster: Any, pages: Pages
) -> None:
    before = pages.stored()
    rows = {"a00000": None, "new": None, "newer": 5}
    _write(cluster, pages, rows, operation="merge", matched="skip", nulls="delete")
    assert pages.stored() == before | {"newer": (None, 5)}


def test_a_merge_conflicts_with_what_would_change_its_decision(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, db: percolator.Database
) -> None:
    """A row appears between the look and the commit: an insert-only merge must not touch it."""
    pages = Pages(db)
    reviewed = Transactions._reviewed
    raced: list[bool] = []

    async def overtaken(self: Transactions, *arguments: Any, **named: Any) -> Any:
        left = await reviewed(self, *arguments, **named)
        if not raced:
            raced.append(True)
            async with self._here.database.transaction() as other:
                await other.set("a", pages.title, "first")
        return left

    monkeypatch.setattr(Transactions, "_reviewed", overtaken)
    _write(cluster, pages, {"a": 5}, operation="merge", matched="skip")
    assert pages.stored() == {"a": ("first", None)}


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"matched": "skip"}, "matched", "needs operation 'merge'"),
        ({"operation": "merge", "matched": "delete"}, "matched", "update, skip"),
        ({"operation": "merge", "catalog": None}, "operation", "needs a catalog"),
        ({"operation": "merge", "delete_field": "gone"}, "delete_field", "no boolean field 'gone'"),
        ({"if_unchanged_since": "2026-01-01"}, "if_unchanged_since", "expected a timestamp"),
        ({"if_unchanged_since": str(1 << 62)}, "if_unchanged_since", "is in the future"),
        (
            {"if_unchanged_since": "7", "operation": "bulk_load"},
            "if_unchanged_since",
            "leave it out",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    cluster: Any, db: percolator.Database, options: dict[str, Any], field: str, reason: str
) -> None:
    pages = Pages(db)
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG} | options
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(InvalidArgument, match=reason) as raised:
        writer_of(WriteOptions.parse(given), StructType(FIELDS))
    assert raised.value.field == field


def test_all_cells_that_may_be_locked_count_for_the_size_of_a_transaction(
    cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db)
    columns = {f"c{n}": {"type": "integer"} for n in range(200)} | {"visits": {"type": "integer"}}
    catalog = json.dumps({"key": {"name": "url", "type": "text"}, "columns": columns})
    given = {"address": cluster.address, "table": pages.name, "catalog": catalog}
    writer_of(WriteOptions.parse(given), StructType(FIELDS))
    merging = given | {"operation": "merge"}
    with pytest.raises(InvalidArgument, match="498 rows of 201 fields"):
        writer_of(WriteOptions.parse(merging | {"transaction_rows": "498"}), StructType(FIELDS))
    made: Any = writer_of(WriteOptions.parse(merging), StructType(FIELDS))
    assert made._options.transaction_rows == 497, "without the option, as many as fit"


def test_equal_values_that_expire_are_written_again_with_skip_equal(
    cluster: Any, pages: Pages, db: percolator.Database
) -> None:
    rows = {"a00000": 0, "new": 1}
    assert _write(cluster, pages, rows, skip_equal="true").cells == 1
    db.set_ttl(pages.visits, timedelta(days=1))
    again = _write(cluster, pages, rows, skip_equal="true")
    assert (again.cells, again.equal) == (2, 0)


def test_wide_frames_are_written_without_an_option(cluster: Any, db: percolator.Database) -> None:
    pages = Pages(db)
    names = [f"c{n}" for n in range(150)]
    columns = {name: {"type": "integer"} for name in names}
    catalog = json.dumps({"key": {"name": "url", "type": "text"}, "columns": columns})
    schema = StructType([FIELDS[0], *(StructField(name, LongType()) for name in names)])
    given = {"address": cluster.address, "table": pages.name, "catalog": catalog}
    urls = [f"a{number}" for number in range(10)]
    batch = pa.record_batch({"url": urls, **dict.fromkeys(names, pa.array(range(10)))})
    for options in ({}, {"operation": "merge"}, {"skip_equal": "true"}):
        writer: Any = writer_of(WriteOptions.parse(given | options), schema)
        written = writer.write(iter([batch]))
        assert written.cells + written.equal == 1_500
    loaded = given | {"table": Pages(db).name, "operation": "bulk_load"}
    loading: Any = writer_of(WriteOptions.parse(loaded), schema)
    assert loading.write(iter([batch])).cells == 1_500
    loading.abort([])
