"""Exports to a real PostgreSQL: each takes effect once, though exporters fail at any place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

import percolator.testing
from benchmarks import postgresql
from percolator import Database, UsageError, codecs
from percolator.recipes import Export, ExportedOnce, ExportQueue
from percolator.testing.pytest_plugin import percolator_db
from tests.documents.commands import ROOT, blocks

__all__ = ["percolator_db"]

psycopg = pytest.importorskip("psycopg", reason="make setup installs it")

out = ExportQueue("out", key=codecs.text, value=codecs.integer, buckets=3)
once = ExportedOnce(out)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    binaries = postgresql.found()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with postgresql.running(binaries) as running:
        yield f"host={running.socket_directory} user=postgres dbname=postgres"


@pytest.fixture(autouse=True)
def tables(server: str) -> None:
    with psycopg.connect(server) as connection:
        connection.execute("DROP TABLE IF EXISTS percolator_exported, received")
        connection.execute("CREATE TABLE received (place serial, key text, value bigint)")
        once.create(connection)
        once.create(connection)


def received(server: str) -> dict[str, list[int]]:
    found = defaultdict(list)
    with psycopg.connect(server) as connection:
        for key, value in connection.execute("SELECT key, value FROM received ORDER BY place"):
            found[key].append(value)
    return dict(found)


def test_each_export_takes_effect_once_and_in_order(server: str, percolator_db: Database) -> None:
    chance = Random(7)

    @out.exporter(batch=4)
    def send(exports: Sequence[Export[str, int]]) -> None:
        fails = chance.choice(("", "", "before", "after"))
        with psycopg.connect(server) as connection:
            for key, _, value in once.new(connection, exports):
                connection.execute(
                    "INSERT INTO received (key, value) VALUES (%s, %s)", (key, value)
                )
            if fails == "before":
                raise ConnectionError("before PostgreSQL has committed")
        if fails == "after":
            raise ConnectionError("after PostgreSQL has committed")

    out.create(percolator_db)
    expected = defaultdict(list)
    failures = 0
    for number in range(60):
        key = f"key {number % 5}"
        with percolator_db.transaction() as tx:
            out.put(tx, key, number)
        expected[key].append(number)
        if number % 7 == 0 or number == 59:
            while True:
                try:
                    percolator.testing.run_observers(percolator_db, [send])
                except ConnectionError:
                    failures += 1
                else:
                    break
    assert failures > 5
    assert received(server) == expected


def test_a_late_call_changes_nothing_that_a_newer_one_has_done(server: str) -> None:
    exports = [Export("a", number, number) for number in range(5)]
    with psycopg.connect(server) as connection:
        assert once.new(connection, exports) == exports
    with psycopg.connect(server) as connection:
        assert once.new(connection, exports[1:3]) == []
        assert once.new(connection, [Export("a", 5, 5), Export("b", 0, 0)]) == [
            Export("a", 5, 5),
            Export("b", 0, 0),
        ]
        connection.rollback()
    with psycopg.connect(server) as connection:
        assert once.new(connection, [Export("a", 5, 5)]) == [Export("a", 5, 5)]


def test_a_connection_that_commits_each_statement_is_refused(server: str) -> None:
    with (
        psycopg.connect(server, autocommit=True) as connection,
        pytest.raises(UsageError, match="the connection has autocommit"),
    ):
        once.new(connection, [Export("a", 1, 1)])


def test_the_program_in_the_guide_runs(server: str, percolator_db: Database) -> None:
    (block,) = (one for one in blocks(ROOT / "docs/recipes.md") if "psycopg" in one.text)
    mails = ExportQueue("mails", key=codecs.text, value=codecs.json)
    program: dict[str, Any] = {"mails": mails}
    exec(block.text.replace("dbname=shop", server), program)
    with psycopg.connect(server) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS mails (customer text, number bigint)")
    mails.create(percolator_db)
    for number in (1, 2):
        with percolator_db.transaction() as tx:
            mails.put(tx, "ann", {"order": number})
        percolator.testing.run_observers(percolator_db, [program["store"]])
    with psycopg.connect(server) as connection:
        found = connection.execute("SELECT customer, number FROM mails").fetchall()
    assert found == [("ann", 1), ("ann", 2)]
