"""One tablet: a contiguous range of rows over one `Storage`.

Not finished: these are the signatures that the tablet server codes against.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from percolator.errors import PercolatorError
from percolator.tablet.limits import TabletLimits
from percolator.v1 import cells_pb2, tabletserver_pb2
from percolator.world import Clock, Storage


@dataclass(frozen=True)
class TabletIdentity:
    """Which tablet this is, and of which term of ownership."""

    table_id: int
    tablet_id: int
    epoch: int
    start: bytes
    end: bytes
    """Rows from start (included) to end (excluded); an empty end means to the last row."""


class Tablet:
    """Lives on one event loop. `open` it, serve, `close` it; it is never opened again."""

    def __init__(
        self,
        identity: TabletIdentity,
        *,
        schema_version: int,
        storage: Storage[Any],
        clock: Clock,
        still_owner: Callable[[], bool],
        on_closed: Callable[[PercolatorError], None],
        limits: TabletLimits = TabletLimits(),  # noqa: B008 - frozen
    ) -> None:
        """`still_owner` is one stat of the tablet's directory: called after each batch, before any
        answer of it leaves. `on_closed` is called once, on the event loop, when the tablet stops
        serving by itself: with `StoreUnusable` after a failed write (close this object and the
        storage, open both again) or with `TabletMoved` after a failed owner check (close only).
        """

    async def open(self) -> None:
        """Rebuilds the lock mirror and the notification index. Call once, before anything else.

        Raises `StoreUnusable` (damaged, or of another format).
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Refuses new work, lets the batch being written finish, answers what waits as not
        executed, saves the statistics, closes the storage. May be called again."""
        raise NotImplementedError

    @property
    def closed_because(self) -> PercolatorError | None:
        """Why every request is refused; None while serving."""
        raise NotImplementedError

    @property
    def schema_version(self) -> int:
        raise NotImplementedError

    async def set_schema_version(self, schema_version: int) -> None:
        """Judges under this version from now on; returns when all that was judged under an older
        one is durable and answered. Never goes back: an older version is ignored."""
        raise NotImplementedError

    @property
    def safe_point(self) -> int:
        raise NotImplementedError

    async def raise_safe_point(self, safe_point: int) -> None:
        """Durably refuses reads and mutations below it. Returns when nothing below is running."""
        raise NotImplementedError

    def describe(self) -> tabletserver_pb2.TabletDescription:
        raise NotImplementedError

    def statistics(self) -> tabletserver_pb2.TabletStatistics:
        raise NotImplementedError

    async def mutate(
        self, batch: tabletserver_pb2.MutationBatch, *, deadline_seconds: float
    ) -> tabletserver_pb2.MutationBatchResult:
        """Applies a batch; `deadline_seconds` is on the clock's monotonic time.

        The result has one entry per mutation: once queued, each has its own outcome (NOT_EXECUTED
        and UNKNOWN with their `error`), and nothing is raised. Before that, the whole batch is
        refused, nothing executed: InvalidArgument (field paths begin at the batch:
        "mutations[3].row": prefix them with "batches[i]."), Overloaded, StoreUnusable,
        TabletMoved, SchemaChanged. The target is checked here: id, epoch, and the schema version
        when the mutation is judged.
        """
        raise NotImplementedError

    async def read(self, batch: tabletserver_pb2.ReadBatch) -> tabletserver_pb2.ReadBatchResult:
        """Raises InvalidArgument ("reads[3].row"), SnapshotTooOld, TabletMoved, SchemaChanged,
        StoreUnusable; then nothing of the batch is answered."""
        raise NotImplementedError

    def scan(
        self, request: tabletserver_pb2.ScanRequest
    ) -> AsyncIterator[tabletserver_pb2.ScanResponse]:
        """Pages; raises like `read`, possibly after some pages."""
        raise NotImplementedError

    def scan_cells(
        self, request: tabletserver_pb2.ScanCellsRequest
    ) -> AsyncIterator[tabletserver_pb2.ScanCellsResponse]:
        """Pages of stored cells; SPACE_LOCK and SPACE_NOTIFY come from memory, never from an
        iterator that walks over the deleted ones."""
        raise NotImplementedError

    async def propose_split(self) -> bytes | None:
        """The first row of the upper half by size; None when there are fewer than two rows."""
        raise NotImplementedError

    def row_range(self) -> cells_pb2.RowRange:
        raise NotImplementedError
