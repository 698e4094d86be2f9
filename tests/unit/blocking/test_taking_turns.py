"""Threads that fight over one cell take turns there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from percolator import Database, Table, Transaction, codecs, transactional
from percolator.protocol.contention.hot_cells import TURN_SECONDS, HotCells

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)

THREADS = 20
INCREMENTS = 200
_SECONDS = 5.0


def hot_cells(db: Database) -> HotCells:
    return db._database.internal.engine.env.hot_cells


def until_none_is_hot(db: Database) -> None:
    """Waits until the loop's thread has ended the last turn."""
    deadline = time.monotonic() + _SECONDS
    while len(hot_cells(db)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(hot_cells(db)) == 0


def test_a_storm_of_increments_costs_few_attempts(percolator_db: Database) -> None:
    db, attempts = percolator_db, list[str]()
    db.create_table(accounts)

    @transactional
    def increment(tx: Transaction, row: str) -> None:
        attempts.append(row)
        tx.set(row, balance, tx.get(row, balance, default=0) + 1)

    rows = [str(number % 5) for number in range(INCREMENTS)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda row: increment(db, row), rows))
    with db.snapshot() as snapshot:
        assert sum(row[balance] for row in snapshot.scan(accounts)) == INCREMENTS
    assert len(attempts) <= 2 * INCREMENTS
    until_none_is_hot(db)


@pytest.mark.filterwarnings("ignore:a transaction is run inside of another one")
def test_a_function_that_calls_itself_in_its_turn_does_not_wait_behind_itself(
    percolator_db: Database,
) -> None:
    db, inner_calls = percolator_db, list[int]()
    db.create_table(accounts)

    @transactional
    def recursive(tx: Transaction, *, is_inner: bool) -> None:
        value = tx.get("bob", balance, default=0)
        if not is_inner and len(inner_calls) < 2:
            inner_calls.append(len(hot_cells(db)))
            began = time.monotonic()
            recursive(db, is_inner=True)
            assert time.monotonic() - began < TURN_SECONDS / 2
        tx.set("bob", balance, value + 1)

    recursive(db, is_inner=False)
    assert inner_calls == [0, 1]
    until_none_is_hot(db)


def test_a_function_that_fails_in_its_turn_lets_the_next_go(percolator_db: Database) -> None:
    db, attempts = percolator_db, list[int]()
    db.create_table(accounts)

    def fail_at_last(tx: Transaction) -> None:
        value = tx.get("bob", balance, default=0)
        attempts.append(value)
        if len(attempts) == 1:
            with db.transaction() as other:
                other.set("bob", balance, value + 10)
        else:
            assert len(hot_cells(db)) == 1
            raise ValueError("a mistake of the program")
        tx.set("bob", balance, value + 1)

    with pytest.raises(ValueError, match="a mistake"):
        db.run(fail_at_last)
    assert attempts == [0, 10]
    until_none_is_hot(db)
