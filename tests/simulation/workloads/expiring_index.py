"""An index whose entries expire with the column: each write of the column renews all of them.

The same words are written again and again, some before their time is up, so that an entry that is
not renewed is gone while its column is still there. Each snapshot has to find the rows by exactly
the words that it reads in them.
"""

from __future__ import annotations

import asyncio

from percolator import codecs
from percolator.recipes import Index
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

ENTRIES_STAY = "an entry that expires was written again"
TTL_MILLISECONDS = 250
_ROWS = [b"row-%d" % number for number in range(3)]
_WORDS = [b"ant", b"bee", b"cat"]
_READS_SHARE = 0.4
_PAUSE_SECONDS_MAX = 0.2


class ExpiringIndex(Workload):
    """A column with an index that is written in the same transactions."""

    ttls = {  # noqa: RUF012 - nobody changes it
        b"v": TTL_MILLISECONDS,
        b"entry": TTL_MILLISECONDS,
        b"indexed": TTL_MILLISECONDS,
    }

    def __init__(self) -> None:
        self.cells = Cells("brief texts")
        self._index: Index[bytes, bytes, bytes] = Index(
            "brief words", on=self.cells.column(), value=codecs.raw, values=bytes.split
        )

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells, Cells(self._index.table.name))

    async def step(self, session: Session) -> None:
        chance, index = session.random, self._index
        row, reads = chance.choice(_ROWS), chance.random() < _READS_SHARE
        text = b" ".join(chance.sample(_WORDS, 2))
        pause = chance.random() * _PAUSE_SECONDS_MAX

        async def body(tx: RecordedTx) -> None:
            if reads:
                await asyncio.sleep(pause)
                if problems := await index.check(tx.itself):
                    session.broken(f"an index and its column expire at their own times: {problems}")
                return
            before = await index._entries.recorded(tx.itself, row)
            if not before.isdisjoint(index._entries.parts(row, text)):
                session.strike(ENTRIES_STAY)
            await index.set(tx.itself, row, text)
            tx.note_writes()

        await session.run(body)
