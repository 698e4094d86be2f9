"""Options about keys choose exactly the rows that they describe, in the types of the catalogue."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import errors
from percolator.spark.catalog import FrameCatalog
from percolator.spark.chosen_rows import ENTRIES_MAX, RowRanges, RowsBetween, chosen_rows
from percolator.spark.options import ReadOptions, WriteOptions

pytestmark = pytest.mark.spark


def _catalog(*types: str) -> FrameCatalog:
    key = [{"name": f"part{number}", "type": kind} for number, kind in enumerate(types)]
    return FrameCatalog.parse(json.dumps({"key": key, "columns": {"value": {"type": "text"}}}))


TEXT, INTEGER, RAW = _catalog("text"), _catalog("ordered_integer"), _catalog("raw")
PAIR = _catalog("text", "ordered_integer")
texts = st.text(st.characters(codec="utf-8"), max_size=3)
integers = st.integers(-(2**63), 2**63 - 1)
few = st.integers(-3, 3)


def _contains(rows: RowRanges, row: bytes) -> bool:
    found = [one for one in rows.ranges if one.start <= row and (not one.end or row < one.end)]
    assert len(found) <= 1, "the row would be read twice"
    return bool(found)


def _chosen(catalogue: FrameCatalog | None, stored: Any, **options: Any) -> bool:
    """Whether these options choose the row with this key."""
    row = stored if catalogue is None else catalogue.key_codec.encode(stored)
    return _contains(chosen_rows(options, catalogue), row)


@given(first=texts, last=texts, key=texts)
def test_bounds_of_text_choose_what_lies_between_them_in_bytes(
    first: str, last: str, key: str
) -> None:
    if first.encode() < last.encode():
        expected = first.encode() <= key.encode() < last.encode()
        assert _chosen(TEXT, key, key_from=first, key_to=last) is expected
    assert _chosen(TEXT, key, key_from=first) is (first.encode() <= key.encode())


@given(bound=integers, key=integers)
def test_bounds_of_integers_are_in_the_order_of_numbers(bound: int, key: int) -> None:
    assert _chosen(INTEGER, key, key_from=str(bound)) is (key >= bound)
    assert _chosen(INTEGER, key, key_to=str(bound)) is (key < bound)
    assert _chosen(INTEGER, key, key=str(bound)) is (key == bound)


@given(prefix=texts.filter(bool), key=texts)
def test_a_prefix_chooses_the_keys_that_begin_with_it(prefix: str, key: str) -> None:
    assert _chosen(TEXT, key, key_prefix=prefix) is key.startswith(prefix)


@given(keys=st.lists(texts, max_size=4), key=texts)
def test_keys_choose_themselves_and_nothing_between_them(keys: list[str], key: str) -> None:
    assert _chosen(TEXT, key, keys=json.dumps(keys)) is (key in keys)


@given(first=st.tuples(texts, few), last=st.tuples(texts, few), key=st.tuples(texts, few))
def test_keys_of_several_parts_are_compared_part_by_part(
    first: tuple[str, int], last: tuple[str, int], key: tuple[str, int]
) -> None:
    def order(one: tuple[Any, ...]) -> tuple[Any, ...]:
        return (one[0].encode(), *one[1:])

    assert _chosen(PAIR, key, key=json.dumps(first)) is (key == first)
    assert _chosen(PAIR, key, key_prefix=json.dumps(first[:1])) is (key[0] == first[0])
    assert _chosen(PAIR, key, key_from=json.dumps(first)) is (order(key) >= order(first))
    assert _chosen(PAIR, key, key_to=json.dumps(last)) is (order(key) < order(last))
    assert _chosen(PAIR, key, key_from=json.dumps(first[:1])) is (
        order(key[:1]) >= order(first[:1])
    )
    assert _chosen(PAIR, key, key_to=json.dumps(last[:1])) is (order(key[:1]) < order(last[:1]))


bounds = st.binary(max_size=2)
ranges = st.builds(RowsBetween, bounds, bounds).filter(
    lambda one: not one.end or one.start < one.end
)


@given(some=st.lists(ranges, max_size=5), cut=st.lists(bounds.filter(bool), max_size=3), row=bounds)
def test_ranges_cut_into_tablets_have_each_row_once(
    some: list[RowsBetween], cut: list[bytes], row: bytes
) -> None:
    wanted = RowRanges(some)
    expected = any(one.start <= row and (not one.end or row < one.end) for one in some)
    assert _contains(wanted, row) is expected
    edges = [b"", *sorted(set(cut)), b""]
    tablets = [RowsBetween(a, b) for a, b in itertools.pairwise(edges)]
    parts = [RowRanges(wanted.within(tablet)) for tablet in tablets]
    assert sum(_contains(part, row) for part in parts) == expected


def test_ranges_of_all_kinds_are_combined_and_overlaps_are_read_once() -> None:
    entries = [{"to": "b"}, {"from": "a", "to": "c"}, {"key": "d"}, {"prefix": "e"}, {"key": "e1"}]
    rows = chosen_rows({"key_ranges": json.dumps(entries)}, TEXT)
    assert rows.ranges == (
        RowsBetween(b"", b"c"),
        RowsBetween(b"d", b"d\0"),
        RowsBetween(b"e", b"f"),
    )


def test_bytes_are_given_as_text_or_in_hexadecimal() -> None:
    assert _chosen(None, b"\x00\xff", key="hex:00ff")
    assert _chosen(RAW, b"abc", keys='["abc", "hex:00"]')
    assert _chosen(TEXT, "hex:00ff", key="hex:00ff"), "text is text"


def test_lists_without_entries_choose_nothing() -> None:
    assert chosen_rows({"keys": "[]"}, TEXT).ranges == ()
    assert chosen_rows({"key_ranges": "[]"}, None).ranges == ()


@pytest.mark.parametrize(
    ("catalogue", "options", "field", "reason"),
    [
        (TEXT, {"key": "a", "keys": "[]"}, "keys", "together with key; key_ranges takes several"),
        (TEXT, {"key_prefix": "a", "key_from": "a"}, "key_from", "together with key_prefix"),
        (TEXT, {"key_from": "b", "key_to": "b"}, "key_to", "'b' is not above key_from, 'b'"),
        (INTEGER, {"key_from": "10", "key_to": "9"}, "key_to", "9 is not above key_from, 10"),
        (TEXT, {"key_to": ""}, "key_to", "'' is not above key_from, ''"),
        (TEXT, {"key_prefix": ""}, "key_prefix", "is empty; leave it out"),
        (INTEGER, {"key": "seven"}, "key", "expected an integer key, found 'seven'"),
        (INTEGER, {"key": "9223372036854775808"}, "key", "64"),
        (INTEGER, {"keys": '["7"]'}, "keys", "entry 1: expected an integer .* found '7'"),
        (INTEGER, {"keys": "[1, true]"}, "keys", "entry 2: expected an integer .* found True"),
        (INTEGER, {"keys": "[1.0]"}, "keys", "entry 1: expected an integer .* found 1.0"),
        (INTEGER, {"key_prefix": "1"}, "key_prefix", "integers have no prefix; give key_from"),
        (TEXT, {"keys": "[7]"}, "keys", "entry 1: expected text for a key of type text, found 7"),
        (TEXT, {"keys": "['a']"}, "keys", "is not JSON"),
        (TEXT, {"keys": '"a"'}, "keys", "expected a JSON list"),
        (TEXT, {"keys": '["\\ud800"]'}, "keys", "entry 1: the text cannot be encoded as UTF-8"),
        (None, {"keys": '["\\ud800"]'}, "keys", "entry 1: .* cannot be encoded as UTF-8"),
        (None, {"key": "hex:0g"}, "key", "hexadecimal digits, found '0g'"),
        (None, {"key": "b'\\x00'"}, "key", r"Python shows bytes; write 'hex:' \+ key.hex\(\)"),
        (TEXT, {"key": "a" * 5_000}, "key", "has 5000 bytes; a row key has at most 4096"),
        (PAIR, {"key": "a"}, "key", "is not JSON"),
        (PAIR, {"key": '["a"]'}, "key", r"expected a JSON list of 2 parts \(text, ordered_integer"),
        (PAIR, {"key_from": "[]"}, "key_from", "expected a JSON list of 1 to 2 parts"),
        (PAIR, {"key_prefix": '["a", 1, 2]'}, "key_prefix", "a JSON list of 1 to 2 parts"),
        (PAIR, {"keys": '[["a", 1], ["a", "1"]]'}, "keys", "entry 2: expected an integer"),
        (PAIR, {"key_to": '"a"'}, "key_to", "expected a JSON list of 1 to 2 parts"),
        (TEXT, {"key_ranges": '{"key": "a"}'}, "key_ranges", "expected a JSON list"),
        (TEXT, {"key_ranges": '["a"]'}, "key_ranges", 'entry 1: expected {"key": …}'),
        (TEXT, {"key_ranges": '[{"key": "a", "to": "b"}]'}, "key_ranges", "entry 1: expected"),
        (TEXT, {"key_ranges": "[{}]"}, "key_ranges", "entry 1: expected"),
        (TEXT, {"key_ranges": '[{"from": "a", "from": "b"}]'}, "key_ranges", "'from' appears twi"),
        (
            TEXT,
            {"key_ranges": '[{"key": "x"}, {"from": "b", "to": "a"}]'},
            "key_ranges",
            "entry 2: 'a' is not above from, 'b'",
        ),
        (TEXT, {"keys": json.dumps(["a"] * (ENTRIES_MAX + 1))}, "keys", "join with a frame"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_of_its_option(
    catalogue: FrameCatalog | None, options: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        chosen_rows(options, catalogue)
    assert raised.value.field == field


def test_key_options_are_for_reads_and_load_options_have_the_same_syntax() -> None:
    with pytest.raises(errors.InvalidArgument, match="not an option of writing"):
        WriteOptions.parse({"table": "x", "key": "a"})
    assert ReadOptions.parse({"table": "x", "KEY": "a"}).rows.ranges == (RowsBetween.only(b"a"),)
    catalog = json.dumps(
        {
            "key": [{"name": "a", "type": "text"}, {"name": "b", "type": "ordered_integer"}],
            "columns": {"value": {"type": "text"}},
        }
    )
    options = {"table": "x", "catalog": catalog, "operation": "bulk_load", "load_from": '["m"]'}
    encoded = PAIR.key_codec.encode_prefix(("m",))
    assert WriteOptions.parse(options).load_rows == RowsBetween(encoded)
