"""What the lock on the primary of a part of a shared transaction says about its attempt."""

from __future__ import annotations

import re

from percolator.formats.records import LockRecord

OPEN = b"open"
"""The value of the lock while the attempt writes."""
FINISHED = b"finished"
"""The attempt has locked all of its cells, and waits for the driver's decision."""

_PART = re.compile(rb"\d+\.\d+\.\d+\..+", re.DOTALL)
"""The column of a part's primary (shared/names.py)."""


def is_being_written(primary: LockRecord) -> bool:
    """Whether this is the lock on the primary of a part whose attempt has not finished."""
    return primary.value == OPEN and _is_part(primary)


def has_finished(primary: LockRecord) -> bool:
    """Whether this is the lock on the primary of a part that its driver may be committing."""
    return primary.value == FINISHED and _is_part(primary)


def _is_part(primary: LockRecord) -> bool:
    return not primary.session and _PART.fullmatch(primary.primary.column) is not None
