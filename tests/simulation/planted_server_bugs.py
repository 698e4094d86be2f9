"""Bugs in what oracles and tablet servers promise, which a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from percolator.aio.bulk_load import CALL_SECONDS, BulkLoad, LoadTimestamps
from percolator.aio.changes import Following
from percolator.aio.reader import Reader
from percolator.changes import Change
from percolator.errors import CellAddress, InvalidArgument, PercolatorError, UsageError
from percolator.protocol.change_reader import ChangeReader
from percolator.protocol.conflicts import MetLock
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import ChangesSeen, ResolvedLocks, StoredChange
from percolator.routing.lock_resolution import LockResolution
from percolator.rowstore import collection as row_collection
from percolator.rowstore.loading import RowLoader
from percolator.rowstore.port import RowChange
from percolator.services.chassis.epoch_directory import EpochDirectory, SharedLook
from percolator.services.chassis.record_coordinator import LEADER, RecordLeadership
from percolator.services.chassis.records import BucketRecords, Seen
from percolator.services.master import row_term
from percolator.services.master.assignment import Assignment
from percolator.services.master.cluster_map import Catalogue, Table, TableLoad
from percolator.services.master.cluster_map import Tablet as MapTablet
from percolator.services.master.leader import Tables
from percolator.services.master.table_changes import TableChanges
from percolator.services.oracle import candidate
from percolator.services.oracle.candidate import Candidate, OtherClocks, Site
from percolator.services.oracle.oracle import DurableMark, Oracle
from percolator.services.tabletserver.locks_in_the_way import LocksInTheWay
from percolator.services.tabletserver.storage import Ancestry
from percolator.tablet import bulk_load, change_scan, collection, judge
from percolator.tablet.cells import TIMESTAMP_MAX, F, RecentWrites
from percolator.tablet.change_scan import ChangePlan, Settled
from percolator.tablet.group_commit import GroupCommit, MutationWork
from percolator.tablet.judge import Judge, JudgedBatch, WriteLatch
from percolator.tablet.state import (
    LoadFence,
    LoadFences,
    TabletIdentity,
    TabletState,
    TimestampGuard,
    UnheardTimestamp,
    note_change,
)
from percolator.tablet.tablet import AnswerBudget, Tablet
from percolator.testing.memory_storage import MemoryBatch, MemoryCursor, MemoryStorage, View
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import master_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.cells_pb2 import SPACE_WRITE, Cell, RowRange
from percolator.v1.tabletserver_pb2 import MutationResult, ReadBatch, ReadBatchResult
from percolator.wire.methods import FENCE
from tests.patching import in_place_of
from tests.simulation.bug import PerSeed
from tests.simulation.disks import SimulatedTabletStore
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_BETWEEN_TWO_LOOKS_SECONDS = 0.002


def oracle_without_persistence(patch: Patch) -> None:
    """After a restart it hands out the same timestamps again."""

    @in_place_of(patch, DurableMark, "write")
    async def forget(self: DurableMark, milliseconds: int) -> None:
        self._mark = self._mark.__class__(milliseconds, self._mark.cluster_id)


def mirror_after_the_snapshot(patch: Patch) -> None:
    """A reader takes its view of the writes first and checks locks second."""

    correct = Tablet.read

    @in_place_of(patch, Tablet, "read")
    async def wrong(
        self: Tablet, batch: ReadBatch, budget: AnswerBudget | None = None
    ) -> ReadBatchResult:
        early = copy(self)
        early._state = copy(self._state)
        early._state.storage = _EarlyView(self._state.storage)
        await asyncio.sleep(_BETWEEN_TWO_LOOKS_SECONDS)
        return await correct(early, batch, budget)


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

    @in_place_of(patch, TabletState, "require_ownership")
    async def wrong(self: TabletState) -> None:
        """Does not look."""


def write_without_the_after_check(patch: Patch) -> None:
    """A deposed owner acknowledges a write that will never be read: the lost epoch check."""

    @in_place_of(patch, EpochDirectory, "is_held")
    async def wrong(self: EpochDirectory) -> bool:
        return True

    patch.setattr(EpochDirectory, "is_held_blocking", lambda self: True)


# Bugs in looking who owns a tablet on a store that stalls.


_IMPATIENT_SECONDS = 0.05


def stalled_look_answered_without_the_store(patch: Patch) -> None:
    """An owner whose store does not answer goes on as if it still were one."""
    correct = EpochDirectory.is_held

    @in_place_of(patch, EpochDirectory, "is_held")
    async def wrong(self: EpochDirectory) -> bool:
        try:
            async with asyncio.timeout(_IMPATIENT_SECONDS):
                return await correct(self)
        except TimeoutError:
            return True


def look_under_way_joined(patch: Patch) -> None:
    """It may have seen the directory long before the work of those who join was done."""
    correct = SharedLook.__call__
    under_way: dict[SharedLook[bool], asyncio.Future[bool]] = {}

    @in_place_of(patch, SharedLook, "__call__")
    def wrong(self: SharedLook[bool]) -> asyncio.Future[bool]:
        if self._looking is None or under_way[self].done():
            under_way[self] = correct(self)
        return asyncio.shield(under_way[self])


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

    @in_place_of(patch, GroupCommit, "execute")
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

    @in_place_of(patch, MemoryStorage, "write")
    async def wrong(
        self: MemoryStorage, batch: MemoryBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        self._check()
        self._show(batch.changes)
        return await correct(self, batch, then)


def answered_before_it_is_durable(patch: Patch) -> None:
    """A write is acknowledged without waiting for the disk, and is gone after a power cut."""
    correct = MemoryStorage.write
    syncing: dict[MemoryStorage, asyncio.Task[bool]] = {}

    @in_place_of(patch, MemoryStorage, "write")
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

    @in_place_of(patch, TimestampGuard, "settle")
    async def wrong(self: TimestampGuard, unheard: UnheardTimestamp) -> None:
        self.heard(self._clock.wall_milliseconds() << SEQUENCE_BITS)
        if unheard.timestamp > self.admitted_to:
            raise InvalidArgument(unheard.field, "lies ahead of this server's clock")


def oracle_believes_its_own_clock(patch: Patch) -> None:
    """A standby on a machine with a wrong clock takes the cluster into the future."""

    @in_place_of(patch, OtherClocks, "beginning")
    async def wrong(self: OtherClocks, mark_milliseconds: int, *, jump_seconds_max: float) -> int:
        return max(self._world.clock.wall_milliseconds(), mark_milliseconds)


def most_of_the_known_clocks_are_most_clocks(patch: Patch) -> None:
    """A master that has just begun to lead knows no clock but that of its own host, where the
    oracle is as wrong as it is."""
    patch.setattr(candidate, "_require_most", lambda told: None)


def oracle_begins_before_the_epoch_of_the_store(patch: Patch) -> None:
    """The first oracle's clock is years slow: nothing can be committed until it is corrected."""
    correct = Candidate.__init__

    @in_place_of(patch, Candidate, "__init__")
    def wrong(self: Candidate, site: Site, *rest: Any, **more: Any) -> None:
        correct(self, replace(site, first_milliseconds=0), *rest, **more)


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

    @in_place_of(patch, Tables, "_until_out_of_use")
    async def wrong(self: Tables, name: str, deadline: float) -> None:
        pass


