"""`percolator.v1.GatewayService`: requests in, the protocol run, answers out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

from percolator.aio.engine import Engine
from percolator.errors import InvalidArgument, SnapshotTooOld
from percolator.protocol.read import read_rows
from percolator.protocol.scan import scan_pages
from percolator.protocol.surroundings import Statistics
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.v1 import gateway_pb2 as wire
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.questions import FoundCell, RowQuestion
from services.chassis.rpc import remaining_seconds
from services.gateway.commits import Commits
from services.gateway.requests import Requests

CALL_SECONDS_MAX = 60.0
_ANSWER_SECONDS = 0.2
_ANSWER_SHARE = 0.1
"""Left over for the answer, of what the caller waits: told that it is unknown is better than told
nothing."""


class GatewayHandler:
    """Answers the calls to one gateway."""

    def __init__(self, engine: Engine, commits: Commits, *, answer_bytes_max: int) -> None:
        self._engine = engine
        self._commits = commits
        self._requests = Requests(engine)
        self._answer_bytes_max = answer_bytes_max

    async def begin(self, request: wire.BeginRequest) -> wire.BeginResponse:
        return wire.BeginResponse(start_timestamp=await self._commits.begin(self._deadline()))

    async def get(self, request: wire.GetRequest) -> wire.GetResponse:
        deadline, start = self._deadline(), request.start_timestamp
        await self._commits.check_start(start, deadline)
        cells_max = self._engine.limits.get_many_cells_max
        if sum(max(len(query.columns), 1) for query in request.rows) > cells_max:
            raise InvalidArgument("rows", f"more than {cells_max} cells at once")
        questions = []
        for place, query in enumerate(request.rows):
            field = f"rows[{place}]"
            self._requests.check_row_query(field, query)
            table_id = await self._requests.table_id(f"{field}.table", query.table, deadline)
            read = RowRead(
                row=query.row,
                columns=query.columns,
                all_columns=not query.columns,
                timestamp=start,
            )
            questions.append(RowQuestion(table_id, read))
        around, cleanup = self._engine.around, self._engine.cleanup
        answers = await read_rows(around, cleanup, questions, start, deadline, Statistics())
        response = wire.GetResponse(
            rows=[
                _row(query.row, answer.found)
                for query, answer in zip(request.rows, answers, strict=True)
            ]
        )
        if response.ByteSize() > self._answer_bytes_max:
            raise InvalidArgument(
                "rows",
                f"the answer has {response.ByteSize()} bytes, at most {self._answer_bytes_max}: "
                "ask for less at once",
            )
        return response

    async def scan_table(
        self, request: wire.ScanTableRequest
    ) -> AsyncIterator[wire.ScanTableResponse]:
        seconds = self._seconds()
        deadline = self._engine.now() + seconds
        await self._commits.check_start(request.start_timestamp, deadline)
        question = await self._requests.range_question(request, deadline)
        if question is None:
            return
        left = request.row_limit
        around, cleanup = self._engine.around, self._engine.cleanup
        pages = scan_pages(around, cleanup, question, None, seconds, Statistics())
        async with aclosing(pages):
            async for page in pages:
                rows = page[:left] if request.row_limit else page
                if rows:
                    yield wire.ScanTableResponse(rows=[_row(row, cells) for row, cells in rows])
                left -= len(rows)
                if request.row_limit and left <= 0:
                    return

    async def commit(self, request: wire.CommitRequest) -> wire.CommitResponse:
        deadline, start = self._deadline(), request.start_timestamp
        await self._commits.check_start(start, deadline)
        writes = await self._requests.writes(request, deadline)
        if writes.primary is None and not writes.notified:
            return wire.CommitResponse()
        try:
            commit = await self._commits.commit(start, writes, deadline)
        except SnapshotTooOld as error:
            error.message += "; what became of the transaction can no longer be told"
            raise
        # Notifications alone are sent again by a commit that is repeated: they decide nothing.
        return wire.CommitResponse(commit_timestamp=commit if writes.primary is not None else 0)

    async def resolve(self, request: wire.ResolveRequest) -> wire.ResolveResponse:
        deadline, start = self._deadline(), request.start_timestamp
        await self._commits.check_start(start, deadline)
        primary = await self._requests.primary(request, deadline)
        field = "primary" if request.HasField("primary") else "cells"
        outcome = await self._commits.resolve(start, primary, field, deadline)
        if outcome == ROLLED_BACK:
            return wire.ResolveResponse(fate=wire.ResolveResponse.FATE_ABORTED)
        return wire.ResolveResponse(
            fate=wire.ResolveResponse.FATE_COMMITTED, commit_timestamp=outcome
        )

    def _seconds(self) -> float:
        remaining = remaining_seconds()
        if remaining is None:
            return self._engine.limits.call_seconds
        reserved = min(remaining * _ANSWER_SHARE, _ANSWER_SECONDS)
        return max(min(remaining - reserved, CALL_SECONDS_MAX), 0.0)

    def _deadline(self) -> float:
        return self._engine.now() + self._seconds()


def _row(row: bytes, cells: Mapping[bytes, FoundCell]) -> wire.FoundRow:
    return wire.FoundRow(
        row=row,
        cells=[
            wire.FoundCell(
                column=column, value=found.value, commit_timestamp=found.commit_timestamp
            )
            for column, found in sorted(cells.items())
            if found.value is not None
        ],
    )
