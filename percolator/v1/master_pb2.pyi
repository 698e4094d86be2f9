from percolator.v1 import cells_pb2 as _cells_pb2
from percolator.v1 import errors_pb2 as _errors_pb2
from percolator.v1 import tabletserver_pb2 as _tabletserver_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Observer(_message.Message):
    __slots__ = ("name", "columns", "weak", "paused", "backfill", "owed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    WEAK_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    BACKFILL_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    name: str
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    weak: bool
    paused: bool
    backfill: bool
    owed: OwedBackfill
    def __init__(self, name: _Optional[str] = ..., columns: _Optional[_Iterable[bytes]] = ..., weak: bool = ..., paused: bool = ..., backfill: bool = ..., owed: _Optional[_Union[OwedBackfill, _Mapping]] = ...) -> None: ...

class OwedBackfill(_message.Message):
    __slots__ = ("version", "columns", "row", "cells")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    version: int
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    row: bytes
    cells: int
    def __init__(self, version: _Optional[int] = ..., columns: _Optional[_Iterable[bytes]] = ..., row: _Optional[bytes] = ..., cells: _Optional[int] = ...) -> None: ...

class TableOptions(_message.Message):
    __slots__ = ("retention_milliseconds", "split_bytes", "change_feed", "ttls")
    RETENTION_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FEED_FIELD_NUMBER: _ClassVar[int]
    TTLS_FIELD_NUMBER: _ClassVar[int]
    retention_milliseconds: int
    split_bytes: int
    change_feed: bool
    ttls: _containers.RepeatedCompositeFieldContainer[_tabletserver_pb2.ColumnTtl]
    def __init__(self, retention_milliseconds: _Optional[int] = ..., split_bytes: _Optional[int] = ..., change_feed: bool = ..., ttls: _Optional[_Iterable[_Union[_tabletserver_pb2.ColumnTtl, _Mapping]]] = ...) -> None: ...

class ColumnCodec(_message.Message):
    __slots__ = ("column", "codec")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    column: bytes
    codec: str
    def __init__(self, column: _Optional[bytes] = ..., codec: _Optional[str] = ...) -> None: ...

class Codecs(_message.Message):
    __slots__ = ("key", "columns")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    key: str
    columns: _containers.RepeatedCompositeFieldContainer[ColumnCodec]
    def __init__(self, key: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[ColumnCodec, _Mapping]]] = ...) -> None: ...

class Index(_message.Message):
    __slots__ = ("name", "columns", "unique", "table_id", "ready_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    READY_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    columns: _containers.RepeatedCompositeFieldContainer[ColumnCodec]
    unique: bool
    table_id: int
    ready_at: int
    def __init__(self, name: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[ColumnCodec, _Mapping]]] = ..., unique: bool = ..., table_id: _Optional[int] = ..., ready_at: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("table_id", "name", "schema_version", "options", "observers", "tablets", "deleting", "created_at", "codecs", "load", "created_by", "indexes", "index_of")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    TABLETS_FIELD_NUMBER: _ClassVar[int]
    DELETING_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    INDEX_OF_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    name: str
    schema_version: int
    options: TableOptions
    observers: _containers.RepeatedCompositeFieldContainer[Observer]
    tablets: int
    deleting: bool
    created_at: int
    codecs: Codecs
    load: TableLoad
    created_by: bytes
    indexes: _containers.RepeatedCompositeFieldContainer[Index]
    index_of: int
    def __init__(self, table_id: _Optional[int] = ..., name: _Optional[str] = ..., schema_version: _Optional[int] = ..., options: _Optional[_Union[TableOptions, _Mapping]] = ..., observers: _Optional[_Iterable[_Union[Observer, _Mapping]]] = ..., tablets: _Optional[int] = ..., deleting: bool = ..., created_at: _Optional[int] = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ..., load: _Optional[_Union[TableLoad, _Mapping]] = ..., created_by: _Optional[bytes] = ..., indexes: _Optional[_Iterable[_Union[Index, _Mapping]]] = ..., index_of: _Optional[int] = ...) -> None: ...

