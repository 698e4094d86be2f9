"""Observers in a cluster whose cells are in Google's emulator."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import percolator
from percolator import Database, Table, Transaction, codecs, observes
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(300)]

PAGES = Table("pages")
BODY = PAGES.column("body", codecs.text)
LENGTH = PAGES.column("length", codecs.integer)


@observes(BODY, name="measure")
def measure(tx: Transaction, row: str) -> None:
    tx.set(row, LENGTH, len(tx.get(row, BODY, "")))


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGTABLE_EMULATOR_HOST", address)
        store = f"bigtable://observers/i{uuid.uuid4().hex[:20]}"
        data = tmp_path_factory.mktemp("cluster")
        with LocalCluster(data, store=store, tablet_servers=0, start_seconds=60.0) as started:
            yield started


def _lengths(db: Database) -> dict[str, int]:
    with db.snapshot() as snapshot:
        return {row.key: row[LENGTH] for row in snapshot.scan(PAGES, columns=[LENGTH])}


def test_a_client_that_knows_an_older_schema_notifies_a_new_observer(
    cluster: LocalCluster,
) -> None:
    fresh = observes(BODY, name="measure", backfill=False)(measure.function)
    with percolator.connect(cluster.address) as db, percolator.connect(cluster.address) as other:
        db.create_table(PAGES)
        with other.transaction() as tx:  # now it knows the table, without an observer
            tx.set("before", BODY, "text")
        db.register_observers([fresh])
        with other.transaction() as tx:
            tx.set("after", BODY, "text")
        with db.run_observers([fresh]):
            db.wait_for_observers(timeout=60)
            assert _lengths(db) == {"after": 4}
            assert db.backfill(fresh) == 2
            db.wait_for_observers(timeout=60)
            assert _lengths(db) == {"before": 4, "after": 4}
