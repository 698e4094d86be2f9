"""Deletes many stored cells in the background while the tablet keeps serving.

A sweep walks over the store in short slices, names what is to be deleted, and calls `breathe` after
each slice. That pauses long enough to keep the sweep within its share of the time, and deletes what
was named in one synced write, between two group commits, so that nothing is judged meanwhile.
"""

from __future__ import annotations

import asyncio

from percolator.errors import NotReady
from percolator.tablet import opening
from percolator.tablet.collection.dead_letters import may_be_put_aside
from percolator.tablet.keys import STATISTICS_KEY, D, N, R, W, after_component
from percolator.tablet.lifetimes import Lifetimes
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.write_latch import WriteLatch

DELETIONS_PER_WRITE = 2_048
SLICE_SECONDS = 0.002
SLICE_ENTRIES = 256
_COUNTED = (W, D, R)
"""Spaces whose cells are included in the tablet's counts."""


class Sweep:
    """One pass over a tablet."""

    def __init__(
        self, state: TabletState, latch: WriteLatch, lifetimes: Lifetimes | None = None
    ) -> None:
        """`latch` is held during writes. `lifetimes`: those under which nobody can see what is
        named; None if nobody can under any."""
        self._state = state
        self._latch = latch
        self._lifetimes = lifetimes
        self._named: list[tuple[bytes, int, bytes | None]] = []
        self._slice_began = state.clock.monotonic_seconds()
        self.deleted = 0
        self.deleted_bytes = 0
        self.spared = 0
        """Named, but not deleted: an observer was still to be notified of them."""

    def delete(self, key: bytes, size: int, unless_awaited: bytes | None = None) -> None:
        """Names a stored cell to be deleted; `size` is the size of its key and value.

        It is spared if, at the time of the write, an observer has yet to see the newest record of
        the cell `unless_awaited`: there is a notification for it, or a dead letter.
        """
        self._named.append((key, size, unless_awaited))

    def slice_over(self, entries: int) -> bool:
        """Whether the slice should end after this many entries. The clock is checked after each
        entry, because reading a single one may have meant reading megabytes."""
        if entries >= SLICE_ENTRIES:
            return True
        return self._state.clock.monotonic_seconds() - self._slice_began >= SLICE_SECONDS

    async def breathe(self) -> None:
        """Pauses between two slices. If the tablet is closed, raises the reason."""
        if len(self._named) >= DELETIONS_PER_WRITE:
            await self.write()
        clock, share = self._state.clock, self._state.limits.sweep_share
        spent = clock.monotonic_seconds() - self._slice_began
        await clock.sleep(spent * (1 / share - 1))
        self._state.require_open()
        self._slice_began = clock.monotonic_seconds()

    async def write(self) -> None:
        """Deletes what was named. Raises `StoreUnusable`, `TabletMoved`, and `NotReady` if it may
        be visible again, because the times to live have changed."""
        state = self._state
        async with self._latch:
            state.require_open()
            if self._lifetimes is not None and state.lifetimes is not self._lifetimes:
                raise NotReady(
                    f"the times to live of {state.identity} were changed during its collection",
                    retry_after_seconds=1.0,
                )
            named, self._named = self._named, []
            going = []
            for number, (key, size, cell) in enumerate(named, 1):
                if not self._is_awaited(cell):
                    going.append((key, size))
                if number % SLICE_ENTRIES == 0:
                    await asyncio.sleep(0)
            self.spared += len(named) - len(going)
            if not going:
                return
            batch = state.storage.batch()
            for key, _ in going:
                batch.delete(key)
            counted = [size for key, size in going if key.startswith(_COUNTED)]
            state.counters.cells -= len(counted)
            state.counters.bytes -= sum(counted)
            # In the same write, or a crash would leave counts that include what was deleted.
            batch.put(STATISTICS_KEY, opening.counts_record(state))
            await state.write(batch)
            await state.require_ownership()
        self.deleted += len(counted)
        self.deleted_bytes += sum(counted)
        state.tombstones.add([key for key, _ in going], sum(size for _, size in going))

    def _is_awaited(self, cell: bytes | None) -> bool:
        if cell is None:
            return False
        state = self._state
        return self._is_notified(cell) or may_be_put_aside(state.mirror, state.storage, cell)

    def _is_notified(self, cell: bytes) -> bool:
        index = self._state.index
        if index.complete:
            return next(index.between(cell, after_component(cell)), None) is not None
        cursor = self._state.storage.cursor()
        try:
            cursor.seek(N + cell)
            return cursor.key().startswith(N + cell)
        finally:
            cursor.close()
