"""A cluster for the tests of observers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.unit.observers.observed_cluster import Observed, observed


@pytest.fixture
def world() -> AbstractAsyncContextManager[Observed]:
    """A small cluster in memory, in virtual time, whose columns are observed."""
    return observed()
