"""What the errors of Bigtable mean: above all, whether a call was executed, and what to do."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator import errors
from percolator.bigtable.meanings import from_rpc_error
from percolator.bigtable.missing_family import FamilyMissing
from percolator.errors import Overloaded, Retry

DATA = "/google.bigtable.v2.Bigtable/CheckAndMutateRow of projects/p/instances/i/tables/t"
ADMIN = "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable of projects/p/instances/i"

MEANINGS = {
    grpc.StatusCode.NOT_FOUND: (errors.SchemaError, Retry.USELESS),
    grpc.StatusCode.INVALID_ARGUMENT: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.FAILED_PRECONDITION: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.ALREADY_EXISTS: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.OUT_OF_RANGE: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.PERMISSION_DENIED: (errors.PermissionDenied, Retry.USELESS),
    grpc.StatusCode.UNAUTHENTICATED: (errors.Unauthenticated, Retry.USELESS),
    grpc.StatusCode.UNIMPLEMENTED: (errors.UsageError, Retry.USELESS),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (errors.Overloaded, Retry.SAFE),
    grpc.StatusCode.UNAVAILABLE: (errors.Unavailable, Retry.UNKNOWN),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceeded, Retry.UNKNOWN),
}


READ = "/google.bigtable.v2.Bigtable/ReadRows of projects/p/instances/i/tables/t"


def failed(code: grpc.StatusCode, said: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailer = [("grpc-status-details-bin", details)] if details else []
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), said)


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_only_what_is_refused_at_once_was_not_executed(code: grpc.StatusCode) -> None:
    kind, retry = MEANINGS.get(code, (errors.ExecutionUnknown, Retry.UNKNOWN))
    found = from_rpc_error(failed(code, "what it says"), DATA)
    assert type(found) is kind
    assert found.retry is retry
    assert found.where == DATA


SAID = [
    # What the service says, where, and what its user is told.
    (
        grpc.StatusCode.PERMISSION_DENIED,
        "Access denied. Missing IAM permission: bigtable.tables.mutateRows.",
        DATA,
        errors.PermissionDenied,
        "Missing IAM permission: bigtable.tables.mutateRows: grant the account roles/bigtable.user",
    ),
    (
        grpc.StatusCode.PERMISSION_DENIED,
        "Access denied. Missing IAM permission: bigtable.tables.create.",
        ADMIN,
        errors.PermissionDenied,
        "grant the account roles/bigtable.admin",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Instance not found: projects/p/instances/i",
        DATA,
        errors.InvalidArgument,
        "store: Instance not found: projects/p/instances/i: check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Project not found: p",
        ADMIN,
        errors.InvalidArgument,
        "check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "App profile not found: projects/p/instances/i/appProfiles/a",
        DATA,
        errors.InvalidArgument,
        "check the profile in the address",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Table not found: projects/p/instances/i/tables/t",
        DATA,
        errors.SchemaError,
        "Table not found",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        'table "projects/p/instances/user-profiles/tables/t" not found',
        DATA,
        errors.SchemaError,
        "user-profiles",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Instance not found: projects/tables/instances/tables",
        DATA,
        errors.InvalidArgument,
        "check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Error while mutating the row 'profile 1' (projects/p/instances/i/tables/t) : Requested "
        "column family not found.",
        DATA,
        FamilyMissing,
        "the table t lacks a family that it needs: somebody has removed it in the store itself",
    ),
    (
        grpc.StatusCode.UNKNOWN,
        'unknown family "w"',
        DATA,
        FamilyMissing,
        "the table t lacks the family w: somebody has removed it in the store itself",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Requested column family not found.",
        DATA.replace("tables/t", "tables/percolator-intents"),
        FamilyMissing,
        "create the family again there; changes that waited for observers are forgotten",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Requested column family not found.",
        DATA.replace("tables/t", "tables/percolator-0"),
        FamilyMissing,
        "restore it from a backup of the instance",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Table projects/p/instances/i/tables/t is being created",
        DATA,
        errors.NotReady,
        "is being created",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "The table is either creating or deleting, please try again",
        DATA,
        errors.NotReady,
        "please try again",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Error while mutating the row 'creating' (projects/p/instances/creating/tables/t) : "
        "Single-row transactions are not allowed by this app profile",
        DATA,
        errors.UsageError,
        "routes to a single cluster",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Single-row transactions are not allowed by this app profile",
        DATA,
        errors.UsageError,
        "routes to a single cluster",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Quota exceeded for quota metric 'Read requests'",
        DATA,
        errors.Overloaded,
        "add nodes, or ask for a higher quota",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (300 vs. 200)",
        DATA,
        errors.InvalidArgument,
        "send less in one call",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (300 vs. 200))",
        READ,
        errors.InvalidArgument,
        "a row is too large",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (300 vs. 200))",
        DATA,
        errors.ExecutionUnknown,
        "larger than max",
    ),
    (
        grpc.StatusCode.UNAUTHENTICATED,
        "Request had invalid authentication credentials.",
        DATA,
        errors.Unauthenticated,
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
]


@pytest.mark.parametrize(("code", "said", "where", "kind", "told"), SAID)
def test_an_error_is_told_with_what_to_do(
    code: grpc.StatusCode, said: str, where: str, kind: type[errors.PercolatorError], told: str
) -> None:
    found = from_rpc_error(failed(code, said), where)
    assert type(found) is kind
    assert told in found.message


def _asking(seconds: int, nanos: int) -> bytes:
    packed = Packed()
    packed.Pack(RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos)))
    encoded: bytes = Status(code=8, details=[packed]).SerializeToString()
    return encoded


@pytest.mark.parametrize(
    ("trailer", "seconds"),
    [
        (_asking(2, 500_000_000), 2.5),
        (_asking(-1, 0), 0.0),
        (b"\xff damaged", 0.1),
        (Status(code=8).SerializeToString(), 0.1),
        (b"", 0.1),
    ],
)
def test_the_pause_that_the_service_asks_for_is_kept(trailer: bytes, seconds: float) -> None:
    found = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trailer), DATA)
    assert isinstance(found, Overloaded)
    assert found.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        (grpc.StatusCode.UNAVAILABLE, 2.5),
        (grpc.StatusCode.ABORTED, 2.5),
        (grpc.StatusCode.INTERNAL, 2.5),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 2.5),
        (grpc.StatusCode.NOT_FOUND, 0.0),
        (grpc.StatusCode.INVALID_ARGUMENT, 0.0),
    ],
    ids=lambda given: str(given),
)
def test_a_pause_is_kept_with_every_code_after_which_a_call_may_be_repeated(
    code: grpc.StatusCode, seconds: float
) -> None:
    found = from_rpc_error(failed(code, "later", _asking(2, 500_000_000)), DATA)
    assert found.retry_after_seconds == seconds
    assert from_rpc_error(failed(code, "later", b""), DATA).retry_after_seconds == 0.0
