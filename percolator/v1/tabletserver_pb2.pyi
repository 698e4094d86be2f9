from percolator.v1 import cells_pb2 as _cells_pb2
from percolator.v1 import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_APPLIED: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_NOT_EXECUTED: _ClassVar[Outcome]
    OUTCOME_UNKNOWN: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_APPLIED: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_NOT_EXECUTED: Outcome
OUTCOME_UNKNOWN: Outcome

class TabletTarget(_message.Message):
    __slots__ = ("tablet_id", "epoch", "schema_version")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    epoch: int
    schema_version: int
    def __init__(self, tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., schema_version: _Optional[int] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("space", "expectation", "from_timestamp", "until_timestamp", "prefix", "required", "qualifier")
    class Expectation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EXPECTATION_UNSPECIFIED: _ClassVar[Condition.Expectation]
        EXPECTATION_ABSENT: _ClassVar[Condition.Expectation]
        EXPECTATION_PRESENT: _ClassVar[Condition.Expectation]
        EXPECTATION_EQUALS: _ClassVar[Condition.Expectation]
        EXPECTATION_BEGINS_IF_PRESENT: _ClassVar[Condition.Expectation]
        EXPECTATION_AT_MOST: _ClassVar[Condition.Expectation]
    EXPECTATION_UNSPECIFIED: Condition.Expectation
    EXPECTATION_ABSENT: Condition.Expectation
    EXPECTATION_PRESENT: Condition.Expectation
    EXPECTATION_EQUALS: Condition.Expectation
    EXPECTATION_BEGINS_IF_PRESENT: Condition.Expectation
    EXPECTATION_AT_MOST: Condition.Expectation
    SPACE_FIELD_NUMBER: _ClassVar[int]
    EXPECTATION_FIELD_NUMBER: _ClassVar[int]
    FROM_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    UNTIL_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    space: _cells_pb2.Space
    expectation: Condition.Expectation
    from_timestamp: int
    until_timestamp: int
    prefix: bytes
    required: bytes
    qualifier: bytes
    def __init__(self, space: _Optional[_Union[_cells_pb2.Space, str]] = ..., expectation: _Optional[_Union[Condition.Expectation, str]] = ..., from_timestamp: _Optional[int] = ..., until_timestamp: _Optional[int] = ..., prefix: _Optional[bytes] = ..., required: _Optional[bytes] = ..., qualifier: _Optional[bytes] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("kind", "space", "timestamp", "value", "qualifier")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Change.Kind]
        KIND_PUT: _ClassVar[Change.Kind]
        KIND_DELETE: _ClassVar[Change.Kind]
        KIND_DELETE_IF_PREFIX: _ClassVar[Change.Kind]
    KIND_UNSPECIFIED: Change.Kind
    KIND_PUT: Change.Kind
    KIND_DELETE: Change.Kind
    KIND_DELETE_IF_PREFIX: Change.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    kind: Change.Kind
    space: _cells_pb2.Space
    timestamp: int
    value: bytes
    qualifier: bytes
    def __init__(self, kind: _Optional[_Union[Change.Kind, str]] = ..., space: _Optional[_Union[_cells_pb2.Space, str]] = ..., timestamp: _Optional[int] = ..., value: _Optional[bytes] = ..., qualifier: _Optional[bytes] = ...) -> None: ...

class Mutation(_message.Message):
    __slots__ = ("row", "column", "not_below", "conditions", "changes")
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    NOT_BELOW_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    column: bytes
    not_below: int
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., not_below: _Optional[int] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class StepList(_message.Message):
    __slots__ = ("kinds", "rows", "columns", "values", "start_timestamps", "commit_timestamps", "min_commit_timestamps", "observed")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[StepList.Kind]
        KIND_PREWRITE: _ClassVar[StepList.Kind]
        KIND_COMMIT_PRIMARY: _ClassVar[StepList.Kind]
        KIND_COMMIT_SECONDARY: _ClassVar[StepList.Kind]
        KIND_WRITE: _ClassVar[StepList.Kind]
    KIND_UNSPECIFIED: StepList.Kind
    KIND_PREWRITE: StepList.Kind
    KIND_COMMIT_PRIMARY: StepList.Kind
    KIND_COMMIT_SECONDARY: StepList.Kind
    KIND_WRITE: StepList.Kind
    KINDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    MIN_COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    start_timestamps: _containers.RepeatedScalarFieldContainer[int]
    commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    min_commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    observed: _containers.RepeatedCompositeFieldContainer[ObservedColumn]
    def __init__(self, kinds: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., start_timestamps: _Optional[_Iterable[int]] = ..., commit_timestamps: _Optional[_Iterable[int]] = ..., min_commit_timestamps: _Optional[_Iterable[int]] = ..., observed: _Optional[_Iterable[_Union[ObservedColumn, _Mapping]]] = ...) -> None: ...

class MutationBatch(_message.Message):
    __slots__ = ("target", "mutations", "steps")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    mutations: _containers.RepeatedCompositeFieldContainer[Mutation]
    steps: StepList
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., mutations: _Optional[_Iterable[_Union[Mutation, _Mapping]]] = ..., steps: _Optional[_Union[StepList, _Mapping]] = ...) -> None: ...

