"""Hashed keys: spread evenly, read back as they were, and in no order."""

from __future__ import annotations

from bisect import bisect
from collections import Counter

import pytest

from percolator import Database, InvalidArgument, SchemaError, Table, codecs
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]


@pytest.mark.parametrize(
    "keys", [range(20_000), range(10**12, 10**12 + 2_000_000, 100)], ids=["dense", "sparse"]
)
def test_keys_in_order_are_spread_evenly(keys: range) -> None:
    codec = codecs.hashed(codecs.ordered_integer)
    splits = [split.row for split in codecs.splits_for(codec, 16)]
    found = Counter(bisect(splits, codec.encode(key)) for key in keys)
    assert len(found) == 16
    assert max(found.values()) < 1.3 * len(keys) / 16


def test_rows_are_read_back_and_the_hash_is_checked() -> None:
    codec = codecs.hashed(codecs.text)
    assert codec.decode(codec.encode("ann")) == "ann"
    assert codec.encode("ann") == bytes.fromhex("e720616e6e")  # as docs/formats.md says
    row = codec.encode("ann")
    with pytest.raises(SchemaError, match="not a hashed key"):
        codec.decode(row[:2] + b"bob")
    with pytest.raises(SchemaError, match="not a hashed key"):
        codec.decode(b"")
    with pytest.raises(SchemaError, match="expected str, got int"):
        codec.encode(7)  # type: ignore[arg-type]


def test_a_table_is_split_and_read_by_key(percolator_db: Database) -> None:
    readings = Table("readings", key=codecs.hashed(codecs.ordered_integer))
    value = readings.column("value", codecs.integer)
    percolator_db.create_table(readings, codecs.splits_for(readings.key, 8))
    percolator_db.set_many((number, {value: number}) for number in range(100))
    with percolator_db.snapshot() as snapshot:
        assert snapshot.get(42, value) == 42
        found = [row.key for row in snapshot.scan(readings)]
        assert found != sorted(found) == list(range(100))
        with pytest.raises(SchemaError, match="hashed keys have no prefixes"):
            list(snapshot.scan(readings, prefix=4))


def test_as_the_first_part_of_a_tuple_it_spreads_groups(percolator_db: Database) -> None:
    key = codecs.tuple_of(codecs.hashed(codecs.text), codecs.ordered_integer)
    readings = Table("readings", key=key)
    value = readings.column("value", codecs.integer)
    percolator_db.create_table(readings, codecs.splits_for(key, 4))
    rows = [(f"sensor {number % 7}", number) for number in range(50)]
    percolator_db.set_many((row, {value: row[1]}) for row in rows)
    with percolator_db.snapshot() as snapshot:
        found = [row.key for row in snapshot.scan(readings, prefix=("sensor 3",))]
    assert found == [("sensor 3", number) for number in range(3, 50, 7)]


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="codec: expected a codec for row keys"):
        codecs.hashed(codecs.integer)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="codec: expected hashed keys"):
        codecs.splits_for(codecs.text, 4)
    with pytest.raises(InvalidArgument, match="codec: expected hashed keys"):
        codecs.splits_for(codecs.tuple_of(codecs.text, codecs.hashed(codecs.text)), 4)
    with pytest.raises(InvalidArgument, match="tablets: expected an int from 1 to 65536, got 0"):
        codecs.splits_for(codecs.hashed(codecs.text), 0)
