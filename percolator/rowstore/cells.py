"""`percolator.routing.cells.Cells` on a row store: the door of this room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing

from percolator.limits import Limits
from percolator.routing.cells import (
    Answer,
    CellMutation,
    CellPage,
    CommitAnswer,
    NotInOneRound,
    RangePage,
    RangeRequest,
    RowRequest,
    RowResult,
    WholeCommit,
)
from percolator.routing.lanes import CellAnswer
from percolator.rowstore.intents import Intents
from percolator.rowstore.mutating import RowMutations
from percolator.rowstore.port import RowStore
from percolator.rowstore.reading import RowReads
from percolator.rowstore.scanning import RowScan
from percolator.rowstore.times import Times
from percolator.world import World


class RowStoreCells:
    """All cells of all tables, in a row store. Belongs to one event loop."""

    def __init__(
        self, store: RowStore, intents: Intents, times: Times, world: World, limits: Limits
    ) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._mutations = RowMutations(store, intents, times, world, limits)
        self._reads = RowReads(store, times, world, limits)

    def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> Awaitable[list[Answer]]:
        return self._mutations.mutate(mutations, deadline)

    def commit(self, commit: WholeCommit, deadline: float) -> Awaitable[CommitAnswer]:
        """A row store has no timestamps to give, and holds no cells meanwhile."""
        future: asyncio.Future[CommitAnswer] = asyncio.get_running_loop().create_future()
        future.set_result(
            NotInOneRound("in a row store, every transaction is committed in two phases")
        )
        return future

    def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> Awaitable[list[RowResult]]:
        return self._reads.read(requests, deadline, bytes_max=bytes_max)

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]:
        return self._reads.read_cell(table_id, row, column, timestamp, deadline)

    def scan(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        return RowScan(
            request,
            timeout_seconds,
            self._store,
            self._reads,
            self._times,
            self._world,
            self._limits,
        ).pages()

    async def scan_cells(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[CellPage, None]:
        """Like `scan`, in the form for callers that move many cells."""
        async with aclosing(self.scan(request, timeout_seconds)) as pages:
            async for page in pages:
                yield _as_lists(page)


def _as_lists(page: RangePage) -> CellPage:
    # Values that lie apart were found after all others of their row.
    entries = [
        (row, column, found)
        for row, cells in page.rows.items()
        for column, found in sorted(cells.items())
    ]
    return CellPage(
        [row for row, _, _ in entries],
        [column for _, column, _ in entries],
        [found.commit_timestamp for _, _, found in entries],
        [found.value or b"" for _, _, found in entries],
        [at for at, (_, _, found) in enumerate(entries) if found.value is None],
        page.locks,
        page.start,
        page.end,
    )
