"""Every type of the catalogue makes the way from a DataFrame to the client and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

import percolator
from percolator import Table, codecs

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]
PLACE = "struct<lat:double,seen:timestamp,tags:array<string>,sizes:map<string,int>>"
ORDERS = Table("orders-of-types")
MOMENT = datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC)
FIELDS = {
    "seen": {"type": "timestamp"},
    "day": {"type": "date"},
    "price": {"type": "decimal(12, 2)"},
    "count": {"type": "int"},
    "place": {"type": "json", "schema": PLACE},
    "notes": {"type": "json"},
}
CATALOG = json.dumps({"key": {"name": "id", "type": "text"}, "columns": FIELDS})
SCHEMA = (
    f"id string, seen timestamp, day date, price decimal(12,2), count int, place {PLACE}, "
    "notes string"
)


def _rows() -> list[tuple[Any, ...]]:
    place = {"lat": 1.5, "seen": MOMENT, "tags": ["ä", None], "sizes": {"m": 3}}
    return [
        ("a", MOMENT, date(2026, 3, 4), Decimal("-12.50"), -7, place, '{"x":1}'),
        ("b", None, None, None, None, None, "[]"),
    ]


@pytest.fixture(scope="module")
def written(spark: SparkSession, cluster: Any, db: percolator.Database) -> DataFrame:
    db.create_table(ORDERS, ["b"])
    frame = spark.createDataFrame(_rows(), SCHEMA)
    options = {"address": cluster.address, "table": ORDERS.name, "catalog": CATALOG}
    frame.write.format("percolator").options(nulls="skip", **options).mode("append").save()
    return frame


def test_the_client_reads_what_spark_has_written(
    written: DataFrame, db: percolator.Database
) -> None:
    kinds: dict[str, codecs.Codec[Any]] = {
        "seen": codecs.timestamp,
        "day": codecs.date,
        "price": codecs.decimal(12, 2),
        "count": codecs.integer,
        "place": codecs.json,
    }
    with db.snapshot() as snapshot:
        row = next(iter(snapshot.scan(ORDERS)))
    found = {name: row.get(ORDERS.column(name, codec)) for name, codec in kinds.items()}
    assert found == {
        "seen": MOMENT,
        "day": date(2026, 3, 4),
        "price": Decimal("-12.50"),
        "count": -7,
        "place": {"lat": 1.5, "seen": MOMENT.isoformat(), "tags": ["ä", None], "sizes": {"m": 3}},
    }


def test_a_frame_reads_them_back_however_often_it_is_used(read: Read, written: DataFrame) -> None:
    frame = read(ORDERS.name, catalog=CATALOG).load()
    assert [field.dataType for field in frame.schema] == [f.dataType for f in written.schema]
    expected = sorted(map(tuple, written.collect()))
    joined = frame.join(frame.where("price < 0").select("id"), "id")
    part = frame.where("place.lat > 1").cache()
    try:
        for _ in range(2):
            assert sorted(map(tuple, frame.collect())) == expected
            assert [tuple(row) for row in joined.collect()] == expected[:1]
            assert [row.place.sizes["m"] for row in part.collect()] == [3]
            assert frame.unionAll(part).where("day is null").count() == 1
    finally:
        part.unpersist()


def test_a_schema_may_ask_for_nested_fields_of_the_catalogue_only(
    read: Read, written: DataFrame
) -> None:
    frame = read(ORDERS.name, catalog=CATALOG).schema(f"id string, place {PLACE}").load()
    assert frame.select("place.tags").head(1)[0][0] == ["ä", None]
    with pytest.raises(Exception, match="'place' is struct<lat:double>; the catalogue has struct"):
        read(ORDERS.name, catalog=CATALOG).schema("place struct<lat:double>").load().collect()


def test_a_value_that_does_not_fit_fails_the_read_with_its_field(
    read: Read, written: DataFrame, db: percolator.Database
) -> None:
    wrong = Table("orders-that-do-not-fit")
    db.create_table(wrong)
    with db.transaction() as tx:
        tx.set("c", wrong.column("place", codecs.json), {"lat": "north"})
    with pytest.raises(
        Exception, match="field 'place': lat: expected double in JSON, found 'north"
    ):
        read(wrong.name, catalog=CATALOG).load().collect()


def test_narrower_decimals_are_written_and_wider_ones_refused(
    write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    table = Table("prices")
    db.create_table(table)
    columns = {"price": {"type": "decimal(6,2)"}}
    catalog = json.dumps({"key": {"name": "id", "type": "text"}, "columns": columns})
    narrow = spark.createDataFrame([("a", Decimal("1.5"))], "id string, price decimal(3,1)")
    write(narrow, table.name, catalog=catalog).save()
    with db.snapshot() as snapshot:
        assert snapshot.get("a", table.column("price", codecs.decimal(6, 2))) == Decimal("1.50")
    wide = spark.createDataFrame([("a", Decimal("1.5"))], "id string, price decimal(7,3)")
    with pytest.raises(
        Exception, match=r"'price' is decimal\(7,3\); the catalogue has decimal\(6,2"
    ):
        write(wide, table.name, catalog=catalog).save()