def drop_waits_once(patch: Patch) -> None:
    """When it is repeated after a time-out, it returns at once; so does the next creation."""
    correct = Tables._until_out_of_use

    @in_place_of(patch, Tables, "_until_out_of_use")
    async def wrong(self: Any, name: str, deadline: float) -> None:
        if getattr(self, "_waited_for", 0) < self._deletions:
            self._waited_for = self._deletions
            await correct(self, name, deadline)


def creation_does_not_wait_for_the_former_table(patch: Patch) -> None:
    """Its drop has run out of time, and others still use it."""
    is_creating = ContextVar("is_creating", default=False)
    create, wait = TableChanges.create, Tables._until_out_of_use

    @in_place_of(patch, TableChanges, "create")
    async def created(self: Any, request: pb.CreateTableRequest, deadline: float) -> Any:
        token = is_creating.set(True)
        try:
            return await create(self, request, deadline)
        finally:
            is_creating.reset(token)

    @in_place_of(patch, Tables, "_until_out_of_use")
    async def wrong(self: Tables, name: str, deadline: float) -> None:
        if not is_creating.get():
            await wait(self, name, deadline)


def a_silent_owner_is_taken_for_gone(patch: Patch) -> None:
    """Its lease has expired, but nobody has taken its tablets over yet: it may be only cut off from
    the master."""
    correct = Assignment.is_taken_over

    @in_place_of(patch, Assignment, "is_taken_over")
    def wrong(self: Assignment, tablet: MapTablet) -> bool:
        alive = self._watch.alive()
        return correct(self, tablet) or not any(tablet.tablet_id in one.reported for one in alive)

    take_over_slowly(patch)


