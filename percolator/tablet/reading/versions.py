"""The versions of one cell in a space with timestamps, newest first.

Fences around the spaces (keys.py) keep a cursor valid after every seek to a key of a space, and
after one step back from it, so none of these functions checks that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from percolator.tablet.keys import TIMESTAMP_MAX, inverted, timestamp_of
from percolator.world import Cursor

Version = tuple[int, bytes]
"""Timestamp and value."""

VERSIONS_MAX = 1_024
"""How many versions are looked at for one condition. No step of the protocol needs more than one,
and a condition on all versions of a hot cell must not hold up everything else."""


class TooManyVersions(Exception):
    """A condition cannot be judged in reasonable time."""


def limited(found: Iterable[Version]) -> Iterator[Version]:
    """Yields versions; raises `TooManyVersions` after `VERSIONS_MAX` of them."""
    for number, version in enumerate(found):
        if number == VERSIONS_MAX:
            raise TooManyVersions
        yield version


def descending(cursor: Cursor, prefix: bytes, from_: int, until: int) -> Iterator[Version]:
    """Versions with from <= timestamp < until (0: no bound), newest first."""
    cursor.seek(prefix + inverted(until - 1) if until else prefix)
    while True:
        key, value = cursor.item()
        if not key.startswith(prefix):
            return
        timestamp = timestamp_of(key)
        if timestamp < from_:
            return
        yield timestamp, value
        cursor.next()


def ascending(cursor: Cursor, prefix: bytes, from_: int, until: int) -> Iterator[Version]:
    """Versions with from <= timestamp < until (0: no bound), oldest first.

    The first version costs one seek and one step, however many there are above it: a transaction
    that began long ago finds its own commit below a thousand later ones.
    """
    below = prefix + inverted(from_ - 1) if from_ else prefix[:-1] + b"\x02"
    cursor.seek(below)
    end = until or TIMESTAMP_MAX + 1
    while True:
        cursor.prev()
        key, value = cursor.item()
        if not key.startswith(prefix):
            return
        timestamp = timestamp_of(key)
        if timestamp >= end:
            return
        yield timestamp, value
