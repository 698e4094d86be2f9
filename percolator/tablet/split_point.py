"""Proposes the row that divides a tablet into two halves of about the same size.

The storage estimates the size of any range of keys, so a bisection over existing rows finds the
middle in a few dozen seeks. The estimate does not see a tablet that is small or has only just been
written; its middle is found by walking over it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from percolator.tablet.keys import D, W, component, space_bounds, split_component
from percolator.tablet.memory.state import TabletState
from percolator.world import Storage

ESTIMATE_TRUSTED_BYTES = 32 * 1024 * 1024
"""Far above the largest write buffer: anything smaller may be mostly in memory."""
STEPS_MAX = 256
PARTS_MAX = 256
"""Roughly the most parts of one range."""


async def propose(state: TabletState) -> bytes | None:
    """The first row of the upper half; None if there are fewer than two rows."""
    identity = state.identity
    first, stop = space_bounds(W, identity.start, identity.end)
    lowest = _row_at(state.storage, first, stop)
    if lowest is None:
        return None
    estimate = state.storage.approximate_bytes(first, stop)
    if estimate >= ESTIMATE_TRUSTED_BYTES:
        found = _bisect(state.storage, first, stop, estimate // 2)
    else:
        found = await _walk(state, first, stop)
    return found if found is not None and found > lowest else None


def parts(state: TabletState, start: bytes, end: bytes, part_bytes: int) -> list[bytes]:
    """The first rows of all parts except the first; ranges are cut until they are small enough."""
    estimate = state.storage.approximate_bytes
    size, first, stop = max(
        (estimate(*bounds), *bounds) for bounds in (space_bounds(one, start, end) for one in (W, D))
    )
    if size <= part_bytes:
        return []
    row = _bisect(state.storage, first, stop, size // 2)
    if row is None:
        return []
    part_bytes = max(part_bytes, size // PARTS_MAX)
    return [*parts(state, start, row, part_bytes), row, *parts(state, row, end, part_bytes)]


def _row_at(storage: Storage[Any], key: bytes, stop: bytes) -> bytes | None:
    """The row of the first entry from this key on."""
    for found, _ in storage.iterate(key, stop):
        return split_component(found, 1)[0]
    return None


def _bisect(storage: Storage[Any], first: bytes, stop: bytes, half: int) -> bytes | None:
    """Finds the last row with at most half of the bytes before it, by halving the interval of keys;
    if that is the very first row, the one after it. None if there is only one.

    Keys are treated as binary fractions of any length. Both ends move on to rows that exist:
    otherwise, among rows that begin with the same long prefix, all steps would be spent on the
    empty interval between them and a row with another one.
    """

    def key_of(row: bytes) -> bytes:
        return first[:1] + component(row)

    def is_below(row: bytes) -> bool:
        return storage.approximate_bytes(first, key_of(row)) <= half

    lowest = _row_at(storage, first, stop)
    if lowest is None:
        return None
    above = _row_before(storage, stop)
    if above == lowest or is_below(above):
        return above if above > lowest else None
    below, low, high = lowest, key_of(lowest), key_of(above)
    for _ in range(STEPS_MAX):
        middle = _between(low, high)
        if middle is None:
            break
        row = _row_at(storage, middle, stop)
        if row is None:
            break
        if is_below(row):
            below, low = row, max(middle, key_of(row))
            continue
        above, row = row, _row_before(storage, middle)
        if row <= below or is_below(row):
            below = max(below, row)
            break
        above, high = row, key_of(row)
    return below if below > lowest else above


def _row_before(storage: Storage[Any], key: bytes) -> bytes:
    """The row of the last entry before this key, which must exist."""
    cursor = storage.cursor()
    try:
        cursor.seek(key)
        cursor.prev()
        return split_component(cursor.key(), 1)[0]
    finally:
        cursor.close()


def _between(low: bytes, high: bytes) -> bytes | None:
    """A key strictly between the two, near the middle; None if there is hardly any room."""
    length = max(len(low), len(high)) + 1
    low_number = int.from_bytes(low.ljust(length, b"\0"), "big")
    high_number = int.from_bytes(high.ljust(length, b"\0"), "big")
    if high_number - low_number < 2:
        return None
    return ((low_number + high_number) // 2).to_bytes(length, "big")


async def _walk(state: TabletState, first: bytes, stop: bytes) -> bytes | None:
    """Exact, for a small tablet: finds the row at which the running total is nearest to half."""
    sizes: list[tuple[bytes, int]] = []
    total = 0
    row_prefix = b"\0"
    for entries, (key, value) in enumerate(state.storage.iterate(first, stop), 1):
        if not key.startswith(row_prefix):
            row, at = split_component(key, 1)
            row_prefix = key[:at]
            sizes.append((row, total))
        total += len(key) + len(value)
        if entries % state.limits.slice_entries == 0:
            await asyncio.sleep(0)
            state.require_open()
    return min(sizes, key=lambda found: abs(total - 2 * found[1]))[0] if sizes else None
