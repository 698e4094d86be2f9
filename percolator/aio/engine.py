"""The parts that all transactions of a `Database` share: connections, caches, background work."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from math import inf
from typing import Any, NamedTuple, Protocol

from percolator.aio.activity import ProcessActivity
from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    PercolatorError,
    SchemaError,
    TabletLocation,
    UsageError,
    harmless,
)
from percolator.limits import Limits
from percolator.protocol.announcing import is_current, learn_schemas
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.environment import Environment, OpenStarts, Owners, Verdicts
from percolator.protocol.shared.participant import ParticipantHeartbeats
from percolator.protocol.write_set import Heartbeats
from percolator.retries import Admission
from percolator.routing.catalog import Catalog, TableInfo, TabletMap, with_remedy
from percolator.routing.cells import Cells, Groups, RangeRequest
from percolator.routing.contents import Contents, TabletContents
from percolator.routing.deleted_tables import DeletedTables
from percolator.routing.lanes import CellAnswer
from percolator.routing.lock_resolution import LockResolution
from percolator.routing.range_scan import SentPage
from percolator.routing.ranges import Ranges, TabletRanges
from percolator.routing.router import Router
from percolator.rowstore.adapter import DroppedTables, RowContents, RowStoreCells, SampledRanges
from percolator.rowstore.intents import Intents
from percolator.rowstore.layout import KEY_BYTES_MAX, SpacedTimestamps, Times, row_key
from percolator.rowstore.loading import RowLoader
from percolator.rowstore.mutations import RowGroups
from percolator.rowstore.port import RowStore
from percolator.schema import INTERNAL_TABLES, Table
from percolator.tasks import Tasks
from percolator.wire.advisory_locks import AdvisoryLocks
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import Clock, World

# Fetches schemas that are newer than what this client knows of them.
#
# A transaction that commits needs no help: the tablet refuses it, and the protocol asks for the
# newer schema then. This is for programs that only read, which have to know of codecs that were
# changed, and for programs that were refused here, before anything was sent, because of a codec
# that may have been changed since.

_log = logging.getLogger("percolator.transactions")

_AGAIN_SECONDS = 1.0
"""The pause between attempts to fetch a newer schema."""
_REFUSED_SECONDS = 1.0
"""A program that is refused all the time asks for the codecs of a table so often."""


class NewerSchemas:
    """News of schemas for one client. Belongs to the event loop in which it was made."""

    def __init__(self, catalog: Catalog, world: World, limits: Limits) -> None:
        self._catalog = catalog
        self._clock = world.clock
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._named: dict[int, int] = {}
        """The newest version that was named, of each table whose schema is being fetched."""
        self._asked_at: dict[int, float] = {}
        self._tasks = Tasks()
        self._closed = False

    def named(self, table_id: int, version: int) -> None:
        """A tablet has named a version that is newer than what is known."""
        if self._closed:
            return
        fetched = self._named.get(table_id)
        self._named[table_id] = max(fetched or 0, version)
        if fetched is None:
            self._tasks.start(self._fetch(table_id))

    def codec_was_refused(self, table_id: int) -> None:
        """Fetches the schema again, since the table's codecs may have changed: otherwise a running
        program would be refused forever. Programs of the blocking API call this in their own
        threads."""
        if threading.get_ident() != self._thread:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.codec_was_refused, table_id)
            return
        now = self._clock.monotonic_seconds()
        if now >= self._asked_at.get(table_id, -inf) + _REFUSED_SECONDS:
            self._asked_at[table_id] = now
            self.named(table_id, 0)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.cancel()

    async def _fetch(self, table_id: int) -> None:
        """Fetches schemas until it has the newest version that was named: the tablets, asked under
        their own by now, will not say again that there is a newer one."""
        try:
            while True:
                deadline = self._clock.monotonic_seconds() + self._limits.call_seconds
                try:
                    schema = await self._catalog.refresh(table_id, deadline)
                except (NotExecuted, ExecutionUnknown) as error:
                    _log.info("the newer schema of table %d was not fetched: %s", table_id, error)
                else:
                    if schema.version >= self._named[table_id]:
                        return
                await self._clock.sleep(_AGAIN_SECONDS)
        except PercolatorError as error:
            _log.info("the newer schema of table %d was not fetched: %s", table_id, error)
        finally:
            del self._named[table_id]


_log = logging.getLogger("percolator.transactions")

SLOW_LINE_SECONDS = 60.0
"""The least time between two lines about slow transactions."""


class Closes(Protocol):
    """Something that can be closed."""

    async def close(self) -> None: ...


class StoredCells(Cells, Protocol):
    """All cells of all tables, with what makes the most frequent reads cheap."""

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]: ...

    def scan_cells(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[SentPage, None]: ...


class Rows(NamedTuple):
    """A row store that has the cells, in place of tablet servers."""

    store: RowStore
    times: Times


class SlowLog:
    """Logs slow transactions: one line a minute, which counts those that were left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_line_seconds = 0.0
        self._left_out = 0

    def note(self, text: str, *arguments: object) -> None:
        now = self._clock.monotonic_seconds()
        if now < self._next_line_seconds:
            self._left_out += 1
            return
        self._next_line_seconds = now + SLOW_LINE_SECONDS
        before, self._left_out = self._left_out, 0
        _log.warning(f"{text}%s", *arguments, f"; {before} more before it" if before else "")

    def close(self) -> None:
        """Says how many were left out since the last line."""
        if self._left_out:
            _log.warning("%d more slow transactions were not logged", self._left_out)
            self._left_out = 0


