"""Calls by a token that has rights to some tables only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from percolator.errors import PermissionDenied
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.wire.roles import Role
from percolator.wire.tokens import Rights

NAME = "shop"


@contextmanager
def token(rights: Rights | None, name: str = NAME) -> Iterator[None]:
    """Calls of handlers in the block are made with such a token."""
    caller = CallerIdentity(Role.CLIENT, (name.encode(), "192.0.2.1"), name, "192.0.2.1", rights)
    before = rpc._caller.set(caller)
    try:
        yield
    finally:
        rpc._caller.reset(before)


def refuses(what: str = "") -> Any:
    return pytest.raises(PermissionDenied, match=f"the token 'shop' may not {what}")
