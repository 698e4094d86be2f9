"""Ranges of rows that are closed for a bulk load, as this tablet knows them.

M load_fence NAME    run 8, the range's start and end as components, commit_timestamp 8
M load_floor         the latest run whose fence was lifted, 8

A fence has the range of the whole load, so that after a split both halves keep it unchanged. A
fence that does not overlap the tablet's rows, as may happen after a split, is ignored. No fence is
raised for a run below the floor: a late request would close rows that are never opened again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from percolator.errors import NotReady
from percolator.tablet import keys
from percolator.tablet.keys import LOAD_FENCE_PREFIX, LOAD_FLOOR_KEY
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Storage

RETRY_SECONDS = 0.1


@dataclass(frozen=True)
class LoadFence:
    """One of them."""

    name: str
    run: int
    start: bytes
    end: bytes
    """The end of the range, excluded. Empty: up to the last row."""
    commit_timestamp: int = 0
    """If this is not 0, the load is complete, and the fence can only be lifted."""

    @property
    def key(self) -> bytes:
        return LOAD_FENCE_PREFIX + self.name.encode()

    def covers(self, row: bytes) -> bool:
        return self.start <= row and (not self.end or row < self.end)

    def overlaps(self, start: bytes, end: bytes) -> bool:
        return (not self.end or start < self.end) and (not end or self.start < end)

    def record(self) -> bytes:
        """The fence as it is stored."""
        return b"".join(
            (
                self.run.to_bytes(8, "big"),
                keys.component(self.start),
                keys.component(self.end),
                self.commit_timestamp.to_bytes(8, "big"),
            )
        )

    @classmethod
    def of_record(cls, key: bytes, record: bytes) -> LoadFence:
        run = int.from_bytes(record[:8], "big")
        start, at = keys.split_component(record, 8)
        end, at = keys.split_component(record, at)
        name = key[len(LOAD_FENCE_PREFIX) :].decode()
        return cls(name, run, start, end, int.from_bytes(record[at:], "big"))

    def message(self) -> pb.LoadFence:
        return pb.LoadFence(
            name=self.name,
            run=self.run,
            range=cells_pb2.RowRange(start=self.start, end=self.end),
            commit_timestamp=self.commit_timestamp,
        )


class LoadFences:
    """The fences of one tablet: nearly always none."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoadFence] = {}
        self.floor = 0
        """The latest run whose fence was lifted."""

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __iter__(self) -> Iterator[LoadFence]:
        return iter(self._by_name.values())

    def load(self, storage: Storage[Any], start: bytes, end: bytes) -> None:
        """Reads them from the storage of the tablet, whose rows are [start, end)."""
        self.floor = int.from_bytes(storage.get(LOAD_FLOOR_KEY) or b"", "big")
        for key, record in storage.iterate(LOAD_FENCE_PREFIX, LOAD_FENCE_PREFIX + b"\xff"):
            fence = LoadFence.of_record(key, record)
            if fence.overlaps(start, end):
                self.put(fence)

    def get(self, name: str) -> LoadFence | None:
        return self._by_name.get(name)

    def put(self, fence: LoadFence) -> None:
        self._by_name[fence.name] = fence

    def remove(self, name: str) -> None:
        self._by_name.pop(name, None)

    def over(self, row: bytes) -> LoadFence | None:
        """The fence that closes this row."""
        for fence in self._by_name.values():
            if fence.covers(row):
                return fence
        return None

    def among(self, start: bytes, end: bytes) -> LoadFence | None:
        """A fence that closes part of this range."""
        for fence in self._by_name.values():
            if fence.overlaps(start, end):
                return fence
        return None


def closed(fence: LoadFence) -> NotReady:
    """The error for every request other than the load's own."""
    return NotReady(
        f"the rows are closed for the bulk load {fence.name!r}", retry_after_seconds=RETRY_SECONDS
    )
