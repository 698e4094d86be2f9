"""Why a step was refused: its conditions, judged in their order on what the row holds.

A store says only that a check did not pass. Then the row is read once, and the first condition that
fails there is the answer, with the cell that failed it, as a tablet answers. The step has changed
nothing, so it is as if it had been judged at the moment of that reading. If no condition fails any
more, the step is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from percolator.errors import InvalidArgument, SnapshotTooOld
from percolator.formats.reach import too_old
from percolator.routing.cells import Refused
from percolator.rowstore.collected import newest_note, transactions_collected_above
from percolator.rowstore.exclusion import other_sides
from percolator.rowstore.layout import (
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    column_bounds,
    column_of,
    stored_column,
)
from percolator.rowstore.mapping import commits_selected, oldest_admitted
from percolator.rowstore.port import Selection, StoredCell
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_ROLLBACK, SPACE_WRITE, Cell, Space
from percolator.v1.tabletserver_pb2 import Condition, Mutation

_FAMILIES: dict[Space, tuple[str, ...]] = {
    SPACE_LOCK: (LOCKS,),
    SPACE_WRITE: (WRITES, LOCK_ONLY),
    SPACE_ROLLBACK: (ROLLBACKS,),
}


class _Version(NamedTuple):
    timestamp: int
    """As the protocol knows it: 0 for a lock."""
    column: bytes
    """As it is stored."""
    value: bytes


def looked_at(step: Mutation, times: Times) -> Iterator[Selection]:
    """All that the conditions of a step are about."""
    bounds = column_bounds(step.column)
    for condition in step.conditions:
        if condition.space == SPACE_WRITE:
            since, until = condition.from_timestamp, condition.until_timestamp
            yield from commits_selected(*bounds, since, until, times)
        elif condition.space == SPACE_ROLLBACK:
            from_time = times.at_or_above(condition.from_timestamp)
            until_time = times.at_or_above(condition.until_timestamp)
            yield Selection(ROLLBACKS, *bounds, from_time, until_time)
    yield Selection(LOCKS, *bounds)
    oldest = oldest_admitted(step)
    if oldest:
        yield transactions_collected_above(oldest, times)
    for side in other_sides(step):
        if side.space == SPACE_LOCK:
            yield Selection(LOCKS, side.first_column, side.end_column)
        else:
            yield from commits_selected(
                side.first_column, side.end_column, side.from_timestamp, 0, times
            )


def refusal(
    step: Mutation, cells: Iterable[StoredCell], times: Times
) -> Refused | SnapshotTooOld | None:
    """Why the step is not possible in a row with these cells; None if it is. The cells are those
    that `looked_at` selects, among others.

    A record of the transaction itself says what became of it, whatever else was collected. Without
    one, a note of collection counts before all else: what is not there proves nothing.
    """
    found = list(dict.fromkeys(cells))  # what several selections name is reported several times
    refused = _failed_condition(step, found, times)
    if refused is not None and _is_about_the_transaction(step.conditions[refused.condition]):
        return refused
    oldest = oldest_admitted(step)
    note = newest_note(found, times)
    return too_old(oldest, note) if oldest and note > oldest else refused


def _is_about_the_transaction(condition: Condition) -> bool:
    """Whether the condition fails on the transaction's own commit or marker."""
    names_one = bool(condition.prefix) or condition.space == SPACE_ROLLBACK
    return condition.expectation == Condition.EXPECTATION_ABSENT and names_one


def _failed_condition(step: Mutation, found: Sequence[StoredCell], times: Times) -> Refused | None:
    own = column_bounds(step.column)
    for index, condition in enumerate(step.conditions):
        versions = _versions(found, condition.space, *own, times)
        until = condition.until_timestamp
        selected = [
            one
            for one in versions
            if condition.from_timestamp <= one.timestamp and (not until or one.timestamp < until)
        ]
        holds, offender = _judged(condition, selected)
        if not holds:
            return Refused(index, _cell(step, condition.space, offender))
    for side in other_sides(step):
        bounds = side.first_column, side.end_column
        for version in _versions(found, side.space, *bounds, times):
            if version.timestamp >= side.from_timestamp:
                return Refused(side.condition, _cell(step, side.space, version))
    return None


def _versions(
    cells: Iterable[StoredCell], space: Space, first: bytes, end: bytes, times: Times
) -> list[_Version]:
    """The versions in a space and in columns from `first` to `end`, the oldest first."""
    families = _FAMILIES[space]
    return sorted(
        _Version(0 if space == SPACE_LOCK else times.timestamp(cell.time), cell.column, cell.value)
        for cell in cells
        if cell.family in families and first <= cell.column and (not end or cell.column < end)
    )


def _judged(condition: Condition, versions: list[_Version]) -> tuple[bool, _Version | None]:
    """Whether a condition holds for these versions, and the version that fails it, if one does."""
    selected = [one for one in versions if one.value.startswith(condition.prefix)]
    match condition.expectation:
        case Condition.EXPECTATION_ABSENT:
            return not selected, selected[0] if selected else None
        case Condition.EXPECTATION_PRESENT:
            return bool(selected), versions[-1] if versions else None
        case Condition.EXPECTATION_AT_MOST if selected:
            end = len(condition.prefix) + len(condition.required)
            is_above = selected[0].value[len(condition.prefix) : end] > condition.required
            return not is_above, selected[0] if is_above else None
        case Condition.EXPECTATION_AT_MOST:
            return False, versions[-1] if versions else None
        case Condition.EXPECTATION_BEGINS_IF_PRESENT:
            others = [one for one in selected if not one.value.startswith(condition.required)]
            return not others, others[-1] if others else None
        case _:
            raise InvalidArgument(
                "mutation", f"a row store cannot judge expectation {condition.expectation}"
            )


def _cell(step: Mutation, space: Space, version: _Version | None) -> Cell | None:
    if version is None:
        return None
    other = b"" if version.column == stored_column(step.column) else column_of(version.column)
    return Cell(
        space=space,
        row=step.row,
        column=step.column,
        timestamp=version.timestamp,
        value=version.value,
        qualifier=other,
    )
