"""The example's view is what all orders add up to, whatever happened to them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from examples.counter_view import (
    EVERYBODY,
    change_something,
    order,
    orders,
    recomputed,
    shown,
    sums,
    view,
)
from percolator import Database
from percolator.testing import run_observers
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]


@pytest.fixture
def db(percolator_db: Database) -> Database:
    percolator_db.create_table(orders)
    percolator_db.create_table(sums)
    return percolator_db


def _put(db: Database, row: str, value: Any) -> None:
    with db.transaction() as tx:
        if value is None:
            tx.delete(row, order)
        else:
            tx.set(row, order, value)


def _view(db: Database) -> dict[str, tuple[int, int]]:
    with db.snapshot() as snapshot:
        return shown(snapshot)


def test_a_new_a_changed_and_a_cancelled_order_are_counted_once_each(db: Database) -> None:
    _put(db, "1", {"customer": "ann", "amount": 10})
    _put(db, "2", {"customer": "ann", "amount": 5})
    run_observers(db, [view()])
    assert _view(db) == {"ann": (2, 15), EVERYBODY: (2, 15)}

    _put(db, "1", {"customer": "bob", "amount": 20})
    run_observers(db, [view()])
    assert _view(db) == {"ann": (1, 5), "bob": (1, 20), EVERYBODY: (2, 25)}

    _put(db, "1", None)
    run_observers(db, [view()])
    assert _view(db) == {"ann": (1, 5), EVERYBODY: (1, 5)}


@pytest.mark.parametrize("seed", range(3))
def test_the_view_is_what_all_orders_add_up_to_also_with_another_number_of_rows(
    db: Database, seed: int
) -> None:
    chance = random.Random(seed)
    for shards in (1, 16):
        for _ in range(5):
            for _ in range(chance.randint(1, 40)):
                change_something(db, chance)
            run_observers(db, [view(shards)])
            with db.snapshot() as snapshot:
                assert shown(snapshot) == recomputed(snapshot)
