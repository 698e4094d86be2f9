"""How a process presents itself to the lock service: what can be sent, and what cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest

from percolator.errors import InvalidArgument
from percolator.wire.sessions import SessionSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_seconds", 0.0),
        ("ttl_seconds", -1.0),
        ("ttl_seconds", math.nan),
        ("ttl_seconds", math.inf),
        ("liveness_timeout_seconds", math.nan),
        ("liveness_timeout_seconds", 0.0),
        ("pin_at", -1),
        ("pin_at", 2**64),
        ("description", "x" * 257),
        ("description", "ä" * 129),
        ("description", "\ud800"),
    ],
)
def test_settings_that_cannot_be_sent_are_refused_by_name(field: str, value: Any) -> None:
    """They would end the task that renews, and leave callers waiting for a session."""
    with pytest.raises(InvalidArgument) as refused:
        SessionSettings(**{field: value})
    assert refused.value.field == field
