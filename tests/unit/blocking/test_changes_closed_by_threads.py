"""Changes that are closed while a thread waits for the next one, and threads that wait together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from percolator import Database, Table, codecs, testing
from percolator.errors import UsageError

orders = Table("orders")
price = orders.column("price", codecs.integer)

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(name="db")
def _db() -> Iterator[Database]:
    with testing.connect() as db:
        db.create_table(orders, change_feed=True)
        yield db


def put(db: Database, row: str) -> None:
    with db.transaction() as tx:
        tx.set(row, price, 1)


def oldest(db: Database) -> int:
    return db._database.internal.engine.open_starts.oldest()


def test_closing_ends_an_iteration_that_waits_in_another_thread(db: Database) -> None:
    changes = db.changes(orders)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(lambda: [change.key for change in changes])
        reached = changes.reached
        put(db, "a")
        while changes.reached == reached:  # until it waits for the change after that
            db.timestamp()
        changes.close()
        assert following.result() == ["a"]
    assert oldest(db) == 0


def test_closing_ends_an_iteration_over_pages_in_another_thread(db: Database) -> None:
    changes = db.changes(orders)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(lambda: len(list(changes.pages())))
        reached = changes.reached
        while changes.reached == reached:
            db.timestamp()
        changes.close()
        assert following.result() > 0
    assert list(changes.pages()) == []


def test_closing_at_any_moment_ends_it(db: Database) -> None:
    with ThreadPoolExecutor() as threads:
        for _ in range(50):
            changes = db.changes(orders)
            following = threads.submit(next, changes, None)
            changes.close()
            assert following.result() is None
            assert oldest(db) == 0


def test_changes_end_where_they_were_closed_and_closing_again_does_nothing(db: Database) -> None:
    start = db.timestamp()
    put(db, "a")
    put(db, "b")
    changes = db.changes(orders, after=start)
    assert next(changes).key == "a"
    reached = changes.reached
    with ThreadPoolExecutor() as threads:
        for closing in [threads.submit(changes.close) for _ in range(10)]:
            closing.result()
    changes.close()
    assert [next(changes, None), next(changes, None)] == [None, None]
    assert changes.reached == reached


def test_a_second_thread_that_waits_is_refused_and_the_first_goes_on(db: Database) -> None:
    changes = db.changes(orders)
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(next, changes) for _ in range(2)]
        refused, waiting = wait(both, return_when=FIRST_COMPLETED)
        with pytest.raises(UsageError, match="another call waits for the next"):
            refused.pop().result()
        put(db, "a")
        assert waiting.pop().result().key == "a"
    changes.close()
