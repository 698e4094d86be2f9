from percolator.v1 import cells_pb2 as _cells_pb2
from percolator.v1 import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BeginRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginResponse(_message.Message):
    __slots__ = ("start_timestamp",)
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    def __init__(self, start_timestamp: _Optional[int] = ...) -> None: ...

class RowQuery(_message.Message):
    __slots__ = ("table", "row", "columns", "column_prefixes")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    table: str
    row: bytes
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    column_prefixes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, table: _Optional[str] = ..., row: _Optional[bytes] = ..., columns: _Optional[_Iterable[bytes]] = ..., column_prefixes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FoundCell(_message.Message):
    __slots__ = ("column", "value", "commit_timestamp")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    column: bytes
    value: bytes
    commit_timestamp: int
    def __init__(self, column: _Optional[bytes] = ..., value: _Optional[bytes] = ..., commit_timestamp: _Optional[int] = ...) -> None: ...

class FoundRow(_message.Message):
    __slots__ = ("row", "cells")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    cells: _containers.RepeatedCompositeFieldContainer[FoundCell]
    def __init__(self, row: _Optional[bytes] = ..., cells: _Optional[_Iterable[_Union[FoundCell, _Mapping]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("start_timestamp", "rows", "for_update", "first_start_timestamp")
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FOR_UPDATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    rows: _containers.RepeatedCompositeFieldContainer[RowQuery]
    for_update: bool
    first_start_timestamp: int
    def __init__(self, start_timestamp: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowQuery, _Mapping]]] = ..., for_update: bool = ..., first_start_timestamp: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[FoundRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[FoundRow, _Mapping]]] = ...) -> None: ...

class ScanTableRequest(_message.Message):
    __slots__ = ("start_timestamp", "table", "range", "columns", "reverse", "row_limit", "column_prefixes", "filter", "count")
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    ROW_LIMIT_FIELD_NUMBER: _ClassVar[int]
    COLUMN_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    table: str
    range: _cells_pb2.RowRange
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    reverse: bool
    row_limit: int
    column_prefixes: _containers.RepeatedScalarFieldContainer[bytes]
    filter: _cells_pb2.RowFilter
    count: bool
    def __init__(self, start_timestamp: _Optional[int] = ..., table: _Optional[str] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., columns: _Optional[_Iterable[bytes]] = ..., reverse: bool = ..., row_limit: _Optional[int] = ..., column_prefixes: _Optional[_Iterable[bytes]] = ..., filter: _Optional[_Union[_cells_pb2.RowFilter, _Mapping]] = ..., count: bool = ...) -> None: ...

class ScanTableResponse(_message.Message):
    __slots__ = ("rows", "counted")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[FoundRow]
    counted: int
    def __init__(self, rows: _Optional[_Iterable[_Union[FoundRow, _Mapping]]] = ..., counted: _Optional[int] = ...) -> None: ...

class FindRowsRequest(_message.Message):
    __slots__ = ("start_timestamp", "table", "index", "values", "start", "end", "prefix", "columns", "column_prefixes", "reverse", "row_limit", "after")
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    ROW_LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    table: str
    index: str
    values: _containers.RepeatedScalarFieldContainer[bytes]
    start: bytes
    end: bytes
    prefix: bytes
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    column_prefixes: _containers.RepeatedScalarFieldContainer[bytes]
    reverse: bool
    row_limit: int
    after: bytes
    def __init__(self, start_timestamp: _Optional[int] = ..., table: _Optional[str] = ..., index: _Optional[str] = ..., values: _Optional[_Iterable[bytes]] = ..., start: _Optional[bytes] = ..., end: _Optional[bytes] = ..., prefix: _Optional[bytes] = ..., columns: _Optional[_Iterable[bytes]] = ..., column_prefixes: _Optional[_Iterable[bytes]] = ..., reverse: bool = ..., row_limit: _Optional[int] = ..., after: _Optional[bytes] = ...) -> None: ...

