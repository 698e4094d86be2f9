"""`percolator.v1.GatewayService`: runs the transaction protocol on behalf of callers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

from percolator.aio.engine import Engine
from percolator.aio.find import EntryRange, Match, Wanted, bounds, found_matches, index_named
from percolator.aio.reader import Reader
from percolator.codecs.indexes import IndexDefinition, entry_part
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    Retry,
    SchemaError,
    SnapshotTooOld,
    UniqueViolation,
)
from percolator.protocol.change_reader import IDLE_SECONDS, ChangeReader
from percolator.protocol.environment import ROLLED_BACK, Statistics
from percolator.protocol.read import count_rows, only_columns, read_rows, scan_pages
from percolator.protocol.turns import TransactionTurns
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import FoundCell, RowRequest, StoredChange
from percolator.services.chassis.rpc import caller_identity, remaining_seconds
from percolator.services.gateway.commits import Commits, Requests
from percolator.services.gateway.shutdown import EndlessStreams
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.table_indexes import no_index

CALL_SECONDS_MAX = 60.0
_ANSWER_SECONDS = 0.2
_ANSWER_SHARE = 0.1
"""Fraction of the caller's deadline reserved for the response: learning that the outcome is unknown
is better than no answer."""
_LOOKS_PER_SECOND = 250
"""Looks of all followers of changes of one client together, while nothing changes."""
_READ = re.compile(r"(?:batches\[\d+\]\.)?reads\[\d+\]\.?(.*)")
"""A field of a tablet server's request, and what follows in it."""


