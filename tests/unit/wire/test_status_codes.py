"""What protos/percolator/v1/errors.proto tells readers in other languages about status codes."""

from __future__ import annotations

import re
from pathlib import Path

from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.status import from_detail, status_code

PROTO = Path(__file__).parents[3] / "protos/percolator/v1/errors.proto"


def test_each_cause_is_sent_with_the_status_code_that_its_comment_names() -> None:
    documented = {
        message: code
        for code, message in re.findall(r"Sent as (\w+)\.\nmessage (\w+)", PROTO.read_text())
    }
    sent = {}
    for field in ErrorDetail.DESCRIPTOR.oneofs_by_name["cause"].fields:
        detail = ErrorDetail()
        getattr(detail, field.name).SetInParent()
        cause = type(getattr(detail, field.name)).__name__
        sent[cause] = status_code(from_detail(detail)).name
    assert sent == documented
