"""The recipes of a chaos run: what its clients write, and its workers combine, export and index."""

from __future__ import annotations

from percolator import Table, aio, codecs
from percolator.recipes import Index, ShardedCounter
from tests.integration import recipes_at_work
from tests.integration.recipes_at_work import mirrors, out, sums

counts = ShardedCounter("counts", shards=4)

people = Table("people")
city = people.column("city", codecs.text)
by_city: Index[str, str, str] = Index("people by city", on=city, value=codecs.text)

deeds = Table("deeds")
done = deeds.column("done", codecs.boolean)
"""Written by each transaction in a row of its own: it says whether that has committed."""

observers = [*recipes_at_work.observers, by_city.observer()]


async def create(database: aio.Database) -> None:
    for table in (mirrors, people, deeds):
        await database.create_table(table)
    await sums.create(database, tablets=2)
    await out.create(database)
    await counts.create(database)
    await by_city.create(database)
