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

    def wrong(self: VisibleRuns, keys: list[bytes], values: list[bytes], room: Room) -> bool:
        inverted, self._inverted = self._inverted, bytes(8)
        took = correct(self, keys, values, room)
        self._inverted = inverted
        return took

    patch.setattr(VisibleRuns, "_took", wrong)


ALL: tuple[Callable[[Patch], None], ...] = (
    a_run_forgets_the_cell_that_the_one_before_has_ended_with,
    a_run_takes_what_was_committed_after_its_timestamp,
)
