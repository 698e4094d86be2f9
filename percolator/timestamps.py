"""Timestamps: a single order of everything that happens in a cluster.

A timestamp is an unsigned 64-bit number: milliseconds since 1970-01-01 UTC in the upper 46 bits
(the *physical part*), and a sequence number in the lower 18. Only the oracle creates timestamps.
Everything else compares and stores them, and may derive from them roughly when they were handed
out: "roughly", because the physical part never goes back, while wall clocks do.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from percolator.errors import InvalidArgument

SEQUENCE_BITS = 18
SEQUENCES_PER_MILLISECOND = 1 << SEQUENCE_BITS
PHYSICAL_MILLISECONDS_MAX = (1 << (64 - SEQUENCE_BITS)) - 1
"""The largest physical part, in the year 4199."""

TIMESTAMPS_PER_REQUEST_MAX = 1_000_000
"""The most timestamps in one request, unless the oracle is configured for fewer."""

NEWEST = (1 << 64) - 1
"""Instead of a timestamp, in a read of rows: whatever is newest when the tablet looks. No timestamp
is as large, so every commit is below it, and every lock is in the way."""

_DIGITS_MAX = 20
"""The number of decimal digits of 2**64."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class Timestamp(int):
    """A timestamp: a number that knows its parts.

    It is an `int`, so it compares, hashes, pickles and travels in messages and JSON as one.
    """

    __slots__ = ()

    def __new__(cls, value: int) -> Timestamp:
        if not 0 <= value < 1 << 64:
            raise InvalidArgument("timestamp", f"{value} is not an unsigned 64-bit number")
        return int.__new__(cls, value)

    @classmethod
    def of(cls, physical_milliseconds: int, sequence: int = 0) -> Timestamp:
        """The timestamp with these two parts."""
        if not 0 <= physical_milliseconds <= PHYSICAL_MILLISECONDS_MAX:
            raise InvalidArgument(
                "timestamp",
                f"{physical_milliseconds} ms is outside of the years 1970 to 4199",
            )
        if not 0 <= sequence < SEQUENCES_PER_MILLISECOND:
            raise InvalidArgument("timestamp", f"sequence {sequence} has more than 18 bits")
        return cls(physical_milliseconds << SEQUENCE_BITS | sequence)

    @classmethod
    def from_datetime(cls, moment: datetime) -> Timestamp:
        """The first timestamp of the moment's millisecond: whatever happened before it is below.

        A moment without a time zone is refused: it would mean a different instant on each machine.
        """
        if moment.tzinfo is None:
            raise InvalidArgument("timestamp", f"{moment.isoformat()} has no time zone")
        return cls.of((moment - _EPOCH) // _MILLISECOND)

    @classmethod
    def before(cls, moment: datetime) -> Timestamp:
        """The last timestamp before the moment's millisecond: what is read there shows all commits
        before that millisecond, and none of it."""
        first = cls.from_datetime(moment)
        if not first:
            raise InvalidArgument("timestamp", f"{moment.isoformat()} is before every commit")
        return cls(first - 1)

    @classmethod
    def parse(cls, text: str) -> Timestamp:
        """Parses what people type: a number, or an ISO 8601 date and time with a time zone, which
        stands for the first timestamp of its millisecond."""
        found = _parsed(text)
        return cls.from_datetime(found) if isinstance(found, datetime) else cls(found)

    @classmethod
    def parse_to_read(cls, text: str) -> Timestamp:
        """As `parse`, for a moment to read at: a date and time stands for the last timestamp before
        its millisecond."""
        found = _parsed(text)
        return cls.before(found) if isinstance(found, datetime) else cls(found)

    @property
    def physical_milliseconds(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self >> SEQUENCE_BITS

    @property
    def sequence(self) -> int:
        """The sequence number within its millisecond."""
        return self & (SEQUENCES_PER_MILLISECOND - 1)

    def to_datetime(self) -> datetime:
        """The physical part as a time in UTC."""
        return _EPOCH + self.physical_milliseconds * _MILLISECOND

    def time_text(self) -> str:
        """The physical part as the command line and JSON show it: "2027-01-15T08:00:00.123Z"."""
        return utc_text(self.to_datetime())

    def describe(self) -> str:
        """The timestamp for people: "2027-01-15T08:00:00.123Z+42"."""
        return f"{self.time_text()}+{self.sequence}"


def utc_text(time: datetime) -> str:
    """A time in UTC to the millisecond, in the one form in which Percolator prints times."""
    return f"{time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _parsed(text: str) -> int | datetime:
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            "timestamp", f"{text[:64]!r} is neither a number nor an ISO 8601 date and time"
        ) from None


def seconds_between(earlier: int, later: int) -> float:
    """The seconds between two timestamps, by the oracle's time."""
    return ((later >> SEQUENCE_BITS) - (earlier >> SEQUENCE_BITS)) / 1000


def is_expired(commit_ts: int, snapshot: int, ttl_milliseconds: int) -> bool:
    """True if a value that was committed at `commit` is invisible at `snapshot`.

    Only these numbers decide, and once it is, it is so at all later snapshots.
    """
    return (snapshot >> SEQUENCE_BITS) - (commit_ts >> SEQUENCE_BITS) >= ttl_milliseconds


def oldest_unexpired(snapshot: int, ttl_milliseconds: int) -> int:
    """The oldest commit whose value `is_expired` does not hide at `snapshot`."""
    return max((snapshot >> SEQUENCE_BITS) - ttl_milliseconds + 1, 0) << SEQUENCE_BITS


def expires_at(commit_ts: int, ttl_milliseconds: int) -> int:
    """The first timestamp at which such a value is invisible."""
    return ((commit_ts >> SEQUENCE_BITS) + ttl_milliseconds) << SEQUENCE_BITS


def in_json(timestamp: int) -> str:
    """A timestamp for programs in any language: as text, since many of them, such as jq, round
    numbers above 2^53. One that was rounded up would skip changes, without an error."""
    return str(int(timestamp))
