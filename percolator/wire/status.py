"""Errors on the wire: the one place that maps them to gRPC, and back.

A failed call carries its gRPC status code and, as clients in other languages expect, a
`google.rpc.Status` in the trailer `grpc-status-details-bin`, which holds one
`percolator.v1.ErrorDetail`.
"""

from __future__ import annotations

import re

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from percolator import errors
from percolator.errors import (
    PercolatorError,
)
from percolator.v1 import cells_pb2, errors_pb2
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire import methods
from percolator.wire.roles import NO_ROLE

DETAILS_TRAILER = "grpc-status-details-bin"

_RETRY_TO_WIRE = {
    errors.Retry.SAFE: errors_pb2.RETRY_SAFETY_SAFE,
    errors.Retry.USELESS: errors_pb2.RETRY_SAFETY_USELESS,
    errors.Retry.UNKNOWN: errors_pb2.RETRY_SAFETY_UNKNOWN,
}

_RETRY_FROM_WIRE = {wire: retry for retry, wire in _RETRY_TO_WIRE.items()}

_FAULT_TO_WIRE = {
    errors.StoreFault.DISK_FULL: errors_pb2.StoreUnusable.REASON_DISK_FULL,
    errors.StoreFault.INPUT_OUTPUT: errors_pb2.StoreUnusable.REASON_INPUT_OUTPUT,
    errors.StoreFault.DAMAGED: errors_pb2.StoreUnusable.REASON_DAMAGED,
    errors.StoreFault.READ_ONLY: errors_pb2.StoreUnusable.REASON_READ_ONLY,
}
_FAULT_FROM_WIRE = {wire: fault for fault, wire in _FAULT_TO_WIRE.items()}

_TOO_LARGE = re.compile(
    r"(CLIENT: Sent|SERVER: Received|SERVER: Sent|CLIENT: Received) message larger than max "
    r"\((\d+) vs\. (\d+)\)"
)
"""gRPC's own message for a message above a limit. The status code alone does not say so: a proxy in
between, whose quota is used up, answers with the same one."""

_MILLISECONDS_MAX = 2**32 - 1

_OF_REQUESTS = ("CLIENT: Sent", "SERVER: Received")

_CODES: list[tuple[type[errors.PercolatorError], grpc.StatusCode]] = [
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.SessionExpired, grpc.StatusCode.NOT_FOUND),
    (errors.SchemaError, grpc.StatusCode.NOT_FOUND),
    (errors.SnapshotTooOld, grpc.StatusCode.OUT_OF_RANGE),
    (errors.TabletMoved, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SchemaChanged, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.WrongCluster, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UniqueViolation, grpc.StatusCode.ALREADY_EXISTS),
    (errors.OutcomeUnknown, grpc.StatusCode.UNKNOWN),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ConflictError, grpc.StatusCode.ABORTED),
    (errors.NotExecuted, grpc.StatusCode.UNAVAILABLE),
    (errors.ExecutionUnknown, grpc.StatusCode.UNKNOWN),
    (errors.PercolatorError, grpc.StatusCode.INTERNAL),
]
"""The first match decides, so subclasses come before their base class."""


def status_code(error: errors.PercolatorError) -> grpc.StatusCode:
    return next(code for kind, code in _CODES if isinstance(error, kind))


