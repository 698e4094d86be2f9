"""The shop's best sellers are those that plain Python finds, and no piece is sold twice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from examples.shop import observers
from examples.shop.best_sellers import best_sellers, ranking, sold
from examples.shop.orders import SoldOut, cancel, category, orders, place, products, stock
from percolator import Database
from percolator.testing import run_observers
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]

GOODS = {"tea": "drinks", "coffee": "drinks", "milk": "drinks", "beer": "drinks", "cup": "dishes"}


@pytest.fixture
def db(percolator_db: Database) -> Database:
    percolator_db.create_tables([products, orders, ranking])
    sold.create(percolator_db)
    percolator_db.set_many((name, {category: GOODS[name], stock: 60}) for name in GOODS)
    return percolator_db


def _best(db: Database, kind: str) -> list[tuple[str, int]]:
    with db.snapshot() as snapshot:
        return best_sellers(snapshot, kind)


@pytest.mark.parametrize("seed", range(5))
def test_best_sellers_and_stock_are_what_plain_python_computes(db: Database, seed: int) -> None:
    chance = random.Random(seed)
    placed: dict[str, tuple[str, int]] = {}
    left = Counter(dict.fromkeys(GOODS, 60))
    for number in range(60):
        order, name, wanted = str(number), chance.choice(list(GOODS)), chance.randint(1, 9)
        if wanted > left[name]:
            with pytest.raises(SoldOut):
                place(db, order, name, wanted)
            continue
        place(db, order, name, wanted)
        placed[order] = name, wanted
        left[name] -= wanted
        if chance.random() < 0.3:
            gone = chance.choice(list(placed))
            cancel(db, gone)
            name, wanted = placed.pop(gone)
            left[name] += wanted
        if chance.random() < 0.2:
            run_observers(db, observers)
    run_observers(db, observers)

    sales: Counter[str] = Counter()
    for name, wanted in placed.values():
        sales[name] += wanted
    for kind in ("drinks", "dishes"):
        ranked = sorted((-sales[name], name) for name in GOODS if GOODS[name] == kind)
        assert _best(db, kind) == [(name, -less) for less, name in ranked[:3] if less]
    assert {name: db.get(name, stock) for name in GOODS} == left


def test_an_order_that_is_placed_or_cancelled_twice_counts_once(db: Database) -> None:
    for _ in range(2):
        place(db, "1", "cup", 5)
        run_observers(db, observers)
    assert (_best(db, "dishes"), db.get("cup", stock)) == ([("cup", 5)], 55)
    for _ in range(2):
        cancel(db, "1")
        run_observers(db, observers)
    assert (_best(db, "dishes"), db.get("cup", stock)) == ([], 60)


def test_the_shop_has_at_most_120_lines() -> None:
    files = Path("examples/shop").glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= 120
