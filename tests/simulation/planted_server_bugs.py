"""Bugs in what oracles and tablet servers promise, which a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from percolator.aio.reader import Reader
from percolator.errors import InvalidArgument
from percolator.routing.catalog import TableInfo
from percolator.services.chassis.files import EpochDirectory, SharedLook
from percolator.services.master.assignment import Assignment
from percolator.services.master.cluster_map import Tablet as MapTablet
from percolator.services.master.leader import Tables
from percolator.services.master.table_changes import TableChanges
from percolator.services.oracle import candidate
from percolator.services.oracle.candidate import Candidate, OtherClocks, Site
from percolator.services.oracle.oracle import Ledger
from percolator.services.tabletserver.storage import Ancestry
from percolator.tablet.cells import TIMESTAMP_MAX, RecentWrites
from percolator.tablet.group_commit import GroupCommit, MutationWork
from percolator.tablet.judge import Judge
from percolator.tablet.state import TabletIdentity, TabletState, TimestampGuard, UnheardTimestamp
from percolator.tablet.tablet import AnswerRoom, Tablet
from percolator.testing.memory_storage import MemoryBatch, MemoryCursor, MemoryStorage, View
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_WRITE
from percolator.v1.tabletserver_pb2 import MutationResult, ReadBatch, ReadBatchResult
from tests.simulation.disks import SimulatedTabletStore
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_BETWEEN_TWO_LOOKS_SECONDS = 0.002


def oracle_without_persistence(patch: Patch) -> None:
    """After a restart it hands out the same timestamps again."""

    async def forget(self: Ledger, milliseconds: int) -> None:
        self._mark = self._mark.__class__(milliseconds, self._mark.cluster_id)

    patch.setattr(Ledger, "write", forget)


def mirror_after_the_snapshot(patch: Patch) -> None:
    """A reader takes its view of the writes first and checks locks second."""

    correct = Tablet.read

    async def wrong(
        self: Tablet, batch: ReadBatch, room: AnswerRoom | None = None
    ) -> ReadBatchResult:
        early = copy(self)
        early._state = copy(self._state)
        early._state.storage = _EarlyView(self._state.storage)
        await asyncio.sleep(_BETWEEN_TWO_LOOKS_SECONDS)
        return await correct(early, batch, room)

    patch.setattr(Tablet, "read", wrong)


class _EarlyView:
    """A storage whose cursors show what was there when this was created."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._made = storage.cursor()

    def cursor(self) -> MemoryCursor:
        return MemoryCursor(self._made._view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def read_without_the_after_check(patch: Patch) -> None:
    """A deposed owner answers from what it knew."""

    async def wrong(self: TabletState) -> None:
        """Does not look."""

    patch.setattr(TabletState, "require_ownership", wrong)


def write_without_the_after_check(patch: Patch) -> None:
    """A deposed owner acknowledges a write that will never be read: the lost epoch check."""

    async def wrong(self: EpochDirectory) -> bool:
        return True

    patch.setattr(EpochDirectory, "look", lambda self: True)
    patch.setattr(EpochDirectory, "stands", wrong)


# Bugs in looking who owns a tablet on a store that stalls.


_IMPATIENT_SECONDS = 0.05


def stalled_look_answered_without_the_store(patch: Patch) -> None:
    """An owner whose store does not answer goes on as if it still were one."""
    correct = EpochDirectory.stands

    async def wrong(self: EpochDirectory) -> bool:
        try:
            async with asyncio.timeout(_IMPATIENT_SECONDS):
                return await correct(self)
        except TimeoutError:
            return True

    patch.setattr(EpochDirectory, "stands", wrong)


def look_under_way_joined(patch: Patch) -> None:
    """It may have seen the directory long before the work of those who join was done."""
    correct = SharedLook.__call__
    under_way: dict[SharedLook[bool], asyncio.Future[bool]] = {}

    def wrong(self: SharedLook[bool]) -> asyncio.Future[bool]:
        if self._looking is None or under_way[self].done():
            under_way[self] = correct(self)
        return asyncio.shield(under_way[self])

    patch.setattr(SharedLook, "__call__", wrong)


STORE_BUGS = (
    (stalled_look_answered_without_the_store, True),
    (look_under_way_joined, False),
)
"""The bugs, and whether they are caught in seconds."""

KINDS = (Kind.STALL, Kind.TAKEOVER)
"""Faults that reveal them: the store stalls for the owner, and another process takes over."""


# Bugs that report or show something before it is durable.


def refusal_answered_before_its_batch_is_durable(patch: Patch) -> None:
    """It reports a commit that is still being written, and that a power cut undoes."""
    correct = GroupCommit.execute

    async def wrong(self: GroupCommit, work: MutationWork) -> list[MutationResult]:
        state = self._state
        storage = state.storage
        if isinstance(storage, MemoryStorage) and storage.disk.in_doubt is not None:
            view: Any = _WithWhatIsBeingWritten(storage)
            judge = Judge(
                view, state.mirror, _nothing_recent(), state.last_changes, state.read_locks
            )
            refusals = [judge.refusal(step) for step in work.mutations]
            found = [one for one in refusals if one is not None and _tells_of_commit(one)]
            if len(found) == len(refusals):
                return found
        return await correct(self, work)

    patch.setattr(GroupCommit, "execute", wrong)


def _tells_of_commit(refusal: MutationResult) -> bool:
    return refusal.cell.space == SPACE_WRITE


class _WithWhatIsBeingWritten:
    """A storage that shows a batch before it is durable."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._entries = dict(storage._view.entries)
        for key, value in (storage.disk.in_doubt or {}).items():
            if value is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = value
        self.get = self._entries.get

    def cursor(self) -> MemoryCursor:
        return MemoryCursor(View(self._entries, sorted(self._entries)))


def _nothing_recent() -> RecentWrites:
    """Makes the judge look in the storage."""
    recent = RecentWrites(cells_max=1)
    recent.load(TIMESTAMP_MAX, TIMESTAMP_MAX)
    return recent


def shown_before_it_is_durable(patch: Patch) -> None:
    """A client reads a commit that a power cut undoes, and that is then rolled back."""
    correct = MemoryStorage.write

    async def wrong(
        self: MemoryStorage, batch: MemoryBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        self._check()
        self._show(batch.changes)
        return await correct(self, batch, then)

    patch.setattr(MemoryStorage, "write", wrong)


def answered_before_it_is_durable(patch: Patch) -> None:
    """A write is acknowledged without waiting for the disk, and is gone after a power cut."""
    correct = MemoryStorage.write
    syncing: dict[MemoryStorage, asyncio.Task[bool]] = {}

    async def wrong(
        self: MemoryStorage, batch: MemoryBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        self._check()
        if self in syncing:
            await syncing.pop(self)
        self._show(batch.changes)
        syncing[self] = late = asyncio.create_task(correct(self, batch))
        late.add_done_callback(_heard)  # what became of it is not the bug
        return then is None or then()

    patch.setattr(MemoryStorage, "write", wrong)


def _heard(task: asyncio.Task[bool]) -> None:
    if not task.cancelled():
        task.exception()


DURABILITY_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (shown_before_it_is_durable, (Kind.POWER, Kind.SLOW_DISK, Kind.CLIENT_STEP), False),
    (answered_before_it_is_durable, (Kind.POWER, Kind.SLOW_DISK), True),
)
"""The bugs that need nothing special, with the disruptions that reveal them, and whether they
are caught in seconds."""


# Bugs in trusting clocks, which a simulation has to find when one clock is far off.


def guard_by_the_servers_own_clock(patch: Patch) -> None:
    """Every server refuses the timestamps of an oracle with another clock until real time has
    caught up."""

    async def wrong(self: TimestampGuard, unheard: UnheardTimestamp) -> None:
        self.heard(self._clock.wall_milliseconds() << SEQUENCE_BITS)
        if unheard.timestamp > self.admitted_to:
            raise InvalidArgument(unheard.field, "lies ahead of this server's clock")

    patch.setattr(TimestampGuard, "settle", wrong)


def oracle_believes_its_own_clock(patch: Patch) -> None:
    """A standby on a machine with a wrong clock takes the cluster into the future."""

    async def wrong(self: OtherClocks, mark_milliseconds: int, *, jump_seconds_max: float) -> int:
        return max(self._world.clock.wall_milliseconds(), mark_milliseconds)

    patch.setattr(OtherClocks, "beginning", wrong)


def most_of_the_known_clocks_are_most_clocks(patch: Patch) -> None:
    """A master that has just begun to lead knows no clock but that of its own host, where the
    oracle is as wrong as it is."""
    patch.setattr(candidate, "_require_most", lambda told: None)


def oracle_begins_before_the_epoch_of_the_store(patch: Patch) -> None:
    """The first oracle's clock is years slow: nothing can be committed until it is corrected."""
    correct = Candidate.__init__

    def wrong(self: Candidate, site: Site, *rest: Any, **more: Any) -> None:
        correct(self, replace(site, first_milliseconds=0), *rest, **more)

    patch.setattr(Candidate, "__init__", wrong)


CLOCK_BUGS = (
    # Without a master no oracle can ask for other clocks, and timestamps do run ahead.
    (guard_by_the_servers_own_clock, (Kind.CLOCK_FAR,), False, True),
    (oracle_believes_its_own_clock, (Kind.CLOCK_FAR,), True, True),
    (most_of_the_known_clocks_are_most_clocks, (Kind.CLOCK_FAR,), True, False),
)


# Bugs of tables that are dropped and created again.


def name_looked_up_at_each_call(patch: Patch) -> None:
    """A transaction that has read a table finds nothing in the next one, and writes into it."""

    patch.setattr(Reader, "bound", lambda self, name: self.engine.catalog.known(name))
    patch.setattr(Reader, "bind", lambda self, info: info)


def table_younger_than_the_snapshot_is_read(patch: Patch) -> None:
    """It looks empty to a snapshot in whose time another table of that name had rows."""

    patch.setattr(TableInfo, "require_older_than", lambda self, snapshot: None)


def drop_does_not_wait(patch: Patch) -> None:
    """Others read the table until its servers have heard that it was dropped."""

    async def wrong(self: Tables, name: str, deadline: float) -> None:
        pass

    patch.setattr(Tables, "_until_out_of_use", wrong)


def drop_waits_once(patch: Patch) -> None:
    """When it is repeated after a time-out, it returns at once; so does the next creation."""
    correct = Tables._until_out_of_use

    async def wrong(self: Any, name: str, deadline: float) -> None:
        if getattr(self, "_waited_for", 0) < self._deletions:
            self._waited_for = self._deletions
            await correct(self, name, deadline)

    patch.setattr(Tables, "_until_out_of_use", wrong)


def creation_does_not_wait_for_the_former_table(patch: Patch) -> None:
    """Its drop has run out of time, and others still use it."""
    is_creating = ContextVar("is_creating", default=False)
    create, wait = TableChanges.create, Tables._until_out_of_use

    async def created(self: Any, request: pb.CreateTableRequest, deadline: float) -> Any:
        token = is_creating.set(True)
        try:
            return await create(self, request, deadline)
        finally:
            is_creating.reset(token)

    async def wrong(self: Tables, name: str, deadline: float) -> None:
        if not is_creating.get():
            await wait(self, name, deadline)

    patch.setattr(TableChanges, "create", created)
    patch.setattr(Tables, "_until_out_of_use", wrong)


def a_silent_owner_is_taken_for_gone(patch: Patch) -> None:
    """Its lease has expired, but nobody has taken its tablets over yet: it may be only cut off from
    the master."""
    correct = Assignment.is_taken_over

    def wrong(self: Assignment, tablet: MapTablet) -> bool:
        alive = self._watch.alive()
        return correct(self, tablet) or not any(tablet.tablet_id in one.reported for one in alive)

    patch.setattr(Assignment, "is_taken_over", wrong)
    take_over_slowly(patch)


def take_over_slowly(patch: Patch) -> None:
    """The next owner waits for the store, and the former one serves until then. Otherwise there is
    hardly any time in which it could be used."""
    correct = SimulatedTabletStore.take_over

    async def slowly(
        self: SimulatedTabletStore, tablet: TabletIdentity, ancestry: Ancestry
    ) -> EpochDirectory:
        await asyncio.sleep(1.5)
        return await correct(self, tablet, ancestry)

    patch.setattr(SimulatedTabletStore, "take_over", slowly)


def report_of_an_earlier_epoch_confirms_a_drop(patch: Patch) -> None:
    """It says that the tablet is still served as before."""

    def wrong(self: Assignment, tablet: MapTablet) -> bool:
        server = self._watch.servers.get(tablet.server_id)
        return server is not None and tablet.tablet_id in server.reported

    patch.setattr(Assignment, "is_taken_over", wrong)


DROPS: tuple[Callable[[Patch], None], ...] = (
    drop_does_not_wait,
    drop_waits_once,
    creation_does_not_wait_for_the_former_table,
    report_of_an_earlier_epoch_confirms_a_drop,
)

TABLE_BUGS: tuple[Callable[[Patch], None], ...] = (
    name_looked_up_at_each_call,
    table_younger_than_the_snapshot_is_read,
)
