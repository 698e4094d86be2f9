"""Bugs of tables that are dropped and created again, which a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from percolator.aio.moment import Moment
from percolator.routing.table_info import TableInfo

Patch = pytest.MonkeyPatch


def name_looked_up_at_each_call(patch: Patch) -> None:
    """A transaction that has read a table finds nothing in the next one, and writes into it."""

    patch.setattr(Moment, "_bound", lambda self, name: self._engine.catalog.known(name))
    patch.setattr(Moment, "_bind", lambda self, info: info)


def table_younger_than_the_snapshot_is_read(patch: Patch) -> None:
    """It looks empty to a snapshot in whose time another table of that name had rows."""

    patch.setattr(TableInfo, "require_older_than", lambda self, snapshot: None)


ALL: tuple[Callable[[Patch], None], ...] = (
    name_looked_up_at_each_call,
    table_younger_than_the_snapshot_is_read,
)
