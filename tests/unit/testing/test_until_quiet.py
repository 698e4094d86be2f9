"""Observers in tests: run in the test's own thread, in order, until nothing is left to do."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

import percolator.testing
from percolator import (
    ConflictError,
    Database,
    Observer,
    Table,
    UsageError,
    aio,
    codecs,
    observes,
    transactional,
)
from percolator.testing import local_database
from percolator.testing.cluster_in_memory import ClusterInMemory
from percolator.testing.pytest_plugin import percolator_db
from percolator.v1 import master_pb2
from percolator.world import MachineClock

__all__ = ["percolator_db"]

docs = Table("docs")
source = docs.column("source", codecs.integer)
copy = docs.column("copy", codecs.integer)
total = docs.column("total", codecs.integer)


@observes(source, name="copying")
def copying(tx: Any, row: str) -> None:
    tx.set(row, copy, tx.get(row, source))


@observes(copy, name="summing")
async def summing(tx: Any, row: str) -> None:
    await tx.set("sum", total, await tx.get("sum", total, default=0) + await tx.get(row, copy))


@pytest.fixture(name="docs_db")
def database_with_docs(percolator_db: Database) -> Database:
    percolator_db.create_table(docs)
    return percolator_db


def put(db: Database, row: str, value: int) -> None:
    with db.transaction() as tx:
        tx.set(row, source, value)


def summed(db: Database) -> int | None:
    with db.snapshot() as snapshot:
        return snapshot.get("sum", total)


def test_chains_run_to_their_end_and_each_change_runs_once(docs_db: Database) -> None:
    put(docs_db, "a", 1)
    put(docs_db, "b", 2)
    assert percolator.testing.run_observers(docs_db, [copying, summing]) == 4
    assert summed(docs_db) == 3
    put(docs_db, "c", 4)
    assert percolator.testing.run_observers(docs_db, [copying, summing]) == 2
    assert percolator.testing.run_observers(docs_db, [copying, summing]) == 0
    assert summed(docs_db) == 7


def test_observers_run_in_the_order_of_the_changes(docs_db: Database) -> None:
    order: list[tuple[str, int]] = []

    @observes(source, name="noting")
    def noting(tx: Any, row: str) -> None:
        order.append((row, threading.get_ident()))

    percolator.testing.run_observers(docs_db, [noting])
    for row in ("m", "z", "a"):
        put(docs_db, row, 1)
    percolator.testing.run_observers(docs_db, [noting])
    here = threading.get_ident()
    assert order == [("m", here), ("z", here), ("a", here)]


def test_an_observers_exception_propagates_and_its_change_stays_pending(
    docs_db: Database,
) -> None:
    broken = True

    @observes(source, name="failing")
    def failing(tx: Any, row: str) -> None:
        if broken:
            raise ValueError("broken")

    put(docs_db, "a", 1)
    with pytest.raises(ValueError, match="broken"):
        percolator.testing.run_observers(docs_db, [failing])
    broken = False
    assert percolator.testing.run_observers(docs_db, [failing]) == 1
    assert percolator.testing.run_observers(docs_db, [failing]) == 0


lines = Table("lines", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
line = lines.column("line", codecs.text)


@observes(line, name="rejecting")
def rejecting(tx: Any, row: tuple[str, int]) -> None:
    if tx.get(row, line) == "bad":
        raise ValueError("a bad line")


@observes(line, name="asynchronously rejecting")
async def rejecting_async(tx: Any, row: tuple[str, int]) -> None:
    if await tx.get(row, line) == "bad":
        raise ValueError("a bad line")


@pytest.mark.parametrize("observer", [rejecting, rejecting_async])
def test_what_an_observer_raises_has_a_note_that_names_the_observer_and_the_cell(
    percolator_db: Database, observer: Observer
) -> None:
    percolator_db.create_table(lines)
    percolator_db.set_many((("a", number), {line: "good"}) for number in range(9))
    percolator_db.set_many([(("b", 17), {line: "bad"})])
    with pytest.raises(ValueError, match="a bad line") as raised:
        percolator.testing.run_observers(percolator_db, [observer])
    assert raised.value.__notes__ == [
        f"""observer {observer.name!r}, row ["b", 17], column 'line' of table 'lines'"""
    ]


def test_an_observer_that_triggers_itself_without_end_is_named(docs_db: Database) -> None:
    @observes(source, name="endless")
    def endless(tx: Any, row: str) -> None:
        tx.set(row, source, tx.get(row, source) + 1)

    put(docs_db, "a", 1)
    expected = "after 20 runs; the next one would be 'endless' for row 'a', column 'source'"
    with pytest.raises(UsageError, match=expected):
        percolator.testing.run_observers(docs_db, [endless], runs_max=20)


def write_elsewhere(db: Database, row: str) -> None:
    with db.transaction() as other:
        other.set(row, copy, -1)


def test_a_run_of_what_was_written_before_is_repeated_after_a_conflict(
    docs_db: Database,
) -> None:
    begun = []

    @observes(source, name="disturbed")
    def disturbed(tx: Any, row: str) -> None:
        tx.set(row, copy, tx.get(row, source))
        begun.append(row)
        if len(begun) == 1:
            write_elsewhere(docs_db, row)

    put(docs_db, "a", 1)
    assert percolator.testing.run_observers(docs_db, [disturbed]) == 1
    assert begun == ["a", "a"]
    assert docs_db.get("a", copy) == 1


def test_an_observer_that_conflicts_with_itself_without_end_is_named(
    docs_db: Database,
) -> None:
    @observes(source, name="writing-past-tx")
    def writing_past_tx(tx: Any, row: str) -> None:
        tx.set(row, copy, 1)
        write_elsewhere(docs_db, row)

    put(docs_db, "a", 1)
    with pytest.raises(UsageError, match=r"20 of which have lost .*'writing-past-tx'"):
        percolator.testing.run_observers(docs_db, [writing_past_tx], runs_max=20)


def test_a_worker_runs_alongside_a_blocking_program(docs_db: Database) -> None:
    done = threading.Event()

    @observes(source, name="telling")
    def telling(tx: Any, row: str) -> None:
        done.set()

    with docs_db.run_observers([telling]) as worker:
        put(docs_db, "a", 1)
        assert done.wait(20.0)
        assert ("docs", "telling") in worker.counters
        assert worker.stop()
        worker.wait()


@pytest.mark.real_time
async def test_asyncio_observers_run_until_nothing_is_left_to_do() -> None:
    async with percolator.testing.connect_async() as db:
        await db.create_table(docs)
        async with db.transaction() as tx:
            await tx.set("a", source, 5)
        assert await percolator.testing.run_observers_async(db, [copying, summing]) == 2
        async with db.snapshot() as snapshot:
            assert await snapshot.get("sum", total) == 5


@pytest.mark.real_time
async def test_what_runs_observers_names_the_kind_of_database_that_it_takes() -> None:
    async with percolator.testing.connect_async() as db:
        with pytest.raises(
            UsageError, match=r"as percolator\.testing\.connect returns it, got one of"
        ):
            percolator.testing.run_observers(db, [copying])  # type: ignore[arg-type]  # the mistake


def test_what_runs_observers_of_asyncio_does_so_too(percolator_db: Database) -> None:
    running = percolator.testing.run_observers_async(percolator_db, [copying])  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UsageError, match=r"connect_async returns it, got one of the other API"):
        running.send(None)


def test_an_observer_without_a_backfill_runs_only_for_what_is_written_later(
    docs_db: Database,
) -> None:
    runs: list[str] = []

    @observes(source, name="later", backfill=False)
    def later(tx: Any, row: str) -> None:
        runs.append(row)

    put(docs_db, "a", 1)
    assert percolator.testing.run_observers(docs_db, [later]) == 0
    put(docs_db, "b", 2)
    assert percolator.testing.run_observers(docs_db, [later]) == 1
    assert runs == ["b"]


# The database in memory on a busy machine: nothing fails because time has passed.

SECONDS_BETWEEN_LOOKS = 4.0

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


class BusyClock(MachineClock):
    """Seconds pass between any two looks at it."""

    def __init__(self) -> None:
        self._looks = itertools.count(1)

    def wall_milliseconds(self) -> int:
        return super().wall_milliseconds() + int(self.monotonic_seconds() * 1_000)

    def monotonic_seconds(self) -> float:
        return next(self._looks) * SECONDS_BETWEEN_LOOKS


@transactional
async def increment(tx: aio.Transaction) -> None:
    for row in ("a", "z"):
        await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


async def test_no_limit_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_database, "MachineClock", BusyClock)
    async with percolator.testing.connect_async() as db:
        await db.create_table(accounts, splits=["m"])
        for _ in range(10):
            await increment(db)
        async with db.snapshot() as snapshot:
            assert await snapshot.get_many([("a", balance), ("z", balance)]) == [10, 10]


async def test_a_write_does_not_wait_for_ever_for_a_shared_transaction_of_its_own_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = BusyClock()
    monkeypatch.setattr(local_database, "MachineClock", lambda: clock)
    async with percolator.testing.connect_async() as db:
        await db.create_table(accounts)
        async with db.shared_transaction() as whole:
            async with db.share(whole.ticket, task="1") as share:
                await share.set("a", balance, 1)
                receipt = await share.finish()
            began = clock.monotonic_seconds()
            with pytest.raises(ConflictError, match="is locked by"):
                async with db.transaction() as tx:
                    await tx.set("a", balance, 2)
            assert clock.monotonic_seconds() - began < 300.0
            await whole.commit([receipt])
        assert await db.get("a", balance) == 1


# Tables of a database for tests, when several calls want the same one.


async def test_a_table_that_several_calls_create_at_once_is_one_table() -> None:
    cluster = ClusterInMemory(MachineClock())
    request = master_pb2.CreateTableRequest(name="accounts", splits=[b"m"], exist_ok=True)
    made = await asyncio.gather(*(cluster.create_table(request) for _ in range(3)))
    assert [one.created for one in made] == [True, False, False]
    assert len({one.table.table_id for one in made}) == 1
    assert len(cluster.tablets) == 2
