"""Bulk load: puts rows into an empty range without transactions, behind a fence.

What each rule prevents:

* The fence is raised when no transaction holds cells, and only over rows without cells and locks. A
  transaction that holds a row in memory was judged before the fence, and would be written behind it
  later: above or below the loaded cells, and lost to a reader or to whoever clears the range.
* Until it is durable and in memory, no transaction takes cells. Judged while the fence is on its
  way to the disk, it would commit behind it in the same way.
* From then on no transaction holds a row behind the fence. So all that comes after (rows, clearing,
  completing, lifting) only keeps batches away, and transactions on other rows go on. If it kept
  them away too, loaders of which one always waits would stop all commits of the tablet that take
  one round, for as long as the load takes.
* Batches are kept away: two writes at a time would each store counts without the other's, and a
  load that is written while its run loses the fence would put rows where nobody clears them.
* A batch comes between any two such writes, however many loaders there are (judge.py). To
  clear a range takes many writes, and so does loading while there are batches: otherwise a batch
  would wait for a megabyte to be written, five times as long as for itself.
* Each of these writes finds out whether the run still has the fence. Otherwise it would delete, or
  add to, what a run that has taken over meanwhile has loaded.
* All cells of a request are checked before the first write, or a bad one would be found when the
  cells before it are stored.
* It is durable before the request is answered. The loader takes its timestamps after that, so any
  reader that saw the range before the load has a snapshot below the load.
* Reads and mutations in the range are refused while it stands; reads do not skip the range: a
  snapshot above the load must not see only part of it.
* Runs are numbered by the oracle, and a later one takes over for good. Each loader takes a new run
  after the range was cleared, so a late request to clear it deletes nothing.
* A new fence is raised only for a run above all whose fences were lifted: a late copy of a request
  would close the range of a load that has ended, and nobody would open it again. Loads of other
  rows count, too, so a loader that is told that there is no fence begins again as a new run.
* An existing fence is taken over whichever loads of other rows have ended: the run that undoes a
  failed load is as old as that load, and the range would stay closed.
* A load that is not complete is cleared before the fence is lifted, or part of it would stay for
  ever.
* The write that lifts the fence also records that the tablet has commits up to the load's.
  Otherwise a transaction that began before the load would pass the judge (cells.py).
* Rows are added to the change feed in the write that stores them. Until the fence is lifted, scans
  of changes do not show them either (change_scan.py).
* Rollback markers stay where they are: they keep late transactions out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_PUT,
    KIND_PUT_IN_DATA,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
)
from percolator.tablet import opening
from percolator.tablet.cells import (
    END,
    LOAD_FLOOR_KEY,
    NEWEST,
    NEWEST_KEY,
    SPACE_OF_PREFIX,
    STATISTICS_KEY,
    TIMESTAMP_BYTES,
    ColumnEncoder,
    D,
    L,
    N,
    W,
    cell_bounds,
    change_of_write,
    component,
    decode,
    inverted,
    space_bounds,
)
from percolator.tablet.judge import WriteLatch
from percolator.tablet.state import LoadFence, TabletState, loaded_change
from percolator.tablet.visible_cells import SLICE_BYTES
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

INLINE_BYTES_MAX = 1_024
"""Same as the client's `value_inline_bytes_max`: longer values are stored separately."""