def take_over_slowly(patch: Patch) -> None:
    """The next owner waits for the store, and the former one serves until then. Otherwise there is
    hardly any time in which it could be used."""
    correct = SimulatedTabletStore.take_over

    @in_place_of(patch, SimulatedTabletStore, "take_over")
    async def slowly(
        self: SimulatedTabletStore, tablet: TabletIdentity, ancestry: Ancestry
    ) -> EpochDirectory:
        await asyncio.sleep(1.5)
        return await correct(self, tablet, ancestry)


def report_of_an_earlier_epoch_confirms_a_drop(patch: Patch) -> None:
    """It says that the tablet is still served as before."""

    @in_place_of(patch, Assignment, "is_taken_over")
    def wrong(self: Assignment, tablet: MapTablet) -> bool:
        server = self._watch.servers.get(tablet.server_id)
        return server is not None and tablet.tablet_id in server.reported


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


# Bugs of bulk loads that a simulation has to find.


def scans_pass_the_fence(patch: Patch) -> None:
    """They see a part of what is being loaded."""
    patch.setattr(LoadFences, "among", lambda self, start, end: None)


def timestamps_before_the_fence(patch: Patch) -> None:
    """A snapshot in between has seen the range empty, and sees the rows when it looks again."""

    @in_place_of(patch, BulkLoad, "begin")
    async def wrong(self: BulkLoad) -> LoadTimestamps:
        await self._know_table()
        timestamps = self._engine.env.timestamps
        early = LoadTimestamps(await timestamps.get(), await timestamps.get())
        await _raise_or_give_up(self, early.start)
        return early


async def _raise_or_give_up(load: BulkLoad, run: int) -> None:
    """Raises the run number in one step, or not at all."""
    found = await load._raise(run)
    if found.complete is not None:
        await load._open(run, found.complete)
    elif found.obstacle is not None or found.remains:
        await load._open_again(run)
    else:
        return
    raise UsageError("it cannot begin")


def rows_of_a_former_run_are_taken_for_ones_own(patch: Patch) -> None:
    """They were loaded at other timestamps, and not all of them."""
    correct = BulkLoad._raise

    @in_place_of(patch, BulkLoad, "_raise")
    async def wrong(self: BulkLoad, run: int) -> Any:
        found = await correct(self, run)
        found.remains = False
        return found


def a_run_that_was_overtaken_goes_on_without_a_fence(patch: Patch) -> None:
    """A load of other rows ended first, and no other number is tried."""
    correct = BulkLoad._raise

    @in_place_of(patch, BulkLoad, "_raise")
    async def wrong(self: BulkLoad, run: int) -> Any:
        await asyncio.sleep(run % 5 * 0.01)  # otherwise it seldom happens
        found = await correct(self, run)
        found.is_overtaken = False
        return found


def every_run_of_a_load_is_let_in(patch: Patch) -> None:
    """Rows of a run that was superseded end up among those of the run that took over."""
    correct = bulk_load._of_run

    @in_place_of(patch, bulk_load, "_of_run")
    def wrong(state: TabletState, asked: LoadFence) -> LoadFence:
        present = state.load_fences.get(asked.name)
        return correct(state, asked) if present is None else present


def an_abandoned_load_is_opened_as_it_is(patch: Patch) -> None:
    """A part of it stays forever."""

    async def nothing(state: TabletState, asked: LoadFence) -> tablets.FenceResponse:
        return tablets.FenceResponse()

    patch.setitem(bulk_load._ACTIONS, tablets.FenceRequest.ACTION_CLEAR, nothing)
    patch.setattr(bulk_load, "_first_cell", lambda state, fence: None)


