"""What the errors of Bigtable mean: above all, whether a call was executed."""

from __future__ import annotations

import grpc
import pytest

from percolator import errors
from percolator.bigtable.channel import meaning
from percolator.errors import Retry

MEANINGS = {
    grpc.StatusCode.NOT_FOUND: (errors.SchemaError, Retry.USELESS),
    grpc.StatusCode.INVALID_ARGUMENT: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.FAILED_PRECONDITION: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.ALREADY_EXISTS: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.OUT_OF_RANGE: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.PERMISSION_DENIED: (errors.PermissionDenied, Retry.USELESS),
    grpc.StatusCode.UNAUTHENTICATED: (errors.Unauthenticated, Retry.USELESS),
    grpc.StatusCode.UNIMPLEMENTED: (errors.UsageError, Retry.USELESS),
    grpc.StatusCode.UNAVAILABLE: (errors.Unavailable, Retry.UNKNOWN),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceeded, Retry.UNKNOWN),
}


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_only_what_is_refused_at_once_was_not_executed(code: grpc.StatusCode) -> None:
    kind, retry = MEANINGS.get(code, (errors.ExecutionUnknown, Retry.UNKNOWN))
    empty = grpc.aio.Metadata()
    said = grpc.aio.AioRpcError(code, empty, empty, details="what it says")
    found = meaning(said, "/a/Method")
    assert type(found) is kind
    assert found.retry is retry
    assert found.where == "/a/Method"