class LoadedCells:
    """Cells of one request, on their way into the storage. `fill` puts them into `batch`; `publish`
    once that is durable.

    They are checked and encoded many at a time: most requests have one column and no zero byte in
    their rows, and then hardly a step is taken for a single cell.
    """

    def __init__(
        self,
        state: TabletState,
        rows: tuple[bytes, bytes],
        request: pb.LoadRequest,
        columns: ColumnEncoder,
    ) -> None:
        """`rows` are those behind the fence in this tablet."""
        self.batch = state.storage.batch()
        self._state = state
        self._request = request
        self._first, self._end = rows
        self._columns = columns
        self._observers = {one.column: tuple(one.observers) for one in request.observed}
        self._commit = inverted(request.commit_timestamp)
        self._start = inverted(request.start_timestamp)
        self._apart = WRITE_HEADER.pack(request.start_timestamp, KIND_PUT_IN_DATA)
        self._notifications: list[bytes] = []
        self._cells = 0
        self._bytes = 0

    async def check(self) -> None:
        """Checks all cells of the request. Raises `InvalidArgument`."""
        request, size = self._request, self._state.limits.slice_rows
        for at in range(0, len(request.rows), size):
            some = slice(at, at + size)
            self._check(at, request.rows[some], request.columns[some], request.values[some])
            await asyncio.sleep(0)
            self._state.require_open()

    async def fill(self, first: int, stop: int) -> None:
        """Takes the cells of the request from `first` to `stop`, which were checked."""
        request, size = self._request, self._state.limits.slice_rows
        for at in range(first, stop, size):
            some = slice(at, min(at + size, stop))
            self._put(request.rows[some], request.columns[some], request.values[some])
            await asyncio.sleep(0)
            self._state.require_open()

    def _put(
        self, rows: Sequence[bytes], columns: Sequence[bytes], values: Sequence[bytes]
    ) -> None:
        put, apart = self.batch.put, self._put_apart
        if b"\0" in b"".join(rows):
            rows = [component(row)[: -len(END)] for row in rows]
        tails = {column: END + self._columns[column] + self._commit for column in {*columns}}
        keys = [W + row + tails[column] for row, column in zip(rows, columns, strict=True)]
        inline = WRITE_HEADER.pack(self._request.start_timestamp, KIND_PUT)
        for key, value in zip(keys, values, strict=True):
            if len(value) <= INLINE_BYTES_MAX:
                put(key, inline + value)
            else:
                apart(key, value)
        if self._state.feed.on:
            change = loaded_change(self._request.start_timestamp)
            for key, column in zip(keys, columns, strict=True):
                if column[0] != 0:
                    put(change_of_write(key), change)
        if self._observers:
            for key, column in zip(keys, columns, strict=True):
                self._notify(key, column)
        self._cells += len(keys)
        self._bytes += sum(map(len, keys)) + sum(map(len, values)) + WRITE_HEADER_BYTES * len(keys)

    def _check(
        self, at: int, rows: Sequence[bytes], columns: Sequence[bytes], values: Sequence[bytes]
    ) -> None:
        """Checks all at once; then each, if one of them is wrong, to say which."""
        first, end, limits = self._first, self._end, self._state.limits
        widths = {*map(len, columns)}
        if (
            min(rows) >= first
            and not (end and max(rows) >= end)
            and max(map(len, rows)) <= limits.row_bytes_max
            and max(map(len, values)) <= limits.value_bytes_max
            and min(widths) >= 1
            and max(widths) <= limits.column_bytes_max
        ):
            return
        cells = zip(rows, columns, values, strict=True)
        for index, (row, column, value) in enumerate(cells, at):
            if row < first or (end and row >= end):
                raise InvalidArgument(f"rows[{index}]", "not behind the fence in this tablet")
            if len(row) > limits.row_bytes_max or len(value) > limits.value_bytes_max:
                raise InvalidArgument(f"rows[{index}]", "the row or its value is too long")
            if not 1 <= len(column) <= limits.column_bytes_max:
                raise InvalidArgument(f"columns[{index}]", "is empty or too long")

    def _put_apart(self, key: bytes, value: bytes) -> None:
        self.batch.put(key, self._apart)
        data = D + key[1:-TIMESTAMP_BYTES] + self._start
        self.batch.put(data, value)
        self._cells += 1
        self._bytes += len(data)

    def _notify(self, key: bytes, column: bytes) -> None:
        for observer in self._observers.get(column, ()):
            cell = key[1:-TIMESTAMP_BYTES]
            notification = cell + component(observer) + self._commit
            self.batch.put(N + notification, b"")
            self._notifications.append(notification)

    def publish(self) -> None:
        """Call this once it is durable. A cell that is loaded a second time is counted again."""
        state, counters = self._state, self._state.counters
        for notification in self._notifications:
            state.index.put(notification)
        counters.notifications_written += len(self._notifications)
        counters.cells += self._cells
        counters.bytes += self._bytes
        counters.batches_synced += 1


