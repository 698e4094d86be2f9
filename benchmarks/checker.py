"""Measures the speed of the isolation checker: `python -m benchmarks.checker [TRANSACTIONS]`.

Sessions run in waves: eight transactions begin, read the same state, and write different cells.
One operation in twenty is a scan of about ten rows. Also measured: what recording costs the client.
"""

from __future__ import annotations

import itertools
import sys
import time
from random import Random

from benchmarks.report import Report
from percolator.errors import InvariantViolation
from tests.isolation.checker import check
from tests.isolation.history import CellKey, Found, History, RecordedTransaction, Recorder, Scan

TRANSACTIONS = 100_000
SESSIONS = 8
OPERATIONS = 5
ROWS = 2_000
SCANNED_ROWS = 10


class _Bank:
    """Makes a valid history, one wave after another."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._timestamps = itertools.count(1)
        self._keys: list[CellKey] = [("accounts", b"%06d" % n, b"balance") for n in range(ROWS)]
        self._values: dict[CellKey, bytes] = {}
        self._recorder = Recorder(time.monotonic)
        self._operations = 0

    def history(self, transactions: int) -> History:
        for _ in range(0, transactions, SESSIONS):
            self._wave()
        return self._recorder.history

    def _wave(self) -> None:
        running = [self._recorder.begin(f"session {n}") for n in range(SESSIONS)]
        for recorded in running:
            recorded.began(next(self._timestamps))
        claimed: set[CellKey] = set()
        written = [self._operate(recorded, claimed) for recorded in running]
        for recorded, values in zip(running, written, strict=True):
            recorded.commit_called()
            if not values:
                recorded.committed()
            elif self._random.random() < 0.05:
                recorded.aborted()
            else:
                recorded.committed(next(self._timestamps))
                self._values |= values

    def _operate(
        self, recorded: RecordedTransaction, claimed: set[CellKey]
    ) -> dict[CellKey, bytes]:
        own: dict[CellKey, bytes] = {}
        for _ in range(OPERATIONS):
            self._operations += 1
            key = self._random.choice(self._keys)
            if self._random.random() < 0.05 and not own:
                recorded.scan(self._scan(self._keys.index(key)))
            elif self._random.random() < 0.5 and key not in claimed:
                claimed.add(key)
                own[key] = b"%d" % self._operations
                recorded.put(key, own[key])
            else:
                recorded.read(key, own.get(key, self._values.get(key)))
        return own

    def _scan(self, first: int) -> Scan:
        keys = self._keys[first : first + SCANNED_ROWS]
        found = [Found(key[1], key[2], self._values[key]) for key in keys if key in self._values]
        return Scan("accounts", keys[0][1], keys[-1][1] + b"\x00", tuple(found))


def _recording_microseconds(operations: int) -> float:
    recorded = Recorder(time.monotonic).begin("session")
    key = "accounts", b"row", b"balance"
    begun = time.perf_counter()
    for _ in range(operations):
        recorded.read(key, b"1")
    return (time.perf_counter() - begun) / operations * 1e6


def main() -> int:
    """Measures and reports."""
    transactions = int(sys.argv[1]) if len(sys.argv) > 1 else TRANSACTIONS
    shown = Report("checker")
    history = _Bank(seed=1).history(transactions)
    begun = time.perf_counter()
    verdict = check(history)
    seconds = time.perf_counter() - begun
    if not verdict:
        raise InvariantViolation(f"a valid history was refused: {verdict}")
    shown.add("transactions checked", len(history), "transactions")
    shown.add("time to check them", seconds, "s")
    shown.add("speed", len(history) / seconds, "transactions/s")
    shown.add("recording one operation", _recording_microseconds(200_000), "µs")
    return shown.finish()


if __name__ == "__main__":
    raise SystemExit(main())
