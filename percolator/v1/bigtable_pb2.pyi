from google.protobuf import wrappers_pb2 as _wrappers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BigtableRowRange(_message.Message):
    __slots__ = ("start_key_closed", "end_key_open")
    START_KEY_CLOSED_FIELD_NUMBER: _ClassVar[int]
    END_KEY_OPEN_FIELD_NUMBER: _ClassVar[int]
    start_key_closed: bytes
    end_key_open: bytes
    def __init__(self, start_key_closed: _Optional[bytes] = ..., end_key_open: _Optional[bytes] = ...) -> None: ...

class BigtableRowSet(_message.Message):
    __slots__ = ("row_keys", "row_ranges")
    ROW_KEYS_FIELD_NUMBER: _ClassVar[int]
    ROW_RANGES_FIELD_NUMBER: _ClassVar[int]
    row_keys: _containers.RepeatedScalarFieldContainer[bytes]
    row_ranges: _containers.RepeatedCompositeFieldContainer[BigtableRowRange]
    def __init__(self, row_keys: _Optional[_Iterable[bytes]] = ..., row_ranges: _Optional[_Iterable[_Union[BigtableRowRange, _Mapping]]] = ...) -> None: ...

class BigtableColumnRange(_message.Message):
    __slots__ = ("family_name", "start_qualifier_closed", "end_qualifier_open")
    FAMILY_NAME_FIELD_NUMBER: _ClassVar[int]
    START_QUALIFIER_CLOSED_FIELD_NUMBER: _ClassVar[int]
    END_QUALIFIER_OPEN_FIELD_NUMBER: _ClassVar[int]
    family_name: str
    start_qualifier_closed: bytes
    end_qualifier_open: bytes
    def __init__(self, family_name: _Optional[str] = ..., start_qualifier_closed: _Optional[bytes] = ..., end_qualifier_open: _Optional[bytes] = ...) -> None: ...

class BigtableTimestampRange(_message.Message):
    __slots__ = ("start_timestamp_micros", "end_timestamp_micros")
    START_TIMESTAMP_MICROS_FIELD_NUMBER: _ClassVar[int]
    END_TIMESTAMP_MICROS_FIELD_NUMBER: _ClassVar[int]
    start_timestamp_micros: int
    end_timestamp_micros: int
    def __init__(self, start_timestamp_micros: _Optional[int] = ..., end_timestamp_micros: _Optional[int] = ...) -> None: ...

class BigtableValueRange(_message.Message):
    __slots__ = ("start_value_closed", "end_value_open")
    START_VALUE_CLOSED_FIELD_NUMBER: _ClassVar[int]
    END_VALUE_OPEN_FIELD_NUMBER: _ClassVar[int]
    start_value_closed: bytes
    end_value_open: bytes
    def __init__(self, start_value_closed: _Optional[bytes] = ..., end_value_open: _Optional[bytes] = ...) -> None: ...

class BigtableRowFilter(_message.Message):
    __slots__ = ("chain", "interleave", "column_range_filter", "timestamp_range_filter", "value_range_filter", "cells_per_row_offset_filter", "cells_per_column_limit_filter")
    class Chain(_message.Message):
        __slots__ = ("filters",)
        FILTERS_FIELD_NUMBER: _ClassVar[int]
        filters: _containers.RepeatedCompositeFieldContainer[BigtableRowFilter]
        def __init__(self, filters: _Optional[_Iterable[_Union[BigtableRowFilter, _Mapping]]] = ...) -> None: ...
    class Interleave(_message.Message):
        __slots__ = ("filters",)
        FILTERS_FIELD_NUMBER: _ClassVar[int]
        filters: _containers.RepeatedCompositeFieldContainer[BigtableRowFilter]
        def __init__(self, filters: _Optional[_Iterable[_Union[BigtableRowFilter, _Mapping]]] = ...) -> None: ...
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVE_FIELD_NUMBER: _ClassVar[int]
    COLUMN_RANGE_FILTER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_RANGE_FILTER_FIELD_NUMBER: _ClassVar[int]
    VALUE_RANGE_FILTER_FIELD_NUMBER: _ClassVar[int]
    CELLS_PER_ROW_OFFSET_FILTER_FIELD_NUMBER: _ClassVar[int]
    CELLS_PER_COLUMN_LIMIT_FILTER_FIELD_NUMBER: _ClassVar[int]
    chain: BigtableRowFilter.Chain
    interleave: BigtableRowFilter.Interleave
    column_range_filter: BigtableColumnRange
    timestamp_range_filter: BigtableTimestampRange
    value_range_filter: BigtableValueRange
    cells_per_row_offset_filter: int
    cells_per_column_limit_filter: int
    def __init__(self, chain: _Optional[_Union[BigtableRowFilter.Chain, _Mapping]] = ..., interleave: _Optional[_Union[BigtableRowFilter.Interleave, _Mapping]] = ..., column_range_filter: _Optional[_Union[BigtableColumnRange, _Mapping]] = ..., timestamp_range_filter: _Optional[_Union[BigtableTimestampRange, _Mapping]] = ..., value_range_filter: _Optional[_Union[BigtableValueRange, _Mapping]] = ..., cells_per_row_offset_filter: _Optional[int] = ..., cells_per_column_limit_filter: _Optional[int] = ...) -> None: ...

