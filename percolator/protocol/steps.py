"""Every step of the protocol, as one conditional mutation of one cell.

A transaction with start timestamp s takes a cell from nothing to locked to committed, or to rolled
back. No step goes backwards, and repeating one has no further effect, so the network may lose,
repeat and delay each of them. Conditions are judged in the order written; the first that fails is
reported, with the cell that failed it. So the order is part of the meaning: look for the
transaction's own commit first, then its own rollback marker, then the lock, then commits of other
transactions. The *absence* of a lock alone proves nothing.

Prewrites and commits are refused below the safe point (`not_below`), and so is the marker that an
owner writes on its own primary. Other rollbacks are not: after the safe point was raised, what
older transactions left behind must still be resolved before anything is collected. Whoever rolls a
lock forward therefore repeats a refused commit without `not_below` (roll_forward.py): the lock
proves that nothing of it was collected. Once something has been collected, the tablet refuses older
rollbacks too: by then no lock is left to resolve, and the commit that such a rollback would have
met may be gone.

The constants name the conditions by their place in each step.

Prewrites and commits travel to tablets as parallel lists, from which a tablet makes these steps
(percolator/tablet/requests.py; a test compares both). A row store is sent the steps themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.formats.records import timestamp_bytes
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
_AT_MOST = Condition.EXPECTATION_AT_MOST
_PUT = Change.KIND_PUT
_DELETE = Change.KIND_DELETE
_DELETE_IF_PREFIX = Change.KIND_DELETE_IF_PREFIX

OWN_COMMIT = 0
"""In every step but a heartbeat: the transaction is committed, at the timestamp of the cell."""
OWN_ROLLBACK = 1
"""In prewrite, commit_primary and status: the transaction was rolled back."""
PREWRITE_LOCKED = 2
OWN_LOCK = 2
"""In commit_primary and commit_part: the lock is gone, or is not as it has to be."""
PREWRITE_NEWER_COMMIT = 3

_NO_OWN_COMMIT = Condition(space=_WRITE, expectation=_ABSENT)
_NO_OWN_ROLLBACK = Condition(space=_ROLLBACK, expectation=_ABSENT)
_NO_LOCK = Condition(space=_LOCK, expectation=_ABSENT)
_NO_NEWER_COMMIT = Condition(space=_WRITE, expectation=_ABSENT)
_OWN_LOCK = Condition(space=_LOCK, expectation=_PRESENT)
_PUT_LOCK = Change(kind=_PUT, space=_LOCK)
_DELETE_LOCK = Change(kind=_DELETE, space=_LOCK)
_PUT_RECORD = Change(kind=_PUT, space=_WRITE)

# The parts that are the same in every transaction that meets no obstacle. Parsing them from bytes
# and setting the rest costs a quarter less than building each step from its parts.
_PREWRITE = Mutation(
    conditions=(_NO_OWN_COMMIT, _NO_OWN_ROLLBACK, _NO_LOCK, _NO_NEWER_COMMIT), changes=(_PUT_LOCK,)
).SerializeToString()
_COMMIT_PRIMARY = Mutation(
    conditions=(_NO_OWN_COMMIT, _NO_OWN_ROLLBACK, _OWN_LOCK), changes=(_DELETE_LOCK, _PUT_RECORD)
).SerializeToString()
_COMMIT_SECONDARY = Mutation(
    conditions=(_NO_OWN_COMMIT, _OWN_LOCK), changes=(_DELETE_LOCK, _PUT_RECORD)
).SerializeToString()


def prewrite(row: bytes, column: bytes, start: int, lock: bytes, data: bytes | None) -> Mutation:
    """Locks the cell; `data` is the value when it is too long to travel in the lock.

    Without the first condition, a prewrite repeated after the transaction's own commit would be
    reported as a conflict, and the user would do the work twice. Without the second, a late
    prewrite would resurrect a transaction that others have rolled back and reported as such. The
    third: the holder of another lock may still commit below or above us, so it is not yet known
    whether our snapshot holds. The fourth: continuing past a commit at or above s would lose that
    update.
    """
    step = Mutation.FromString(_PREWRITE)
    step.row, step.column, step.not_below = row, column, start
    own_commit, own_rollback, _, newer_commit = step.conditions
    own_commit.from_timestamp, own_commit.prefix = start, timestamp_bytes(start)
    own_rollback.from_timestamp, own_rollback.until_timestamp = start, start + 1
    newer_commit.from_timestamp = start
    step.changes[0].value = lock
    if data is not None:
        step.changes.add(kind=_PUT, space=_DATA, timestamp=start, value=data)
    return step


def prewrite_since(
    row: bytes, column: bytes, start: int, since: int, lock: bytes, data: bytes | None
) -> Mutation:
    """Locks the cell, as `prewrite`, unless it was committed at or above `since`, which is at most
    `start`. Below the safe point, a deletion that was committed since may be collected."""
    step = prewrite(row, column, start, lock, data)
    step.conditions[PREWRITE_NEWER_COMMIT].from_timestamp = since
    step.not_below = since
    return step


def commit_part(row: bytes, column: bytes, start: int, commit_ts: int, record: bytes) -> Mutation:
    """Commits the primary of one part of a shared transaction, together with those of the others.

    Unlike at another commit point, the lock need not be as it was last seen, as long as no reader
    has pushed it above `commit_ts`: with hundreds of primaries, one or the other is pushed all the
    time. A second commit timestamp may follow only if one was pushed above the first; that part,
    and with it the group, can never be committed at the first.
    """
    step = commit_primary(row, column, start, 0, commit_ts, record, ())
    own_lock = step.conditions[OWN_LOCK]
    own_lock.expectation = _AT_MOST
    own_lock.prefix, own_lock.required = timestamp_bytes(start), timestamp_bytes(commit_ts)
    return step


def require_open(row: bytes, column: bytes, start: int) -> Mutation:
    """Looks whether a shared transaction has ended. Later, what says so may be collected."""
    step = Mutation(row=row, column=column, not_below=start)
    _no_own_commit(step, start)
    _no_own_rollback(step, start)
    return step


def close_committed(
    row: bytes, column: bytes, start: int, commit_ts: int, record: bytes
) -> Mutation:
    """Ends a shared transaction with the commits of its parts, unless it was given up before."""
    step = require_open(row, column, start)
    step.changes.add(kind=_PUT, space=_WRITE, timestamp=commit_ts, value=record)
    return step


def replace_lock(row: bytes, column: bytes, seen: bytes, lock: bytes) -> Mutation:
    """A heartbeat (raises only the time to live) or a push (raises only min_commit_timestamp).

    `seen` is the beginning of the lock as it was last read. Both steps are compare-and-set;
    otherwise each would undo what the other has raised.
    """
    step = Mutation(row=row, column=column)
    step.conditions.add(space=_LOCK, expectation=_PRESENT, prefix=seen)
    step.changes.add(kind=_PUT, space=_LOCK, value=lock)
    return step


def raise_lock(row: bytes, column: bytes, start: int, below: int, lock: bytes) -> Mutation:
    """A heartbeat that no push makes fail: it replaces the lock as long as its min_commit_timestamp
    is at most `below`. That of `lock` is higher, so no copy of this step fits again."""
    step = Mutation(row=row, column=column)
    own, required = timestamp_bytes(start), timestamp_bytes(below)
    step.conditions.add(space=_LOCK, expectation=_AT_MOST, prefix=own, required=required)
    step.changes.add(kind=_PUT, space=_LOCK, value=lock)
    return step


def commit_primary(
    row: bytes,
    column: bytes,
    start: int,
    min_commit_seen: int,
    commit_ts: int,
    record: bytes,
    observers: tuple[bytes, ...],
) -> Mutation:
    """The commit point.

    The lock must still carry the min_commit_timestamp that we saw, which is at most `commit_ts`.
    If it does not, a reader above `commit_ts` has pushed the lock and read past it, and would have
    missed our write. Only after a push may a second attempt use another commit timestamp: since
    min_commit_timestamp only grows, the first attempt can no longer succeed.
    """
    own = timestamp_bytes(start)
    step = Mutation.FromString(_COMMIT_PRIMARY)
    step.row, step.column, step.not_below = row, column, start
    own_commit, own_rollback, own_lock = step.conditions
    own_commit.from_timestamp, own_commit.prefix = start, own
    own_rollback.from_timestamp, own_rollback.until_timestamp = start, start + 1
    own_lock.prefix = own + timestamp_bytes(min_commit_seen)
    _set_record(step, commit_ts, record, observers)
    return step


def commit_secondary(
    row: bytes,
    column: bytes,
    start: int,
    commit_ts: int,
    record: bytes,
    observers: tuple[bytes, ...],
) -> Mutation:
    """Rolls a cell forward, once the primary's commit record was *seen*.

    The owner and any other client write the same record. A lock that is gone was rolled forward by
    another client, which the first condition finds.
    """
    own = timestamp_bytes(start)
    step = Mutation.FromString(_COMMIT_SECONDARY)
    step.row, step.column = row, column
    own_commit, own_lock = step.conditions
    own_commit.from_timestamp, own_commit.prefix = start, own
    own_lock.prefix = own
    _set_record(step, commit_ts, record, observers)
    return step


def roll_back(row: bytes, column: bytes, start: int) -> Mutation:
    """Makes sure that the transaction never holds this cell: not now, and not by a late prewrite.

    Deletes the lock only if it is this transaction's: another transaction may have locked the cell
    since, and would lose its write.
    """
    step = Mutation(row=row, column=column)
    _no_own_commit(step, start)
    _roll_back(step, start)
    return step


def roll_back_expired(row: bytes, column: bytes, start: int, seen: bytes) -> Mutation:
    """Rolls back like `roll_back`, because the lock's time to live has run out.

    `seen` is the beginning of the lock that was judged, empty if there was none. A heartbeat since
    then proves that the owner is alive, and makes this step fail.
    """
    own = timestamp_bytes(start)
    step = Mutation(row=row, column=column)
    _no_own_commit(step, start)
    if seen:
        step.conditions.add(space=_LOCK, expectation=_BEGINS_IF_PRESENT, prefix=own, required=seen)
    else:
        step.conditions.add(space=_LOCK, expectation=_ABSENT, prefix=own)
    _roll_back(step, start)
    return step


def status(row: bytes, column: bytes, start: int) -> Mutation:
    """Asks the primary what became of its transaction; changes nothing.

    "Applied" means that there is no trace: the cell has not been prewritten yet, or never will be.
    This does not prove that the transaction is dead; only a rollback marker does.
    """
    step = Mutation(row=row, column=column)
    _no_own_commit(step, start)
    _no_own_rollback(step, start)
    step.conditions.add(space=_LOCK, expectation=_ABSENT, prefix=timestamp_bytes(start))
    return step


def notify(row: bytes, column: bytes, commit_ts: int, observers: tuple[bytes, ...]) -> Mutation:
    """Writes weak notifications, which carry no data and take no lock."""
    step = Mutation(row=row, column=column)
    _notify(step, commit_ts, observers)
    return step


def forget_notifications(
    row: bytes, column: bytes, observer: bytes, timestamps: Sequence[int]
) -> Mutation:
    """Deletes notifications that the observer has handled: exactly these, since it saw no others.

    A newer one, from a commit above the observer's snapshot, has to stay: deleting it would lose
    that change.
    """
    step = Mutation(row=row, column=column)
    for timestamp in timestamps:
        step.changes.add(kind=_DELETE, space=_NOTIFY, timestamp=timestamp, qualifier=observer)
    return step


# ---------------------------------------------------------------------- parts shared by the steps


def _no_own_commit(step: Mutation, start: int) -> None:
    """A committed transaction is never rolled back, whatever was believed about its owner."""
    step.conditions.add(
        space=_WRITE, expectation=_ABSENT, from_timestamp=start, prefix=timestamp_bytes(start)
    )


def _no_own_rollback(step: Mutation, start: int) -> None:
    step.conditions.add(
        space=_ROLLBACK, expectation=_ABSENT, from_timestamp=start, until_timestamp=start + 1
    )


def _set_record(
    step: Mutation, commit_ts: int, record: bytes, observers: tuple[bytes, ...]
) -> None:
    """The notifications land with the record: an observed commit without one would be lost work."""
    put = step.changes[1]
    put.timestamp, put.value = commit_ts, record
    if observers:
        _notify(step, commit_ts, observers)


def _roll_back(step: Mutation, start: int) -> None:
    step.changes.add(kind=_DELETE_IF_PREFIX, space=_LOCK, value=timestamp_bytes(start))
    step.changes.add(kind=_DELETE, space=_DATA, timestamp=start)
    step.changes.add(kind=_PUT, space=_ROLLBACK, timestamp=start)


def _notify(step: Mutation, commit_ts: int, observers: tuple[bytes, ...]) -> None:
    for observer in observers:
        step.changes.add(kind=_PUT, space=_NOTIFY, timestamp=commit_ts, qualifier=observer)
