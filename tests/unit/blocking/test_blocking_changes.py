"""The changes of a table, for programs without asyncio."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice

import pytest

from percolator import ChangeKind, Database, Table, codecs, testing
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.protocol import change_reader as following

orders = Table("orders")
price = orders.column("price", codecs.integer)


def test_changes_are_followed_and_left_at_any_place() -> None:
    with testing.connect() as db:
        db.create_table(orders, change_feed=True)
        start = db.timestamp()
        for number in range(5):
            with db.transaction() as tx:
                tx.set("a", price, number)
        assert [one.value(price) for one in islice(db.changes(orders, after=start), 3)] == [0, 1, 2]
        until = db.timestamp()
        found = list(db.changes(orders, after=start, until=until, before=True))
        assert [one.kind for one in found] == [ChangeKind.INSERT] + [ChangeKind.UPDATE] * 4
        assert db.newest_change(orders, after=start) == found[-1].commit_timestamp
        db.set_change_feed(orders, on=False)
        db.set_change_feed(orders, on=True)
        assert list(db.changes(orders, after=db.timestamp(), until=db.timestamp())) == []


@pytest.fixture(name="db")
def _db() -> Iterator[Database]:
    with testing.connect() as db:
        db.create_table(orders, change_feed=True)
        yield db


def put(db: Database, row: str, value: int) -> None:
    with db.transaction() as tx:
        tx.set(row, price, value)


def oldest(db: Database) -> int:
    return db._asynchronous.internal.engine.open_starts.oldest()


def test_without_a_position_they_begin_at_the_call(db: Database) -> None:
    with db.changes(orders) as changes:
        put(db, "a", 1)
        assert next(changes).key == "a"


def test_what_is_wrong_is_told_at_the_call(db: Database) -> None:
    accounts = Table("accounts")
    db.create_table(accounts)
    old = db.timestamp()
    with pytest.raises(InvalidArgument, match=r"^table: 'accounts' has no change feed"):
        db.changes(accounts)
    with pytest.raises(InvalidArgument, match=r"^until: .* is before after"):
        db.changes(orders, until=old)
    with pytest.raises(SchemaError, match="nothing"):
        db.changes(Table("nothing"))
    db.set_change_feed(accounts, on=True)
    put(db, "a", 1)
    assert oldest(db) == 0


def test_a_quiet_follower_knows_how_far_it_is(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "TOLD_SECONDS", 0.0)
    start = db.timestamp()
    with db.changes(orders, after=start) as changes:
        pages = changes.pages()
        idle = next(pages)
        assert idle.changes == []
        assert start < idle.reached
        put(db, "a", 1)
        page = next(page for page in pages if page.changes)
        assert [one.value(price) for one in page.changes] == [1]
    with db.changes(orders, after=idle.reached) as again:
        change = next(again)
        assert change.value(price) == 1
        assert idle.reached <= again.reached < change.commit_timestamp
        with pytest.raises(UsageError, match="single changes"):
            next(again.pages())
    until = db.timestamp()
    whole = db.changes(orders, after=start, until=until)
    assert len(list(whole)) == 1
    assert whole.reached == until


def test_closing_the_database_is_said_to_its_followers() -> None:
    db = testing.connect()
    db.create_table(orders, change_feed=True)
    start = db.timestamp()
    put(db, "a", 1)
    changes = db.changes(orders, after=start)
    next(changes)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(next, changes)
        db.close()
        with pytest.raises(UsageError, match=r"database (was|is) closed"):
            waiting.result()
    with pytest.raises(UsageError, match="no longer followed"):
        next(changes)


def test_history_is_no_longer_kept_for_who_has_left(db: Database) -> None:
    start = db.timestamp()
    put(db, "a", 1)
    with db.changes(orders, after=start) as changes:
        assert oldest(db) == start
    assert list(changes) == []
    changes = db.changes(orders, after=start)
    gc.disable()
    try:
        next(changes)
        assert oldest(db) == start
        del changes
        db.timestamp()  # the loop has had its turn
        db.timestamp()
        assert oldest(db) == 0
    finally:
        gc.enable()


def test_a_table_that_lacks_its_feed_is_not_taken_for_one_with_a_feed(db: Database) -> None:
    accounts = Table("accounts")
    db.create_table(accounts)
    with pytest.raises(InvalidArgument, match=r"exists without one.*set_change_feed") as refused:
        db.create_table(accounts, exist_ok=True, change_feed=True)
    assert refused.value.field == "change_feed"
    db.create_table(accounts, exist_ok=True)
    db.set_change_feed(accounts, on=True)
    db.create_table(accounts, exist_ok=True, change_feed=True)
    db.create_table(orders, exist_ok=True)
    assert db.newest_change(orders, after=db.timestamp()) is None


# Changes that are closed while a thread waits for the next one, and threads that wait together.


pytestmark = pytest.mark.timeout(30)


def put_one(db: Database, row: str) -> None:
    with db.transaction() as tx:
        tx.set(row, price, 1)


def test_closing_ends_an_iteration_that_waits_in_another_thread(db: Database) -> None:
    changes = db.changes(orders)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(lambda: [change.key for change in changes])
        reached = changes.reached
        put_one(db, "a")
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
    put_one(db, "a")
    put_one(db, "b")
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
        put_one(db, "a")
        assert waiting.pop().result().key == "a"
    changes.close()
