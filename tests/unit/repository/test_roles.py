"""Every remote procedure says who may call it."""

from __future__ import annotations

from percolator.wire import methods
from percolator.wire.roles import REQUIRED
from percolator.world import StreamMethod, UnaryMethod


def test_every_remote_procedure_has_a_role_and_no_other_has() -> None:
    named = {
        value.path
        for value in vars(methods).values()
        if isinstance(value, UnaryMethod | StreamMethod)
    }
    assert set(REQUIRED) == named
