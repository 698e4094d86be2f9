"""A program that declares another codec asks for the table's, in the thread of the event loop."""

from __future__ import annotations

import threading

import pytest

import percolator
from percolator import SchemaError, Table, codecs

pages = Table("pages")
size = pages.column("size", codecs.integer)
text = pages.column("size", codecs.text)


def test_what_is_refused_in_the_programs_thread_is_asked_in_the_loops(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = percolator_db
    db.create_table(pages)
    db.run(lambda tx: tx.set("a", size, 1))
    asked, threads = threading.Event(), []

    async def refresh(table_id: int) -> None:
        threads.append(threading.get_ident())
        asked.set()

    monkeypatch.setattr(db._database.internal.engine._newer_schemas, "_fetch", refresh)
    with db.snapshot() as snapshot:
        (row,) = snapshot.get_many(pages, ["a"])
        with pytest.raises(SchemaError, match="declares the codec text"):
            row.get(text)
    assert asked.wait(10.0)
    assert threads != [threading.get_ident()]


def test_a_row_that_outlives_its_database_still_refuses(percolator_db: percolator.Database) -> None:
    db = percolator_db
    db.create_table(pages)
    db.run(lambda tx: tx.set("a", size, 1))
    with db.snapshot() as snapshot:
        (row,) = snapshot.get_many(pages, ["a"])
    db.close()
    with pytest.raises(SchemaError, match="declares the codec text"):
        row.get(text)