class GatewayHandler:
    """Answers the calls to one gateway."""

    def __init__(self, engine: Engine, commits: Commits, *, answer_bytes_max: int) -> None:
        self._engine = engine
        self._commits = commits
        self._requests = Requests(engine)
        self._answer_bytes_max = answer_bytes_max
        self._endless = EndlessStreams()
        self._followers: Counter[tuple[bytes, str] | None] = Counter()
        """Streams of changes by client; None stands for administrators and servers."""

    async def end_streams(self) -> None:
        """To be called at shutdown: callers that follow changes are asked to go on elsewhere."""
        self._endless.end()

    async def begin(self, request: pb.BeginRequest) -> pb.BeginResponse:
        return pb.BeginResponse(start_timestamp=await self._commits.begin(self._deadline()))

    async def get(self, request: pb.GetRequest) -> pb.GetResponse:
        deadline, start = self._deadline(), request.start_timestamp
        await self._commits.check_start(start, deadline)
        cells_max = self._engine.limits.get_many_cells_max
        if sum(max(len(query.columns), 1) for query in request.rows) > cells_max:
            raise InvalidArgument(
                "rows", f"have more than {cells_max} cells, the limit of one call"
            )
        reads = []
        caller = caller_identity()
        for place, query in enumerate(request.rows):
            field = f"rows[{place}]"
            caller.require_read(query.table, query.row, query.row + b"\0")
            if request.for_update:  # it would hold up those who may write
                caller.require_write(query.table, query.row)
            self._requests.check_row_query(field, query)
            table_id = await self._requests.table_id(f"{field}.table", query.table, start, deadline)
            read = RowRead(
                row=query.row,
                columns=query.columns,
                all_columns=not (query.columns or query.column_prefixes),
                timestamp=start,
                column_prefixes=query.column_prefixes,
            )
            reads.append(RowRequest(table_id, read))
        if request.for_update:
            await self._await_turn(request, reads, deadline)
        env, cleanup = self._engine.env, self._engine.cleanup
        with _locks_only_delay(), _named_as_asked():
            answers = await read_rows(
                env, cleanup, reads, deadline, Statistics(), bytes_max=self._answer_bytes_max
            )
        response = pb.GetResponse(
            rows=[
                _row(query.row, answer.found)
                for query, answer in zip(request.rows, answers, strict=True)
            ]
        )
        if response.ByteSize() > self._answer_bytes_max:
            raise InvalidArgument(
                "rows",
                f"the answer would have {response.ByteSize()} bytes; the limit is "
                f"{self._answer_bytes_max}: ask for fewer rows at once",
            )
        return response

    async def _await_turn(
        self, request: pb.GetRequest, reads: Sequence[RowRequest], deadline: float
    ) -> None:
        """Waits for a turn at the one cell that is read, for half of the time at most. It ends with
        the commit, whichever gateway that is sent to, or by itself."""
        start, first = request.start_timestamp, request.first_start_timestamp
        if first > start:
            raise InvalidArgument(
                "first_start_timestamp", f"{first} is above start_timestamp, which is {start}"
            )
        if len(reads) != 1 or len(reads[0].read.columns) != 1 or reads[0].read.column_prefixes:
            raise InvalidArgument("rows", "expected one row with one column, with for_update")
        table_id, read = reads[0]
        now = self._engine.now()
        turns = TransactionTurns(self._engine.env, first or start)
        cell = CellAddress(table_id, read.row, read.columns[0])
        await turns.at(cell, start, now + (deadline - now) / 2)

    async def scan_table(self, request: pb.ScanTableRequest) -> AsyncIterator[pb.ScanTableResponse]:
        caller_identity().require_read(request.table, request.range.start, request.range.end)
        seconds = self._seconds()
        deadline = self._engine.now() + seconds
        await self._commits.check_start(request.start_timestamp, deadline)
        found_range = await self._requests.range_request(request, deadline)
        if found_range is None:
            if request.count:
                yield pb.ScanTableResponse()
            return
        left = request.row_limit
        env, cleanup = self._engine.env, self._engine.cleanup
        asked = (env, cleanup, found_range, None, seconds, Statistics())
        names, prefixes = [*request.columns], tuple(request.column_prefixes)
        with _locks_only_delay():
            if request.count:
                yield pb.ScanTableResponse(counted=await count_rows(*asked))
                return
            pages = scan_pages(*asked)
            async with aclosing(pages):
                async for page in pages:
                    if found_range.predicate is not None and found_range.columns is not None:
                        page = only_columns(page, names, prefixes)
                    rows = page[:left] if request.row_limit else page
                    if rows:
                        yield pb.ScanTableResponse(rows=[_row(row, cells) for row, cells in rows])
                    left -= len(rows)
                    if request.row_limit and left <= 0:
                        return

    async def find_rows(self, request: pb.FindRowsRequest) -> AsyncIterator[pb.FindRowsResponse]:
        # An index shows rows wherever they are in the table.
        caller_identity().require_read(request.table)
        engine, seconds = self._engine, self._seconds()
        deadline = engine.now() + seconds
        await self._commits.check_start(request.start_timestamp, deadline)
        self._requests.check_columns("", request)
        engine.require_row("after", request.after)
        if not request.index:
            raise InvalidArgument("index", "is missing")
        info = await self._requests.table("table", request.table, deadline)
        info.require_older_than(request.start_timestamp)
        bytes_max = engine.limits.page_bytes_max
        with _locks_only_delay():
            async with aclosing(_rows_of_index(engine, request, info, seconds)) as pages:
                async for page in pages:
                    response, size_bytes = pb.FindRowsResponse(), 0
                    for one in page:
                        row = _row(one.row, one.cells)
                        if response.rows and size_bytes + row.ByteSize() > bytes_max:
                            yield response
                            response, size_bytes = pb.FindRowsResponse(), 0
                        response.rows.append(row)
                        response.position = one.entry
                        size_bytes += row.ByteSize()
                    yield response

    async def follow_changes(
        self, request: pb.FollowChangesRequest
    ) -> AsyncIterator[pb.FollowChangesResponse]:
        caller_identity().require_read(request.table)
        seconds = self._engine.limits.call_seconds
        deadline = self._engine.now() + seconds
        engine, after = self._engine, request.after
        await self._commits.check_timestamp("after", after, deadline)
        if request.until:
            await self._commits.check_timestamp("until", request.until, deadline)
            if request.until < after:
                raise InvalidArgument("until", f"{request.until} is below after, {after}")
        table = await self._requests.table("table", request.table, deadline)
        reader = ChangeReader(
            engine.env, engine.cleanup, engine.router, table, after, before=request.before
        )
        caller = caller_identity().client
        self._followers[caller] += 1
        # While the stream lasts, history is kept from where it is.
        engine.open_starts.add(reader, reader.position)
        try:
            await reader.begin(await engine.env.timestamps.get(timeout_seconds=seconds), seconds)
            following = reader.follow(request.until, seconds, lambda: self._idle_seconds(caller))
            if not request.until:
                following = self._endless.until_the_end(following)
            async with aclosing(following) as pages:
                async for page in pages:
                    yield pb.FollowChangesResponse(
                        changes=map(_change, page), reached=reader.position
                    )
                    engine.open_starts.add(reader, reader.position)
        finally:
            engine.open_starts.discard(reader)
            self._followers[caller] -= 1
            if not self._followers[caller]:
                del self._followers[caller]

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        deadline, start = self._deadline(), request.start_timestamp
        await self._commits.check_start(start, deadline)
        writes = await self._requests.writes(request, deadline)
        if writes.primary is None and not writes.notified:
            return pb.CommitResponse()
        try:
            await self._commits.require_own(start)
            commit = await self._commits.commit(start, writes, deadline)
        except SnapshotTooOld as error:
            error.message += "; the outcome of the transaction can no longer be determined"
            raise
        except UniqueViolation as error:
            if caller_identity().rights is None:
                raise
            # The other row may be one that the token may not read.
            raise UniqueViolation(
                f"another row has the same values, and index {error.index!r} is unique",
                index=error.index,
                rows=error.rows[:1],
            ) from None
        # A repeated commit sends mere notifications again, which is harmless.
        return pb.CommitResponse(commit_timestamp=commit if writes.primary is not None else 0)

    async def resolve(self, request: pb.ResolveRequest) -> pb.ResolveResponse:
        deadline, start = self._deadline(), request.start_timestamp
        await self._commits.check_start(start, deadline)
        primary = await self._requests.primary(request, deadline)
        await self._commits.require_own(start)
        field = "primary" if request.HasField("primary") else "cells" if request.cells else "writes"
        outcome = await self._commits.resolve(start, primary, field, deadline)
        if outcome == ROLLED_BACK:
            return pb.ResolveResponse(fate=pb.ResolveResponse.FATE_ABORTED)
        return pb.ResolveResponse(fate=pb.ResolveResponse.FATE_COMMITTED, commit_timestamp=outcome)

    def _idle_seconds(self, client: tuple[bytes, str] | None) -> float:
        """When a follower of changes looks again. The more of them a client has, the later: each
        look costs this gateway and a tablet server, however idle the table is."""
        if client is None:
            return IDLE_SECONDS
        return max(IDLE_SECONDS, self._followers[client] / _LOOKS_PER_SECOND)

    def _seconds(self) -> float:
        remaining = remaining_seconds()
        if remaining is None:
            return self._engine.limits.call_seconds
        reserved = min(remaining * _ANSWER_SHARE, _ANSWER_SECONDS)
        return max(min(remaining - reserved, CALL_SECONDS_MAX), 0.0)

    def _deadline(self) -> float:
        return self._engine.now() + self._seconds()


