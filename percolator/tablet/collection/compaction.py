"""Compacts ranges that sweeps have left full of tombstones, piece by piece.

LevelDB compacts by itself only after many writes: by then, a cell that is overwritten all the time
has tens of megabytes of dead versions. Where much was deleted and nothing more is written, it
keeps its tombstones, and every seek into the range walks over them.

A compaction rewrites everything alive in its range. That pays once about as much was deleted there
as is stored, over however many sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from percolator.tablet.keys import D, F, R, W
from percolator.tablet.memory.state import TabletState
from percolator.tablet.memory.tombstones import Tombstones

HEAVY_DELETIONS = 4_096
"""Fewer deletions than this are not worth a compaction."""
PIECE_BYTES = 32 << 20
"""The size of one piece. Closing a tablet waits for at most one piece."""


async def compact_heavy(state: TabletState) -> None:
    """Compacts where sweeps deleted much. If the tablet is closed, raises the reason."""
    left = state.tombstones
    if left.deletions < HEAVY_DELETIONS:
        return
    ranges = [sorted(key for key in left.boundaries if key.startswith(one)) for one in (W, D, F, R)]
    ranges = [boundaries for boundaries in ranges if boundaries]
    stored = sum(state.storage.approximate_bytes(one[0], one[-1] + b"\0") for one in ranges)
    if left.bytes < stored:
        return
    state.tombstones = Tombstones()
    for first, stop in _pieces(state, ranges):
        await state.storage.compact(first, stop)
        state.require_open()


def _pieces(state: TabletState, ranges: Iterable[list[bytes]]) -> list[tuple[bytes, bytes]]:
    pieces: list[tuple[bytes, bytes]] = []
    for boundaries in ranges:
        first = boundaries[0]
        for boundary in boundaries:
            if state.storage.approximate_bytes(first, boundary) >= PIECE_BYTES:
                pieces.append((first, boundary))
                first = boundary
        pieces.append((first, boundaries[-1] + b"\0"))
    return pieces
