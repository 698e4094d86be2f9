"""Registers, written without being read, read, deleted and locked: every kind of single operation.
Two of three columns are a family, and are read together, too.

Each write puts a unique value; some are too long to be stored in a record.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from percolator.aio import Database
from percolator.codecs import raw
from percolator.errors import PercolatorError
from percolator.protocol.contention import GRANT_SECONDS, WRITTEN_MIN
from percolator.world import Random
from tests.isolation.history import Put
from tests.simulation.sessions import Body, Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Ending, Workload, loading

_ROWS = [b"", b"\x00", b"\x00\xff", b"middle", b"n", b"\xff", b"\xff\xff"]
_LONG_BYTES = 1500


class Registers(Workload):
    """Promises nothing beyond what the checker requires."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("registers", (b"m", b"\xff"))
        self._family = self.cells.table.family("of:", raw)
        self._columns = [self._family.column("v"), self._family.column("w")]
        self._alone = self.cells.column("o")
        """A column that begins almost as those of the family."""

    async def step(self, session: Session) -> None:
        chance = session.random

        async def body(tx: RecordedTx) -> None:
            for _ in range(chance.randint(1, 4)):
                row, column = chance.choice(_ROWS), chance.choice([*self._columns, self._alone])
                match chance.randrange(8):
                    case 0 | 1:
                        await tx.get(row, column)
                    case 2:
                        await tx.get_family(row, self._family, self._columns)
                    case 3 | 4:
                        await tx.set(row, column, session.unique())
                    case 5:
                        await tx.set(row, column, session.unique().ljust(_LONG_BYTES))
                    case 6:
                        await tx.delete(row, column)
                    case _:
                        await tx.lock(row, column)

        await session.run(body)


# Versions written one after another, to a first row and then, in a later transaction, a second.
#
# A reader that finds a version in the second row must find it, or a later one, in the first row,
# even in a separate transaction that begins later, in any process. The same holds for reads of
# single cells, which have no transaction. Some versions are written to a third row along with the
# first, in another tablet: so its lock may be left when the commit was acknowledged.

_FIRST, _SECOND, _THIRD = b"first", b"second", b"third"


class Sequential(Workload):
    """Writes that were seen once are seen by all later transactions."""

    def __init__(self) -> None:
        self.cells = Cells("sequential", (b"g",))
        self._version = self.cells.column()
        self._seen_in_first = 0
        """The newest version that any ended transaction has seen in the first row."""
        self._seen_in_third = 0

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        if chance < 0.5:
            await self._write(session)
        elif chance < 0.75:
            await self._read(session)
        else:
            await self._read_now(session)

    async def _write(self, session: Session) -> None:
        version = 0
        third_too = session.random.random() < 0.5

        async def first(tx: RecordedTx) -> None:
            nonlocal version
            version = int(await tx.get(_FIRST, self._version) or b"0") + 1
            await tx.set(_FIRST, self._version, b"%d" % version)
            if third_too:
                await tx.set(_THIRD, self._version, b"%d" % version)

        async def second(tx: RecordedTx) -> None:
            before = int(await tx.get(_SECOND, self._version) or b"0")
            if before < version:
                await tx.set(_SECOND, self._version, b"%d" % version)

        if await session.run(first):
            self._seen_in_first = max(self._seen_in_first, version)
            if third_too:
                self._seen_in_third = max(self._seen_in_third, version)
            await session.run(second)

    async def _read(self, session: Session) -> None:
        before = self._seen_in_first
        seen = [0, 0]

        async def body(tx: RecordedTx) -> None:
            for place, row in enumerate((_SECOND, _FIRST)):
                seen[place] = int(await tx.get(row, self._version) or b"0")

        if await session.run(body):
            if seen[1] < seen[0]:
                session.broken(f"version {seen[0]} came before version {seen[1]}, its cause")
            if seen[1] < before:
                session.broken(f"version {seen[1]} was read after {before} had been committed")

    async def _read_now(self, session: Session) -> None:
        session.skip()
        least_first, least_third = self._seen_in_first, self._seen_in_third
        database = session.database
        try:
            at = await database.timestamp(timeout=2.0)
            second = await self._now(database, _SECOND)
            third = await self._now(database, _THIRD)
            first = await self._now(database, _FIRST)
            async with database.snapshot(at=at, timeout=2.0) as snapshot:
                earlier = int(await snapshot.get(_FIRST, self._version) or b"0")
        except PercolatorError as error:
            session.expect(error)
            return
        self._seen_in_first = max(self._seen_in_first, first)
        self._seen_in_third = max(self._seen_in_third, third)
        if first < max(second, third):
            session.broken(f"version {max(second, third)} came before version {first}, its cause")
        if first < least_first or third < least_third:
            session.broken(
                f"versions {first} and {third} are there now, after {least_first} and "
                f"{least_third} had been seen"
            )
        if first < earlier:
            session.broken(f"version {first} is there now, and {earlier} was there before")

    async def _now(self, database: Database, row: bytes) -> int:
        return int(await database.get(row, self._version, timeout=2.0) or b"0")