class BigtableMutation(_message.Message):
    __slots__ = ("set_cell", "delete_from_column")
    class SetCell(_message.Message):
        __slots__ = ("family_name", "column_qualifier", "timestamp_micros", "value")
        FAMILY_NAME_FIELD_NUMBER: _ClassVar[int]
        COLUMN_QUALIFIER_FIELD_NUMBER: _ClassVar[int]
        TIMESTAMP_MICROS_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        family_name: str
        column_qualifier: bytes
        timestamp_micros: int
        value: bytes
        def __init__(self, family_name: _Optional[str] = ..., column_qualifier: _Optional[bytes] = ..., timestamp_micros: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    class DeleteFromColumn(_message.Message):
        __slots__ = ("family_name", "column_qualifier", "time_range")
        FAMILY_NAME_FIELD_NUMBER: _ClassVar[int]
        COLUMN_QUALIFIER_FIELD_NUMBER: _ClassVar[int]
        TIME_RANGE_FIELD_NUMBER: _ClassVar[int]
        family_name: str
        column_qualifier: bytes
        time_range: BigtableTimestampRange
        def __init__(self, family_name: _Optional[str] = ..., column_qualifier: _Optional[bytes] = ..., time_range: _Optional[_Union[BigtableTimestampRange, _Mapping]] = ...) -> None: ...
    SET_CELL_FIELD_NUMBER: _ClassVar[int]
    DELETE_FROM_COLUMN_FIELD_NUMBER: _ClassVar[int]
    set_cell: BigtableMutation.SetCell
    delete_from_column: BigtableMutation.DeleteFromColumn
    def __init__(self, set_cell: _Optional[_Union[BigtableMutation.SetCell, _Mapping]] = ..., delete_from_column: _Optional[_Union[BigtableMutation.DeleteFromColumn, _Mapping]] = ...) -> None: ...

class BigtableCheckAndMutateRowRequest(_message.Message):
    __slots__ = ("table_name", "app_profile_id", "row_key", "predicate_filter", "true_mutations", "false_mutations")
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    APP_PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_KEY_FIELD_NUMBER: _ClassVar[int]
    PREDICATE_FILTER_FIELD_NUMBER: _ClassVar[int]
    TRUE_MUTATIONS_FIELD_NUMBER: _ClassVar[int]
    FALSE_MUTATIONS_FIELD_NUMBER: _ClassVar[int]
    table_name: str
    app_profile_id: str
    row_key: bytes
    predicate_filter: BigtableRowFilter
    true_mutations: _containers.RepeatedCompositeFieldContainer[BigtableMutation]
    false_mutations: _containers.RepeatedCompositeFieldContainer[BigtableMutation]
    def __init__(self, table_name: _Optional[str] = ..., app_profile_id: _Optional[str] = ..., row_key: _Optional[bytes] = ..., predicate_filter: _Optional[_Union[BigtableRowFilter, _Mapping]] = ..., true_mutations: _Optional[_Iterable[_Union[BigtableMutation, _Mapping]]] = ..., false_mutations: _Optional[_Iterable[_Union[BigtableMutation, _Mapping]]] = ...) -> None: ...

class BigtableCheckAndMutateRowResponse(_message.Message):
    __slots__ = ("predicate_matched",)
    PREDICATE_MATCHED_FIELD_NUMBER: _ClassVar[int]
    predicate_matched: bool
    def __init__(self, predicate_matched: bool = ...) -> None: ...

class BigtableMutateRowsRequest(_message.Message):
    __slots__ = ("table_name", "app_profile_id", "entries")
    class Entry(_message.Message):
        __slots__ = ("row_key", "mutations")
        ROW_KEY_FIELD_NUMBER: _ClassVar[int]
        MUTATIONS_FIELD_NUMBER: _ClassVar[int]
        row_key: bytes
        mutations: _containers.RepeatedCompositeFieldContainer[BigtableMutation]
        def __init__(self, row_key: _Optional[bytes] = ..., mutations: _Optional[_Iterable[_Union[BigtableMutation, _Mapping]]] = ...) -> None: ...
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    APP_PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    table_name: str
    app_profile_id: str
    entries: _containers.RepeatedCompositeFieldContainer[BigtableMutateRowsRequest.Entry]
    def __init__(self, table_name: _Optional[str] = ..., app_profile_id: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[BigtableMutateRowsRequest.Entry, _Mapping]]] = ...) -> None: ...

