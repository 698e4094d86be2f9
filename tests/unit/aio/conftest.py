"""Tests of what works alike whatever has the cells."""

from __future__ import annotations

import pytest

from tests.unit import connected


@pytest.fixture(params=["in tablets", "in a row store"])
def engine_of_cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clusters of `tests.unit.connected` have their cells."""
    monkeypatch.setattr(connected, "over_rows", request.param == "in a row store")
