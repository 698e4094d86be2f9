"""How many documents have each pair of words: kept up to date, and exported when it changes."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from percolator import Table, aio, codecs, connect, observes
from percolator.recipes import CombineQueue, ExportQueue, KeyChange

text = Table("documents").column("text", codecs.text)
counted = text.table.column("counted", codecs.json)
pairs = CombineQueue("pairs", key=codecs.text, value=codecs.integer, combine=sum)
exported: dict[str, int] = {}
outgoing = ExportQueue("outgoing", key=codecs.text, value=codecs.integer)
send = outgoing.exporter()(lambda some: exported.update({one.key: one.value for one in some}))


@observes(text)
async def count(tx: aio.Transaction, row: str) -> None:
    words = (await tx.get(row, text, "")).split()
    before, after = set(await tx.get(row, counted, [])), set(map(" ".join, pairwise(words)))
    for pair in sorted(before ^ after):
        await pairs.add(tx, pair, 1 if pair in after else -1)
    tx.set(row, counted, sorted(after))


@pairs.changed
async def tell(tx: aio.Transaction, changes: Sequence[KeyChange[str, int]]) -> None:
    for pair, _, new in changes:
        await outgoing.put(tx, pair, new or 0)


if __name__ == "__main__":
    documents = {}
    with connect() as db:
        db.create_table(text.table)
        pairs.create(db)
        outgoing.create(db)
        with db.run_observers([count, tell, send]):
            for number in range(150):  # later texts replace earlier ones
                words = " ".join(Random(number).choices("abcde", k=6))  # noqa: S311 - made-up data
                documents[str(number % 50)] = words
                db.set_many([(str(number % 50), {text: words})])
            db.wait_for_observers()
    plain = Counter(pair for one in documents.values() for pair in set(pairwise(one.split())))
    if {tuple(pair.split()): number for pair, number in exported.items() if number} != plain:
        raise SystemExit("the exported counts differ from those of plain Python")
    print(f"{len(plain)} pairs of words, as plain Python counts them")
