"""Bugs of reads of families that a simulation has to find."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.aio.reader import Reader
from percolator.tablet.reading.chosen_columns import ChosenColumns
from percolator.tablet.reading.locks_in_the_way import LockReader, LocksFound

Patch = pytest.MonkeyPatch


def locks_of_a_family_are_not_in_the_way(patch: Patch) -> None:
    """Their owners may have committed below the timestamp of the read."""
    correct = LockReader.in_rows

    def wrong(self: LockReader, *bounds: bytes, **options: Any) -> LocksFound:
        if isinstance(options["wanted"], ChosenColumns):
            return LocksFound()
        return correct(self, *bounds, **options)

    patch.setattr(LockReader, "in_rows", wrong)


def own_writes_of_a_family_are_not_seen(patch: Patch) -> None:
    """A transaction reads what was there before it."""
    correct = Reader._written

    def wrong(self: Reader, table_id: int, rows: Any, names: Any, prefixes: Any) -> Any:
        return {} if prefixes else correct(self, table_id, rows, names, prefixes)

    patch.setattr(Reader, "_written", wrong)


ALL = (
    (locks_of_a_family_are_not_in_the_way, 0.0),
    (own_writes_of_a_family_are_not_seen, 0.8),
)
"""Each with the share of transactions that try to commit in one round."""
