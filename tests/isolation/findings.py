"""Findings of a check: violations as data, each with an explanation for people.

A faulty run may fail ten thousand times in the same way, so a report keeps the first violations
and counts the rest by kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from tests.isolation.history import CellKey, TransactionRecord

# The ways in which a history can break the promises that the checker checks.


class ViolationKind(Enum):
    """Which promise was broken."""

    STALE_READ = "stale read"
    """A value that had been overwritten within the reader's snapshot."""
    FUTURE_READ = "read of a later commit"
    """A value committed above the reader's snapshot, or not yet committed at all."""
    ABORTED_READ = "read of an aborted write"
    """G1a."""
    INTERMEDIATE_READ = "read of an intermediate write"
    """G1b: a value that its own writer had replaced before it committed."""
    UNWRITTEN_READ = "read of a value that was never written"
    OWN_WRITE_NOT_READ = "own write not read"
    PHANTOM = "phantom in a scan"
    """A row or cell in a scan that the snapshot does not hold."""
    LOST_ROW = "row missing in a scan"
    DOUBLED_ROW = "row doubled in a scan"
    UNORDERED_SCAN = "scan out of order"
    SCAN_OUT_OF_BOUNDS = "scan outside its range, columns or limit"
    CONFLICT = "concurrent writes"
    """Two committed transactions wrote one cell, and neither saw the other: a lost update."""
    NOT_SERIALIZABLE = "read that no longer holds at the commit"
    """A serializable transaction committed, although another one had changed what it read."""
    DUPLICATE_TIMESTAMP = "timestamp handed out twice"
    TIMESTAMP_ORDER = "commit not above start"
    SESSION_ORDER = "session went back in time"
    REAL_TIME_ORDER = "real-time order broken"
    """A timestamp that was requested after another had been received is not larger."""
    REPEATED_RUN = "observer ran twice for one change"
    MISSED_RUN = "observer never ran for a change"
    UNWANTED_RUN = "observer that deletes do not wake ran for a deleted cell"


_VALUE_CHARACTERS_MAX = 60


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    kind: Enum
    """A `ViolationKind` of the checker, or an `Invariant` of the audit."""
    explanation: str
    transactions: tuple[TransactionRecord, ...]
    """The transactions involved, starting with the one in which it showed."""
    key: CellKey | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.explanation}"


@dataclass
class Report:
    """Scope and findings of a check. True if there are no violations."""

    violations_max: int = 100
    violations: list[Violation] = field(default_factory=list)
    """The first `violations_max`."""
    counts: Counter[Enum] = field(default_factory=Counter)
    """The number of all violations, by kind."""
    looked_at: Counter[str] = field(default_factory=Counter)
    """How much was checked: a report about nothing proves nothing."""

    def add(
        self,
        kind: Enum,
        explanation: str,
        *transactions: TransactionRecord | None,
        key: CellKey | None = None,
    ) -> None:
        self.counts[kind] += 1
        if len(self.violations) < self.violations_max:
            known = tuple(t for t in transactions if t is not None)
            self.violations.append(Violation(kind, explanation, known, key))

    def __bool__(self) -> bool:
        return not self.counts

    def __str__(self) -> str:
        checked = ", ".join(f"{count} {what}" for what, count in self.looked_at.items())
        if self:
            return f"{checked}: no violation"
        counted = ", ".join(f"{kind.value} ×{count}" for kind, count in self.counts.most_common())
        lines = [f"{checked}: {counted}", *(f"  {violation}" for violation in self.violations)]
        unlisted = self.counts.total() - len(self.violations)
        if unlisted:
            lines.append(f"  … and {unlisted} more")
        return "\n".join(lines)


def shown_key(key: CellKey) -> str:
    """The name of a cell in explanations: accounts['alice']['balance']."""
    table, row, column = key
    return f"{table}[{shown_value(row)}][{shown_value(column)}]"


def shown_value(value: bytes | None) -> str:
    """A value in explanations: quoted, and cut if long. "nothing" is not an empty value."""
    if value is None:
        return "nothing"
    text = repr(value)[1:]
    if len(text) > _VALUE_CHARACTERS_MAX:
        return f"{text[:_VALUE_CHARACTERS_MAX]}… ({len(value)} bytes)"
    return text
