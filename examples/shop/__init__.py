"""A shop: stock, orders, and the best sellers of each category, which observers keep up to date.

Run `percolator dev --observers examples.shop:observers`, and then `python -m examples.shop`."""

from examples.shop.best_sellers import count, rank

observers = [count, rank]