class MutateRequest(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[MutationBatch]
    def __init__(self, batches: _Optional[_Iterable[_Union[MutationBatch, _Mapping]]] = ...) -> None: ...

class MutationResult(_message.Message):
    __slots__ = ("outcome", "failed_condition", "cell", "error")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILED_CONDITION_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    failed_condition: int
    cell: _cells_pb2.Cell
    error: _errors_pb2.ErrorDetail
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., failed_condition: _Optional[int] = ..., cell: _Optional[_Union[_cells_pb2.Cell, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class UnappliedMutation(_message.Message):
    __slots__ = ("mutation", "result")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    mutation: int
    result: MutationResult
    def __init__(self, mutation: _Optional[int] = ..., result: _Optional[_Union[MutationResult, _Mapping]] = ...) -> None: ...

class MutationBatchResult(_message.Message):
    __slots__ = ("mutations", "unapplied", "error")
    MUTATIONS_FIELD_NUMBER: _ClassVar[int]
    UNAPPLIED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    mutations: int
    unapplied: _containers.RepeatedCompositeFieldContainer[UnappliedMutation]
    error: _errors_pb2.ErrorDetail
    def __init__(self, mutations: _Optional[int] = ..., unapplied: _Optional[_Iterable[_Union[UnappliedMutation, _Mapping]]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class MutateResponse(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[MutationBatchResult]
    def __init__(self, batches: _Optional[_Iterable[_Union[MutationBatchResult, _Mapping]]] = ...) -> None: ...

class MutateTogetherRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: MutationBatch
    def __init__(self, batch: _Optional[_Union[MutationBatch, _Mapping]] = ...) -> None: ...

class MutateTogetherResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[MutationResult]
    def __init__(self, results: _Optional[_Iterable[_Union[MutationResult, _Mapping]]] = ...) -> None: ...

class RollForwardRequest(_message.Message):
    __slots__ = ("target", "start_timestamps", "commit_timestamps", "observed", "row", "await_cells")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    AWAIT_CELLS_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    start_timestamps: _containers.RepeatedScalarFieldContainer[int]
    commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    observed: _containers.RepeatedCompositeFieldContainer[ObservedColumn]
    row: bytes
    await_cells: int
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., start_timestamps: _Optional[_Iterable[int]] = ..., commit_timestamps: _Optional[_Iterable[int]] = ..., observed: _Optional[_Iterable[_Union[ObservedColumn, _Mapping]]] = ..., row: _Optional[bytes] = ..., await_cells: _Optional[int] = ...) -> None: ...

class RollForwardResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResolveLocksRequest(_message.Message):
    __slots__ = ("target", "rows", "columns", "start_timestamps", "read_at", "waited_milliseconds", "remove")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    READ_AT_FIELD_NUMBER: _ClassVar[int]
    WAITED_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    start_timestamps: _containers.RepeatedScalarFieldContainer[int]
    read_at: int
    waited_milliseconds: int
    remove: bool
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., start_timestamps: _Optional[_Iterable[int]] = ..., read_at: _Optional[int] = ..., waited_milliseconds: _Optional[int] = ..., remove: bool = ...) -> None: ...

class ResolveLocksResponse(_message.Message):
    __slots__ = ("start_timestamps", "commit_timestamps", "passable")
    START_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    PASSABLE_FIELD_NUMBER: _ClassVar[int]
    start_timestamps: _containers.RepeatedScalarFieldContainer[int]
    commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    passable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start_timestamps: _Optional[_Iterable[int]] = ..., commit_timestamps: _Optional[_Iterable[int]] = ..., passable: _Optional[_Iterable[int]] = ...) -> None: ...

class TransactionBatch(_message.Message):
    __slots__ = ("target", "start_timestamps", "cells", "rows", "columns", "kinds", "values", "observed", "notifications", "followed")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    start_timestamps: _containers.RepeatedScalarFieldContainer[int]
    cells: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    kinds: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    observed: _containers.RepeatedCompositeFieldContainer[ObservedColumn]
    notifications: _containers.RepeatedCompositeFieldContainer[WeakNotification]
    followed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., start_timestamps: _Optional[_Iterable[int]] = ..., cells: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., kinds: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[bytes]] = ..., observed: _Optional[_Iterable[_Union[ObservedColumn, _Mapping]]] = ..., notifications: _Optional[_Iterable[_Union[WeakNotification, _Mapping]]] = ..., followed: _Optional[_Iterable[int]] = ...) -> None: ...

class WeakNotification(_message.Message):
    __slots__ = ("transaction", "row", "column", "observers")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    transaction: int
    row: bytes
    column: bytes
    observers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, transaction: _Optional[int] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., observers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CommitTransactionsRequest(_message.Message):
    __slots__ = ("batches", "wait_milliseconds")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[TransactionBatch]
    wait_milliseconds: int
    def __init__(self, batches: _Optional[_Iterable[_Union[TransactionBatch, _Mapping]]] = ..., wait_milliseconds: _Optional[int] = ...) -> None: ...

class UncommittedTransaction(_message.Message):
    __slots__ = ("transaction", "result")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    transaction: int
    result: MutationResult
    def __init__(self, transaction: _Optional[int] = ..., result: _Optional[_Union[MutationResult, _Mapping]] = ...) -> None: ...

class TransactionBatchResult(_message.Message):
    __slots__ = ("commit_timestamps", "uncommitted", "error", "followed")
    COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    UNCOMMITTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    uncommitted: _containers.RepeatedCompositeFieldContainer[UncommittedTransaction]
    error: _errors_pb2.ErrorDetail
    followed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, commit_timestamps: _Optional[_Iterable[int]] = ..., uncommitted: _Optional[_Iterable[_Union[UncommittedTransaction, _Mapping]]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., followed: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitTransactionsResponse(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[TransactionBatchResult]
    def __init__(self, batches: _Optional[_Iterable[_Union[TransactionBatchResult, _Mapping]]] = ...) -> None: ...

class RowRead(_message.Message):
    __slots__ = ("row", "columns", "all_columns", "timestamp", "passing", "report_deletes", "column_prefixes", "acknowledgement")
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ALL_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PASSING_FIELD_NUMBER: _ClassVar[int]
    REPORT_DELETES_FIELD_NUMBER: _ClassVar[int]
    COLUMN_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    all_columns: bool
    timestamp: int
    passing: _containers.RepeatedScalarFieldContainer[int]
    report_deletes: bool
    column_prefixes: _containers.RepeatedScalarFieldContainer[bytes]
    acknowledgement: bytes
    def __init__(self, row: _Optional[bytes] = ..., columns: _Optional[_Iterable[bytes]] = ..., all_columns: bool = ..., timestamp: _Optional[int] = ..., passing: _Optional[_Iterable[int]] = ..., report_deletes: bool = ..., column_prefixes: _Optional[_Iterable[bytes]] = ..., acknowledgement: _Optional[bytes] = ...) -> None: ...

class CellReads(_message.Message):
    __slots__ = ("rows", "columns", "timestamps")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    timestamps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., timestamps: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadBatch(_message.Message):
    __slots__ = ("target", "reads", "cells")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    reads: _containers.RepeatedCompositeFieldContainer[RowRead]
    cells: CellReads
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., reads: _Optional[_Iterable[_Union[RowRead, _Mapping]]] = ..., cells: _Optional[_Union[CellReads, _Mapping]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[ReadBatch]
    def __init__(self, batches: _Optional[_Iterable[_Union[ReadBatch, _Mapping]]] = ...) -> None: ...

class FoundCells(_message.Message):
    __slots__ = ("reads", "rows", "columns", "commit_timestamps", "values", "deletes")
    READS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    reads: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    deletes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reads: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., commit_timestamps: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[bytes]] = ..., deletes: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockingLock(_message.Message):
    __slots__ = ("read", "lock")
    READ_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    read: int
    lock: _cells_pb2.Cell
    def __init__(self, read: _Optional[int] = ..., lock: _Optional[_Union[_cells_pb2.Cell, _Mapping]] = ...) -> None: ...

class RefusedRead(_message.Message):
    __slots__ = ("read", "error")
    READ_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    read: int
    error: _errors_pb2.ErrorDetail
    def __init__(self, read: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ReadBatchResult(_message.Message):
    __slots__ = ("found", "locks", "error", "refused", "reads")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    found: FoundCells
    locks: _containers.RepeatedCompositeFieldContainer[BlockingLock]
    error: _errors_pb2.ErrorDetail
    refused: _containers.RepeatedCompositeFieldContainer[RefusedRead]
    reads: int
    def __init__(self, found: _Optional[_Union[FoundCells, _Mapping]] = ..., locks: _Optional[_Iterable[_Union[BlockingLock, _Mapping]]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., refused: _Optional[_Iterable[_Union[RefusedRead, _Mapping]]] = ..., reads: _Optional[int] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[ReadBatchResult]
    def __init__(self, batches: _Optional[_Iterable[_Union[ReadBatchResult, _Mapping]]] = ...) -> None: ...

class AwaitTurnRequest(_message.Message):
    __slots__ = ("target", "row", "column", "place", "start_timestamp", "wait_milliseconds", "hold_milliseconds")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    row: bytes
    column: bytes
    place: int
    start_timestamp: int
    wait_milliseconds: int
    hold_milliseconds: int
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., place: _Optional[int] = ..., start_timestamp: _Optional[int] = ..., wait_milliseconds: _Optional[int] = ..., hold_milliseconds: _Optional[int] = ...) -> None: ...

class AwaitTurnResponse(_message.Message):
    __slots__ = ("in_turn", "contended", "start_timestamp", "found")
    IN_TURN_FIELD_NUMBER: _ClassVar[int]
    CONTENDED_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    in_turn: bool
    contended: bool
    start_timestamp: int
    found: ReadBatchResult
    def __init__(self, in_turn: bool = ..., contended: bool = ..., start_timestamp: _Optional[int] = ..., found: _Optional[_Union[ReadBatchResult, _Mapping]] = ...) -> None: ...

class EndTurnRequest(_message.Message):
    __slots__ = ("target", "row", "column", "place")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    row: bytes
    column: bytes
    place: int
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., place: _Optional[int] = ...) -> None: ...

class EndTurnResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("target", "range", "columns", "all_columns", "timestamp", "passing", "reverse", "row_limit", "page_rows_max", "page_bytes_max", "report_deletes", "column_prefixes", "joined", "filter", "count")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ALL_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PASSING_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    ROW_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    REPORT_DELETES_FIELD_NUMBER: _ClassVar[int]
    COLUMN_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    range: _cells_pb2.RowRange
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    all_columns: bool
    timestamp: int
    passing: _containers.RepeatedScalarFieldContainer[int]
    reverse: bool
    row_limit: int
    page_rows_max: int
    page_bytes_max: int
    report_deletes: bool
    column_prefixes: _containers.RepeatedScalarFieldContainer[bytes]
    joined: bool
    filter: _cells_pb2.RowFilter
    count: bool
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., columns: _Optional[_Iterable[bytes]] = ..., all_columns: bool = ..., timestamp: _Optional[int] = ..., passing: _Optional[_Iterable[int]] = ..., reverse: bool = ..., row_limit: _Optional[int] = ..., page_rows_max: _Optional[int] = ..., page_bytes_max: _Optional[int] = ..., report_deletes: bool = ..., column_prefixes: _Optional[_Iterable[bytes]] = ..., joined: bool = ..., filter: _Optional[_Union[_cells_pb2.RowFilter, _Mapping]] = ..., count: bool = ...) -> None: ...

class JoinedBytes(_message.Message):
    __slots__ = ("block", "offsets")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    block: bytes
    offsets: bytes
    def __init__(self, block: _Optional[bytes] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class JoinedColumn(_message.Message):
    __slots__ = ("name", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    values: JoinedBytes
    def __init__(self, name: _Optional[bytes] = ..., values: _Optional[_Union[JoinedBytes, _Mapping]] = ...) -> None: ...

class JoinedCells(_message.Message):
    __slots__ = ("rows", "columns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: JoinedBytes
    columns: _containers.RepeatedCompositeFieldContainer[JoinedColumn]
    def __init__(self, rows: _Optional[_Union[JoinedBytes, _Mapping]] = ..., columns: _Optional[_Iterable[_Union[JoinedColumn, _Mapping]]] = ...) -> None: ...

class ScanResponse(_message.Message):
    __slots__ = ("found", "locks", "rest", "error", "joined", "counted")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    found: FoundCells
    locks: _containers.RepeatedCompositeFieldContainer[BlockingLock]
    rest: _cells_pb2.RowRange
    error: _errors_pb2.ErrorDetail
    joined: JoinedCells
    counted: int
    def __init__(self, found: _Optional[_Union[FoundCells, _Mapping]] = ..., locks: _Optional[_Iterable[_Union[BlockingLock, _Mapping]]] = ..., rest: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., joined: _Optional[_Union[JoinedCells, _Mapping]] = ..., counted: _Optional[int] = ...) -> None: ...

class ScanCellsRequest(_message.Message):
    __slots__ = ("target", "space", "range", "from_timestamp", "until_timestamp", "page_rows_max", "cell_limit")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    FROM_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    UNTIL_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    PAGE_ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    CELL_LIMIT_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    space: _cells_pb2.Space
    range: _cells_pb2.RowRange
    from_timestamp: int
    until_timestamp: int
    page_rows_max: int
    cell_limit: int
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., space: _Optional[_Union[_cells_pb2.Space, str]] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., from_timestamp: _Optional[int] = ..., until_timestamp: _Optional[int] = ..., page_rows_max: _Optional[int] = ..., cell_limit: _Optional[int] = ...) -> None: ...

class ScanCellsResponse(_message.Message):
    __slots__ = ("cells", "rest", "error")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    cells: _containers.RepeatedCompositeFieldContainer[_cells_pb2.Cell]
    rest: _cells_pb2.RowRange
    error: _errors_pb2.ErrorDetail
    def __init__(self, cells: _Optional[_Iterable[_Union[_cells_pb2.Cell, _Mapping]]] = ..., rest: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class NotificationScan(_message.Message):
    __slots__ = ("target", "range", "observers", "locked_columns", "locks_before", "row_limit")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    LOCKED_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    LOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ROW_LIMIT_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    range: _cells_pb2.RowRange
    observers: _containers.RepeatedScalarFieldContainer[bytes]
    locked_columns: _containers.RepeatedScalarFieldContainer[bytes]
    locks_before: int
    row_limit: int
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., observers: _Optional[_Iterable[bytes]] = ..., locked_columns: _Optional[_Iterable[bytes]] = ..., locks_before: _Optional[int] = ..., row_limit: _Optional[int] = ...) -> None: ...

class ScanNotificationsRequest(_message.Message):
    __slots__ = ("scans",)
    SCANS_FIELD_NUMBER: _ClassVar[int]
    scans: _containers.RepeatedCompositeFieldContainer[NotificationScan]
    def __init__(self, scans: _Optional[_Iterable[_Union[NotificationScan, _Mapping]]] = ...) -> None: ...

class Notification(_message.Message):
    __slots__ = ("row", "column", "observer", "timestamps")
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    column: bytes
    observer: bytes
    timestamps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., observer: _Optional[bytes] = ..., timestamps: _Optional[_Iterable[int]] = ...) -> None: ...

class NotificationScanResult(_message.Message):
    __slots__ = ("notifications", "locks", "rest", "notifications_written", "error")
    NOTIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATIONS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    notifications: _containers.RepeatedCompositeFieldContainer[Notification]
    locks: _containers.RepeatedCompositeFieldContainer[_cells_pb2.Cell]
    rest: _cells_pb2.RowRange
    notifications_written: int
    error: _errors_pb2.ErrorDetail
    def __init__(self, notifications: _Optional[_Iterable[_Union[Notification, _Mapping]]] = ..., locks: _Optional[_Iterable[_Union[_cells_pb2.Cell, _Mapping]]] = ..., rest: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., notifications_written: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ScanNotificationsResponse(_message.Message):
    __slots__ = ("scans",)
    SCANS_FIELD_NUMBER: _ClassVar[int]
    scans: _containers.RepeatedCompositeFieldContainer[NotificationScanResult]
    def __init__(self, scans: _Optional[_Iterable[_Union[NotificationScanResult, _Mapping]]] = ...) -> None: ...

class WatchNotificationsRequest(_message.Message):
    __slots__ = ("watched", "listen_only")
    class Watched(_message.Message):
        __slots__ = ("table_id", "observers")
        TABLE_ID_FIELD_NUMBER: _ClassVar[int]
        OBSERVERS_FIELD_NUMBER: _ClassVar[int]
        table_id: int
        observers: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, table_id: _Optional[int] = ..., observers: _Optional[_Iterable[bytes]] = ...) -> None: ...
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    LISTEN_ONLY_FIELD_NUMBER: _ClassVar[int]
    watched: _containers.RepeatedCompositeFieldContainer[WatchNotificationsRequest.Watched]
    listen_only: bool
    def __init__(self, watched: _Optional[_Iterable[_Union[WatchNotificationsRequest.Watched, _Mapping]]] = ..., listen_only: bool = ...) -> None: ...

class WatchedNotification(_message.Message):
    __slots__ = ("table_id", "row", "column", "observer", "timestamp")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    row: bytes
    column: bytes
    observer: bytes
    timestamp: int
    def __init__(self, table_id: _Optional[int] = ..., row: _Optional[bytes] = ..., column: _Optional[bytes] = ..., observer: _Optional[bytes] = ..., timestamp: _Optional[int] = ...) -> None: ...

class WatchNotificationsResponse(_message.Message):
    __slots__ = ("notifications", "left_out")
    NOTIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    notifications: _containers.RepeatedCompositeFieldContainer[WatchedNotification]
    left_out: int
    def __init__(self, notifications: _Optional[_Iterable[_Union[WatchedNotification, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class ScanChangesRequest(_message.Message):
    __slots__ = ("target", "range", "after", "until", "passing", "changes_max", "page_bytes_max", "before", "settled")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    PASSING_FIELD_NUMBER: _ClassVar[int]
    CHANGES_MAX_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    range: _cells_pb2.RowRange
    after: int
    until: int
    passing: _containers.RepeatedScalarFieldContainer[int]
    changes_max: int
    page_bytes_max: int
    before: bool
    settled: bool
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., after: _Optional[int] = ..., until: _Optional[int] = ..., passing: _Optional[_Iterable[int]] = ..., changes_max: _Optional[int] = ..., page_bytes_max: _Optional[int] = ..., before: bool = ..., settled: bool = ...) -> None: ...

class FoundChanges(_message.Message):
    __slots__ = ("commit_timestamps", "rows", "columns", "values", "deletes", "values_before", "new_cells")
    COMMIT_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    VALUES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NEW_CELLS_FIELD_NUMBER: _ClassVar[int]
    commit_timestamps: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    deletes: _containers.RepeatedScalarFieldContainer[int]
    values_before: _containers.RepeatedScalarFieldContainer[bytes]
    new_cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, commit_timestamps: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., deletes: _Optional[_Iterable[int]] = ..., values_before: _Optional[_Iterable[bytes]] = ..., new_cells: _Optional[_Iterable[int]] = ...) -> None: ...

class ScanChangesResponse(_message.Message):
    __slots__ = ("found", "reached", "locks", "error")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    found: FoundChanges
    reached: int
    locks: _containers.RepeatedCompositeFieldContainer[BlockingLock]
    error: _errors_pb2.ErrorDetail
    def __init__(self, found: _Optional[_Union[FoundChanges, _Mapping]] = ..., reached: _Optional[int] = ..., locks: _Optional[_Iterable[_Union[BlockingLock, _Mapping]]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ChangesLook(_message.Message):
    __slots__ = ("target", "after", "until", "passing")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    PASSING_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    after: int
    until: int
    passing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., after: _Optional[int] = ..., until: _Optional[int] = ..., passing: _Optional[_Iterable[int]] = ...) -> None: ...

class LookForChangesRequest(_message.Message):
    __slots__ = ("looks",)
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    looks: _containers.RepeatedCompositeFieldContainer[ChangesLook]
    def __init__(self, looks: _Optional[_Iterable[_Union[ChangesLook, _Mapping]]] = ...) -> None: ...

class ChangesLookResult(_message.Message):
    __slots__ = ("reached", "newest", "locks", "error")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reached: int
    newest: int
    locks: _containers.RepeatedCompositeFieldContainer[BlockingLock]
    error: _errors_pb2.ErrorDetail
    def __init__(self, reached: _Optional[int] = ..., newest: _Optional[int] = ..., locks: _Optional[_Iterable[_Union[BlockingLock, _Mapping]]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class LookForChangesResponse(_message.Message):
    __slots__ = ("looks",)
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    looks: _containers.RepeatedCompositeFieldContainer[ChangesLookResult]
    def __init__(self, looks: _Optional[_Iterable[_Union[ChangesLookResult, _Mapping]]] = ...) -> None: ...

class TabletStatistics(_message.Message):
    __slots__ = ("cells", "bytes", "locks", "notifications", "mutations_applied", "mutations_refused", "reads", "rows_scanned", "versions_skipped", "batches_synced", "mutations_per_second", "reads_per_second", "queue_bytes", "notifications_written", "locks_written", "turn_cells", "turns_waiting", "turns_granted", "turns_given_up", "turns_timed_out")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    ROWS_SCANNED_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    BATCHES_SYNCED_FIELD_NUMBER: _ClassVar[int]
    MUTATIONS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    READS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATIONS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    LOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    TURN_CELLS_FIELD_NUMBER: _ClassVar[int]
    TURNS_WAITING_FIELD_NUMBER: _ClassVar[int]
    TURNS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    TURNS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    TURNS_TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    cells: int
    bytes: int
    locks: int
    notifications: int
    mutations_applied: int
    mutations_refused: int
    reads: int
    rows_scanned: int
    versions_skipped: int
    batches_synced: int
    mutations_per_second: float
    reads_per_second: float
    queue_bytes: int
    notifications_written: int
    locks_written: int
    turn_cells: int
    turns_waiting: int
    turns_granted: int
    turns_given_up: int
    turns_timed_out: int
    def __init__(self, cells: _Optional[int] = ..., bytes: _Optional[int] = ..., locks: _Optional[int] = ..., notifications: _Optional[int] = ..., mutations_applied: _Optional[int] = ..., mutations_refused: _Optional[int] = ..., reads: _Optional[int] = ..., rows_scanned: _Optional[int] = ..., versions_skipped: _Optional[int] = ..., batches_synced: _Optional[int] = ..., mutations_per_second: _Optional[float] = ..., reads_per_second: _Optional[float] = ..., queue_bytes: _Optional[int] = ..., notifications_written: _Optional[int] = ..., locks_written: _Optional[int] = ..., turn_cells: _Optional[int] = ..., turns_waiting: _Optional[int] = ..., turns_granted: _Optional[int] = ..., turns_given_up: _Optional[int] = ..., turns_timed_out: _Optional[int] = ...) -> None: ...

class TabletDescription(_message.Message):
    __slots__ = ("table_id", "tablet_id", "epoch", "schema_version", "range", "statistics", "error")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    tablet_id: int
    epoch: int
    schema_version: int
    range: _cells_pb2.RowRange
    statistics: TabletStatistics
    error: _errors_pb2.ErrorDetail
    def __init__(self, table_id: _Optional[int] = ..., tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., schema_version: _Optional[int] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., statistics: _Optional[_Union[TabletStatistics, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class DescribeTabletsRequest(_message.Message):
    __slots__ = ("tablet_ids",)
    TABLET_IDS_FIELD_NUMBER: _ClassVar[int]
    tablet_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tablet_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeTabletsResponse(_message.Message):
    __slots__ = ("tablets",)
    TABLETS_FIELD_NUMBER: _ClassVar[int]
    tablets: _containers.RepeatedCompositeFieldContainer[TabletDescription]
    def __init__(self, tablets: _Optional[_Iterable[_Union[TabletDescription, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("newest_timestamp",)
    NEWEST_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    newest_timestamp: int
    def __init__(self, newest_timestamp: _Optional[int] = ...) -> None: ...

class ReportedTablet(_message.Message):
    __slots__ = ("tablet_id", "epoch", "schema_version", "error")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    epoch: int
    schema_version: int
    error: _errors_pb2.ErrorDetail
    def __init__(self, tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., schema_version: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("server_id", "tablets", "writes_refused")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    TABLETS_FIELD_NUMBER: _ClassVar[int]
    WRITES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    tablets: _containers.RepeatedCompositeFieldContainer[ReportedTablet]
    writes_refused: _errors_pb2.ErrorDetail
    def __init__(self, server_id: _Optional[str] = ..., tablets: _Optional[_Iterable[_Union[ReportedTablet, _Mapping]]] = ..., writes_refused: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ProposeSplitRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ...) -> None: ...

class ProposeSplitResponse(_message.Message):
    __slots__ = ("row",)
    ROW_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    def __init__(self, row: _Optional[bytes] = ...) -> None: ...

class ProposePartsRequest(_message.Message):
    __slots__ = ("target", "range", "part_bytes")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    range: _cells_pb2.RowRange
    part_bytes: int
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class ProposePartsResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LoadFence(_message.Message):
    __slots__ = ("name", "run", "range", "commit_timestamp")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    name: str
    run: int
    range: _cells_pb2.RowRange
    commit_timestamp: int
    def __init__(self, name: _Optional[str] = ..., run: _Optional[int] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., commit_timestamp: _Optional[int] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("target", "action", "fence")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[FenceRequest.Action]
        ACTION_RAISE: _ClassVar[FenceRequest.Action]
        ACTION_CLEAR: _ClassVar[FenceRequest.Action]
        ACTION_FINISH: _ClassVar[FenceRequest.Action]
        ACTION_LIFT: _ClassVar[FenceRequest.Action]
        ACTION_LOOK: _ClassVar[FenceRequest.Action]
    ACTION_UNSPECIFIED: FenceRequest.Action
    ACTION_RAISE: FenceRequest.Action
    ACTION_CLEAR: FenceRequest.Action
    ACTION_FINISH: FenceRequest.Action
    ACTION_LIFT: FenceRequest.Action
    ACTION_LOOK: FenceRequest.Action
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    action: FenceRequest.Action
    fence: LoadFence
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., action: _Optional[_Union[FenceRequest.Action, str]] = ..., fence: _Optional[_Union[LoadFence, _Mapping]] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ("fence", "obstacle", "remains")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    REMAINS_FIELD_NUMBER: _ClassVar[int]
    fence: LoadFence
    obstacle: _cells_pb2.Cell
    remains: bool
    def __init__(self, fence: _Optional[_Union[LoadFence, _Mapping]] = ..., obstacle: _Optional[_Union[_cells_pb2.Cell, _Mapping]] = ..., remains: bool = ...) -> None: ...

class ObservedColumn(_message.Message):
    __slots__ = ("column", "observers")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    column: bytes
    observers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, column: _Optional[bytes] = ..., observers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("target", "name", "start_timestamp", "commit_timestamp", "rows", "columns", "values", "observed")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    target: TabletTarget
    name: str
    start_timestamp: int
    commit_timestamp: int
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    observed: _containers.RepeatedCompositeFieldContainer[ObservedColumn]
    def __init__(self, target: _Optional[_Union[TabletTarget, _Mapping]] = ..., name: _Optional[str] = ..., start_timestamp: _Optional[int] = ..., commit_timestamp: _Optional[int] = ..., rows: _Optional[_Iterable[bytes]] = ..., columns: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., observed: _Optional[_Iterable[_Union[ObservedColumn, _Mapping]]] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ColumnTtl(_message.Message):
    __slots__ = ("column", "ttl_milliseconds")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    column: bytes
    ttl_milliseconds: int
    def __init__(self, column: _Optional[bytes] = ..., ttl_milliseconds: _Optional[int] = ...) -> None: ...

class OpenTabletRequest(_message.Message):
    __slots__ = ("table_id", "tablet_id", "epoch", "schema_version", "range", "must_exist", "origin_tablet_id", "origin_epoch", "change_feed", "ttls", "served_epoch")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    MUST_EXIST_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FEED_FIELD_NUMBER: _ClassVar[int]
    TTLS_FIELD_NUMBER: _ClassVar[int]
    SERVED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    tablet_id: int
    epoch: int
    schema_version: int
    range: _cells_pb2.RowRange
    must_exist: bool
    origin_tablet_id: int
    origin_epoch: int
    change_feed: bool
    ttls: _containers.RepeatedCompositeFieldContainer[ColumnTtl]
    served_epoch: int
    def __init__(self, table_id: _Optional[int] = ..., tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., schema_version: _Optional[int] = ..., range: _Optional[_Union[_cells_pb2.RowRange, _Mapping]] = ..., must_exist: bool = ..., origin_tablet_id: _Optional[int] = ..., origin_epoch: _Optional[int] = ..., change_feed: bool = ..., ttls: _Optional[_Iterable[_Union[ColumnTtl, _Mapping]]] = ..., served_epoch: _Optional[int] = ...) -> None: ...

class OpenTabletResponse(_message.Message):
    __slots__ = ("tablet",)
    TABLET_FIELD_NUMBER: _ClassVar[int]
    tablet: TabletDescription
    def __init__(self, tablet: _Optional[_Union[TabletDescription, _Mapping]] = ...) -> None: ...

class SafePoint(_message.Message):
    __slots__ = ("tablet_id", "epoch", "reads", "transactions", "collect_below")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    COLLECT_BELOW_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    epoch: int
    reads: int
    transactions: int
    collect_below: int
    def __init__(self, tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ..., reads: _Optional[int] = ..., transactions: _Optional[int] = ..., collect_below: _Optional[int] = ...) -> None: ...

class RaiseSafePointsRequest(_message.Message):
    __slots__ = ("safe_points",)
    SAFE_POINTS_FIELD_NUMBER: _ClassVar[int]
    safe_points: _containers.RepeatedCompositeFieldContainer[SafePoint]
    def __init__(self, safe_points: _Optional[_Iterable[_Union[SafePoint, _Mapping]]] = ...) -> None: ...

class RaisedSafePoint(_message.Message):
    __slots__ = ("reads", "transactions", "collected_below", "history_bytes", "cells_collected", "bytes_collected", "error")
    READS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_BELOW_FIELD_NUMBER: _ClassVar[int]
    HISTORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CELLS_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reads: int
    transactions: int
    collected_below: int
    history_bytes: int
    cells_collected: int
    bytes_collected: int
    error: _errors_pb2.ErrorDetail
    def __init__(self, reads: _Optional[int] = ..., transactions: _Optional[int] = ..., collected_below: _Optional[int] = ..., history_bytes: _Optional[int] = ..., cells_collected: _Optional[int] = ..., bytes_collected: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class RaiseSafePointsResponse(_message.Message):
    __slots__ = ("safe_points",)
    SAFE_POINTS_FIELD_NUMBER: _ClassVar[int]
    safe_points: _containers.RepeatedCompositeFieldContainer[RaisedSafePoint]
    def __init__(self, safe_points: _Optional[_Iterable[_Union[RaisedSafePoint, _Mapping]]] = ...) -> None: ...

class CloseTabletRequest(_message.Message):
    __slots__ = ("tablet_id", "epoch")
    TABLET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    tablet_id: int
    epoch: int
    def __init__(self, tablet_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class CloseTabletResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
