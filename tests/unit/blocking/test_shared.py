"""Shared transactions without asyncio."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import percolator
from percolator import ConflictError, InvalidArgument, Receipt, Table, Ticket, UsageError, codecs
from percolator.errors import DeadlineExceeded
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.shared.driver import SharedCommit

pages = Table("pages")
size = pages.column("size", codecs.integer)


def test_threads_write_one_transaction(percolator_db: percolator.Database) -> None:
    db = percolator_db
    db.create_table(pages)

    def write(number: int, ticket: Ticket) -> Receipt:
        with db.share(ticket, task=str(number)) as share:
            share.set(f"page-{number}", size, number)
            share.delete(f"old-{number}", size)
            return share.finish()

    with db.shared_transaction() as whole, ThreadPoolExecutor(4) as threads:
        receipts = list(threads.map(write, range(4), [whole.ticket] * 4))
        assert sum(receipt.cells for receipt in receipts) == 8
        with db.snapshot() as before:
            assert not list(before.scan(pages))
        commit = whole.commit(receipts)
    assert commit == whole.commit_timestamp == whole.abort()
    with db.snapshot() as after:
        assert [row[size] for row in after.scan(pages)] == [0, 1, 2, 3]


def test_without_a_commit_nothing_stays(percolator_db: percolator.Database) -> None:
    db = percolator_db
    db.create_table(pages)
    with db.shared_transaction() as whole, db.share(whole.ticket, task="1") as share:
        share.set("page", size, 1)
        receipt = share.finish()
    with db.share(whole.ticket, task="2") as share:
        share.set("other", size, 1)
        share.abandon()
    with pytest.raises(UsageError, match="rolled back"):
        whole.commit([receipt])
    with db.snapshot() as after:
        assert not list(after.scan(pages))


def test_what_was_changed_since_is_a_conflict(percolator_db: percolator.Database) -> None:
    db = percolator_db
    db.create_table(pages)
    since = db.timestamp()
    with db.transaction() as tx:
        tx.set("page", size, 1)
    with (
        db.shared_transaction(unchanged_since=since) as whole,
        db.share(whole.ticket, task="1") as share,
    ):
        share.set("page", size, 2)
        with pytest.raises(ConflictError, match="since"):
            share.finish()


def test_the_programs_error_is_raised_even_if_the_rollback_fails(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing keeps the transaction alive any longer."""
    db = percolator_db
    db.create_table(pages)

    async def fails(*_arguments: object) -> int:
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr("percolator.aio.shared.roll_back_all", fails)
    monkeypatch.setattr(Attempt, "abandon", fails)
    whole = db.shared_transaction()
    with pytest.raises(ValueError, match="of the program"):
        _fails_in_both_blocks(db, whole)
    with pytest.raises(UsageError, match="was left to expire"):
        whole.commit([])
    with pytest.raises(DeadlineExceeded), db.shared_transaction():
        pass


def _fails_in_both_blocks(db: percolator.Database, whole: percolator.SharedTransaction) -> None:
    with whole, db.share(whole.ticket, task="1") as share:
        share.set("page", size, 1)
        raise ValueError("of the program")


def test_two_threads_do_not_commit_at_the_same_time(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = percolator_db
    db.create_table(pages)
    entered, refused = threading.Event(), threading.Event()
    correct = SharedCommit.commit

    async def waits(self: SharedCommit, deadline: float) -> int:
        entered.set()
        await asyncio.to_thread(refused.wait, 10.0)
        return await correct(self, deadline)

    monkeypatch.setattr(SharedCommit, "commit", waits)
    with db.shared_transaction() as whole, ThreadPoolExecutor(1) as thread:
        with db.share(whole.ticket, task="1") as share:
            share.set("page", size, 1)
            receipt = share.finish()
        first = thread.submit(whole.commit, [receipt])
        assert entered.wait(10.0)
        try:
            with pytest.raises(UsageError, match="is being committed"):
                whole.commit([receipt])
        finally:
            refused.set()
        assert first.result() is not None


def test_a_database_for_tests_takes_the_ttl_that_a_cluster_takes(
    percolator_db: percolator.Database,
) -> None:
    """Its locks live much longer than those of a client."""
    for ttl in (15.0, 60.0):
        with percolator_db.shared_transaction(ttl=ttl) as whole:
            assert whole.ticket.ttl_seconds >= ttl
    with pytest.raises(InvalidArgument, match="ttl: expected 15 to"):
        percolator_db.shared_transaction(ttl=14.9)
