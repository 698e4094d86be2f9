"""Histories that no snapshot-isolated store can produce, and what must be reported about each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.isolation.checker import ViolationKind
from tests.isolation.history import History
from tests.unit.isolation.histories import (
    ABORTED,
    UNKNOWN,
    delete,
    history,
    lock,
    put,
    read,
    read_lock,
    transaction,
)


@dataclass(frozen=True)
class Bad:
    """What must be reported about a history, and how often at most."""

    history: History
    kind: ViolationKind
    explained: tuple[str, ...]
    unknown_commit: int | None = None


LOST_UPDATE = history(
    transaction(1, put("x", "0"), commit=2),
    transaction(3, read("x", "0"), put("x", "a"), commit=6),
    transaction(4, read("x", "0"), put("x", "b"), commit=7),
)
DIRTY_WRITE = history(
    transaction(1, put("x", "a"), put("y", "a"), commit=4),
    transaction(2, put("x", "b"), put("y", "b"), commit=3),
)
LONG_FORK = history(
    transaction(1, put("x", "1"), commit=3),
    transaction(2, put("y", "1"), commit=4),
    transaction(5, read("x", "1"), read("y", None)),
    transaction(6, read("x", None), read("y", "1")),
)

BAD_HISTORIES: dict[str, Bad] = {
    "lost update": Bad(
        LOST_UPDATE,
        ViolationKind.CONFLICT,
        ("transaction 4", "t['x']['v'] at 7", "transaction 3", "at 6", "above the snapshot 4"),
    ),
    "dirty write": Bad(DIRTY_WRITE, ViolationKind.CONFLICT, ("transaction 1", "transaction 2")),
    "lock-only write ignored by a writer": Bad(
        history(
            transaction(1, lock("x"), commit=3),
            transaction(2, put("x", "b"), commit=4),
        ),
        ViolationKind.CONFLICT,
        ("transaction 2", "transaction 1"),
    ),
    "two lock-only writes at once": Bad(
        history(transaction(1, lock("x"), commit=3), transaction(2, lock("x"), commit=4)),
        ViolationKind.CONFLICT,
        ("transaction 2", "transaction 1"),
    ),
    "written while it was read-locked": Bad(
        history(
            transaction(1, read("x", None), read_lock("x"), put("y", "a"), commit=4),
            transaction(2, put("x", "b"), commit=3),
        ),
        ViolationKind.CONFLICT,
        ("transaction 1", "t['x']['v'] at 4", "transaction 2", "at 3"),
    ),
    "read-locked while it was written": Bad(
        history(
            transaction(1, put("x", "b"), commit=4),
            transaction(2, read("x", None), read_lock("x"), put("y", "a"), commit=3),
        ),
        ViolationKind.CONFLICT,
        ("transaction 1", "t['x']['v'] at 4", "transaction 2", "at 3"),
    ),
    "long writer around a short one": Bad(
        history(transaction(1, put("x", "a"), commit=9), transaction(3, put("x", "b"), commit=4)),
        ViolationKind.CONFLICT,
        ("transaction 1", "at 9", "transaction 3", "at 4"),
    ),
    "stale read": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, put("x", "2"), commit=4),
            transaction(5, read("x", "1")),
        ),
        ViolationKind.STALE_READ,
        ("transaction 5", "read '1'", "by transaction 1", "holds '2'", "by transaction 3"),
    ),
    "committed write not seen at all": Bad(
        history(transaction(1, put("x", "1"), commit=2), transaction(3, read("x", None))),
        ViolationKind.STALE_READ,
        (
            "read nothing",
            "before the first transaction",
            "by transaction 1 (s1 #1), committed at 2",
        ),
    ),
    "write at the reader's own timestamp not seen": Bad(
        history(
            transaction(1, put("x", "1"), commit=5),
            transaction(5, read("x", None), historic=True),
        ),
        ViolationKind.STALE_READ,
        ("holds '1'",),
    ),
    "torn transaction": Bad(
        history(
            transaction(1, put("x", "1"), put("y", "1"), commit=2),
            transaction(3, read("x", "1"), read("y", None)),
        ),
        ViolationKind.STALE_READ,
        ("t['y']['v']", "transaction 1"),
    ),
    "second read of a cell differs": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, read("x", "1"), read("x", "2")),
            transaction(4, put("x", "2"), commit=5),
        ),
        ViolationKind.FUTURE_READ,
        ("transaction 3", "transaction 4", "committed at 5", "holds '1'"),
    ),
    "dirty read of a transaction that commits later": Bad(
        history(transaction(1, put("x", "1"), commit=9), transaction(3, read("x", "1"))),
        ViolationKind.FUTURE_READ,
        ("transaction 3", "written by transaction 1", "committed at 9"),
    ),
    "deletion seen too early": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, read("x", None)),
            transaction(4, delete("x"), commit=5),
        ),
        ViolationKind.STALE_READ,
        ("read nothing", "holds '1'"),
    ),
    "deletion not seen": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, delete("x"), commit=4),
            transaction(5, read("x", "1")),
        ),
        ViolationKind.STALE_READ,
        ("deleted by transaction 3",),
    ),
    "empty value taken for a deleted cell": Bad(
        history(transaction(1, put("x", ""), commit=2), transaction(3, read("x", None))),
        ViolationKind.STALE_READ,
        ("holds ''",),
    ),
    "deleted cell taken for an empty value": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, delete("x"), commit=4),
            transaction(5, read("x", "")),
        ),
        ViolationKind.UNWRITTEN_READ,
        ("read ''", "no transaction ever wrote", "holds nothing"),
    ),
    "aborted read (G1a)": Bad(
        history(transaction(1, put("x", "1"), outcome=ABORTED), transaction(3, read("x", "1"))),
        ViolationKind.ABORTED_READ,
        ("by transaction 1 (s1 #1), which aborted", "holds nothing"),
    ),
    "aborted deletion read": Bad(
        history(
            transaction(1, delete("x"), outcome=ABORTED),
            transaction(2, read("x", None)),
            x="1",
        ),
        ViolationKind.ABORTED_READ,
        ("transaction 1", "holds '1' (there before the first transaction)"),
    ),
    "intermediate read (G1b)": Bad(
        history(
            transaction(1, put("x", "1"), put("x", "2"), commit=2),
            transaction(3, read("x", "1")),
        ),
        ViolationKind.INTERMEDIATE_READ,
        ("replaced before its commit", "holds '2'"),
    ),
    "value out of thin air": Bad(
        history(transaction(1, read("x", "7"))),
        ViolationKind.UNWRITTEN_READ,
        ("read '7'", "no transaction ever wrote"),
    ),
    "value of another cell": Bad(
        history(
            transaction(1, put("x", "1"), put("y", "2"), commit=2),
            transaction(3, read("x", "2")),
        ),
        ViolationKind.UNWRITTEN_READ,
        ("t['x']['v']", "no transaction ever wrote"),
    ),
    "own write not read": Bad(
        history(transaction(1, put("x", "1"), read("x", None), commit=2)),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("read nothing", "written '1' there"),
    ),
    "own deletion not read": Bad(
        history(transaction(1, delete("x"), read("x", "0"), commit=2), x="0"),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("read '0'", "itself deleted it"),
    ),
    "own write read before it was made": Bad(
        history(transaction(1, read("x", "1"), put("x", "1"), commit=2)),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("read '1'",),
    ),
    "an aborted transaction read wrongly": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, read("x", None), outcome=ABORTED),
        ),
        ViolationKind.STALE_READ,
        ("transaction 3",),
    ),
    "long fork": Bad(LONG_FORK, ViolationKind.STALE_READ, ("t['y']['v']", "transaction 2")),
    "historic read of a newer version": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, put("x", "2"), commit=4),
            transaction(2, read("x", "2"), historic=True, session="past"),
        ),
        ViolationKind.FUTURE_READ,
        ("past", "committed at 4"),
    ),
    "historic read of an older version": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, put("x", "2"), commit=4),
            transaction(4, read("x", "1"), historic=True, session="past"),
        ),
        ViolationKind.STALE_READ,
        ("holds '2'",),
    ),
    "one timestamp for two transactions": Bad(
        history(transaction(1, put("x", "1"), commit=2), transaction(2, read("y", None))),
        ViolationKind.DUPLICATE_TIMESTAMP,
        ("2 was handed to", "transaction 1", "transaction 2"),
    ),
    "two transactions with one start": Bad(
        history(
            transaction(1, put("x", "1"), commit=2, session="a"),
            transaction(1, put("y", "1"), commit=3, session="b"),
        ),
        ViolationKind.DUPLICATE_TIMESTAMP,
        ("(a #1)", "(b #1)"),
    ),
    "commit at its own start": Bad(
        history(transaction(5, put("x", "1"), commit=5)),
        ViolationKind.TIMESTAMP_ORDER,
        ("transaction 5", "committed at 5"),
    ),
    "committed without a commit timestamp": Bad(
        history(transaction(5, put("x", "1"))),
        ViolationKind.TIMESTAMP_ORDER,
        ("committed at 0",),
    ),
    "session does not see its own commit": Bad(
        history(
            transaction(3, put("x", "1"), commit=9, session="a", number=1),
            transaction(5, read("x", None), session="a", number=2),
        ),
        ViolationKind.SESSION_ORDER,
        ("transaction 5", "snapshot 5", "transaction 3", "given 9"),
    ),
    "snapshot of a session goes back": Bad(
        history(
            transaction(5, read("x", None), session="a", number=1),
            transaction(3, read("x", None), session="a", number=2),
        ),
        ViolationKind.SESSION_ORDER,
        ("snapshot 3", "given 5"),
    ),
    "acknowledged commit invisible to a later stranger": Bad(
        history(
            transaction(3, put("x", "1"), commit=9, instants=(0.0, 0.1, 0.2, 0.3)),
            transaction(5, read("x", None), instants=(0.4, 0.5, None, None)),
        ),
        ViolationKind.REAL_TIME_ORDER,
        ("transaction 5", "given 5, requested after", "transaction 3", "received 9"),
    ),
    "oracle goes back between two snapshots": Bad(
        history(
            transaction(5, read("x", None), instants=(0.0, 0.1, None, None)),
            transaction(3, read("x", None), instants=(0.2, 0.3, None, None)),
        ),
        ViolationKind.REAL_TIME_ORDER,
        ("transaction 3", "given 3"),
    ),
    "commit timestamp fetched before commit was called": Bad(
        history(
            transaction(1, put("x", "1"), commit=2, instants=(0.0, 0.1, 5.0, 6.0)),
            transaction(3, read("x", None), instants=(1.0, 2.0, None, None)),
        ),
        ViolationKind.REAL_TIME_ORDER,
        ("transaction 1", "given 2", "transaction 3", "received 3"),
    ),
    "unknown commit seen, though the store says it never happened": Bad(
        history(transaction(1, put("x", "1"), outcome=UNKNOWN), transaction(3, read("x", "1"))),
        ViolationKind.ABORTED_READ,
        ("transaction 1", "aborted"),
    ),
    "unknown commit not seen, though the store has it": Bad(
        history(transaction(1, put("x", "1"), outcome=UNKNOWN), transaction(3, read("x", None))),
        ViolationKind.STALE_READ,
        ("by transaction 1", "committed at 2"),
        unknown_commit=2,
    ),
    "unknown commit over a concurrent one": Bad(
        history(
            transaction(1, put("x", "1"), outcome=UNKNOWN),
            transaction(2, put("x", "2"), commit=3),
        ),
        ViolationKind.CONFLICT,
        ("transaction 1", "at 4", "transaction 2"),
        unknown_commit=4,
    ),
}
