"""Finds who wrote a wrong value, and so classifies a mismatch and names both writers.

The replay decides whether a read is right without any of this, so the index of values is built
only when the first mismatch is found.
"""

from __future__ import annotations

from typing import NamedTuple

from percolator.testing.isolation.findings import shown_key, shown_value
from percolator.testing.isolation.history import (
    CellKey,
    Delete,
    History,
    Put,
    TransactionRecord,
)
from percolator.testing.isolation.violations import ViolationKind


class Version(NamedTuple):
    """The value of a cell at some timestamp, and its writer (None: it was there before the run)."""

    value: bytes | None
    writer: TransactionRecord | None
    expired: bool = False
    """It had a value, whose time to live is over."""


NEVER_WRITTEN = Version(None, None)


class _Write(NamedTuple):
    writer: TransactionRecord
    final: bool


class Blame:
    """Explains wrong reads of one history, whose outcomes are settled."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._writes: dict[tuple[CellKey, bytes | None], list[_Write]] | None = None

    def wrong_read(
        self, reader: TransactionRecord, key: CellKey, found: bytes | None, expected: Version
    ) -> tuple[ViolationKind, str, TransactionRecord | None]:
        """The kind of the anomaly, its explanation, and who wrote what was found."""
        kind, source = self._source(reader, key, found)
        origin, writer = _described(kind, source)
        text = (
            f"{reader} read {shown_value(found)} in {shown_key(key)} ({origin}); "
            f"its snapshot holds {shown_value(expected.value)} ({_provenance(expected)})"
        )
        return kind, text, writer

    def wrong_own_read(
        self, reader: TransactionRecord, key: CellKey, found: bytes | None, written: bytes | None
    ) -> tuple[ViolationKind, str, TransactionRecord | None]:
        """The same for a cell that the reader had written itself and then read otherwise."""
        origin, writer = _described(*self._source(reader, key, found))
        left = "deleted it" if written is None else f"written {shown_value(written)} there"
        text = (
            f"{reader} read {shown_value(found)} in {shown_key(key)} ({origin}) "
            f"after it had itself {left}"
        )
        return ViolationKind.OWN_WRITE_NOT_READ, text, writer

    def _source(
        self, reader: TransactionRecord, key: CellKey, found: bytes | None
    ) -> tuple[ViolationKind, _Write | None]:
        """The most likely source of a value that should not have been read."""
        writes = self._index().get((key, found), [])
        committed = [w for w in writes if w.writer.committed and w.writer is not reader]
        final = [w for w in committed if w.final]
        older = [w for w in final if w.writer.commit_ts <= reader.start_ts]
        if older:
            return ViolationKind.STALE_READ, max(older, key=lambda w: w.writer.commit_ts)
        if self._history.initial.get(key) == found:
            return ViolationKind.STALE_READ, None
        if final:
            return ViolationKind.FUTURE_READ, min(final, key=lambda w: w.writer.commit_ts)
        if committed:
            return ViolationKind.INTERMEDIATE_READ, committed[0]
        aborted = [w for w in writes if w.writer is not reader]
        if aborted:
            return ViolationKind.ABORTED_READ, aborted[0]
        if writes:
            # Its own write: not yet made at that point, or since replaced by a later one.
            return ViolationKind.OWN_WRITE_NOT_READ, writes[0]
        return ViolationKind.UNWRITTEN_READ, None

    def _index(self) -> dict[tuple[CellKey, bytes | None], list[_Write]]:
        if self._writes is None:
            self._writes = {}
            for record in self._history:
                last = record.writes()
                for operation in record.operations:
                    if not isinstance(operation, Put | Delete):
                        continue
                    key = operation.key
                    value = operation.value if isinstance(operation, Put) else None
                    final = last[key] == value
                    self._writes.setdefault((key, value), []).append(_Write(record, final))
        return self._writes


def _described(kind: ViolationKind, source: _Write | None) -> tuple[str, TransactionRecord | None]:
    if source is None:
        if kind is ViolationKind.STALE_READ:
            return "there before the first transaction", None
        return "which no transaction ever wrote", None
    writer = source.writer
    if not writer.committed:
        return f"written by {writer}, which aborted", writer
    verb = "written" if source.final else "written, and replaced before its commit,"
    return f"{verb} by {writer}, committed at {writer.commit_ts}", writer


def _provenance(version: Version) -> str:
    if version.writer is None:
        return "there before the first transaction"
    verb = "deleted" if version.value is None else "written"
    if version.expired:
        verb = "written, with a time to live that is over,"
    return f"{verb} by {version.writer}, committed at {version.writer.commit_ts}"
