"""Collects pages of a scan into pieces of bounded size, which become parts of a file.

A piece is limited in bytes as well as in cells: values may be megabytes long, and both writers and
readers hold a piece in memory, for several files at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from percolator.aio.bulk_load import LoadedCell
from percolator.routing.cells import CellPage

PIECE_CELLS = 65_536
PIECE_BYTES = 16 << 20
READ_CELLS = 16_384
"""The most cells that are read at a time."""


class Piece:
    """Pages of a scan, one after another."""

    def __init__(self) -> None:
        self._pages: list[CellPage] = []
        self.cells = 0
        self._bytes = 0

    def add(self, page: CellPage) -> None:
        self._pages.append(page)
        self.cells += len(page.rows)
        self._bytes += sum(map(len, page.rows)) + sum(map(len, page.values))

    @property
    def is_full(self) -> bool:
        return self.cells >= PIECE_CELLS or self._bytes >= PIECE_BYTES

    def column_names(self) -> set[bytes]:
        return {column for page in self._pages for column in page.columns}

    def entries(self, name: str) -> list[Any]:
        """One of the pages' parallel lists, of all pages."""
        return [entry for page in self._pages for entry in getattr(page, name)]

    def each(self) -> Iterator[LoadedCell]:
        """Its cells, in order."""
        for page in self._pages:
            yield from zip(page.rows, page.columns, page.values, strict=True)
