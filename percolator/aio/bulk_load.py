"""Loads many rows into an empty range without transactions (percolator/tablet/bulk_load.py).

    begin     closes the range on all of its tablets, and only then takes the commit timestamp
    resume    continues a run whose process has ended, with everything that it has loaded
    load      puts rows, from any number of processes; may be repeated
    finish    notes on all tablets that the load is complete (`complete`), then opens them one by
              one (`open`), then builds the table's indexes (`build_indexes`)
    abandon   deletes what was loaded, and opens the range; or finishes a load that was complete
    undo      the same for one run: what another run has taken over is left alone

A load that is noted as complete on one tablet is complete: any run that finds it later opens the
rest. A load that is not noted as complete can only be cleared. So wherever it is interrupted, a
load takes effect completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from percolator import codecs
from percolator.aio.database import Database
from percolator.aio.index_build import IndexBuild
from percolator.codecs.readable import quoted
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SchemaChanged,
    SchemaError,
    TabletLocation,
    UniqueViolation,
    UsageError,
)
from percolator.protocol.indexes import BUILDING
from percolator.routing.tablet_walk import TabletWalk
from percolator.schema import Table
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods

PATIENCE_SECONDS = 60.0
CALL_SECONDS = 10.0
REQUEST_ROWS_MAX = 8_192
REQUEST_BYTES_MAX = 1 << 20
ATTEMPTS_MAX = 1_000
"""The most attempts to begin: each resolves a lock, or clears what another run has left."""

_RAISE, _CLEAR = pb.FenceRequest.ACTION_RAISE, pb.FenceRequest.ACTION_CLEAR
_FINISH, _LIFT = pb.FenceRequest.ACTION_FINISH, pb.FenceRequest.ACTION_LIFT
_LOOK = pb.FenceRequest.ACTION_LOOK

LoadedCell = tuple[bytes, bytes, bytes]
"""A row, a column and a value."""


@dataclass(frozen=True)
class LoadPlan:
    """Parameters that all processes of one load share. It has only plain values, since it is
    pickled."""

    table: str
    name: str
    start: bytes
    end: bytes
    """The rows from start (inclusive) to end (exclusive); an empty end means to the last row."""
    notify: bool
    """True if observers are notified of the loaded cells."""


class LoadComplete(UsageError):
    """A load that was to be begun or resumed turned out to be complete; it is now open."""


class NotEmpty(UsageError):
    """The range that rows are to be loaded into is not empty."""

    def __init__(self, table: str, obstacle: cells_pb2.Cell) -> None:
        super().__init__(
            f"table {table!r} is not empty where rows are to be loaded: there is row "
            f"{quoted(obstacle.row)}, or it was deleted recently"
        )
        self.commit_timestamp = obstacle.timestamp
        """The commit timestamp of the newest version of the first cell found."""


class LoadTimestamps(NamedTuple):
    """The timestamps of everything that one run loads."""

    start: int
    """The start timestamp, which also identifies the run: a later run takes over."""
    commit: int


@dataclass
class _Found:
    """Findings where the fence was to be raised."""

    complete: pb.LoadFence | None = None
    """A fence of this load that says that it is complete."""
    obstacle: cells_pb2.Cell | None = None
    """A cell of another writer; its tablet was not closed."""
    is_overtaken: bool = False
    """A load that began later has ended in a tablet, which is open for this one."""
    remains: bool = False
    """An earlier run has left rows."""


class BulkLoad:
    """One run of one load, as one process sees it."""

    def __init__(self, database: Database, plan: LoadPlan) -> None:
        self._database = database
        self._plan = plan
        self._engine = database.internal.engine
        self._walk = TabletWalk(self._engine.world, self._engine.tablets, PATIENCE_SECONDS)
        self._table_id = 0

    # ------------------------------------------------------------------ beginning

    async def begin(self) -> LoadTimestamps:
        """Closes the range, and takes over an unfinished load of the same name, if there is one.

        Raises `NotEmpty`, and `LoadComplete` if that load is complete.
        """
        await self._know_table()
        table, timestamps = self._plan.table, self._engine.env.timestamps
        for _ in range(ATTEMPTS_MAX):
            run = await timestamps.get()
            found = await self._raise(run)
            if found.complete is not None:
                await self._open(run, found.complete)
                await self.build_indexes()
                raise self._was_complete()
            if found.obstacle is not None:
                await self._open_again(run)
                if found.obstacle.space != cells_pb2.SPACE_LOCK:
                    raise NotEmpty(table, found.obstacle)
                await self._resolve(found.obstacle)
            elif found.remains:
                # Then try again as another run: a delayed copy of this request would delete what
                # this run had loaded by then.
                await self._each(_CLEAR, run, missing_ok=found.is_overtaken)
            elif not found.is_overtaken:
                await self._mark_indexes()
                begun = LoadTimestamps(run, await timestamps.get())
                # A build that has begun in between does not see what will be loaded.
                await self._mark_indexes()
                return begun
        raise UsageError(
            f"cannot begin the load: others keep locking or loading rows of table {table!r}"
        )

    async def resume(self, timestamps: LoadTimestamps) -> bool:
        """True if the range is still closed for this run, and so holds all that it has loaded.

        False if another run has taken over or cleared it. Raises `LoadComplete`.
        """
        await self._know_table()
        complete: pb.LoadFence | None = None

        def look(response: pb.FenceResponse) -> None:
            nonlocal complete
            if response.fence.commit_timestamp:
                complete = response.fence

        try:
            await self._each(_LOOK, timestamps.start, look=look)
        except InvalidArgument as error:
            if error.field != "run":
                raise
            if complete is None:
                return False
        if complete is not None:
            await self._open(timestamps.start, complete)
            await self.build_indexes()
            raise self._was_complete()
        return True

    def _was_complete(self) -> LoadComplete:
        return LoadComplete(f"the load {self._plan.name!r} was already complete, and is now open")

    async def _raise(self, run: int) -> _Found:
        """Takes over the part of the range that is closed, and closes the rest."""
        found = _Found()

        def look(response: pb.FenceResponse) -> None:
            if response.fence.commit_timestamp:
                found.complete = response.fence
            elif response.HasField("obstacle"):
                if response.HasField("fence"):
                    found.remains = True
                else:
                    found.obstacle = response.obstacle
            elif not response.HasField("fence"):
                found.is_overtaken = True

        try:
            await self._each(_RAISE, run, look=look)
        except InvalidArgument as error:
            if error.field != "fence.range":
                raise
            await self._open_again(run)  # the tablets that come before that one
            reason = f"{self._plan.table!r} cannot be closed: {error.reason}"
            raise InvalidArgument("table", reason, where=error.where) from error
        return found

    async def _open_again(self, run: int) -> None:
        """Opens the range. Nothing of the load is left afterwards."""
        await self._each(_CLEAR, run, missing_ok=True)
        await self._each(_LIFT, run, missing_ok=True)

    async def _resolve(self, lock: cells_pb2.Cell) -> None:
        """Reads the row, which resolves locks that were left behind in it."""
        table = Table(self._plan.table, key=codecs.stored)
        async with self._database.snapshot() as snapshot:
            await snapshot.get_many(table, [lock.row])

    # ------------------------------------------------------------------ loading

    async def load(self, cells: Sequence[LoadedCell], timestamps: LoadTimestamps) -> None:
        """Puts cells, which must be in row order, with each address at most once."""
        await self._know_table()
        done = 0

        async def ask(location: TabletLocation) -> None:
            nonlocal done
            stop = _stop(cells, done, location.end)
            await self._load_into(location, cells[done:stop], timestamps)
            done = stop

        while done < len(cells):
            await self._walk.one(self._table_id, cells[done][0], ask)

    async def _load_into(
        self, location: TabletLocation, cells: Sequence[LoadedCell], timestamps: LoadTimestamps
    ) -> None:
        plan = self._plan
        rows, columns, values = zip(*cells, strict=True)
        request = pb.LoadRequest(
            target=self._target(location),
            name=plan.name,
            start_timestamp=timestamps.start,
            commit_timestamp=timestamps.commit,
            rows=rows,
            columns=columns,
            values=values,
        )
        if plan.notify:
            deadline = self._engine.now() + CALL_SECONDS
            schema = await self._engine.env.schema(self._table_id, deadline)
            request.target.schema_version = schema.version
            for column in sorted(set(columns)):
                observers = schema.observers.get(column, ())
                if observers:
                    request.observed.add(column=column, observers=observers)
        call = self._engine.world.network.unary(location.address, methods.LOAD)
        try:
            await call(request, CALL_SECONDS)
        except SchemaChanged:
            await self._engine.catalog.refresh(self._table_id, self._engine.now() + CALL_SECONDS)
            raise

    # ------------------------------------------------------------------ the end

    async def finish(self, timestamps: LoadTimestamps) -> None:
        """Call this when everything is loaded. Then the load is complete, whatever happens."""
        await self.complete(timestamps)
        await self.open(timestamps)
        await self.build_indexes()

    async def complete(self, timestamps: LoadTimestamps) -> None:
        """Notes that everything is loaded. Readers do not see it yet."""
        await self._know_table()
        await self._each(_FINISH, timestamps.start, commit=timestamps.commit)

    async def open(self, timestamps: LoadTimestamps) -> None:
        """Opens a complete load. Does nothing where it is already open."""
        await self._know_table()
        await self._each(_LIFT, timestamps.start, missing_ok=True)

    async def _open(self, run: int, complete: pb.LoadFence) -> None:
        """Finishes a load that another run has left, which may already be open in some places.

        `run` has taken over the tablets that did not know yet that it is complete.
        """
        await self._each(_FINISH, run, commit=complete.commit_timestamp, missing_ok=True)
        await self._each(_LIFT, run, missing_ok=True)
        await self._each(_LIFT, complete.run, missing_ok=True)

    async def _mark_indexes(self) -> None:
        """Says to readers that the indexes are incomplete. Call it while the range is closed, and
        before the commit timestamp is taken: a snapshot that shows what was loaded shows this, too.

        One that is added later is built after the load: its build reads no range that is closed.
        """
        for one in await self._indexes():
            await one.mark(BUILDING)

    async def build_indexes(self) -> None:
        """Builds the table's indexes over what was loaded. Call it when the load is open."""
        await self._know_table()
        for one in await self._indexes():
            if await one.state() != BUILDING:
                continue
            try:
                await one.build()
            except PercolatorError as error:
                error.message = f"the rows are loaded, but an index is incomplete: {error.message}"
                if not isinstance(error, SchemaError | UniqueViolation):
                    # Perhaps another load has closed rows of the table.
                    error.message += (
                        "; the next load of the table that ends completes it, or "
                        "db.create_index(...)"
                    )
                raise

    async def _indexes(self) -> list[IndexBuild]:
        engine = self._engine
        schema = await engine.catalog.refresh(self._table_id, engine.now() + CALL_SECONDS)
        return [
            IndexBuild(self._database, engine, self._table_id, one, PATIENCE_SECONDS)
            for one in schema.indexes
        ]

    async def abandon(self) -> bool:
        """Clears the load. Returns whether it was complete after all; then its rows stay."""
        is_complete = await self.reopen()
        await self.build_indexes()
        return is_complete

    async def reopen(self) -> bool:
        """As `abandon`, without the indexes."""
        await self._know_table()
        return await self._abandon(await self._engine.env.timestamps.get())

    async def undo(self, timestamps: LoadTimestamps) -> bool:
        """Clears one run. Returns whether the range was still closed for it. Raises `LoadComplete`.

        Its processes may still be loading, so the range is taken over before it is cleared. That
        uses the run's commit timestamp: any other run that has taken over by now has a higher one.
        """
        if not await self.resume(timestamps):
            return False
        is_complete = await self._abandon(timestamps.commit)
        await self.build_indexes()
        return not is_complete

    async def _abandon(self, run: int) -> bool:
        complete = (await self._raise(run)).complete
        if complete is not None:
            await self._open(run, complete)
            return True
        await self._open_again(run)
        return False

    # ------------------------------------------------------------------ shared

    async def _know_table(self) -> None:
        if not self._table_id:
            deadline = self._engine.now() + CALL_SECONDS
            self._table_id = (await self._engine.catalog.table(self._plan.table, deadline)).table_id

    async def _each(
        self,
        action: pb.FenceRequest.Action,
        run: int,
        *,
        commit: int = 0,
        missing_ok: bool = False,
        look: Callable[[pb.FenceResponse], None] | None = None,
    ) -> None:
        """Sends an action to each tablet of the range.

        With `missing_ok`, a tablet without a fence of this run is skipped.
        """
        plan = self._plan
        fence = pb.LoadFence(
            name=plan.name,
            run=run,
            range=cells_pb2.RowRange(start=plan.start, end=plan.end),
            commit_timestamp=commit,
        )

        async def ask(location: TabletLocation) -> None:
            call = self._engine.world.network.unary(location.address, methods.FENCE)
            request = pb.FenceRequest(target=self._target(location), action=action, fence=fence)
            while True:
                try:
                    response = await call(request, CALL_SECONDS)
                except InvalidArgument as error:
                    if missing_ok and error.field == "run":
                        return
                    raise
                if not response.remains:
                    break
            if look is not None:
                look(response)

        await self._walk.each(self._table_id, plan.start, plan.end, ask)

    @staticmethod
    def _target(location: TabletLocation) -> pb.TabletTarget:
        return pb.TabletTarget(tablet_id=location.tablet_id, epoch=location.epoch)


def _stop(cells: Sequence[LoadedCell], start: int, end_row: bytes) -> int:
    """The index after the last cell of the next request to the tablet that ends at this row."""
    size = 0
    for index in range(start, min(len(cells), start + REQUEST_ROWS_MAX)):
        row, column, value = cells[index]
        size += len(row) + len(column) + len(value)
        if (end_row and row >= end_row) or (size > REQUEST_BYTES_MAX and index > start):
            return index
    return min(len(cells), start + REQUEST_ROWS_MAX)
