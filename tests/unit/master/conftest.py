"""Clusters for the tests of the master."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.unit.master.cluster_world import ModelCluster, cluster


@pytest.fixture
def world(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[ModelCluster]:
    """A cluster with one master and one tablet server, unless a test names several."""
    return cluster(*getattr(request, "param", ["a:1"]))
