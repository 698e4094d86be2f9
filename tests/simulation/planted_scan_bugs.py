"""Bugs of scans that judge many entries at a time, which a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from percolator.tablet.reading.visible_runs import Room, VisibleRuns

Patch = pytest.MonkeyPatch


def a_run_forgets_the_cell_that_the_one_before_has_ended_with(patch: Patch) -> None:
    """It shows the cell's next version, too, which is older."""
    correct = VisibleRuns._stand_behind

    def wrong(self: VisibleRuns, key: bytes, rows: list[bytes]) -> None:
        correct(self, key, rows)
        if self._column is None:
            self._cell = b"\0"

    patch.setattr(VisibleRuns, "_stand_behind", wrong)


def a_run_takes_what_was_committed_after_its_timestamp(patch: Patch) -> None:
    correct = VisibleRuns._took

    def wrong(
        self: VisibleRuns, keys: list[bytes], values: list[bytes], room: Room, worth: int
    ) -> bool:
        inverted, self._inverted = self._inverted, bytes(8)
        took = correct(self, keys, values, room, worth)
        self._inverted = inverted
        return took

    patch.setattr(VisibleRuns, "_took", wrong)


def a_run_backwards_takes_the_end_of_a_row_that_begins_before_it(patch: Patch) -> None:
    """The row's other cells are never found."""
    correct = VisibleRuns._fetched_before

    def wrong(
        self: VisibleRuns, first: bytes, stop: bytes, entries: int
    ) -> tuple[list[bytes], list[bytes]]:
        keys, values = correct(self, first, stop, entries)
        if not keys:
            return keys, values
        self._cursor.seek(keys[0])
        self._cursor.prev()
        key, value = self._cursor.item()
        return ([key, *keys], [value, *values]) if key >= first else (keys, values)

    patch.setattr(VisibleRuns, "_fetched_before", wrong)


def a_run_backwards_takes_its_rows_forwards(patch: Patch) -> None:
    """A scan with a limit returns others than the last rows."""
    patch.setattr(VisibleRuns, "_turn_around", lambda *_: None)


ALL: tuple[Callable[[Patch], None], ...] = (
    a_run_forgets_the_cell_that_the_one_before_has_ended_with,
    a_run_takes_what_was_committed_after_its_timestamp,
    a_run_backwards_takes_the_end_of_a_row_that_begins_before_it,
    a_run_backwards_takes_its_rows_forwards,
)