@contextmanager
def _locks_only_delay() -> Iterator[None]:
    """A read that a lock has blocked ran out of time. A conflict would mean to callers that their
    transaction is rolled back for good."""
    try:
        yield
    except ConflictError as error:
        late = DeadlineExceeded(error.message)
        late.retry = Retry.SAFE
        raise late from error


@contextmanager
def _named_as_asked() -> Iterator[None]:
    """Renames a field that a tablet refuses: it is a field of the gateway's request, at another
    place in it."""
    try:
        yield
    except InvalidArgument as error:
        named = _READ.match(error.field)
        if named is None:
            raise
        field = f"rows[].{named[1]}" if named[1] else "rows"
        raise InvalidArgument(field, f"of one row: {error.reason}", where=error.where) from error


def _change(change: StoredChange) -> pb.FollowedChange:
    return pb.FollowedChange(
        commit_timestamp=change.commit_timestamp,
        row=change.row,
        column=change.column,
        value=change.value,
        before=change.before,
    )


def _row(row: bytes, cells: Mapping[bytes, FoundCell | None]) -> pb.FoundRow:
    return pb.FoundRow(
        row=row,
        cells=[
            pb.FoundCell(column=column, value=found.value, commit_timestamp=found.commit_timestamp)
            for column, found in sorted(cells.items())
            if found is not None and found.value is not None
        ],
    )


async def _rows_of_index(
    engine: Engine, request: pb.FindRowsRequest, info: TableInfo, seconds: float
) -> AsyncGenerator[list[Match], None]:
    """Yields the rows that match, in the order of the index, some at a time. Values are stored
    bytes, as callers give and get them."""
    reader = Reader(engine, seconds, "snapshot")

    async def range_of_entries() -> EntryRange:
        deadline = reader.deadline(None)
        index = await index_named(engine.env, info.table_id, request.index, deadline)
        if index is None:
            raise no_index(info.name, request.index)
        return _range_of_entries(index, request)

    names = [*request.columns] if request.columns or request.column_prefixes else None
    prefixes, limit = tuple(request.column_prefixes), request.row_limit or None
    wanted = Wanted(names, prefixes, request.reverse, limit)
    reader.set_start(request.start_timestamp)
    try:
        entries = await range_of_entries()
        pages = found_matches(reader, info, entries, range_of_entries, wanted, None)
        async with aclosing(pages):
            async for page in pages:
                yield page
    finally:
        reader.finish("is closed")


def _range_of_entries(index: IndexDefinition, request: pb.FindRowsRequest) -> EntryRange:
    limits = (
        request.start if request.HasField("start") else None,
        request.end if request.HasField("end") else None,
        request.prefix if request.HasField("prefix") else None,
    )

    def checked(place: int, field: str, value: bytes) -> bytes:
        column, codec = index.columns[place]
        try:
            entry_part(codec, value, column)
        except SchemaError as error:
            raise InvalidArgument(field, error.message) from error
        return value

    first, last = bounds(index, request.values, limits, checked)
    if request.after and request.reverse:
        last = min(last, request.after) if last else request.after
    elif request.after:
        first = max(first, request.after + b"\0")
    return EntryRange(index, first, last)
