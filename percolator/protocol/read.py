"""Reading at a timestamp: the paper's Figure 6, `Get`.

A snapshot at r shows exactly the commits with commit timestamp <= r. A lock with start timestamp
<= r is in the way: its owner may already hold a commit timestamp below r. So the reader resolves
the lock if the owner has finished or is gone. It waits if the owner is alive, and after a while
pushes the owner's commit above r.

If it has committed at or below r, the lock says what the cell holds, and no further read is needed.
Once a lock cannot affect this snapshot, it never will, since r does not change. The row is read
again with the start timestamps of such locks, which the read may pass. That list has a limit; if a
row has more such locks, the rest are removed, or pushed one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from itertools import compress, islice, pairwise
from typing import TypeVar

from percolator.codecs.readable import quoted
from percolator.conditions import Predicate
from percolator.errors import DeadlineExceeded, SchemaError
from percolator.formats.records import (
    KIND_PUT,
    START_TIMESTAMP_BYTES,
    timestamp_bytes,
)
from percolator.protocol import conflicts
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment, LockWait, Statistics
from percolator.protocol.roll_forward import WHOLE_PAGE
from percolator.protocol.write_set import LOCK_KINDS, WriteSet
from percolator.routing.cells import (
    CellPage,
    FoundCell,
    RangePage,
    RangeRequest,
    RowRequest,
    RowResult,
    wants,
)
from percolator.routing.range_scan import JoinedPage, SentPage
from percolator.tasks import stop_waiting_for
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.backoff import Backoff

PASSING_MAX = 256
"""How many start timestamps a read of one row may carry."""


async def read_rows(
    env: Environment,
    cleanup: Cleanup,
    requests: Sequence[RowRequest],
    deadline: float,
    statistics: Statistics,
    *,
    bytes_max: int = 0,
) -> list[RowResult]:
    """Reads the rows, each at its timestamp. No rows, no round trip.

    Raises `InvalidArgument` if they have more than `bytes_max` bytes; 0 means any number.
    """
    if not requests:
        return []
    statistics.round_trips += 1
    statistics.rows_read += len(requests)
    answers = await env.cells.read(requests, deadline, bytes_max=bytes_max)
    if any(answer.locks for answer in answers):
        at: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            at.setdefault(request.read.timestamp, []).append(place)
        for timestamp, places in at.items():
            part = [answers[place] for place in places]
            resolver = LockResolver(env, cleanup, timestamp, deadline, statistics)
            asked = [requests[place] for place in places]
            await resolver.read_past(asked, part, bytes_max=bytes_max)
            for place, answer in zip(places, part, strict=True):
                answers[place] = answer
    return answers


class LockResolver:
    """One reader that has met locks: patient at first, then more and more insistent."""

    def __init__(
        self,
        env: Environment,
        cleanup: Cleanup,
        timestamp: int,
        deadline: float,
        statistics: Statistics,
        *,
        reads_values: bool = True,
    ) -> None:
        """It reads at the timestamp, until the deadline.

        `reads_values` is whether it goes on with what a lock says (`Cleanup.read`).
        """
        self._env = env
        self._cleanup = cleanup
        self._timestamp = timestamp
        self._deadline = deadline
        self._statistics = statistics
        self._reads_values = reads_values
        self._backoff: Backoff | None = None
        self._began = env.now()
        self._waits: dict[int, LockWait] = {}
        self._decided: set[int] = set()
        self._passable: set[int] = set()

    async def read_past(
        self, requests: Sequence[RowRequest], answers: list[RowResult], *, bytes_max: int = 0
    ) -> None:
        """Resolves the locks that the answers report, and completes those answers: with what the
        locks say, or by reading the rows again."""
        blocked = [index for index, answer in enumerate(answers) if answer.locks]
        while blocked:
            met = {
                index: [MetLock.of(requests[index].table_id, cell) for cell in answers[index].locks]
                for index in blocked
            }
            try:
                await self.resolve([lock for locks in met.values() for lock in locks])
                for index in blocked:
                    if self._complete(requests[index].read, answers[index], met[index]):
                        del met[index]
                blocked = list(met)
                if not blocked:
                    return
                again = [requests[index] for index in blocked]
                surplus: list[MetLock] = []
                for index, locks in met.items():
                    surplus += _pass(requests[index].read, self.passable(locks))
                if surplus:
                    await self.remove(surplus)
                self._statistics.round_trips += 1
                self._statistics.retries += 1
                found = await self._env.cells.read(again, self._deadline, bytes_max=bytes_max)
            except DeadlineExceeded as late:
                # The time ran out in the middle of a call, but the lock is what used it up.
                raise conflicts.locked(self._env, self._timestamp, met[blocked[0]][0]) from late
            for index, answer in zip(blocked, found, strict=True):
                answers[index] = answer
            blocked = [index for index in blocked if answers[index].locks]

    def _complete(self, read: RowRead, answer: RowResult, met: Sequence[MetLock]) -> bool:
        """Adds what the locks say, if all of them say what their cells hold."""
        found = [(lock.address.column, self._cleanup.read(lock, self._timestamp)) for lock in met]
        if any(cell is None for _, cell in found):
            return False
        answer.locks = []
        for column, cell in found:
            if cell is not None and (cell.value is not None or read.report_deletes):
                answer.found[column] = cell
        return True

    async def resolve(self, met: Sequence[MetLock]) -> None:
        """Returns when reading again is worthwhile. Raises `ConflictError` when the time is up, as
        a commit does that meets a lock, so that one handler serves both."""
        waited = self._env.now() - self._began
        self._note(met, waited)
        if self._backoff is None:
            waited = 0.0
        starts = {lock.lock.start_timestamp for lock in met}
        passable = await self._cleanup.resolve(
            met,
            deadline=self._deadline,
            known_now=self._timestamp,
            waited_seconds=waited,
            read_at=self._timestamp,
            reads_values=self._reads_values,
        )
        self._passable |= passable
        verdicts = self._env.verdicts
        decided = {
            start for start in starts if start in passable or verdicts.get(start) is not None
        }
        if decided == starts and not decided <= self._decided:
            self._decided |= decided
            return  # read again at once; if that meets the same locks once more, we pause
        self._backoff = self._backoff or self._env.backoff()
        if not await self._backoff.pause(self._deadline):
            raise conflicts.locked(self._env, self._timestamp, met[0])

    def passable(self, met: Sequence[MetLock]) -> list[MetLock]:
        """The locks among these that do not matter to this reader."""
        return [lock for lock in met if lock.lock.start_timestamp in self._passable]

    async def remove(self, surplus: Sequence[MetLock]) -> None:
        """Removes or pushes passable locks for which a read has no capacity."""
        await self._cleanup.resolve_passable(
            surplus, read_at=self._timestamp, deadline=self._deadline
        )

    def _note(self, met: Sequence[MetLock], waited: float) -> None:
        for address, lock, _ in met:
            start = lock.start_timestamp
            wait = self._waits.get(start)
            if wait is None:
                wait = self._waits[start] = LockWait(*address, start, 0.0)
                self._statistics.lock_waits.append(wait)
            else:
                wait.seconds = waited


def _pass(read: RowRead, passable: Sequence[MetLock]) -> list[MetLock]:
    """Lets the next read of the row pass these locks. Returns those that it has no capacity for."""
    passing = dict.fromkeys(read.passing)
    surplus = []
    for lock in passable:
        start = lock.lock.start_timestamp
        if start in passing or len(passing) < PASSING_MAX:
            passing[start] = None
        else:
            surplus.append(lock)
    del read.passing[:]
    read.passing.extend(passing)
    return surplus


# Scanning a range at a timestamp, with the transaction's own writes laid over the stored cells.
#
# A page reports the locks that it met. Either a lock says what its cell holds, or the row is read
# again by itself, at the same timestamp, once the lock is resolved; the other rows are kept, since
# a snapshot does not change. Then the scan is begun again behind the page if more transactions are
# known by now whose locks it may pass: a job with a million locks is asked about once, and not with
# each page. A page full of locks always ends the scan for the time being: once they are resolved,
# the next pages have fewer.

FoundRow = tuple[bytes, dict[bytes, FoundCell]]
"""A row, and its cells by column: at least one."""


Page = TypeVar("Page", RangePage, CellPage, SentPage)


async def pages_past_locks(
    begin: Callable[[RangeRequest], AsyncGenerator[Page, None]],
    request: RangeRequest,
    cleanup: Cleanup,
) -> AsyncGenerator[Page, None]:
    """Yields the pages of a scan. The caller resolves the locks of each before it asks for the
    next."""
    passing = cleanup.passable(request.timestamp, PASSING_MAX)
    rest: RangeRequest | None = request
    while rest is not None:
        asked, rest = rest._replace(passing=passing), None
        left: RangeRequest | None = asked
        crowded: Page | None = None
        async with aclosing(begin(asked)) as pages:
            async for page in pages:
                left = None if left is None else _behind(left, page, request.row_limit)
                if len(page.locks) >= WHOLE_PAGE:
                    crowded, rest = page, left
                    break
                has_locks = bool(page.locks)
                yield page
                if has_locks and left is not None:
                    known = cleanup.passable(request.timestamp, PASSING_MAX)
                    if not set(known) <= set(passing):
                        passing, rest = known, left
                        break
        if crowded is not None:
            # Meanwhile the server must not read pages that will look different afterwards.
            yield crowded
            passing = cleanup.passable(request.timestamp, PASSING_MAX)


def _behind(asked: RangeRequest, page: RangePage | SentPage, row_limit: int) -> RangeRequest | None:
    """The rest of a scan after a page; None after the last one. Behind all the rows that it
    wanted, it wants `row_limit` again."""
    limit = asked.row_limit
    if limit and not isinstance(page, JoinedPage):
        limit -= len({*page.rows, *(lock.row for lock in page.locks)})
        limit = limit if limit > 0 else row_limit
    if asked.reverse:
        is_last = not page.start or page.start <= asked.start
        return None if is_last else asked._replace(end=page.start, row_limit=limit)
    is_last = not page.end or (bool(asked.end) and page.end >= asked.end)
    return None if is_last else asked._replace(start=page.end, row_limit=limit)


async def scan_pages(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    own: WriteSet | None,
    timeout_seconds: float,
    statistics: Statistics,
) -> AsyncGenerator[list[FoundRow], None]:
    """Yields the rows of the range in order, in pages. The timeout applies to each page."""
    pages = _shown_pages(env, cleanup, request, own, timeout_seconds, statistics)
    async with aclosing(pages):
        async for page, _ in pages:
            yield page


async def count_rows(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    own: WriteSet | None,
    timeout_seconds: float,
    statistics: Statistics,
) -> int:
    """Counts the rows of the range. The timeout applies to each page."""
    pages = _shown_pages(
        env, cleanup, request._replace(counts=True), own, timeout_seconds, statistics
    )
    async with aclosing(pages):
        return sum([len(page) + counted async for page, counted in pages])


TABLETS_AT_ONCE = 4
AHEAD_BYTES_MAX = 4 << 20
"""How much of each tablet may wait for the caller, unless one page has more. It is no number of
pages: most have few rows or none, and with few of them ahead, only one tablet would be read."""
_CELL_BYTES = 256
"""Memory of a cell, besides its value, and of a page without cells."""


async def _read_ahead(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    timeout_seconds: float,
    statistics: Statistics,
) -> AsyncGenerator[RangePage, None]:
    """Yields the pages of the range in order, without the transaction's own writes.

    With a condition or a count, servers read much and answer little. So the next tablets are read
    while the caller waits for the pages of the first one. Not with a limit: nobody might want them.
    """

    def pages_of(part: RangeRequest) -> AsyncGenerator[RangePage, None]:
        return _resolved_pages(env, cleanup, part, timeout_seconds, statistics)

    parts = [request]
    if (request.counts or request.predicate is not None) and not request.row_limit:
        rows = await env.cells.boundaries(request.table_id, request.start, request.end)
        bounds = [request.start, *rows, request.end]
        parts = [request._replace(start=start, end=end) for start, end in pairwise(bounds)]
    if len(parts) == 1:
        async with aclosing(pages_of(request)) as pages:
            async for only in pages:
                yield only
        return
    if request.reverse:
        parts.reverse()
    left = iter(parts)
    reading = deque(_PartRead(pages_of(part)) for part in islice(left, TABLETS_AT_ONCE))
    try:
        while reading:
            while (page := await reading[0].next_page()) is not None:
                yield page
            reading.popleft()
            reading.extend(_PartRead(pages_of(part)) for part in islice(left, 1))
    finally:
        tasks = [one.stop() for one in reading]  # all before it waits: that may be cancelled
        if tasks:
            await asyncio.wait(tasks)


class _PartRead:
    """The pages of one part of a range, read while the caller is still at another part."""

    def __init__(self, pages: AsyncGenerator[RangePage, None]) -> None:
        self._pages = pages
        self._found: asyncio.Queue[tuple[RangePage, int] | None] = asyncio.Queue()
        """Pages with their sizes; None at the end, also after an error."""
        self._ahead_bytes = 0
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._read())
        self._task.add_done_callback(lambda _: self._found.put_nowait(None))

    async def _read(self) -> None:
        async with aclosing(self._pages):
            async for page in self._pages:
                size = _size(page)
                while self._ahead_bytes and self._ahead_bytes + size > AHEAD_BYTES_MAX:
                    self._taken.clear()
                    await self._taken.wait()
                self._ahead_bytes += size
                self._found.put_nowait((page, size))

    async def next_page(self) -> RangePage | None:
        """The next page; None after the last one."""
        found = await self._found.get()
        if found is None:
            await self._task  # raises its error
            return None
        page, size = found
        self._ahead_bytes -= size
        self._taken.set()
        return page

    def stop(self) -> asyncio.Task[None]:
        """Cancels what is being read, and returns the task that it ends with."""
        stop_waiting_for(self._task)
        self._task.cancel()
        return self._task


def _size(page: RangePage) -> int:
    values = [cell.value for cells in page.rows.values() for cell in cells.values()]
    return _CELL_BYTES * (1 + len(values)) + sum(len(value) for value in values if value)


async def _resolved_pages(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    timeout_seconds: float,
    statistics: Statistics,
) -> AsyncGenerator[RangePage, None]:
    """Yields the pages of the range, with what is behind the locks."""

    def begin(request: RangeRequest) -> AsyncGenerator[RangePage, None]:
        return env.cells.scan(request, timeout_seconds)

    async with aclosing(pages_past_locks(begin, request, cleanup)) as pages:
        async for page in pages:
            statistics.round_trips += 1
            statistics.rows_read += len(page.rows)
            if page.locks:
                deadline = env.now() + timeout_seconds
                resolver = LockResolver(env, cleanup, request.timestamp, deadline, statistics)
                await _without_locks(resolver, request, page)
            yield page


async def _shown_pages(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    own: WriteSet | None,
    timeout_seconds: float,
    statistics: Statistics,
) -> AsyncGenerator[tuple[list[FoundRow], int], None]:
    """Yields the rows of each page, and how many others were counted: with what the transaction has
    written by the time at which the page is asked for, however far ahead it was read."""
    pages = _read_ahead(env, cleanup, request, timeout_seconds, statistics)
    async with aclosing(pages):
        async for page in pages:
            rows, counted = page.rows, page.counted
            is_laid_over = False
            if own is not None and own.cells:
                written = own.rows(request.table_id, page.start, page.end)
                is_laid_over = bool(written)
                if request.predicate is not None or request.counts:
                    deadline = env.now() + timeout_seconds
                    left_out = [row for row in written if row not in rows]
                    for at in range(0, len(left_out), _WRITTEN_AT_ONCE):
                        some = {row: written.pop(row) for row in left_out[at:][:_WRITTEN_AT_ONCE]}
                        read = [_read_of(request, row) for row in some]
                        answers = await read_rows(env, cleanup, read, deadline, statistics)
                        counted += _lay_over_left_out(rows, some, answers, request)
                _lay_over(rows, written, request)
            found = list(rows.items())
            if page.locks or is_laid_over:
                found = [(row, cells) for row, cells in found if cells]
                found.sort(key=_row_of, reverse=request.reverse)
            if request.predicate is None:
                yield found, counted
                continue
            found, error = _matching(found, request.predicate)
            yield found, counted
            if error is not None:
                raise error


_WRITTEN_AT_ONCE = 256


def _lay_over_left_out(
    rows: dict[bytes, dict[bytes, FoundCell]],
    written: dict[bytes, dict[bytes, tuple[int, bytes]]],
    stored: Sequence[RowResult],
    request: RangeRequest,
) -> int:
    """Adds rows that the transaction has written, and that are not in the page: the server may have
    left them out, and an own write may make them match. Returns what it changes in the server's
    count, which is of the rows as they are stored."""
    found = {row: one.found for row, one in zip(written, stored, strict=True)}
    counted = 0
    if request.counts:
        before = [(row, cells) for row, cells in found.items() if cells]
        counted = len(_matching(before, request.predicate)[0])
    _lay_over(found, written, request)
    after, error = _matching([*found.items()], request.predicate)
    # If one cannot be read, it is an error only if the scan comes to it.
    rows |= found if error is not None else after
    return -counted


def _matching(
    found: list[FoundRow], predicate: Predicate | None
) -> tuple[list[FoundRow], SchemaError | None]:
    """The rows that the condition keeps, up to the first one that cannot be read, and why not.

    A server leaves out only what cannot match, and a row store nothing at all.
    """
    if predicate is None:
        return found, None
    cells = {name: [_value_of(row, name) for _, row in found] for name in predicate.columns}
    kept, unreadable = predicate.evaluate(cells, len(found))
    error = None
    if unreadable:
        first = min(unreadable)
        row, values = found[first]
        try:
            predicate.keeps_row({name: _value_of(values, name) for name in predicate.columns})
        except SchemaError as why:
            error = SchemaError(f"where, in row {quoted(row)}: {why.message}")
        found = found[:first]
    return [*compress(found, kept)], error


def only_columns(
    page: list[FoundRow], names: list[bytes] | None, prefixes: tuple[bytes, ...]
) -> list[FoundRow]:
    """The page without columns that only the condition has asked for."""
    rows = [
        (row, {name: cell for name, cell in cells.items() if wants(name, names, prefixes)})
        for row, cells in page
    ]
    return [(row, cells) for row, cells in rows if cells]


def _value_of(cells: Mapping[bytes, FoundCell], column: bytes) -> bytes | None:
    cell = cells.get(column)
    return None if cell is None else cell.value


def without_locks_of(page: CellPage, starts: Set[int]) -> CellPage:
    """The page without the locks of these transactions: their cells count as missing."""
    if not page.locks:
        return page
    # A lock begins with its start timestamp. Decoding each of many would take longer.
    left_out = {timestamp_bytes(start) for start in starts}
    locks = [lock for lock in page.locks if lock.value[:START_TIMESTAMP_BYTES] not in left_out]
    return page._replace(locks=locks)


async def resolved_page(resolver: LockResolver, request: RangeRequest, page: CellPage) -> CellPage:
    """The page after its rows with locks were read again; deleted cells are left out."""
    rows = await _without_locks(resolver, request, page.by_row())
    cells = [
        (row, column, found.commit_timestamp, found.value)
        for row in sorted(rows, reverse=request.reverse)
        for column, found in sorted(rows[row].items())
        if found.value is not None
    ]
    return CellPage(
        [row for row, _, _, _ in cells],
        [column for _, column, _, _ in cells],
        [commit for _, _, commit, _ in cells],
        [value for _, _, _, value in cells],
        [],
        [],
        page.start,
        page.end,
    )


async def _without_locks(
    resolver: LockResolver, request: RangeRequest, page: RangePage
) -> dict[bytes, dict[bytes, FoundCell]]:
    """The page's rows, with what is behind the locks."""
    rows = page.rows
    blocked: dict[bytes, RowResult] = {}
    for lock in page.locks:
        answer = blocked.get(lock.row)
        if answer is None:
            answer = blocked[lock.row] = RowResult()
            answer.found = rows.get(lock.row, {})
        answer.locks.append(lock)
    again = [_read_of(request, row) for row in blocked]
    answers = list(blocked.values())
    await resolver.read_past(again, answers)
    for row, answer in zip(blocked, answers, strict=True):
        rows[row] = answer.found
    return rows


def _read_of(request: RangeRequest, row: bytes) -> RowRequest:
    """The read of one row that finds what the scan finds in it."""
    return RowRequest(
        request.table_id,
        RowRead(
            row=row,
            columns=request.columns,
            all_columns=request.all_columns,
            timestamp=request.timestamp,
            report_deletes=request.report_deletes,
            column_prefixes=request.prefixes,
        ),
    )


def _lay_over(
    rows: dict[bytes, dict[bytes, FoundCell]],
    written: dict[bytes, dict[bytes, tuple[int, bytes]]],
    request: RangeRequest,
) -> None:
    for row, writes in written.items():
        cells = rows.setdefault(row, {})
        for column, (kind, value) in writes.items():
            if kind in LOCK_KINDS or not request.wants(column):
                continue
            if kind == KIND_PUT:
                cells[column] = FoundCell(0, value)
            else:
                cells.pop(column, None)


def _row_of(row: FoundRow) -> bytes:
    return row[0]