class Engine:
    """One client, which belongs to one event loop."""

    closed = False

    def __init__(
        self,
        world: World,
        masters: list[str],
        timestamps: TimestampSource,
        owners: Owners,
        locks: AdvisoryLocks,
        limits: Limits,
        open_starts: OpenStarts,
        activity: ProcessActivity,
        closing: list[Closes],
        rows: Rows | None = None,
        is_restricted: bool = False,
    ) -> None:
        """`closing` is closed in this order, after everything that the engine itself has made.
        `is_restricted`: whether the token of this client has rights to some tables only."""
        self.world = world
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.thread_ident = threading.get_ident()
        self.now = world.clock.monotonic_seconds
        self.admission = Admission(limits.transactions_busy_max, self.now)
        self._tablets = TabletMap(self._find)
        self._router = Router(world, self._tablets, limits)
        self.catalog = Catalog(world, masters, self._tablets, self._router.schema_versions)
        self._newer_schemas = NewerSchemas(self.catalog, world, limits)
        self._router.schema_versions.on_newer = self._newer_schemas.named
        self.catalog.on_codec_refused = self._newer_schemas.codec_was_refused
        self._deleted_tables = DeletedTables(world, self.catalog, limits)
        self.locks = locks
        self._rows = rows
        self.row_bytes_max = limits.row_bytes_max
        """Row keys up to this size are accepted."""
        self.cells: StoredCells = self._router
        self.groups: Groups = self._router
        """Mutations of one row that are made together or not at all."""
        self.ranges: Ranges = TabletRanges(world, self.catalog, self._tablets)
        """How to divide tables among those who work in parallel."""
        self.contents: Contents = TabletContents(world, self.catalog)
        self.timestamps: TimestampSource | SpacedTimestamps = timestamps
        self.intents: Intents | None = None
        """The changes that wait for observers, if they are in a row store."""
        if rows is not None:
            self.intents = Intents(rows.store, rows.times, world, limits)
            self._use(rows, self.intents)
            self.timestamps = SpacedTimestamps(timestamps)
        self.is_on_rows = rows is not None
        """A row store has the cells. It knows nothing but timestamps, and does not refuse calls for
        tables that were dropped."""
        dropped = self._deleted_tables if rows is None else DroppedTables(self.catalog.refresh)
        self.open_starts = open_starts
        self.activity = activity
        self.env = Environment(
            cells=self.cells,
            timestamps=self.timestamps,
            owners=owners,
            schemas=self.catalog,
            announcing=self.intents,
            rolls_forward=self._router if rows is None else None,
            turns=self._router if rows is None and not is_restricted else None,
            resolves_locks=LockResolution(world, self._tablets, limits) if is_restricted else None,
            catalogue_epoch=lambda: self.timestamps.catalogue_epoch,
            named_schema_version=self._router.schema_versions.named,
            table_names=self.catalog.name_of,
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
            deleted_tables=dropped,
            tally=activity.tally,
        )
        self.cleanup = Cleanup(self.env)
        self.heartbeats = Heartbeats(self.env)
        self.participant_heartbeats = ParticipantHeartbeats(self.env)
        self.slow_log = SlowLog(world.clock)
        self._all_is_closed = asyncio.Event()
        self._closing = closing

    def _use(self, rows: Rows, intents: Intents) -> None:
        """Keeps the cells in a row store, in place of tablets."""
        world, limits = self.world, self.limits
        rows.store.name_of = self.catalog.name_of
        self.row_bytes_max = min(limits.row_bytes_max, KEY_BYTES_MAX)
        self.ranges = SampledRanges(rows.store, world, limits)
        self.contents = RowContents(rows.store, rows.times)
        self.cells = RowStoreCells(rows.store, intents, rows.times, world, limits)
        self.groups = RowGroups(rows.store, rows.times, world, limits)

    def tablet_of(self, table_id: int, row: bytes) -> TabletLocation | None:
        """The tablet of a row, if that is known. A row store has none."""
        return self._tablets.locate(table_id, row)

    @property
    def tablets(self) -> TabletMap:
        """Which server serves which rows."""
        self._require_tablets()
        return self._tablets

    @property
    def router(self) -> Router:
        """The way to tablets, for change feeds: a row store has none."""
        self._require_tablets()
        return self._router

    def _require_tablets(self) -> None:
        if self._rows is not None:
            raise UsageError(
                "the cells of this database are in a row store, which has no change feeds and no "
                "bulk loads into existing tables (docs/bigtable.md)"
            )

    def require_row(self, field: str, row: bytes) -> None:
        """Raises `InvalidArgument` for a row that is too long to be stored. Once a transaction has
        locked others, it is too late: nobody could ask such a primary what became of it."""
        found = len(row if self._rows is None else row_key(row))
        if found > self.row_bytes_max:
            raise InvalidArgument(field, f"has {found} bytes, at most {self.row_bytes_max}")

    def row_loader(self) -> RowLoader:
        """A loader of cells in bulk, into a row store."""
        if self._rows is None:
            raise UsageError("the cells of this database are in tablets")
        return RowLoader(self._rows.store, self._rows.times, self.world, self.limits)

    def require_ttls_possible(self) -> None:
        """Raises `UsageError` where no tablet judges what has expired."""
        if self._rows is not None:
            raise UsageError(
                "the cells of this database are in a row store, in which no value expires yet "
                "(docs/bigtable.md): create the table without ttl"
            )

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        return await self.catalog.find(table_id, row)

    def require_usable(self) -> None:
        """Raises `UsageError` after `close`, and in another event loop."""
        if self.closed:
            raise UsageError("the database is closed")
        try:
            in_own_loop = asyncio.get_running_loop() is self.loop
        except RuntimeError:  # no loop runs in this thread
            in_own_loop = False
        if not in_own_loop:
            raise UsageError("a database belongs to the event loop in which it was connected")

    async def fresh_timestamp(self, timeout_seconds: float) -> int:
        """A timestamp from the oracle, for a call that has done nothing yet."""
        try:
            return await self.timestamps.get(timeout_seconds=timeout_seconds)
        except PercolatorError as error:
            raise harmless(error)  # noqa: B904 - it has its cause already

    def is_current(self, info: TableInfo) -> bool:
        """True if a table was there at the epoch of the catalogue that came with the newest
        timestamp."""
        return is_current(self.env, info.table_id)

    async def require_tables(self, tables: Iterable[TableInfo], deadline: float) -> None:
        """Raises `SchemaError` if one was dropped before the newest timestamp was handed out."""
        await learn_schemas(self.env, [one.table_id for one in tables], deadline)

    async def table(self, table: Table[Any], deadline: float) -> TableInfo:
        known = self.catalog.known(table.name)
        if known is not None and self.is_on_rows:
            with suppress(SchemaError):  # another one may have its name
                await self.require_tables((known,), deadline)
        try:
            return await self.catalog.table(table.name, deadline)
        except SchemaError as error:
            if table.name in INTERNAL_TABLES:  # a program can do nothing about it
                raise
            raise with_remedy(error, table.name) from None

    async def close(self, drain_seconds: float) -> None:
        """Waits up to `drain_seconds` for background work to end, and then stops everything.

        A second call waits for the first, so that its caller can also rely on everything being
        closed.
        """
        if self.closed:
            await self._all_is_closed.wait()
            return
        self.closed = True
        self.admission.close()
        # An interrupt in the middle must not leave the rest open: a session that is renewed for
        # ever makes others wait for the locks of a client that can no longer be used.
        async with AsyncExitStack() as ending:
            ending.callback(self._all_is_closed.set)
            for one in reversed(self._closing):
                ending.push_async_callback(one.close)
            ending.push_async_callback(self._deleted_tables.close)
            ending.push_async_callback(self._router.close)
            ending.push_async_callback(self._newer_schemas.close)
            ending.push_async_callback(self.participant_heartbeats.close)
            ending.callback(self.heartbeats.close)
            ending.callback(self.slow_log.close)
            await self.env.background.drain(drain_seconds)
