"""Groups of steps on one row as one check with all of their changes.

    nothing is expected   all is asked for that any of the steps must not find, as for joined steps
    locks are expected    the locks are counted. A step of the group that expects nothing must have
                          left a proof (proofs.py) in an earlier group; that is counted, too

A step without changes leaves a proof wherever it is part of a group of the first kind. So a shared
transaction (percolator/protocol/shared/closing.py) has a proof that it is open from the beginning
of its first part until it ends, and can be committed with one check.

A check may describe only so much. The locks are one selection of as many ranges of values as there
are locks, and no columns: the value of a lock begins with its start, and of all cells of the row,
the transaction that began then has locked only this one. (A part has one cell there, its primary.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from percolator.errors import InvalidArgument, UsageError
from percolator.rowstore.layout import LOCKS
from percolator.rowstore.mapping import Step
from percolator.rowstore.port import Change, Check, Selection
from percolator.rowstore.proofs import no_proof, proof, proof_selected
from percolator.rowstore.times import Times


class Group(NamedTuple):
    """Steps as one call."""

    check: Check
    changes: Sequence[Change]


def grouped(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
    """The steps of one row as one call. Raises `UsageError` if these are too many locks, and
    `InvalidArgument` if it is not possible."""
    changes = [change for step in steps for change in step.changes]
    locked = [step for step in steps if step.expects_lock]
    cells = [(step.mutation.column, step.start) for step in steps if not step.expects_lock]
    if not locked:
        obstacles = tuple(one for step in steps for one in step.selections)
        looked = [(step.mutation.column, step.start) for step in steps if not step.changes]
        proofs = [proof(*cell, times) for cell in looked]
        return Group(Check(obstacles, found=False), [*changes, *proofs])
    if len({step.start for step in locked}) < len(locked):
        raise InvalidArgument("mutations", "two steps of a group expect locks of one transaction")
    if len(locked) > ranges_max:
        raise UsageError(
            f"in a row store, at most {ranges_max} parts of a shared transaction can be committed "
            f"together, and this one has {len(locked)}: run it as fewer tasks"
        )
    ranges = [(one.first_value, one.end_value) for step in locked for one in step.selections]
    selections = [Selection(LOCKS, any_of=tuple(ranges))]
    selections += [proof_selected(*cell, times) for cell in cells]
    check = Check(tuple(selections), found=True, more_than=len(steps) - 1)
    return Group(check, [*changes, *(no_proof(*cell, times) for cell in cells)])
