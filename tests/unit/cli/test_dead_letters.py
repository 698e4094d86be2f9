"""What `percolator dead-letters` says of a letter."""

from __future__ import annotations

from percolator.cli.dead_letters import _changed
from percolator.observers.dead_letter import DeadLetter


def test_of_a_weak_notification_no_change_is_told_that_never_was() -> None:
    def letter(commit: int) -> DeadLetter:
        return DeadLetter("docs", "clean", b"source", b"a", commit, "error", 5, 7)

    assert _changed(letter(0)) == "never"
    assert _changed(letter(1 << 18)).startswith("1970-01-01T00:00:00.001Z")
