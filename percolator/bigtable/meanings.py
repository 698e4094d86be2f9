"""What a failed call of Bigtable means: above all, whether it was executed, and what to do.

Only of an error that the service gives before it does anything do we say that the call was not
executed.
"""

from __future__ import annotations

import re

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator import errors
from percolator.bigtable.http2.status import CallFailed
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
_CLIENT_TOO_LARGE = ("CLIENT: Sent message larger", "CLIENT: Received message larger")
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


def meaning(failed: CallFailed, where: str) -> errors.PercolatorError:
    """What it means. `where` is the path of the method, and what it was called for."""
    error = _meaning(failed, where)
    if error.retry is not errors.Retry.USELESS:
        error.retry_after_seconds = _asked_seconds(failed, error.retry_after_seconds)
    return error


def _meaning(failed: CallFailed, where: str) -> errors.PercolatorError:
    code, said = failed.code, (failed.message or failed.code.name).rstrip(".")
    lacking = missing_family(said, where)
    if lacking is not None:
        return lacking
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(said, where=where)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded("no answer in time", where=where)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _exhausted(failed, said, where)
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
            return errors.PermissionDenied(
                f"{said}: grant the account {_role(where)} on the instance, and see that the "
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


def _exhausted(failed: CallFailed, said: str, where: str) -> errors.PercolatorError:
    """Clients use this code, too: for a message above a limit of this process."""
    sent, received = (said.startswith(text) for text in _CLIENT_TOO_LARGE)
    if sent:
        return errors.InvalidArgument("request", f"{said}: send less in one call", where=where)
    if received:
        return errors.InvalidArgument("response", f"{said}: a row is too large", where=where)
    return errors.Overloaded(
        f"Bigtable refuses more calls, because a quota or the capacity of its nodes is used up "
        f"({said}): add nodes, or ask for a higher quota",
        retry_after_seconds=_THROTTLED_SECONDS,
        where=where,
    )


def _asked_seconds(failed: CallFailed, otherwise: float) -> float:
    """How long the service asks to wait, with whatever code; `otherwise` if it does not."""
    try:
        for packed in Status.FromString(failed.details).details:
            info = RetryInfo()
            if packed.Unpack(info):
                delay = info.retry_delay
                return float(max(delay.seconds + delay.nanos / 1e9, 0.0))
    except DecodeError:
        pass  # what it says besides does not matter then
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


def _role(where: str) -> str:
    return "roles/bigtable.admin" if "bigtable.admin" in where else "roles/bigtable.user"
