"""The outcomes of transactions: facts that never change, so they can be cached.

Invariant: a verdict is *seen*: a commit record or a rollback marker was read or written. Only then
may it be put here. A second verdict on the same transaction has to be the same.
"""

from __future__ import annotations

from collections import OrderedDict

from percolator.errors import InvariantViolation

ROLLED_BACK = 0
"""The verdict on a transaction that was rolled back. Any other verdict is a commit timestamp."""


class Verdicts:
    """The last `entries_max` verdicts, by start timestamp.

    The process adds its own commits at once, so that its next transaction does not have to wait for
    locks of the previous one.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._verdicts: OrderedDict[int, int] = OrderedDict()

    def get(self, start_timestamp: int) -> int | None:
        """The verdict, or None if it is not known."""
        return self._verdicts.get(start_timestamp)

    def put(self, start_timestamp: int, verdict: int) -> None:
        verdicts = self._verdicts
        known = verdicts.setdefault(start_timestamp, verdict)
        if known != verdict:
            raise InvariantViolation(
                f"transaction {start_timestamp} has two outcomes: "
                f"{_text(known)} and {_text(verdict)}"
            )
        if len(verdicts) > self._entries_max:
            verdicts.popitem(last=False)


def _text(verdict: int) -> str:
    return f"committed at {verdict}" if verdict else "rolled back"