# A set into which all sessions insert, with a row for each element; scans read all of it.


class Sets(Workload):
    """The set holds what was committed, and nothing else."""

    def __init__(self) -> None:
        self.cells = Cells("sets", (b"5", b"a"))
        self._member = self.cells.column()

    async def step(self, session: Session) -> None:
        if session.random.random() < 0.3:
            await session.run(self._read)
            return
        elements = [
            b"%08x" % session.random.getrandbits(32) for _ in range(session.random.randint(1, 3))
        ]

        async def insert(tx: RecordedTx) -> None:
            for element in elements:
                await tx.set(element, self._member, session.unique())

        await session.run(insert)

    async def _read(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def check(self, ending: Ending) -> Iterable[str]:
        expected = {
            operation.key[1]
            for record in ending.committed()
            for operation in record.operations
            if isinstance(operation, Put) and operation.key[0] == self.cells.name
        }
        found = set(ending.tables[self.cells.name])
        if lost := expected - found:
            yield f"elements were lost: {sorted(lost)}"
        if extra := found - expected:
            yield f"elements came from nowhere: {sorted(extra)}"


# Lists that grow at the end, in one cell each: the order of all commits can be read from them.

_APPENDS_ROWS = [b"list-%d" % number for number in range(4)]


class Appends(Workload):
    """A list holds exactly what was committed, in the order of commit."""

    def __init__(self) -> None:
        self.cells = Cells("appends", (_APPENDS_ROWS[2],))
        self._list = self.cells.column()

    async def step(self, session: Session) -> None:
        rows = session.random.sample(_APPENDS_ROWS, session.random.randint(1, 3))
        appends = session.random.random() < 0.75
        element = b"%x;" % session.random.getrandbits(32)

        async def body(tx: RecordedTx) -> None:
            lists = await tx.get_many(rows, self._list)
            if appends:
                for row, before in lists.items():
                    await tx.set(row, self._list, (before or b"") + element)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        expected: dict[bytes, bytes] = dict.fromkeys(_APPENDS_ROWS, b"")
        commits = sorted(ending.committed(), key=lambda record: record.commit_ts)
        for record in commits:
            for operation in record.operations:
                if isinstance(operation, Put) and operation.key[0] == self.cells.name:
                    last = (
                        operation.value.rindex(b";", 0, -1) + 1
                        if b";" in operation.value[:-1]
                        else 0
                    )
                    expected[operation.key[1]] += operation.value[last:]
        for row, elements in expected.items():
            found = ending.tables[self.cells.name].get(row, {}).get(b"v", b"")
            if found != elements:
                yield f"{row!r} holds {found!r}, and {elements!r} was appended"


# Accounts among which money moves, and audits that must always find the same sum.
#
# Audited by reading every account and by scanning, in transactions that also write and in ones that
# only read. An emptied account is closed: its row is deleted, and another transfer opens it again.

ACCOUNTS = [b"account-%02d" % number for number in range(12)]
OPENING = 10
TOTAL = OPENING * len(ACCOUNTS)


class Bank(Workload):
    """Money is neither made nor lost."""

    def __init__(self) -> None:
        self.cells = Cells("bank", (ACCOUNTS[4], ACCOUNTS[8]))
        self._balance = self.cells.column()

    async def load(self, session: Session) -> None:
        await session.run(loading(dict.fromkeys(ACCOUNTS, b"%d" % OPENING), self.cells))

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        if chance < 0.7:
            await self._transfer(session)
        elif chance < 0.85:
            await self._audit(session, by_scan=False)
        else:
            await self._audit(session, by_scan=True)

    async def _transfer(self, session: Session) -> None:
        source, target = session.random.sample(ACCOUNTS, 2)
        amount = session.random.randint(1, 5)

        async def body(tx: RecordedTx) -> None:
            balances = await tx.get_many([source, target], self._balance)
            has = int(balances[source] or b"0")
            moved = min(amount, has)
            if not moved:
                return
            if has == moved:
                await tx.delete(source, self._balance)
            else:
                await tx.set(source, self._balance, b"%d" % (has - moved))
            await tx.set(target, self._balance, b"%d" % (int(balances[target] or b"0") + moved))

        await session.run(body)

    async def _audit(self, session: Session, *, by_scan: bool) -> None:
        async def body(tx: RecordedTx) -> None:
            if by_scan:
                rows = await tx.scan(self.cells.table, reverse=session.random.random() < 0.3)
                found = sum(int(value) for row in rows.values() for value in row.values())
            else:
                found = _sum(await tx.get_many(ACCOUNTS, self._balance))
            if found != TOTAL:
                session.broken(f"an audit found {found} of {TOTAL}")

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        found = sum(int(row[b"v"]) for row in ending.tables[self.cells.name].values())
        if found != TOTAL:
            yield f"at the end the bank holds {found} of {TOTAL}"


def _sum(values: Mapping[bytes, bytes | None]) -> int:
    return sum(int(value or b"0") for value in values.values())


# Cells that are written without being read, and read by others.
#
# Most transactions write one or two cells of one tablet. Each writes a unique value.

_LOW = [b"a%d" % number for number in range(8)]
_HIGH = [b"n%d" % number for number in range(8)]
_READING_SHARE = 0.25
_LOCKING_SHARE = 0.1


class Blind(Workload):
    """Promises nothing beyond what the checker requires."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("blind", (b"m",))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        chance = session.random
        rows = chance.sample(chance.choice((_LOW, _HIGH)), chance.randint(1, 2))

        async def read(tx: RecordedTx) -> None:
            await tx.get_many(rows, self._value)

        async def write(tx: RecordedTx) -> None:
            for row in rows:
                if chance.random() < _LOCKING_SHARE:
                    await tx.lock(row, self._value)
                else:
                    await tx.set(row, self._value, session.unique())

        await session.run(read if chance.random() < _READING_SHARE else write)


# Counters on few keys, which all sessions read and then write: the test for lost updates.
#
# Each client also has a counter of its own. There its sessions take turns without rivals, so each
# of them may begin directly above the commit of the one before it.
#
# At the end, the sessions of one client count in the rows of a ring, each in two neighbours. They
# hold the rows that they have read, and wait for each other. None may wait as long as it does for
# one that never lets go, or that waits itself.

_COUNTERS_ROWS = [b"hits", b"misses", b"seen"]
_OWN_SHARE = 0.5
_LOOKS_SHARE = 0.3
_IN_A_ROW = 5
_RING = [b"ring %d" % number for number in range(6)]
_ROUNDS = 4


class Counters(Workload):
    """Every committed increment counts exactly once."""

    def __init__(self) -> None:
        self.cells = Cells("counters", (b"m",))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        if session.random.random() < _OWN_SHARE:
            await self._count_alone(session)
            return
        rows = session.random.sample(_COUNTERS_ROWS, session.random.choice((1, 1, 2)))

        # Those that run again take turns; the others come in between, and are judged all the same.
        run = session.random.choice((session.run, session.run_again))
        await run(self._counting(rows))

    async def _count_alone(self, session: Session) -> None:
        """Counts in the client's own row, and looks at one of the others."""
        row, other = b"by " + session.client.encode(), session.random.choice(_COUNTERS_ROWS)
        looks = session.random.random() < _LOOKS_SHARE

        async def body(tx: RecordedTx) -> None:
            before = await tx.get(row, self._value)
            if looks:
                await tx.get(other, self._value)
            await tx.set(row, self._value, b"%d" % (int(before or b"0") + 1))

        for _ in range(_IN_A_ROW):  # at once, so that the next one comes while there is a line
            if session.goes_on:
                await session.run_again(body)

    leaves_behind = True

    async def rest(self, session: Session) -> None:
        for _ in range(WRITTEN_MIN):  # then it is known that its transactions write what they read
            await session.run_again(self._counting(_RING[:1]))
        ring = zip(_RING, [*_RING[1:], _RING[0]], strict=True)
        await asyncio.gather(
            *(self._go_round(session.another(n), rows) for n, rows in enumerate(ring, 2))
        )

    async def _go_round(self, session: Session, rows: Sequence[bytes]) -> None:
        now = asyncio.get_running_loop().time
        for _ in range(_ROUNDS):
            began = now()
            committed = await session.run_again(self._counting(rows))
            if not committed or now() - began > GRANT_SECONDS:
                session.broken(f"a commit in a ring took {now() - began:.2f} s: {committed}")

    def _counting(self, rows: Sequence[bytes]) -> Body:
        async def body(tx: RecordedTx) -> None:
            for row in rows:
                before = await tx.get(row, self._value)
                await tx.set(row, self._value, b"%d" % (int(before or b"0") + 1))

        return body

    def check(self, ending: Ending) -> Iterable[str]:
        expected = Counter(
            operation.key[1]
            for record in ending.committed()
            for operation in record.operations
            if isinstance(operation, Put) and operation.key[0] == self.cells.name
        )
        rows = ending.tables[self.cells.name]
        for row in sorted({*_COUNTERS_ROWS, *expected}):
            found = int(rows.get(row, {}).get(b"v", b"0"))
            if found != expected[row]:
                yield f"{row!r} is {found} after {expected[row]} committed increments"


# Few pairs of cells that all sessions are about to write, and read for update.
#
# Both cells of a pair always have the same value; they are in different tablets. Some transactions
# have begun before they ask for their turn, some take their turns in the other order, and some
# write nothing. At the end, the turns of clients that were killed must not hold up others.

_TURNS = [b"turns 0", b"turns 1"]
_MIRRORED = b"mirrored "
_BEGINS_BEFORE_SHARE = 0.5
_ONLY_READS_SHARE = 0.2
_REST_SECONDS = 3.0


class Queues(Workload):
    """A transaction in its turn reads one snapshot, and every committed increment counts once."""

    locks = True
    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("queues", (b"t",))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        chance = session.random
        row = chance.choice(_TURNS)
        run = chance.choice((session.run, session.run_again, session.run_again))
        await run(self._counting(session, row))

    async def rest(self, session: Session) -> None:
        now = asyncio.get_running_loop().time
        for row in _TURNS:
            began = now()
            committed = await session.run_again(self._counting(session, row))
            if not committed or now() - began > _REST_SECONDS:
                session.broken(f"a commit in turn took {now() - began:.2f} s: {committed}")

    def _counting(self, session: Session, row: bytes) -> Body:
        chance = session.random
        begins_before = chance.random() < _BEGINS_BEFORE_SHARE
        only_reads = chance.random() < _ONLY_READS_SHARE
        looks = chance.random() < _LOOKS_SHARE
        first, second = chance.sample((row, _MIRRORED + row), 2)
        other = _TURNS[row == _TURNS[0]]

        async def body(tx: RecordedTx) -> None:
            found = {}
            for one in (second, first) if begins_before else (first, second):
                in_turn = one == first or not begins_before
                found[one] = await tx.get(one, self._value, for_update=in_turn)
            if found[first] != found[second]:
                session.broken(f"a pair was found torn: {found}")
            if looks:
                await tx.get(other, self._value)
            if not only_reads:
                for one in found:
                    await tx.set(one, self._value, b"%d" % (int(found[first] or b"0") + 1))

        return body

    def check(self, ending: Ending) -> Iterable[str]:
        expected = Counter(
            operation.key[1]
            for record in ending.committed()
            for operation in record.operations
            if isinstance(operation, Put) and operation.key[0] == self.cells.name
        )
        rows = ending.tables[self.cells.name]
        for row in _TURNS:
            for one in (row, _MIRRORED + row):
                found = int(rows.get(one, {}).get(b"v", b"0"))
                if found != expected[one]:
                    yield f"{one!r} is {found} after {expected[one]} committed increments"


# A crowd: a hundred sessions in each client, most of which use their own pairs of rows.
#
# Only here do many transactions share calls, commits and disk writes, so that a torn batch, a
# refusal within one, or a full response affects some of them and not others. Both rows of a pair
# always have the same value; they are in different tablets.

SESSIONS_PER_CLIENT = 100
BURST_SECONDS = 1.0
_PAIRS = 4_000
_CONTENDED_PAIRS = 20
_CONTENDED_SHARE = 0.05


class Crowd(Workload):
    """No transaction ever sees half of a pair's change."""

    def __init__(self) -> None:
        self.cells = Cells("crowd", (b"left 2", b"m", b"right 2"))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        rows = _pair(session.random)
        one_by_one, only_reads = session.random.random() < 0.2, session.random.random() < 0.2

        async def body(tx: RecordedTx) -> None:
            if one_by_one:
                found = {row: await tx.get(row, self._value) for row in rows}
            else:
                found = await tx.get_many(rows, self._value)
            if len(set(found.values())) != 1:
                session.broken(f"a pair was found torn: {found}")
            if only_reads:
                return
            value = session.unique()
            for row in rows:
                await tx.set(row, self._value, value)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        rows = ending.tables[self.cells.name]
        for row, cells in rows.items():
            side, number = row.split()
            other = rows.get(b"%s %s" % (b"left" if side == b"right" else b"right", number))
            if other != cells:
                yield f"at the end a pair is torn: {row!r} holds {cells}, its other half {other}"


def _pair(chance: Random) -> list[bytes]:
    contended = chance.random() < _CONTENDED_SHARE
    number = chance.randrange(_CONTENDED_PAIRS if contended else _PAIRS)
    return [b"left %d" % number, b"right %d" % number]


# Transactions of many cells across many tablets: every scan sees all of a commit or nothing.

_LARGE_ROWS = [b"row-%02d" % number for number in range(30)]


class Large(Workload):
    """Every transaction writes one value into a third of all rows, which no scan sees in part."""

    def __init__(self) -> None:
        self.cells = Cells("large", (_LARGE_ROWS[5], _LARGE_ROWS[11], _LARGE_ROWS[20]))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        third = session.random.randrange(3)
        if session.random.random() < 0.4:
            await self._scan(session)
            return
        value = session.unique()

        async def body(tx: RecordedTx) -> None:
            for row in _LARGE_ROWS[third::3]:
                await tx.set(row, self._value, value)

        await session.run(body)

    async def _scan(self, session: Session) -> None:
        async def body(tx: RecordedTx) -> None:
            for problem in _torn(await tx.scan(self.cells.table)):
                session.broken(problem)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        return _torn(ending.tables[self.cells.name])


def _torn(rows: dict[bytes, dict[bytes, bytes]]) -> Iterable[str]:
    for third in range(3):
        values = {rows.get(row, {}).get(b"v") for row in _LARGE_ROWS[third::3]}
        if len(values) > 1:
            yield f"a transaction was seen in part: {values}"


# All sessions want the same cells, in opposite orders, and a rule that only locks can keep.
#
# At least one of two guards must stay on duty. Each transaction reads both and takes one off duty.
# Snapshots alone would allow two transactions to do so concurrently, so each locks the cell that it
# has read and does not write.

_LOCK_ORDER_ROWS = [b"a", b"h", b"p", b"z"]
_GUARDS = [b"guard-1", b"guard-2"]


class LockOrder(Workload):
    """Transactions never wait for each other forever, and both guards are never off duty."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("lock_order", (b"d", b"k"))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        if session.random.random() < 0.4:
            await self._change_guard(session)
            return
        rows = session.random.sample(_LOCK_ORDER_ROWS, 3)

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.get(row, self._value)
                await tx.set(row, self._value, session.unique())

        await session.run(body)

    async def _change_guard(self, session: Session) -> None:
        one, other = session.random.sample(_GUARDS, 2)

        async def body(tx: RecordedTx) -> None:
            duty = await tx.get_many(_GUARDS, self._value)
            off = [guard for guard in _GUARDS if duty[guard] == b"off"]
            if len(off) == len(_GUARDS):
                session.broken("both guards are off duty")
            if one in off:
                await tx.set(one, self._value, b"on")
            elif other not in off:
                await tx.set(one, self._value, b"off")
                await tx.lock(other, self._value)

        await session.run(body)


# Two writers of two keys that never conflict, and readers of both.
#
# In a long fork, one reader sees only the first write and another one only the second: each has a
# snapshot, but there is no order that explains both.

_LONG_FORK_ROWS = [b"a", b"f", b"m", b"t"]


class LongFork(Workload):
    """All readers agree on one order of all writes, which the checker verifies."""

    def __init__(self) -> None:
        self.cells = Cells("long_fork", (b"d", b"k", b"p"))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        row = session.random.choice(_LONG_FORK_ROWS)
        writes = session.random.random() < 0.5
        order = session.random.sample(_LONG_FORK_ROWS, len(_LONG_FORK_ROWS))

        async def body(tx: RecordedTx) -> None:
            if writes:
                await tx.set(row, self._value, session.unique())
            else:
                # One after another: the longer a snapshot is read, the more happens meanwhile.
                for one in order:
                    await tx.get(one, self._value)

        await session.run(body)


# Reads by predicate among inserts and deletes: phantoms, lost rows and doubled rows.

_PREDICATES_ROWS = [b"row-%02d" % number for number in range(24)]


class Predicates(Workload):
    """A range that is scanned twice in a transaction returns the same rows both times."""

    def __init__(self) -> None:
        self.cells = Cells(
            "predicates", (_PREDICATES_ROWS[6], _PREDICATES_ROWS[12], _PREDICATES_ROWS[18])
        )
        self._columns = [self.cells.column("v"), self.cells.column("w")]

    async def step(self, session: Session) -> None:
        chance = session.random
        if chance.random() < 0.5:
            await self._change(session)
        else:
            await self._scan(session)

    async def _change(self, session: Session) -> None:
        chance = session.random

        async def body(tx: RecordedTx) -> None:
            for row in chance.sample(_PREDICATES_ROWS, 3):
                column = chance.choice(self._columns)
                if chance.random() < 0.5:
                    await tx.set(row, column, session.unique())
                else:
                    await tx.delete(row, column)
            if chance.random() < 0.4:
                await self._scan_over_own_writes(tx, chance)

        await session.run(body)

    async def _scan_over_own_writes(self, tx: RecordedTx, chance: Random) -> None:
        """The transaction's own writes and deletions hide the snapshot, with limits and both
        ways."""
        start, stop = sorted(chance.sample(_PREDICATES_ROWS, 2))
        reverse, limit = chance.random() < 0.5, chance.choice((0, 1, 3))
        await tx.scan(self.cells.table, start, stop, reverse=reverse, limit=limit)

    async def _scan(self, session: Session) -> None:
        chance = session.random
        start, stop = sorted(chance.sample(_PREDICATES_ROWS, 2))
        reverse = chance.random() < 0.4
        limit = chance.choice((0, 0, 2, 5))

        async def body(tx: RecordedTx) -> None:
            table = self.cells.table
            first = await tx.scan(table, start, stop, reverse=reverse, limit=limit)
            again = await tx.scan(table, start, stop, reverse=reverse, limit=limit)
            if first != again:
                session.broken(f"a range changed within a transaction: {first} then {again}")

        await session.run(body)


# Edges between nodes, each of which carries the names of both: a node that many edges share.
#
# Whoever adds an edge reads the names of two nodes and holds a read lock of each. Whoever renames a
# node rewrites the names in all of its edges. Snapshots alone would allow an edge to be added with
# a name that is being replaced: its cell is new, so the renaming neither reads nor writes it.

_NODES = [b"a", b"h", b"p", b"z"]
_EDGES_MAX = 3
"""Between two nodes, so that there is always an edge to add, and a scan stays short."""


class Hubs(Workload):
    """Each edge carries the names that its nodes have."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("hubs", (b"d", b"k"))
        self._name = self.cells.column()

    async def load(self, session: Session) -> None:
        await session.run(loading({node: b"first name of " + node for node in _NODES}, self.cells))

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        if chance < 0.55:
            await self._add_edge(session)
        elif chance < 0.8:
            await self._rename(session)
        elif chance < 0.9:
            await self._remove_edges(session)
        else:
            await self._look(session)

    async def _add_edge(self, session: Session) -> None:
        one, other = sorted(session.random.sample(_NODES, 2))
        edge = b"%s-%s %d" % (one, other, session.random.randrange(_EDGES_MAX))
        reads_first = session.random.random() < 0.5

        async def body(tx: RecordedTx) -> None:
            if not reads_first:
                await self._lock(tx, (one, other))
            names = await tx.get_many([one, other], self._name)
            if reads_first:
                await self._lock(tx, (one, other))
            await tx.set(edge, self._name, _named(names[one], names[other]))

        await session.run(body)

    async def _lock(self, tx: RecordedTx, nodes: Iterable[bytes]) -> None:
        for node in nodes:
            await tx.lock(node, self._name, shared=True)

    async def _rename(self, session: Session) -> None:
        node, name = session.random.choice(_NODES), session.unique()
        locks_first = session.random.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            if locks_first:
                await self._lock(tx, (node,))  # which the write below replaces
            rows = await self._consistent(session, tx)
            names = {row: rows[row] for row in _NODES} | {node: name}
            await tx.set(node, self._name, name)
            for row in rows:
                ends = _ends(row)
                if node in ends:
                    await tx.set(row, self._name, _named(*(names[end] for end in ends)))
                    for end in ends:
                        if end != node:
                            await self._lock(tx, (end,))

        await session.run(body)

    async def _remove_edges(self, session: Session) -> None:
        node = session.random.choice(_NODES)

        async def body(tx: RecordedTx) -> None:
            for row in await self._consistent(session, tx):
                if node in _ends(row):
                    await tx.delete(row, self._name)

        await session.run(body)

    async def _look(self, session: Session) -> None:
        """Reads everything, and with some luck commits nothing but read locks."""
        locked = session.random.sample(_NODES, session.random.randrange(3))

        async def body(tx: RecordedTx) -> None:
            await self._consistent(session, tx)
            await self._lock(tx, locked)

        await session.run(body)

    async def _consistent(self, session: Session, tx: RecordedTx) -> dict[bytes, bytes]:
        rows = {row: cells[b"v"] for row, cells in (await tx.scan(self.cells.table)).items()}
        for wrong in _wrong(rows):
            session.broken(wrong)
        return rows

    def check(self, ending: Ending) -> Iterable[str]:
        rows = ending.tables[self.cells.name]
        return _wrong({row: cells[b"v"] for row, cells in rows.items()})


def _ends(row: bytes) -> list[bytes]:
    """The nodes of an edge; none if the row is a node."""
    return row.partition(b" ")[0].split(b"-") if b"-" in row else []


def _named(one: bytes | None, other: bytes | None) -> bytes:
    return b"%s, %s" % (one or b"", other or b"")


def _wrong(rows: Mapping[bytes, bytes]) -> Iterable[str]:
    for row, names in rows.items():
        ends = _ends(row)
        if ends and names != _named(*(rows[end] for end in ends)):
            yield f"edge {row!r} is named {names!r}, its nodes {[rows[end] for end in ends]}"


# Doctors of whom one has to be on duty: the classic write skew, in serializable transactions.
#
# Who goes off duty has seen that another one is on duty. Snapshots alone would let the last two go
# at the same time, since neither writes what the other one has read.

_DOCTORS = [b"ann", b"bob", b"eve", b"zoe"]


class OnDuty(Workload):
    """At any time, at least one of the doctors is on duty."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("on duty", (b"c", b"x"))
        self._duty = self.cells.column()

    async def load(self, session: Session) -> None:
        await session.run(loading(dict.fromkeys(_DOCTORS, b"since the beginning"), self.cells))

    async def step(self, session: Session) -> None:
        chance = session.random
        doctor = chance.choice(_DOCTORS)
        others = chance.sample([one for one in _DOCTORS if one != doctor], chance.randint(1, 3))
        goes, at_once = chance.random() < 0.6, chance.random() < 0.5
        only_looks = chance.random() < 0.15

        async def body(tx: RecordedTx) -> None:
            if at_once:
                found = await tx.get_many(others, self._duty)
            else:
                found = {one: await tx.get(one, self._duty) for one in others}
            on_duty = [one for one, since in found.items() if since is not None]
            if only_looks:
                asked_all = len(others) == len(_DOCTORS) - 1
                own = await tx.get(doctor, self._duty)
                if asked_all and not on_duty and own is None:
                    session.broken("no doctor is on duty in a snapshot")
                return
            if not goes:
                await tx.set(doctor, self._duty, session.unique())
            elif on_duty:
                await tx.delete(doctor, self._duty)

        await session.run(body, serializable=True)

    def check(self, ending: Ending) -> Iterable[str]:
        if not ending.tables[self.cells.name]:
            yield "no doctor is on duty"