def to_detail(error: errors.PercolatorError) -> errors_pb2.ErrorDetail:
    """The error as a message, for a trailer or for the result of one batch among many."""
    detail = errors_pb2.ErrorDetail(
        message=error.message, where=error.where, retry=_RETRY_TO_WIRE[error.retry]
    )
    match error:
        case errors.InvalidArgument():
            detail.invalid_argument.field = error.field
            detail.invalid_argument.reason = error.reason
        case errors.Overloaded():
            detail.overloaded.retry_after_milliseconds = _milliseconds(error)
        case errors.SessionExpired():
            detail.session_expired.session_id = error.session_id
        case errors.TabletMoved():
            detail.tablet_moved.tablet_id = error.tablet_id
            detail.tablet_moved.epoch = error.epoch
            detail.tablet_moved.highest_epoch = error.highest_epoch
            detail.tablet_moved.locations.extend(map(_location_to_wire, error.locations))
        case errors.SchemaChanged():
            detail.schema_changed.table_id = error.table_id
            detail.schema_changed.schema_version = error.schema_version
        case errors.SnapshotTooOld():
            detail.snapshot_too_old.timestamp = error.timestamp
            detail.snapshot_too_old.safe_point = error.safe_point
        case errors.Unauthenticated():
            detail.unauthenticated.SetInParent()
        case errors.PermissionDenied():
            detail.permission_denied.SetInParent()
        case errors.StoreUnusable():
            detail.store_unusable.reason = _FAULT_TO_WIRE[error.fault]
        case errors.WrongCluster():
            detail.wrong_cluster.expected = error.expected
            detail.wrong_cluster.found = error.found
        case errors.UnknownServer():
            detail.unknown_server.server = error.server
        case errors.NotReady():
            detail.not_ready.retry_after_milliseconds = _milliseconds(error)
            detail.not_ready.leaving = error.leaving
        case errors.OutcomeUnknown():
            detail.outcome_unknown.start_timestamp = error.start_timestamp
            detail.outcome_unknown.retry_after_milliseconds = _milliseconds(error)
            if error.primary is not None:
                detail.outcome_unknown.primary.CopyFrom(_address_to_wire(error.primary))
        case errors.ExecutionUnknown():
            detail.outcome_unknown.SetInParent()
            detail.outcome_unknown.retry_after_milliseconds = _milliseconds(error)
        case errors.ConflictError():
            if error.cell is not None:
                detail.conflict.cell.CopyFrom(_address_to_wire(error.cell))
            detail.conflict.start_timestamp = error.start_timestamp
            detail.conflict.other_start_timestamp = error.other_start_timestamp
            detail.conflict.other_commit_timestamp = error.other_commit_timestamp
        case errors.UniqueViolation():
            detail.unique_violated.index = error.index
            detail.unique_violated.rows.extend(error.rows)
        case errors.SchemaError():
            detail.schema_mismatch.table = error.table
            detail.schema_mismatch.table_id = error.table_id
        case errors.InvariantViolation():
            detail.invariant_violated.rule = error.message
    return detail


def _milliseconds(error: errors.PercolatorError) -> int:
    """The pause that it asks for, as far as a message can say."""
    return min(round(error.retry_after_seconds * 1000), _MILLISECONDS_MAX)


def to_trailer(code: grpc.StatusCode, message: str, detail: errors_pb2.ErrorDetail) -> bytes:
    """The bytes of the details trailer of a call that fails with this code and message."""
    status = Status(code=code.value[0], message=message)
    status.details.add().Pack(detail)
    encoded: bytes = status.SerializeToString()
    return encoded


def from_detail(detail: errors_pb2.ErrorDetail) -> errors.PercolatorError:
    """The inverse of `to_detail`. Causes that only newer versions know keep their retry safety."""
    error = _from_cause(detail)
    if error is not None:
        error.retry = _RETRY_FROM_WIRE.get(detail.retry, error.retry)
        return error
    kind: type[errors.PercolatorError] = errors.PercolatorError
    if detail.retry == errors_pb2.RETRY_SAFETY_SAFE:
        kind = errors.NotExecuted
    elif detail.retry == errors_pb2.RETRY_SAFETY_UNKNOWN:
        kind = errors.ExecutionUnknown
    return kind(detail.message, where=detail.where)


