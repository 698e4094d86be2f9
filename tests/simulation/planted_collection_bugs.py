"""Bugs of collecting history that a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import TransactionInternals
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.protocol import commit
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment, OpenStarts
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.services.master.collection import CollectionTimes
from percolator.services.master.tablet_collection import OldLocks
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.tablet import collection, group_commit, opening
from percolator.tablet.cells import LockMirror
from percolator.tablet.collection import AnsweredCells, Record, Sweep, _WalkOfVersions
from percolator.tablet.scans import ScanPage
from percolator.tablet.state import Lifetimes, SafePoints, TabletState, Ttls
from percolator.tablet.tablet import PointReads
from percolator.tablet.upkeep import Upkeep
from percolator.timestamps import is_expired
from percolator.v1.cells_pb2 import Cell
from tests.simulation import programs
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def collects_before_old_locks_are_resolved(patch: Patch) -> None:
    """The rest of a committed transaction is rolled back: its primary no longer shows a commit."""

    async def nothing(*_: object) -> None:
        return

    patch.setattr(OldLocks, "resolve", nothing)
    patch.setattr(collection, "_require_no_older_locks", lambda state, below: None)
    # Tablets also refuse rollback markers below what they have collected. With that, nothing would
    # be torn: the locks would stay, and the cells behind them would never be read again.
    patch.setattr(group_commit, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def old_locks_rolled_back_without_their_primary(patch: Patch) -> None:
    """Their owners need not be asked, but what the primary says counts: it may have committed."""
    correct = Cleanup.resolve

    async def wrong(
        self: Cleanup, met: Sequence[MetLock], *, ended_below: int = 0, **rest: Any
    ) -> set[int]:
        for one in met if ended_below else ():
            self._env.verdicts.put(one.lock.start_timestamp, ROLLED_BACK)
        return await correct(self, met, ended_below=ended_below, **rest)

    patch.setattr(Cleanup, "resolve", wrong)


def a_transaction_counts_as_gone_with_its_first_lock(patch: Patch) -> None:
    """The search for old locks does not find its other locks, and nobody rolls them forward."""

    def wrong(self: LockMirror, header: bytes) -> None:
        self._starts.pop(header[:START_TIMESTAMP_BYTES], None)

    patch.setattr(LockMirror, "_forget_start", wrong)
    patch.setattr(group_commit, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def new_owner_forgets_the_safe_point(patch: Patch) -> None:
    """It serves snapshots half of which its predecessor has collected."""
    correct = opening.load

    async def wrong(state: TabletState) -> None:
        await correct(state)
        state.safe_points = SafePoints()

    patch.setattr(opening, "load", wrong)
    collect_eagerly(patch, round_seconds=1.0)  # the next round tells the new owner


def safe_point_checked_before_the_read(patch: Patch) -> None:
    """While a page is being read, cells that it has not reached yet are collected."""
    patch.setattr(PointReads, "_refuse_too_old", lambda self: None)
    collect_eagerly(patch)


def newest_version_under_a_notification_collected(patch: Patch) -> None:
    """An observer that runs late does not find the change for which it had to run."""
    patch.setattr(Sweep, "_is_awaited", lambda self, cell: False)
    collect_eagerly(patch)


def acknowledgement_collected_although_its_cell_is_there(patch: Patch) -> None:
    """A second notification of the same change causes a second run."""

    def wrong(self: AnsweredCells, cell: bytes) -> list[Record]:
        self.end()
        return []

    patch.setattr(AnsweredCells, "came_to", wrong)
    collect_eagerly(patch)


def old_locks_rolled_back_when_collecting(patch: Patch) -> None:
    """Masters roll back old locks too early, and tablets do not refuse it either."""
    old_locks_rolled_back_without_their_primary(patch)
    patch.setattr(group_commit, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def collect_eagerly(patch: Patch, *, round_seconds: float = 0.2) -> None:
    """So that a run of a few seconds sees much of it. No client tells what it needs: then only
    being refused keeps it from what is gone."""
    patch.setattr(OpenStarts, "oldest", lambda self: 0)
    times = CollectionTimes(round_seconds=round_seconds, retention_seconds=0.3)
    patch.setattr(programs, "_COLLECTION", times)


COLLECTION_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None], ...] = (
    (collects_before_old_locks_are_resolved, (Kind.CLIENT_STEP,), None),
    (a_transaction_counts_as_gone_with_its_first_lock, (Kind.CLIENT_STEP,), None),
    (old_locks_rolled_back_when_collecting, (Kind.CLIENT_STEP,), None),
    (safe_point_checked_before_the_read, (Kind.PAUSE,), None),
    (newest_version_under_a_notification_collected, (Kind.PAUSE, Kind.CRASH), "chains"),
    (acknowledgement_collected_although_its_cell_is_there, (Kind.PAUSE, Kind.CRASH), "chains"),
)
"""Each with the disruptions that reveal it, and the workload; but for the safe point that is
forgotten, which takes owners that change when something was collected."""


# Bugs of values that expire: one for each of their rules.

_of = MetLock.of


def scans_show_expired_values(patch: Patch) -> None:
    """A scan and a read of the same snapshot disagree."""
    patch.setattr(Lifetimes, "hides_component", lambda self, encoded, commit, timestamp: False)
    patch.setattr(Lifetimes, "lasting", lambda self, timestamp: {})


def expiry_is_judged_when_the_read_arrives(patch: Patch) -> None:
    """By a clock, instead of the snapshot's timestamp: a snapshot changes while it is read."""
    correct = PointReads.answer
    late = {"by": 0}

    async def answer(self: PointReads) -> object:
        newest = self._state.guard._newest
        oldest = min((read.timestamp for read in self._asked), default=newest)
        late["by"] = max(0, newest - oldest)
        return await correct(self)

    def hides(self: Lifetimes, column: bytes, commit: int, timestamp: int) -> bool:
        ttl = self.by_column.get(column)
        return ttl is not None and is_expired(commit, timestamp + late["by"], ttl)

    patch.setattr(PointReads, "answer", answer)
    patch.setattr(Lifetimes, "hides", hides)


