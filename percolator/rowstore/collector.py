"""Collects a table of a row store: scans it, and changes the rows in which something goes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from percolator.errors import PercolatorError
from percolator.limits import Limits
from percolator.rowstore.collecting import Bounds, collectable, no_older_lock, planned
from percolator.rowstore.layout import row_of, written_by_others
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import Change, RowStore, StoredRow
from percolator.rowstore.steady_scan import steady_scan
from percolator.rowstore.times import Times
from percolator.world import World

_ROWS_AT_A_TIME = 16
_ROWS_OF_A_SLICE = 200
_SLICE_SECONDS = 30.0


@dataclass
class Collected:
    """What one pass over a table has done so far."""

    rows: int = 0
    """How many rows were looked at."""
    cells: int = 0
    """How many cells were deleted."""
    passed_over: int = 0
    """How many rows were left alone: they have a lock below the safe point."""


class RowCollector:
    """Collects rows within a share of the time, so that others are not held up."""

    def __init__(
        self, store: RowStore, times: Times, world: World, limits: Limits, *, share: float = 0.1
    ) -> None:
        """`share` is the part of the time in which the collector works; it pauses in between."""
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._share = share

    async def collect(
        self, table_id: int, bounds: Bounds, collected: Collected, after: bytes = b""
    ) -> bytes | None:
        """One slice of a table, from the key `after` on. Returns where the next one begins; None at
        the end. Adds to `collected`.

        All locks below `bounds.ended_below` must have been resolved, in all tables. Raises the
        errors of the store; what was deleted by then stays deleted, and nothing depends on the
        rest.
        """
        bounds = bounds.storable()
        clock = self._world.clock
        began = clock.monotonic_seconds()
        rows = await self._slice(table_id, bounds, after)
        limit = asyncio.Semaphore(_ROWS_AT_A_TIME)

        async def one(row: StoredRow) -> None:
            async with limit:
                await self._row(table_id, row, bounds, collected)

        # All have ended when an error is raised: no change is under way behind the caller's back.
        for error in await asyncio.gather(*map(one, rows), return_exceptions=True):
            if error is not None:
                raise error
        collected.rows += len(rows)
        spent = clock.monotonic_seconds() - began
        await clock.sleep(spent * (1 / self._share - 1))
        return rows[-1].key + b"\0" if len(rows) == _ROWS_OF_A_SLICE else None

    async def _slice(self, table_id: int, bounds: Bounds, first: bytes) -> Sequence[StoredRow]:
        stream = steady_scan(
            self._store,
            table_id,
            collectable(bounds, self._times),
            self._world,
            self._limits,
            first=first,
            rows_max=_ROWS_OF_A_SLICE,
        )
        async with aclosing(stream) as rows:
            return [row async for row in rows]

    async def _row(
        self, table_id: int, row: StoredRow, bounds: Bounds, collected: Collected
    ) -> None:
        try:
            plan = planned(row.cells, bounds, self._times)
        except (struct.error, IndexError) as error:
            raise written_by_others(row_of(row.key), error) from error
        if plan is None:
            collected.passed_over += 1
            return
        if not plan.cells:
            return
        for changes in plan.changes(bounds, self._times):
            if not await self._change(table_id, row.key, bounds, changes):
                collected.passed_over += 1
                return
        collected.cells += plan.cells

    async def _change(
        self, table_id: int, key: bytes, bounds: Bounds, changes: Sequence[Change]
    ) -> bool:
        """Returns whether the change was made: not if there is an older lock by now."""
        check, patience = no_older_lock(bounds, self._times), self._patience()
        while True:
            try:
                return await self._store.check_and_mutate(
                    table_id, key, check, changes, patience.attempt_seconds
                )
            except PercolatorError as error:
                # It deletes what goes in any case, so it may be repeated even if it was executed.
                await patience.outlast(error, is_read=True)

    def _patience(self) -> Patience:
        deadline = self._world.clock.monotonic_seconds() + _SLICE_SECONDS
        return Patience(self._world, self._limits, deadline)