def from_rpc_error(error: grpc.aio.AioRpcError, where: str) -> errors.PercolatorError:
    """The error that a failed call means. `where` names the method and the dialled address."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_TRAILER and isinstance(value, bytes):
            detail = _unpack(value)
            if detail is not None:
                typed = from_detail(detail)
                if isinstance(typed, errors.PermissionDenied) and NO_ROLE in typed.message:
                    # A gateway with tokens says so of methods that its release does not know.
                    return _no_such_method(typed.message, where)
                # A server seldom knows by which address it was dialled.
                typed.where = typed.where or where
                return typed
    message = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(message, where=where)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded("no answer in time", where=where)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            unknown = errors.ExecutionUnknown(f"{error.code().name}: {message}", where=where)
            return too_large(error, where) or unknown
        case grpc.StatusCode.UNIMPLEMENTED:
            return _no_such_method(message, where)
        case _:
            return errors.ExecutionUnknown(f"{error.code().name}: {message}", where=where)


def _no_such_method(said: str, where: str) -> errors.UsageError:
    return errors.UsageError(
        "the server, or a gateway before it, has no such method: it runs an older release, or is "
        f"one of another kind ({said})",
        where=where,
    )


def from_status(raw: bytes) -> errors.PercolatorError:
    """The error that a failed call means, from what `to_trailer` has made of it."""
    detail = _unpack(raw)
    if detail is None:
        return errors.ExecutionUnknown("the call failed with an error that is not a message")
    return from_detail(detail)


def too_large(error: grpc.aio.AioRpcError, where: str) -> errors.PercolatorError | None:
    """The error of a call that failed because of gRPC's own limit of a message's size; None if it
    failed because of anything else. `where` begins with the path of the method.

    The very same call would fail again. But of a call that changes something and whose response is
    too large, only its sender can tell what to do: it was executed.
    """
    found = _TOO_LARGE.search(error.details() or "")
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or found is None:
        return None
    whose, size, limit = found.groups()
    sizes = f"has {size} bytes, at most {limit} are accepted"
    if whose in _OF_REQUESTS:
        return errors.InvalidArgument("request", f"{sizes}; send less in one call", where=where)
    if where.partition(" ")[0] in methods.READING:
        return errors.InvalidArgument("response", f"{sizes}; ask for less in one call", where=where)
    return errors.ExecutionUnknown(f"executed, but its response {sizes}", where=where)


def _unpack(trailer: bytes) -> errors_pb2.ErrorDetail | None:
    try:
        status = Status.FromString(trailer)
        for packed in status.details:
            detail = errors_pb2.ErrorDetail()
            if packed.Unpack(detail):
                return detail
    except DecodeError:
        return None
    return None


def _address_to_wire(address: errors.CellAddress) -> errors_pb2.CellAddress:
    return errors_pb2.CellAddress(table_id=address.table_id, row=address.row, column=address.column)


def _address_from_wire(address: errors_pb2.CellAddress) -> errors.CellAddress:
    return errors.CellAddress(address.table_id, address.row, address.column)


def _location_to_wire(location: errors.TabletLocation) -> errors_pb2.TabletLocation:
    return errors_pb2.TabletLocation(
        table_id=location.table_id,
        tablet_id=location.tablet_id,
        epoch=location.epoch,
        range=cells_pb2.RowRange(start=location.start, end=location.end),
        address=location.address,
    )


def location_from_wire(location: errors_pb2.TabletLocation) -> errors.TabletLocation:
    """Decodes the location of a tablet."""
    return errors.TabletLocation(
        table_id=location.table_id,
        tablet_id=location.tablet_id,
        epoch=location.epoch,
        start=location.range.start,
        end=location.range.end,
        address=location.address,
    )


def _from_cause(detail: errors_pb2.ErrorDetail) -> errors.PercolatorError | None:
    """The error of a cause; None if this release does not know the cause."""
    message, where = detail.message, detail.where
    match detail.WhichOneof("cause"):
        case "invalid_argument":
            invalid = detail.invalid_argument
            return errors.InvalidArgument(invalid.field, invalid.reason, where=where)
        case "overloaded":
            return errors.Overloaded(
                message,
                retry_after_seconds=detail.overloaded.retry_after_milliseconds / 1000,
                where=where,
            )
        case "not_ready":
            return errors.NotReady(
                message,
                retry_after_seconds=detail.not_ready.retry_after_milliseconds / 1000,
                leaving=detail.not_ready.leaving,
                where=where,
            )
        case "unknown_server":
            return errors.UnknownServer(message, server=detail.unknown_server.server, where=where)
        case "session_expired":
            session_id = detail.session_expired.session_id
            return errors.SessionExpired(message, session_id=session_id, where=where)
        case "tablet_moved":
            moved = detail.tablet_moved
            return errors.TabletMoved(
                message,
                tablet_id=moved.tablet_id,
                epoch=moved.epoch,
                highest_epoch=moved.highest_epoch,
                locations=tuple(map(location_from_wire, moved.locations)),
                where=where,
            )
        case "schema_changed":
            return errors.SchemaChanged(
                message,
                table_id=detail.schema_changed.table_id,
                schema_version=detail.schema_changed.schema_version,
                where=where,
            )
        case "snapshot_too_old":
            return errors.SnapshotTooOld(
                message,
                timestamp=detail.snapshot_too_old.timestamp,
                safe_point=detail.snapshot_too_old.safe_point,
                where=where,
            )
        case "store_unusable":
            reason = detail.store_unusable.reason
            fault = _FAULT_FROM_WIRE.get(reason, errors.StoreFault.INPUT_OUTPUT)
            return errors.StoreUnusable(message, fault=fault, where=where)
        case "wrong_cluster":
            return errors.WrongCluster(
                message,
                expected=detail.wrong_cluster.expected,
                found=detail.wrong_cluster.found,
                where=where,
            )
        case "outcome_unknown":
            return _outcome_unknown(detail)
        case "unauthenticated":
            return errors.Unauthenticated(message, where=where)
        case "permission_denied":
            return errors.PermissionDenied(message, where=where)
        case "invariant_violated":
            return errors.InvariantViolation(message, where=where)
        case "conflict":
            conflict = detail.conflict
            return errors.ConflictError(
                message,
                cell=_address_from_wire(conflict.cell) if conflict.HasField("cell") else None,
                start_timestamp=conflict.start_timestamp,
                other_start_timestamp=conflict.other_start_timestamp,
                other_commit_timestamp=conflict.other_commit_timestamp,
                where=where,
            )
        case "unique_violated":
            unique = detail.unique_violated
            return errors.UniqueViolation(
                message, index=unique.index, rows=tuple(unique.rows), where=where
            )
        case "schema_mismatch":
            return errors.SchemaError(
                message,
                table=detail.schema_mismatch.table,
                table_id=detail.schema_mismatch.table_id,
                where=where,
            )
        case _:
            return None


def _outcome_unknown(detail: errors_pb2.ErrorDetail) -> errors.PercolatorError:
    error = _unknown(detail)
    error.retry_after_seconds = detail.outcome_unknown.retry_after_milliseconds / 1000
    return error


def _unknown(detail: errors_pb2.ErrorDetail) -> errors.PercolatorError:
    cause = detail.outcome_unknown
    if not cause.start_timestamp:
        return errors.ExecutionUnknown(detail.message, where=detail.where)
    is_lost = detail.retry == errors_pb2.RETRY_SAFETY_USELESS
    kind = errors.OutcomeLost if is_lost else errors.OutcomeUnknown
    return kind(
        detail.message,
        start_timestamp=cause.start_timestamp,
        primary=_address_from_wire(cause.primary),
        where=detail.where,
    )


# Errors in the trailers of a server.

_DETAILS_BYTES_MAX = 3 * 1024
_TEXT_CHARACTERS_MAX = 200
"""Each character takes up to 12 bytes in the status message, as percent-encoded UTF-8."""


def failure(error: PercolatorError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """The arguments for `grpc.aio.ServicerContext.abort`.

    gRPC limits trailers to 8 KiB, and a longer error loses its type on the way. Then the caller
    would not know whether its call may be sent again. So texts are cut. If that is not enough,
    everything but the plain fields of the cause is left out: the caller can ask again where a
    tablet is, but not what kind of error it was.
    """
    code, message, detail = status_code(error), _short(str(error)), to_detail(error)
    trailer = to_trailer(code, message, detail)
    if len(trailer) > _DETAILS_BYTES_MAX:
        _cut(detail)
        trailer = to_trailer(code, message, detail)
    return code, message, ((DETAILS_TRAILER, trailer),)


def _cut(detail: ErrorDetail) -> None:
    _shorten(detail)
    cause = detail.WhichOneof("cause")
    if cause is not None:
        _shorten(getattr(detail, cause))
        if detail.ByteSize() > _DETAILS_BYTES_MAX:
            _leave_out_messages(getattr(detail, cause))


def _shorten(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, _short(value))


def _leave_out_messages(message: Message) -> None:
    for field, _ in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            message.ClearField(field.name)


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"
