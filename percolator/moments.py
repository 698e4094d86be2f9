"""Moments and days as the whole numbers that are stored for them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from percolator.column_codec import wrong
from percolator.errors import SchemaError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_DAY = _EPOCH.toordinal()
_FIRST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND


def microseconds_of(moment: datetime) -> int:
    """The microseconds since 1970. Refuses anything else."""
    if not isinstance(moment, datetime):
        raise wrong("datetime", moment)
    if moment.utcoffset() is None:
        raise SchemaError("the datetime has no time zone, so it is not one moment")
    found = (moment - _EPOCH) // _MICROSECOND
    # In its own zone, such a moment is in these years; it comes back in UTC, where it would not be.
    if not _FIRST <= found <= _LAST:
        raise SchemaError("the datetime is beyond the years 1 to 9999 in UTC")
    return found


def moment_at(microseconds: int) -> datetime:
    """The moment, in UTC, `microseconds` after 1970 began."""
    try:
        return _EPOCH + microseconds * _MICROSECOND
    except OverflowError:
        raise SchemaError(f"{microseconds} microseconds are beyond the year 9999") from None


def days_of(day: date) -> int:
    """The days since the first of 1970. Refuses anything else."""
    if isinstance(day, datetime) or not isinstance(day, date):
        raise wrong("date", day)
    return day.toordinal() - _FIRST_DAY


def day_at(days: int) -> date:
    """The day `days` after the first of 1970."""
    try:
        return date.fromordinal(days + _FIRST_DAY)
    except (OverflowError, ValueError):
        raise SchemaError(f"{days} days are beyond the year 9999") from None
