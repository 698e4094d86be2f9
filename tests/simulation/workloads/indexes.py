"""A table with indexes that come and go, among transactions that write and look up its rows.

One index is unique, and is there from the beginning. The other has two columns; a client adds it,
builds it, and drops it again, while servers do not hear of it and others go on. Whatever a snapshot
finds by an index must be what it finds by scanning the table. The checker judges the rows of
another table, which stays, as in all workloads.

In a variant, the values of two columns expire, each after a time of its own. So entries outlive
their values, and rows get unique values that others had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from math import inf

from percolator import Table
from percolator.aio import Transaction
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, SharedTransaction, Ticket
from percolator.aio.snapshot import Snapshot
from percolator.codecs import raw
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SchemaError,
    UniqueViolation,
    UsageError,
    WrittenTwice,
)
from percolator.schema import Index
from tests.simulation.sessions import Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Workload, preferred

FOUND = "rows found by an index"
BUILT = "index built while others write"
INDEX_DROPPED = "index dropped while others use it"
LOADED = "rows loaded into a table with indexes"

_PEOPLE = Table("people", key=raw)
_BADGE = _PEOPLE.column("badge", raw, unique=True)
_BY_BADGE = _PEOPLE.indexes["badge"]
_CITY = _PEOPLE.column("city", raw)
_STREET = _PEOPLE.column("street", raw)
_BY_PLACE = Index(_PEOPLE, "by place", (_CITY, _STREET))
"""Not declared with the table: a client adds it."""
_BY_BADGE_AND_STREET = Index(_PEOPLE, "by badge and street", (_BADGE, _STREET), unique=True)
_LIVES = {_BADGE: timedelta(milliseconds=700), _CITY: timedelta(milliseconds=400)}
"""Times to live, in the variant."""
_SPLITS = [b"g", b"p"]
_ROWS = [b"a", b"c", b"k", b"m", b"s", b"t"]
_BADGES = [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
_PLACES = [b"x", b"y"]
_LOADED = [b"u", b"v", b"w"]
"""Rows that are loaded once, in the midst of it."""
_OF_CLIENTS = (_ROWS[:2], _ROWS[2:4], _ROWS, _ROWS)
"""The rows that each client uses: some know only one of the servers."""
_BETWEEN_CHANGES_SECONDS = 0.3
_SHORT_SECONDS, _LONG_SECONDS = 0.4, 5.0
_LOOKS_SHARE = 0.35


class Indexed(Workload):
    """An index finds the rows that a scan finds."""

    leaves_behind = True
    loads = True
    """Rows are loaded in bulk in the midst of it."""
    indexes: Sequence[Index[bytes]] = (_BY_BADGE, _BY_PLACE)

    def __init__(self) -> None:
        self.cells = Cells("beside", (b"m",))
        self._next_change = 0.0
        self._load_at = 1.0

    async def load(self, session: Session) -> None:
        await session.database.create_table(_PEOPLE, _SPLITS, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = (SchemaError, UniqueViolation)
        now = asyncio.get_running_loop().time()
        if now >= self._next_change and preferred(session, (False, False, False, True)):
            self._next_change = now + _BETWEEN_CHANGES_SECONDS
            session.skip()
            await self._change_indexes(session)
        elif self.loads and now >= self._load_at:
            self._load_at = inf
            session.skip()
            await self._load(session)
        elif session.random.random() < _LOOKS_SHARE:
            session.skip()
            await self._look(session)
        else:
            await self._write(session)

    async def _write(self, session: Session) -> None:
        chance = session.random
        beside, value = chance.choice(_ROWS), session.unique()
        rows = chance.sample(preferred(session, _OF_CLIENTS), chance.choice((1, 1, 2)))
        looks = chance.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            await tx.get(beside, self.cells.column())
            await tx.set(beside, self.cells.column(), value)  # so that its outcome can be told
            for row in rows:
                await _change(session, tx.itself, row)
            if looks:
                await self._compare(session, tx.itself)

        await session.run(body)

    async def _look(self, session: Session) -> None:
        try:
            async with session.database.snapshot() as snapshot:
                await self._compare(session, snapshot)
        except PercolatorError as error:
            session.expect(error)

    async def _compare(self, session: Session, reads: Snapshot | Transaction) -> None:
        index = session.random.choice(self.indexes)
        columns = index.columns
        value = session.random.choice([None, (_BADGES if index.unique else _PLACES)[0]])
        given = () if value is None else (value,)
        limit = self._limit(session)
        found = [row async for row in reads.find(index, *given, columns=columns, limit=limit)]
        scanned = [row async for row in reads.scan(_PEOPLE, columns=columns)]
        wanted = sorted(
            (tuple(row.get(column) or b"" for column in columns), row.key)
            for row in scanned
            if all(column in row for column in columns)
            and (value is None or row.get(columns[0]) == value)
        )[:limit]
        got = [(tuple(row.get(column) or b"" for column in columns), row.key) for row in found]
        if got != wanted:
            session.broken(f"an index over {columns} finds {got} where {wanted} is there")
        # A transaction may write one twice, and is refused when it commits.
        is_final = isinstance(reads, Snapshot)
        if index.unique and is_final and len({values for values, _ in wanted}) < len(wanted):
            session.broken(f"a unique value is there twice: {wanted}")
        session.count(FOUND)

    def _limit(self, _: Session) -> int | None:
        return None

    async def _change_indexes(self, session: Session) -> None:
        seconds = session.random.choice((_SHORT_SECONDS, _LONG_SECONDS))
        try:
            if session.random.random() < 0.6:
                await session.database.create_index(_BY_PLACE, timeout=seconds)
                session.count(BUILT)
            else:
                await session.database.drop_index(_PEOPLE, _BY_PLACE.name, timeout=seconds)
                session.count(INDEX_DROPPED)
        except PercolatorError as error:
            session.expect(error)

    async def _load(self, session: Session) -> None:
        cells = [
            (row, column.name, value)
            for row in _LOADED
            for column, value in ((_BADGE, b"badge of " + row), (_CITY, b"x"), (_STREET, b"y"))
        ]
        try:
            load = _bulk_load(session)
            timestamps = await load.begin()
            await load.load(cells, timestamps)
            await load.finish(timestamps)
            session.count(LOADED)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument):
                session.expect(error)

    async def rest(self, session: Session) -> None:
        """Everything is to be found by the indexes when all is quiet."""
        if self.loads:
            await _bulk_load(session).abandon()  # until then, its range is closed
        await session.database.create_index(_BADGE, timeout=30.0)
        try:
            await session.database.create_index(_BY_PLACE, timeout=30.0)
        except SchemaError:  # a drop was not finished
            await session.database.drop_index(_PEOPLE, _BY_PLACE.name, timeout=30.0)
            await session.database.create_index(_BY_PLACE, timeout=30.0)
        for index in self.indexes:
            for problem in await session.database.check_index(index):
                session.broken(f"{index!r}: {problem}")


class IndexedRows(Indexed):
    """In a row store, which loads whole tables only."""

    loads = False


class ExpiringIndexed(Indexed):
    """An index finds the rows whose values have not expired."""

    indexes = (_BY_BADGE, _BY_PLACE, _BY_BADGE_AND_STREET)

    async def load(self, session: Session) -> None:
        await session.database.create_table(_PEOPLE, _SPLITS, ttl=_LIVES, timeout=30.0)
        await session.database.create_index(_BY_BADGE_AND_STREET, timeout=30.0)

    def _limit(self, session: Session) -> int | None:
        return session.random.choice((None, None, 1, 3))


def _bulk_load(session: Session) -> BulkLoad:
    plan = LoadPlan(_PEOPLE.name, "newcomers", _LOADED[0], b"", notify=False)
    return BulkLoad(session.database, plan)


async def _change(session: Session, tx: Transaction, row: bytes) -> None:
    """Changes some columns of a row, or deletes it."""
    chance = session.random
    kind = chance.random()
    if kind < 0.1:
        await tx.delete_row(_PEOPLE, row)
    elif kind < 0.2:
        tx.delete(row, chance.choice([_BADGE, _CITY, _STREET]))
    elif kind < 0.6:
        tx.set(row, _BADGE, chance.choice(_BADGES))
    else:
        # One of the columns of an index, or both.
        for column in chance.sample([_CITY, _STREET], chance.choice((1, 1, 2))):
            tx.set(row, column, chance.choice(_PLACES))


# Jobs of several tasks among them: their driver adds the entries of these indexes.

JOB_COMMITTED = "job that was committed to a table with indexes"
_JOB_SECONDS = 3.0
_JOBS_SHARE = 0.4
_REPLACES = 0.1
"""The share of jobs that delete all rows that they do not write."""
_REPEATED = 0.3
"""The share of tasks of which an earlier attempt does not count."""


_BY_STREET = Index(_PEOPLE, "by street", (_STREET, _CITY))
"""In this workload, it is declared with the table: writers of its columns need not conflict at one
of them, but at the entries."""


class IndexedTasks(Indexed):
    """An index finds what jobs have written, and what they have not written any more."""

    loads = False
    indexes = (_BY_BADGE, _BY_PLACE, _BY_STREET)

    async def load(self, session: Session) -> None:
        declared = Table(_PEOPLE.name, key=raw)
        declared.column("badge", raw, unique=True)
        declared.index("by street", *(declared.column(one.name, raw) for one in _BY_STREET.columns))
        await session.database.create_table(declared, _SPLITS, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = (SchemaError, UniqueViolation)
        if session.random.random() >= _JOBS_SHARE:
            await super().step(session)
            return
        session.skip()
        try:
            shared = session.database.shared_transaction(timeout=_JOB_SECONDS)
            async with shared:
                await self._job(session, shared)
        except PercolatorError as error:
            if not isinstance(error, WrittenTwice | UsageError):
                session.expect(error)

    async def _job(self, session: Session, shared: SharedTransaction) -> None:
        chance, ticket = session.random, shared.ticket
        tasks = range(chance.choice((1, 2, 2, 3)))
        receipts = await asyncio.gather(*(self._task(session, ticket, str(n)) for n in tasks))
        if chance.random() < _REPLACES:
            async with session.database.snapshot() as snapshot:
                rest = await rest_deleted(
                    session.database.internal,
                    ticket,
                    receipts,
                    snapshot,
                    _PEOPLE,
                    task="rest",
                    timeout=_JOB_SECONDS,
                )
            receipts.append(rest)
        try:
            await shared.commit(receipts)
        except WrittenTwice as error:  # tasks may write one cell, but the driver no entry
            session.broken(f"the driver of a job has written an entry twice: {error}")
            raise
        session.count(JOB_COMMITTED)

    async def _task(self, session: Session, ticket: Ticket, name: str) -> Receipt:
        if session.random.random() < _REPEATED:
            await self._attempt(session, ticket, name)
        return await self._attempt(session, ticket, name)

    async def _attempt(self, session: Session, ticket: Ticket, name: str) -> Receipt:
        chance, only_changes = session.random, session.random.random() < 0.3
        attempt = session.database.internal.share(
            ticket,
            name,
            0,
            _JOB_SECONDS,
            replace_after_seconds=0.1,
            only_changes=only_changes,
        )
        async with attempt:
            for row in chance.sample(_ROWS, chance.choice((1, 2))):
                column = chance.choice((_BADGE, _BADGE, _CITY, _STREET))
                if chance.random() < 0.15:
                    await attempt.delete(row, column)
                else:
                    values = _BADGES if column is _BADGE else _PLACES
                    await attempt.set(row, column, chance.choice(values))
                if chance.random() < 0.3:
                    await attempt._flush()
                    await asyncio.sleep(chance.random() ** 4)
            return await attempt.finish()
