"""How many different numbers there are: a tree of counts, sixteen children below each node."""

from collections import Counter
from collections.abc import Sequence

import percolator
from percolator import aio, codecs
from percolator.recipes import CombineQueue, KeyChange

LEVELS = 4
Node = tuple[int, ...]
_node = codecs.tuple_of(codecs.ordered_integer, codecs.ordered_integer)
tree = CombineQueue("tree", key=_node, value=codecs.integer, combine=sum)
"""A number counts how often it came, and the nodes above it count the different numbers below."""


@tree.changed
async def climb(tx: aio.Transaction, changes: Sequence[KeyChange[Node, int]]) -> None:
    above: Counter[Node] = Counter()
    for (level, node), old, new in changes:
        if level == LEVELS:
            above[level - 1, node >> 4] += old is None
        elif level:
            above[level - 1, node >> 4] += (new or 0) - (old or 0)
    for parent, count in above.items():
        if count:
            await tree.add(tx, parent, count)


observers = [climb]

if __name__ == "__main__":
    given = [number * number % 997 for number in range(600)]
    with percolator.connect() as db:
        tree.create(db)
        with db.run_observers(observers):
            for start in range(0, len(given), 50):
                with db.transaction() as tx:
                    for number in given[start : start + 50]:
                        tree.add(tx, (LEVELS, number), 1)
            db.wait_for_observers()
        with db.snapshot() as snapshot:
            found = tree.get(snapshot, (0, 0))
    if found != len(set(given)):
        raise SystemExit(f"{found} numbers, and plain Python counts {len(set(given))}")
    print(f"{found} different numbers, as plain Python counts them")
