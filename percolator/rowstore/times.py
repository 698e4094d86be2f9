"""Timestamps of the oracle as times of a row store, and the other way round.

A store's times are signed 64-bit microseconds in multiples of a thousand: 2^53 of them. Timestamps
are `milliseconds << 18 | sequence`, which do not fit. So here only every 64th timestamp is used,
and counted from an epoch that belongs to the store: 4,096 in a millisecond, for seventy years.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from percolator.errors import InvalidArgument, InvariantViolation
from percolator.rowstore.port import TIME_UNIT
from percolator.timestamps import SEQUENCE_BITS

_SPACING_BITS = 6
SPACING = 1 << _SPACING_BITS
"""Timestamps that are stored are multiples of this."""
_TIMES_MAX = (2**63 - 1) // TIME_UNIT


class Times:
    """The correspondence of one store."""

    def __init__(self, epoch_milliseconds: int) -> None:
        """Nothing older than the epoch is stored. It must never change."""
        self._before_first = (epoch_milliseconds << (SEQUENCE_BITS - _SPACING_BITS)) - 1

    def time(self, timestamp: int) -> int:
        """The time of a timestamp that is stored, or looked for."""
        units, between = divmod(timestamp, SPACING)
        units -= self._before_first
        if between or not 0 < units <= _TIMES_MAX:
            raise InvalidArgument(
                "timestamp",
                f"{timestamp} cannot be stored: in a row store, timestamps are multiples of "
                f"{SPACING} from {(self._before_first + 1) * SPACING} on",
            )
        return units * TIME_UNIT

    def at_or_above(self, timestamp: int) -> int:
        """The least time of all timestamps at or above this one, stored or not."""
        units = -(-timestamp // SPACING) - self._before_first
        return min(max(units, 1), _TIMES_MAX) * TIME_UNIT

    def timestamp(self, time: int) -> int:
        units, between = divmod(time, TIME_UNIT)
        if between or not 0 < units <= _TIMES_MAX:
            raise InvariantViolation(f"the row store has a cell at {time}, which nobody wrote")
        return (units + self._before_first) * SPACING


class Numbers(Protocol):
    """A source of numbers: each call gets the first of `count`, above all earlier ones."""

    @property
    def catalogue_epoch(self) -> int: ...

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]: ...


class SpacedTimestamps:
    """Only such timestamps of the oracle as can be stored.

    Of any 64 consecutive numbers, one is a multiple of 64, and nobody else is given these 64: so
    the timestamps are unique, and in the order of the requests, as those of the oracle are.
    """

    def __init__(self, oracle: Numbers) -> None:
        self._oracle = oracle

    @property
    def catalogue_epoch(self) -> int:
        """The highest that came with a timestamp."""
        return self._oracle.catalogue_epoch

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]:
        """A future timestamp, as that of `percolator.wire.timestamp_source.TimestampSource`."""
        if count != 1:
            raise InvalidArgument("count", f"{count}: here, each timestamp is asked for by itself")
        numbers = self._oracle.get(SPACING, timeout_seconds)
        timestamp: asyncio.Future[int] = numbers.get_loop().create_future()
        numbers.add_done_callback(partial(_pass_on, timestamp))
        timestamp.add_done_callback(partial(_cancel_too, numbers))
        return timestamp


def _pass_on(timestamp: asyncio.Future[int], numbers: asyncio.Future[int]) -> None:
    if numbers.cancelled():
        timestamp.cancel()
        return
    error = numbers.exception()
    if timestamp.done():
        return
    if error is not None:
        timestamp.set_exception(error)
    else:
        timestamp.set_result(-(-numbers.result() // SPACING) * SPACING)


def _cancel_too(numbers: asyncio.Future[int], timestamp: asyncio.Future[int]) -> None:
    if timestamp.cancelled():
        numbers.cancel()