NAME_BYTES_MAX = 255
CLEARED_PER_WRITE = 4_096
CLEARED_BYTES_PER_WRITE = 16 << 20
"""A write also ends here: each value may have megabytes, and is read to be counted."""
WRITES_PER_CALL = 16
LOADED_PER_WRITE = 1_024
LOADED_BYTES_PER_WRITE = 128 << 10
"""A load that has the tablet to itself is written with one sync per request. While transactions
commit, it takes many, and each of them about as long as a batch does: so either has half of the
time."""
_CLEARED_SPACES = (W, D, N)


async def fence(
    state: TabletState, latch: WriteLatch, request: pb.FenceRequest
) -> pb.FenceResponse:
    """`latch` is held during writes. Raises `InvalidArgument`, `StoreUnusable`, `TabletMoved`."""
    asked = _asked(request.fence)
    if request.action == pb.FenceRequest.ACTION_CLEAR:
        return await _clear(state, latch, asked)
    action = _ACTIONS.get(request.action)
    if action is None:
        raise InvalidArgument("action", f"{request.action} is not an action")
    raises = request.action == pb.FenceRequest.ACTION_RAISE
    async with latch if raises else latch.between_batches():
        state.require_open()
        return await _with_fence(state, asked, await action(state, asked))


async def _with_fence(
    state: TabletState, asked: LoadFence, response: pb.FenceResponse
) -> pb.FenceResponse:
    """The response, with the fence as it is now."""
    await state.require_ownership()
    present = state.load_fences.get(asked.name)
    if present is not None:
        response.fence.CopyFrom(present.message())
    return response


async def _raise(state: TabletState, asked: LoadFence) -> pb.FenceResponse:
    fences, identity = state.load_fences, state.identity
    present = fences.get(asked.name)
    if present is not None and asked.run < present.run:
        raise _taken_over(asked)
    if present is None:
        if asked.run <= fences.floor:
            return pb.FenceResponse()
        if not asked.overlaps(identity.start, identity.end):
            raise InvalidArgument("fence.range", "does not overlap the tablet")
        for other in fences:
            if other.overlaps(asked.start, asked.end):
                raise InvalidArgument(
                    "fence.range",
                    f"some of it is closed for another load, {other.name!r}: complete or abandon "
                    "that one first",
                )
        obstacle = _first_cell(state, asked)
        if obstacle is not None:
            return pb.FenceResponse(obstacle=obstacle)
    elif (present.start, present.end) != (asked.start, asked.end):
        raise InvalidArgument(
            "fence.range", f"the load {asked.name!r} was begun for {quoted(present.start)} to "
            f"{quoted(present.end)}"
        )  # fmt: skip
    elif present.commit_timestamp:
        return pb.FenceResponse()
    if present is None or present.run != asked.run:
        await _put(state, replace(asked, commit_timestamp=0))
    return pb.FenceResponse(obstacle=_first_cell(state, asked))


async def _clear(state: TabletState, latch: WriteLatch, asked: LoadFence) -> pb.FenceResponse:
    entries: Iterator[tuple[bytes, bytes]] | None = None
    async with latch.between:
        for _ in range(WRITES_PER_CALL):
            async with latch.writing:
                state.require_open()
                present = _of_run(state, asked)
                if present.commit_timestamp:
                    raise InvalidArgument(
                        "action",
                        f"the load {present.name!r} is complete, so it cannot be cleared",
                    )
                # One walk for all writes: each new walk would first pass all that is deleted.
                # No other load adds or clears rows there meanwhile, since that takes `between`.
                entries = entries or _entries(state, present, _CLEARED_SPACES)
                some = await _next_of(state, entries)
                if not some:
                    return await _with_fence(state, asked, pb.FenceResponse(remains=False))
                await _delete(state, some)
        return await _with_fence(state, asked, pb.FenceResponse(remains=True))


