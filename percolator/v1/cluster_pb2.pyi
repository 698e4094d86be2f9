from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_KIND_UNSPECIFIED: _ClassVar[ServiceKind]
    SERVICE_KIND_MASTER: _ClassVar[ServiceKind]
    SERVICE_KIND_ORACLE: _ClassVar[ServiceKind]
    SERVICE_KIND_LOCK_SERVICE: _ClassVar[ServiceKind]
    SERVICE_KIND_TABLET_SERVER: _ClassVar[ServiceKind]
    SERVICE_KIND_WORKER: _ClassVar[ServiceKind]
    SERVICE_KIND_GATEWAY: _ClassVar[ServiceKind]

class Route(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_UNSPECIFIED: _ClassVar[Route]
    ROUTE_DIRECT: _ClassVar[Route]
    ROUTE_THROUGH: _ClassVar[Route]
SERVICE_KIND_UNSPECIFIED: ServiceKind
SERVICE_KIND_MASTER: ServiceKind
SERVICE_KIND_ORACLE: ServiceKind
SERVICE_KIND_LOCK_SERVICE: ServiceKind
SERVICE_KIND_TABLET_SERVER: ServiceKind
SERVICE_KIND_WORKER: ServiceKind
SERVICE_KIND_GATEWAY: ServiceKind
ROUTE_UNSPECIFIED: Route
ROUTE_DIRECT: Route
ROUTE_THROUGH: Route

class Server(_message.Message):
    __slots__ = ("kind", "server_id", "address", "metrics_address", "version", "uptime_milliseconds", "silence_milliseconds", "clock_lead_milliseconds", "leaving")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_LEAD_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    kind: ServiceKind
    server_id: str
    address: str
    metrics_address: str
    version: str
    uptime_milliseconds: int
    silence_milliseconds: int
    clock_lead_milliseconds: int
    leaving: bool
    def __init__(self, kind: _Optional[_Union[ServiceKind, str]] = ..., server_id: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., version: _Optional[str] = ..., uptime_milliseconds: _Optional[int] = ..., silence_milliseconds: _Optional[int] = ..., clock_lead_milliseconds: _Optional[int] = ..., leaving: bool = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("cluster_id", "version", "format", "route", "servers", "wall_milliseconds", "timestamp_lead_milliseconds", "gone", "row_store", "restricted")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    WALL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_LEAD_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ROW_STORE_FIELD_NUMBER: _ClassVar[int]
    RESTRICTED_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    version: str
    format: int
    route: Route
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    wall_milliseconds: int
    timestamp_lead_milliseconds: int
    gone: _containers.RepeatedCompositeFieldContainer[Server]
    row_store: RowStorePlace
    restricted: bool
    def __init__(self, cluster_id: _Optional[str] = ..., version: _Optional[str] = ..., format: _Optional[int] = ..., route: _Optional[_Union[Route, str]] = ..., servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., wall_milliseconds: _Optional[int] = ..., timestamp_lead_milliseconds: _Optional[int] = ..., gone: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., row_store: _Optional[_Union[RowStorePlace, _Mapping]] = ..., restricted: bool = ...) -> None: ...

class RowStorePlace(_message.Message):
    __slots__ = ("address", "emulator", "epoch_milliseconds")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EMULATOR_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    emulator: str
    epoch_milliseconds: int
    def __init__(self, address: _Optional[str] = ..., emulator: _Optional[str] = ..., epoch_milliseconds: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("cluster_id", "server", "wall_milliseconds")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    WALL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    server: Server
    wall_milliseconds: int
    def __init__(self, cluster_id: _Optional[str] = ..., server: _Optional[_Union[Server, _Mapping]] = ..., wall_milliseconds: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("cluster_id", "format", "interval_milliseconds")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    format: int
    interval_milliseconds: int
    def __init__(self, cluster_id: _Optional[str] = ..., format: _Optional[int] = ..., interval_milliseconds: _Optional[int] = ...) -> None: ...
