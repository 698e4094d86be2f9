"""A column whose values expire beside one whose values stay: in the midst of transactions, too.

Transactions read, wait, and read again, while values come to their ends. The checker knows of the
time to live, so it decides for each read and scan whether the value had to be there. The values of
one read without a timestamp must be those between two timestamps.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from percolator import codecs
from percolator.aio import Database
from percolator.errors import PercolatorError
from percolator.recipes import Index
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


# An index whose entries expire with the column: each write of the column renews all of them.
#
# The same words are written again and again, some before their time is up, so that an entry that is
# not renewed is gone while its column is still there. Each snapshot has to find the rows by exactly
# the words that it reads in them.

ENTRIES_STAY = "an entry that expires was written again"
TTL_MILLISECONDS = 250
_EXPIRING_INDEX_ROWS = [b"row-%d" % number for number in range(3)]
_WORDS = [b"ant", b"bee", b"cat"]
_READS_SHARE = 0.4
_EXPIRING_INDEX_PAUSE_SECONDS_MAX = 0.2


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
        row, reads = chance.choice(_EXPIRING_INDEX_ROWS), chance.random() < _READS_SHARE
        text = b" ".join(chance.sample(_WORDS, 2))
        pause = chance.random() * _EXPIRING_INDEX_PAUSE_SECONDS_MAX

        async def body(tx: RecordedTx) -> None:
            if reads:
                await asyncio.sleep(pause)
                if problems := await index.check(tx.itself):
                    session.broken(f"an index and its column expire at their own times: {problems}")
                return
            before = await index._entries.recorded(tx.itself, row)
            if not before.isdisjoint(index._entries.parts(row, text)):
                session.count(ENTRIES_STAY)
            await index.set(tx.itself, row, text)
            tx.note_writes()

        await session.run(body)


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
        self.cells = Cells("changing", (_ROWS[3],))
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
            for row in _ROWS:
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
            await snapshot.get_many([(row, self._value) for row in _ROWS])


# A job writes what is there already, after another client has given the column a ttl.
#
# Each column gets its ttl once, so that a late copy of that request changes nothing. The client
# that runs the job has learned the schema before. The value has to live for the ttl from the job's
# commit.

RENEWED = "a value was renewed after another client had set a ttl"
_RENEWALS_TTL_MILLISECONDS = 1_000
_ROW, _VALUE = b"row", b"value"
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
            await tx.set(_ROW, column, _VALUE)
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
            await share.set(_ROW, column, _VALUE)
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
            if value != _VALUE:
                session.broken(f"a value that a job has written is gone after {age} ms")


def _milliseconds(timestamp: int) -> int:
    return timestamp >> _SEQUENCE_BITS