class TableLoad(_message.Message):
    __slots__ = ("name", "run", "commit_timestamp")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    name: str
    run: int
    commit_timestamp: int
    def __init__(self, name: _Optional[str] = ..., run: _Optional[int] = ..., commit_timestamp: _Optional[int] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("name", "splits", "options", "exist_ok", "codecs", "request_id", "indexes", "knows_indexes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    EXIST_OK_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    KNOWS_INDEXES_FIELD_NUMBER: _ClassVar[int]
    name: str
    splits: _containers.RepeatedScalarFieldContainer[bytes]
    options: TableOptions
    exist_ok: bool
    codecs: Codecs
    request_id: bytes
    indexes: _containers.RepeatedCompositeFieldContainer[Index]
    knows_indexes: bool
    def __init__(self, name: _Optional[str] = ..., splits: _Optional[_Iterable[bytes]] = ..., options: _Optional[_Union[TableOptions, _Mapping]] = ..., exist_ok: bool = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ..., request_id: _Optional[bytes] = ..., indexes: _Optional[_Iterable[_Union[Index, _Mapping]]] = ..., knows_indexes: bool = ...) -> None: ...

class CreateTableResponse(_message.Message):
    __slots__ = ("table", "created")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    table: Table
    created: bool
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ..., created: bool = ...) -> None: ...

class DeleteTableRequest(_message.Message):
    __slots__ = ("name", "missing_ok", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MISSING_OK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    missing_ok: bool
    request_id: bytes
    def __init__(self, name: _Optional[str] = ..., missing_ok: bool = ..., request_id: _Optional[bytes] = ...) -> None: ...

class DeleteTableResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...

class ListTablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTablesResponse(_message.Message):
    __slots__ = ("tables", "awaited")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    awaited: _containers.RepeatedCompositeFieldContainer[Table]
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., awaited: _Optional[_Iterable[_Union[Table, _Mapping]]] = ...) -> None: ...

class DescribeTableRequest(_message.Message):
    __slots__ = ("name", "table_id", "knows_indexes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWS_INDEXES_FIELD_NUMBER: _ClassVar[int]
    name: str
    table_id: int
    knows_indexes: bool
    def __init__(self, name: _Optional[str] = ..., table_id: _Optional[int] = ..., knows_indexes: bool = ...) -> None: ...

class DescribeTableResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class ChangeObserversRequest(_message.Message):
    __slots__ = ("table", "add", "remove", "pause", "resume", "replace", "awaited")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    table: str
    add: _containers.RepeatedCompositeFieldContainer[Observer]
    remove: _containers.RepeatedScalarFieldContainer[str]
    pause: _containers.RepeatedScalarFieldContainer[str]
    resume: _containers.RepeatedScalarFieldContainer[str]
    replace: bool
    awaited: bool
    def __init__(self, table: _Optional[str] = ..., add: _Optional[_Iterable[_Union[Observer, _Mapping]]] = ..., remove: _Optional[_Iterable[str]] = ..., pause: _Optional[_Iterable[str]] = ..., resume: _Optional[_Iterable[str]] = ..., replace: bool = ..., awaited: bool = ...) -> None: ...

class ChangeObserversResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class ReportBackfillRequest(_message.Message):
    __slots__ = ("table_id", "observer", "version", "row", "cells", "done")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    observer: str
    version: int
    row: bytes
    cells: int
    done: bool
    def __init__(self, table_id: _Optional[int] = ..., observer: _Optional[str] = ..., version: _Optional[int] = ..., row: _Optional[bytes] = ..., cells: _Optional[int] = ..., done: bool = ...) -> None: ...

class ReportBackfillResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class SetChangeFeedRequest(_message.Message):
    __slots__ = ("table", "change_feed")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FEED_FIELD_NUMBER: _ClassVar[int]
    table: str
    change_feed: bool
    def __init__(self, table: _Optional[str] = ..., change_feed: bool = ...) -> None: ...

class SetChangeFeedResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class DeclareCodecsRequest(_message.Message):
    __slots__ = ("table_id", "codecs")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    codecs: Codecs
    def __init__(self, table_id: _Optional[int] = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ...) -> None: ...

class DeclareCodecsResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class ChangeCodecsRequest(_message.Message):
    __slots__ = ("table", "key", "columns")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    table: str
    key: str
    columns: _containers.RepeatedCompositeFieldContainer[ColumnCodec]
    def __init__(self, table: _Optional[str] = ..., key: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[ColumnCodec, _Mapping]]] = ...) -> None: ...

class ChangeCodecsResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class ChangeIndexesRequest(_message.Message):
    __slots__ = ("table", "add", "remove")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    table: str
    add: _containers.RepeatedCompositeFieldContainer[Index]
    remove: _containers.RepeatedCompositeFieldContainer[RemovedIndex]
    def __init__(self, table: _Optional[str] = ..., add: _Optional[_Iterable[_Union[Index, _Mapping]]] = ..., remove: _Optional[_Iterable[_Union[RemovedIndex, _Mapping]]] = ...) -> None: ...

