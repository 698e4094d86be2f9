"""Creating and deleting tables, and changing their schemas, for all kinds of clusters.

`services/master/tablet_changes.py` and `services/master/row_term.py` have the differences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import structlog

from percolator.codecs.indexes import IndexDefinition
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    NotReady,
    SchemaError,
)
from percolator.observers.observer_change import awaited_observers, changed_observers, with_report
from percolator.services.master.cluster_map import (
    Catalogue,
    Table,
    observer_messages,
    observers_of,
    options_message,
    require_knows_indexes,
    table_message,
    ttl_messages,
    ttls_of,
)
from percolator.services.master.collection import OracleTime
from percolator.services.master.map_store import MapT, StoredMap
from percolator.v1 import master_pb2 as pb
from percolator.wire.table_indexes import (
    changed_indexes,
    entries_name,
    entries_ttls,
    require_codecs_kept,
    require_indexes,
    require_no_entries,
    require_same_indexes,
    require_ttls_kept,
    with_index_codecs,
)
from percolator.wire.table_options import (
    changed_ttls,
    require_options,
    require_retention,
    require_splits,
    require_table_name,
    require_ttls,
    table_exists,
)
from percolator.world import Clock

SPLIT_BYTES_MIN = 64 << 10
REQUEST_ID_BYTES_MAX = 64
AWAITED_MAX = 1_000
"""The most tables that do not exist yet and have observers."""
_ORACLE_SECONDS = 2.0

R = TypeVar("R")

_log = structlog.get_logger("percolator.master")


class Creation(NamedTuple):
    """A table to be created."""

    request: pb.CreateTableRequest
    created_at: int
    deletions: int
    """How many tables had been deleted when the timestamp was asked for; -1 without one."""
    table_ids: tuple[int, ...] = ()
    """The ids that it and the tables with the entries of its indexes get, if those are decided
    already."""


class TableChanges(ABC, Generic[MapT]):
    """Changes that the leading master makes to tables. A bad request changes nothing."""

    def __init__(
        self,
        clock: Clock,
        store: StoredMap[MapT],
        oracle_time: OracleTime,
        *,
        retention_min_seconds: float,
    ) -> None:
        self._clock = clock
        self._store = store
        self._oracle_time = oracle_time
        self._deletions = 0
        """How many tables were deleted in this term."""
        self._retention_min = round(retention_min_seconds * 1000)

    async def create(self, request: pb.CreateTableRequest, deadline: float) -> tuple[Table, bool]:
        """The table, which can be used now, and whether this call created it."""
        self._require_valid(request)

        table, created = await self._decided(
            self._decide_creation, self._prepared, request, deadline
        )
        if created:
            _log.info("table created", table=table.name, table_id=table.table_id)
        try:
            await self._until_indexed(table, deadline)
            # Otherwise, others could still read a former table of this name, and write into it.
            await self._until_out_of_use(table.name, deadline)
        except DeadlineExceeded as error:
            if not created:
                raise
            text = f"table {table.name!r} was created, but cannot be used yet: {error.message}"
            raise DeadlineExceeded(text) from error
        return table, created

    async def _decided(
        self,
        decide: Callable[[Creation, MapT], tuple[MapT, R | None]],
        prepare: Callable[[pb.CreateTableRequest, float], Awaitable[Creation]],
        request: pb.CreateTableRequest,
        deadline: float,
    ) -> R:
        """Changes the map as `decide` says, which returns None if it needs a (newer) timestamp. It
        gets none at first: if nothing has to be changed, the oracle is not needed."""
        creation = Creation(request, created_at=0, deletions=-1)
        while (decided := await self._store.change(partial(decide, creation))) is None:
            creation = await prepare(request, deadline)
        return decided

    def _require_valid(self, request: pb.CreateTableRequest) -> None:
        _require_request_id(request.request_id)
        require_table_name("name", request.name)
        require_splits("splits", request.splits)
        self._check_options(request.options)
        require_indexes("indexes", request.indexes)

    @abstractmethod
    def _with_new_table(self, current: MapT, creation: Creation) -> tuple[MapT, Table]:
        """The map with the table, or an error if it would be too large."""

    @abstractmethod
    def _taken_out(self, current: MapT, table: Table) -> MapT:
        """The map with a table that is being deleted."""

    @abstractmethod
    async def _until_current(self, table: Table, deadline: float) -> None:
        """Returns when the table can be used, and everybody judges under its version."""

    @abstractmethod
    def _are_in_use(self, name: str) -> bool:
        """True if deleted tables of that name may still be used somewhere."""

    @abstractmethod
    async def _until_out_of_use(self, name: str, deadline: float) -> None:
        """Returns when nothing of the deleted tables of that name can be read or acknowledged."""

    async def _prepared(self, request: pb.CreateTableRequest, deadline: float) -> Creation:
        """The timestamp that is needed before a table is created."""
        return await self._timestamped(request, deadline)

    async def _prepared_entries(self, count: int, deadline: float) -> Creation:
        """The timestamp that is needed before so many tables for entries are created."""
        return await self._timestamped(pb.CreateTableRequest(), deadline)

    async def _timestamped(self, request: pb.CreateTableRequest, deadline: float) -> Creation:
        """With a new timestamp."""
        deletions = self._deletions
        left = deadline - self._clock.monotonic_seconds()
        seconds = min(max(left, 0.001), _ORACLE_SECONDS)
        try:
            created_at = await self._oracle_time.source().get(timeout_seconds=seconds)
        except (NotExecuted, ExecutionUnknown) as error:
            raise NotReady(f"the oracle gave no timestamp for it: {error.message}") from error
        return Creation(request, created_at, deletions)

    def _decide_creation(
        self, creation: Creation, current: MapT
    ) -> tuple[MapT, tuple[Table, bool] | None]:
        """None instead of a table if it needs a timestamp above the last deletion. With an older
        one, a snapshot that has read a deleted table of this name could read the new one."""
        request = creation.request
        indexes = require_indexes("indexes", request.indexes)
        known = current.named(request.name)
        if known is not None:
            if request.request_id and request.request_id == known.created_by:
                return current, (known, True)  # by an earlier attempt, whose answer was lost
            if not request.exist_ok:
                raise table_exists(request.name)
            require_options(request.name, options_message(known), request.options)
            require_same_indexes(known.name, known.indexes, indexes)
            knows = request.knows_indexes or bool(indexes)
            require_knows_indexes(known, knows=knows)
            return _with_codecs(current, known, request.codecs), (known, False)
        if creation.deletions != self._deletions:
            return current, None
        changed, table = self._with_new_table(current, creation)
        awaited = current.awaited.get(table.name, ())
        table = replace(table, created_by=request.request_id, observers=awaited)
        # It has no rows, so nothing is missing in its indexes.
        rest = creation._replace(table_ids=creation.table_ids[1:])
        return self._with_indexes(changed, table, indexes, rest, ready_at=table.created_at)

    async def delete(self, request: pb.DeleteTableRequest, deadline: float) -> bool:
        """Returns when nothing of the table can be read or acknowledged any more. What is left of
        it is removed later. False if there was none."""
        _require_request_id(request.request_id)
        name = request.name

        def decide(current: MapT) -> tuple[MapT, tuple[bool, Table | None]]:
            if request.request_id in current.deletions:
                return current, (True, None)  # by an earlier attempt, whose answer was lost
            table = current.named(name)
            if table is None:
                if any(map(self._are_in_use, self._deleted_names(current, name))):
                    # Another call dropped it, and may have given up waiting.
                    return current.with_deletion(request.request_id), (True, None)
                if request.missing_ok:
                    return current, (False, None)
                raise SchemaError(f"there is no table {name!r}")
            require_no_entries(name, table.index_of)
            noted = current.with_deletion(request.request_id)
            gone = [table, *(one for one in current.entries(table.table_id) if one.is_used)]
            return self._without(noted, gone), (True, table)

        deleted, table = await self._store.change(decide)
        if table is not None:
            _log.info("table being deleted", table=table.name, table_id=table.table_id)
        try:
            # Also if nothing changed: the call that made the change may have given up waiting.
            for one in self._deleted_names(self._store.current, name):
                await self._until_out_of_use(one, deadline)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"table {name!r} is dropped, but this is not in force everywhere yet: "
                f"{error.message}; to wait for it, drop the table again"
            ) from error
        return deleted

    async def change_observers(self, request: pb.ChangeObserversRequest, deadline: float) -> Table:
        """Returns when everybody judges under the new version, so no commit is missed."""

        def decide(current: MapT) -> tuple[MapT, Table]:
            if request.awaited and current.named(request.table) is None:
                return _awaiting(current, request)
            table = _alterable(current.table(request.table))
            current = _known_at_their_table(current, request)
            change = changed_observers(table_message(table), request)
            observers = observers_of(change.observers)
            if observers == table.observers:
                return current, table
            version = table.schema_version + change.raises_version
            changed = replace(table, observers=observers, schema_version=version)
            return current.with_tables(changed), changed

        table = await self._store.change(decide)
        if table.table_id:
            # Also if nothing changed: the call that made the change may have given up waiting.
            await self._until_registered(table, deadline)
        return table

    async def report_backfill(self, request: pb.ReportBackfillRequest, deadline: float) -> Table:
        """Returns, when a backfill begins, only when everybody judges under the version that owes
        it: otherwise a commit that notifies nobody could come after the backfill's snapshot."""

        def decide(current: MapT) -> tuple[MapT, Table]:
            table = by_id(current, request.table_id)
            observers = observers_of(with_report(observer_messages(table.observers), request))
            if observers == table.observers:
                return current, table
            changed = replace(table, observers=observers)
            return current.with_tables(changed), changed

        table = await self._store.change(decide)
        if not request.HasField("row") and not request.done:
            await self._until_registered(table, deadline)
        return table

    async def _until_registered(self, table: Table, deadline: float) -> None:
        """Returns when no transaction can commit that does not know the table's observers."""
        await self._until_current(table, deadline)

    async def set_change_feed(self, request: pb.SetChangeFeedRequest, deadline: float) -> Table:
        """Returns when everybody follows the new version, so no commit is left out."""
        return await self._changed(
            request.table,
            lambda table: (replace(table, change_feed=request.change_feed), True),
            deadline,
        )

    async def set_ttls(self, request: pb.SetTtlsRequest, deadline: float) -> Table:
        """Returns when everybody follows the new version: then all reads are judged by it."""

        def change(table: Table) -> tuple[Table, bool]:
            before = ttl_messages(table)
            ttls = changed_ttls(before, request.ttls)
            require_ttls_kept(table.name, table.indexes, before, ttls)
            return replace(table, ttls=ttls_of(ttls)), True

        return await self._changed(request.table, change, deadline)

    async def _changed(
        self, name: str, change: Callable[[Table], tuple[Table, bool]], deadline: float
    ) -> Table:
        """Changes the schema of a table. `change` also says whether that raises its version.
        Returns when everybody follows the new version."""

        def decide(current: MapT) -> tuple[MapT, Table]:
            table = _alterable(current.table(name))
            changed, raises_version = change(table)
            if changed == table:
                return current, table
            changed = replace(changed, schema_version=table.schema_version + raises_version)
            return current.with_tables(changed), changed

        table = await self._store.change(decide)
        # Also if nothing changed: the call that made the change may have given up waiting.
        await self._until_current(table, deadline)
        return table

    async def declare_codecs(self, request: pb.DeclareCodecsRequest) -> Table:
        """Records codecs. The first declaration wins: a program with another codec is refused.

        The version of the schema stays: a program that does not know the codec of a column asks
        before it writes there.
        """

        def decide(current: MapT) -> tuple[MapT, Table]:
            table = _alterable(by_id(current, request.table_id))
            changed = _with_codecs(current, table, request.codecs)
            return changed, changed.tables[table.table_id]

        return await self._store.change(decide)

    async def change_codecs(self, request: pb.ChangeCodecsRequest, deadline: float) -> Table:
        """Returns when everybody follows the new version: then whoever has written under another
        name learns of it when they commit."""

        def change(table: Table) -> tuple[Table, bool]:
            codecs = table.codecs.changed(request)
            require_codecs_kept(table.name, table.indexes, codecs)
            return replace(table, codecs=codecs), table.codecs.contradicts(codecs)

        return await self._changed(request.table, change, deadline)

    # ------------------------------------------------------------------------- indexes

    async def change_indexes(self, request: pb.ChangeIndexesRequest, deadline: float) -> Table:
        """Returns when everybody follows the new version, so no commit leaves an index out.

        The entries of an index that is removed are deleted when everybody follows a version without
        it: until then, commits write entries, and their tables have to be there. If a call gives up
        waiting for that, the next one deletes them.
        """

        def remove(current: MapT) -> tuple[MapT, tuple[Table, list[int]]]:
            table = current.table(request.table)
            entries = current.entries(table.table_id)
            kept = changed_indexes(
                table_message(table), request, {one.name for one in entries}
            ).kept
            if kept != table.indexes:
                table = replace(table, indexes=kept, schema_version=table.schema_version + 1)
                current = current.with_tables(table)
            used = {one.table_id for one in kept}
            left = [one.table_id for one in entries if one.is_used and one.table_id not in used]
            return current, (table, left)

        def delete(left: list[int], current: MapT) -> tuple[MapT, None]:
            tables = (current.tables.get(table_id) for table_id in left)
            return self._without(current, [one for one in tables if one and one.is_used]), None

        def add(table_id: int, creation: Creation, current: MapT) -> tuple[MapT, Table | None]:
            table = by_id(current, table_id)
            missing = pb.ChangeIndexesRequest(add=request.add)
            added = changed_indexes(table_message(table), missing).added
            if not added:
                return current, table
            if creation.deletions != self._deletions or (added, table.ttls) != expected:
                return current, None
            changed = replace(table, schema_version=table.schema_version + 1)
            changed_map, (made, _) = self._with_indexes(current, changed, added, creation)
            return changed_map, made

        expected: tuple[tuple[IndexDefinition, ...], tuple[tuple[bytes, int], ...]] | None = None

        async def prepared(request: pb.CreateTableRequest, deadline: float) -> Creation:
            # A tablet that has not heard of a longer time to live would say that a value is gone
            # which the build finds: the commit would leave out its entry.
            nonlocal expected
            known = by_id(self._store.current, table.table_id)
            await self._until_current(known, deadline)
            missing = pb.ChangeIndexesRequest(add=request.indexes)
            added = changed_indexes(table_message(known), missing).added
            expected = added, known.ttls
            return await self._prepared_entries(len(added), deadline)

        table, left = await self._store.change(remove)
        if left:
            await self._until_registered(table, deadline)
            await self._store.change(partial(delete, left))
        if request.add:
            table = await self._decided(
                partial(add, table.table_id),
                prepared,
                pb.CreateTableRequest(indexes=request.add),
                deadline,
            )
        # Also if nothing changed: the call that made the change may have given up waiting.
        await self._until_registered(table, deadline)
        await self._until_indexed(table, deadline)
        for name in (*(one.name for one in request.remove), *(one.name for one in request.add)):
            await self._until_out_of_use(entries_name(table.table_id, name), deadline)
        return table

    def _with_indexes(
        self,
        current: MapT,
        table: Table,
        added: Sequence[IndexDefinition],
        creation: Creation,
        ready_at: int = 0,
    ) -> tuple[MapT, tuple[Table, bool]]:
        """The map with this version of a table, which gets these indexes, and tables for their
        entries. Returns that version, and that there is a new one."""
        made: list[IndexDefinition] = []
        for number, one in enumerate(added):
            request = pb.CreateTableRequest(
                name=entries_name(table.table_id, one.name),
                options=pb.TableOptions(
                    retention_milliseconds=table.retention_milliseconds,
                    ttls=entries_ttls(one, ttl_messages(table)),
                ),
            )
            ids = creation.table_ids[number:]
            current, entries = self._with_new_table(
                current, creation._replace(request=request, table_ids=ids)
            )
            current = current.with_tables(replace(entries, index_of=table.table_id))
            made.append(replace(one, table_id=entries.table_id, ready_at=ready_at))
        table = replace(
            table,
            indexes=tuple(sorted((*table.indexes, *made), key=lambda one: one.name)),
            codecs=with_index_codecs(table.name, table.codecs, added),
        )
        return current.with_tables(table), (table, True)

    async def _until_indexed(self, table: Table, deadline: float) -> None:
        """Returns when the table and its indexes can be used, and everybody judges under their
        versions."""
        used = self._store.current.tables
        entries = (used.get(one.table_id) for one in table.indexes)
        for one in (table, *(one for one in entries if one is not None)):
            await self._until_current(one, deadline)

    def _without(self, current: MapT, tables: Iterable[Table]) -> MapT:
        """The map after these tables were deleted."""
        for table in tables:
            self._deletions += 1
            current = self._taken_out(current, table.dropped())
        return current

    def _deleted_names(self, current: MapT, name: str) -> list[str]:
        """The name of tables that were deleted, and the names of those of their indexes."""
        indexes = (
            entries_name(table.table_id, one.name)
            for table in current.deleted(name)
            for one in table.indexes
        )
        return [name, *indexes]

    def _check_options(self, options: pb.TableOptions) -> None:
        require_ttls("options.ttls", options.ttls)
        require_retention(options)
        retention = options.retention_milliseconds
        if 0 < retention < self._retention_min:
            raise InvalidArgument(
                "options.retention_milliseconds",
                f"is {retention}, below {self._retention_min}: long transactions would lose the "
                "history that they read",
            )
        if 0 < options.split_bytes < SPLIT_BYTES_MIN:
            raise InvalidArgument(
                "options.split_bytes",
                f"is {options.split_bytes}; expected 0, or at least {SPLIT_BYTES_MIN}",
            )


