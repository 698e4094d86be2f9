"""A step of the protocol as a check of its row and changes.

A step is made if *all* of its conditions hold, and a store only says whether a check *finds* cells.
So there are two kinds of steps:

    expects nothing   prewrite, roll_back, roll_back_expired: each condition is turned into a
                      selection of the cells that make it fail, and nothing may be found
    expects a lock    commit_primary, commit_secondary, commit_part, replace_lock: the lock must be
                      found

A step without changes (status) is only judged: a store's checks need changes. Groups of steps that
are made together or not at all are in mutations.py.

Two facts about steps are used, and nothing else is known of them here:

* While a transaction's lock is in a cell, the cell has neither its commit nor its marker: each of
  these steps removes the lock in the same change, and no prewrite passes them. So a step that
  expects the lock need not ask about the other two.
* A commit of the transaction itself is a commit at or above its start. So a prewrite asks only
  about the latter; mutations.py tells them apart when the check has found one.

Where history was collected, what a step asks about may be gone, so steps that expect nothing ask
for the note of that, too (collection.py). A lock of a transaction excludes notes above its start,
so a step that expects the lock need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from percolator.codecs.values import after_prefix
from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    START_TIMESTAMP_BYTES,
    WRITE_KIND_OFFSET,
    locked_column,
    read_locks_of,
    timestamp_bytes,
)
from percolator.routing.cells import ListedStep
from percolator.rowstore.layout import (
    DATA,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    Times,
    column_bounds,
    no_proof,
    stored_column,
    transactions_collected_above,
)
from percolator.rowstore.port import (
    TIME_UNIT,
    Change,
    Check,
    DeleteCell,
    Selection,
    SetCell,
)
from percolator.v1 import cells_pb2
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Space
from percolator.v1.tabletserver_pb2 import Change as WireChange
from percolator.v1.tabletserver_pb2 import Condition, Mutation, StepList

# Read locks and writers exclude each other, although they lock different cells of a row.
#
# A tablet server does this by itself (percolator/tablet/judge.py). A row store knows nothing of it,
# so each prewrite asks about the other side, too, in the same check: a cell's prewrite about all
# read locks of the cell, and a read lock's prewrite about the cell that it locks. A prewrite is
# what has conditions that name no transaction: there is no lock, there is no newer commit.


class OtherSide(NamedTuple):
    """Cells that a prewrite must not find: stored columns in [first, end), as in the condition."""

    condition: int
    """The index of the condition that holds for these cells as well."""
    space: Space
    from_timestamp: int
    first_column: bytes
    end_column: bytes


def other_sides(step: Mutation) -> Iterator[OtherSide]:
    """Conditions of a prewrite as they apply to other cells of its row; none for other steps."""
    bounds = other_columns(step.column)
    for index, condition in _naming_nobody(step.conditions):
        yield OtherSide(index, condition.space, condition.from_timestamp, *bounds)


def other_columns(column: bytes) -> tuple[bytes, bytes]:
    """The stored columns that exclude this one: all read locks of a cell, or the cell of one."""
    locked = locked_column(column)
    if locked is not None:
        return column_bounds(locked)
    prefix = stored_column(read_locks_of(column))
    return prefix, after_prefix(prefix)


def _naming_nobody(conditions: Iterable[Condition]) -> Iterator[tuple[int, Condition]]:
    for index, condition in enumerate(conditions):
        if (
            condition.expectation == Condition.EXPECTATION_ABSENT
            and condition.space in (SPACE_LOCK, SPACE_WRITE)
            and not condition.prefix
            and not condition.until_timestamp
        ):
            yield index, condition


_ABSENT = Condition.EXPECTATION_ABSENT
_PRESENT = Condition.EXPECTATION_PRESENT
_AT_MOST = Condition.EXPECTATION_AT_MOST
_BEGINS_IF_PRESENT = Condition.EXPECTATION_BEGINS_IF_PRESENT
_OF_A_LOCK = (_PRESENT, _AT_MOST)
_COMMITS = (WRITES, LOCK_ONLY)


class Step(NamedTuple):
    """A step, ready for a row store."""

    asked: Mutation | ListedStep
    start: int
    """The start timestamp of the transaction that it is about."""
    expects_lock: bool
    selections: tuple[Selection, ...]
    """Cells that must not be found; or, with `expects_lock`, the one cell that must be."""
    changes: tuple[Change, ...]

    @property
    def mutation(self) -> Mutation:
        """The step as a message, whatever it has arrived as."""
        asked = self.asked
        return asked.mutation() if isinstance(asked, ListedStep) else asked

    @property
    def size_bytes(self) -> int:
        return sum(selection.size_bytes for selection in self.selections)


def mapped(mutation: Mutation, times: Times) -> Step:
    """Raises `InvalidArgument` for what cannot be done in a row store."""
    start = _start_of(mutation)
    lock = next((one for one in mutation.conditions if one.expectation in _OF_A_LOCK), None)
    if lock is not None:
        _require_implied(mutation, lock)
        selections: tuple[Selection, ...] = (_expected_lock(mutation.column, lock, times),)
    else:
        selections = tuple(_obstacles(mutation, times))
    changes = tuple(
        one
        for change in mutation.changes
        if change.space != cells_pb2.SPACE_NOTIFY  # its intents were written before it could commit
        for one in _changed(mutation.column, start, change, times)
    )
    return Step(mutation, start, lock is not None, selections, changes)


def check_of(steps: Sequence[Step]) -> Check:
    """The check of several steps, all of the same kind: each of them has to be possible."""
    selections = tuple(one for step in steps for one in step.selections)
    if steps[0].expects_lock:
        return Check(selections, found=True, more_than=len(steps) - 1)
    return Check(selections, found=False)


def commits_selected(
    first_column: bytes, end_column: bytes, from_timestamp: int, until_timestamp: int, times: Times
) -> Iterator[Selection]:
    """The commits of these columns with from <= timestamp < until (0: no end)."""
    until = times.at_or_above(until_timestamp) if until_timestamp else 0
    for family in _COMMITS:
        from_time = times.at_or_above(from_timestamp)
        yield Selection(family, first_column, end_column, from_time, until)


def _start_of(mutation: Mutation) -> int:
    for condition in mutation.conditions:
        if len(condition.prefix) >= START_TIMESTAMP_BYTES:
            return int.from_bytes(condition.prefix[:START_TIMESTAMP_BYTES], "big")
    raise _impossible("no condition names the transaction")


def _require_implied(mutation: Mutation, lock: Condition) -> None:
    """Raises unless all other conditions hold wherever the lock is."""
    start = lock.prefix[:START_TIMESTAMP_BYTES]
    for condition in mutation.conditions:
        if condition is lock:
            continue
        own_commit = condition.space == cells_pb2.SPACE_WRITE and condition.prefix == start
        own_rollback = (
            condition.space == cells_pb2.SPACE_ROLLBACK
            and condition.from_timestamp == int.from_bytes(start, "big")
            and condition.until_timestamp == condition.from_timestamp + 1
        )
        if condition.expectation != _ABSENT or not (own_commit or own_rollback):
            raise _impossible("a lock is expected together with something that it does not imply")


def _expected_lock(column: bytes, condition: Condition, times: Times) -> Selection:
    own = own_lock(column, condition.prefix, times)
    if condition.expectation != _AT_MOST:
        return own
    # What follows the prefix may be anything up to what is required.
    return own._replace(end_value=after_prefix(condition.prefix + condition.required))


def own_lock(column: bytes, prefix: bytes, times: Times) -> Selection:
    """The lock of the transaction whose start begins the prefix, if its record has that prefix."""
    time = times.time(int.from_bytes(prefix[:START_TIMESTAMP_BYTES], "big"))
    bounds = column_bounds(column)
    return Selection(LOCKS, *bounds, time, time + TIME_UNIT, prefix, after_prefix(prefix))


def _obstacles(mutation: Mutation, times: Times) -> Iterator[Selection]:
    """The cells because of which a condition fails."""
    bounds = column_bounds(mutation.column)
    all_from = _all_commits_from(mutation)
    for condition in mutation.conditions:
        if condition.expectation == _BEGINS_IF_PRESENT:
            yield from _other_locks(mutation.column, condition, times)
        elif condition.expectation != _ABSENT:
            raise _impossible(f"expectation {condition.expectation} is not known")
        elif condition.space == cells_pb2.SPACE_LOCK:
            if condition.prefix:
                yield own_lock(mutation.column, condition.prefix, times)
            else:
                yield Selection(LOCKS, *bounds)
        elif condition.space == cells_pb2.SPACE_WRITE:
            prefix, since = condition.prefix, condition.from_timestamp
            if prefix and all_from is not None and all_from <= since:
                continue
            for one in commits_selected(*bounds, since, condition.until_timestamp, times):
                yield one._replace(first_value=prefix, end_value=after_prefix(prefix))
        elif condition.space == cells_pb2.SPACE_ROLLBACK and condition.until_timestamp:
            from_time = times.at_or_above(condition.from_timestamp)
            until_time = times.at_or_above(condition.until_timestamp)
            yield Selection(ROLLBACKS, *bounds, from_time, until_time)
        else:
            raise _impossible(f"a condition on space {condition.space} is not known")
    for side in other_sides(mutation):
        if side.space == cells_pb2.SPACE_LOCK:
            yield Selection(LOCKS, side.first_column, side.end_column)
        else:
            yield from commits_selected(
                side.first_column, side.end_column, side.from_timestamp, 0, times
            )
    oldest = oldest_admitted(mutation)
    if oldest:
        yield transactions_collected_above(oldest, times)


def oldest_admitted(mutation: Mutation) -> int:
    """The step is refused if history of the row was collected above this timestamp: a prewrite
    may then miss a commit or its marker, and a rollback its own commit. 0 if no history matters.
    """
    if mutation.not_below:
        return mutation.not_below
    for change in mutation.changes:
        if change.space == cells_pb2.SPACE_ROLLBACK and change.kind == WireChange.KIND_PUT:
            return change.timestamp
    return 0


def _all_commits_from(mutation: Mutation) -> int | None:
    """From when on no commit at all may be there; None if some may."""
    for condition in mutation.conditions:
        names_all = not condition.prefix and not condition.until_timestamp
        if (
            condition.expectation == _ABSENT
            and condition.space == cells_pb2.SPACE_WRITE
            and names_all
        ):
            return condition.from_timestamp
    return None


def _other_locks(column: bytes, condition: Condition, times: Times) -> Iterator[Selection]:
    """The transaction's locks that are not as `required`: the values before it and those behind."""
    own = own_lock(column, condition.prefix, times)
    yield own._replace(end_value=condition.required)
    behind = after_prefix(condition.required)
    if not own.end_value or (behind and behind < own.end_value):
        yield own._replace(first_value=behind)