def tablets_are_opened_before_all_know_that_the_load_is_complete(patch: Patch) -> None:
    """A run that takes over then clears the tablets that do not know."""

    @in_place_of(patch, BulkLoad, "finish")
    async def wrong(self: BulkLoad, timestamps: LoadTimestamps) -> None:
        await self._know_table()
        asked = tablets.FenceRequest

        async def one_by_one(location: Any) -> None:
            for action in (asked.ACTION_FINISH, asked.ACTION_LIFT):
                fence = tablets.LoadFence(
                    name=self._plan.name,
                    run=timestamps.start,
                    range=RowRange(start=self._plan.start, end=self._plan.end),
                    commit_timestamp=timestamps.commit,
                )
                request = asked(target=self._target(location), action=action, fence=fence)
                call = self._engine.world.network.unary(location.address, FENCE)
                await call(request, CALL_SECONDS)

        await self._walk.each(self._table_id, self._plan.start, self._plan.end, one_by_one)


def the_judge_does_not_learn_of_loads(patch: Patch) -> None:
    """A transaction that began before the load writes over it."""
    patch.setattr(RecentWrites, "forget", lambda self, newest_commit: None)


def loads_keep_all_transactions_out(patch: Patch) -> None:
    """One of several loaders always waits, and no transaction of other rows holds cells."""

    @asynccontextmanager
    async def wrong(self: WriteLatch) -> AsyncIterator[None]:
        async with self:
            yield

    patch.setattr(WriteLatch, "between_batches", wrong)
    transactions_have_no_turn(patch)


def transactions_have_no_turn(patch: Patch) -> None:
    """A caller that needs all cells released follows the one before at once."""

    @in_place_of(patch, WriteLatch, "_leave")
    def wrong(self: WriteLatch) -> None:
        self._wanted -= 1
        if not self._wanted:
            self._admit_waiting()
        self._exclusive.release()


def each_loader_comes_before_the_next_batch(patch: Patch) -> None:
    """Commits wait for as many loads as there are loaders."""
    correct = WriteLatch.__init__

    @in_place_of(patch, WriteLatch, "__init__")
    def wrong(self: WriteLatch, *arguments: Any) -> None:
        correct(self, *arguments)
        patch.setattr(self, "between", asyncio.Semaphore(1_000))


def a_range_is_closed_beside_transactions_that_hold_its_rows(patch: Patch) -> None:
    """They were judged before the fence, and are written behind it."""

    @in_place_of(patch, WriteLatch, "__aenter__")
    async def not_waited_for(self: WriteLatch) -> None:
        await self.between.acquire()
        await self.writing.acquire()

    @in_place_of(patch, WriteLatch, "__aexit__")
    async def left(self: WriteLatch, *error: object) -> None:
        self.writing.release()
        self.between.release()


def transactions_hold_rows_while_their_range_is_being_closed(patch: Patch) -> None:
    """They are judged while the fence is on its way to the disk."""
    patch.setattr(WriteLatch, "is_wanted", property(lambda self: False))


def a_range_is_cleared_by_a_run_that_has_lost_it(patch: Patch) -> None:
    """It looks for its fence only before the first of its writes."""
    correct = bulk_load._of_run
    looked: PerSeed[set[int]] = PerSeed(set)

    @in_place_of(patch, bulk_load, "_of_run")
    def wrong(state: TabletState, asked: LoadFence) -> LoadFence:
        present = state.load_fences.get(asked.name)
        if asked.run in looked.now() and present is not None and asked.start:
            return replace(present, commit_timestamp=0)
        looked.now().add(asked.run)
        return correct(state, asked)

    patch.setattr(bulk_load, "CLEARED_PER_WRITE", 1)


BESIDE_TRANSACTIONS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (loads_keep_all_transactions_out, (), True),
    (transactions_have_no_turn, (), True),
    (each_loader_comes_before_the_next_batch, (), True),
    (a_range_is_closed_beside_transactions_that_hold_its_rows, (), True),
    (transactions_hold_rows_while_their_range_is_being_closed, (Kind.SLOW_DISK,), True),
    (a_range_is_cleared_by_a_run_that_has_lost_it, (Kind.CLIENT_STEP,), True),
    (a_run_that_was_overtaken_goes_on_without_a_fence, (), True),
)
"""Bugs for the workload in which loaders and transactions meet."""

