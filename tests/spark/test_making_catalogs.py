"""A catalogue is made from the tables and columns of a program, and stored for others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import SparkSession

import percolator
from percolator import Table, codecs
from percolator.codecs.names import CodecNames
from percolator.errors import InvalidArgument, SchemaError
from percolator.spark import spark_catalog, store_catalog
from percolator.spark.bulk_load import bulk_load
from percolator.spark.catalog import FrameCatalog, require_declared
from percolator.spark.connections import CATALOGUES
from percolator.v1.cells_pb2 import Cell

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

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
