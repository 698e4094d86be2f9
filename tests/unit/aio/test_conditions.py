"""Scans keep the rows that a condition says, and refuse conditions that make no sense.

That all engines keep the same rows, among locks and own writes, is in test_reads_by_model.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Column, Limits, Table, codecs
from percolator.codecs import Codec
from percolator.conditions import (
    BYTES_MAX,
    DEPTH_MAX,
    OPERANDS_MAX,
    PARTS_MAX,
    Condition,
    Predicate,
    require_small,
)
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.v1.cells_pb2 import RowFilter
from tests.unit import connected as where_cells_are
from tests.unit.connected import connected

PEOPLE = Table("people")
AGE = PEOPLE.column("age", codecs.integer)
NAME = PEOPLE.column("name", codecs.text)
DATA = PEOPLE.column("data", codecs.json)
STORED = PEOPLE.column("age", codecs.stored)

_moments = st.datetimes(
    min_value=datetime(2, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
    max_value=datetime(9998, 1, 1),  # noqa: DTZ001 - see above
    timezones=st.just(UTC),
)
VALUES: list[tuple[Codec[Any], st.SearchStrategy[Any]]] = [
    (codecs.integer, st.integers(-(2**63), 2**63 - 1)),
    (codecs.float, st.floats()),
    (codecs.text, st.text()),
    (codecs.raw, st.binary()),
    (codecs.boolean, st.booleans()),
    (codecs.timestamp, _moments),
    (codecs.date, st.dates()),
    (codecs.uuid, st.uuids()),
    (codecs.decimal(10, 2), st.decimals(-(10**7), 10**7, places=2)),
]
CASES = st.sampled_from(VALUES).flatmap(
    lambda pair: st.tuples(
        st.just(pair[0]), st.lists(st.none() | pair[1], max_size=8), st.lists(pair[1], min_size=1)
    )
)
COMPARISONS: list[tuple[Callable[[Column[Any], Any], Condition], Callable[[Any, Any], bool]]] = [
    (lambda column, one: column < one, lambda value, one: value < one),
    (lambda column, one: column <= one, lambda value, one: value <= one),
    (lambda column, one: column > one, lambda value, one: value > one),
    (lambda column, one: column >= one, lambda value, one: value >= one),
    (lambda column, one: column.equals(one), lambda value, one: value == one),
    (lambda column, one: column.differs_from(one), lambda value, one: value != one),
]


def _kept(condition: Condition, column: Column[Any], values: list[Any]) -> list[bool]:
    stored = [None if value is None else column.codec.encode(value) for value in values]
    return Predicate(condition.message).keeps({column.name: stored}, len(values))


@given(CASES)
def test_values_are_compared_as_python_compares_them(
    case: tuple[Codec[Any], list[Any], list[Any]],
) -> None:
    codec, values, others = case
    column, other = PEOPLE.column("c", codec), others[0]
    for condition, holds in COMPARISONS:
        expected = [value is not None and holds(value, other) for value in values]
        assert _kept(condition(column, other), column, values) == expected
    is_among = [value is not None and any(value == one for one in others) for value in values]
    assert _kept(column.is_in(others), column, values) == is_among
    assert _kept(column.is_null(), column, values) == [value is None for value in values]
    assert _kept(column.is_not_null(), column, values) == [value is not None for value in values]
    if codec in (codecs.text, codecs.raw):
        begins = [value is not None and value.startswith(other) for value in values]
        assert _kept(column.startswith(other), column, values) == begins


def test_no_number_equals_nan_or_is_on_either_side_of_it() -> None:
    column = PEOPLE.column("f", codecs.float)
    for condition, _ in COMPARISONS[:5]:
        assert _kept(condition(column, math.nan), column, [math.nan, 0.0, math.inf]) == [False] * 3


@pytest.mark.parametrize("codec", [one for one, _ in VALUES if one is not codecs.raw])
def test_values_that_cannot_be_read_are_no_answer(codec: Codec[Any]) -> None:
    examples = [1, 1.0, "a", True, datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), UUID(int=1)]
    for example in [*examples, Decimal("1.00")]:
        try:
            good = codec.encode(example)
        except SchemaError:
            continue
        column = PEOPLE.column("c", codec)
        predicate = Predicate((column >= example).message)
        for bad in (b"\xff\xff", b"\xff" * 9):
            kept, unreadable = predicate.evaluate({b"c": [good, bad, None]}, 3)
            assert (kept[0], kept[2], unreadable) == (True, False, {1})
        return
    pytest.fail("no example")


# Bad conditions.


def _nested(depth: int) -> Condition:
    condition = AGE >= 0
    for level in range(1, depth):
        condition = condition & (AGE >= 0) if level % 2 else condition | (AGE >= 0)
    return condition


untyped: Any = None
untyped_text: Any = "2"
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a wrong type": (lambda: untyped <= AGE, SchemaError, r"'age': expected int, .*is_null"),
    "text for a number": (lambda: AGE.is_in([1, untyped_text]), SchemaError, "expected int"),
    "too large a number": (lambda: AGE < 2**63, SchemaError, "does not fit into 64 bits"),
    "a prefix of a number": (lambda: AGE.startswith(1), SchemaError, "have no prefixes"),
    "an order of JSON": (lambda: DATA < {}, SchemaError, "codec json have no order"),
    "no codec": (lambda: STORED < b"", SchemaError, "no codec that servers know"),
    "text as a list": (lambda: NAME.is_in("Ann"), InvalidArgument, "values: expected a list"),
    "a chain": (lambda: 1 < AGE < 3, UsageError, "use & and |"),
    "and": (lambda: AGE > 1 and AGE < 3, UsageError, "use & and |"),
    "columns compared": (lambda: (AGE < 1) | (untyped == AGE), InvalidArgument, "column.equals"),
    "something else": (lambda: (AGE < 1) & untyped, InvalidArgument, "got NoneType"),
    "nested too deeply": (lambda: _nested(DEPTH_MAX + 1), InvalidArgument, "nested more than 16"),
    "very many values": (
        lambda: AGE.is_in(range(OPERANDS_MAX + 1)),
        InvalidArgument,
        "at most 1000",
    ),
    "very many values in parts": (
        lambda: AGE.is_in(range(OPERANDS_MAX)) | (AGE < 0),
        InvalidArgument,
        "more than 1000 values",
    ),
    "a large one": (lambda: NAME < "a" * BYTES_MAX, InvalidArgument, "at most 65536 allowed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_condition_that_makes_no_sense_is_refused_where_it_is_written(case: str) -> None:
    make, kind, reason = BAD[case]
    with pytest.raises(kind, match=reason):
        make()


def test_a_condition_may_be_as_large_as_is_said() -> None:
    assert Predicate(_nested(DEPTH_MAX).message).columns == (b"age",)
    wide = AGE >= 0
    for _ in range(PARTS_MAX - 2):
        wide &= AGE >= 0
    with pytest.raises(InvalidArgument, match="more than 256 parts"):
        wide & (AGE >= 0)


_KIND_OF_THE_FUTURE: Any = 99
_NUMBER = codecs.integer.encode(1)
BAD_MESSAGES = {
    "no kind": RowFilter(column=b"c", codec="raw", operands=[b""]),
    "a kind of the future": RowFilter(
        kind=_KIND_OF_THE_FUTURE, column=b"c", codec="raw", operands=[b""]
    ),
    "no column": RowFilter(kind=RowFilter.KIND_NULL),
    "no parts": RowFilter(kind=RowFilter.KIND_ALL),
    "a column and parts": RowFilter(
        kind=RowFilter.KIND_ANY,
        column=b"c",
        parts=[RowFilter(kind=RowFilter.KIND_NULL, column=b"c")],
    ),
    "parts of a column": RowFilter(
        kind=RowFilter.KIND_NULL,
        column=b"c",
        parts=[RowFilter(kind=RowFilter.KIND_NULL, column=b"c")],
    ),
    "an operand of null": RowFilter(kind=RowFilter.KIND_NULL, column=b"c", operands=[b""]),
    "no operand": RowFilter(kind=RowFilter.KIND_LESS, column=b"c", codec="raw"),
    "two operands": RowFilter(
        kind=RowFilter.KIND_LESS, column=b"c", codec="integer", operands=[_NUMBER] * 2
    ),
    "an operand that cannot be read": RowFilter(
        kind=RowFilter.KIND_LESS, column=b"c", codec="integer", operands=[b"1"]
    ),
    "an unknown codec": RowFilter(
        kind=RowFilter.KIND_LESS, column=b"c", codec="decimal(0,9)", operands=[b"1"]
    ),
    "a prefix of a number": RowFilter(
        kind=RowFilter.KIND_PREFIX, column=b"c", codec="integer", operands=[_NUMBER]
    ),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_a_message_that_makes_no_sense_is_refused(case: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^filter"):
        Predicate(BAD_MESSAGES[case])
    deep = RowFilter(kind=RowFilter.KIND_NULL, column=b"c")
    for _ in range(DEPTH_MAX):
        deep = RowFilter(kind=RowFilter.KIND_ALL, parts=[deep])
    with pytest.raises(InvalidArgument, match="nested"):
        require_small(deep, "filter")


# In scans.


@pytest.mark.usefixtures("engine_of_cells")
async def test_a_value_that_cannot_be_read_is_an_error_where_the_scan_comes_to_it() -> None:
    async with connected() as (db, _):
        await db.create_table(PEOPLE)
        async with db.transaction() as tx:
            tx.set("ann", {AGE: 20, NAME: "Ann"})
            tx.set("bad", STORED, b"?")
            tx.set("cat", {AGE: 30, NAME: "Cat"})
        async with db.transaction() as tx:
            for limit in (1, None):
                scan = tx.scan(PEOPLE, where=(AGE > 10) | NAME.is_null(), limit=limit)
                found = [(await anext(scan)).key]
                if limit is None:
                    with pytest.raises(SchemaError, match="row 'bad': column 'age': 1 stored"):
                        await anext(scan)
                assert found == ["ann"]
            with pytest.raises(SchemaError, match="in row 'bad': column 'age'"):
                await tx.count(PEOPLE, where=AGE > 10)
            assert await tx.count(PEOPLE, where=AGE.is_not_null()) == 3
            tx.set("bad", AGE, 40)
            assert await tx.count(PEOPLE, where=AGE > 10) == 3
            found = [row.key async for row in tx.scan(PEOPLE, where=AGE > 20, reverse=True)]
            assert found == ["cat", "bad"]


@pytest.mark.usefixtures("engine_of_cells")
async def test_only_columns_that_are_asked_for_are_shown_and_rows_without_them_are_not() -> None:
    async with connected() as (db, _):
        await db.create_table(PEOPLE)
        async with db.transaction() as tx:
            tx.set("ann", {AGE: 20, NAME: "Ann"})
            tx.set("bob", AGE, 30)
            tx.set("cat", {AGE: 30, NAME: "Cat"})
        async with db.snapshot() as snapshot:
            rows = snapshot.scan(PEOPLE, columns=[NAME], where=AGE >= 30, limit=1)
            assert [(row.key, row.raw()) async for row in rows] == [("cat", {b"name": b"Cat"})]


async def test_tablet_servers_leave_rows_out_and_a_page_without_rows_is_not_the_end() -> None:
    async with connected(Limits(page_rows_max=10)) as (db, _):
        await db.create_table(PEOPLE, ["row-050"])
        async with db.transaction() as tx:
            for number in range(100):
                tx.set(f"row-{number:03}", AGE, number)
        async with db.snapshot() as snapshot:
            await snapshot.get("row-000", AGE)  # and the locks are resolved
            before = snapshot.statistics.rows_read
            for where in (AGE >= 99, (AGE >= 99) | NAME.is_not_null()):
                found = [row.key async for row in snapshot.scan(PEOPLE, where=where)]
                assert found == ["row-099"]
            assert snapshot.statistics.rows_read == before + 2
            assert snapshot.statistics.round_trips >= 100 // 10
            assert await snapshot.count(PEOPLE, start="row-090") == 10
            assert snapshot.statistics.rows_read == before + 2


async def test_a_row_store_reads_all_rows_and_filters_in_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where_cells_are, "over_rows", True)
    async with connected() as (db, _):
        await db.create_table(PEOPLE)
        async with db.transaction() as tx:
            for number in range(10):
                tx.set(f"row-{number}", AGE, number)
        async with db.snapshot() as snapshot:
            assert await snapshot.count(PEOPLE, where=AGE >= 9) == 1
            assert snapshot.statistics.rows_read == 10


async def test_conditions_are_checked_against_the_table() -> None:
    async with connected() as (db, _):
        await db.create_table(PEOPLE)
        async with db.transaction() as tx:
            tx.set("ann", AGE, 20)
        async with db.snapshot() as snapshot:
            other = Table("others").column("age", codecs.integer)
            as_text = PEOPLE.column("age", codecs.text)
            bad: Any = AGE == 20
            for condition, kind, reason in (
                (other > 1, SchemaError, "is not a column of table 'people'"),
                (as_text > "1", SchemaError, "integer"),
                (bad, InvalidArgument, "where: expected a condition, got False"),
            ):
                with pytest.raises(kind, match=reason):
                    await snapshot.count(PEOPLE, where=condition)
                with pytest.raises(kind, match=reason):
                    await anext(snapshot.scan(PEOPLE, where=condition))
