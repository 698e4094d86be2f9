"""Row keys keep the order that their codec claims, and other codecs are refused for keys."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Database, SchemaError, Table, codecs
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]

MOMENTS = st.datetimes(timezones=st.just(UTC))


@pytest.mark.parametrize(
    ("codec", "keys"),
    [
        (codecs.uuid, st.uuids()),
        (codecs.ordered_timestamp, MOMENTS),
        (codecs.ordered_date, st.dates()),
    ],
    ids=repr,
)
@given(data=st.data())
def test_keys_come_back_and_keep_their_order_alone_and_in_tuples(
    codec: Any, keys: st.SearchStrategy[Any], data: Any
) -> None:
    one, other = data.draw(keys), data.draw(keys)
    assert codec.decode(codec.encode(one)) == one
    assert (codec.encode(one) < codec.encode(other)) == (one < other)
    pair = codecs.tuple_of(codec, codecs.text)
    first, second = (one, data.draw(st.sampled_from("ab"))), (other, "a")
    assert pair.decode(pair.encode(first)) == first
    assert (pair.encode(first) < pair.encode(second)) == (first < second)


@pytest.mark.parametrize(
    ("codec", "wrong", "says"),
    [
        (codecs.uuid, "00000000-0000-0000-0000-000000000001", "expected UUID, got str"),
        (codecs.ordered_timestamp, datetime(2026, 1, 1), "no time zone"),  # noqa: DTZ001 - the mistake
        (codecs.ordered_timestamp, date(2026, 1, 1), "expected datetime, got date"),
        (
            codecs.ordered_timestamp,
            datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))),
            "beyond the years 1 to 9999 in UTC",
        ),
        (codecs.ordered_date, datetime(2026, 1, 1, tzinfo=UTC), "expected date, got datetime"),
    ],
)
def test_a_key_of_another_type_is_refused(codec: Any, wrong: object, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        codec.encode(wrong)


@pytest.mark.parametrize(
    ("codec", "stored", "says"),
    [
        (codecs.uuid, bytes(15), "15 stored bytes are not a UUID"),
        (codecs.ordered_date, bytes(7), "7 stored bytes are not a key of codecs.ordered_date"),
        (codecs.ordered_date, b"\xff" * 8, "days are beyond the year 9999"),
        (codecs.ordered_timestamp, b"\xff" * 8, "microseconds are beyond the year 9999"),
    ],
)
def test_rows_of_another_codec_are_refused(codec: Any, stored: bytes, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        codec.decode(stored)


def test_keys_are_encoded_as_the_format_says() -> None:
    assert codecs.uuid.encode(UUID(int=1)) == bytes(15) + b"\x01"
    assert codecs.ordered_date.encode(date(1969, 12, 31)) == b"\x7f" + b"\xff" * 7
    moment = datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert codecs.ordered_timestamp.encode(moment) == bytes.fromhex("7ffffffffff0bdc0")


@pytest.mark.parametrize(
    "codec",
    [
        codecs.integer,
        codecs.float,
        codecs.boolean,
        codecs.timestamp,
        codecs.date,
        codecs.decimal(5, 2),
        codecs.json,
        str,
        None,
    ],
    ids=repr,
)
def test_a_codec_that_keeps_no_order_is_refused_for_keys(codec: Any) -> None:
    with pytest.raises(SchemaError, match=r"table 'k': .* is not a codec for row keys"):
        Table("k", key=codec)
    with pytest.raises(SchemaError, match=r"part 2 of a tuple: .* is not a codec for row keys"):
        codecs.tuple_of(codecs.text, codec)


def test_a_table_is_scanned_in_the_order_of_time(percolator_db: Database) -> None:
    days = Table("days", key=codecs.ordered_date)
    visits = days.column("visits", codecs.uuid)
    percolator_db.create_table(days)
    written = [date(2026, 1, 2), date(1950, 1, 1), date(1970, 1, 1)]
    percolator_db.set_many((day, {visits: UUID(int=day.year)}) for day in written)
    with percolator_db.snapshot() as snapshot:
        found = [(row.key, row[visits]) for row in snapshot.scan(days)]
        assert found == [(day, UUID(int=day.year)) for day in sorted(written)]
        with pytest.raises(SchemaError, match=r"codecs\.ordered_date have no prefixes"):
            list(snapshot.scan(days, prefix=written[0]))