LOAD_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (scans_pass_the_fence, (), True),
    (timestamps_before_the_fence, (), False),
    (rows_of_a_former_run_are_taken_for_ones_own, (), False),
    (every_run_of_a_load_is_let_in, (), False),
    (an_abandoned_load_is_opened_as_it_is, (), True),
    (
        tablets_are_opened_before_all_know_that_the_load_is_complete,
        (Kind.CLIENT_STEP,),
        False,
    ),
    (the_judge_does_not_learn_of_loads, (), False),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds."""


# Bugs of bulk loads into a row store.
#
# That no ended run begins again, and that a published table is young, hardly ever matters in a
# simulation: tests/unit/rowstore/test_loading.py shows both.


def deletions_in_loaded_rows_are_collected(patch: Patch) -> None:
    """A late call of the load brings back what was deleted."""
    patch.setattr(row_collection, "LOADED", b"another")


def a_later_run_loads_into_the_table_of_an_earlier_one(patch: Patch) -> None:
    """Rows of a run that was superseded end up among those of the run that took over."""
    correct = row_term._begun

    @in_place_of(patch, row_term, "_begun")
    def wrong(
        request: master_pb2.BeginLoadRequest, made: Table | None, current: Catalogue
    ) -> tuple[Catalogue, Table | None]:
        for table, load in row_term._of_load(current, request.table.name, request.load):
            if load.run < request.run and table.is_hidden:
                taken = replace(table, load=TableLoad(request.load, request.run))
                return current.with_tables(taken), taken
        return correct(request, made, current)


def every_run_is_published(patch: Patch) -> None:
    """Also one that has been taken over, whose table is about to be deleted."""

    @in_place_of(patch, row_term, "_loaded")
    def wrong(current: Catalogue, asked: master_pb2.PublishLoadsRequest.Loaded) -> Table:
        table = current.tables.get(asked.table_id)
        if table is None:
            raise row_term._taken_over("", asked.run)
        return table


def rows_that_were_not_answered_are_taken_for_loaded(patch: Patch) -> None:
    """They are missing when the table is published."""

    @in_place_of(patch, RowLoader, "_call")
    async def wrong(
        self: RowLoader, table_id: int, rows: Sequence[RowChange], seconds: float
    ) -> None:
        with suppress(PercolatorError):
            await self._store.write(table_id, rows, seconds)


ROW_LOAD_BUGS: tuple[Callable[[Patch], None], ...] = (
    deletions_in_loaded_rows_are_collected,
    a_later_run_loads_into_the_table_of_an_earlier_one,
    every_run_is_published,
    rows_that_were_not_answered_are_taken_for_loaded,
)


# Bugs of change feeds.


def entries_of_the_feed_are_written_with_the_next_batch(patch: Patch) -> None:
    """A reader comes between, or there is no next batch."""
    correct_begin = JudgedBatch.begin
    by_storage = PerSeed(dict[int, list[tuple[bytes, int, bytes]]])
    noted: list[tuple[bytes, int, bytes]] = []

    @in_place_of(patch, judge, "note_change")
    def note(batch: Any, cell: bytes, timestamp: int, record: bytes) -> int:
        noted.append((cell, timestamp, record))
        return 0

    @in_place_of(patch, JudgedBatch, "begin")
    def begin(self: JudgedBatch, *memory: Any) -> None:
        held = by_storage.now()
        before = held.pop(id(self._get.__self__), [])  # type: ignore[attr-defined]
        held[id(self._get.__self__)] = list(noted)  # type: ignore[attr-defined]
        noted.clear()
        for entry in before:
            note_change(self.writes, *entry)
        correct_begin(self, *memory)


def readers_of_changes_ignore_locks(patch: Patch) -> None:
    """Changes that are committed below them later are never read."""
    correct = change_scan.find_settled

    @in_place_of(patch, change_scan, "find_settled")
    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        found = await correct(state, plan)
        return found if not found.locks else Settled(plan.until)


def readers_of_changes_ignore_locks_behind_those_that_are_reported(patch: Patch) -> None:
    """One of them may be of an earlier transaction."""
    correct = change_scan.find_settled

    @in_place_of(patch, change_scan, "find_settled")
    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        found = await correct(state, plan)
        if not found.locks:
            return found
        until = change_scan._last_before(found.locks[0][2])
        return Settled(max(plan.after, min(plan.until, until)), found.locks[:1])


def readers_of_changes_ignore_loads(patch: Patch) -> None:
    """The rows of a load that becomes visible below them are never read."""
    correct = change_scan.find_settled

    @in_place_of(patch, change_scan, "find_settled")
    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        fences, state.load_fences = state.load_fences, type(state.load_fences)()
        try:
            return await correct(state, plan)
        finally:
            state.load_fences = fences


def a_tablet_says_how_far_all_are_settled(patch: Patch) -> None:
    """Others may have locks below that."""
    correct = ChangeReader._look

    @in_place_of(patch, ChangeReader, "_look")
    async def wrong(self: ChangeReader, until: int, deadline: float) -> ChangesSeen:
        seen = await correct(self, until, deadline)
        return seen._replace(reached=max(seen.reached, min(until, seen.newest)))


def a_page_that_ends_inside_a_commit_is_taken_for_whole(patch: Patch) -> None:
    """Who goes on from there loses the rest of the commit."""
    correct = ChangeReader.between

    @in_place_of(patch, ChangeReader, "between")
    async def wrong(
        self: ChangeReader, seen: ChangesSeen, timeout_seconds: float
    ) -> AsyncGenerator[list[StoredChange], None]:
        async for page in correct(self, seen, timeout_seconds):
            self.position = max(self.position, page[-1].commit_timestamp)
            yield page


def a_follower_has_come_as_far_as_the_commit_that_it_reads(patch: Patch) -> None:
    """If it fails there and goes on from there, it loses the rest of the commit."""

    @in_place_of(patch, Following, "has_handled")
    def wrong(self: Following[Any], change: Change[Any]) -> None:
        self._reached = change.commit_timestamp


def a_half_of_a_split_loses_what_was_in_the_feed(patch: Patch) -> None:
    """Its own rows are taken for the other half's."""

    @in_place_of(patch, collection, "_slice_of_feed")
    def wrong(state: TabletState, sweep: Any, first: bytes) -> bytes | None:
        for key, value in state.storage.iterate(first, F + b"\xff" * 9):
            sweep.delete(key, len(key) + len(value))
        return None


