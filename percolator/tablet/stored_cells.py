"""Raw stored cells of one space, page by page: for audits, for finding work, for clean-up.

Locks come from the mirror, and notifications from the index if it is complete: where cells are
deleted soon after they are written, an iterator would walk over the deleted ones. A page is read
without yielding to the event loop, and the next one continues after its last key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice

from percolator.errors import InvalidArgument
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.tablet import keys
from percolator.tablet.keys import LOCK, NOTIFY, PREFIX_OF_SPACE
from percolator.tablet.memory.state import TabletState
from percolator.tablet.opening import fill_index
from percolator.tablet.reading.scans import clipped
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

_NO_LIMIT = 2**63

Entry = tuple[bytes, bytes | None]
"""A key and its value, which is None if it has been deleted meanwhile."""


async def pages(
    state: TabletState, request: pb.ScanCellsRequest
) -> AsyncIterator[pb.ScanCellsResponse]:
    """Yields pages. Raises `InvalidArgument` before the first one."""
    if request.space not in PREFIX_OF_SPACE:
        raise InvalidArgument("space", f"{request.space} is not a space")
    if request.until_timestamp and request.until_timestamp <= request.from_timestamp:
        raise InvalidArgument("until_timestamp", "not above from_timestamp: inverted")
    start, end = clipped(state, request.range)
    if request.space == NOTIFY and state.index.worth_filling:
        await fill_index(state)
    until = request.until_timestamp
    if request.space == LOCK and until and not state.mirror.has_older(until):
        state.require_open()
        await state.require_ownership()
        return
    first: bytes | None
    first, stop = keys.space_bounds(PREFIX_OF_SPACE[request.space], start, end)
    cells_left = request.cell_limit or _NO_LIMIT
    while first is not None and cells_left:
        state.require_open()
        response, first = _page(request, _entries(state, request, first, stop), cells_left, state)
        if first is not None:
            row, _ = keys.split_component(first, 1)
            response.rest.CopyFrom(cells_pb2.RowRange(start=row, end=end))
        await state.require_ownership()
        yield response
        cells_left -= len(response.cells)


def _page(
    request: pb.ScanCellsRequest, entries: Iterator[Entry], cells_max: int, state: TabletState
) -> tuple[pb.ScanCellsResponse, bytes | None]:
    """A page with as many entries as fit, and the key at which the next page begins."""
    limits = state.limits
    rows_max = min(request.page_rows_max or limits.page_rows_default, limits.page_rows_max)
    response = pb.ScanCellsResponse()
    row_prefix = b"\0"
    rows = size = 0
    for at, (key, value) in enumerate(entries):
        full = at == limits.slice_entries or len(response.cells) == cells_max
        if full or size >= limits.page_bytes_default:
            return response, key
        if value is None:
            continue
        cell = keys.decode(key)
        if not key.startswith(row_prefix):
            if rows == rows_max:
                return response, key
            rows += 1
            row_prefix = key[:1] + keys.component(cell.row)
        if not _in_time(request, cell, value):
            continue
        size += len(key) + len(value)
        response.cells.add(
            space=request.space,
            row=cell.row,
            column=cell.column,
            timestamp=cell.timestamp,
            value=value,
            qualifier=cell.qualifier,
        )
    return response, None


def _in_time(request: pb.ScanCellsRequest, cell: keys.CellKey, value: bytes) -> bool:
    timestamp = cell.timestamp
    if cell.space == LOCK:
        timestamp = int.from_bytes(value[:START_TIMESTAMP_BYTES], "big")
    until = request.until_timestamp
    return request.from_timestamp <= timestamp and (not until or timestamp < until)


def _entries(
    state: TabletState, request: pb.ScanCellsRequest, first: bytes, stop: bytes
) -> Iterator[Entry]:
    """Entries from `first` on: one more than a page examines, so that it knows what follows.

    They are read one by one, because each may hold megabytes, and then few fit into a page.
    """
    space, most = request.space, state.limits.slice_entries + 1
    if space == LOCK:
        locks = state.mirror.between(first[1:], _behind_space(stop))
        return _locks(state, islice(locks, most), request.until_timestamp)
    if space == NOTIFY and state.index.complete:
        found = state.index.between(first[1:], _behind_space(stop))
        return _present(state, keys.N, islice(found, most))
    return islice(state.storage.iterate(first, stop), most)


def _locks(state: TabletState, locks: Iterable[tuple[bytes, bytes]], until: int) -> Iterator[Entry]:
    """The stored locks of these cells. Those of younger transactions are not read: beside one old
    lock, there may be millions of a job that is under way."""
    before = until.to_bytes(START_TIMESTAMP_BYTES, "big") if until else None
    get = state.storage.get
    for cell, header in locks:
        key = keys.L + cell
        is_asked_for = before is None or header[:START_TIMESTAMP_BYTES] < before
        yield key, get(key) if is_asked_for else None


def _behind_space(stop: bytes) -> bytes | None:
    """The end of a range of keys, without its space byte; None if it is the end of the space."""
    return stop[1:] or None


def _present(state: TabletState, prefix: bytes, addresses: Iterable[bytes]) -> Iterator[Entry]:
    """The stored entries for addresses known in memory. Those already deleted are not left out:
    a page that saw fewer entries than it asked for would assume that nothing follows."""
    get = state.storage.get
    return ((prefix + address, get(prefix + address)) for address in addresses)
