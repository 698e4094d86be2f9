"""The lists that clients append to: where they are stored, and which are in use."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any

from percolator import Table, codecs
from percolator.world import Random

lists = Table("lists", key=codecs.raw)
elements = lists.column("elements", codecs.raw)
SPLITS = (b"list-04", b"list-08")

_AT_ONCE = 12
_IN_USE_SECONDS = 4.0
"""A list grows for so long, and is only read afterwards: reading it must not become expensive."""
_OPERATIONS_MAX = 4


def plan(random: Random, now: float) -> list[tuple[str, bool]]:
    """The lists of one transaction, and whether it appends to each. `now` is the machine's
    monotonic time, by which all clients use the same lists."""
    generation = int(now / _IN_USE_SECONDS)
    steps = []
    for _ in range(random.randint(1, _OPERATIONS_MAX)):
        # An old list is read now and then: it must not have lost anything since.
        age = random.randint(1, 3) if random.random() < 0.1 else 0
        name = f"list-{random.randrange(_AT_ONCE):02d}-{generation - age}"
        steps.append((name, age == 0 and random.random() < 0.6))
    return steps


def row_of(key: str) -> bytes:
    return key.encode()


def stored(found: tuple[str, ...]) -> bytes:
    return " ".join(found).encode()


def loaded(value: bytes | None) -> tuple[str, ...]:
    return tuple((value or b"").decode().split())


def to_json(operation: Operation) -> list[object]:
    match operation:
        case Append(key, element):
            return ["append", key, element]
        case Read(key, found):
            return ["read", key, list(found)]


def from_json(line: list[object]) -> Operation:
    match line:
        case ["append", str(key), str(element)]:
            return Append(sys.intern(key), sys.intern(element))
        case ["read", str(key), [*found]]:
            # Each element is in hundreds of reads: once in memory is enough.
            return Read(sys.intern(key), tuple(sys.intern(str(one)) for one in found))
    raise ValueError(f"not an operation: {line}")


# Transactions on lists that only grow: what each appended, what it read, and how it ended.
#
# This is the input of the judge in this folder. It shares nothing with the checker of the library
# (`tests/isolation`), so that a mistake in one of them does not hide in the other.


class Outcome(Enum):
    """How a transaction ended, as far as its client was told."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Append:
    """An element was appended. No element is ever appended twice to any list."""

    key: str
    element: str


@dataclass(frozen=True)
class Read:
    """A list was read; it includes what the same transaction had appended by then."""

    key: str
    elements: tuple[str, ...]


Operation = Append | Read


@dataclass(frozen=True)
class Transaction:
    """One transaction, with the instants between which its two timestamps were fetched."""

    name: str
    operations: tuple[Operation, ...]
    outcome: Outcome
    start_ts: int = 0
    commit_ts: int = 0
    """Timestamps are 0 if the client was not told, or if there is none."""
    begin_called: float | None = None
    begin_returned: float | None = None
    commit_called: float | None = None
    commit_returned: float | None = None

    def appends(self) -> Iterator[Append]:
        return (one for one in self.operations if isinstance(one, Append))

    def reads(self) -> Iterator[Read]:
        return (one for one in self.operations if isinstance(one, Read))

    def __str__(self) -> str:
        return f"{self.name} (start {self.start_ts}, commit {self.commit_ts})"


@dataclass(frozen=True)
class Anomaly:
    """One thing that snapshot isolation does not allow."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


# A client's log of its transactions: one JSON object per line, in the kernel before it goes on.
#
# A transaction is written when its commit is called, as unknown, and again when it has ended. The
# last line about it counts; a line that a kill has cut off counts as not written.


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