def readers_of_changes_are_let_in_below_the_safe_point(patch: Patch) -> None:
    """The changes that they ask for were collected."""
    correct = change_scan.require_complete

    @in_place_of(patch, change_scan, "require_complete")
    def wrong(state: TabletState, after: int) -> None:
        correct(state, max(after, state.safe_points.reads))


def a_former_owner_says_that_a_table_has_no_feed(patch: Patch) -> None:
    """The feed was switched on after the takeover: its readers end with an error."""

    @in_place_of(patch, change_scan, "require_feed")
    async def wrong(state: TabletState) -> None:
        if not state.feed.on:
            raise change_scan._no_feed(state)


FEED_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool, bool], ...] = (
    (entries_of_the_feed_are_written_with_the_next_batch, (), False, True),
    (readers_of_changes_ignore_locks, (), False, True),
    (readers_of_changes_ignore_locks_behind_those_that_are_reported, (), False, False),
    (readers_of_changes_ignore_loads, (), False, False),
    (a_tablet_says_how_far_all_are_settled, (), False, False),
    (a_page_that_ends_inside_a_commit_is_taken_for_whole, (), False, False),
    (a_follower_has_come_as_far_as_the_commit_that_it_reads, (), False, True),
    (a_half_of_a_split_loses_what_was_in_the_feed, (Kind.SPLIT,), True, False),
    (readers_of_changes_are_let_in_below_the_safe_point, (), True, False),
)
"""Each with the disruptions that reveal it, whether it needs the real master, and whether it is
caught in seconds."""


# Bugs in how tablet servers resolve locks for clients with rights to some tables only.


