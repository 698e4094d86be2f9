"""Bugs of bulk loads into a row store that a simulation has to find.

That no ended run begins again, and that a published table is young, hardly ever matters in a
simulation: tests/unit/rowstore/test_loading.py shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from percolator.errors import PercolatorError
from percolator.rowstore import collecting
from percolator.rowstore.loading import RowLoader
from percolator.rowstore.port import RowChange
from percolator.services.master import row_term
from percolator.services.master.cluster_map import Catalogue, Table, TableLoad
from percolator.v1 import master_pb2 as pb

Patch = pytest.MonkeyPatch


def deletions_in_loaded_rows_are_collected(patch: Patch) -> None:
    """A late call of the load brings back what was deleted."""
    patch.setattr(collecting, "LOADED", b"another")


def a_later_run_loads_into_the_table_of_an_earlier_one(patch: Patch) -> None:
    """Rows of a run that was superseded end up among those of the run that took over."""
    correct = row_term._begun

    def wrong(
        request: pb.BeginLoadRequest, made: Table | None, current: Catalogue
    ) -> tuple[Catalogue, Table | None]:
        for table, load in row_term._of_load(current, request.table.name, request.load):
            if load.run < request.run and table.is_hidden:
                taken = replace(table, load=TableLoad(request.load, request.run))
                return current.with_tables(taken), taken
        return correct(request, made, current)

    patch.setattr(row_term, "_begun", wrong)


def every_run_is_published(patch: Patch) -> None:
    """Also one that has been taken over, whose table is about to be deleted."""

    def wrong(current: Catalogue, asked: pb.PublishLoadsRequest.Loaded) -> Table:
        table = current.tables.get(asked.table_id)
        if table is None:
            raise row_term._taken_over("", asked.run)
        return table

    patch.setattr(row_term, "_loaded", wrong)


def rows_that_were_not_answered_are_taken_for_loaded(patch: Patch) -> None:
    """They are missing when the table is published."""

    async def wrong(
        self: RowLoader, table_id: int, rows: Sequence[RowChange], seconds: float
    ) -> None:
        with suppress(PercolatorError):
            await self._store.write(table_id, rows, seconds)

    patch.setattr(RowLoader, "_call", wrong)


ALL: tuple[Callable[[Patch], None], ...] = (
    deletions_in_loaded_rows_are_collected,
    a_later_run_loads_into_the_table_of_an_earlier_one,
    every_run_is_published,
    rows_that_were_not_answered_are_taken_for_loaded,
)