def _changed(column: bytes, start: int, change: WireChange, times: Times) -> tuple[Change, ...]:
    stored, space = stored_column(column), change.space
    puts = change.kind == WireChange.KIND_PUT
    if space == cells_pb2.SPACE_LOCK:
        time = times.time(start)
        if puts:
            return (SetCell(LOCKS, stored, time, change.value),)
        return (DeleteCell(LOCKS, stored, time),)
    time = times.time(change.timestamp)
    if space == cells_pb2.SPACE_WRITE and puts:
        is_lock_only = change.value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY
        return (SetCell(LOCK_ONLY if is_lock_only else WRITES, stored, time, change.value),)
    if space == cells_pb2.SPACE_ROLLBACK and puts:
        # What says that no marker is there goes with it.
        return SetCell(ROLLBACKS, stored, time, b""), no_proof(column, change.timestamp, times)
    if space == cells_pb2.SPACE_DATA:
        if puts:
            return (SetCell(DATA, stored, time, change.value),)
        return (DeleteCell(DATA, stored, time),)
    raise _impossible(f"a change of space {space} is not known")


def _impossible(why: str) -> InvalidArgument:
    return InvalidArgument("mutation", f"a row store cannot do this: {why}")


# The three steps that nearly every transaction takes, mapped without their messages.
#
# Translating a prewrite's message condition by condition (mapping.py) costs the client a good part
# of what sending it costs. These steps arrive as a few values (`ListedStep`), and what they ask
# about is known beforehand. A test maps each of them in both ways: the results are equal.

