"""What has become of transactions: facts that never change again, so they may be remembered.

Invariant: a verdict is *seen*: a commit record or a rollback marker was read or written. Only then
may it be put here. A second verdict on the same transaction has to be the same.
"""

from __future__ import annotations

from collections import OrderedDict

from percolator.errors import InvariantViolation

ROLLED_BACK = 0
"""As a verdict. Any other number is the commit timestamp."""


class Verdicts:
    """The last `entries_max` verdicts, by start timestamp.

    The process's own commits go in at once: its next transaction must not wait for its own locks.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._verdicts: OrderedDict[int, int] = OrderedDict()

    def get(self, start_timestamp: int) -> int | None:
        """None when it is not known."""
        return self._verdicts.get(start_timestamp)

    def put(self, start_timestamp: int, verdict: int) -> None:
        verdicts = self._verdicts
        known = verdicts.setdefault(start_timestamp, verdict)
        if known != verdict:
            raise InvariantViolation(
                f"transaction {start_timestamp} has two fates: {_text(known)} and {_text(verdict)}"
            )
        if len(verdicts) > self._entries_max:
            verdicts.popitem(last=False)


def _text(verdict: int) -> str:
    return f"committed at {verdict}" if verdict else "rolled back"
