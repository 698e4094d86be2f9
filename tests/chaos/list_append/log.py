"""A client's log of its transactions: one JSON object per line, in the kernel before it goes on.

A transaction is written when its commit is called, as unknown, and again when it has ended. The
last line about it counts; a line that a kill has cut off counts as not written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.chaos.list_append.lists import from_json, to_json
from tests.chaos.list_append.transactions import Operation, Outcome, Transaction


@dataclass
class Entry:
    """One transaction while it runs."""

    log: IO[str]
    session: str
    number: int
    operations: list[Operation] = field(default_factory=list)
    start_ts: int = 0
    instants: list[float | None] = field(
        default_factory=lambda: [time.monotonic(), None, None, None]
    )

    def began(self, start_ts: int) -> None:
        self.start_ts = start_ts
        self.instants[1] = time.monotonic()

    def commit_called(self) -> None:
        self.instants[2] = time.monotonic()
        self._write(Outcome.UNKNOWN, 0)

    def ended(self, outcome: Outcome, commit_ts: int = 0) -> None:
        self.instants[3] = time.monotonic()
        self._write(outcome, commit_ts)

    def _write(self, outcome: Outcome, commit_ts: int) -> None:
        line = {
            "session": self.session,
            "number": self.number,
            "outcome": outcome.value,
            "start_ts": self.start_ts,
            "commit_ts": commit_ts,
            "instants": self.instants,
            "operations": [to_json(one) for one in self.operations],
        }
        self.log.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.log.flush()


def read_logs(paths: Iterable[Path]) -> list[Transaction]:
    """The transactions of all clients."""
    return [one for path in paths for one in _read(path)]


def _read(path: Path) -> Iterator[Transaction]:
    last: dict[tuple[str, int], Transaction] = {}
    for line in path.read_text().split("\n")[:-1]:
        one: dict[str, Any] = json.loads(line)
        last[one["session"], one["number"]] = Transaction(
            f"{one['session']} #{one['number']}",
            tuple(from_json(operation) for operation in one["operations"]),
            Outcome(one["outcome"]),
            one["start_ts"],
            one["commit_ts"],
            *one["instants"],
        )
    yield from last.values()