_REMEMBERED = 16
"""The cells of one transaction are mapped one after the other, and often are of one column."""


def mapped_step(asked: Mutation | ListedStep, times: Times) -> Step:
    """As `mapped`, for a step in either form."""
    if isinstance(asked, ListedStep):
        if asked.kind == StepList.KIND_PREWRITE:
            return _prewrite(asked, times)
        if asked.kind == StepList.KIND_COMMIT_PRIMARY:
            seen = timestamp_bytes(asked.start) + timestamp_bytes(asked.min_commit)
            return _commit(asked, seen, times)
        if asked.kind == StepList.KIND_COMMIT_SECONDARY:
            return _commit(asked, timestamp_bytes(asked.start), times)
        asked = asked.mutation()
    return mapped(asked, times)


def _prewrite(asked: ListedStep, times: Times) -> Step:
    start = asked.start
    lock = SetCell(LOCKS, stored_column(asked.column), times.time(start), asked.value)
    return Step(asked, start, False, prewrite_obstacles(asked.column, start, times), (lock,))


@lru_cache(_REMEMBERED)
def prewrite_obstacles(column: bytes, start: int, times: Times) -> tuple[Selection, ...]:
    """Selections that must find nothing before a prewrite: its marker, any lock, a commit at or
    above its start, the same on the other side of a read lock, and a note of collection above its
    start."""
    own, others = column_bounds(column), other_columns(column)
    since, after = times.at_or_above(start), times.at_or_above(start + 1)
    return (
        Selection(ROLLBACKS, *own, since, after),
        Selection(LOCKS, *own),
        Selection(WRITES, *own, since),
        Selection(LOCK_ONLY, *own, since),
        Selection(LOCKS, *others),
        Selection(WRITES, *others, since),
        Selection(LOCK_ONLY, *others, since),
        transactions_collected_above(start, times),
    )


