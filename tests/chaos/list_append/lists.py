"""The lists that clients append to: where they are stored, and which are in use at a moment."""

from __future__ import annotations

import sys

from percolator import Table, codecs
from percolator.world import Random
from tests.chaos.list_append.transactions import Append, Operation, Read

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
