"""The blocking API with threads, forks, and processes that end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path

import pytest

import percolator
import percolator.testing
from percolator import (
    ChangeKind,
    Database,
    InvalidArgument,
    Receipt,
    SchemaError,
    Table,
    Ticket,
    UsageError,
    aio,
    codecs,
    testing,
)
from percolator.aio import Outcome, Transaction
from percolator.blocking import api
from percolator.blocking.api import ROWS_PER_PORTION
from percolator.blocking.loop_thread import LoopThread, shared
from percolator.errors import DeadlineExceeded
from percolator.observers import worker as asynchronous_worker
from percolator.process import new_event_loop
from percolator.protocol.commit import Commit
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.shared.driver import SharedCommit
from percolator.protocol.turns import HOLD_SECONDS

ROOT = Path(__file__).parents[3]
accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


def _run(program: str, *, seconds: float = 30.0) -> str:
    """Runs a program in a separate process, so that forks and exits do not affect this one."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
    )
    assert done.stderr == ""
    return done.stdout


FORKS = """
    import os, sys
    import percolator, percolator.testing
    {before}
    for inside in {insides}:
        child = os.fork()
        if child == 0:
            try:
                exec(inside)
            except percolator.UsageError as error:
                print(inside, error)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
    {after}
"""


BEFORE_FORKS = """
    db = percolator.testing.connect()
    table = percolator.Table("t")
    column = table.column("c", percolator.codecs.integer)
    db.create_table(table)
    tx = db.transaction()
"""

REFUSED_IN_A_CHILD = [
    "db.tables()",
    "db.transaction()",
    "db.snapshot()",
    "db.close()",
    "db.set_many([])",
    "tx.set('a', column, 1)",
    "percolator.testing.connect()",
    "percolator.connect('localhost:1')",
]


def test_after_a_fork_the_client_refuses_all_use_in_the_child() -> None:
    """In the parent, which has many children, it continues to work."""
    said = _run(
        FORKS.format(
            before=BEFORE_FORKS, insides=REFUSED_IN_A_CHILD, after="db.tables(); db.close()"
        )
    ).splitlines()
    for inside, words in zip(REFUSED_IN_A_CHILD, said, strict=True):
        assert words.startswith(inside)
        assert "spawn or forkserver" in words


def test_a_process_that_had_not_used_the_client_may_fork() -> None:
    inside = "print(percolator.testing.connect().tables())"
    assert _run(FORKS.format(before="", insides=[inside], after="pass")) == "[]\n"


def test_a_program_that_ends_finishes_what_was_committed() -> None:
    """Others should not have to wait for the locks of a program that has ended in order."""
    program = """
        import asyncio, atexit
        import percolator.testing
        from percolator import Table, codecs
        from percolator.protocol import commit
        from percolator.testing import cluster_in_memory
        table = Table("t")
        column = table.column("c", codecs.text)
        clusters = []
        created = cluster_in_memory.ClusterInMemory.__init__
        def note(self, clock):
            created(self, clock)
            clusters.append(self)
        cluster_in_memory.ClusterInMemory.__init__ = note
        commit_secondaries = commit.commit_secondaries
        async def slowly(*arguments):
            await asyncio.sleep(0.3)
            await commit_secondaries(*arguments)
        commit.commit_secondaries = slowly
        def locks():
            (cluster,) = clusters
            print(sum(tablet.statistics().locks for tablet in cluster.tablets.values()))
        atexit.register(locks)  # called after the client's own, which is registered later
        db = percolator.testing.connect()
        db.create_table(table, splits=["m"])
        with db.transaction() as tx:
            for row in "abcxyz":
                tx.set(row, column, row)
    """
    assert _run(program) == "0\n"


def test_a_program_that_ends_does_not_wait_for_forgotten_scans_and_snapshots() -> None:
    program = """
        import warnings
        import percolator.testing
        from percolator import Limits, Table, codecs
        warnings.simplefilter("ignore", RuntimeWarning)  # about the transaction, which is dropped
        table = Table("t")
        column = table.column("c", codecs.integer)
        # On a busy machine all transactions are slow, and would be logged.
        db = percolator.testing.connect(limits=Limits(slow_transaction_seconds=600.0))
        db.create_table(table)
        db.set_many((f"{i:05}", {column: i}) for i in range(3000))
        snapshot = db.snapshot()
        rows = snapshot.scan(table)
        print(next(rows).key)
        tx = db.transaction()
        tx.set("a", column, 1)
    """
    assert _run(program) == "00000\n"


