"""Bugs of masters and oracles that keep everything in a row store, which a simulation has to find.

Of who leads (services/chassis/row_coordinator.py), of the catalogue's
epoch, and of tables that are dropped (services/master/row_term.py). Those of drops need
clients that die with half of their cells committed, all at about the time at which the table of
their primaries goes (tests/simulation/workloads/drops.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import cycle
from typing import Any, cast

import pytest

from percolator.history.rows import RowHistory
from percolator.services.chassis.row_coordinator import RoleRow, RowLeadership, Stamp
from percolator.services.master.collection import ClusterSafePoints, Collection, OracleTime
from percolator.services.master.master import ROLE as MASTER_ROLE
from percolator.services.master.row_term import RowCollecting, RowDrops
from percolator.services.oracle.oracle import Oracle, OracleHandler
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from tests.simulation import row_cluster
from tests.simulation.per_seed import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_ALL_LOCKS = 1 << 63
_BETWEEN_TWO_LOOKS_SECONDS = 0.05
"""As long as the oracle's look at the store takes when that is slow."""


def oracle_on_rows_answers_without_a_look(patch: Patch) -> None:
    """It was paused, and its successor has handed out later timestamps."""

    async def wrong(self: Oracle) -> None:
        """Does not look."""

    patch.setattr(Oracle, "_check_may_answer", wrong)


def master_on_rows_writes_after_it_was_replaced(patch: Patch) -> None:
    """What its successor has changed in the catalogue is lost."""
    correct = RoleRow.change

    async def wrong(
        self: RoleRow, seen: Stamp | None, new: Stamp, changes: Mapping[bytes, bytes | None]
    ) -> bool:
        made = await correct(self, seen, new, changes)
        if made or self.role != MASTER_ROLE or not changes:
            return made
        return await correct(self, (await self.look()).stamp, new, changes)

    noted = RowLeadership._note

    def blind(self: RowLeadership, found: Stamp | None) -> None:
        if self._row.role != MASTER_ROLE:
            noted(self, found)

    patch.setattr(RoleRow, "change", wrong)
    patch.setattr(RowLeadership, "_note", blind)


def epoch_not_raised_at_a_registration(patch: Patch) -> None:
    """Clients that know an older schema do not notify the observer."""

    async def wrong(self: OracleTime, deadline: float) -> None:
        """Tells nobody."""

    patch.setattr(OracleTime, "raise_epoch", wrong)


def epoch_from_before_the_timestamps(patch: Patch) -> None:
    """An observer was registered in between, and the commit at that timestamp misses it. Every
    second answer is slow: if all were, the registration's own would be, too."""
    turns = PerSeed(lambda: cycle((0.0, _BETWEEN_TWO_LOOKS_SECONDS)))

    async def wrong(self: OracleHandler, request: GetTimestampsRequest) -> GetTimestampsResponse:
        oracle = self._serving()
        epoch = oracle.catalogue_epoch
        await asyncio.sleep(next(turns.now()))
        first = await oracle.get_timestamps(request.count)
        return GetTimestampsResponse(first=first, count=request.count, catalogue_epoch=epoch)

    patch.setattr(OracleHandler, "get_timestamps", wrong)


def epoch_not_raised_at_a_drop(patch: Patch) -> None:
    """Clients that know the table go on committing there until it is deleted, and then nothing
    tells that they have committed."""
    epoch_not_raised_at_a_registration(patch)


def dropped_table_deleted_at_once(patch: Patch) -> None:
    """Its cells are the only evidence of what has become of the locks in other tables."""
    correct = RowDrops.begin

    async def wrong(self: RowDrops) -> None:
        await correct(self)
        await self.finish(_ALL_LOCKS)

    patch.setattr(RowDrops, "begin", wrong)


def locks_resolved_below_any_timestamp_are_enough(patch: Patch) -> None:
    """Those that came after it, and before the epoch was raised, are still there."""
    correct = RowDrops.finish

    async def wrong(self: RowDrops, resolved_below: int) -> None:
        await correct(self, _ALL_LOCKS)

    patch.setattr(RowDrops, "finish", wrong)


def table_deleted_before_the_locks_are_resolved(patch: Patch) -> None:
    """The locks whose primaries are in the dropped table are in the others."""
    correct = RowCollecting.collect

    async def wrong(self: RowCollecting, ordered: ClusterSafePoints) -> None:
        await self._drops.begin()
        await self._drops.finish(ordered.transactions)
        await correct(self, ordered)

    patch.setattr(RowCollecting, "collect", wrong)


def eagerly(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The same bug where masters collect often, and from their first moment on: otherwise a run of
    a few seconds, whose masters are struck, sees few tables deleted. What sessions need is judged
    too early then, so that snapshots are refused; nothing else depends on it."""

    @wraps(plant)
    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(Collection, "_require_all_reported", lambda self, ttl_seconds_max: None)
        patch.setattr(row_cluster, "_COLLECTION_SECONDS", 0.1)
        patch.setitem(cast("Any", RowHistory.__init__).__kwdefaults__, "share", 0.9)

    return both


_STOPS = (Kind.PAUSE, Kind.SLOW_LINKS)

ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str, bool], ...] = (
    (oracle_on_rows_answers_without_a_look, _STOPS, "mixed", False),
    (master_on_rows_writes_after_it_was_replaced, _STOPS, "loads", True),
    (epoch_not_raised_at_a_registration, _STOPS, "chains", True),
)
"""Each with the kinds of strikes and the workload that bring it to light, and whether it is caught
within seconds."""

OF_DROPS: tuple[tuple[Callable[[Patch], None], bool], ...] = (
    (epoch_not_raised_at_a_drop, True),
    (dropped_table_deleted_at_once, True),
    (locks_resolved_below_any_timestamp_are_enough, True),
    (table_deleted_before_the_locks_are_resolved, True),
)
"""Each with whether it is caught within seconds."""