def reads_of_now_find_everything_expired(patch: Patch) -> None:
    """There is no timestamp to judge by, and the largest one is taken. Clients that do not know of
    the time to live yet ask for that."""
    patch.setattr(PointReads, "_may_expire", lambda self, columns: False)
    patch.setattr(Snapshot, "_expires", lambda self, cell: False)


def values_are_collected_before_the_safe_point_has_seen_their_end(patch: Patch) -> None:
    """A snapshot at the safe point still sees them."""

    def wrong(self: _WalkOfVersions, cell: bytes, commit: int) -> bool:
        return self._lifetimes.end_of(cell, commit) is not None

    patch.setattr(_WalkOfVersions, "_has_expired", wrong)
    collect_eagerly(patch)


def values_in_locks_never_expire(patch: Patch) -> None:
    """A reader takes a committed value from its lock, and shows it for longer than the tablet. Such
    locks stay where clients die after the commit point, as all of them do here."""

    async def never_comes(*arguments: object) -> None:
        pass

    def of(table_id: int, cell: Cell) -> MetLock:
        return _of(table_id, cell)._replace(ttl_milliseconds=0)

    patch.setattr(commit, "commit_secondaries", never_comes)
    patch.setattr(MetLock, "of", of)


def index_entries_that_stay_are_never_written_again(patch: Patch) -> None:
    """They expire before the column, whose time begins anew with each write."""

    async def wrong(
        self: TransactionInternals, column: object, timeout: float | None = None
    ) -> bool:
        return False

    patch.setattr(TransactionInternals, "expires", wrong)


def kept_cells_are_judged_by_the_clients_own_schema(patch: Patch) -> None:
    """It may have been learned before another client set the ttl."""
    patch.setattr(Environment, "schema_of_reads", Environment.schema)


def readers_do_not_notice_that_a_ttl_has_become_shorter(patch: Patch) -> None:
    """Values that they have seen under the longer one are collected before they have read them."""
    patch.setattr(TabletState, "require_lifetimes", lambda self, lifetimes: None)
    _read_slowly(patch)


def a_ttl_becomes_longer_while_expired_cells_are_deleted(patch: Patch) -> None:
    """A reader goes by it at once. It finds the record of a value that is gone a little later."""
    correct = Upkeep._follow_schema

    async def wrong(self: Upkeep, schema_version: int, *, change_feed: bool, ttls: Ttls) -> None:
        state = self._state
        if schema_version > state.schema_version and ttls != state.lifetimes.ttls:
            state.lifetimes = Lifetimes(ttls)
        await correct(self, schema_version, change_feed=change_feed, ttls=ttls)

    patch.setattr(Upkeep, "_follow_schema", wrong)
    _read_slowly(patch)
    _sweep_slowly(patch)


def _sweep_slowly(patch: Patch) -> None:
    """The disk takes long for deletions. Otherwise nothing happens meanwhile."""
    correct = TabletState.write

    async def write(self: TabletState, batch: object) -> None:
        await asyncio.sleep(0.1)
        await correct(self, batch)

    patch.setattr(TabletState, "write", write)


def _read_slowly(patch: Patch) -> None:
    """Servers do something else after each row of a page. Otherwise a page takes no time at all."""
    limits = TabletServerSettings.limits

    async def pause(self: ScanPage) -> None:
        await asyncio.sleep(0.02)
        self._state.require_open()

    patch.setattr(ScanPage, "_pause", pause)
    patch.setattr(
        TabletServerSettings, "limits", lambda self: replace(limits(self), slice_entries=1)
    )
    collect_eagerly(patch, round_seconds=0.1)


EXPIRY_BUGS: tuple[tuple[Callable[[Patch], None], bool], ...] = (
    (scans_show_expired_values, False),
    (expiry_is_judged_when_the_read_arrives, False),
    (reads_of_now_find_everything_expired, False),
    (values_in_locks_never_expire, False),
    (index_entries_that_stay_are_never_written_again, False),
    (kept_cells_are_judged_by_the_clients_own_schema, True),
    (values_are_collected_before_the_safe_point_has_seen_their_end, True),
)
"""Each with whether it takes the real master, which collects."""
