"""Stores to which changes of observed cells are announced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from percolator.errors import CellAddress


class Announcing(Protocol):
    """A store that has to be told which cells may change, before they do: a row store."""

    async def announce(
        self, start: int, cells: Sequence[tuple[CellAddress, bytes]], deadline: float
    ) -> None:
        """Returns when it is durable that the transaction that began then may change these cells,
        each for an observer."""
        ...

    async def announce_locked(
        self,
        table_id: int,
        observed: Collection[tuple[bytes, bytes]],
        starts: Collection[int],
        deadline: float,
    ) -> None:
        """The same for all cells of a table that the transactions that began then have locked, in
        these columns, each with an observer."""
        ...