class RemovedIndex(_message.Message):
    __slots__ = ("name", "table_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    table_id: int
    def __init__(self, name: _Optional[str] = ..., table_id: _Optional[int] = ...) -> None: ...

class ChangeIndexesResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class SetTtlsRequest(_message.Message):
    __slots__ = ("table", "ttls")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TTLS_FIELD_NUMBER: _ClassVar[int]
    table: str
    ttls: _containers.RepeatedCompositeFieldContainer[_tabletserver_pb2.ColumnTtl]
    def __init__(self, table: _Optional[str] = ..., ttls: _Optional[_Iterable[_Union[_tabletserver_pb2.ColumnTtl, _Mapping]]] = ...) -> None: ...

class SetTtlsResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class BeginLoadRequest(_message.Message):
    __slots__ = ("table", "load", "run", "resume")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    table: CreateTableRequest
    load: str
    run: int
    resume: bool
    def __init__(self, table: _Optional[_Union[CreateTableRequest, _Mapping]] = ..., load: _Optional[str] = ..., run: _Optional[int] = ..., resume: bool = ...) -> None: ...

class BeginLoadResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class PublishLoadsRequest(_message.Message):
    __slots__ = ("loads",)
    class Loaded(_message.Message):
        __slots__ = ("table_id", "run", "commit_timestamp")
        TABLE_ID_FIELD_NUMBER: _ClassVar[int]
        RUN_FIELD_NUMBER: _ClassVar[int]
        COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
        table_id: int
        run: int
        commit_timestamp: int
        def __init__(self, table_id: _Optional[int] = ..., run: _Optional[int] = ..., commit_timestamp: _Optional[int] = ...) -> None: ...
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[PublishLoadsRequest.Loaded]
    def __init__(self, loads: _Optional[_Iterable[_Union[PublishLoadsRequest.Loaded, _Mapping]]] = ...) -> None: ...

class PublishLoadsResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ...) -> None: ...

class AbandonLoadRequest(_message.Message):
    __slots__ = ("table", "load", "run")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    table: str
    load: str
    run: int
    def __init__(self, table: _Optional[str] = ..., load: _Optional[str] = ..., run: _Optional[int] = ...) -> None: ...

class AbandonLoadResponse(_message.Message):
    __slots__ = ("found", "complete")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    found: bool
    complete: bool
    def __init__(self, found: bool = ..., complete: bool = ...) -> None: ...

class LocateTabletsRequest(_message.Message):
    __slots__ = ("table_id", "range", "limit", "even_deleting", "knows_indexes")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    EVEN_DELETING_FIELD_NUMBER: _ClassVar[int]
    KNOWS_INDEXES_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    range: _cells_pb2.RowRange
    limit: int
    even_deleting: bool
    knows_indexes: bool
    def __init__(self, table_id: _Optional[int] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., limit: _Optional[int] = ..., even_deleting: bool = ..., knows_indexes: bool = ...) -> None: ...

class LocateTabletsResponse(_message.Message):
    __slots__ = ("locations", "schema_version", "observers", "rest", "codecs", "ttls", "indexes")
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    TTLS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    locations: _containers.RepeatedCompositeFieldContainer[_errors_pb2.TabletLocation]
    schema_version: int
    observers: _containers.RepeatedCompositeFieldContainer[Observer]
    rest: _cells_pb2.RowRange
    codecs: Codecs
    ttls: _containers.RepeatedCompositeFieldContainer[_tabletserver_pb2.ColumnTtl]
    indexes: _containers.RepeatedCompositeFieldContainer[Index]
    def __init__(self, locations: _Optional[_Iterable[_Union[_errors_pb2.TabletLocation, _Mapping]]] = ..., schema_version: _Optional[int] = ..., observers: _Optional[_Iterable[_Union[Observer, _Mapping]]] = ..., rest: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ..., ttls: _Optional[_Iterable[_Union[_tabletserver_pb2.ColumnTtl, _Mapping]]] = ..., indexes: _Optional[_Iterable[_Union[Index, _Mapping]]] = ...) -> None: ...

class TabletInfo(_message.Message):
    __slots__ = ("location", "table", "server_id", "serving", "error", "statistics")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    location: _errors_pb2.TabletLocation
    table: str
    server_id: str
    serving: bool
    error: _errors_pb2.ErrorDetail
    statistics: _tabletserver_pb2.TabletStatistics
    def __init__(self, location: _Optional[_Union[_errors_pb2.TabletLocation, _Mapping]] = ..., table: _Optional[str] = ..., server_id: _Optional[str] = ..., serving: bool = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., statistics: _Optional[_Union[_tabletserver_pb2.TabletStatistics, _Mapping]] = ...) -> None: ...

