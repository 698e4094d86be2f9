"""What a cluster is asked for when a table of an export is made: as messages."""

from __future__ import annotations

from collections.abc import Iterable

from percolator.backup.exported import ExportedTable
from percolator.errors import InvalidArgument
from percolator.observers.registry.observer_change import changed_observers
from percolator.v1.master_pb2 import (
    ChangeObserversRequest,
    Codecs,
    ColumnCodec,
    Observer,
    Table,
    TableOptions,
)


def options_of(table: ExportedTable) -> TableOptions:
    """The options that it had."""
    options = TableOptions(
        change_feed=table.change_feed,
        retention_milliseconds=table.retention_milliseconds,
        split_bytes=table.split_bytes,
    )
    for column, milliseconds in table.ttls:
        options.ttls.add(column=bytes.fromhex(column), ttl_milliseconds=milliseconds)
    return options


def codecs_of(table: ExportedTable) -> Codecs | None:
    """The codecs that its schema names; None if it says nothing."""
    if table.codecs is None:
        return None
    columns = [
        ColumnCodec(column=bytes.fromhex(column), codec=codec)
        for column, codec in table.codecs.columns
    ]
    return Codecs(key=table.codecs.key, columns=columns)


def observers_of(
    table: ExportedTable,
) -> tuple[ChangeObserversRequest, ChangeObserversRequest]:
    """What registers its observers, and what pauses some of them after that."""
    observers = [
        Observer(
            name=one.name,
            columns=[bytes.fromhex(column) for column in one.columns],
            weak=one.weak,
            paused=one.paused,
            backfill=one.backfill,
        )
        for one in table.observers
    ]
    paused = [one.name for one in table.observers if one.paused]
    return (
        ChangeObserversRequest(table=table.name, add=observers),
        ChangeObserversRequest(table=table.name, pause=paused),
    )


def require_observers(table: ExportedTable, present: Iterable[Observer]) -> None:
    """Raises `InvalidArgument` unless a table with these observers can get those of the export."""
    added, _ = observers_of(table)
    try:
        changed_observers(Table(name=table.name, observers=present), added)
    except InvalidArgument as error:
        reason = f"the observers of {table.name!r} cannot be registered: {error.reason}"
        raise InvalidArgument("tables", reason) from error
