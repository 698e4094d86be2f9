"""A column whose values expire beside one whose values stay: in the midst of transactions, too.

Transactions read, wait, and read again, while values come to their ends. The checker knows of the
time to live, so it decides for each read and scan whether the value had to be there. The values of
one read without a timestamp must be those of a moment between two timestamps.
"""

from __future__ import annotations

import asyncio

from percolator.errors import PercolatorError
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"row-%d" % number for number in range(6)]
_TTL_MILLISECONDS = 250
_PAUSE_SECONDS_MAX = 0.25
_LONG_BYTES = 1500
_TIMEOUT_SECONDS = 2.0


class Expiring(Workload):
    """Promises nothing beyond what the checker requires, and that reads of now are of now."""

    ttls = {b"v": _TTL_MILLISECONDS}  # noqa: RUF012 - nobody changes it

    def __init__(self) -> None:
        self.cells = Cells("expiring", (_ROWS[2], _ROWS[4]))
        self._brief, self._lasting = self.cells.column("v"), self.cells.column("w")

    async def step(self, session: Session) -> None:
        if session.random.random() < 0.2:
            await self._read_now(session)
        else:
            await self._transaction(session)

    async def _transaction(self, session: Session) -> None:
        chance = session.random
        pause = chance.random() * _PAUSE_SECONDS_MAX * (chance.random() < 0.3)

        async def body(tx: RecordedTx) -> None:
            rows = chance.sample(_ROWS, 3)
            await tx.get_many(rows, self._brief)
            if pause:
                await asyncio.sleep(pause)
                await tx.get_many(rows, self._brief)
            match chance.randrange(7):
                case 0 | 1 | 2:
                    await tx.set(rows[0], self._brief, session.unique())
                case 3:
                    await tx.set(rows[0], self._brief, session.unique().ljust(_LONG_BYTES))
                    await tx.set(rows[1], self._lasting, session.unique())
                case 4:
                    await tx.delete(rows[0], self._brief)
                case 5:
                    for row in rows:
                        await tx.set(row, self._brief, session.unique())
                case _:
                    await tx.scan(
                        self.cells.table,
                        reverse=chance.random() < 0.4,
                        limit=chance.choice((0, 0, 2)),
                    )

        await session.run(body)

    async def _read_now(self, session: Session) -> None:
        session.skip()
        database, row = session.database, session.random.choice(_ROWS)
        seen: list[bytes | None] = []
        try:
            before = await database.timestamp(timeout=_TIMEOUT_SECONDS)
            now = await database.get(row, self._brief, timeout=_TIMEOUT_SECONDS)
            after = await database.timestamp(timeout=_TIMEOUT_SECONDS)
            for at in (before, after):
                async with database.snapshot(at=at, timeout=_TIMEOUT_SECONDS) as snapshot:
                    seen.append(await snapshot.get(row, self._brief))
        except PercolatorError as error:
            session.expect(error)
            return
        # Values are unique: between two snapshots with the same one, there was no other.
        if seen[0] is not None and seen[0] == seen[1] != now:
            session.broken(f"{now!r} is there now, and {seen[0]!r} just before and after")