def test_interrupting_a_call_cancels_it() -> None:
    class Never:
        cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            Never.cancelled.set()

    pending = shared().start(never)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert Never.cancelled.wait(5.0)


def test_interrupting_a_commit_raises_the_interrupt_and_determines_the_outcome(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Commit, deadline: float) -> int:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.get_running_loop().create_future()
        return 0

    percolator_db.create_table(accounts)
    monkeypatch.setattr(Commit, "prewrite", never)
    monkeypatch.setattr(Transaction, "_only_two_phases", True)
    tx = percolator_db.transaction()

    def write() -> None:
        with tx:
            tx.set("bob", balance, 1)
            tx.commit()

    with pytest.raises(KeyboardInterrupt):
        write()
    assert tx.outcome is Outcome.ABORTED


def test_a_database_that_cannot_be_closed_does_not_keep_others_open() -> None:
    program = """
        import logging
        from percolator.blocking import loop_thread

        async def fine():
            print("closed", flush=True)

        async def broken():
            raise RuntimeError("broken")

        logging.disable(logging.CRITICAL)
        for name, close in (("a", fine), ("b", broken), ("c", fine)):
            loop_thread.shared().close_at_exit(name, close)
    """
    assert _run(program) == "closed\nclosed\n"


def test_a_blocking_call_in_the_clients_own_loop_is_refused_instead_of_hanging(
    percolator_db: Database,
) -> None:
    async def mistake() -> None:
        percolator_db.tables()

    with pytest.raises(UsageError, match="would never return"):
        shared().call(mistake)


def test_pages_that_are_left_end_if_they_are_collected_in_the_loops_own_thread() -> None:
    closed = threading.Event()

    async def pages() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    left = [shared().iterate(pages())]
    next(left[0])

    async def collect() -> None:  # as the garbage collector does, which runs in any thread
        left.clear()

    shared().call(collect)
    assert closed.wait(20.0)


