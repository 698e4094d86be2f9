"""The outcomes of transactions: facts that never change, so they can be cached.

Invariant: a verdict is *seen*: a commit record or a rollback marker was read or written. Only then
may it be put here. A second verdict on the same transaction has to be the same.
"""

from __future__ import annotations

from percolator.errors import InvariantViolation

ROLLED_BACK = 0
"""The verdict on a transaction that was rolled back. Any other verdict is a commit timestamp."""


class Verdicts:
    """The last verdicts, by start timestamp: at most `entries_max`, and at least half as many.

    The process adds its own commits at once, so that its next transaction does not have to wait for
    locks of the previous one. So the older half is forgotten at once, rather than one verdict with
    each commit.
    """

    def __init__(self, entries_max: int) -> None:
        self._half = max(entries_max // 2, 1)
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def get(self, start_timestamp: int) -> int | None:
        """The verdict, or None if it is not known."""
        known = self._newer.get(start_timestamp)
        return self._older.get(start_timestamp) if known is None else known

    def put(self, start_timestamp: int, verdict: int) -> None:
        known = self.get(start_timestamp)
        if known is None:
            if len(self._newer) >= self._half:
                self._older, self._newer = self._newer, {}
            self._newer[start_timestamp] = verdict
        elif known != verdict:
            raise InvariantViolation(
                f"transaction {start_timestamp} has two outcomes: "
                f"{_text(known)} and {_text(verdict)}"
            )


def _text(verdict: int) -> str:
    return f"committed at {verdict}" if verdict else "rolled back"
