"""Errors of calls of Bigtable: above all, whether the call was executed, and what to do.

Only an error that the service gives before it does anything means that the call was not executed.
gRPC's client uses some of the same codes for calls of which it has lost the answer; such a call may
have been executed, whatever its code.
"""

from __future__ import annotations

import re

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator import errors
from percolator.bigtable.methods import READ_ROWS
from percolator.bigtable.missing_family import missing_family

_THROTTLED_SECONDS = 0.1
"""The pause after a refusal that names none."""
_NOT_TRANSACTIONAL = "single-row transactions"
"""What the service calls checks with changes, where it says that a profile does not permit them."""
_BEING_CREATED = re.compile(r"\b(being created|creating)\b", re.IGNORECASE)
"""What the service says of a table that is not ready yet: it has done nothing, and will be able to
soon."""
_NAMES = re.compile(r"projects/[^\s\"']+|'[^']*'")
"""Of whatever, and rows: they may be any words."""
_TOO_LARGE = re.compile(r"CLIENT: (Sent|Received) message larger than max")
_LOST = re.compile(
    r"Stream removed|RST_STREAM|metadata size exceeds|CLIENT: Received message larger"
)
"""How gRPC's client reports an answer that it has lost. For some of them it uses codes by which the
service refuses calls: RESOURCE_EXHAUSTED for ENHANCE_YOUR_CALM, for an answer or its trailers above
a limit; PERMISSION_DENIED for INADEQUATE_SECURITY."""
_TOO_LARGE_FIELDS = {
    "Sent": ("request", "send less in one call"),
    "Received": ("response", "a row is too large"),
}
_DETAILS_TRAILER = "grpc-status-details-bin"
_REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.ALREADY_EXISTS,
)
ONE_CLUSTER = (
    "use one that routes to a single cluster and permits single-row transactions: gcloud bigtable "
    "app-profiles create NAME --instance=INSTANCE --route-to=CLUSTER --transactional-writes, and "
    "?profile=NAME in the address"
)
"""What to do about an app profile that cannot be used."""


def from_rpc_error(failed: grpc.aio.AioRpcError, where: str) -> errors.PercolatorError:
    """The error of a failed call. `where` is the path of the method, and what it was called for."""
    error = _error(failed.code(), failed.details() or "", where)
    if error.retry is not errors.Retry.USELESS:
        error.retry_after_seconds = _asked_seconds(failed, error.retry_after_seconds)
    return error


def _error(code: grpc.StatusCode, details: str, where: str) -> errors.PercolatorError:
    said = (details or code.name).rstrip(".")
    lacking = missing_family(said, where)
    if lacking is not None:
        return lacking
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(said, where=where)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded("no answer in time", where=where)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if (too_large := _TOO_LARGE.search(said)) and (
            too_large[1] == "Sent" or where.startswith(READ_ROWS.path)
        ):
            field, why = _TOO_LARGE_FIELDS[too_large[1]]
            return errors.InvalidArgument(field, f"{said}: {why}", where=where)
        case _ if _LOST.search(said):
            return errors.ExecutionUnknown(f"{code.name}: {said}", where=where)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(
                f"Bigtable refuses more calls, because a quota or the capacity of its nodes is "
                f"used up ({said}): add nodes, or ask for a higher quota",
                retry_after_seconds=_THROTTLED_SECONDS,
                where=where,
            )
        case grpc.StatusCode.NOT_FOUND:
            return _not_found(said, where)
        case grpc.StatusCode.UNAUTHENTICATED:
            return errors.Unauthenticated(
                f"Bigtable does not accept the access token ({said}): check which account "
                "`gcloud auth application-default print-access-token`, or "
                "GOOGLE_APPLICATION_CREDENTIALS, stands for",
                where=where,
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            role = "roles/bigtable.admin" if "bigtable.admin" in where else "roles/bigtable.user"
            return errors.PermissionDenied(
                f"{said}: grant the account {role} on the instance, and see that the "
                "project's Bigtable API is enabled",
                where=where,
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.UsageError(f"Bigtable has no such method: {said}", where=where)
        case grpc.StatusCode.FAILED_PRECONDITION if _BEING_CREATED.search(_NAMES.sub("", said)):
            return errors.NotReady(said, where=where)
        case _ if code in _REFUSED and _NOT_TRANSACTIONAL in said.lower():
            return errors.UsageError(
                f"the app profile cannot be used ({said}): {ONE_CLUSTER}", where=where
            )
        case _ if code in _REFUSED:
            return errors.InvalidArgument("request", f"{code.name}: {said}", where=where)
        case _:
            return errors.ExecutionUnknown(f"{code.name}: {said}", where=where)


def _asked_seconds(failed: grpc.aio.AioRpcError, otherwise: float) -> float:
    """How long the service asks to wait, with whatever code; `otherwise` if it does not."""
    for key, value in failed.trailing_metadata() or ():
        if key == _DETAILS_TRAILER:
            try:
                for packed in Status.FromString(value).details:
                    info = RetryInfo()
                    if packed.Unpack(info):
                        delay = info.retry_delay
                        return float(max(delay.seconds + delay.nanos / 1e9, 0.0))
            except DecodeError:
                pass  # the status counts without its details
    return otherwise


def _not_found(said: str, where: str) -> errors.PercolatorError:
    """A table is a matter of the schema; all else was named by the address."""
    # An instance may be called user-profiles.
    low = _NAMES.sub("", said.lower())
    if "profile" in low:
        return errors.InvalidArgument(
            "store", f"{said}: check the profile in the address; {ONE_CLUSTER}", where=where
        )
    if "table" in low:
        return errors.SchemaError(said, where=where)
    if "instance" in low or "project" in low:
        return errors.InvalidArgument(
            "store", f"{said}: check bigtable://PROJECT/INSTANCE in the address", where=where
        )
    return errors.SchemaError(said, where=where)
