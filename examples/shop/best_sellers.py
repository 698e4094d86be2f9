"""The best sellers of each category, without ever looking through orders or products again."""

from collections.abc import Sequence

from examples.shop.orders import category, pieces, product
from percolator import Snapshot, Table, aio, codecs, observes
from percolator.recipes import CombineQueue, KeyChange

sold = CombineQueue("sold", key=codecs.text, value=codecs.integer, combine=sum)  # by product
_place = codecs.tuple_of(codecs.text, codecs.ordered_integer, codecs.text)
ranking = Table("ranking", key=_place)  # category, pieces sold (-9 is before -8), product
listed = ranking.column("listed", codecs.boolean)


@observes(pieces)
async def count(tx: aio.Transaction, order: str) -> None:
    """Adds what has changed since the order was last counted: less, if it was cancelled."""
    was, now = await tx.previous(order, pieces, 0), await tx.get(order, pieces, 0)
    if now != was:
        await sold.add(tx, await tx.get(order, product, default=""), now - was)


@sold.changed
async def rank(tx: aio.Transaction, changes: Sequence[KeyChange[str, int]]) -> None:
    """Moves products to their new places. A product keeps its category."""
    for name, old, new in changes:
        kind = await tx.get(name, category, default="other")
        if old:
            tx.delete((kind, -old, name), listed)
        if new:
            tx.set((kind, -new, name), listed, True)


def best_sellers(snapshot: Snapshot, kind: str, number: int = 3) -> list[tuple[str, int]]:
    """The products of a category that sold most, with the pieces sold."""
    ranks = [row.key for row in snapshot.scan(ranking, prefix=(kind,), limit=number)]
    return [(name, -less) for _, less, name in ranks]
