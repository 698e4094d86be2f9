"""Bugs of lock-only records, and of what they name, that a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest

from percolator.formats.records import KIND_LOCK_ONLY, WRITE_KIND_OFFSET
from percolator.services.master.collection import CollectionTimes
from percolator.tablet.collection.collection import _WalkOfVersions
from percolator.tablet.memory.last_change import LastChanges, newest_change_below
from percolator.tablet.writing import judge
from percolator.world import Cursor
from tests.simulation import masters
from tests.simulation.per_seed import PerSeed

Patch = pytest.MonkeyPatch


def change_does_not_end_what_is_remembered_of_its_cell(patch: Patch) -> None:
    """Readers keep seeing the value that the cell had when it was locked."""

    patch.setattr(LastChanges, "begin", lambda self, committed: None)


def change_ends_what_is_remembered_only_when_its_writer_hears_of_it(patch: Patch) -> None:
    """By then its lock is gone from the storage, and readers were sent below it."""
    begin, publish = LastChanges.begin, LastChanges.publish
    begun: dict[int, Collection[bytes]] = {}

    def begin_late(self: LastChanges, committed: Collection[bytes]) -> None:
        begun[id(self)] = committed

    def wrong(self: LastChanges, under_locks: Mapping[bytes, int]) -> None:
        begin(self, begun[id(self)])
        publish(self, under_locks)

    patch.setattr(LastChanges, "begin", begin_late)
    patch.setattr(LastChanges, "publish", wrong)


def lock_names_what_the_first_lock_of_its_cell_named(patch: Patch) -> None:
    """A stale name is stored, and stays although the cell has changed since."""
    named = PerSeed(dict[bytes, int | None])

    def wrong(cursor: Cursor, cell: bytes, timestamp: int) -> int | None:
        first = named.now()
        if cell not in first:
            first[cell] = newest_change_below(cursor, cell, timestamp)
        return first[cell]

    patch.setattr(judge, "newest_change_below", wrong)
    patch.setattr(LastChanges, "of", lambda self, cell: None)
    patch.setattr(LastChanges, "learn", lambda self, cell, timestamp: None)


def lock_only_record_collected_once_there_is_a_newer_commit(patch: Patch) -> None:
    """The newer one excludes the same transactions, but does not tell how the older one ended."""
    correct = _WalkOfVersions._look_above

    def wrong(self: _WalkOfVersions, key: bytes, value: bytes, timestamp: int) -> int | None:
        if value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY and self._newer:
            self._delete(key, value)
            return None
        return correct(self, key, value, timestamp)

    patch.setattr(_WalkOfVersions, "_look_above", wrong)
    times = CollectionTimes(round_seconds=0.2, retention_seconds=1.0)
    patch.setattr(masters, "_COLLECTION", times)


ALL: tuple[Callable[[Patch], None], ...] = (
    change_does_not_end_what_is_remembered_of_its_cell,
    change_ends_what_is_remembered_only_when_its_writer_hears_of_it,
    lock_names_what_the_first_lock_of_its_cell_named,
    lock_only_record_collected_once_there_is_a_newer_commit,
)
