"""Gateways around one cluster in memory. A test has as many as it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tests.unit.gateway.gateways import Cluster, Gateway, Site, a_site


@pytest.fixture
def around() -> AbstractAsyncContextManager[Site]:
    return a_site()


@pytest.fixture
@asynccontextmanager
async def cluster(around: Site) -> AsyncIterator[Cluster]:
    yield around.cluster


@asynccontextmanager
async def _gateway(around: Site) -> AsyncIterator[Gateway]:
    yield await around.start()


one = pytest.fixture(name="one")(_gateway)
other = pytest.fixture(name="other")(_gateway)
third = pytest.fixture(name="third")(_gateway)


@pytest.fixture
@asynccontextmanager
async def start(one: Gateway) -> AsyncIterator[int]:
    """The start timestamp of a transaction."""
    yield await one.begin()
