"""Tables of a row store that are dropped while transactions have their primaries there.

All tables exist from the beginning, and those that are dropped come first: the smallest cell of a
transaction is its primary, so that its outcome is written into a table that goes. The other cells
are in a table that stays, and for them nothing may change: what was committed stays committed, and
what was not never is. What was in the tables that go is no longer judged once they are gone.
"""

from __future__ import annotations

import asyncio

from percolator import Table
from percolator.aio import Database, Snapshot, Transaction
from percolator.codecs import raw
from percolator.errors import PercolatorError, SchemaError
from percolator.schema import Column
from tests.simulation.recorded_tx import Cells, RecordedTx, table_names
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload, preferred

_GOING = 16
_ROWS = [b"row %04d" % number for number in range(1_500)]
"""So many that most of the locks which are left behind are still there when their table is gone."""
_BETWEEN_DROPS_SECONDS = 0.4
_USED = 4
"""How many of the tables are used at a time: the next one to be dropped, and those before it. A
client that has not heard of a drop uses the table for as long as the store has it."""
_READS_SHARE = 0.3
_ROWS_AT_ONCE = 5
"""Rows of a transaction that dies. Its outcome shows if some of its locks are met while the table
of its primary is there, and others when that is gone."""
_AGAIN_SHARE = 0.3
"""How many of the dropped tables are created again, under the same name and another id. Clients
that know the former one go on writing there."""
_CALL_SECONDS = 3.0