def _alterable(table: Table) -> Table:
    require_no_entries(table.name, table.index_of)
    return table


def by_id(current: Catalogue, table_id: int) -> Table:
    """The table of that id. Raises `SchemaError` if there is none."""
    table = current.tables.get(table_id)
    if table is None or table.deleting:
        raise SchemaError(f"there is no table with the id {table_id}", table_id=table_id)
    return table


def _awaiting(current: MapT, request: pb.ChangeObserversRequest) -> tuple[MapT, Table]:
    """The map with observers of a table that does not exist yet, and what stands for that table."""
    require_table_name("table", request.table)
    known = current.awaited.get(request.table, ())
    observers = observers_of(awaited_observers(request.table, observer_messages(known), request))
    if observers == known:
        return current, Table(0, request.table, observers=known)
    if request.table not in current.awaited and len(current.awaited) >= AWAITED_MAX:
        raise InvalidArgument(
            "table", f"{AWAITED_MAX} tables that do not exist already have observers"
        )
    return current.with_awaited(request.table, observers), Table(
        0, request.table, observers=observers
    )


def _known_at_their_table(current: MapT, request: pb.ChangeObserversRequest) -> MapT:
    """The map without observers in advance that are now registered with their table, or removed.

    Until then they stay: a table that is dropped and created again before its worker has seen it is
    created with them each time.
    """
    awaited = current.awaited.get(request.table, ())
    names = {one.name for one in request.add}.union(request.remove)
    left = tuple(one for one in awaited if one.name not in names)
    return current if left == awaited else current.with_awaited(request.table, left)


def _require_request_id(request_id: bytes) -> None:
    if len(request_id) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument("request_id", f"is longer than {REQUEST_ID_BYTES_MAX} bytes")


def _with_codecs(current: MapT, table: Table, declared: pb.Codecs) -> MapT:
    codecs = table.codecs.declared(table.name, declared)
    if codecs == table.codecs:
        return current
    return current.with_tables(replace(table, codecs=codecs))
