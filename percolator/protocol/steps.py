"""Every step of the protocol, as one conditional mutation of one cell.

A transaction with start timestamp s takes a cell from nothing to locked to committed, or to rolled
back, and no step goes back or is done twice with another effect: each may be lost, repeated and
delayed as a network likes. Conditions are judged in the order written; the first that fails is
answered with the cell that failed it. So the order is part of the meaning: the own commit is looked
for first, then the own rollback marker, then the lock, then the commits of others. An *absent* lock
alone says nothing.

Only prewrite and the commit point are refused below the safe point (`not_below`): after it was
raised, what older transactions have left must still be settled, before anything is collected.

The constants name the conditions by their place in each step.
"""

from __future__ import annotations

from percolator.protocol.records import timestamp_bytes
from percolator.v1 import cells_pb2
from percolator.v1.tabletserver_pb2 import Change, Condition, Mutation

_LOCK = cells_pb2.SPACE_LOCK
_WRITE = cells_pb2.SPACE_WRITE
_DATA = cells_pb2.SPACE_DATA
_ROLLBACK = cells_pb2.SPACE_ROLLBACK
_NOTIFY = cells_pb2.SPACE_NOTIFY
_ABSENT = Condition.EXPECTATION_ABSENT
_PRESENT = Condition.EXPECTATION_PRESENT
_BEGINS_IF_PRESENT = Condition.EXPECTATION_BEGINS_IF_PRESENT
_PUT = Change.KIND_PUT
_DELETE = Change.KIND_DELETE
_DELETE_IF_PREFIX = Change.KIND_DELETE_IF_PREFIX

OWN_COMMIT = 0
"""Of every step but a heartbeat: the transaction is committed, at the timestamp of the cell."""
OWN_ROLLBACK = 1
"""Of prewrite, commit_primary and status: the transaction was rolled back."""
PREWRITE_LOCKED = 2
PREWRITE_NEWER_COMMIT = 3

_NO_LOCK: dict[str, object] = {"space": _LOCK, "expectation": _ABSENT}
_DELETE_LOCK: dict[str, object] = {"kind": _DELETE, "space": _LOCK}


def prewrite(row: bytes, column: bytes, start: int, lock: bytes, data: bytes | None) -> Mutation:
    """Locks the cell; `data` is the value when it is too long to travel in the lock.

    Without the first condition, a repeated prewrite after the own commit would be reported as a
    conflict, and the user would do the work twice. Without the second, a late prewrite would
    resurrect a transaction that others have rolled back and reported as such. The lock of another
    means that it may commit below or above us, so nobody can say yet whether the snapshot holds.
    A commit at or above s is a lost update if we went on.
    """
    changes = [{"kind": _PUT, "space": _LOCK, "value": lock}]
    if data is not None:
        changes.append({"kind": _PUT, "space": _DATA, "timestamp": start, "value": data})
    return Mutation(
        row=row,
        column=column,
        not_below=start,
        conditions=[
            {
                "space": _WRITE,
                "expectation": _ABSENT,
                "from_timestamp": start,
                "prefix": timestamp_bytes(start),
            },
            {
                "space": _ROLLBACK,
                "expectation": _ABSENT,
                "from_timestamp": start,
                "until_timestamp": start + 1,
            },
            _NO_LOCK,
            {"space": _WRITE, "expectation": _ABSENT, "from_timestamp": start},
        ],
        changes=changes,
    )


def replace_lock(row: bytes, column: bytes, seen: bytes, lock: bytes) -> Mutation:
    """A heartbeat (only the time to live is raised) or a push (only min_commit_timestamp is).

    `seen` is the lock's beginning as it was last read: the two are compare-and-set, or each would
    undo what the other has raised.
    """
    return Mutation(
        row=row,
        column=column,
        conditions=[{"space": _LOCK, "expectation": _PRESENT, "prefix": seen}],
        changes=[{"kind": _PUT, "space": _LOCK, "value": lock}],
    )


def commit_primary(
    row: bytes,
    column: bytes,
    start: int,
    min_commit_seen: int,
    commit: int,
    record: bytes,
    observers: tuple[bytes, ...],
) -> Mutation:
    """The commit point.

    The lock has to carry the min_commit_timestamp that we saw (at most `commit`): a reader above
    `commit` that has pushed it has already read around us. Nothing else lets a second attempt use
    another commit timestamp: that number only grows, so the first attempt can never hold again.
    """
    seen = timestamp_bytes(start) + timestamp_bytes(min_commit_seen)
    return Mutation(
        row=row,
        column=column,
        not_below=start,
        conditions=[
            {
                "space": _WRITE,
                "expectation": _ABSENT,
                "from_timestamp": start,
                "prefix": timestamp_bytes(start),
            },
            {
                "space": _ROLLBACK,
                "expectation": _ABSENT,
                "from_timestamp": start,
                "until_timestamp": start + 1,
            },
            {"space": _LOCK, "expectation": _PRESENT, "prefix": seen},
        ],
        changes=_commit_changes(commit, record, observers),
    )