def test_what_a_transaction_has_written_is_read_without_a_trip_to_the_event_loop(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    percolator_db.create_table(accounts)
    for serializable in (False, True):
        with percolator_db.transaction(serializable=serializable) as tx:
            tx.set("bob", balance, 7)
            with monkeypatch.context() as patch:
                patch.setattr(tx, "_call", lambda *_: pytest.fail("it took a trip"))
                assert tx.get("bob", balance) == 7


def test_a_closed_database_refuses_use_and_closing_twice_is_harmless() -> None:
    db = percolator.testing.connect()
    db.close()
    db.close()
    for use in (db.tables, db.transaction, db.snapshot, db.timestamp):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_the_next_page_of_a_snapshot_is_fetched_while_this_one_is_used(
    percolator_db: Database,
) -> None:
    percolator_db.create_table(accounts)
    percolator_db.set_many((f"{i:05}", {balance: i}) for i in range(2500))
    with percolator_db.snapshot() as snapshot:
        rows = snapshot.scan(accounts)
        next(rows)
        # The first page has been returned; the second is fetched without being requested.
        deadline = time.monotonic() + 5.0
        while snapshot.statistics.round_trips < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert snapshot.statistics.round_trips >= 3
        assert sum(1 for _ in rows) == 2499


def test_a_database_for_tests_opens_within_milliseconds() -> None:
    percolator.testing.connect().close()  # starts the loop's thread
    times = []
    for _ in range(5):
        before = time.perf_counter()
        db = percolator.testing.connect()
        times.append(time.perf_counter() - before)
        db.close()
    assert min(times) < 0.010


def test_each_database_for_tests_is_empty() -> None:
    with percolator.testing.connect() as one, percolator.testing.connect() as other:
        one.create_table(accounts)
        assert one.tables() == ["accounts"]
        assert other.tables() == []


@pytest.mark.parametrize("kind", ["transaction", "snapshot"])
def test_a_scan_ends_with_its_transaction_or_snapshot(percolator_db: Database, kind: str) -> None:
    """That includes rows of a page of which some were already used."""
    percolator_db.create_table(accounts)
    percolator_db.set_many((f"{i:05}", {balance: i}) for i in range(10))
    with getattr(percolator_db, kind)() as reads:
        rows = reads.scan(accounts)
        assert next(rows).key == "00000"
    with pytest.raises(UsageError, match="begin a new one"):
        next(rows)


def test_what_belongs_to_a_connection_says_what_to_use_in_another_process(
    percolator_db: Database,
) -> None:
    for one in (percolator_db, percolator_db.snapshot(), percolator_db.transaction()):
        with pytest.raises(UsageError, match=r"call percolator\.spark\.database\(\) instead"):
            pickle.dumps(one)


def test_one_that_has_read_for_update_may_fail_before_and_after_the_end_of_its_database() -> None:
    db = percolator.testing.connect()
    db.create_table(accounts)
    with pytest.raises(ValueError, match="no money"), db.transaction() as tx:  # noqa: PT012
        tx.get("bob", balance, for_update=True)
        raise ValueError("no money")
    began = time.monotonic()
    tx = db.transaction()
    tx.get("bob", balance, for_update=True)
    assert time.monotonic() - began < HOLD_SECONDS
    db.close()
    tx.rollback()


def test_a_transaction_of_a_closed_database_refuses_writes() -> None:
    db = percolator.testing.connect()
    db.create_table(accounts)
    tx = db.transaction()
    tx.set("bob", balance, 1)
    db.close()
    for use in (lambda: tx.set("joe", balance, 1), lambda: tx.delete("bob", balance), tx.commit):
        with pytest.raises(UsageError, match="the database is closed"):
            use()
    tx.rollback()


def test_nothing_is_written_after_the_source_of_a_bulk_write_has_failed(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def slowly(self: object, rows: object, **_: object) -> int:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return 0

    def rows() -> Iterator[tuple[str, dict[object, int]]]:
        for i in range(ROWS_PER_PORTION):
            yield f"{i:05}", {balance: i}
        assert begun.wait(5.0)
        raise ValueError("no more rows")

    monkeypatch.setattr(aio.Database, "set_many", slowly)
    with pytest.raises(ValueError, match="no more rows"):
        percolator_db.set_many(rows())
    assert ended.is_set()


def test_an_interrupted_close_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that stays open would make others wait for locks that will never be released."""
    db = percolator.testing.connect()
    closed = threading.Event()
    inner = db._asynchronous.internal.engine

    class Part:
        async def close(self) -> None:
            closed.set()

    async def endless(timeout_seconds: float) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(600)

    monkeypatch.setattr(inner.env.background, "drain", endless)
    inner._closing.append(Part())
    with pytest.raises(KeyboardInterrupt):
        db.close()
    assert closed.wait(5.0)


def test_an_interrupt_while_waking_the_loop_does_not_keep_it_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fine() -> str:
        return "fine"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    thread = shared()
    assert thread.call(fine) == "fine"
    with monkeypatch.context() as patch:
        patch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.start(fine)
    woken = threading.Event()

    async def wake() -> None:
        woken.set()

    thread.start(wake)
    assert woken.wait(5.0)


# The library and its services run on uvloop, and do without it; a task does not end the loop.


def test_the_loop_is_that_of_uvloop_if_it_is_installed() -> None:
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__.startswith("uvloop")


def test_without_uvloop_the_loop_is_that_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("has_uvloop", [True, False])
def test_a_task_that_exits_ends_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, has_uvloop: bool
) -> None:
    """It would end the thread of the event loop, and all callers would wait for ever."""
    if not has_uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    thread = LoopThread()
    tasks: list[asyncio.Task[None]] = []

    async def leave() -> None:
        raise error

    async def call() -> str:
        tasks.append(asyncio.create_task(leave()))
        await asyncio.sleep(0.05)
        return "went on"

    pending = thread.start(call)
    assert pending._done.acquire(timeout=5.0)
    pending._done.release()
    assert pending.wait() == "went on"
    with pytest.raises(error):
        tasks[0].result()
    thread._at_exit()
    assert not thread._running


# A program that declares another codec asks for the table's, in the thread of the event loop.

pages = Table("pages")
size = pages.column("size", codecs.integer)
text = pages.column("size", codecs.text)


@pytest.fixture(name="pages_db")
def database_with_pages(percolator_db: Database) -> Database:
    percolator_db.create_table(pages)
    return percolator_db


def test_what_is_refused_in_the_programs_thread_is_asked_in_the_loops(
    pages_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages_db.run(lambda tx: tx.set("a", size, 1))
    asked, threads = threading.Event(), []

    async def refresh(table_id: int) -> None:
        threads.append(threading.get_ident())
        asked.set()

    monkeypatch.setattr(pages_db._asynchronous.internal.engine._newer_schemas, "_fetch", refresh)
    (row,) = pages_db.snapshot().get_many(pages, ["a"])
    with pytest.raises(SchemaError, match="declares the codec text"):
        row.get(text)
    assert asked.wait(10.0)
    assert threads != [threading.get_ident()]


def test_a_row_that_outlives_its_database_still_refuses(pages_db: Database) -> None:
    pages_db.run(lambda tx: tx.set("a", size, 1))
    (row,) = pages_db.snapshot().get_many(pages, ["a"])
    pages_db.close()
    with pytest.raises(SchemaError, match="declares the codec text"):
        row.get(text)


# The changes of a table, for programs without asyncio.

orders = Table("orders")
price = orders.column("price", codecs.integer)


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
@pytest.mark.parametrize("in_pages", [False, True])
def test_closing_ends_an_iteration_that_waits_in_another_thread(
    db: Database, in_pages: bool
) -> None:
    changes = db.changes(orders)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(list, changes.pages() if in_pages else changes)
        reached = changes.reached
        put(db, "a", 1)
        while changes.reached == reached:  # until it waits for the change after that
            db.timestamp()
        changes.close()
        assert following.result()
    assert oldest(db) == 0


@pytest.mark.timeout(30)
def test_closing_at_any_moment_ends_it(db: Database) -> None:
    with ThreadPoolExecutor() as threads:
        for _ in range(50):
            changes = db.changes(orders)
            following = threads.submit(next, changes, None)
            changes.close()
            assert following.result() is None
            assert oldest(db) == 0


@pytest.mark.timeout(30)
def test_changes_end_where_they_were_closed_and_closing_again_does_nothing(db: Database) -> None:
    start = db.timestamp()
    put(db, "a", 1)
    put(db, "b", 1)
    changes = db.changes(orders, after=start)
    assert next(changes).key == "a"
    reached = changes.reached
    with ThreadPoolExecutor() as threads:
        for closing in [threads.submit(changes.close) for _ in range(10)]:
            closing.result()
    changes.close()
    assert [next(changes, None), next(changes, None)] == [None, None]
    assert changes.reached == reached


@pytest.mark.timeout(30)
def test_a_second_thread_that_waits_is_refused_and_the_first_goes_on(db: Database) -> None:
    changes = db.changes(orders)
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(next, changes) for _ in range(2)]
        refused, waiting = wait(both, return_when=FIRST_COMPLETED)
        with pytest.raises(UsageError, match="another call waits for the next"):
            refused.pop().result()
        put(db, "a", 1)
        assert waiting.pop().result().key == "a"
    changes.close()


# Shared transactions without asyncio.


def test_threads_write_one_transaction(pages_db: Database) -> None:

    def write(number: int, ticket: Ticket) -> Receipt:
        with pages_db.share(ticket, task=str(number)) as share:
            share.set(f"page-{number}", size, number)
            share.delete(f"old-{number}", size)
            return share.finish()

    with pages_db.shared_transaction() as whole, ThreadPoolExecutor(4) as threads:
        receipts = list(threads.map(write, range(4), [whole.ticket] * 4))
        assert sum(receipt.cells for receipt in receipts) == 8
        assert not list(pages_db.snapshot().scan(pages))
        commit = whole.commit(receipts)
    assert commit == whole.commit_timestamp == whole.abort()
    assert [row[size] for row in pages_db.snapshot().scan(pages)] == [0, 1, 2, 3]


def test_without_a_commit_nothing_stays(pages_db: Database) -> None:
    with pages_db.shared_transaction() as whole, pages_db.share(whole.ticket, task="1") as share:
        share.set("page", size, 1)
        receipt = share.finish()
    with pages_db.share(whole.ticket, task="2") as share:
        share.set("other", size, 1)
        share.abandon()
    with pytest.raises(UsageError, match="rolled back"):
        whole.commit([receipt])
    assert not list(pages_db.snapshot().scan(pages))


def test_the_programs_error_is_raised_even_if_the_rollback_fails(
    pages_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing keeps the transaction alive any longer."""

    async def fails(*_arguments: object) -> int:
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr("percolator.aio.shared.roll_back_all", fails)
    monkeypatch.setattr(Attempt, "abandon", fails)
    whole = pages_db.shared_transaction()
    with pytest.raises(ValueError, match="of the program"):
        _fails_in_both_blocks(pages_db, whole)
    with pytest.raises(UsageError, match="was left to expire"):
        whole.commit([])
    with pytest.raises(DeadlineExceeded), pages_db.shared_transaction():
        pass


def _fails_in_both_blocks(db: percolator.Database, whole: percolator.SharedTransaction) -> None:
    with whole, db.share(whole.ticket, task="1") as share:
        share.set("page", size, 1)
        raise ValueError("of the program")


def test_two_threads_do_not_commit_at_the_same_time(
    pages_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, refused = threading.Event(), threading.Event()
    correct = SharedCommit.commit

    async def waits(self: SharedCommit, deadline: float) -> int:
        entered.set()
        await asyncio.to_thread(refused.wait, 10.0)
        return await correct(self, deadline)

    monkeypatch.setattr(SharedCommit, "commit", waits)
    with pages_db.shared_transaction() as whole, ThreadPoolExecutor(1) as thread:
        with pages_db.share(whole.ticket, task="1") as share:
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


# The blocking and the asyncio API have the same names, all documented. That their signatures are
# the same, a test of the generator says (tests/unit/repository/test_tidy.py).

INTERNAL = {
    # Parts that one API is built from, and that the other does not need.
    "over",
    "internal",
    "aclose",
    "ended",
    "require_not_ended",
    "scan_pages",
    "find_pages",
    "scan_cells",
    "scan_joined",
    "get_cells",
    # What is written once for asyncio, and called by both kinds (percolator/decorators.py).
    "call_inside",
}

PAIRS: list[tuple[type, type]] = [
    (percolator.Database, aio.Database),
    (percolator.Transaction, aio.Transaction),
    (percolator.Snapshot, aio.Snapshot),
    (percolator.Changes, aio.Changes),
    (api.Worker, asynchronous_worker.Worker),
]


def _public(kind: type) -> dict[str, object]:
    return {
        name: member
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and name not in INTERNAL
    }


def _instance_attributes(kind: type) -> set[str]:
    """Attributes that only exist on instances are documented where they are set."""
    source = inspect.getsource(kind)
    return {
        line.strip().removeprefix("self.").split(" ")[0].rstrip(":")
        for line in source.splitlines()
        if line.strip().startswith("self.") and " = " in line and "._" not in line
    }


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_the_names_are_the_same(blocking: type, asynchronous: type) -> None:
    attributes = {
        name
        for kind in asynchronous.__mro__[:-1]
        for name in _instance_attributes(kind)
        if name not in INTERNAL
    }
    names = set(_public(asynchronous)) | {name for name in attributes if "." not in name}
    assert set(_public(blocking)) == names


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_everything_public_is_documented(blocking: type, asynchronous: type) -> None:
    for kind in (blocking, asynchronous):
        undocumented = [
            name
            for name, member in _public(kind).items()
            if callable(member) and not inspect.getdoc(member)
        ]
        assert undocumented == []


def test_every_public_name_exists() -> None:
    for name in percolator.__all__:
        assert getattr(percolator, name) is not None
    assert set(percolator.__all__) <= set(dir(percolator))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = percolator.nonsense  # type: ignore[attr-defined]
