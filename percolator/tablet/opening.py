"""Loads a tablet from its storage, including what the tablet stores there about itself.

M format       the number of the layout of everything else, 2 in tablets that have had a change
               feed, 3 in those that have had read locks: any other is refused, naming it
M safe_point   of reads 8, of transactions 8, of roll-backs 8; stored before anything below them
               is collected
M statistics   cells 8, bytes 8, and the rows they were counted for: all that are stored here
"""

from __future__ import annotations

import asyncio
import struct
from itertools import islice

from percolator.errors import StoreFault, StoreUnusable
from percolator.tablet.cells import (
    FENCES,
    FORMAT_KEY,
    FORMAT_WITH_READ_LOCKS,
    NEWEST,
    NEWEST_KEY,
    SAFE_POINT_KEY,
    STATISTICS_KEY,
    L,
    N,
    W,
    component,
    space_bounds,
    split_component,
)
from percolator.tablet.state import FORMAT_WITH_FEED, ChangeFeed, SafePoints, TabletState

FORMAT = b"1"
_KNOWN_FORMATS = (FORMAT, FORMAT_WITH_FEED, FORMAT_WITH_READ_LOCKS)

_SAFE_POINTS = struct.Struct(">QQQ")
_COUNTS = struct.Struct(">QQ")
_SLICE = 4096


async def load(state: TabletState) -> None:
    """Checks the format, or creates a tablet in an empty storage, and loads its memory from it.

    Raises `StoreUnusable`.
    """
    found = state.storage.get(FORMAT_KEY)
    if found is None:
        await _create(state)
    elif found not in _KNOWN_FORMATS:
        raise StoreUnusable(
            f"{state.identity} has format {found!r}, this server knows "
            + ", ".join(map(repr, _KNOWN_FORMATS)),
            fault=StoreFault.DAMAGED,
        )
    state.safe_points = _safe_points(state)
    newest = state.storage.get(NEWEST_KEY)
    if newest is not None:
        state.recent.load(*NEWEST.unpack(newest))
    state.feed = ChangeFeed.load(state.storage)
    state.load_fences.load(state.storage, state.identity.start, state.identity.end)
    _load_counts(state)
    await _load_locks(state)
    if found == FORMAT_WITH_READ_LOCKS:
        await _load_read_locks(state)
    state.is_loaded = True
    state.index.missing_from = b""
    await fill_index(state)


async def fill_index(state: TabletState) -> None:
    """Adds live notifications to the index, from the first key it may lack, as long as they fit.
    The tablet keeps serving."""
    index = state.index
    start, stop = space_bounds(N, state.identity.start, state.identity.end)
    while index.missing_from is not None:
        # A new iterator for every slice: one from before a pause would show what was deleted since.
        # It may begin before the end of the last one, at a key that was added meanwhile and found
        # do not fit.
        first = max(start, N + index.missing_from)
        found = [key for key, _ in islice(state.storage.iterate(first, stop), _SLICE)]
        for key in found:
            if not index.put(key[1:]):
                index.missing_from = key[1:]
                return
        # Nothing was added meanwhile: the index has the whole slice, and what it refused before.
        index.missing_from = found[-1][1:] + b"\0" if len(found) == _SLICE else None
        await asyncio.sleep(0)
        state.require_open()


def counts_record(state: TabletState) -> bytes:
    """The record that is stored at STATISTICS_KEY."""
    counters, (start, end) = state.counters, state.counted_rows
    counts = _COUNTS.pack(max(0, counters.cells), max(0, counters.bytes))
    return counts + component(start) + component(end)


def safe_points_record(safe_points: SafePoints) -> bytes:
    """The record that is stored at SAFE_POINT_KEY."""
    return _SAFE_POINTS.pack(*safe_points)


def _safe_points(state: TabletState) -> SafePoints:
    record = state.storage.get(SAFE_POINT_KEY)
    if record is None:
        return SafePoints()
    if len(record) != _SAFE_POINTS.size:
        raise StoreUnusable(
            f"the safe points of {state.identity} have {len(record)} bytes, not "
            f"{_SAFE_POINTS.size}; see docs/formats.md",
            fault=StoreFault.DAMAGED,
        )
    return SafePoints(*_SAFE_POINTS.unpack(record))


async def _create(state: TabletState) -> None:
    cursor = state.storage.cursor()
    try:
        cursor.seek(b"")
        if cursor.valid():
            raise StoreUnusable(
                f"the storage of {state.identity} is not empty, and holds no tablet",
                fault=StoreFault.DAMAGED,
            )
    finally:
        cursor.close()
    batch = state.storage.batch()
    for fence in FENCES:
        batch.put(fence, b"")
    batch.put(FORMAT_KEY, FORMAT)
    state.counted_rows = (state.identity.start, state.identity.end)
    batch.put(STATISTICS_KEY, counts_record(state))
    await state.storage.write(batch)


async def _load_locks(state: TabletState) -> None:
    first, stop = space_bounds(L, state.identity.start, state.identity.end)
    # One record at a time: each may hold a value, and a slice of them may not fit into memory.
    locks = ((key[1:], record) for key, record in state.storage.iterate(first, stop))
    mirror, before = state.mirror, -1
    while len(mirror) > before:
        before = len(mirror)
        mirror.put_all(islice(locks, _SLICE))
        await asyncio.sleep(0)


async def _load_read_locks(state: TabletState) -> None:
    read_locks = state.read_locks
    read_locks.load(state.recent.newest_commit)
    locked = iter(state.mirror.headers)
    while some := [*islice(locked, _SLICE)]:
        read_locks.add(some)
        await asyncio.sleep(0)


def _load_counts(state: TabletState) -> None:
    """For a split tablet, the part that belongs to other tablets is estimated from its size."""
    record = state.storage.get(STATISTICS_KEY)
    if record is None:
        return
    cells, size = _COUNTS.unpack_from(record)
    start, at = split_component(record, _COUNTS.size)
    end, _ = split_component(record, at)
    identity, counters = state.identity, state.counters
    counters.cells, counters.bytes = cells, size
    state.counted_rows = (start, end)
    if (start, end) != (identity.start, identity.end):
        whole = state.storage.approximate_bytes(*space_bounds(W, start, end))
        part = state.storage.approximate_bytes(*space_bounds(W, identity.start, identity.end))
        share = 1 - part / whole if whole else 0.5
        counters.foreign_cells, counters.foreign_bytes = int(cells * share), int(size * share)
