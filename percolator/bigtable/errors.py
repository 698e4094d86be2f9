"""Errors of calls of Bigtable: above all, whether the call was executed, and what to do.

Only an error that the service gives before it does anything means that the call was not executed.
gRPC's client uses some of the same codes for calls of which it has lost the answer; such a call may
have been executed, whatever its code.
"""

from __future__ import annotations

import re
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator import errors
from percolator.bigtable.messages import GET_TABLE, READ_ROWS
from percolator.bigtable.place import Place, table_name
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import FAMILIES
from percolator.v1.bigtable_pb2 import BigtableGetTableRequest
from percolator.world import Network

_THROTTLED_SECONDS = 0.1
"""The pause after a refusal that names none."""
_NOT_TRANSACTIONAL = "single-row transactions"
"""The service's name for checks with changes, when an app profile does not permit them."""
_BEING_CREATED = re.compile(r"\b(being created|creating)\b", re.IGNORECASE)
"""In the refusal of a call on a table that is not ready yet, but will be soon."""
_NAMES = re.compile(r"projects/[^\s\"']+|'[^']*'")
"""Names of resources, and row keys: they may contain any of the words that are looked for."""
_TOO_LARGE = re.compile(r"CLIENT: (Sent|Received) message larger than max")
_LOST = re.compile(r"Stream removed|RST_STREAM|metadata size exceeds|CLIENT: Received message")
"""In the report of gRPC's client that it has lost an answer. Some of these have codes by which the
service refuses calls: RESOURCE_EXHAUSTED if the stream was reset with ENHANCE_YOUR_CALM, or if the
answer or its trailers are above a limit; PERMISSION_DENIED for INADEQUATE_SECURITY."""
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
"""Advice about an app profile that cannot be used."""

WITH_FAMILIES: Final = 2
"""The view of a table that has its families, and no more."""
_OF_SERVICE: Final = "column family not found"
_OF_EMULATOR: Final = re.compile(r'unknown family "([^"]*)"')
_ASK_SECONDS: Final = 5.0
_REMOVED: Final = "somebody has removed it in the store itself, and its cells with it"
_WHAT_TO_DO: Final = "`percolator tables delete` the table, and import it from an export"
_WHAT_ELSE_TO_DO: Final = {
    table_name(TABLE_ID): "it says what tables there are, so restore it from a backup of the "
    "instance, or create another cluster and import an export",
    table_name(INTENTS_TABLE): "create the family again there; changes that waited for observers "
    "are forgotten, so `percolator observers backfill` afterwards",
}
"""For tables that no program has created, and that no command deletes."""


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
    too_large = _TOO_LARGE.search(said)
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(said, where=where)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded("no answer in time", where=where)
        case _ if too_large is not None and too_large[1] == "Sent":
            return errors.InvalidArgument("request", f"{said}: send less in one call", where=where)
        case _ if too_large is not None and where.startswith(READ_ROWS.path):
            return errors.InvalidArgument("response", f"{said}: a row is too large", where=where)
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
        if key == "grpc-status-details-bin":
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
    """A missing table is an error of the schema; anything else was named by the address."""
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


class FamilyMissing(errors.InvariantViolation):
    """A call names a family that the table does not have: somebody has removed it in the store
    itself. The call was not executed.

    The service deletes the family's cells with it, and refuses all calls that name it, without
    saying which one is missing. The emulator keeps the cells and still reads them, and refuses
    only changes.
    """

    def __init__(self, table: str, families: str, *, where: str) -> None:
        """`table` is the full name; `families` is empty if it is not known which are missing."""
        name = table.rpartition("/")[2]
        what = f"the family {families}" if families else "a family that it needs"
        to_do = _WHAT_ELSE_TO_DO.get(name, _WHAT_TO_DO)
        super().__init__(f"the table {name} lacks {what}: {_REMOVED}: {to_do}", where=where)
        self.table = table
        self.families = families


def missing_family(said: str, where: str) -> FamilyMissing | None:
    """The error, if the service says so; None otherwise. `where` ends with the table's name."""
    named = _OF_EMULATOR.search(said)
    if named is None and _OF_SERVICE not in said.lower():
        return None
    table = where.rpartition(" ")[2]
    return FamilyMissing(table, "" if named is None else named[1], where=where)


async def named(network: Network, place: Place, error: FamilyMissing) -> errors.InvariantViolation:
    """The error with the names of the families, if the table can be asked."""
    if error.families:
        return errors.InvariantViolation(error.message, where=error.where)
    request = BigtableGetTableRequest(name=error.table, view=WITH_FAMILIES)
    try:
        found = await network.unary(place.tables_address, GET_TABLE)(request, _ASK_SECONDS)
    except errors.PercolatorError:
        families = ""  # without the right to ask, this is all that is known
    else:
        families = ", ".join(sorted(set(FAMILIES) - set(found.column_families)))
    told = FamilyMissing(error.table, families, where=error.where)
    return errors.InvariantViolation(told.message, where=told.where)