class FindRowsResponse(_message.Message):
    __slots__ = ("rows", "position")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[FoundRow]
    position: bytes
    def __init__(self, rows: _Optional[_Iterable[_Union[FoundRow, _Mapping]]] = ..., position: _Optional[bytes] = ...) -> None: ...

class FollowChangesRequest(_message.Message):
    __slots__ = ("table", "after", "until", "before")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    table: str
    after: int
    until: int
    before: bool
    def __init__(self, table: _Optional[str] = ..., after: _Optional[int] = ..., until: _Optional[int] = ..., before: bool = ...) -> None: ...

class FollowedChange(_message.Message):
    __slots__ = ("commit_timestamp", "row", "column", "value", "before")
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    commit_timestamp: int
    row: bytes
    column: bytes
    value: bytes
    before: bytes
    def __init__(self, commit_timestamp: _Optional[int] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., value: _Optional[bytes] = ..., before: _Optional[bytes] = ...) -> None: ...

class FollowChangesResponse(_message.Message):
    __slots__ = ("changes", "reached")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[FollowedChange]
    reached: int
    def __init__(self, changes: _Optional[_Iterable[_Union[FollowedChange, _Mapping]]] = ..., reached: _Optional[int] = ...) -> None: ...

class CellWrite(_message.Message):
    __slots__ = ("kind", "table", "row", "column", "value")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[CellWrite.Kind]
        KIND_PUT: _ClassVar[CellWrite.Kind]
        KIND_DELETE: _ClassVar[CellWrite.Kind]
        KIND_LOCK: _ClassVar[CellWrite.Kind]
        KIND_NOTIFY: _ClassVar[CellWrite.Kind]
        KIND_READ_LOCK: _ClassVar[CellWrite.Kind]
    KIND_UNSPECIFIED: CellWrite.Kind
    KIND_PUT: CellWrite.Kind
    KIND_DELETE: CellWrite.Kind
    KIND_LOCK: CellWrite.Kind
    KIND_NOTIFY: CellWrite.Kind
    KIND_READ_LOCK: CellWrite.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: CellWrite.Kind
    table: str
    row: bytes
    column: bytes
    value: bytes
    def __init__(self, kind: _Optional[_Union[CellWrite.Kind, str]] = ..., table: _Optional[str] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("start_timestamp", "writes")
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    writes: _containers.RepeatedCompositeFieldContainer[CellWrite]
    def __init__(self, start_timestamp: _Optional[int] = ..., writes: _Optional[_Iterable[_Union[CellWrite, _Mapping]]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("commit_timestamp",)
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    commit_timestamp: int
    def __init__(self, commit_timestamp: _Optional[int] = ...) -> None: ...

class CellName(_message.Message):
    __slots__ = ("table", "row", "column")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    table: str
    row: bytes
    column: bytes
    def __init__(self, table: _Optional[str] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("start_timestamp", "primary", "cells", "writes")
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    primary: _errors_pb2.CellAddress
    cells: _containers.RepeatedCompositeFieldContainer[CellName]
    writes: _containers.RepeatedCompositeFieldContainer[CellWrite]
    def __init__(self, start_timestamp: _Optional[int] = ..., primary: _Optional[_Union[_errors_pb2.CellAddress, _Mapping]] = ..., cells: _Optional[_Iterable[_Union[CellName, _Mapping]]] = ..., writes: _Optional[_Iterable[_Union[CellWrite, _Mapping]]] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("fate", "commit_timestamp")
    class Fate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FATE_UNSPECIFIED: _ClassVar[ResolveResponse.Fate]
        FATE_COMMITTED: _ClassVar[ResolveResponse.Fate]
        FATE_ABORTED: _ClassVar[ResolveResponse.Fate]
    FATE_UNSPECIFIED: ResolveResponse.Fate
    FATE_COMMITTED: ResolveResponse.Fate
    FATE_ABORTED: ResolveResponse.Fate
    FATE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    fate: ResolveResponse.Fate
    commit_timestamp: int
    def __init__(self, fate: _Optional[_Union[ResolveResponse.Fate, str]] = ..., commit_timestamp: _Optional[int] = ...) -> None: ...
