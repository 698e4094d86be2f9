"""Trimming: deletes the cells of other tablets' rows, with which a tablet begins after a split.

Both halves are clones of the whole, and what is read from them is clipped to their rows: so the
other half's cells do no harm, but they cost space, and a tablet's size is known only by share until
they are gone. The walk may end anywhere (a crash, a move, another split) and is begun anew by the
next owner; what was deleted is subtracted from the stored counts in the same write.
"""

from __future__ import annotations

import asyncio

from percolator.tablet import keys, opening
from percolator.tablet.compaction import compact_heavy
from percolator.tablet.keys import STATISTICS_KEY, D, L, N, R, W
from percolator.tablet.state import TabletState
from percolator.tablet.sweep import Sweep


def is_due(state: TabletState) -> bool:
    """Whether there may be cells of other rows. The stored counts say for which rows they are."""
    return state.counted_rows != (state.identity.start, state.identity.end)


async def trim(state: TabletState, turn: asyncio.Lock) -> int:
    """Deletes all cells outside of the tablet's range; returns how many.

    Raises what the tablet is closed for, if it is meanwhile.
    """
    sweep = Sweep(state, turn)
    counters = state.counters
    foreign_cells, foreign_bytes = counters.foreign_cells, counters.foreign_bytes
    for space in (L, N, W, D, R):
        for first, stop in _outside(state, space):
            begin: bytes | None = first
            while begin is not None:
                begin = _slice(state, sweep, begin, stop)
                await sweep.breathe()
                counters.foreign_cells = max(0, foreign_cells - sweep.deleted)
                counters.foreign_bytes = max(0, foreign_bytes - sweep.deleted_bytes)
    await sweep.write()
    counters.foreign_cells = counters.foreign_bytes = 0
    state.counted_rows = (state.identity.start, state.identity.end)
    await _note(state, turn)
    await compact_heavy(state)
    return sweep.deleted


def _outside(state: TabletState, space: bytes) -> list[tuple[bytes, bytes]]:
    """The keys of a space before the tablet's rows, and those after them."""
    first, stop = keys.space_bounds(space, b"", b"")
    own_first, own_stop = keys.space_bounds(space, state.identity.start, state.identity.end)
    return [(begin, end) for begin, end in ((first, own_first), (own_stop, stop)) if begin < end]


def _slice(state: TabletState, sweep: Sweep, first: bytes, stop: bytes) -> bytes | None:
    """Names cells from `first` on for a while; where to go on, or None at the end."""
    for number, (key, value) in enumerate(state.storage.iterate(first, stop), 1):
        sweep.delete(key, len(key) + len(value))
        if sweep.slice_over(number):
            return key + b"\0"
    return None


async def _note(state: TabletState, turn: asyncio.Lock) -> None:
    """From now on nobody has to look again."""
    async with turn:
        state.require_open()
        batch = state.storage.batch()
        batch.put(STATISTICS_KEY, opening.counts_record(state))
        await state.write(batch)
        state.require_ownership()
