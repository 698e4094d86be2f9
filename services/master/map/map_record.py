"""The map as it is stored and sent. docs/formats.md says where it is stored."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from percolator.codec_names import CodecNames
from percolator.errors import StoreFault, StoreUnusable
from percolator.services.master.map.catalogue import (
    Catalogue,
    Observer,
    OwedBackfill,
    Table,
    TableLoad,
)
from percolator.services.master.map.cluster_map import ClusterMap, Tablet
from percolator.v1 import errors_pb2, master_pb2, master_records_pb2
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.tabletserver_pb2 import ColumnTtl


def encode(current: ClusterMap) -> bytes:
    """The bytes of the value "map"."""
    record = master_records_pb2.MapRecord(
        next_id=current.next_id,
        tables=[table_message(table) for table in current.tables.values()],
        tablets=[_tablet_record(tablet) for tablet in current.tablets.values()],
        draining=sorted(current.draining),
        retired=[
            master_records_pb2.RetiredTablet(table_id=table, tablet_id=tablet)
            for table, tablet in current.retired
        ],
        deletions=current.deletions,
        awaited=awaited_messages(current),
    )
    return record.SerializeToString(deterministic=True)


def decode(data: bytes) -> ClusterMap:
    """Raises `StoreUnusable` or `InvariantViolation` if `encode` cannot have written it."""
    record = _parsed(data)
    return ClusterMap(
        next_id=record.next_id,
        tables={table.table_id: _table(table) for table in record.tables},
        tablets={tablet.tablet_id: _tablet(tablet) for tablet in record.tablets},
        draining=frozenset(record.draining),
        retired=tuple((one.table_id, one.tablet_id) for one in record.retired),
        deletions=tuple(record.deletions),
        awaited=_awaited(record),
    )


def encode_catalogue(current: Catalogue) -> bytes:
    """The same of a cluster without tablets."""
    record = master_records_pb2.MapRecord(
        next_id=current.next_id,
        tables=[table_message(table) for table in current.tables.values()],
        load_floor=current.load_floor,
        deletions=current.deletions,
        awaited=awaited_messages(current),
    )
    return record.SerializeToString(deterministic=True)


def decode_catalogue(data: bytes) -> Catalogue:
    """Raises `StoreUnusable` if `encode_catalogue` cannot have written it."""
    record = _parsed(data)
    tables = {table.table_id: _table(table) for table in record.tables}
    return Catalogue(
        record.next_id,
        tables,
        load_floor=record.load_floor,
        deletions=tuple(record.deletions),
        awaited=_awaited(record),
    )


def _parsed(data: bytes) -> master_records_pb2.MapRecord:
    try:
        return master_records_pb2.MapRecord.FromString(data)
    except DecodeError as error:
        raise StoreUnusable(
            f"the master's map is damaged: {error}", fault=StoreFault.DAMAGED
        ) from None


def table_message(table: Table, tablets: int = 0) -> master_pb2.Table:
    """A table as clients see it."""
    return master_pb2.Table(
        table_id=table.table_id,
        name=table.name,
        schema_version=table.schema_version,
        options=options_message(table),
        observers=observer_messages(table.observers),
        tablets=tablets,
        deleting=table.deleting,
        created_at=table.created_at,
        codecs=codecs_message(table),
        load=_load_message(table),
        created_by=table.created_by,
    )


def _load_message(table: Table) -> master_pb2.TableLoad | None:
    if table.load is None:
        return None
    name, run, commit = table.load.name, table.load.run, table.load.commit_timestamp
    return master_pb2.TableLoad(name=name, run=run, commit_timestamp=commit)


def codecs_message(table: Table) -> master_pb2.Codecs | None:
    """The codecs that were declared; absent if none were, as in the maps of earlier releases."""
    return table.codecs.message() if table.codecs else None


def options_message(table: Table) -> master_pb2.TableOptions:
    return master_pb2.TableOptions(
        retention_milliseconds=table.retention_milliseconds,
        split_bytes=table.split_bytes,
        change_feed=table.change_feed,
        ttls=ttl_messages(table),
    )


def ttl_messages(table: Table) -> list[ColumnTtl]:
    return [ColumnTtl(column=column, ttl_milliseconds=ttl) for column, ttl in table.ttls]


def ttls_of(messages: Iterable[ColumnTtl]) -> tuple[tuple[bytes, int], ...]:
    """Ordered by column, as tables keep them."""
    return tuple(sorted((one.column, one.ttl_milliseconds) for one in messages))


def observer_messages(observers: Iterable[Observer]) -> list[master_pb2.Observer]:
    return [
        master_pb2.Observer(
            name=one.name,
            columns=one.columns,
            weak=one.weak,
            paused=one.paused,
            backfill=one.backfill,
            owed=None if one.owed is None else _owed_message(one.owed),
        )
        for one in observers
    ]


def _owed_message(owed: OwedBackfill) -> master_pb2.OwedBackfill:
    return master_pb2.OwedBackfill(
        version=owed.version, columns=owed.columns, row=owed.row, cells=owed.cells
    )


def observers_of(messages: Iterable[master_pb2.Observer]) -> tuple[Observer, ...]:
    return tuple(
        Observer(
            one.name,
            tuple(one.columns),
            one.weak,
            one.paused,
            one.backfill,
            _owed(one.owed) if one.HasField("owed") else None,
        )
        for one in messages
    )


def _owed(owed: master_pb2.OwedBackfill) -> OwedBackfill:
    return OwedBackfill(owed.version, tuple(owed.columns), owed.row, owed.cells)


def awaited_messages(current: Catalogue) -> list[master_pb2.Table]:
    """The observers of tables that do not exist yet, by the name of the table."""
    return [
        master_pb2.Table(name=name, observers=observer_messages(observers))
        for name, observers in sorted(current.awaited.items())
    ]


def _awaited(record: master_records_pb2.MapRecord) -> dict[str, tuple[Observer, ...]]:
    return {table.name: observers_of(table.observers) for table in record.awaited}


def location_message(tablet: Tablet, *, served: bool = True) -> errors_pb2.TabletLocation:
    """Where a tablet is; without an address if no server serves it."""
    return errors_pb2.TabletLocation(
        table_id=tablet.table_id,
        tablet_id=tablet.tablet_id,
        epoch=tablet.epoch,
        range=RowRange(start=tablet.start, end=tablet.end),
        address=tablet.address if served else "",
    )


def _table(table: master_pb2.Table) -> Table:
    return Table(
        table_id=table.table_id,
        name=table.name,
        schema_version=table.schema_version,
        retention_milliseconds=table.options.retention_milliseconds,
        split_bytes=table.options.split_bytes,
        observers=observers_of(table.observers),
        deleting=table.deleting,
        created_at=table.created_at,
        change_feed=table.options.change_feed,
        ttls=ttls_of(table.options.ttls),
        codecs=CodecNames.of(table.codecs),
        load=_load(table),
        created_by=table.created_by,
    )


def _load(table: master_pb2.Table) -> TableLoad | None:
    if not table.HasField("load"):
        return None
    return TableLoad(table.load.name, table.load.run, table.load.commit_timestamp)


def _tablet_record(tablet: Tablet) -> master_records_pb2.TabletRecord:
    return master_records_pb2.TabletRecord(
        tablet_id=tablet.tablet_id,
        table_id=tablet.table_id,
        epoch=tablet.epoch,
        range=RowRange(start=tablet.start, end=tablet.end),
        server_id=tablet.server_id,
        address=tablet.address,
        exists=tablet.exists,
        origin_tablet_id=tablet.origin_tablet_id,
        origin_epoch=tablet.origin_epoch,
        served_epoch=tablet.served_epoch,
    )


def _tablet(record: master_records_pb2.TabletRecord) -> Tablet:
    return Tablet(
        tablet_id=record.tablet_id,
        table_id=record.table_id,
        start=record.range.start,
        end=record.range.end,
        epoch=record.epoch,
        server_id=record.server_id,
        address=record.address,
        exists=record.exists,
        origin_tablet_id=record.origin_tablet_id,
        origin_epoch=record.origin_epoch,
        served_epoch=record.served_epoch,
    )
