"""Reads return what the client sees at one snapshot, whatever part of it they ask for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

import percolator
from percolator import Table, Timestamp, codecs
from percolator.codecs.names import CodecNames
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.spark import snapshot, spark_catalog, store_catalog, timestamp_of, view
from percolator.spark.bulk_load import bulk_load
from percolator.spark.catalog import FrameCatalog, require_declared
from percolator.spark.connections import CATALOGUES
from percolator.spark.reader import SHARED_SECONDS
from percolator.timestamps import seconds_between
from percolator.v1.cells_pb2 import Cell
from tests.spark.tables import CATALOG, Pages, Read, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def pages(db: percolator.Database) -> Pages:
    return Pages(db, 400)


def test_rows_have_the_types_of_the_catalogue_and_the_values_of_the_client(
    read: Read, pages: Pages
) -> None:
    frame = read(pages.name, catalog=CATALOG).load()
    assert frame.dtypes == [("url", "string"), ("title", "string"), ("visits", "bigint")]
    assert frame.rdd.getNumPartitions() == 4
    found = {row.url: (row.title, row.visits) for row in frame.collect()}
    assert found == pages.stored()
    assert len(found) == 400


def test_raw_cells_have_the_stored_bytes(read: Read, pages: Pages) -> None:
    rows = read(pages.name, key="hex:613030303033").load().orderBy("column").collect()
    assert [bytes(row.row) for row in rows] == [b"a00003"] * 2
    assert [bytes(row.column) for row in rows] == [b"meta:title", b"visits"]
    assert [bytes(row.value) for row in rows] == [b"title of a00003", bytes([0] * 7 + [3])]
    assert all(0 < row.commit_timestamp < pages.db.timestamp() for row in rows)
    assert read(pages.name, columns="visits").load().count() == 400


def test_a_read_can_ask_for_fewer_fields(read: Read, pages: Pages) -> None:
    chosen = read(pages.name, catalog=CATALOG, columns="visits").load()
    assert chosen.columns == ["url", "visits"]
    assert chosen.agg({"visits": "sum"}).collect()[0][0] == sum(range(400))
    declared = read(pages.name, catalog=CATALOG).schema("visits bigint, url string").load()
    assert sorted(map(tuple, declared.collect()))[:2] == [(0, "a00000"), (1, "a00001")]
    only_keys = read(pages.name, catalog=CATALOG).schema("url string").load()
    assert sorted(row.url for row in only_keys.collect()) == keys(400)


def test_a_large_tablet_is_read_in_several_parts(
    read: Read, db: percolator.Database, cluster: Any
) -> None:
    pages = Pages(db)
    text = "".join(chr(ord("a") + n * 7 % 26) for n in range(2_000))
    with db.transaction() as tx:
        for number in range(6_000):
            tx.set(f"b{number:05}", pages.title, f"{number} {text}")
    pages.flush(cluster.address)
    frame = read(pages.name, catalog=CATALOG, columns="title", partition_bytes=2 << 20).load()
    assert 8 <= frame.rdd.getNumPartitions() <= 16
    assert frame.distinct().count() == 6_000


def test_sql_reads_through_a_view(pages: Pages, cluster: Any, spark: SparkSession) -> None:
    spark.sql(
        f"CREATE TEMPORARY VIEW pages USING percolator OPTIONS "
        f"(address '{cluster.address}', table '{pages.name}', catalog '{CATALOG}')"
    )
    try:
        found = spark.sql("SELECT title FROM pages WHERE url = 'd00000'").collect()
        assert [row.title for row in found] == ["title of d00000"]
    finally:
        spark.catalog.dropTempView("pages")


def test_every_type_and_keys_of_several_parts_come_back(
    read: Read, write: Any, db: percolator.Database, spark: SparkSession
) -> None:
    catalog = json.dumps(
        {
            "key": [{"name": "host", "type": "text"}, {"name": "at", "type": "ordered_integer"}],
            "columns": {
                name: {"type": name}
                for name in ("raw", "text", "integer", "float", "boolean", "json")
            },
        }
    )
    table = Table("types", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
    db.create_table(table)
    rows = [
        ("a", -5, b"\x00\xff", "ä\0", 2**63 - 1, 0.5, True, '{"a":[1,null]}'),
        ("a", 7, None, None, None, None, None, "[]"),
        ("b\0", 0, b"", "", 0, -0.0, False, '"x"'),
    ]
    schema = (
        "host string, at bigint, raw binary, text string, integer bigint, float double, "
        "boolean boolean, json string"
    )
    write(spark.createDataFrame(rows, schema), "types", catalog=catalog, nulls="skip").save()
    frame = read("types", catalog=catalog).load()
    found = [tuple(bytes(v) if isinstance(v, bytearray) else v for v in r) for r in frame.collect()]
    assert sorted(found, key=lambda row: row[:2]) == sorted(rows, key=lambda row: row[:2])
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(table)] == [("a", -5), ("a", 7), ("b\0", 0)]
    assert [row.at for row in frame.where("host = 'a' and at > 0").collect()] == [7]
    one = read("types", catalog=catalog, keys='[["a", 7], ["a", 8]]').load()
    assert [(row.host, row.at, row.json) for row in one.collect()] == [("a", 7, "[]")]
    some = read("types", catalog=catalog, key_prefix='["a"]').load()
    assert sorted(row.at for row in some.collect()) == [-5, 7]


def test_all_jobs_of_a_frame_read_one_snapshot(read: Read, db: percolator.Database) -> None:
    pages = Pages(db, 40)
    frame = read(pages.name, catalog=CATALOG).load()
    total = {"visits": "sum"}
    before = db.timestamp()
    pages.fill(40, visits=1000)
    assert frame.agg(total).collect()[0][0] == sum(range(40))
    assert frame.where("url < 'b'").agg(total).collect()[0][0] == sum(range(10))
    old = read(pages.name, catalog=CATALOG, snapshot_ts=int(before)).load()
    assert old.agg(total).collect()[0][0] == sum(range(40))
    joined = frame.alias("one").join(frame.alias("other"), "url")
    assert joined.where("one.visits != other.visits").count() == 0
    now = read(pages.name, catalog=CATALOG).load()
    assert now.agg(total).collect()[0][0] == sum(range(40)) + 40 * 1000


def test_a_time_in_the_past_is_read_as_it_was(read: Read, db: percolator.Database) -> None:
    pages = Pages(db, 8)
    moment = db.timestamp().to_datetime()
    while db.timestamp().to_datetime() == moment:
        pass  # until the next millisecond
    then = db.timestamp().to_datetime().isoformat()
    with db.transaction() as tx:
        tx.delete("a00000", pages.title)
        tx.delete("a00000", pages.visits)
    assert read(pages.name, catalog=CATALOG, as_of=then).load().count() == 8
    assert read(pages.name, catalog=CATALOG).load().count() == 7


def test_a_frame_does_not_show_the_successor_of_its_table(
    read: Read, db: percolator.Database
) -> None:
    pages = Pages(db, 40)
    frame = read(pages.name, catalog=CATALOG).load()
    assert frame.count() == 40
    db.drop_table(pages.table)
    db.create_table(pages.table, ["b"])
    pages.fill(8)
    with pytest.raises(Exception, match=f"table '{pages.name}' is younger than the snapshot"):
        frame.count()
    assert read(pages.name, catalog=CATALOG).load().count() == 8


def test_a_read_keeps_its_snapshot_from_being_collected(
    read: Read, pages: Pages, db: percolator.Database
) -> None:
    from percolator.blocking import loop_thread
    from percolator.v1 import lockservice_pb2 as pb
    from percolator.wire import methods

    frame = read(pages.name, catalog=CATALOG).load()
    frame.count()
    engine = db._asynchronous.internal.engine

    async def pins() -> list[int]:
        owners: Any = engine.env.owners
        call = engine.world.network.unary(owners.calls.addresses[0], methods.LIST_SESSIONS)
        found = await call(pb.ListSessionsRequest(), 5.0)
        return [s.info.oldest_start_timestamp for s in found.sessions if s.info.pin]

    at, held = timestamp_of(frame), loop_thread.shared().call(pins)
    assert any(one <= at and seconds_between(one, at) < SHARED_SECONDS for one in held)
    for _ in range(5):
        read(pages.name, catalog=CATALOG).load()
    assert len(loop_thread.shared().call(pins)) <= len(held) + 1, "they share a pin"


# Frames of one instant, the timestamp of a frame, and views that can be refreshed.


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


# A frame answers every query as a Parquet copy of its rows does, whatever it was asked before.
#
# Spark keeps what it has planned for a frame and may use it for the next query. So each query here
# runs twice, on frames that all queries share, with `spark.sql.python.filterPushdown.enabled` on
# and off.

ROWS = 400
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
CHOSEN: dict[str, tuple[dict[str, str], str]] = {
    "everything": ({}, "true"),
    "key": ({"key": "b00007"}, "url = 'b00007'"),
    "keys": (
        {"keys": '["a00001", "c00098", "zzz", "a00001"]'},
        "url in ('a00001', 'c00098', 'zzz')",
    ),
    "between": ({"key_from": "b00050", "key_to": "c00001"}, "url >= 'b00050' and url < 'c00001'"),
    "prefix": ({"key_prefix": "a0000"}, "url like 'a0000%'"),
    "ranges": (
        {"key_ranges": '[{"to": "a00003"}, {"prefix": "c0009"}, {"key": "b00001"}, {"from": "d"}]'},
        "url < 'a00003' or url like 'c0009%' or url = 'b00001' or url >= 'd'",
    ),
}
"""The options that choose rows, and the condition that says the same."""


@dataclass
class Twins:
    """Rows that are both in Percolator and in a Parquet file, as frames and as views."""

    spark: SparkSession
    frames: dict[str, tuple[DataFrame, DataFrame]]

    def compare(self, query: Callable[[Callable[[str], DataFrame]], DataFrame]) -> None:
        """Runs a query twice on each of both."""
        expected = _sorted(query(lambda name: self.frames[name][1]))
        for _ in range(2):
            assert _sorted(query(lambda name: self.frames[name][0])) == expected

    @contextmanager
    def pushdown(self, *, enabled: bool) -> Iterator[None]:
        before = self.spark.conf.get(PUSHDOWN) or "false"
        self.spark.conf.set(PUSHDOWN, str(enabled).lower())
        try:
            yield
        finally:
            self.spark.conf.set(PUSHDOWN, before)


def _sorted(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()), key=repr)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, db: percolator.Database, tmp_path_factory: Any) -> tuple[Pages, Path]:
    """A table of four tablets, some of whose rows have no title, and its copy."""
    pages = Pages(db, ROWS)
    with db.transaction() as tx:
        for url in keys(ROWS)[::3]:
            tx.delete(url, pages.title)
    copy = tmp_path_factory.mktemp("copy") / "pages.parquet"
    stored = [(url, title, visits) for url, (title, visits) in pages.stored().items()]
    schema = "url string, title string, visits bigint"
    spark.createDataFrame(stored, schema).coalesce(1).write.parquet(str(copy))
    return pages, copy


@pytest.fixture(scope="module")
def twins(spark: SparkSession, cluster: Any, rows: tuple[Pages, Path]) -> Iterator[Twins]:
    pages, copy = rows
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    frames = {}
    for name, (options, condition) in CHOSEN.items():
        chosen = spark.read.format("percolator").options(**given, **options).load()
        frames[name] = chosen, spark.read.parquet(str(copy)).where(condition)
    yield Twins(spark, frames)
    spark.catalog.dropTempView(VIEW)


URLS = ["", "a", "a00000", "a00001", "b00007", "b00050", "c00099", "d00098", "d00099", "zzz"]
urls = st.sampled_from(URLS)
simple = st.one_of(
    st.builds("url {} '{}'".format, st.sampled_from(["=", "<", "<=", ">", ">=", "<=>"]), urls),
    st.builds("url in ('{}', '{}', '{}')".format, urls, urls, urls),
    st.builds("url like '{}%'".format, st.sampled_from(["a", "b0000", "c00099", "d000", "x"])),
    st.builds("visits % {} = 0".format, st.integers(2, 5)),
    st.builds("visits > {}".format, st.integers(0, ROWS)),
    st.sampled_from(["title is null", "title is not null", "url is not null", "url like '%7'"]),
)
conditions = st.one_of(
    simple,
    st.builds("({}) and ({})".format, simple, simple),
    st.builds("({}) or ({})".format, simple, simple),
    st.builds("not ({})".format, simple),
)
sources = st.sampled_from(["everything", "everything", *CHOSEN])
Source = Callable[[str], DataFrame]
VIEW = "rows_of_a_frame"


def filtered(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).where(one)


def everything_after(source: Source, name: str, one: str, other: str) -> DataFrame:
    """The frame is asked for a part, and then for all of it."""
    source(name).where(one).count()
    return source(name)


def union_of_two_parts(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).where(one).unionAll(source(name).where(other))


def union_with_everything(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).where(one).unionAll(source(name))


def self_join(source: Source, name: str, one: str, other: str) -> DataFrame:
    left, right = source(name).where(one).alias("l"), source(name).where(other).alias("r")
    return left.join(right, "url", "full").select("url", "l.visits", "r.title")


def anti_join(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).join(source(name).where(one).select("url"), "url", "anti").where(other)


def cached(source: Source, name: str, one: str, other: str) -> DataFrame:
    """A frame whose cached part is another one than the part asked for next."""
    part = source(name).where(one).cache()
    try:
        part.count()
        rows = part.where(other).unionAll(source(name).where(other)).collect()
        return part.sparkSession.createDataFrame(rows, part.schema)
    finally:
        part.unpersist()


def reused_view(source: Source, name: str, one: str, other: str) -> DataFrame:
    frame = source(name)
    frame.createOrReplaceTempView(VIEW)
    return frame.sparkSession.sql(
        f"SELECT url, visits FROM {VIEW} WHERE {one} UNION ALL "
        f"SELECT url, visits FROM {VIEW} WHERE visits > (SELECT avg(visits) FROM {VIEW})"
    )


def counted(source: Source, name: str, one: str, other: str) -> DataFrame:
    grouped = source(name).where(one).groupBy("title").agg({"visits": "sum", "url": "count"})
    return grouped.unionAll(source(name).selectExpr("'all'", "sum(visits)", "count(url)"))


QUERIES = [
    filtered,
    everything_after,
    union_of_two_parts,
    union_with_everything,
    self_join,
    anti_join,
    cached,
    reused_view,
    counted,
]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.__name__)
def test_a_frame_that_was_filtered_once_still_has_all_its_rows(
    twins: Twins, query: Callable[..., DataFrame]
) -> None:
    with twins.pushdown(enabled=True):
        twins.compare(lambda source: query(source, "everything", "url = 'a00001'", "url < 'b'"))


@pytest.mark.parametrize("pushdown", [False, True])
@pytest.mark.parametrize("name", CHOSEN)
def test_rows_that_options_choose_are_those_of_the_same_condition(
    twins: Twins, name: str, pushdown: bool
) -> None:
    with twins.pushdown(enabled=pushdown):
        twins.compare(lambda source: source(name))


@given(
    drawn=st.tuples(st.sampled_from(QUERIES), sources, conditions, conditions),
    pushdown=st.booleans(),
)
@settings(max_examples=24, deadline=None, derandomize=True, database=None)
def test_any_query_gives_what_it_gives_on_a_copy(
    twins: Twins, drawn: tuple[Callable[..., DataFrame], str, str, str], pushdown: bool
) -> None:
    query, name, one, other = drawn
    with twins.pushdown(enabled=pushdown):
        twins.compare(lambda source: query(source, name, one, other))


def test_only_the_tablets_with_chosen_rows_are_read(
    read: Callable[..., DataFrameReader], rows: tuple[Pages, Path]
) -> None:
    expected = {"everything": 4, "key": 1, "keys": 3, "between": 2, "prefix": 1, "ranges": 4}
    for name, (options, _) in CHOSEN.items():
        frame = read(rows[0].name, catalog=CATALOG, **options).load()
        assert frame.rdd.getNumPartitions() == expected[name], name


# A catalogue is made from the tables and columns of a program, and stored for others.

ORDERS = Table("orders", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
PAGES = Table("pages")


def test_each_codec_becomes_its_type() -> None:
    kinds: dict[str, codecs.Codec[Any]] = {
        "raw": codecs.raw,
        "text": codecs.text,
        "integer": codecs.integer,
        "float": codecs.float,
        "boolean": codecs.boolean,
        "timestamp": codecs.timestamp,
        "date": codecs.date,
        "decimal(12,2)": codecs.decimal(12, 2),
        "json": codecs.json,
    }
    columns = {f"f{n}": ORDERS.column(f"c:{n}", codec) for n, codec in enumerate(kinds.values())}
    columns["message"] = ORDERS.column("message", codecs.message(Cell))
    made = json.loads(spark_catalog(ORDERS, ["customer", "number"], columns))
    assert made["key"] == [
        {"name": "customer", "type": "text"},
        {"name": "number", "type": "ordered_integer"},
    ]
    assert [one["type"] for one in made["columns"].values()] == [*kinds, "raw"]
    assert made["columns"]["f0"]["column"] == "c:0"
    assert "column" not in made["columns"]["message"]


def test_types_say_what_a_field_is_in_spark() -> None:
    columns = {
        "visits": PAGES.column("visits", codecs.integer),
        "place": PAGES.column("place", codecs.json),
    }
    types = {"visits": "int", "place": "struct<lat:double>"}
    assert json.loads(spark_catalog(PAGES, "url", columns, types=types)) == {
        "key": {"name": "url", "type": "text"},
        "columns": {
            "visits": {"type": "int"},
            "place": {"type": "json", "schema": "struct<lat:double>"},
        },
    }


@dataclass
class Place:
    lat: float


def test_a_model_is_bytes_or_text_or_a_struct_and_any_type_may_be_said_to_be_what_it_is() -> None:
    columns: dict[str, Any] = {
        name: PAGES.column(name, codecs.model(Place))
        for name in ("bytes", "said", "text", "struct")
    }
    columns["visits"] = PAGES.column("visits", codecs.integer)
    types = {"said": "binary", "text": "string", "struct": "struct<lat:double>"}
    types["visits"] = "bigint"
    made = spark_catalog(PAGES, "url", columns, types=types)
    assert json.loads(made)["columns"] == {
        "bytes": {"type": "raw"},
        "said": {"type": "raw"},
        "text": {"type": "json"},
        "struct": {"type": "json", "schema": "struct<lat:double>"},
        "visits": {"type": "integer"},
    }
    names = {one.name: one.codec.name for one in columns.values()}
    require_declared("pages", CodecNames("text", names), FrameCatalog.parse(made))


TITLE = PAGES.column("title", codecs.text)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((ORDERS, "customer", {}), "has 2 parts; 1 names are given"),
        (
            (PAGES, "url", {"title": ORDERS.column("t", codecs.text)}),
            "not a column of table 'pages'",
        ),
        ((PAGES, "url", {"title": "title"}), "'title' is not a column"),
        ((PAGES, "url", {"t": PAGES.column(b"\xff", codecs.text)}), "name is not text"),
        ((PAGES, "url", {"title": TITLE}, {"titel": "int"}), "there is no field 'titel'"),
        (
            (PAGES, "url", {"title": TITLE}, {"title": "int"}),
            "is string in Spark, which cannot be int",
        ),
        ((PAGES, "title", {"TITLE": TITLE}), "two fields are named 'title'"),
        ((PAGES, "url", {}), "columns: expected fields by name"),
        (
            (PAGES, "url", {"p": PAGES.column("p", codecs.json)}, {"p": "struct<"}),
            "expected a field of a struct",
        ),
        (
            (Table("t", key=codecs.tuple_of(codecs.tuple_of(codecs.text))), "k", {"title": TITLE}),
            "cannot have keys of",
        ),
    ],
)
def test_what_cannot_be_in_a_catalogue_is_refused(given: Any, reason: str) -> None:
    table, key, columns, *types = given
    with pytest.raises((SchemaError, InvalidArgument), match=reason):
        spark_catalog(table, key, columns, types=types[0] if types else None)


def test_a_stored_catalogue_is_found_by_reads_writes_and_loads(
    spark: SparkSession, cluster: Any, db: percolator.Database
) -> None:
    table = Table("pages-with-a-stored-catalogue")
    db.create_table(table)
    columns = {"title": table.column("meta:title", codecs.text)}
    given = {"address": cluster.address, "table": table.name, "catalog": "stored"}
    reader = spark.read.format("percolator").options(**given)
    with pytest.raises(Exception, match=f"catalog: none is stored for table '{table.name}'"):
        reader.load()
    missing = Table("pages-never-created")  # other tests of this cluster create "pages"
    with pytest.raises(InvalidArgument, match=f"there is no table '{missing.name}'"):
        store_catalog(missing, spark_catalog(table, "url", columns), address=cluster.address)
    store_catalog(table, spark_catalog(table, "url", columns), address=cluster.address)
    assert CATALOGUES.name in db.tables()

    loaded = spark.createDataFrame([("b", "of b")], "url string, title string")
    bulk_load(loaded, **given)
    frame = spark.createDataFrame([("a", "of a")], "url string, title string")
    frame.write.format("percolator").options(**given).mode("append").save()
    found = reader.option("key_from", "a").load()
    other = {"name": table.column("meta:title", codecs.text)}
    store_catalog(table, spark_catalog(table, "link", other), address=cluster.address)
    for _ in range(2):
        assert sorted(map(tuple, found.collect())) == [("a", "of a"), ("b", "of b")]
        assert found.alias("l").join(found.alias("r"), "url").count() == 2
    assert reader.load().columns == ["link", "name"]
    with pytest.raises(Exception, match="'url' is not in the catalogue, which has link, name"):
        frame.write.format("percolator").options(**given).mode("append").save()