async def _next_of(
    state: TabletState, entries: Iterator[tuple[bytes, bytes]]
) -> list[tuple[bytes, int]]:
    """The keys of the next entries, each with the size of its entry: values are not kept."""
    found: list[tuple[bytes, int]] = []
    size = pause_at = 0
    for key, value in islice(entries, CLEARED_PER_WRITE):
        found.append((key, len(key) + len(value)))
        size += len(key) + len(value)
        if size >= CLEARED_BYTES_PER_WRITE:
            break
        if size >= pause_at or len(found) % state.limits.slice_entries == 0:
            pause_at = size + SLICE_BYTES
            await asyncio.sleep(0)
            state.require_open()
    return found


async def _delete(state: TabletState, entries: list[tuple[bytes, int]]) -> None:
    """Deletes entries, given as keys and sizes."""
    batch = state.storage.batch()
    counted = [(key, size) for key, size in entries if not key.startswith(N)]
    for key, _ in entries:
        batch.delete(key)
    state.counters.cells -= len(counted)
    state.counters.bytes -= sum(size for _, size in counted)
    if state.feed.ever_on:
        for key, _ in counted:
            if key.startswith(W):
                batch.delete(change_of_write(key))
    batch.put(STATISTICS_KEY, opening.counts_record(state))
    await state.write(batch)
    for key, _ in entries:
        if key.startswith(N):
            state.index.remove(key[1:])


async def _finish(state: TabletState, asked: LoadFence) -> pb.FenceResponse:
    present = _of_run(state, asked)
    if not asked.commit_timestamp:
        raise InvalidArgument("fence.commit_timestamp", "missing")
    if not present.commit_timestamp:
        await _put(state, replace(present, commit_timestamp=asked.commit_timestamp))
    return pb.FenceResponse()


async def _lift(state: TabletState, asked: LoadFence) -> pb.FenceResponse:
    present = state.load_fences.get(asked.name)
    if present is None:
        return pb.FenceResponse()  # it was already lifted
    commit_ts = present.commit_timestamp
    _of_run(state, asked)
    if not commit_ts:
        obstacle = _first_cell(state, present)
        if obstacle is not None:
            return pb.FenceResponse(obstacle=obstacle)
    recent = state.recent
    newest = max(commit_ts, recent.newest_commit), recent.newest_marker
    batch = state.storage.batch()
    floor = max(state.load_fences.floor, present.run)
    batch.delete(present.key)
    batch.put(LOAD_FLOOR_KEY, floor.to_bytes(8, "big"))
    batch.put(NEWEST_KEY, NEWEST.pack(*newest))
    batch.put(STATISTICS_KEY, opening.counts_record(state))
    feed = state.feed
    if commit_ts > feed.complete_from and present.run <= feed.loads_before:
        feed = replace(feed, complete_from=commit_ts)
        feed.note(batch, beside_read_locks=state.read_locks.used)
    await state.write(batch)
    state.feed = feed
    if commit_ts:
        # What is remembered about single cells may be wrong for the loaded ones.
        recent.forget(commit_ts)
        state.last_changes.forget()
        state.collected = replace(state.collected, missed_load=True)
    state.load_fences.remove(present.name)
    state.load_fences.floor = floor
    return pb.FenceResponse()


async def _look(state: TabletState, asked: LoadFence) -> pb.FenceResponse:
    _of_run(state, asked)
    return pb.FenceResponse()


_ACTIONS = {
    pb.FenceRequest.ACTION_RAISE: _raise,
    pb.FenceRequest.ACTION_FINISH: _finish,
    pb.FenceRequest.ACTION_LIFT: _lift,
    pb.FenceRequest.ACTION_LOOK: _look,
}


