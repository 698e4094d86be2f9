"""Products and orders. Each function is a transaction: an order takes its pieces from the stock."""

from percolator import Table, Transaction, codecs, transactional

products = Table("products")
category = products.column("category", codecs.text)
stock = products.column("stock", codecs.integer)
orders = Table("orders")
product = orders.column("product", codecs.text)
pieces = orders.column("pieces", codecs.integer)  # 0: cancelled


class SoldOut(Exception):
    """There are fewer pieces than ordered."""


@transactional
def place(tx: Transaction, order: str, name: str, number: int) -> None:
    """Orders pieces of a product. The same order again changes nothing."""
    if tx.get(order, pieces) is None:
        if tx.increment(name, stock, -number) < 0:
            raise SoldOut(name)
        tx.set(order, {product: name, pieces: number})


@transactional
def cancel(tx: Transaction, order: str) -> None:
    """Puts the pieces of an order back into the stock."""
    if number := tx.get(order, pieces):
        tx.increment(tx.get(order, product, default=""), stock, number)
        tx.set(order, pieces, 0)
