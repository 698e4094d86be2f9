from percolator.v1 import cells_pb2 as _cells_pb2
from percolator.v1 import cluster_pb2 as _cluster_pb2
from percolator.v1 import master_pb2 as _master_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MapRecord(_message.Message):
    __slots__ = ("next_id", "tables", "tablets", "draining", "retired", "load_floor", "deletions", "awaited")
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TABLETS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FLOOR_FIELD_NUMBER: _ClassVar[int]
    DELETIONS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    next_id: int
    tables: _containers.RepeatedCompositeFieldContainer[_master_pb2.Table]
    tablets: _containers.RepeatedCompositeFieldContainer[TabletRecord]
    draining: _containers.RepeatedScalarFieldContainer[str]
    retired: _containers.RepeatedCompositeFieldContainer[RetiredTablet]
    load_floor: int
    deletions: _containers.RepeatedScalarFieldContainer[bytes]
    awaited: _containers.RepeatedCompositeFieldContainer[_master_pb2.Table]
    def __init__(self, next_id: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[_master_pb2.Table, _Mapping]]] = ..., tablets: _Optional[_Iterable[_Union[TabletRecord, _Mapping]]] = ..., draining: _Optional[_Iterable[str]] = ..., retired: _Optional[_Iterable[_Union[RetiredTablet, _Mapping]]] = ..., load_floor: _Optional[int] = ..., deletions: _Optional[_Iterable[bytes]] = ..., awaited: _Optional[_Iterable[_Union[_master_pb2.Table, _Mapping]]] = ...) -> None: ...

class TabletRecord(_message.Message):
    __slots__ = ("tablet_id", "table_id", "epoch", "range", "server_id", "address", "exists", "origin_tablet_id", "origin_epoch", "served_epoch")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    table_id: int
    epoch: int
    range: _cells_pb2.RowRange
    server_id: str
    address: str
    exists: bool
    origin_tablet_id: int
    origin_epoch: int
    served_epoch: int
    def __init__(self, tablet_id: _Optional[int] = ..., table_id: _Optional[int] = ..., epoch: _Optional[int] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., server_id: _Optional[str] = ..., address: _Optional[str] = ..., exists: bool = ..., origin_tablet_id: _Optional[int] = ..., origin_epoch: _Optional[int] = ..., served_epoch: _Optional[int] = ...) -> None: ...

class RetiredTablet(_message.Message):
    __slots__ = ("table_id", "tablet_id")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    tablet_id: int
    def __init__(self, table_id: _Optional[int] = ..., tablet_id: _Optional[int] = ...) -> None: ...

class SafePointsRecord(_message.Message):
    __slots__ = ("tables", "transactions")
    class OfTable(_message.Message):
        __slots__ = ("table_id", "reads")
        TABLE_ID_FIELD_NUMBER: _ClassVar[int]
        READS_FIELD_NUMBER: _ClassVar[int]
        table_id: int
        reads: int
        def __init__(self, table_id: _Optional[int] = ..., reads: _Optional[int] = ...) -> None: ...
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[SafePointsRecord.OfTable]
    transactions: int
    def __init__(self, tables: _Optional[_Iterable[_Union[SafePointsRecord.OfTable, _Mapping]]] = ..., transactions: _Optional[int] = ...) -> None: ...

class ServersRecord(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[_cluster_pb2.Server]
    def __init__(self, servers: _Optional[_Iterable[_Union[_cluster_pb2.Server, _Mapping]]] = ...) -> None: ...