async def load(
    state: TabletState, latch: WriteLatch, request: pb.LoadRequest, columns: ColumnEncoder
) -> None:
    """Puts cells behind the fence. Raises as `fence` does, and `SchemaChanged`."""
    if not len(request.rows) == len(request.columns) == len(request.values):
        raise InvalidArgument("rows", "rows, columns and values differ in number")
    start, commit_ts = request.start_timestamp, request.commit_timestamp
    if not 0 < start < commit_ts:
        raise InvalidArgument("commit_timestamp", f"expected {start} < {commit_ts}, both above 0")
    stop, count = 0, len(request.rows)
    async with latch.between:
        while True:
            async with latch.writing:
                if request.target.schema_version:
                    # Check under this version, or a new observer would miss some changes.
                    state.require_target(request.target)
                else:
                    state.require_tablet(request.target)
                present = _of_run(state, LoadFence(request.name, start, b"", b""))
                if present.commit_timestamp:
                    raise InvalidArgument("name", f"the load {present.name!r} is complete")
                behind = LoadedCells(state, _rows_of(state, present), request, columns)
                if not stop:
                    await behind.check()
                first, stop = stop, _end_of_write(latch, request, stop)
                await behind.fill(first, stop)
                await state.write(behind.batch)
                behind.publish()
            if stop == count:
                break
        await state.require_ownership()


def _end_of_write(latch: WriteLatch, request: pb.LoadRequest, first: int) -> int:
    """Up to which cell of a request the next write takes them."""
    count = len(request.rows)
    if not latch.has_batches:
        return count
    stop = min(first + LOADED_PER_WRITE, count)
    size = 0
    for at, value in enumerate(request.values[first:stop], first):
        size += len(value)
        if size >= LOADED_BYTES_PER_WRITE:
            return at + 1
    return stop


# ---------------------------------------------------------------------------- shared


def _asked(fence: pb.LoadFence) -> LoadFence:
    if not 1 <= len(fence.name.encode()) <= NAME_BYTES_MAX:
        raise InvalidArgument("fence.name", f"expected 1 to {NAME_BYTES_MAX} bytes")
    if not fence.run:
        raise InvalidArgument("fence.run", "missing")
    start, end = fence.range.start, fence.range.end
    if end and start >= end:
        raise InvalidArgument("fence.range", "the end is not above the start")
    return LoadFence(fence.name, fence.run, start, end, fence.commit_timestamp)


def _of_run(state: TabletState, asked: LoadFence) -> LoadFence:
    """The fence of the requesting run; no other run may touch what is behind it."""
    present = state.load_fences.get(asked.name)
    if present is None or present.run != asked.run:
        raise _taken_over(asked)
    return present


def _taken_over(asked: LoadFence) -> InvalidArgument:
    return InvalidArgument(
        "run",
        f"the load {asked.name!r} has no fence of run {asked.run} here: it was lifted, or another "
        "run has taken the load over",
    )


async def _put(state: TabletState, fence: LoadFence) -> None:
    batch = state.storage.batch()
    batch.put(fence.key, fence.record())
    await state.write(batch)
    state.load_fences.put(fence)


def _first_cell(state: TabletState, fence: LoadFence) -> cells_pb2.Cell | None:
    """A cell or lock in the range. The mirror has the locks, without walking over deleted ones."""
    start, end = _rows_of(state, fence)
    for locked, record in state.mirror.between(*cell_bounds(start, end)):
        return _cell(L + locked, record)
    for key, value in _entries(state, fence, (W, D)):
        return _cell(key, value)
    return None


def _cell(key: bytes, value: bytes) -> cells_pb2.Cell:
    found = decode(key)
    return cells_pb2.Cell(
        space=SPACE_OF_PREFIX[key[:1]],  # type: ignore[arg-type]  # the number of an enum
        row=found.row,
        column=found.column,
        timestamp=found.timestamp,
        value=value[:INLINE_BYTES_MAX],
    )


def _entries(
    state: TabletState, fence: LoadFence, spaces: tuple[bytes, ...]
) -> Iterator[tuple[bytes, bytes]]:
    """The entries stored behind the fence in this tablet."""
    start, end = _rows_of(state, fence)
    for space in spaces:
        yield from state.storage.iterate(*space_bounds(space, start, end))


def _rows_of(state: TabletState, fence: LoadFence) -> tuple[bytes, bytes]:
    """The rows behind the fence that are in this tablet."""
    ends = [end for end in (fence.end, state.identity.end) if end]
    return max(fence.start, state.identity.start), min(ends) if ends else b""
