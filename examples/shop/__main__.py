"""Clerks place and cancel orders at once; then plain Python finds the best sellers, too."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import percolator
from examples.shop import best_sellers as best
from examples.shop import orders as shop

GOODS = {"tea": "drinks", "coffee": "drinks", "cup": "dishes", "plate": "dishes", "jug": "dishes"}


def work(db: percolator.Database, clerk: int) -> None:
    for number in range(20):
        with suppress(shop.SoldOut):
            order, name = f"{clerk}-{number}", random.choice(list(GOODS))  # noqa: S311 - no secret
            shop.place(db, order, name, number % 9 + 1)
            if number % 5 == 0:
                shop.cancel(db, order)


if __name__ == "__main__":
    with percolator.connect() as db:
        db.create_tables([shop.products, shop.orders, best.ranking], exist_ok=True)
        best.sold.create(db)
        db.register_observers([best.count])  # the first order may come before the worker
        new = [name for name in GOODS if db.get(name, shop.stock) is None]
        db.set_many((name, {shop.category: GOODS[name], shop.stock: 500}) for name in new)
        with ThreadPoolExecutor() as threads:
            list(threads.map(work, [db] * 4, random.sample(range(10**9), 4)))
        db.wait_for_observers()
        with db.snapshot() as snapshot:
            sales: Counter[str] = Counter()
            for row in snapshot.scan(shop.orders):
                sales[row[shop.product]] += row[shop.pieces]
            for kind in ("dishes", "drinks"):
                ranked = sorted((-sales[name], name) for name in GOODS if GOODS[name] == kind)
                found = best.best_sellers(snapshot, kind)
                if found != [(name, -less) for less, name in ranked[:3] if less]:
                    raise SystemExit(f"{kind}: {found}, and plain Python finds {ranked}")
                print(f"{kind}: {found}, as plain Python finds in all orders")
