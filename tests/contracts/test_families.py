"""Families: reads of all columns whose names begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from percolator import (
    Database,
    Family,
    InvalidArgument,
    Row,
    SchemaError,
    Snapshot,
    Table,
    Transaction,
    aio,
    both_kinds,
    codecs,
)
from tests.contracts.conftest import Accounts, needs_backward_scans


@pytest.fixture
def edges(db: Database, accounts: Accounts) -> Family[int]:
    """Three nodes in three tablets, with columns before, in and behind the family."""
    family = accounts.table.family("edge:", codecs.integer)
    with db.transaction() as tx:
        for node in ("ann", "hub", "zoe"):
            tx.set(node, accounts.owner, node.title())
            tx.set(node, accounts.balance, 7)
            tx.set(node, accounts.table.column("edge", codecs.text), "not of the family")
            tx.set(node, accounts.table.column("edge;", codecs.text), "not of the family")
        for number, name in enumerate(("ann", "bob", "zoe")):
            tx.set("hub", family.column(name), number)
        tx.set("zoe", family.column("hub"), 9)
        tx.set("joe", accounts.owner, "Joe, without edges")
    return family


def families_of(rows: Sequence[Row[str]], edges: Family[int]) -> dict[str, dict[str, int]]:
    return {row.key: row.family(edges) for row in rows}


HUB = {"ann": 0, "bob": 1, "zoe": 2}


def test_a_scan_of_a_family_finds_its_columns_and_no_others(
    db: Database, edges: Family[int]
) -> None:
    with db.snapshot() as snapshot:
        for _ in range(2):
            rows = list(snapshot.scan(edges.table, columns=[edges]))
            assert families_of(rows, edges) == {"hub": HUB, "zoe": {"hub": 9}}
            assert [list(row) for row in rows] == [
                [b"edge:ann", b"edge:bob", b"edge:zoe"],
                [b"edge:hub"],
            ]


@needs_backward_scans
def test_columns_and_families_are_read_together(
    db: Database, accounts: Accounts, edges: Family[int]
) -> None:
    with db.snapshot() as snapshot:
        found = snapshot.scan(edges.table, columns=[accounts.owner, edges], reverse=True, limit=3)
        zoe, joe, hub = list(found)
        assert [row.get(accounts.owner) for row in (zoe, joe, hub)] == [
            "Zoe",
            "Joe, without edges",
            "Hub",
        ]
        assert (joe.family(edges), hub.family(edges)) == ({}, HUB)
        shown = [(column.name.decode(), value) for column, value in hub.items()]
        assert shown == [("owner", "Hub"), ("edge:ann", 0), ("edge:bob", 1), ("edge:zoe", 2)]
        assert accounts.balance not in hub


def test_rows_of_one_scan_end_at_the_limit_and_the_next_scan_goes_on(
    db: Database, edges: Family[int]
) -> None:
    with db.snapshot() as snapshot:
        (first,) = snapshot.scan(edges.table, columns=[edges], limit=1)
        rest = list(snapshot.scan(edges.table, columns=[edges], start=first.key + "\0"))
        assert (first.key, [row.key for row in rest]) == ("hub", ["zoe"])


def test_get_many_reads_families(db: Database, accounts: Accounts, edges: Family[int]) -> None:
    with db.snapshot() as snapshot:
        for _ in range(2):
            hub, joe = snapshot.get_many(edges.table, ["hub", "joe"], [edges])
            assert (hub.family(edges), len(hub), bool(joe)) == (HUB, 3, False)
        both = snapshot.get_many(edges.table, ["joe"], [edges, accounts.owner])[0]
        assert list(both) == [b"owner"]


def test_a_transaction_sees_its_own_writes_in_a_family(
    db: Database, accounts: Accounts, edges: Family[int]
) -> None:
    with db.transaction() as tx:
        tx.set("hub", edges.column("bob"), 11)
        tx.delete("hub", edges.column("ann"))
        tx.set("hub", edges.column("a new one"), 12)
        tx.set("hub", accounts.balance, 13)
        tx.set("joe", edges.column("hub"), 14)
        tx.delete("zoe", edges.column("hub"))
        tx.lock("zoe", edges.column("lock"))
        tx.lock("ann", edges.column("lock"), shared=True)
        hub = {"a new one": 12, "bob": 11, "zoe": 2}
        for _ in range(2):
            rows = list(tx.scan(edges.table, columns=[edges]))
            assert families_of(rows, edges) == {"hub": hub, "joe": {"hub": 14}}
            assert all(name.startswith(edges.prefix) for row in rows for name in row)
        found = tx.get_many(edges.table, ["hub", "zoe", "joe"], [edges])
        assert families_of(found, edges) == {"hub": hub, "zoe": {}, "joe": {"hub": 14}}
    with db.snapshot() as snapshot:
        rows = list(snapshot.scan(edges.table, columns=[edges]))
        assert families_of(rows, edges) == {"hub": hub, "joe": {"hub": 14}}


@both_kinds
async def _edges_of(reads: aio.Transaction | aio.Snapshot, edges: Family[int]) -> dict[str, Any]:
    found = {row.key: row.family(edges) async for row in reads.scan(edges.table, columns=[edges])}
    (hub,) = await reads.get_many(edges.table, ["hub"], [edges])
    assert hub.family(edges) == found["hub"]
    return found


@pytest.mark.parametrize("kind", [Snapshot, Transaction])
def test_asyncio_reads_families(db: Database, edges: Family[int], kind: type) -> None:
    with db.snapshot() if kind is Snapshot else db.transaction() as reads:
        for _ in range(2):
            assert _edges_of(reads, edges) == {"hub": HUB, "zoe": {"hub": 9}}


def test_a_snapshot_of_the_past_shows_the_family_as_it_was(
    db: Database, edges: Family[int]
) -> None:
    before = db.timestamp()
    with db.transaction() as tx:
        tx.set("hub", edges.column("later"), 1)
        tx.delete("zoe", edges.column("hub"))
    with db.snapshot(at=before) as then, db.snapshot() as now:
        past = families_of(list(then.scan(edges.table, columns=[edges])), edges)
        assert past == {"hub": HUB, "zoe": {"hub": 9}}
        assert families_of(list(now.scan(edges.table, columns=[edges])), edges) == {
            "hub": HUB | {"later": 1}
        }


def test_what_is_no_family_of_the_table_is_refused(
    db: Database, accounts: Accounts, edges: Family[int]
) -> None:
    other = Table("another").family("edge:", codecs.integer)
    with db.snapshot() as snapshot:
        with pytest.raises(SchemaError, match=r"Family\('another', .* is not a column of table"):
            list(snapshot.scan(edges.table, columns=[other]))
        many = [accounts.table.family(f"f{number}:", codecs.raw) for number in range(101)]
        with pytest.raises(InvalidArgument, match="columns: expected at most 100 families"):
            list(snapshot.scan(edges.table, columns=many))
        assert list(snapshot.scan(edges.table, columns=many[:100])) == []