def locks_may_be_passed_without_a_look_at_their_primaries(patch: Patch) -> None:
    """The transaction may have committed at or below the snapshot."""

    @in_place_of(patch, LocksInTheWay, "resolve")
    async def wrong(
        self: LocksInTheWay,
        table_id: int,
        seen: Sequence[Cell],
        request: tablets.ResolveLocksRequest,
        deadline: float,
    ) -> tablets.ResolveLocksResponse:
        starts = {int.from_bytes(one.value[:8], "big") for one in seen} if request.read_at else ()
        return tablets.ResolveLocksResponse(passable=sorted(starts))


def a_lock_met_by_others_decides_by_itself(patch: Patch) -> None:
    """The cell is rolled back although its transaction commits, or has committed, elsewhere."""
    correct = LocksInTheWay.resolve

    @in_place_of(patch, LocksInTheWay, "resolve")
    async def wrong(
        self: LocksInTheWay,
        table_id: int,
        seen: Sequence[Cell],
        request: tablets.ResolveLocksRequest,
        deadline: float,
    ) -> tablets.ResolveLocksResponse:
        alone = []
        for cell in seen:
            met = MetLock.of(table_id, cell)
            own = Cell()
            own.CopyFrom(cell)
            own.value = replace(met.lock, primary=met.address).encode()
            alone.append(own)
        return await correct(self, table_id, alone, request, deadline)


def what_one_snapshot_may_pass_is_passed_by_all(patch: Patch) -> None:
    """The transaction commits above the one that has pushed it, and below a later one."""
    correct = LockResolution.resolve

    @in_place_of(patch, LockResolution, "resolve")
    async def wrong(
        self: LockResolution, met: Sequence[tuple[CellAddress, int]], **how: Any
    ) -> ResolvedLocks:
        passed = _passed_once.now()
        found = await correct(self, met, **how)
        passed |= found.passable
        if how["read_at"]:
            found.passable.update(passed & {start for _, start in met})
        return found


_passed_once: PerSeed[set[int]] = PerSeed(set)

RESTRICTED_BUGS = (
    locks_may_be_passed_without_a_look_at_their_primaries,
    a_lock_met_by_others_decides_by_itself,
    what_one_snapshot_may_pass_is_passed_by_all,
)


# Bugs of masters and oracles that lead by a bucket.
#
# The successor of a paused oracle begins above its mark. Below it, the paused one still has
# timestamps, and they are older than what has been read meanwhile.


def oracle_in_a_bucket_answers_without_a_look(patch: Patch) -> None:
    """It trusts its mark, which is durable. That proves nothing: it may have been deposed."""

    @in_place_of(patch, Oracle, "check_may_answer")
    async def wrong(self: Oracle) -> None:
        """Does not look."""


def oracle_in_a_bucket_looks_too_early(patch: Patch) -> None:
    """A look that was under way, or was made a moment ago, says nothing of what came after it."""
    correct = RecordLeadership.is_held

    @in_place_of(patch, RecordLeadership, "is_held")
    async def wrong(self: RecordLeadership) -> bool:
        if self._clock.monotonic_seconds() - self._held_at <= 2 * self._beat_seconds:
            return not self._deposed
        return await correct(self)


def a_record_is_changed_whoever_leads(patch: Patch) -> None:
    """The map of a successor is replaced by one without its changes."""
    correct = BucketRecords.change

    @in_place_of(patch, BucketRecords, "change")
    async def wrong(
        self: BucketRecords, key: bytes, seen: Seen, changes: Mapping[bytes, bytes | None]
    ) -> bool:
        if seen.value is None or LEADER in changes:
            return await correct(self, key, seen, changes)
        found = (await self.read(key, [seen.column])).get(seen.column)
        return await correct(self, key, Seen(seen.column, found), changes)

    patch.setattr(RecordLeadership, "_note", lambda self, found: None)


BUCKET_BUGS: tuple[tuple[Callable[[Patch], None], str, bool], ...] = (
    (oracle_in_a_bucket_answers_without_a_look, "mixed", True),
    (oracle_in_a_bucket_looks_too_early, "mixed", True),
    (a_record_is_changed_whoever_leads, "successors", True),
)
"""Each with the workload that reveals it, and whether it is caught within seconds."""
