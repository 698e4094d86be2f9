"""Reads return what the client sees at one snapshot, whatever part of it they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrameReader, SparkSession

import percolator
from percolator import Table, codecs
from percolator.spark import timestamp_of
from percolator.spark.reader import SHARED_SECONDS
from percolator.timestamps import seconds_between
from tests.spark.tables import CATALOG, Pages, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]


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