class BigtableMutateRowsResponse(_message.Message):
    __slots__ = ("entries",)
    class Status(_message.Message):
        __slots__ = ("code", "message")
        CODE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        code: int
        message: str
        def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
    class Entry(_message.Message):
        __slots__ = ("index", "status")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        index: int
        status: BigtableMutateRowsResponse.Status
        def __init__(self, index: _Optional[int] = ..., status: _Optional[_Union[BigtableMutateRowsResponse.Status, _Mapping]] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[BigtableMutateRowsResponse.Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[BigtableMutateRowsResponse.Entry, _Mapping]]] = ...) -> None: ...

class BigtableSampleRowKeysRequest(_message.Message):
    __slots__ = ("table_name", "app_profile_id")
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    APP_PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    table_name: str
    app_profile_id: str
    def __init__(self, table_name: _Optional[str] = ..., app_profile_id: _Optional[str] = ...) -> None: ...

class BigtableSampleRowKeysResponse(_message.Message):
    __slots__ = ("row_key", "offset_bytes")
    ROW_KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    row_key: bytes
    offset_bytes: int
    def __init__(self, row_key: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class BigtableReadRowsRequest(_message.Message):
    __slots__ = ("table_name", "app_profile_id", "rows", "filter", "rows_limit", "reversed")
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    APP_PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ROWS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REVERSED_FIELD_NUMBER: _ClassVar[int]
    table_name: str
    app_profile_id: str
    rows: BigtableRowSet
    filter: BigtableRowFilter
    rows_limit: int
    reversed: bool
    def __init__(self, table_name: _Optional[str] = ..., app_profile_id: _Optional[str] = ..., rows: _Optional[_Union[BigtableRowSet, _Mapping]] = ..., filter: _Optional[_Union[BigtableRowFilter, _Mapping]] = ..., rows_limit: _Optional[int] = ..., reversed: bool = ...) -> None: ...

class BigtableReadRowsResponse(_message.Message):
    __slots__ = ("chunks", "last_scanned_row_key")
    class CellChunk(_message.Message):
        __slots__ = ("row_key", "family_name", "qualifier", "timestamp_micros", "value", "value_size", "reset_row", "commit_row")
        ROW_KEY_FIELD_NUMBER: _ClassVar[int]
        FAMILY_NAME_FIELD_NUMBER: _ClassVar[int]
        QUALIFIER_FIELD_NUMBER: _ClassVar[int]
        TIMESTAMP_MICROS_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        VALUE_SIZE_FIELD_NUMBER: _ClassVar[int]
        RESET_ROW_FIELD_NUMBER: _ClassVar[int]
        COMMIT_ROW_FIELD_NUMBER: _ClassVar[int]
        row_key: bytes
        family_name: _wrappers_pb2.StringValue
        qualifier: _wrappers_pb2.BytesValue
        timestamp_micros: int
        value: bytes
        value_size: int
        reset_row: bool
        commit_row: bool
        def __init__(self, row_key: _Optional[bytes] = ..., family_name: _Optional[_Union[_wrappers_pb2.StringValue, _Mapping]] = ..., qualifier: _Optional[_Union[_wrappers_pb2.BytesValue, _Mapping]] = ..., timestamp_micros: _Optional[int] = ..., value: _Optional[bytes] = ..., value_size: _Optional[int] = ..., reset_row: bool = ..., commit_row: bool = ...) -> None: ...
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAST_SCANNED_ROW_KEY_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[BigtableReadRowsResponse.CellChunk]
    last_scanned_row_key: bytes
    def __init__(self, chunks: _Optional[_Iterable[_Union[BigtableReadRowsResponse.CellChunk, _Mapping]]] = ..., last_scanned_row_key: _Optional[bytes] = ...) -> None: ...

class BigtableGcRule(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BigtableColumnFamily(_message.Message):
    __slots__ = ("gc_rule",)
    GC_RULE_FIELD_NUMBER: _ClassVar[int]
    gc_rule: BigtableGcRule
    def __init__(self, gc_rule: _Optional[_Union[BigtableGcRule, _Mapping]] = ...) -> None: ...

class BigtableTable(_message.Message):
    __slots__ = ("name", "column_families")
    class ColumnFamiliesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: BigtableColumnFamily
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[BigtableColumnFamily, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FAMILIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    column_families: _containers.MessageMap[str, BigtableColumnFamily]
    def __init__(self, name: _Optional[str] = ..., column_families: _Optional[_Mapping[str, BigtableColumnFamily]] = ...) -> None: ...

class BigtableGetTableRequest(_message.Message):
    __slots__ = ("name", "view")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    name: str
    view: int
    def __init__(self, name: _Optional[str] = ..., view: _Optional[int] = ...) -> None: ...

class BigtableCreateTableRequest(_message.Message):
    __slots__ = ("parent", "table_id", "table")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    parent: str
    table_id: str
    table: BigtableTable
    def __init__(self, parent: _Optional[str] = ..., table_id: _Optional[str] = ..., table: _Optional[_Union[BigtableTable, _Mapping]] = ...) -> None: ...

class BigtableDeleteTableRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class BigtableDeleteTableResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BigtableGetAppProfileRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class BigtableAppProfile(_message.Message):
    __slots__ = ("multi_cluster_routing_use_any", "single_cluster_routing", "data_boost_isolation_read_only")
    class MultiClusterRoutingUseAny(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class SingleClusterRouting(_message.Message):
        __slots__ = ("cluster_id", "allow_transactional_writes")
        CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
        ALLOW_TRANSACTIONAL_WRITES_FIELD_NUMBER: _ClassVar[int]
        cluster_id: str
        allow_transactional_writes: bool
        def __init__(self, cluster_id: _Optional[str] = ..., allow_transactional_writes: bool = ...) -> None: ...
    class DataBoostIsolationReadOnly(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    MULTI_CLUSTER_ROUTING_USE_ANY_FIELD_NUMBER: _ClassVar[int]
    SINGLE_CLUSTER_ROUTING_FIELD_NUMBER: _ClassVar[int]
    DATA_BOOST_ISOLATION_READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    multi_cluster_routing_use_any: BigtableAppProfile.MultiClusterRoutingUseAny
    single_cluster_routing: BigtableAppProfile.SingleClusterRouting
    data_boost_isolation_read_only: BigtableAppProfile.DataBoostIsolationReadOnly
    def __init__(self, multi_cluster_routing_use_any: _Optional[_Union[BigtableAppProfile.MultiClusterRoutingUseAny, _Mapping]] = ..., single_cluster_routing: _Optional[_Union[BigtableAppProfile.SingleClusterRouting, _Mapping]] = ..., data_boost_isolation_read_only: _Optional[_Union[BigtableAppProfile.DataBoostIsolationReadOnly, _Mapping]] = ...) -> None: ...

class BigtableTestIamPermissionsRequest(_message.Message):
    __slots__ = ("resource", "permissions")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    PERMISSIONS_FIELD_NUMBER: _ClassVar[int]
    resource: str
    permissions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resource: _Optional[str] = ..., permissions: _Optional[_Iterable[str]] = ...) -> None: ...

class BigtableTestIamPermissionsResponse(_message.Message):
    __slots__ = ("permissions",)
    PERMISSIONS_FIELD_NUMBER: _ClassVar[int]
    permissions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, permissions: _Optional[_Iterable[str]] = ...) -> None: ...
