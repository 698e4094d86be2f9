"""`percolator index`, on a running cluster."""

from __future__ import annotations

import pytest

import percolator
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine
from tests.integration.indexed_people import by_city, city, people

pytestmark = pytest.mark.integration

REFERENCE = "tests.integration.indexed_people:by_city"


def test_an_index_is_built_over_existing_data_and_checked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(people)
        db.set_many((f"person {number}", {city: f"city {number % 3}"}) for number in range(30))
        by_city.create(db)
        command = CommandLine(cluster.address)
        missing = command.text("index", "check", REFERENCE, code=1)
        assert "row 'person 0' is missing for 'city 0'" in missing
        assert command.data("index", "backfill", REFERENCE) == {
            "index": "people by city",
            "rows": 30,
        }
        assert "column and index agree" in command.text("index", "check", REFERENCE)
        wrong = command.error("index", "check", REFERENCE.replace("by_city", "people"), code=2)
        assert "index: tests.integration.indexed_people:people is Table('people'" in wrong
