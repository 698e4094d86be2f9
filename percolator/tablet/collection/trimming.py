"""Trimming: deletes the cells of other tablets' rows that a tablet starts with after a split.

Both halves are clones of the whole, and what is read from them is clipped to their rows. So the
other half's cells do no harm, but they take up space, and until they are deleted a tablet's size is
only an estimate. The walk may end anywhere (a crash, a move, another split), and the next owner
starts it again; what was deleted is subtracted from the stored counts in the same write.
"""

from __future__ import annotations

from percolator.tablet import keys, opening
from percolator.tablet.collection.compaction import compact_heavy
from percolator.tablet.collection.sweep import Sweep
from percolator.tablet.keys import FEED_FENCE, STATISTICS_KEY, D, F, L, N, R, W
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.write_latch import WriteLatch


def is_due(state: TabletState) -> bool:
    """Whether there may be cells of other rows: the stored counts name the rows they cover."""
    return state.counted_rows != (state.identity.start, state.identity.end)


async def trim(state: TabletState, latch: WriteLatch) -> int:
    """Deletes all cells outside the tablet's range; returns how many.

    If the tablet is closed meanwhile, raises the reason.
    """
    sweep = Sweep(state, latch)
    counters = state.counters
    foreign_cells, foreign_bytes = counters.foreign_cells, counters.foreign_bytes
    begin: bytes | None
    for space in (L, N, W, D, R):
        for first, stop in _outside(state, space):
            begin = first
            while begin is not None:
                begin = _slice(state, sweep, begin, stop)
                await sweep.breathe()
                counters.foreign_cells = max(0, foreign_cells - sweep.deleted)
                counters.foreign_bytes = max(0, foreign_bytes - sweep.deleted_bytes)
    begin = F if state.feed.ever_on else None
    while begin is not None:
        begin = _slice_of_feed(state, sweep, begin)
        await sweep.breathe()
    await sweep.write()
    counters.foreign_cells = counters.foreign_bytes = 0
    state.counted_rows = (state.identity.start, state.identity.end)
    await _note(state, latch)
    await compact_heavy(state)
    return sweep.deleted


def _outside(state: TabletState, space: bytes) -> list[tuple[bytes, bytes]]:
    """The keys of a space before the tablet's rows, and those after them."""
    first, stop = keys.space_bounds(space, b"", b"")
    own_first, own_stop = keys.space_bounds(space, state.identity.start, state.identity.end)
    return [(begin, end) for begin, end in ((first, own_first), (own_stop, stop)) if begin < end]


def _slice(state: TabletState, sweep: Sweep, first: bytes, stop: bytes) -> bytes | None:
    """Names a slice of cells from `first` on; returns where to continue, or None at the end."""
    for number, (key, value) in enumerate(state.storage.iterate(first, stop), 1):
        sweep.delete(key, len(key) + len(value))
        if sweep.slice_over(number):
            return key + b"\0"
    return None


def _slice_of_feed(state: TabletState, sweep: Sweep, first: bytes) -> bytes | None:
    """Like `_slice`, for the change feed, whose keys are not in the order of rows."""
    start, end = keys.cell_bounds(state.identity.start, state.identity.end)
    for number, (key, value) in enumerate(state.storage.iterate(first, FEED_FENCE), 1):
        _, cell = keys.split_change(key)
        if cell < start or (end is not None and cell >= end):
            sweep.delete(key, len(key) + len(value))
        if sweep.slice_over(number):
            return key + b"\0"
    return None


async def _note(state: TabletState, latch: WriteLatch) -> None:
    """Stores that the tablet is trimmed, so that it is not walked over again."""
    async with latch:
        state.require_open()
        batch = state.storage.batch()
        batch.put(STATISTICS_KEY, opening.counts_record(state))
        await state.write(batch)
        await state.require_ownership()
