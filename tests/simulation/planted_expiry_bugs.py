"""Bugs of values that expire, which a simulation has to find: one for each of their rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import TransactionInternals
from percolator.protocol import commit
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.tablet.collection.collection import _WalkOfVersions
from percolator.tablet.lifetimes import Lifetimes, Ttls
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading.point_reads import PointReads
from percolator.tablet.reading.scan_page import ScanPage
from percolator.tablet.upkeep import Upkeep
from percolator.timestamps import is_expired
from percolator.v1.cells_pb2 import Cell
from tests.simulation.planted_collection_bugs import collect_eagerly

Patch = pytest.MonkeyPatch
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
    """What they have seen under the longer one is collected before they have read it."""
    patch.setattr(TabletState, "require_lifetimes", lambda self, lifetimes: None)
    _read_slowly(patch)


def a_ttl_becomes_longer_while_expired_cells_are_deleted(patch: Patch) -> None:
    """A reader goes by it at once. It finds the record of a value that is gone a moment later."""
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


ALL: tuple[tuple[Callable[[Patch], None], bool], ...] = (
    (scans_show_expired_values, False),
    (expiry_is_judged_when_the_read_arrives, False),
    (reads_of_now_find_everything_expired, False),
    (values_in_locks_never_expire, False),
    (index_entries_that_stay_are_never_written_again, False),
    (kept_cells_are_judged_by_the_clients_own_schema, True),
    (values_are_collected_before_the_safe_point_has_seen_their_end, True),
)
"""Each with whether it takes the real master, which collects."""
