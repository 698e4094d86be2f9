"""What a check found: violations as data, each with an explanation for people.

A broken run may break ten thousand times in the same way, so a report keeps the first violations
and counts the rest, by kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from percolator.testing.history import CellKey, TransactionRecord

_VALUE_CHARACTERS_MAX = 60


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
    UNWRITTEN_READ = "read of a value nobody wrote"
    OWN_WRITE_NOT_READ = "own write not read"
    PHANTOM = "phantom in a scan"
    """A row or cell in a scan that the snapshot does not hold."""
    LOST_ROW = "row missing in a scan"
    DOUBLED_ROW = "row doubled in a scan"
    UNORDERED_SCAN = "scan out of order"
    SCAN_OUT_OF_BOUNDS = "scan outside its range, columns or limit"
    CONFLICT = "concurrent writes"
    """Two committed transactions wrote one cell, and neither saw the other: a lost update."""
    DUPLICATE_TIMESTAMP = "timestamp handed out twice"
    TIMESTAMP_ORDER = "commit not above start"
    SESSION_ORDER = "session went back in time"
    REAL_TIME_ORDER = "real-time order broken"
    """A timestamp that was asked for after another had been received is not larger."""
    REPEATED_RUN = "observer ran twice for one change"
    MISSED_RUN = "observer never ran for a change"


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    kind: ViolationKind
    explanation: str
    transactions: tuple[TransactionRecord, ...]
    """Those that took part, the one that noticed first."""
    key: CellKey | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.explanation}"


@dataclass
class Report:
    """What a check looked at and found. True when all is well."""

    violations_max: int = 100
    violations: list[Violation] = field(default_factory=list)
    """The first `violations_max`."""
    counts: Counter[ViolationKind] = field(default_factory=Counter)
    """All of them."""
    transactions: int = 0
    operations: int = 0

    def add(
        self,
        kind: ViolationKind,
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
        checked = f"{self.transactions} transactions, {self.operations} operations"
        if self:
            return f"{checked}: snapshot isolation holds"
        counted = ", ".join(f"{kind.value} ×{count}" for kind, count in self.counts.most_common())
        lines = [f"{checked}: {counted}", *(f"  {violation}" for violation in self.violations)]
        unlisted = self.counts.total() - len(self.violations)
        if unlisted:
            lines.append(f"  … and {unlisted} more")
        return "\n".join(lines)


def shown_key(key: CellKey) -> str:
    """A cell as explanations name it: accounts['alice']['balance']."""
    table, row, column = key
    return f"{table}[{shown_value(row)}][{shown_value(column)}]"


def shown_value(value: bytes | None) -> str:
    """A value as explanations show it: quoted, cut when long; "nothing" is not an empty value."""
    if value is None:
        return "nothing"
    text = repr(value)[1:]
    if len(text) > _VALUE_CHARACTERS_MAX:
        return f"{text[:_VALUE_CHARACTERS_MAX]}… ({len(value)} bytes)"
    return text
