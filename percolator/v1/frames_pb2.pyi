from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OfferFramesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferFramesResponse(_message.Message):
    __slots__ = ("port", "server_id", "local_name", "local_address")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_NAME_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    port: int
    server_id: str
    local_name: str
    local_address: str
    def __init__(self, port: _Optional[int] = ..., server_id: _Optional[str] = ..., local_name: _Optional[str] = ..., local_address: _Optional[str] = ...) -> None: ...

class FramesHello(_message.Message):
    __slots__ = ("server_id", "authorization")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    authorization: str
    def __init__(self, server_id: _Optional[str] = ..., authorization: _Optional[str] = ...) -> None: ...

class FramesWelcome(_message.Message):
    __slots__ = ("paths", "request_bytes_max", "calls_max")
    PATHS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    CALLS_MAX_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedScalarFieldContainer[str]
    request_bytes_max: int
    calls_max: int
    def __init__(self, paths: _Optional[_Iterable[str]] = ..., request_bytes_max: _Optional[int] = ..., calls_max: _Optional[int] = ...) -> None: ...
