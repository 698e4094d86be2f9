"""A table that is dropped and created again all the time, among transactions that use it.

The first transaction that finds such a table empty gives it a *generation*, a value of its own.
Whatever a transaction writes into the table says which generation it has read there. The checker
judges the rows of another table, which stays, as in all workloads; the table that goes is judged
here.
"""

from __future__ import annotations

from percolator import Table
from percolator.aio import Snapshot, Transaction
from percolator.codecs import raw
from percolator.errors import PercolatorError, SchemaError
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_PASSING = Table("passing", key=raw)
_VALUE = _PASSING.column("v", raw)
_GENERATION = b"generation"
_ROWS = [b"a", b"n", b"t", b"z"]
_WITNESSES = [b"a witness", b"n witness", b"z witness"]
_SPLITS = [b"g", b"p"]
_DROPS_SHARE = 0.05
_CALL_SECONDS = 3.0


class Successors(Workload):
    """What was read from a table is never written into the next one of the same name, and no
    snapshot shows a table that is younger."""

    def __init__(self) -> None:
        self.cells = Cells("staying", (b"m",))

    async def load(self, session: Session) -> None:
        await session.database.create_table(_PASSING, _SPLITS, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        chance = session.random
        row, column = chance.choice(_ROWS), self.cells.column()
        read = chance.choice([_get, _get_many, _scan])
        reads_first, drops = chance.random() < 0.6, chance.random() < _DROPS_SHARE
        value = session.unique()

        async def body(tx: RecordedTx) -> None:
            await tx.get(row, column)
            found = await read(tx.itself) if reads_first else None
            if drops:
                await self._drop_in_the_middle(session, tx.itself, found)
            await self._write(session, tx.itself, found or await read(tx.itself))
            await tx.set(row, column, value)

        await session.run(body)

    def _judge(self, session: Session, found: _Found) -> None:
        """Every row says that it belongs to this table."""
        generation = found.get(_GENERATION)
        for row in _WITNESSES:
            if found.get(row, generation) != generation:
                session.broken(
                    f"{row!r} was written by a transaction that had read another table: "
                    f"{found[row]!r} in {generation!r}"
                )

    async def _write(self, session: Session, tx: Transaction, found: _Found) -> None:
        self._judge(session, found)
        generation = found.get(_GENERATION)
        if generation is None:
            await tx.set(_GENERATION, _VALUE, session.unique())
        else:
            await tx.set(session.random.choice(_WITNESSES), _VALUE, generation)

    async def _drop_in_the_middle(
        self, session: Session, tx: Transaction, before: _Found | None
    ) -> None:
        """Afterwards the transaction either sees what it saw, or it is refused."""
        if before is None:
            # Another snapshot of the same moment sees the table, and the transaction itself only
            # the next one, unless it is refused.
            async with session.database.snapshot(at=await tx.timestamp()) as twin:
                before = await _get(twin)
        if await self._replace(session):
            after = await session.random.choice([_get, _get_many, _scan])(tx)
            if before.get(_GENERATION) != after.get(_GENERATION):
                session.broken(f"a table changed under a snapshot: {before} then {after}")

    async def _replace(self, session: Session) -> bool:
        """Whether this session itself is known to have dropped the table and created the next."""
        database = session.database
        dropped = created = False
        try:
            await database.drop_table(_PASSING, timeout=_CALL_SECONDS)
            dropped = True
        except SchemaError:
            pass  # another session has dropped it, or an attempt whose answer was lost
        except PercolatorError as error:
            session.expect(error)
        try:
            await database.create_table(_PASSING, _SPLITS, exist_ok=True, timeout=_CALL_SECONDS)
            created = True
        except PercolatorError as error:
            session.expect(error)
        return dropped and created


_Found = dict[bytes, bytes]
"""The values of the table that is dropped, by row."""


async def _get(tx: Snapshot | Transaction) -> _Found:
    value = await tx.get(_GENERATION, _VALUE)
    return {} if value is None else {_GENERATION: value}


async def _get_many(tx: Snapshot | Transaction) -> _Found:
    rows = await tx.get_many(_PASSING, [_GENERATION, *_WITNESSES], [_VALUE])
    return {row.key: row[_VALUE] for row in rows if row}


async def _scan(tx: Snapshot | Transaction) -> _Found:
    return {row.key: row[_VALUE] async for row in tx.scan(_PASSING, columns=[_VALUE])}
