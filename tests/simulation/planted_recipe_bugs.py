"""Bugs of the recipes that a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from percolator import aio
from percolator.recipes.combine_queue import CombineQueue
from percolator.recipes.export_queue import ExportQueue
from percolator.recipes.index_entries import IndexEntries
from percolator.recipes.sharded_counter import ShardedCounter

Patch = pytest.MonkeyPatch


def rest_of_a_batch_is_not_announced(patch: Patch) -> None:
    """A run that leaves entries to the next one does not wake it."""
    correct = CombineQueue._combine_bucket

    async def wrong(self: Any, tx: aio.Transaction, bucket: bytes, batch: int) -> Any:
        changes = await correct(self, tx, bucket, batch)
        tx._buffer.weak = None
        return changes

    patch.setattr(CombineQueue, "_combine_bucket", wrong)


def entry_after_a_batch_is_deleted(patch: Patch) -> None:
    """A run that is cut off deletes the entry at which it noticed."""
    correct = CombineQueue._combine_bucket

    async def wrong(self: Any, tx: aio.Transaction, bucket: bytes, batch: int) -> Any:
        changes = await correct(self, tx, bucket, batch)
        if tx._buffer.weak:
            first, last = self._rows.entries_of(bucket)
            async for row in tx.scan(self.table, start=first, end=last, limit=1):
                await tx.delete(row.key, self._entry)
        return changes

    patch.setattr(CombineQueue, "_combine_bucket", wrong)


def exports_numbered_by_start_timestamp(patch: Patch) -> None:
    """What began before a number that has arrived, and commits after it, is left out forever."""

    def wrong(self: Any, row: bytes, commit_timestamp: int) -> int:
        return int.from_bytes(row[-12:], "big")

    patch.setattr(ExportQueue, "_sequence", wrong)


def shards_of_the_present_number_only(patch: Patch) -> None:
    """The number was raised: a program that still has the lower one overlooks the others."""

    async def wrong(self: Any, reads: Any, key: Any) -> Any:
        part = self._parts.part(key)
        rows = [part + shard.to_bytes(2, "big") for shard in range(self._shards)]
        found = await reads.get_many(self.table, rows, [self._count])
        return sum(row.get(self._count, 0) for row in found)

    patch.setattr(ShardedCounter, "_value", wrong)


def former_words_stay_in_the_index(patch: Patch) -> None:
    """What a row is indexed for is not read in the transaction that replaces it."""

    async def wrong(self: Any, tx: aio.Transaction, row: Any) -> frozenset[bytes]:
        return frozenset()

    patch.setattr(IndexEntries, "recorded", wrong)


ALL: tuple[Callable[[Patch], None], ...] = (
    rest_of_a_batch_is_not_announced,
    entry_after_a_batch_is_deleted,
    exports_numbered_by_start_timestamp,
    shards_of_the_present_number_only,
    former_words_stay_in_the_index,
)
