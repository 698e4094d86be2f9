"""Tests of what works alike whatever has the cells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator.aio import Database
from tests.unit import connected


@pytest.fixture(params=["in tablets", "in a row store"])
def engine_of_cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clusters of `tests.unit.connected` have their cells."""
    monkeypatch.setattr(connected, "over_rows", request.param == "in a row store")


@pytest.fixture
@asynccontextmanager
async def db() -> AsyncIterator[Database]:
    """A client of a cluster in memory, in which every commit takes two phases."""
    async with connected.connected() as (db, _):
        yield db
