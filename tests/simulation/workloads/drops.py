"""Tables of a row store that are dropped while transactions have their primaries there.

All tables exist from the beginning, and those that are dropped come first: the smallest cell of a
transaction is its primary, so that its outcome is written into a table that goes. The other cells
are in a table that stays, and for them nothing may change: what was committed stays committed, and
what was not never is. What was in the tables that go is no longer judged once they are gone.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from percolator import Table
from percolator.aio import Database, Snapshot, Transaction
from percolator.codecs import raw
from percolator.errors import PercolatorError, SchemaError
from percolator.schema import Column
from tests.simulation.sessions import Cells, RecordedTx, Session, table_names
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


# A column whose values expire beside one whose values stay: in the midst of transactions, too.
#
# Transactions read, wait, and read again, while values come to their ends. The checker knows of
# the time to live, so it decides for each read and scan whether the value had to be there. The
# values of one read without a timestamp must be those between two timestamps.

_EXPIRING_ROWS = [b"row-%d" % number for number in range(6)]
_TTL_MILLISECONDS = 250
_PAUSE_SECONDS_MAX = 0.25
_LONG_BYTES = 1500
_TIMEOUT_SECONDS = 2.0


class Expiring(Workload):
    """Promises nothing beyond what the checker requires, and that reads of now are of now."""

    ttls = {b"v": _TTL_MILLISECONDS}  # noqa: RUF012 - nobody changes it

    def __init__(self) -> None:
        self.cells = Cells("expiring", (_EXPIRING_ROWS[2], _EXPIRING_ROWS[4]))
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
            rows = chance.sample(_EXPIRING_ROWS, 3)
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
        database, row = session.database, session.random.choice(_EXPIRING_ROWS)
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


# The ttl of a column becomes longer and shorter, while its values are read and collected.
#
# What a snapshot shows depends on the ttl, and a late copy of a change may come at any time. So
# this promises no more than that no read finds half of a value.

_TTL = timedelta(milliseconds=100)
"""So many are stored apart from the record of their commit."""
_SECONDS = 3.0


class ChangingTtls(Workload):
    """Only with the real master, which alone changes a ttl."""

    def __init__(self) -> None:
        self.cells = Cells("changing", (_EXPIRING_ROWS[3],))
        self._value = self.cells.column()

    @property
    def tables(self) -> tuple[Cells, ...]:
        return ()  # what it writes is judged here

    async def create(self, database: Database) -> None:
        await database.create_table(self.cells.table, self.cells.splits, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.skip()
        chance = session.random.random()
        try:
            if chance < 0.2:
                await self._write(session)
            elif chance < 0.3:
                await self._change(session)
            else:
                await self._read(session)
        except PercolatorError as error:
            session.expect(error)

    async def _write(self, session: Session) -> None:
        async with session.database.transaction(timeout=_SECONDS) as tx:
            for row in _EXPIRING_ROWS:
                await tx.set(row, self._value, session.unique().ljust(_LONG_BYTES))

    async def _change(self, session: Session) -> None:
        for ttl in (_TTL, None):
            await session.database.set_ttl(self._value, ttl, timeout=_SECONDS)
            await asyncio.sleep(session.random.random() * 0.4)  # some is collected meanwhile

    async def _read(self, session: Session) -> None:
        async with session.database.snapshot(timeout=_SECONDS) as snapshot:
            reverse = session.random.random() < 0.5
            async for _ in snapshot.scan(self.cells.table, reverse=reverse):
                pass
            await snapshot.get_many([(row, self._value) for row in _EXPIRING_ROWS])


# A job writes what is there already, after another client has given the column a ttl.
#
# Each column gets its ttl once, so that a late copy of that request changes nothing. The client
# that runs the job has learned the schema before. The value has to live for the ttl from the job's
# commit.

RENEWED = "a value was renewed after another client had set a ttl"
_RENEWALS_TTL_MILLISECONDS = 1_000
_ROW, _EXPIRING_VALUE = b"row", b"value"
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 0.8
_SEQUENCE_BITS = 18


class Renewals(Workload):
    """Only with the real master, which alone changes a ttl."""

    def __init__(self) -> None:
        self.cells = Cells("renewed")
        self._count = 0
        self._waiting: list[tuple[str, str]] = []
        """Columns that need a ttl, each with the client that must not set it."""
        self._set: set[str] = set()

    @property
    def tables(self) -> tuple[Cells, ...]:
        return ()  # what it writes is judged here

    async def create(self, database: Database) -> None:
        await database.create_table(self.cells.table, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.skip()
        try:
            for one in self._waiting:
                if one[1] != session.client:
                    self._waiting.remove(one)
                    await self._set_ttl(session, one[0])
                    return
            if session.random.random() < 0.15:
                await self._renew(session)
        except PercolatorError as error:
            session.expect(error)

    async def _set_ttl(self, session: Session, name: str) -> None:
        ttl = timedelta(milliseconds=_RENEWALS_TTL_MILLISECONDS)
        await session.database.set_ttl(self.cells.column(name), ttl, timeout=3.0)
        self._set.add(name)

    async def _renew(self, session: Session) -> None:
        database = session.database
        self._count += 1
        name = f"c{self._count}"
        column = self.cells.column(name)
        async with database.transaction() as tx:
            await tx.set(_ROW, column, _EXPIRING_VALUE)
        first = tx.commit_timestamp or 0
        self._waiting.append((name, session.client))
        began = asyncio.get_running_loop().time()
        while name not in self._set:
            await asyncio.sleep(_POLL_SECONDS)
            if asyncio.get_running_loop().time() > began + _PATIENCE_SECONDS:
                return
        whole = database.shared_transaction()
        await whole.begin()
        share = database.internal.share(whole.ticket, "task", 0, 3.0, only_changes=True)
        try:
            await share.begin()
            await share.set(_ROW, column, _EXPIRING_VALUE)
            receipt = await share.finish()
        finally:
            share._leave()
        commit = await whole.commit([receipt]) or 0
        left = _milliseconds(first) + _RENEWALS_TTL_MILLISECONDS - _milliseconds(commit)
        await asyncio.sleep(max(left, 0) / 1000 + 0.02)
        at = await database.timestamp(timeout=2.0)
        async with database.snapshot(at=at, timeout=2.0) as snapshot:
            value = await snapshot.get(_ROW, column)
        age = _milliseconds(at) - _milliseconds(commit)
        if age < _RENEWALS_TTL_MILLISECONDS:
            session.count(RENEWED)
            if value != _EXPIRING_VALUE:
                session.broken(f"a value that a job has written is gone after {age} ms")


def _milliseconds(timestamp: int) -> int:
    return timestamp >> _SEQUENCE_BITS
