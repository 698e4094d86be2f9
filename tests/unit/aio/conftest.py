"""Tests of what works alike whatever has the cells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator import Limits
from percolator.aio import Database
from percolator.aio.shared import Receipt, Share, SharedTransaction
from tests.unit import connected
from tests.unit.aio.shared_attempts import share_of
from tests.unit.connected import Cluster


@pytest.fixture(params=["in tablets", "in a row store"])
def engine_of_cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clusters of `tests.unit.connected` have their cells."""
    monkeypatch.setattr(connected, "over_rows", request.param == "in a row store")


@pytest.fixture
def kind_of_cluster() -> type[Cluster]:
    """Its class. A test may have another one as a parameter of this name."""
    return Cluster


@pytest.fixture
def limits() -> Limits:
    """Its client's: every commit takes two phases. A test may have others as well."""
    return connected.TWO_PHASES


@pytest.fixture
@asynccontextmanager
async def connection(
    kind_of_cluster: type[Cluster], limits: Limits
) -> AsyncIterator[tuple[Database, Cluster]]:
    """A cluster in memory, and a client of it."""
    async with connected.connected_to(kind_of_cluster, limits) as (db, cluster):
        yield db, cluster


@pytest.fixture
@asynccontextmanager
async def db(connection: tuple[Database, Cluster]) -> AsyncIterator[Database]:
    yield connection[0]


@pytest.fixture
@asynccontextmanager
async def cluster(connection: tuple[Database, Cluster]) -> AsyncIterator[Cluster]:
    yield connection[1]


@pytest.fixture
@asynccontextmanager
async def shared(db: Database) -> AsyncIterator[SharedTransaction]:
    async with db.shared_transaction() as shared:
        yield shared


@pytest.fixture
@asynccontextmanager
async def share(db: Database, shared: SharedTransaction) -> AsyncIterator[Share]:
    """An attempt of the shared transaction that has locked a cell."""
    yield await share_of(db, shared.ticket, "1", ann=1)


@pytest.fixture
@asynccontextmanager
async def receipt(share: Share) -> AsyncIterator[Receipt]:
    """The receipt of that attempt, which has finished."""
    yield await share.finish()