class Drops(Workload):
    """A transaction writes one cell of a table that may go, and several of one that stays."""

    def __init__(self, *, pause_seconds_max: float = 0.0) -> None:
        """Each session pauses between transactions: a master collects nothing in its first seconds,
        and there has to be work for longer than that."""
        self.cells = Cells("remaining")
        self._going = [Cells(f"going-{number:02}") for number in range(_GOING)]
        self._next = 0
        """The next table to be dropped."""
        self._pause_seconds_max = pause_seconds_max
        self._dropped_at = 0.0

    async def create(self, database: Database) -> None:
        for cells in self._going:
            await database.create_table(cells.table, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        chance = session.random
        await asyncio.sleep(chance.random() * self._pause_seconds_max)
        now = asyncio.get_running_loop().time()
        if now >= self._dropped_at + _BETWEEN_DROPS_SECONDS and self._next < _GOING:
            self._dropped_at = now
            await self._drop(session)
        elif chance.random() < _READS_SHARE:
            await self._read(session)
        else:
            await self._write(session)

    async def _read(self, session: Session) -> None:
        rows, column = session.random.sample(_ROWS, 2), self.cells.column()

        async def body(tx: RecordedTx) -> None:
            await tx.get_many(rows, column)

        await session.run(body)

    async def _write(self, session: Session) -> None:
        chance = session.random
        latest = min(self._next, _GOING - 1)
        going = self._going[chance.randint(max(latest - _USED + 1, 0), latest)]
        rows, value = sorted(chance.sample(_ROWS, _ROWS_AT_ONCE)), session.unique()
        gone: Column[bytes] = going.column()
        column: Column[bytes] = self.cells.column()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.get(row, column)
                await tx.set(row, column, value)
            # Not recorded: nobody can say later what was in it.
            await tx.itself.set(chance.choice(_ROWS), gone, value)

        await session.run(body)

    async def _drop(self, session: Session) -> None:
        session.skip()
        going = self._going[self._next]
        self._next += 1
        try:
            await session.database.drop_table(going.table, timeout=_CALL_SECONDS)
            if session.random.random() < _AGAIN_SHARE:
                await session.database.create_table(
                    going.table, timeout=_CALL_SECONDS, exist_ok=True
                )
        except PercolatorError as error:
            session.expect(error)


# A table that is dropped and created again while other clients use it, and servers are paused.
#
# Each table of that name has an id. Whoever drops one knows the ids of all that were there before.
# When the drop has returned, no transaction that begins then reads or commits anything in them,
# whatever its client and their servers have heard. The same holds when the creation of the next
# table has returned. A value says the id of the table that it was written into. The checker judges
# the rows of another table, which stays, as in all workloads.

DROPPED = "table dropped while others use it"
DROP_REPEATED = "drop repeated after a time-out"

_AGAIN = Table("again", key=raw)
_VALUE = _AGAIN.column("v", raw)
_RECREATIONS_ROWS = [b"a", b"k", b"s"]
_SPLITS = [b"g", b"p"]
_OF_CLIENTS = ([b"a"], [b"k"], [b"s"], _RECREATIONS_ROWS)
"""The rows that each client uses. One that uses all, as the one that drops the table does, soon
learns of the drop from a server that has heard of it. The others go on using their only server."""
_RECREATIONS_BETWEEN_DROPS_SECONDS = 0.5
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
        """Tables that nobody may use any more."""
        self._next_drop = 0.0

    async def load(self, session: Session) -> None:
        await session.database.create_table(_AGAIN, _SPLITS, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        now = asyncio.get_running_loop().time()
        if now >= self._next_drop and preferred(session, _OF_CLIENTS) is _RECREATIONS_ROWS:
            self._next_drop = now + _RECREATIONS_BETWEEN_DROPS_SECONDS
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
                session.count(DROP_REPEATED)
            else:
                self._gone |= before
                session.count(DROPPED)
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


# A table that is dropped and created again all the time, among transactions that use it.
#
# The first transaction that finds such a table empty gives it a *generation*, a value of its own.
# Whatever a transaction writes into the table says which generation it has read there. The checker
# judges the rows of another table, which stays, as in all workloads; the table that goes is judged
# here.

_PASSING = Table("passing", key=raw)
_SUCCESSORS_VALUE = _PASSING.column("v", raw)
_GENERATION = b"generation"
_SUCCESSORS_ROWS = [b"a", b"n", b"t", b"z"]
_WITNESSES = [b"a witness", b"n witness", b"z witness"]
_DROPS_SHARE = 0.05


class Successors(Workload):
    """Values read from a table are never written into the next one of the same name, and no
    snapshot shows a table that is younger."""

    def __init__(self) -> None:
        self.cells = Cells("staying", (b"m",))

    async def load(self, session: Session) -> None:
        await session.database.create_table(_PASSING, _SPLITS, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        chance = session.random
        row, column = chance.choice(_SUCCESSORS_ROWS), self.cells.column()
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
            await tx.set(_GENERATION, _SUCCESSORS_VALUE, session.unique())
        else:
            await tx.set(session.random.choice(_WITNESSES), _SUCCESSORS_VALUE, generation)

    async def _drop_in_the_middle(
        self, session: Session, tx: Transaction, before: _Found | None
    ) -> None:
        """Afterwards the transaction either sees what it saw, or it is refused."""
        if before is None:
            # Another snapshot at the same timestamp sees the table, and the transaction itself only
            # the next one, unless it is refused.
            async with session.database.snapshot(at=await tx.timestamp()) as twin:
                before = await _get(twin)
        if await self._replace(session):
            after = await session.random.choice([_get, _get_many, _scan])(tx)
            if before.get(_GENERATION) != after.get(_GENERATION):
                session.broken(f"a table changed under a snapshot: {before} then {after}")

    async def _replace(self, session: Session) -> bool:
        """Replaces the table. True if this session itself is known to have dropped the table and
        created the next."""
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
    value = await tx.get(_GENERATION, _SUCCESSORS_VALUE)
    return {} if value is None else {_GENERATION: value}


async def _get_many(tx: Snapshot | Transaction) -> _Found:
    rows = await tx.get_many(_PASSING, [_GENERATION, *_WITNESSES], [_SUCCESSORS_VALUE])
    return {row.key: row[_SUCCESSORS_VALUE] for row in rows if row}


async def _scan(tx: Snapshot | Transaction) -> _Found:
    return {
        row.key: row[_SUCCESSORS_VALUE]
        async for row in tx.scan(_PASSING, columns=[_SUCCESSORS_VALUE])
    }