def _commit(asked: ListedStep, seen: bytes, times: Times) -> Step:
    """`seen` is how the lock has to begin."""
    stored, record = stored_column(asked.column), asked.value
    family = LOCK_ONLY if record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY else WRITES
    changes = (
        DeleteCell(LOCKS, stored, times.time(asked.start)),
        SetCell(family, stored, times.time(asked.commit), record),
    )
    return Step(asked, asked.start, True, (own_lock(asked.column, seen, times),), changes)


# Steps that one call makes together: those of one transaction on one row.
#
# Each of them is answered for itself. If the check of the call does not pass, each is judged on a
# reading of the row, those that are possible go into another call, and the others are refused. So
# joining changes how many calls are made, and nothing else:
#
# * Steps that expect nothing: nothing of what any of them must not find may be found.
# * Steps that expect a lock: there must be as many cells as locks are expected. A store has at most
#   one version of a cell at one time, so each of them is one cell.
# * The same cell never twice: the second step must see what the first has done.
# * Only steps of one transaction: those of two may exclude each other.


@dataclass
class Joined:
    """The steps of one call, by their places in the request."""

    table_id: int
    row: bytes
    start: int
    """The start timestamp of the transaction."""
    steps: dict[int, Step] = field(default_factory=dict)
    columns: set[bytes] = field(default_factory=set)
    _size_bytes: int = 0
    """Size of the checks; added up only if a second step joins: most calls make one."""

    def add(self, place: int, step: Step) -> None:
        self.steps[place] = step
        self.columns.add(step.asked.column)

    def fits(self, step: Step, check_bytes_max: int) -> bool:
        """True if the step may join. Then it has to be added."""
        if step.asked.column in self.columns:
            return False
        if not self._size_bytes:
            self._size_bytes = sum(one.size_bytes for one in self.steps.values())
        self._size_bytes += step.size_bytes
        return self._size_bytes <= check_bytes_max


def joined(steps: Iterable[tuple[int, int, Step]], check_bytes_max: int) -> Iterator[Joined]:
    """Groups steps, given as place, table and step, into calls. If a transaction's calls on a row
    are made one after the other, the order of its steps on a cell stays."""
    open_: dict[tuple[int, bytes, int, bool], Joined] = {}
    for place, table_id, step in steps:
        row = step.asked.row
        key = (table_id, row, step.start, step.expects_lock)
        group = open_.get(key)
        if group is not None and not group.fits(step, check_bytes_max):
            yield open_.pop(key)
            group = None
        if group is None:
            group = open_[key] = Joined(table_id, row, step.start)
        group.add(place, step)
    yield from open_.values()
