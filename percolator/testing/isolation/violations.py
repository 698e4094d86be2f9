"""The ways in which a history can break the promises that the checker checks."""

from __future__ import annotations

from enum import Enum


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
    DUPLICATE_TIMESTAMP = "timestamp handed out twice"
    TIMESTAMP_ORDER = "commit not above start"
    SESSION_ORDER = "session went back in time"
    REAL_TIME_ORDER = "real-time order broken"
    """A timestamp that was requested after another had been received is not larger."""
    REPEATED_RUN = "observer ran twice for one change"
    MISSED_RUN = "observer never ran for a change"
    UNWANTED_RUN = "observer that deletes do not wake ran for a deleted cell"
