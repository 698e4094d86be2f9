"""A table that is dropped and created again while other clients use it, and servers are paused.

Each table of that name has an id. Whoever drops one knows the ids of all that were there before.
When the drop has returned, no transaction that begins then reads or commits anything in them,
whatever its client and their servers have heard. The same holds when the creation of the next table
has returned. A value says the id of the table that it was written into. The checker judges the rows
of another table, which stays, as in all workloads.
"""

from __future__ import annotations

import asyncio

from percolator import Table
from percolator.aio import Transaction
from percolator.codecs import raw
from percolator.errors import PercolatorError, SchemaError
from tests.simulation.recorded_tx import Cells, RecordedTx, table_names
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload, preferred

DROPPED = "table dropped while others use it"
DROP_REPEATED = "drop repeated after a time-out"

_AGAIN = Table("again", key=raw)
_VALUE = _AGAIN.column("v", raw)
_ROWS = [b"a", b"k", b"s"]
_SPLITS = [b"g", b"p"]
_OF_CLIENTS = ([b"a"], [b"k"], [b"s"], _ROWS)
"""The rows that each client uses. One that uses all, as the one that drops the table does, soon
learns of the drop from a server that has heard of it. The others go on using their only server."""
_BETWEEN_DROPS_SECONDS = 0.5
_SHORT_SECONDS, _LONG_SECONDS = 0.4, 5.0
"""Time-outs: the first is over before a silent server is replaced, the other is not."""
_ALONE_SHARE = 0.3
"""The share of reads without a transaction."""


class Recreations(Workload):
    """Nothing is read from a table, or committed into it, after it was dropped."""

    def __init__(self) -> None:
        self.cells = Cells("kept", (b"m",))
        self._known: set[int] = set()
        """The ids of all tables that anybody has used."""
        self._gone: set[int] = set()
        """Those that nobody may use any more."""
        self._next_drop = 0.0

    async def load(self, session: Session) -> None:
        await session.database.create_table(_AGAIN, _SPLITS, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        now = asyncio.get_running_loop().time()
        if now >= self._next_drop and preferred(session, _OF_CLIENTS) is _ROWS:
            self._next_drop = now + _BETWEEN_DROPS_SECONDS
            session.skip()
            await self._replace(session)
        elif session.random.random() < _ALONE_SHARE:
            session.skip()
            await self._read_alone(session)
        else:
            await self._use(session)

    async def _use(self, session: Session) -> None:
        chance, gone = session.random, frozenset(self._gone)
        rows, column, value = preferred(session, _OF_CLIENTS), self.cells.column(), session.unique()
        row = chance.choice(rows)
        reads, writes = chance.random() < 0.7, chance.random() < 0.6
        used: list[int] = []

        async def body(tx: RecordedTx) -> None:
            await tx.get(row, column)
            await tx.set(row, column, value)  # so that its outcome can be told at the end
            if reads:
                found = await tx.itself.get_many(_AGAIN, rows, [_VALUE])
                used.append(self._noted(tx.itself))
                self._judge_reads(session, gone, used[0], [one.get(_VALUE) for one in found])
            if writes:
                await tx.itself.lock(row, _VALUE)  # which names the table
                used.append(self._noted(tx.itself))
                await tx.itself.set(row, _VALUE, b"%d %s" % (used[-1], value))

        committed = await session.run(body)
        if writes and committed and not gone.isdisjoint(used):
            session.broken(f"a commit into table {used[-1]}, which was dropped, was acknowledged")

    def _noted(self, tx: Transaction) -> int:
        """The id of the table that the transaction uses."""
        (found,) = [key for key, name in table_names(tx).items() if name == _AGAIN.name]
        self._known.add(found)
        return found

    async def _read_alone(self, session: Session) -> None:
        gone = frozenset(self._gone)
        row = session.random.choice(preferred(session, _OF_CLIENTS))
        try:
            found = await session.database.get(row, _VALUE)
        except PercolatorError as error:
            session.expect(error)
        else:
            self._judge_reads(session, gone, 0, [found])

    def _judge_reads(
        self, session: Session, gone: frozenset[int], used: int, values: list[bytes | None]
    ) -> None:
        """`gone` is what was gone before the call. If `used` is 0, the table is not known."""
        if used in gone:
            session.broken(f"table {used}, which was dropped, was read")
        for value in values:
            table = 0 if value is None else int(value.split()[0])
            if table in gone or (used and table not in (0, used)):
                session.broken(f"{value!r} of another table was read in table {used or 'unknown'}")

    async def _replace(self, session: Session) -> None:
        """Drops the table, again after a time-out, and creates the next one in any case."""
        database, catalog = session.database, session.database.internal.engine.catalog
        seconds = session.random.choice((_SHORT_SECONDS, _LONG_SECONDS))
        try:
            found = await catalog.describe(_AGAIN.name, database.internal.deadline(seconds))
            self._known.add(found.table_id)
        except PercolatorError as error:
            session.expect(error)
        before = frozenset(self._known)
        for _ in range(2):
            try:
                await database.drop_table(_AGAIN, missing_ok=True, timeout=seconds)
            except PercolatorError as error:
                session.expect(error)
                session.strike(DROP_REPEATED)
            else:
                self._gone |= before
                session.strike(DROPPED)
                break
        # The only tablet of the next table may be at another server than the one that is silent.
        splits = session.random.choice((_SPLITS, []))
        try:
            await database.create_table(_AGAIN, splits, exist_ok=True, timeout=seconds)
        except PercolatorError as error:
            session.expect(error)
        else:
            info = catalog.known(_AGAIN.name)
            if info is not None:
                self._gone |= {one for one in before if one < info.table_id}
