"""Every step of the protocol, as one conditional mutation of one cell.

A transaction with start timestamp s takes a cell from nothing to locked to committed, or to rolled
back, and no step goes back or is done twice with another effect: each may be lost, repeated and
delayed as a network likes. Conditions are judged in the order written; the first that fails is
answered with the cell that failed it. So the order is part of the meaning: the own commit is looked
for first, then the own rollback marker, then the lock, then the commits of others. An *absent* lock
alone says nothing.

Prewrite and the commit point are refused below the safe point (`not_below`). Roll-backs and commits
of secondaries are not: after it was raised, what older transactions have left must still be
settled, before anything is collected. (Of its own, a late owner sends them so: aftermath.py.) Once
something was collected, the tablet refuses older roll-backs, too: then nothing was left to settle,
and the commit that one of them would have met may be gone.

The constants name the conditions by their place in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

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

_NO_OWN_COMMIT = Condition(space=_WRITE, expectation=_ABSENT)
_NO_OWN_ROLLBACK = Condition(space=_ROLLBACK, expectation=_ABSENT)
_NO_LOCK = Condition(space=_LOCK, expectation=_ABSENT)
_NO_NEWER_COMMIT = Condition(space=_WRITE, expectation=_ABSENT)
_OWN_LOCK = Condition(space=_LOCK, expectation=_PRESENT)
_PUT_LOCK = Change(kind=_PUT, space=_LOCK)
_DELETE_LOCK = Change(kind=_DELETE, space=_LOCK)
_PUT_RECORD = Change(kind=_PUT, space=_WRITE)

# What is the same in every step of a transaction that all goes well for. Reading it from bytes and
# setting the rest costs a quarter less than making each step from its parts.
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

    Without the first condition, a repeated prewrite after the own commit would be reported as a
    conflict, and the user would do the work twice. Without the second, a late prewrite would
    resurrect a transaction that others have rolled back and reported as such. The lock of another
    means that it may commit below or above us, so nobody can say yet whether the snapshot holds.
    A commit at or above s is a lost update if we went on.
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


def replace_lock(row: bytes, column: bytes, seen: bytes, lock: bytes) -> Mutation:
    """A heartbeat (only the time to live is raised) or a push (only min_commit_timestamp is).

    `seen` is the lock's beginning as it was last read: the two are compare-and-set, or each would
    undo what the other has raised.
    """
    step = Mutation(row=row, column=column)
    step.conditions.add(space=_LOCK, expectation=_PRESENT, prefix=seen)
    step.changes.add(kind=_PUT, space=_LOCK, value=lock)
    return step


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
    own = timestamp_bytes(start)
    step = Mutation.FromString(_COMMIT_PRIMARY)
    step.row, step.column, step.not_below = row, column, start
    own_commit, own_rollback, own_lock = step.conditions
    own_commit.from_timestamp, own_commit.prefix = start, own
    own_rollback.from_timestamp, own_rollback.until_timestamp = start, start + 1
    own_lock.prefix = own + timestamp_bytes(min_commit_seen)
    _set_record(step, commit, record, observers)
    return step


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
    step = Mutation.FromString(_COMMIT_SECONDARY)
    step.row, step.column = row, column
    own_commit, own_lock = step.conditions
    own_commit.from_timestamp, own_commit.prefix = start, own
    own_lock.prefix = own
    _set_record(step, commit, record, observers)
    return step


def roll_back(row: bytes, column: bytes, start: int) -> Mutation:
    """Makes sure that the transaction never holds this cell: not now, and not by a late prewrite.

    Deletes the lock only if it is this transaction's: another one may have locked the cell since,
    and would lose its write.
    """
    step = Mutation(row=row, column=column)
    _no_own_commit(step, start)
    _roll_back(step, start)
    return step


def roll_back_expired(row: bytes, column: bytes, start: int, seen: bytes) -> Mutation:
    """The same, because the lock's time to live ran out.

    `seen` is the beginning of the lock that was judged, empty if there was none: a heartbeat that
    came since then proves the owner alive.
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

    Applied means that there is no trace: not yet prewritten, or never. Nobody may conclude from it
    that the transaction is dead; only a marker says so.
    """
    step = Mutation(row=row, column=column)
    _no_own_commit(step, start)
    _no_own_rollback(step, start)
    step.conditions.add(space=_LOCK, expectation=_ABSENT, prefix=timestamp_bytes(start))
    return step


def notify(row: bytes, column: bytes, commit: int, observers: tuple[bytes, ...]) -> Mutation:
    """Weak notifications, which carry no data and take no lock."""
    step = Mutation(row=row, column=column)
    _notify(step, commit, observers)
    return step


def forget_notifications(
    row: bytes, column: bytes, observer: bytes, timestamps: Sequence[int]
) -> Mutation:
    """After the observer has seen them: exactly these, since it has seen no other.

    A newer one, of a commit above the observer's snapshot, has to stay, or that commit is lost.
    """
    step = Mutation(row=row, column=column)
    for timestamp in timestamps:
        step.changes.add(kind=_DELETE, space=_NOTIFY, timestamp=timestamp, qualifier=observer)
    return step


# ---------------------------------------------------------------------- what steps have in common


def _no_own_commit(step: Mutation, start: int) -> None:
    """A committed transaction is never rolled back, whatever anybody believed about its owner."""
    step.conditions.add(
        space=_WRITE, expectation=_ABSENT, from_timestamp=start, prefix=timestamp_bytes(start)
    )


def _no_own_rollback(step: Mutation, start: int) -> None:
    step.conditions.add(
        space=_ROLLBACK, expectation=_ABSENT, from_timestamp=start, until_timestamp=start + 1
    )


def _set_record(step: Mutation, commit: int, record: bytes, observers: tuple[bytes, ...]) -> None:
    """The notifications land with the write record: an observed commit without one is lost work."""
    put = step.changes[1]
    put.timestamp, put.value = commit, record
    if observers:
        _notify(step, commit, observers)


def _roll_back(step: Mutation, start: int) -> None:
    step.changes.add(kind=_DELETE_IF_PREFIX, space=_LOCK, value=timestamp_bytes(start))
    step.changes.add(kind=_DELETE, space=_DATA, timestamp=start)
    step.changes.add(kind=_PUT, space=_ROLLBACK, timestamp=start)


def _notify(step: Mutation, commit: int, observers: tuple[bytes, ...]) -> None:
    for observer in observers:
        step.changes.add(kind=_PUT, space=_NOTIFY, timestamp=commit, qualifier=observer)
