"""The three steps that nearly every transaction takes, mapped without their messages.

Translating a prewrite's message condition by condition (mapping.py) costs the client a good part of
what sending it costs. These steps arrive as a few values (`CommonStep`), and what they ask about is
known beforehand. A test maps each of them in both ways: the results are equal.
"""

from __future__ import annotations

from functools import lru_cache

from percolator.formats.records import KIND_LOCK_ONLY, WRITE_KIND_OFFSET, timestamp_bytes
from percolator.routing.cells import CommonStep
from percolator.rowstore.collected import transactions_collected_above
from percolator.rowstore.exclusion import other_columns
from percolator.rowstore.layout import (
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    column_bounds,
    stored_column,
)
from percolator.rowstore.mapping import Step, mapped, own_lock
from percolator.rowstore.port import DeleteCell, Selection, SetCell
from percolator.rowstore.times import Times
from percolator.v1.tabletserver_pb2 import Mutation, StepList

_REMEMBERED = 16
"""The cells of one transaction are mapped one after the other, and often are of one column."""


def mapped_step(asked: Mutation | CommonStep, times: Times) -> Step:
    """As `mapped`, for a step in either form."""
    if isinstance(asked, CommonStep):
        if asked.kind == StepList.KIND_PREWRITE:
            return _prewrite(asked, times)
        if asked.kind == StepList.KIND_COMMIT_PRIMARY:
            seen = timestamp_bytes(asked.start) + timestamp_bytes(asked.min_commit)
            return _commit(asked, seen, times)
        if asked.kind == StepList.KIND_COMMIT_SECONDARY:
            return _commit(asked, timestamp_bytes(asked.start), times)
        asked = asked.mutation()
    return mapped(asked, times)


def _prewrite(asked: CommonStep, times: Times) -> Step:
    start = asked.start
    lock = SetCell(LOCKS, stored_column(asked.column), times.time(start), asked.value)
    return Step(asked, start, False, prewrite_obstacles(asked.column, start, times), (lock,))


@lru_cache(_REMEMBERED)
def prewrite_obstacles(column: bytes, start: int, times: Times) -> tuple[Selection, ...]:
    """What a prewrite must not find: its marker, any lock, a commit at or above its start, the same
    on the other side of a read lock, and a note of collection above its start."""
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


def _commit(asked: CommonStep, seen: bytes, times: Times) -> Step:
    """`seen` is how the lock has to begin."""
    stored, record = stored_column(asked.column), asked.value
    family = LOCK_ONLY if record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY else WRITES
    changes = (
        DeleteCell(LOCKS, stored, times.time(asked.start)),
        SetCell(family, stored, times.time(asked.commit), record),
    )
    return Step(asked, asked.start, True, (own_lock(asked.column, seen, times),), changes)
