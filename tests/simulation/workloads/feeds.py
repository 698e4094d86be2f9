"""Followers of change feeds among writers and loads: each change once, in the order of commits.

Each session follows one table. Now and then it reads on from where it was, in a new reading, and
keeps what it has read up to the last whole commit: a reading may fail at any place. At the end,
what each follower has read is compared with everything that was committed in its table. Under the
real master, tables begin without a feed, and a follower has it switched on before it begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from percolator.changes import Change, ChangeKind
from percolator.errors import PercolatorError, SnapshotTooOld
from percolator.timestamps import Timestamp
from tests.isolation.history import History
from tests.simulation.recorded_tx import Cells
from tests.simulation.sessions import Session
from tests.simulation.workloads.loads import Loads
from tests.simulation.workloads.transactions import Predicates, Registers
from tests.simulation.workloads.workload import Ending, Workload

_FOLLOWING = 0.2
"""The share of steps in which a session reads on."""

_LEAVING = 0.05
"""The share of changes inside a commit at which a session leaves, and goes on in a new reading."""

Entry = tuple[int, bytes, bytes, bytes | None]
"""Commit timestamp, row, column and value."""


@dataclass
class Stretch:
    """Changes that a follower has read without a gap."""

    after: int
    until: int
    """All commits up to here were read as a whole."""
    entries: list[Entry] = field(default_factory=list)
    before: dict[tuple[int, bytes, bytes], bytes | None] = field(default_factory=dict)
    """Former values of cells, before some of these changes."""


@dataclass
class Follower:
    """The reader of one table. It outlives the client that runs it."""

    cells: Cells
    stretches: list[Stretch] = field(default_factory=list)


class Feeds(Workload):
    """Several kinds of writers, and a follower in every session."""

    leaves_behind = True
    change_feed = True

    def __init__(self) -> None:
        self._loads = Loads()
        self._parts: list[Workload] = [Registers(), Predicates(), self._loads]
        self.cells = self._parts[0].cells
        self._followers: dict[str, Follower] = {}

    @property
    def tables(self) -> tuple[Cells, ...]:
        return tuple(table for part in self._parts for table in part.tables)

    async def step(self, session: Session) -> None:
        if session.random.random() < _FOLLOWING:
            session.skip()
            await self._read_on(session, self._follower(session))
        else:
            await session.random.choice(self._parts).step(session)

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left, and reads all feeds to their end."""
        await self._loads.rest(session)
        for follower in self._followers.values():
            end = await session.database.timestamp()
            while not follower.stretches or follower.stretches[-1].until < end:
                await self._read_on(session, follower)

    def _follower(self, session: Session) -> Follower:
        found = self._followers.get(session.name)
        if found is None:
            tables = self.tables
            found = Follower(tables[len(self._followers) % len(tables)])
            self._followers[session.name] = found
        return found

    async def _read_on(self, session: Session, follower: Follower) -> None:
        try:
            if not follower.stretches:
                await self._begin(session, follower)
            await self._read(session, follower, follower.stretches[-1])
        except SnapshotTooOld:
            # History is kept hardly longer than a session needs to say what it needs.
            await self._begin_again(session, follower)
        except PercolatorError as error:
            session.expect(error)

    async def _begin_again(self, session: Session, follower: Follower) -> None:
        try:
            await self._begin(session, follower)
        except PercolatorError as error:
            session.expect(error)

    async def _begin(self, session: Session, follower: Follower) -> None:
        database = session.database
        if session.switches_feeds:
            await database.set_change_feed(follower.cells.table, on=True)
        now = await database.timestamp()
        follower.stretches.append(Stretch(now, now))

    async def _read(self, session: Session, follower: Follower, stretch: Stretch) -> None:
        database, with_before = session.database, session.random.random() < 0.5
        until = await database.timestamp()
        commit: list[Change[bytes]] = []
        changes = database.changes(
            follower.cells.table, after=Timestamp(stretch.until), until=until, before=with_before
        )
        try:
            async with changes:
                async for change in changes:
                    if change.commit_timestamp <= stretch.until:
                        session.broken(f"{change} came after the end of its commit")
                    commit.append(change)
                    if change.ends_commit:
                        _take(stretch, commit, with_before=with_before)
                        commit = []
                    elif session.random.random() < _LEAVING:
                        return
        finally:
            # Also after an error, and from the middle of a commit: it goes on from here.
            stretch.until = max(stretch.until, changes.reached)
        if commit:
            session.broken(f"a reading ended inside the commit at {commit[0].commit_timestamp}")
        if stretch.until != until:
            session.broken(f"a reading up to {until} has reached {stretch.until}")

    def check(self, ending: Ending) -> Iterable[str]:
        for part in self._parts:
            yield from part.check(ending)
        for name, follower in self._followers.items():
            expected = _entries(ending.history, follower.cells.name)
            for stretch in follower.stretches:
                yield from _wrong(f"{name} on {follower.cells.name}", stretch, expected)


def _take(stretch: Stretch, commit: list[Change[bytes]], *, with_before: bool) -> None:
    for change in commit:
        at = int(change.commit_timestamp)
        stretch.entries.append((at, change.key, change.column, change.raw_value))
        if with_before:
            before = change.raw_before
            stretch.before[at, change.key, change.column] = before
            if (change.kind is ChangeKind.INSERT) and before is not None:
                raise AssertionError("an insertion over a value")
    stretch.until = int(commit[-1].commit_timestamp)


def _entries(history: History, table: str) -> list[Entry]:
    """Everything that was committed in a table, in the order of a feed."""
    return sorted(
        (record.commit_ts, row, column, value)
        for record in history
        if record.committed and record.commit_ts
        for (name, row, column), value in record.writes().items()
        if name == table
    )


def _wrong(who: str, stretch: Stretch, committed: list[Entry]) -> Iterable[str]:
    expected = [entry for entry in committed if stretch.after < entry[0] <= stretch.until]
    if stretch.entries != expected:
        missing = [entry[:3] for entry in expected if entry not in stretch.entries]
        strange = [entry[:3] for entry in stretch.entries if entry not in expected]
        yield (
            f"the feed read by {who} above {stretch.after} is wrong: missing {missing[:3]}, "
            f"not committed {strange[:3]}, {len(stretch.entries)} entries for {len(expected)}"
        )
        return
    values: dict[tuple[bytes, bytes], bytes | None] = {}
    for at, row, column, value in committed:
        known = stretch.before.get((at, row, column), _UNKNOWN)
        if known is not _UNKNOWN and known != values.get((row, column)):
            yield f"the feed read by {who} has a wrong value before the change at {at}: {known!r}"
        values[row, column] = value


_UNKNOWN = b"not read"
