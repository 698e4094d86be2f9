"""Creating and deleting tables, and changing who observes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from percolator.errors import InvalidArgument, SchemaError
from percolator.v1 import master_pb2 as wire
from percolator.wire.observer_change import changed_observers
from percolator.world import Clock
from services.master.assignment import Assignment
from services.master.cluster_map import ClusterMap, Table
from services.master.map_record import observer_messages, observers_of
from services.master.map_store import MapStore

NAME_BYTES_MAX = 255
ROW_BYTES_MAX = 4_096
RETENTION_MILLISECONDS_MAX = 100 * 365 * 86_400_000
SPLIT_BYTES_MIN = 64 << 10

_log = structlog.get_logger("percolator.master")


class Tables:
    """What the leading master does to tables. Bad requests change nothing."""

    def __init__(
        self,
        clock: Clock,
        store: MapStore,
        assignment: Assignment,
        *,
        tablets_max: int,
        retention_min_seconds: float,
    ) -> None:
        self._clock = clock
        self._store = store
        self._assignment = assignment
        self._tablets_max = tablets_max
        self._retention_min = round(retention_min_seconds * 1000)

    async def create(self, request: wire.CreateTableRequest, deadline: float) -> tuple[Table, bool]:
        """The table, and whether it was made just now. Its tablets are served."""
        _check_name("name", request.name)
        splits = list(request.splits)
        _check_splits(splits)
        self._check_options(request.options)

        def decide(current: ClusterMap) -> tuple[ClusterMap, tuple[Table, bool]]:
            known = current.named(request.name)
            if known is not None:
                if not request.exist_ok:
                    raise InvalidArgument("name", f"there is a table {request.name!r} already")
                return current, (known, False)
            if len(current.tablets) + len(splits) + 1 > self._tablets_max:
                raise InvalidArgument(
                    "splits", f"the cluster would have more than {self._tablets_max} tablets"
                )
            changed, table = current.with_new_table(
                request.name,
                splits,
                request.options.retention_milliseconds,
                request.options.split_bytes,
            )
            return changed, (table, True)

        table, created = await self._store.change(decide)
        if created:
            _log.info("table created", table=table.name, table_id=table.table_id)
        await self._until_served(table, deadline)
        return table, created

    async def delete(self, name: str, *, missing_ok: bool) -> Table | None:
        """Nobody can begin anything in the table from now on. What is left of it goes later.

        Its tablets get new epochs, which only those learn who clear up locks: with the old ones
        nobody gets an answer any more.
        """

        def decide(current: ClusterMap) -> tuple[ClusterMap, Table | None]:
            table = current.named(name)
            if table is None:
                if missing_ok:
                    return current, None
                raise SchemaError(f"there is no table {name!r}")
            changed = replace(table, deleting=True, schema_version=table.schema_version + 1)
            tablets = [
                one.given_to(one.server_id, one.address)
                for one in current.of_tables[table.table_id]
            ]
            return current.with_tables(changed).with_tablets(tablets), changed

        table = await self._store.change(decide)
        if table is not None:
            _log.info("table being deleted", table=table.name, table_id=table.table_id)
            self._assignment.wake()
        return table

    async def change_observers(
        self, request: wire.ChangeObserversRequest, deadline: float
    ) -> Table:
        """Returns when every tablet judges under the new version: no commit slips by."""

        def decide(current: ClusterMap) -> tuple[ClusterMap, Table]:
            table = current.table(request.table)
            change = changed_observers(table.name, observer_messages(table), request)
            observers = observers_of(change.observers)
            if observers == table.observers:
                return current, table
            version = table.schema_version + change.raises_version
            changed = replace(table, observers=observers, schema_version=version)
            return current.with_tables(changed), changed

        table = await self._store.change(decide)
        # Also when nothing was changed: whoever did it before may not have waited to the end.
        await self._until_served(table, deadline)
        return table

    def _check_options(self, options: wire.TableOptions) -> None:
        retention = options.retention_milliseconds
        if retention > RETENTION_MILLISECONDS_MAX:
            raise InvalidArgument("options.retention_milliseconds", "expected at most 100 years")
        if 0 < retention < self._retention_min:
            raise InvalidArgument(
                "options.retention_milliseconds",
                f"is {retention}, below {self._retention_min}: transactions that take as long "
                "would lose what they read",
            )
        if 0 < options.split_bytes < SPLIT_BYTES_MIN:
            raise InvalidArgument(
                "options.split_bytes", f"expected 0, or at least {SPLIT_BYTES_MIN}"
            )

    async def _until_served(self, table: Table, deadline: float) -> None:
        tablets = self._store.current.of_tables.get(table.table_id, ())
        await self._assignment.until_served([one.tablet_id for one in tablets], deadline)


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise InvalidArgument(field, f"expected 1 to {NAME_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument(field, f"{name!r} has characters that cannot be seen")


def _check_splits(splits: Sequence[bytes]) -> None:
    before = b""
    for index, row in enumerate(splits):
        if not row:
            raise InvalidArgument(f"splits[{index}]", "is empty: the first tablet begins there")
        if len(row) > ROW_BYTES_MAX:
            raise InvalidArgument(f"splits[{index}]", f"is longer than {ROW_BYTES_MAX} bytes")
        if row <= before:
            raise InvalidArgument(
                f"splits[{index}]", f"{row!r} does not come after {before!r}: expected ascending"
            )
        before = row
