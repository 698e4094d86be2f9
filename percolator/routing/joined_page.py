"""Pages of a scan as blocks of memory, for callers that never look at a single cell."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from percolator.routing.cells import CellPage
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell

_OFFSET_BYTES = 4


class JoinedBytes:
    """Values one behind the other."""

    __slots__ = ("block", "offsets")

    def __init__(self, block: bytes, offsets: bytes) -> None:
        self.block = block
        self.offsets = offsets
        """Where each begins, and where the last one ends: 4 bytes each, little-endian."""

    def __len__(self) -> int:
        return len(self.offsets) // _OFFSET_BYTES - 1

    def cut(self) -> list[bytes]:
        """The values."""
        block = self.block
        return [block[at:end] for at, end in pairwise(self.bounds())]

    def ends(self) -> tuple[bytes, bytes]:
        """The first and the last value."""
        return self.block[: self._offset(1)], self.block[self._offset(-2) :]

    def is_whole(self) -> bool:
        """Whether its values fill the block. Arrow would look outside of it without asking."""
        if not self.offsets or len(self.offsets) % _OFFSET_BYTES:
            return False
        bounds = self.bounds().tolist()
        return bounds[0] == 0 and bounds[-1] == len(self.block) and bounds == sorted(bounds)

    def _offset(self, index: int) -> int:
        at = _OFFSET_BYTES * index % len(self.offsets)
        return int.from_bytes(self.offsets[at : at + _OFFSET_BYTES], "little")

    def bounds(self) -> array[int]:
        """Where each begins, and where the last one ends, as this machine counts."""
        bounds = array("i", self.offsets)
        if sys.byteorder == "big":
            bounds.byteswap()
        return bounds


class JoinedPage(NamedTuple):
    """A page without locks, all of whose rows have the same columns. As `CellPage` otherwise."""

    rows: JoinedBytes
    columns: Mapping[bytes, JoinedBytes]
    """By name: the value of each row."""
    start: bytes
    end: bytes
    locks: Sequence[Cell] = ()


SentPage = CellPage | JoinedPage
"""A page in one of the forms in which servers send it."""


def joined_page(found: pb.JoinedCells, start: bytes, end: bytes) -> JoinedPage | None:
    """The page that a server has sent; None if it makes no sense."""
    rows = _of(found.rows)
    columns = {column.name: _of(column.values) for column in found.columns}
    if not rows.is_whole() or not len(rows) or not columns:
        return None
    if not all(one.is_whole() and len(one) == len(rows) for one in columns.values()):
        return None
    return JoinedPage(rows, columns, start, end)


def _of(message: pb.JoinedBytes) -> JoinedBytes:
    return JoinedBytes(message.block, message.offsets)
