from percolator.v1 import cells_pb2 as _cells_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RetrySafety(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETRY_SAFETY_UNSPECIFIED: _ClassVar[RetrySafety]
    RETRY_SAFETY_SAFE: _ClassVar[RetrySafety]
    RETRY_SAFETY_USELESS: _ClassVar[RetrySafety]
    RETRY_SAFETY_UNKNOWN: _ClassVar[RetrySafety]
RETRY_SAFETY_UNSPECIFIED: RetrySafety
RETRY_SAFETY_SAFE: RetrySafety
RETRY_SAFETY_USELESS: RetrySafety
RETRY_SAFETY_UNKNOWN: RetrySafety

class ErrorDetail(_message.Message):
    __slots__ = ("message", "where", "retry", "invalid_argument", "overloaded", "session_expired", "tablet_moved", "schema_changed", "snapshot_too_old", "store_unusable", "outcome_unknown", "wrong_cluster", "not_ready", "invariant_violated", "conflict", "schema_mismatch", "unauthenticated", "permission_denied", "unknown_server", "unique_violated")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    INVALID_ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    OVERLOADED_FIELD_NUMBER: _ClassVar[int]
    SESSION_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    TABLET_MOVED_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TOO_OLD_FIELD_NUMBER: _ClassVar[int]
    STORE_UNUSABLE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    WRONG_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    INVARIANT_VIOLATED_FIELD_NUMBER: _ClassVar[int]
    CONFLICT_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MISMATCH_FIELD_NUMBER: _ClassVar[int]
    UNAUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_DENIED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SERVER_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_VIOLATED_FIELD_NUMBER: _ClassVar[int]
    message: str
    where: str
    retry: RetrySafety
    invalid_argument: InvalidArgument
    overloaded: Overloaded
    session_expired: SessionExpired
    tablet_moved: TabletMoved
    schema_changed: SchemaChanged
    snapshot_too_old: SnapshotTooOld
    store_unusable: StoreUnusable
    outcome_unknown: OutcomeUnknown
    wrong_cluster: WrongCluster
    not_ready: NotReady
    invariant_violated: InvariantViolated
    conflict: Conflict
    schema_mismatch: SchemaMismatch
    unauthenticated: Unauthenticated
    permission_denied: PermissionDenied
    unknown_server: UnknownServer
    unique_violated: UniqueViolated
    def __init__(self, message: _Optional[str] = ..., where: _Optional[str] = ..., retry: _Optional[_Union[RetrySafety, str]] = ..., invalid_argument: _Optional[_Union[InvalidArgument, _Mapping]] = ..., overloaded: _Optional[_Union[Overloaded, _Mapping]] = ..., session_expired: _Optional[_Union[SessionExpired, _Mapping]] = ..., tablet_moved: _Optional[_Union[TabletMoved, _Mapping]] = ..., schema_changed: _Optional[_Union[SchemaChanged, _Mapping]] = ..., snapshot_too_old: _Optional[_Union[SnapshotTooOld, _Mapping]] = ..., store_unusable: _Optional[_Union[StoreUnusable, _Mapping]] = ..., outcome_unknown: _Optional[_Union[OutcomeUnknown, _Mapping]] = ..., wrong_cluster: _Optional[_Union[WrongCluster, _Mapping]] = ..., not_ready: _Optional[_Union[NotReady, _Mapping]] = ..., invariant_violated: _Optional[_Union[InvariantViolated, _Mapping]] = ..., conflict: _Optional[_Union[Conflict, _Mapping]] = ..., schema_mismatch: _Optional[_Union[SchemaMismatch, _Mapping]] = ..., unauthenticated: _Optional[_Union[Unauthenticated, _Mapping]] = ..., permission_denied: _Optional[_Union[PermissionDenied, _Mapping]] = ..., unknown_server: _Optional[_Union[UnknownServer, _Mapping]] = ..., unique_violated: _Optional[_Union[UniqueViolated, _Mapping]] = ...) -> None: ...

class InvalidArgument(_message.Message):
    __slots__ = ("field", "reason")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    field: str
    reason: str
    def __init__(self, field: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Unauthenticated(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PermissionDenied(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Overloaded(_message.Message):
    __slots__ = ("retry_after_milliseconds",)
    RETRY_AFTER_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    retry_after_milliseconds: int
    def __init__(self, retry_after_milliseconds: _Optional[int] = ...) -> None: ...

class SessionExpired(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class TabletMoved(_message.Message):
    __slots__ = ("tablet_id", "epoch", "locations", "highest_epoch")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    epoch: int
    locations: _containers.RepeatedCompositeFieldContainer[TabletLocation]
    highest_epoch: int
    def __init__(self, tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[TabletLocation, _Mapping]]] = ..., highest_epoch: _Optional[int] = ...) -> None: ...

class TabletLocation(_message.Message):
    __slots__ = ("table_id", "tablet_id", "epoch", "range", "address")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    tablet_id: int
    epoch: int
    range: _cells_pb2.RowRange
    address: str
    def __init__(self, table_id: _Optional[int] = ..., tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class SchemaChanged(_message.Message):
    __slots__ = ("table_id", "schema_version")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    schema_version: int
    def __init__(self, table_id: _Optional[int] = ..., schema_version: _Optional[int] = ...) -> None: ...

class SnapshotTooOld(_message.Message):
    __slots__ = ("timestamp", "safe_point")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    SAFE_POINT_FIELD_NUMBER: _ClassVar[int]
    timestamp: int
    safe_point: int
    def __init__(self, timestamp: _Optional[int] = ..., safe_point: _Optional[int] = ...) -> None: ...

class StoreUnusable(_message.Message):
    __slots__ = ("reason",)
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[StoreUnusable.Reason]
        REASON_DISK_FULL: _ClassVar[StoreUnusable.Reason]
        REASON_INPUT_OUTPUT: _ClassVar[StoreUnusable.Reason]
        REASON_DAMAGED: _ClassVar[StoreUnusable.Reason]
        REASON_READ_ONLY: _ClassVar[StoreUnusable.Reason]
    REASON_UNSPECIFIED: StoreUnusable.Reason
    REASON_DISK_FULL: StoreUnusable.Reason
    REASON_INPUT_OUTPUT: StoreUnusable.Reason
    REASON_DAMAGED: StoreUnusable.Reason
    REASON_READ_ONLY: StoreUnusable.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: StoreUnusable.Reason
    def __init__(self, reason: _Optional[_Union[StoreUnusable.Reason, str]] = ...) -> None: ...

class OutcomeUnknown(_message.Message):
    __slots__ = ("start_timestamp", "primary", "retry_after_milliseconds")
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    start_timestamp: int
    primary: CellAddress
    retry_after_milliseconds: int
    def __init__(self, start_timestamp: _Optional[int] = ..., primary: _Optional[_Union[CellAddress, _Mapping]] = ..., retry_after_milliseconds: _Optional[int] = ...) -> None: ...

class CellAddress(_message.Message):
    __slots__ = ("table_id", "row", "column")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    row: bytes
    column: bytes
    def __init__(self, table_id: _Optional[int] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ...) -> None: ...

class Conflict(_message.Message):
    __slots__ = ("cell", "start_timestamp", "other_start_timestamp", "other_commit_timestamp")
    CELL_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    OTHER_START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    OTHER_COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    cell: CellAddress
    start_timestamp: int
    other_start_timestamp: int
    other_commit_timestamp: int
    def __init__(self, cell: _Optional[_Union[CellAddress, _Mapping]] = ..., start_timestamp: _Optional[int] = ..., other_start_timestamp: _Optional[int] = ..., other_commit_timestamp: _Optional[int] = ...) -> None: ...

class UniqueViolated(_message.Message):
    __slots__ = ("index", "rows")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    index: str
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, index: _Optional[str] = ..., rows: _Optional[_Iterable[bytes]] = ...) -> None: ...

class WrongCluster(_message.Message):
    __slots__ = ("expected", "found")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    expected: str
    found: str
    def __init__(self, expected: _Optional[str] = ..., found: _Optional[str] = ...) -> None: ...

class NotReady(_message.Message):
    __slots__ = ("retry_after_milliseconds", "leaving")
    RETRY_AFTER_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    retry_after_milliseconds: int
    leaving: str
    def __init__(self, retry_after_milliseconds: _Optional[int] = ..., leaving: _Optional[str] = ...) -> None: ...

class InvariantViolated(_message.Message):
    __slots__ = ("rule",)
    RULE_FIELD_NUMBER: _ClassVar[int]
    rule: str
    def __init__(self, rule: _Optional[str] = ...) -> None: ...

class SchemaMismatch(_message.Message):
    __slots__ = ("table", "table_id")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    table: str
    table_id: int
    def __init__(self, table: _Optional[str] = ..., table_id: _Optional[int] = ...) -> None: ...

class UnknownServer(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: str
    def __init__(self, server: _Optional[str] = ...) -> None: ...
