"""Timestamps: the one order of everything that happens in a cluster.

A timestamp is an unsigned 64-bit number: milliseconds since 1970-01-01 UTC in the upper 46 bits
(the *physical part*), a sequence number in the lower 18. Only the oracle makes them. Everybody else
compares them, keeps them, and may read from them roughly when they were handed out; "roughly",
because the physical part never goes back, while wall clocks do.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from percolator.errors import InvalidArgument

SEQUENCE_BITS = 18
SEQUENCES_PER_MILLISECOND = 1 << SEQUENCE_BITS
PHYSICAL_MILLISECONDS_MAX = (1 << (64 - SEQUENCE_BITS)) - 1
"""In the year 4199."""

TIMESTAMPS_PER_REQUEST_MAX = 1_000_000
"""As many as one request may ask for, unless the oracle is set to less."""

_DIGITS_MAX = 20
"""2**64 has as many."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class Timestamp(int):
    """A timestamp as a value: a number that knows its parts.

    It is an `int`: it compares, hashes, pickles and travels in messages and JSON as one.
    """

    __slots__ = ()

    def __new__(cls, value: int) -> Timestamp:
        if not 0 <= value < 1 << 64:
            raise InvalidArgument("timestamp", f"{value} is not an unsigned 64-bit number")
        return super().__new__(cls, value)

    @classmethod
    def of(cls, physical_milliseconds: int, sequence: int = 0) -> Timestamp:
        """The timestamp with these two parts."""
        if not 0 <= physical_milliseconds <= PHYSICAL_MILLISECONDS_MAX:
            raise InvalidArgument(
                "timestamp",
                f"{physical_milliseconds} ms lie outside 1970-01-01 .. 4199",
            )
        if not 0 <= sequence < SEQUENCES_PER_MILLISECOND:
            raise InvalidArgument("timestamp", f"sequence {sequence} has more than 18 bits")
        return cls(physical_milliseconds << SEQUENCE_BITS | sequence)

    @classmethod
    def from_datetime(cls, moment: datetime) -> Timestamp:
        """The first timestamp of the moment's millisecond: what came before it, lies below.

        A moment without a time zone is refused: it would mean another instant on each machine.
        """
        if moment.tzinfo is None:
            raise InvalidArgument("timestamp", f"{moment.isoformat()} has no time zone")
        return cls.of((moment - _EPOCH) // _MILLISECOND)

    @classmethod
    def parse(cls, text: str) -> Timestamp:
        """From what people type: the number, or an ISO 8601 date and time with its time zone."""
        text = text.strip()
        if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
            return cls(int(text))
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgument(
                "timestamp", f"{text[:64]!r} is neither a number nor an ISO 8601 date and time"
            ) from None
        return cls.from_datetime(moment)

    @property
    def physical_milliseconds(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self >> SEQUENCE_BITS

    @property
    def sequence(self) -> int:
        """The number within its millisecond."""
        return self & (SEQUENCES_PER_MILLISECOND - 1)

    def to_datetime(self) -> datetime:
        """The physical part as a time in UTC."""
        return _EPOCH + self.physical_milliseconds * _MILLISECOND

    def describe(self) -> str:
        """For people: "2027-01-15T08:00:00.123Z+42"."""
        moment = self.to_datetime().replace(tzinfo=None)
        return f"{moment.isoformat(timespec='milliseconds')}Z+{self.sequence}"


def seconds_between(earlier: int, later: int) -> float:
    """In the oracle's time."""
    return ((later >> SEQUENCE_BITS) - (earlier >> SEQUENCE_BITS)) / 1000
