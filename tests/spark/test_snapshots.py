"""Frames of one instant, the timestamp of a frame, and views that can be refreshed."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrameReader, SparkSession

import percolator
from percolator import Timestamp
from percolator.errors import InvalidArgument, UsageError
from percolator.spark import snapshot, timestamp_of, view
from tests.spark.tables import CATALOG, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]


@pytest.fixture
def two(db: percolator.Database) -> tuple[Pages, Pages]:
    return Pages(db, 8), Pages(db, 8)


def _set_both(two: tuple[Pages, Pages], visits: int) -> None:
    with two[0].db.transaction() as tx:
        for pages in two:
            tx.set("a00000", pages.visits, visits)


def test_frames_of_a_snapshot_show_one_instant_however_often_they_are_used(
    spark: SparkSession, cluster: Any, two: tuple[Pages, Pages]
) -> None:
    _set_both(two, 1)
    with snapshot(spark, address=cluster.address) as s:
        one = s.table(two[0].name, catalog=CATALOG)
        _set_both(two, 2)
        other = s.table(two[1].name, catalog=CATALOG, key_prefix="a")
        part = one.where("visits = 1").select("url").cache()
        both = one.join(other, "url").where(one.visits == 1).select(one.visits, other.visits)
        try:
            for _ in range(2):
                assert [tuple(row) for row in both.collect()] == [(1, 1), (1, 1)]
                assert part.count() == 2
                assert one.union(other).where("url = 'a00000'").count() == 2
                _set_both(two, 3)
        finally:
            part.unpersist()
        assert timestamp_of(one) == timestamp_of(other) == timestamp_of(both) == s.timestamp
        with two[0].db.snapshot(at=s.timestamp) as client:
            assert client.get("a00000", two[0].visits) == 1


def test_a_snapshot_holds_one_pin_until_its_block_ends(
    spark: SparkSession, cluster: Any, two: tuple[Pages, Pages]
) -> None:
    with snapshot(spark, address=cluster.address) as s:
        s.table(two[0].name, catalog=CATALOG)
        s.table(two[1].name, catalog=CATALOG)
        assert s._pin is not None
        s._pin.check()
        pin = s._pin
    assert pin._asynchronous._session is None
    with pytest.raises(UsageError, match="the snapshot has ended"):
        s.table(two[0].name)


def test_a_snapshot_of_the_past(
    spark: SparkSession, cluster: Any, two: tuple[Pages, Pages]
) -> None:
    before = two[0].db.timestamp()
    _set_both(two, 9)
    with snapshot(spark, address=cluster.address, at=before) as s:
        for pages in two:
            assert s.table(pages.name, catalog=CATALOG).where("visits = 9").count() == 0
        assert s.timestamp == before
    future = datetime.now(UTC) + timedelta(days=2)
    with (
        snapshot(spark, address=cluster.address, at=future) as s,
        pytest.raises(InvalidArgument, match="in the future"),
    ):
        s.table(two[0].name)


def test_what_is_the_snapshots_to_give_is_refused(spark: SparkSession, cluster: Any) -> None:
    s = snapshot(spark, address=cluster.address)
    with pytest.raises(UsageError, match="begins with its block"):
        s.table("pages")
    with s, pytest.raises(InvalidArgument, match="as_of: is the snapshot's to give"):
        s.table("pages", as_of="2026-01-01T00:00:00Z")


def test_a_frame_tells_its_timestamp_wherever_a_field_is_left(
    read: Read, two: tuple[Pages, Pages], spark: SparkSession, tmp_path: Path
) -> None:
    before = two[0].db.timestamp()
    frame = read(two[0].name, catalog=CATALOG).load()
    at = timestamp_of(frame)
    assert before < at < two[0].db.timestamp()
    assert timestamp_of(frame.where("visits > 1").groupBy("title").count()) == at
    frame.write.parquet(str(tmp_path / "copy"))
    assert timestamp_of(spark.read.parquet(str(tmp_path / "copy"))) == at
    past = read(two[0].name, catalog=CATALOG, snapshot_ts=int(before)).load()
    assert timestamp_of(past) == before
    assert timestamp_of(read(two[0].name).load()) > at
    with pytest.raises(UsageError, match="fields of several snapshots"):
        timestamp_of(frame.crossJoin(past))
    with pytest.raises(UsageError, match="no field of the frame carries its timestamp"):
        timestamp_of(frame.selectExpr("visits + 1"))
    assert isinstance(at, Timestamp)


def test_a_frame_whose_rows_depend_on_several_snapshots_has_no_timestamp(
    read: Read, two: tuple[Pages, Pages], spark: SparkSession
) -> None:
    """The fields that are left are those of the newest one, which would hide lost updates."""
    old = read(two[0].name, catalog=CATALOG).load()
    new = read(two[0].name, catalog=CATALOG).load()
    old.createOrReplaceTempView("old_pages")
    new.createOrReplaceTempView("new_pages")
    queries = [
        new.union(old),
        new.exceptAll(old).select("url"),
        new.join(old, "url", "left_anti"),
        spark.sql("SELECT * FROM new_pages WHERE url IN (SELECT url FROM old_pages)"),
        spark.sql("SELECT url, (SELECT max(visits) FROM old_pages) AS most FROM new_pages"),
    ]
    for frame in queries:
        with pytest.raises(UsageError, match="fields of several snapshots"):
            timestamp_of(frame)
    for same in (new.union(new), spark.table("new_pages").cache(), new.localCheckpoint()):
        assert timestamp_of(same) == timestamp_of(new)
        same.unpersist()


def test_a_read_with_the_schema_of_another_frame_is_refused(
    read: Read, two: tuple[Pages, Pages]
) -> None:
    old = read(two[0].name, catalog=CATALOG).load()
    with pytest.raises(AnalysisException, match="'url' of the schema is that of a frame"):
        read(two[0].name, catalog=CATALOG).schema(old.schema).load().collect()
    same = read(two[0].name, catalog=CATALOG, snapshot_ts=int(timestamp_of(old)))
    assert timestamp_of(same.schema(old.schema).load()) == timestamp_of(old)
    assert same.schema(old.schema).load().count() == 8


def test_a_view_is_frozen_until_it_is_refreshed(
    spark: SparkSession, cluster: Any, two: tuple[Pages, Pages]
) -> None:
    name = f"view_{uuid.uuid4().hex}"
    query = f"SELECT l.visits, r.visits FROM {name} l JOIN {name} r USING (url)"
    _set_both(two, 1)
    shown = view(
        spark,
        name,
        lambda s: s.table(two[0].name, catalog=CATALOG, key="a00000").union(
            s.table(two[1].name, catalog=CATALOG, key="b00000")
        ),
        address=cluster.address,
    )
    try:
        for visits in (2, 3):
            _set_both(two, visits)
            for _ in range(2):
                rows = spark.sql(f"SELECT visits FROM {name} WHERE url < 'b'").collect()
                assert [row.visits for row in rows] == [visits - 1]
                assert spark.sql(query).count() == 2
            earlier = shown.timestamp
            assert shown.refresh() == shown.timestamp > earlier
        assert spark.table(name).where("visits = 3").count() == 1
        with pytest.raises(ZeroDivisionError):
            view(spark, name, lambda _: 1 // 0, address=cluster.address)  # type: ignore[arg-type,return-value]
        assert spark.table(name).count() == 2
    finally:
        shown.drop()
        shown.drop()
    assert not spark.catalog.tableExists(name)
    with pytest.raises(UsageError, match="was dropped"):
        _ = shown.timestamp
