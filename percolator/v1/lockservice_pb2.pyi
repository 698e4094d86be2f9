from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Liveness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIVENESS_UNSPECIFIED: _ClassVar[Liveness]
    LIVENESS_ALIVE: _ClassVar[Liveness]
    LIVENESS_DEAD: _ClassVar[Liveness]
    LIVENESS_UNDECIDED: _ClassVar[Liveness]
LIVENESS_UNSPECIFIED: Liveness
LIVENESS_ALIVE: Liveness
LIVENESS_DEAD: Liveness
LIVENESS_UNDECIDED: Liveness

class SessionInfo(_message.Message):
    __slots__ = ("description", "ttl_milliseconds", "oldest_start_timestamp", "pin", "activity")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    description: str
    ttl_milliseconds: int
    oldest_start_timestamp: int
    pin: bool
    activity: Activity
    def __init__(self, description: _Optional[str] = ..., ttl_milliseconds: _Optional[int] = ..., oldest_start_timestamp: _Optional[int] = ..., pin: bool = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("commits", "conflicts", "cells", "observers")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    commits: int
    conflicts: int
    cells: _containers.RepeatedCompositeFieldContainer[ContendedCell]
    observers: _containers.RepeatedCompositeFieldContainer[ObserverActivity]
    def __init__(self, commits: _Optional[int] = ..., conflicts: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[ContendedCell, _Mapping]]] = ..., observers: _Optional[_Iterable[_Union[ObserverActivity, _Mapping]]] = ...) -> None: ...

class ContendedCell(_message.Message):
    __slots__ = ("table_id", "row", "column", "conflicts")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    row: bytes
    column: bytes
    conflicts: int
    def __init__(self, table_id: _Optional[int] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., conflicts: _Optional[int] = ...) -> None: ...

class ObserverActivity(_message.Message):
    __slots__ = ("table", "observer", "runs", "commits", "conflicts", "postponed", "failures", "dead_letters", "backlog", "latency_milliseconds", "cells")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    POSTPONED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    table: str
    observer: str
    runs: int
    commits: int
    conflicts: int
    postponed: int
    failures: int
    dead_letters: int
    backlog: int
    latency_milliseconds: int
    cells: _containers.RepeatedCompositeFieldContainer[ContendedCell]
    def __init__(self, table: _Optional[str] = ..., observer: _Optional[str] = ..., runs: _Optional[int] = ..., commits: _Optional[int] = ..., conflicts: _Optional[int] = ..., postponed: _Optional[int] = ..., failures: _Optional[int] = ..., dead_letters: _Optional[int] = ..., backlog: _Optional[int] = ..., latency_milliseconds: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[ContendedCell, _Mapping]]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("info", "ttl_may_be_shorter")
    INFO_FIELD_NUMBER: _ClassVar[int]
    TTL_MAY_BE_SHORTER_FIELD_NUMBER: _ClassVar[int]
    info: SessionInfo
    ttl_may_be_shorter: bool
    def __init__(self, info: _Optional[_Union[SessionInfo, _Mapping]] = ..., ttl_may_be_shorter: bool = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "ttl_milliseconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    ttl_milliseconds: int
    def __init__(self, session_id: _Optional[bytes] = ..., ttl_milliseconds: _Optional[int] = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session_id", "info")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    info: SessionInfo
    def __init__(self, session_id: _Optional[bytes] = ..., info: _Optional[_Union[SessionInfo, _Mapping]] = ...) -> None: ...

class RenewSessionResponse(_message.Message):
    __slots__ = ("taken_over",)
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    taken_over: bool
    def __init__(self, taken_over: bool = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckSessionsRequest(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CheckSessionsResponse(_message.Message):
    __slots__ = ("liveness",)
    LIVENESS_FIELD_NUMBER: _ClassVar[int]
    liveness: _containers.RepeatedScalarFieldContainer[Liveness]
    def __init__(self, liveness: _Optional[_Iterable[_Union[Liveness, str]]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "activity", "limits")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: bytes
    activity: bool
    limits: HistoryLimits
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[bytes] = ..., activity: bool = ..., limits: _Optional[_Union[HistoryLimits, _Mapping]] = ...) -> None: ...

class HistoryLimits(_message.Message):
    __slots__ = ("clients_since", "admins_since")
    CLIENTS_SINCE_FIELD_NUMBER: _ClassVar[int]
    ADMINS_SINCE_FIELD_NUMBER: _ClassVar[int]
    clients_since: int
    admins_since: int
    def __init__(self, clients_since: _Optional[int] = ..., admins_since: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "info", "age_milliseconds", "remaining_milliseconds", "locks", "too_old")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    AGE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    TOO_OLD_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    info: SessionInfo
    age_milliseconds: int
    remaining_milliseconds: int
    locks: int
    too_old: bool
    def __init__(self, session_id: _Optional[bytes] = ..., info: _Optional[_Union[SessionInfo, _Mapping]] = ..., age_milliseconds: _Optional[int] = ..., remaining_milliseconds: _Optional[int] = ..., locks: _Optional[int] = ..., too_old: bool = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token", "settling", "ttl_milliseconds_max")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_MAX_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: bytes
    settling: bool
    ttl_milliseconds_max: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[bytes] = ..., settling: bool = ..., ttl_milliseconds_max: _Optional[int] = ...) -> None: ...

class TryLockRequest(_message.Message):
    __slots__ = ("session_id", "names", "ttl_milliseconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    names: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_milliseconds: int
    def __init__(self, session_id: _Optional[bytes] = ..., names: _Optional[_Iterable[bytes]] = ..., ttl_milliseconds: _Optional[int] = ...) -> None: ...

class TryLockResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, held: _Optional[_Iterable[bool]] = ...) -> None: ...

class RenewLocksRequest(_message.Message):
    __slots__ = ("session_id", "names", "ttl_milliseconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    names: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_milliseconds: int
    def __init__(self, session_id: _Optional[bytes] = ..., names: _Optional[_Iterable[bytes]] = ..., ttl_milliseconds: _Optional[int] = ...) -> None: ...

class RenewLocksResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, held: _Optional[_Iterable[bool]] = ...) -> None: ...

class UnlockRequest(_message.Message):
    __slots__ = ("session_id", "names")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_id: _Optional[bytes] = ..., names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UnlockResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
