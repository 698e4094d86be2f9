"""What `percolator dead-letters` says about a letter."""

from __future__ import annotations

from percolator.cli.dead_letters import _changed
from percolator.observers.running.dead_letter import DeadLetter


def test_a_weak_notification_is_shown_without_a_time_of_change() -> None:
    def letter(commit: int) -> DeadLetter:
        return DeadLetter("docs", "clean", b"source", b"a", commit, "error", 5, 7)

    assert _changed(letter(0)) == "never"
    assert _changed(letter(1 << 18)).startswith("1970-01-01T00:00:00.001Z")
