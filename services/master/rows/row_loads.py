"""Bulk loads into tables of a row store: each run fills a table that nobody else can see.

A row store changes rows without looking at who asks, so a process that was given up, or a call that
is late, may write at any time. It does no harm in a table of its own: the table is published, under
its name, by the run that has filled it, or it is dropped. Publishing is one change of the
catalogue, for any number of tables, so all of them appear at the same moment.

* A published table is as young as its publication: snapshots from before it are refused, as with
  every table that is created. So nobody has read or written it at a timestamp at which its rows are
  there.
* A later run drops the table of an earlier one. Ids are never used again.
* No run begins again up to the latest that was ended: a late call to begin would create a table
  that nobody ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import structlog

from percolator.errors import InvalidArgument
from percolator.services.master.map.catalogue import (
    FIRST_VERSION,
    Catalogue,
    Observer,
    OwedBackfill,
    Table,
    TableLoad,
)
from percolator.services.master.rows.row_tables import RowTables, require_not_loading
from percolator.services.master.table_changes import Creation
from percolator.v1 import master_pb2 as pb

LOAD_BYTES_MAX = 255

_log = structlog.get_logger("percolator.master")


class RowLoads(RowTables):
    """`RowTables`, with those that are being loaded."""

    async def begin_load(self, request: pb.BeginLoadRequest, deadline: float) -> Table | None:
        """The table of this run. With `resume`, None if there is none."""
        self._require_valid(request.table)
        self._require_possible(request.table)
        _require_named(request.load, request.run)
        if request.resume:
            return _of_run(self._store.current, request)
        async with self._alone(deadline):
            decide = partial(_begun, request)
            table = await self._store.change(partial(decide, None))
            if table is None:
                creation = await self._prepared(request.table, deadline)
                _require_past(request.run, creation)
                table = await self._store.change(partial(decide, self._made(creation)))
        _log.info("bulk load begun", table=request.table.name, load=request.load)
        return table

    def _made(self, creation: Creation) -> Table:
        _, table = self._with_new_table(Catalogue(), creation)
        return table

    async def publish_loads(
        self, request: pb.PublishLoadsRequest, deadline: float
    ) -> Sequence[Table]:
        """The tables, which can be used now."""
        creation = Creation(pb.CreateTableRequest(), created_at=0, deletions=-1)
        while True:
            decide = partial(self._published, request, creation)
            tables = await self._store.change(decide)
            if tables is not None:
                return tables
            creation = await self._timestamped(creation.request, deadline)

    def _published(
        self, request: pb.PublishLoadsRequest, creation: Creation, current: Catalogue
    ) -> tuple[Catalogue, list[Table] | None]:
        """None if a timestamp above the last deletion is needed first."""
        found = [_loaded(current, one) for one in request.loads]
        if not any(table.is_hidden for table in found):
            return current, found  # an earlier call was executed
        if creation.deletions != self._deletions:
            return current, None
        floor = max(current.load_floor, *(one.run for one in request.loads))
        changed = [
            replace(
                table,
                created_at=creation.created_at,
                load=replace(table.load, commit_timestamp=one.commit_timestamp),
                observers=_of_loaded_cells(current.awaited.get(table.name, ())),
            )
            if table.is_hidden and table.load is not None
            else table
            for table, one in zip(found, request.loads, strict=True)
        ]
        published = current.with_tables(*changed)
        return replace(published, load_floor=floor), changed

    async def abandon_load(
        self, request: pb.AbandonLoadRequest, deadline: float
    ) -> pb.AbandonLoadResponse:
        """Drops what the runs up to this one have loaded, unless it was published."""
        _require_named(request.load, request.run)
        _require_past(request.run, await self._timestamped(pb.CreateTableRequest(), deadline))
        return await self._store.change(partial(_abandoned, request))


def _of_loaded_cells(awaited: Sequence[Observer]) -> tuple[Observer, ...]:
    """The observers that waited for the table. What was loaded has notified none of them."""
    return tuple(
        replace(one, owed=OwedBackfill(FIRST_VERSION, one.columns)) if one.backfill else one
        for one in awaited
    )


def _begun(
    request: pb.BeginLoadRequest, made: Table | None, current: Catalogue
) -> tuple[Catalogue, Table | None]:
    """The catalogue with the table of the run; None if it has to be `made` first."""
    name, run = request.table.name, request.run
    if current.named(name) is not None:
        raise InvalidArgument("name", f"table {name!r} exists")
    require_not_loading(current, name, request.load)
    known = _of_load(current, name, request.load)
    for table, load in known:
        if load.run == run:
            return current, table
    if run <= max([current.load_floor, *(load.run for _, load in known)]):
        raise _taken_over(request.load, run)
    if made is None:
        return current, None
    earlier = [_dropped(table) for table, _ in known]
    table = replace(made, load=TableLoad(request.load, run))
    return current.with_tables(*earlier, table), table


def _of_run(current: Catalogue, request: pb.BeginLoadRequest) -> Table | None:
    for table, load in _of_load(current, request.table.name, request.load):
        if load.run == request.run:
            return table
    return None


def _loaded(current: Catalogue, asked: pb.PublishLoadsRequest.Loaded) -> Table:
    """Raises `InvalidArgument` unless the table is still that of this run."""
    if not 0 < asked.run < asked.commit_timestamp:
        raise InvalidArgument("commit_timestamp", "expected one above the run, which is above 0")
    table = current.tables.get(asked.table_id)
    load = None if table is None or table.deleting else table.load
    if table is None or load is None or load.run != asked.run:
        raise _taken_over("" if load is None else load.name, asked.run)
    if load.commit_timestamp not in (0, asked.commit_timestamp):
        raise InvalidArgument("commit_timestamp", "the load was published at another one")
    return table


def _abandoned(
    request: pb.AbandonLoadRequest, current: Catalogue
) -> tuple[Catalogue, pb.AbandonLoadResponse]:
    known = [
        one for one in _of_load(current, request.table, request.load) if one[1].run <= request.run
    ]
    response = pb.AbandonLoadResponse(
        found=bool(known), complete=any(load.commit_timestamp for _, load in known)
    )
    gone = [_dropped(table) for table, load in known if not load.commit_timestamp]
    floor = max(current.load_floor, request.run)
    return replace(current.with_tables(*gone), load_floor=floor), response


def _of_load(current: Catalogue, name: str, load: str) -> list[tuple[Table, TableLoad]]:
    """The tables of all runs of a load."""
    return [
        (table, table.load)
        for table in current.tables.values()
        if table.name == name
        and not table.deleting
        and table.load is not None
        and table.load.name == load
    ]


def _dropped(table: Table) -> Table:
    return replace(table, deleting=True, schema_version=table.schema_version + 1)


def _require_named(load: str, run: int) -> None:
    if not 1 <= len(load.encode()) <= LOAD_BYTES_MAX:
        raise InvalidArgument("load", f"expected 1 to {LOAD_BYTES_MAX} bytes")
    if not run:
        raise InvalidArgument("run", "missing")


def _require_past(run: int, creation: Creation) -> None:
    """Otherwise no load could begin before the oracle has come to this run."""
    if run >= creation.created_at:
        raise InvalidArgument("run", "expected a timestamp that the oracle has given out")


def _taken_over(load: str, run: int) -> InvalidArgument:
    return InvalidArgument(
        "run",
        f"the load {load!r} has no table of run {run}: it was ended, or another run has taken the "
        "load over",
    )
