"""Reading a store for the audit: it counts when nothing moved or changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.errors import NotReady, TabletMoved
from tests.isolation import stored_cells as module
from tests.isolation.store_audit import StoredTable
from tests.isolation.stored_cells import stored_tables

CELLS = [StoredTable(1, "cells", [])]
MOVED = TabletMoved("moved", tablet_id=1, epoch=2)
NOTHING: Any = None


def readings(monkeypatch: pytest.MonkeyPatch, *found: Any) -> list[Any]:
    """Lets one reading after another find this."""
    left = list(found)

    async def read(*arguments: object) -> list[StoredTable]:
        one = left.pop(0)
        if isinstance(one, Exception):
            raise one
        return list(one)

    monkeypatch.setattr(module, "_read", read)
    return left


async def test_the_reading_starts_again_when_a_tablet_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = readings(monkeypatch, CELLS, MOVED, CELLS, CELLS)
    assert await stored_tables(NOTHING, NOTHING, ["cells"], 1.0) == CELLS
    assert left == []


async def test_a_store_that_never_rests_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, *([MOVED] * 100))
    with pytest.raises(NotReady, match="does not come to rest"):
        await stored_tables(NOTHING, NOTHING, ["cells"], 1.0)
