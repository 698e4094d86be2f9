"""Timestamps as values."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import InvalidArgument
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX, Timestamp

timestamps = st.integers(0, 2**64 - 1).map(Timestamp)


@given(timestamps)
def test_a_timestamp_consists_of_its_two_parts(timestamp: Timestamp) -> None:
    assert Timestamp.of(timestamp.physical_milliseconds, timestamp.sequence) == timestamp


@given(timestamps)
def test_a_timestamp_is_unchanged_by_pickling_json_and_printing(timestamp: Timestamp) -> None:
    """It travels to executors, in JSON, and through the command line."""
    pickled = pickle.loads(pickle.dumps(timestamp))
    assert pickled == timestamp
    assert type(pickled) is Timestamp
    assert json.loads(json.dumps(timestamp)) == timestamp
    assert Timestamp.parse(str(timestamp)) == timestamp
    assert f"{timestamp}" == str(int(timestamp))


@given(st.lists(timestamps))
def test_timestamps_are_ordered_by_their_parts(found: list[Timestamp]) -> None:
    by_parts = sorted(found, key=lambda one: (one.physical_milliseconds, one.sequence))
    assert sorted(found) == by_parts


@given(timestamps)
def test_the_time_of_a_timestamp_is_the_start_of_its_millisecond(timestamp: Timestamp) -> None:
    begin = Timestamp.from_datetime(timestamp.to_datetime())
    assert begin.sequence == 0
    assert begin.physical_milliseconds == timestamp.physical_milliseconds


@given(st.timedeltas(timedelta(1), timedelta(700_000)), st.integers(-720, 720))
def test_a_moment_is_the_same_in_every_time_zone(since_1970: timedelta, minutes: int) -> None:
    zone = timezone(timedelta(minutes=minutes))
    utc = datetime(1970, 1, 1, tzinfo=UTC) + since_1970
    found = Timestamp.from_datetime(utc)
    assert Timestamp.from_datetime(utc.astimezone(zone)) == found
    assert Timestamp.parse(utc.astimezone(zone).isoformat()) == found
    assert timedelta(0) <= utc - found.to_datetime() < timedelta(milliseconds=1)


def test_a_timestamp_is_shown_to_people_as_time_and_sequence() -> None:
    moment = datetime(2027, 1, 15, 8, 0, 0, 123_999, tzinfo=UTC)
    timestamp = Timestamp(Timestamp.from_datetime(moment) + 42)
    assert timestamp.describe() == "2027-01-15T08:00:00.123Z+42"


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-1", "1.5", "18446744073709551616", "9" * 100_000, "2027-01-15T08:00:00", "٣"],
)
def test_text_that_is_not_a_timestamp_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Timestamp.parse(text)
    assert refused.value.field == "timestamp"
    assert len(str(refused.value)) < 200


def test_numbers_and_times_out_of_range_are_refused() -> None:
    without_zone = datetime(2027, 1, 15, tzinfo=UTC).replace(tzinfo=None)
    makers: list[Callable[[], Timestamp]] = [
        lambda: Timestamp(-1),
        lambda: Timestamp(2**64),
        lambda: Timestamp.of(PHYSICAL_MILLISECONDS_MAX + 1),
        lambda: Timestamp.of(-1),
        lambda: Timestamp.of(0, 2**18),
        lambda: Timestamp.of(0, -1),
        lambda: Timestamp.from_datetime(datetime(1969, 12, 31, tzinfo=UTC)),
        lambda: Timestamp.from_datetime(datetime(9999, 1, 1, tzinfo=UTC)),
        lambda: Timestamp.from_datetime(without_zone),
    ]
    for make in makers:
        with pytest.raises(InvalidArgument):
            make()


def test_a_moment_to_read_at_is_just_before_its_millisecond() -> None:
    moment = datetime(2027, 1, 15, 8, 0, 0, 123_999, tzinfo=UTC)
    first = Timestamp.from_datetime(moment)
    assert Timestamp.before(moment) == Timestamp.parse_to_read(moment.isoformat()) == first - 1
    assert Timestamp.parse_to_read(str(int(first))) == first
    with pytest.raises(InvalidArgument, match="before every commit"):
        Timestamp.before(datetime(1970, 1, 1, tzinfo=UTC))
