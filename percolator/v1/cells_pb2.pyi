from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Space(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPACE_UNSPECIFIED: _ClassVar[Space]
    SPACE_LOCK: _ClassVar[Space]
    SPACE_WRITE: _ClassVar[Space]
    SPACE_DATA: _ClassVar[Space]
    SPACE_ROLLBACK: _ClassVar[Space]
    SPACE_NOTIFY: _ClassVar[Space]
SPACE_UNSPECIFIED: Space
SPACE_LOCK: Space
SPACE_WRITE: Space
SPACE_DATA: Space
SPACE_ROLLBACK: Space
SPACE_NOTIFY: Space

class RowRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: bytes
    end: bytes
    def __init__(self, start: _Optional[bytes] = ..., end: _Optional[bytes] = ...) -> None: ...

class Cell(_message.Message):
    __slots__ = ("space", "row", "column", "timestamp", "value", "qualifier", "ttl_milliseconds")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    space: Space
    row: bytes
    column: bytes
    timestamp: int
    value: bytes
    qualifier: bytes
    ttl_milliseconds: int
    def __init__(self, space: _Optional[_Union[Space, str]] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., timestamp: _Optional[int] = ..., value: _Optional[bytes] = ..., qualifier: _Optional[bytes] = ..., ttl_milliseconds: _Optional[int] = ...) -> None: ...

class RowFilter(_message.Message):
    __slots__ = ("kind", "parts", "column", "codec", "operands")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[RowFilter.Kind]
        KIND_ALL: _ClassVar[RowFilter.Kind]
        KIND_ANY: _ClassVar[RowFilter.Kind]
        KIND_NULL: _ClassVar[RowFilter.Kind]
        KIND_NOT_NULL: _ClassVar[RowFilter.Kind]
        KIND_EQUAL: _ClassVar[RowFilter.Kind]
        KIND_NOT_EQUAL: _ClassVar[RowFilter.Kind]
        KIND_LESS: _ClassVar[RowFilter.Kind]
        KIND_AT_MOST: _ClassVar[RowFilter.Kind]
        KIND_GREATER: _ClassVar[RowFilter.Kind]
        KIND_AT_LEAST: _ClassVar[RowFilter.Kind]
        KIND_ONE_OF: _ClassVar[RowFilter.Kind]
        KIND_PREFIX: _ClassVar[RowFilter.Kind]
    KIND_UNSPECIFIED: RowFilter.Kind
    KIND_ALL: RowFilter.Kind
    KIND_ANY: RowFilter.Kind
    KIND_NULL: RowFilter.Kind
    KIND_NOT_NULL: RowFilter.Kind
    KIND_EQUAL: RowFilter.Kind
    KIND_NOT_EQUAL: RowFilter.Kind
    KIND_LESS: RowFilter.Kind
    KIND_AT_MOST: RowFilter.Kind
    KIND_GREATER: RowFilter.Kind
    KIND_AT_LEAST: RowFilter.Kind
    KIND_ONE_OF: RowFilter.Kind
    KIND_PREFIX: RowFilter.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    kind: RowFilter.Kind
    parts: _containers.RepeatedCompositeFieldContainer[RowFilter]
    column: bytes
    codec: str
    operands: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[_Union[RowFilter.Kind, str]] = ..., parts: _Optional[_Iterable[_Union[RowFilter, _Mapping]]] = ..., column: _Optional[bytes] = ..., codec: _Optional[str] = ..., operands: _Optional[_Iterable[bytes]] = ...) -> None: ...