class ListTabletsRequest(_message.Message):
    __slots__ = ("table", "after_tablet_id", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: str
    after_tablet_id: int
    limit: int
    def __init__(self, table: _Optional[str] = ..., after_tablet_id: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListTabletsResponse(_message.Message):
    __slots__ = ("tablets", "more")
    TABLETS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    tablets: _containers.RepeatedCompositeFieldContainer[TabletInfo]
    more: bool
    def __init__(self, tablets: _Optional[_Iterable[_Union[TabletInfo, _Mapping]]] = ..., more: bool = ...) -> None: ...

class SplitTabletRequest(_message.Message):
    __slots__ = ("tablet_id", "row")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    row: bytes
    def __init__(self, tablet_id: _Optional[int] = ..., row: _Optional[bytes] = ...) -> None: ...

class SplitTabletResponse(_message.Message):
    __slots__ = ("lower", "upper")
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    lower: _errors_pb2.TabletLocation
    upper: _errors_pb2.TabletLocation
    def __init__(self, lower: _Optional[_Union[_errors_pb2.TabletLocation, _Mapping]] = ..., upper: _Optional[_Union[_errors_pb2.TabletLocation, _Mapping]] = ...) -> None: ...

class MoveTabletRequest(_message.Message):
    __slots__ = ("tablet_id", "server")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    server: str
    def __init__(self, tablet_id: _Optional[int] = ..., server: _Optional[str] = ...) -> None: ...

class MoveTabletResponse(_message.Message):
    __slots__ = ("location",)
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    location: _errors_pb2.TabletLocation
    def __init__(self, location: _Optional[_Union[_errors_pb2.TabletLocation, _Mapping]] = ...) -> None: ...

class DescribeCollectionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TableHistory(_message.Message):
    __slots__ = ("table", "table_id", "retention_milliseconds", "safe_point", "collected_below", "history_bytes", "cells_collected", "bytes_collected")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    SAFE_POINT_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_BELOW_FIELD_NUMBER: _ClassVar[int]
    HISTORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CELLS_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    table: str
    table_id: int
    retention_milliseconds: int
    safe_point: int
    collected_below: int
    history_bytes: int
    cells_collected: int
    bytes_collected: int
    def __init__(self, table: _Optional[str] = ..., table_id: _Optional[int] = ..., retention_milliseconds: _Optional[int] = ..., safe_point: _Optional[int] = ..., collected_below: _Optional[int] = ..., history_bytes: _Optional[int] = ..., cells_collected: _Optional[int] = ..., bytes_collected: _Optional[int] = ...) -> None: ...

class DescribeCollectionResponse(_message.Message):
    __slots__ = ("tables", "transactions_safe_point", "held_by", "held_by_session_id", "held_at", "error", "age_milliseconds", "held_milliseconds")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_SAFE_POINT_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    AGE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableHistory]
    transactions_safe_point: int
    held_by: str
    held_by_session_id: bytes
    held_at: int
    error: _errors_pb2.ErrorDetail
    age_milliseconds: int
    held_milliseconds: int
    def __init__(self, tables: _Optional[_Iterable[_Union[TableHistory, _Mapping]]] = ..., transactions_safe_point: _Optional[int] = ..., held_by: _Optional[str] = ..., held_by_session_id: _Optional[bytes] = ..., held_at: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., age_milliseconds: _Optional[int] = ..., held_milliseconds: _Optional[int] = ...) -> None: ...

class TabletServerInfo(_message.Message):
    __slots__ = ("server_id", "address", "tablets", "serving", "draining", "silence_milliseconds", "writes_refused")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TABLETS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    address: str
    tablets: int
    serving: int
    draining: bool
    silence_milliseconds: int
    writes_refused: _errors_pb2.ErrorDetail
    def __init__(self, server_id: _Optional[str] = ..., address: _Optional[str] = ..., tablets: _Optional[int] = ..., serving: _Optional[int] = ..., draining: bool = ..., silence_milliseconds: _Optional[int] = ..., writes_refused: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ListServersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListServersResponse(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[TabletServerInfo]
    def __init__(self, servers: _Optional[_Iterable[_Union[TabletServerInfo, _Mapping]]] = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("server", "undo")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    server: str
    undo: bool
    def __init__(self, server: _Optional[str] = ..., undo: bool = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
