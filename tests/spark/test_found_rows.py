"""Reading the rows to which an index of the table leads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.errors import PySparkException

from percolator.errors import InvalidArgument
from percolator.schema import Index
from percolator.spark.options import ReadOptions
from tests.spark.tables import CATALOG, Pages, Read


@pytest.fixture
def indexed(pages: Pages) -> Pages:
    """Rows of several tablets that share values, and some without one of them."""
    pages.db.create_index(pages.visits)
    pages.db.create_index(Index(pages.table, "both", (pages.title, pages.visits)))
    pages.db.set_many(
        (f"{letter}{number}", {pages.title: f"title {number % 3}", pages.visits: number})
        for letter in "abcd"
        for number in range(12)
    )
    with pages.db.transaction() as tx:
        tx.delete("a4", pages.title)
        tx.delete("b4", pages.visits)
        tx.set("c4", pages.visits, 400)
    return pages


@pytest.mark.parametrize(
    ("options", "condition"),
    [
        ({"index": "visits", "index_values": "[4]"}, "visits = 4"),
        ({"index": "visits", "index_from": "3", "index_to": "5"}, "visits >= 3 and visits < 5"),
        ({"index": "visits", "index_values": "[77]"}, "visits = 77"),
        ({"index": "both"}, "title is not null and visits is not null"),
        (
            {"index": "both", "index_values": '["title 1"]', "index_from": "4"},
            "title = 'title 1' and visits >= 4",
        ),
        (
            {"index": "both", "index_prefix": "title", "key_prefix": "b"},
            "title like 'title%' and visits is not null and url like 'b%'",
        ),
    ],
)
def test_an_index_finds_what_a_filter_of_all_rows_finds(
    read: Read, indexed: Pages, options: dict[str, str], condition: str
) -> None:
    whole = read(indexed.name, catalog=CATALOG).load()
    found = read(indexed.name, catalog=CATALOG, **options).load()
    assert sorted(found.collect()) == sorted(whole.where(condition).collect())


def test_rows_are_found_in_the_snapshot_of_the_read(read: Read, indexed: Pages) -> None:
    found = read(indexed.name, catalog=CATALOG, index="visits", index_values="[400]").load()
    with indexed.db.transaction() as tx:
        tx.set("c4", indexed.visits, 4)
        tx.set("d5", indexed.visits, 400)
    assert [(row.url, row.visits) for row in found.collect()] == [("c4", 400)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"index": "title"}, "has no index 'title'"),
        ({"index": "visits", "index_values": "[1, 2]"}, "has 2 values; index 'visits' is over 1"),
        ({"index": "visits", "index_values": '["x"]'}, "expected integer, found"),
        ({"index": "visits", "index_values": "[1]", "index_from": "2"}, "has no column after"),
        ({"index": "visits", "index_prefix": "2"}, "values of codec integer have no prefixes"),
    ],
)
def test_what_cannot_be_looked_up_is_refused_on_the_driver(
    read: Read, indexed: Pages, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(PySparkException, match=reason):
        read(indexed.name, catalog=CATALOG, **options).load().collect()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"index_from": "1"}, "index_from: is about an index: give the option index, too"),
        ({"index": "visits", "index_values": "4"}, "index_values: expected a JSON list, found 4"),
        ({"index": "visits", "index_value": "[4]"}, "index_value"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        ReadOptions.parse({"table": "pages", "catalog": json.dumps(json.loads(CATALOG)), **options})
