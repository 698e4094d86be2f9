"""Cells whose table the store does not have: they decide nothing, if the table was dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from percolator.errors import InvariantViolation, PercolatorError
from percolator.routing.cells import Answer, CellMutation


class DroppedTables:
    """`percolator.routing.cells.Mutations` of tables that the store does not have.

    Answers `SchemaError` when the table was dropped for good, which only the catalogue can say: the
    store's table goes once no lock is left whose transaction has committed a cell of it. A table
    that somebody has deleted in the store itself decides nothing, as long as the catalogue has it:
    it may be restored there, and then have commits.
    """

    def __init__(self, look_up: Callable[[int, float], Awaitable[object]]) -> None:
        """`look_up` raises `SchemaError` if the catalogue does not have a table of that id."""
        self._look_up = look_up

    async def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        table_ids = {one.table_id for one in mutations}
        answers = await asyncio.gather(*(self._answer(one, deadline) for one in table_ids))
        by_table = dict(zip(table_ids, answers, strict=True))
        return [by_table[one.table_id] for one in mutations]

    async def _answer(self, table_id: int, deadline: float) -> PercolatorError:
        try:
            await self._look_up(table_id, deadline)
        except PercolatorError as error:
            return error
        return InvariantViolation(
            f"table {table_id} decides about a lock, and somebody has deleted it in the store "
            "itself: restore it there, or `percolator tables delete` it here, too"
        )
