"""A bulk load into a row store: it creates its table, which appears when everything is loaded.

    begin     has the master create a table that only this run knows, and then takes the commit
              timestamp; the table of an earlier run of the load is dropped
    resume    continues a run whose process has ended, with everything that it has loaded
    load      writes rows (percolator/rowstore/loading.py)
    finish    has the master publish the table; `finish_together`, those of several loads, at once
    abandon   drops the table

What is to be loaded must be the same in every repetition of a run. Until the table is published, it
does not exist for anybody else. Snapshots from before that are refused, as with every new table.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.aio.bulk_load import (
    LoadComplete,
    LoadedCell,
    LoadPlan,
    LoadTimestamps,
    NotEmpty,
)
from percolator.aio.database import Database
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.rowstore.loading import RowLoader
from percolator.v1 import master_pb2 as pb

PATIENCE_SECONDS = 60.0
_ATTEMPTS_MAX = 100


class TableExists(NotEmpty):
    """The table that a load was to create exists."""

    def __init__(self, table: str, commit_timestamp: int) -> None:
        UsageError.__init__(
            self,
            f"table {table!r} exists: in a row store, a bulk load creates its table, so that it "
            "can appear as a whole; drop it first, or load into another one",
        )
        self.commit_timestamp = commit_timestamp
        """The timestamp of the bulk load that created it; 0 if none did."""


class RowLoad:
    """One run of one load, in the one process that loads."""

    def __init__(
        self,
        database: Database,
        plan: LoadPlan,
        options: pb.TableOptions | None = None,
        codecs: pb.Codecs | None = None,
    ) -> None:
        """The table will have these options and codecs."""
        if plan.start or plan.end:
            raise UsageError("in a row store, a whole table is loaded in bulk, not a range of rows")
        if plan.notify:
            raise UsageError(
                "in a row store, a bulk load creates its table, which has no observers to notify"
            )
        self._plan = plan
        self._engine = database.internal.engine
        self._table = pb.CreateTableRequest(name=plan.table, options=options, codecs=codecs)
        self._loader: RowLoader = self._engine.row_loader()
        self._table_id = 0

    async def begin(self) -> LoadTimestamps:
        """Takes over an unfinished load of the same name, if there is one. Raises `TableExists`."""
        timestamps = self._engine.env.timestamps
        for _ in range(_ATTEMPTS_MAX):
            run = await timestamps.get()
            try:
                table = await self._ask(run, resume=False)
            except InvalidArgument as error:
                if error.field == "run":
                    continue  # a later one has ended meanwhile
                if error.field == "name":
                    await self._require_missing()
                raise
            if table is not None:
                self._table_id = table.table_id
                return LoadTimestamps(run, await timestamps.get())
        raise UsageError(f"cannot begin the load: others keep loading table {self._plan.table!r}")

    async def resume(self, timestamps: LoadTimestamps) -> bool:
        """True if the table of this run is still there, with everything that it has loaded.

        False if another run has taken over or dropped it. Raises `LoadComplete`.
        """
        table = await self._ask(timestamps.start, resume=True)
        if table is None:
            return False
        if table.load.commit_timestamp:
            raise LoadComplete(f"the load {self._plan.name!r} is complete")
        self._table_id = table.table_id
        return True

    async def load(self, cells: Sequence[LoadedCell], timestamps: LoadTimestamps) -> None:
        """Writes cells, which must be in row order, with each address at most once."""
        start, commit_ts = timestamps
        await self._loader.load(self._table_id, cells, start, commit_ts, PATIENCE_SECONDS)

    async def finish(self, timestamps: LoadTimestamps) -> None:
        """Call this when everything is loaded."""
        await finish_together([(self, timestamps)])

    async def abandon(self) -> bool:
        """Drops what was loaded. Returns whether it was complete after all; then its rows stay."""
        return (await self._abandon(await self._engine.env.timestamps.get())).complete

    async def undo(self, timestamps: LoadTimestamps) -> bool:
        """Drops the table of one run. Returns whether there was one. Raises `LoadComplete`."""
        return await self.resume(timestamps) and (await self._abandon(timestamps.start)).found

    async def _abandon(self, run: int) -> pb.AbandonLoadResponse:
        plan = self._plan
        request = pb.AbandonLoadRequest(table=plan.table, load=plan.name, run=run)
        return await self._engine.catalog.abandon_load(request, self._deadline())

    async def _ask(self, run: int, *, resume: bool) -> pb.Table | None:
        request = pb.BeginLoadRequest(
            table=self._table, load=self._plan.name, run=run, resume=resume
        )
        return await self._engine.catalog.begin_load(request, self._deadline())

    async def _require_missing(self) -> None:
        name = self._plan.table
        try:
            table = await self._engine.catalog.describe(name, self._deadline())
        except SchemaError:
            return  # it is only being loaded, by another load
        raise TableExists(name, table.load.commit_timestamp)

    def _deadline(self) -> float:
        return self._engine.now() + PATIENCE_SECONDS

    # ------------------------------------------------------------------ together

    def loaded(self, timestamps: LoadTimestamps) -> pb.PublishLoadsRequest.Loaded:
        """The table of this run, for a request to publish it."""
        start, commit_ts = timestamps
        return pb.PublishLoadsRequest.Loaded(
            table_id=self._table_id, run=start, commit_timestamp=commit_ts
        )

    async def publish(self, request: pb.PublishLoadsRequest) -> None:
        await self._engine.catalog.publish_loads(request, self._deadline())


async def finish_together(loads: Sequence[tuple[RowLoad, LoadTimestamps]]) -> None:
    """Publishes the tables of all these loads together."""
    if loads:
        found = [load.loaded(timestamps) for load, timestamps in loads]
        await loads[0][0].publish(pb.PublishLoadsRequest(loads=found))