def commit_secondary(
    row: bytes,
    column: bytes,
    start: int,
    commit: int,
    record: bytes,
    observers: tuple[bytes, ...],
) -> Mutation:
    """Rolls a cell forward, once the primary's commit record was *seen*.

    Whoever does it, owner or passer-by, writes the same. A lock that is gone was rolled forward by
    somebody else, which the first condition finds.
    """
    own = timestamp_bytes(start)
    return Mutation(
        row=row,
        column=column,
        conditions=[
            {"space": _WRITE, "expectation": _ABSENT, "from_timestamp": start, "prefix": own},
            {"space": _LOCK, "expectation": _PRESENT, "prefix": own},
        ],
        changes=_commit_changes(commit, record, observers),
    )


def _commit_changes(
    commit: int, record: bytes, observers: tuple[bytes, ...]
) -> list[dict[str, object]]:
    """The notifications land with the write record: an observed commit without one is lost work."""
    changes: list[dict[str, object]] = [
        _DELETE_LOCK,
        {"kind": _PUT, "space": _WRITE, "timestamp": commit, "value": record},
    ]
    if observers:
        changes.extend(_notification(observer, commit) for observer in observers)
    return changes


def roll_back(row: bytes, column: bytes, start: int) -> Mutation:
    """Makes sure that the transaction never holds this cell: not now, and not by a late prewrite.

    Deletes the lock only if it is this transaction's: another one may have locked the cell since,
    and would lose its write.
    """
    return Mutation(
        row=row,
        column=column,
        conditions=[_no_own_commit(start)],
        changes=_roll_back_changes(start),
    )


def roll_back_expired(row: bytes, column: bytes, start: int, seen: bytes) -> Mutation:
    """The same, because the lock's time to live ran out.

    `seen` is the beginning of the lock that was judged, empty if there was none: a heartbeat that
    came since then proves the owner alive.
    """
    own = timestamp_bytes(start)
    unchanged: dict[str, object]
    if seen:
        unchanged = {
            "space": _LOCK,
            "expectation": _BEGINS_IF_PRESENT,
            "prefix": own,
            "required": seen,
        }
    else:
        unchanged = {"space": _LOCK, "expectation": _ABSENT, "prefix": own}
    return Mutation(
        row=row,
        column=column,
        conditions=[_no_own_commit(start), unchanged],
        changes=_roll_back_changes(start),
    )


def _no_own_commit(start: int) -> dict[str, object]:
    """A committed transaction is never rolled back, whatever anybody believed about its owner."""
    return {
        "space": _WRITE,
        "expectation": _ABSENT,
        "from_timestamp": start,
        "prefix": timestamp_bytes(start),
    }


def _roll_back_changes(start: int) -> list[dict[str, object]]:
    changes: list[dict[str, object]] = [
        {"kind": _DELETE_IF_PREFIX, "space": _LOCK, "value": timestamp_bytes(start)},
        {"kind": _DELETE, "space": _DATA, "timestamp": start},
        {"kind": _PUT, "space": _ROLLBACK, "timestamp": start},
    ]
    return changes


def status(row: bytes, column: bytes, start: int) -> Mutation:
    """Asks the primary what became of its transaction; changes nothing.

    Applied means that there is no trace: not yet prewritten, or never. Nobody may conclude from it
    that the transaction is dead; only a marker says so.
    """
    own = timestamp_bytes(start)
    return Mutation(
        row=row,
        column=column,
        conditions=[
            {"space": _WRITE, "expectation": _ABSENT, "from_timestamp": start, "prefix": own},
            {
                "space": _ROLLBACK,
                "expectation": _ABSENT,
                "from_timestamp": start,
                "until_timestamp": start + 1,
            },
            {"space": _LOCK, "expectation": _ABSENT, "prefix": own},
        ],
    )


def notify(row: bytes, column: bytes, commit: int, observers: tuple[bytes, ...]) -> Mutation:
    """Weak notifications, which carry no data and take no lock."""
    return Mutation(
        row=row,
        column=column,
        changes=[_notification(observer, commit) for observer in observers],
    )


def _notification(observer: bytes, commit: int) -> dict[str, object]:
    return {"kind": _PUT, "space": _NOTIFY, "timestamp": commit, "qualifier": observer}
