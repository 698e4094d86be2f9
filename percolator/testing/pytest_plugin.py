"""The pytest fixture `percolator_db`: an empty database for each test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from percolator.blocking.api import Database
from percolator.testing.local_database import connect


@pytest.fixture
def percolator_db() -> Iterator[Database]:
    """An empty database in this process, closed after the test."""
    with connect() as database:
        yield database
