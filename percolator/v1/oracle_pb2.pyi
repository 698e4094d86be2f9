from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetTimestampsRequest(_message.Message):
    __slots__ = ("count", "token")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    count: int
    token: str
    def __init__(self, count: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class GetTimestampsResponse(_message.Message):
    __slots__ = ("first", "count", "catalogue_epoch")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CATALOGUE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    catalogue_epoch: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., catalogue_epoch: _Optional[int] = ...) -> None: ...

class AdvanceEpochRequest(_message.Message):
    __slots__ = ("catalogue_epoch",)
    CATALOGUE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    catalogue_epoch: int
    def __init__(self, catalogue_epoch: _Optional[int] = ...) -> None: ...

class AdvanceEpochResponse(_message.Message):
    __slots__ = ("catalogue_epoch",)
    CATALOGUE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    catalogue_epoch: int
    def __init__(self, catalogue_epoch: _Optional[int] = ...) -> None: ...

class CheckTimestampsRequest(_message.Message):
    __slots__ = ("token", "timestamps")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    token: str
    timestamps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token: _Optional[str] = ..., timestamps: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckTimestampsResponse(_message.Message):
    __slots__ = ("handed_out",)
    HANDED_OUT_FIELD_NUMBER: _ClassVar[int]
    handed_out: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, handed_out: _Optional[_Iterable[bool]] = ...) -> None: ...
