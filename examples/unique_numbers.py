"""How many different numbers there are: a tree of counts, sixteen children below each node."""

from collections import Counter
from collections.abc import Sequence

import percolator
from percolator import aio, codecs
from percolator.recipes import CombineQueue, KeyChange

LEVELS = 4
Node = tuple[int, ...]
numbers = CombineQueue("numbers", key=codecs.ordered_integer, value=codecs.boolean, combine=any)
_node = codecs.tuple_of(codecs.ordered_integer, codecs.ordered_integer)
nodes = CombineQueue("nodes", key=_node, value=codecs.integer, combine=sum)


@numbers.changed
async def grow(tx: aio.Transaction, changes: Sequence[KeyChange[int, bool]]) -> None:
    for node, count in Counter(number >> 4 for number, _, _ in changes).items():
        await nodes.add(tx, (LEVELS - 1, node), count)


@nodes.changed
async def climb(tx: aio.Transaction, changes: Sequence[KeyChange[Node, int]]) -> None:
    above: Counter[Node] = Counter()
    for (level, node), old, new in changes:
        if level:
            above[level - 1, node >> 4] += (new or 0) - (old or 0)
    for parent, count in above.items():
        await nodes.add(tx, parent, count)


observers = [grow, climb]

if __name__ == "__main__":
    given = [number * number % 997 for number in range(600)]
    with percolator.connect() as db:
        numbers.create(db)
        nodes.create(db)
        with db.run_observers(observers):
            for start in range(0, len(given), 50):
                with db.transaction() as tx:
                    for number in given[start : start + 50]:
                        numbers.add(tx, number, value=True)
            db.wait_for_observers()
        with db.snapshot() as snapshot:
            found = nodes.get(snapshot, (0, 0))
    if found != len(set(given)):
        raise SystemExit(f"{found} numbers, and plain Python counts {len(set(given))}")
    print(f"{found} different numbers, as plain Python counts them")
