"""Tables and columns are names with codecs, and rows know their columns."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import percolator.testing
from percolator import (
    Column,
    Database,
    Family,
    Row,
    SchemaError,
    Table,
    UsageError,
    aio,
    both_kinds,
    codecs,
    recipes,
)
from percolator.errors import CellAddress, InvalidArgument
from percolator.recipes import ShardedCounter
from percolator.schema import encoded_key
from percolator.testing.pytest_plugin import percolator_db
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX, Timestamp

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
owner = accounts.column("owner", codecs.text)


@pytest.mark.parametrize("name", ["", "x" * 256, b"bytes", None, 5])
def test_a_table_name_has_1_to_255_bytes(name: Any) -> None:
    with pytest.raises(SchemaError):
        Table(name)


@pytest.mark.parametrize("name", ["", b"", "ä" * 128, None, 5])
def test_a_column_name_has_1_to_255_bytes(name: Any) -> None:
    with pytest.raises(SchemaError):
        accounts.column(name, codecs.text)


@pytest.mark.parametrize(
    "named",
    [
        Table,
        lambda name: accounts.column(name, codecs.text),
        lambda name: Column(accounts, name, codecs.text),
        recipes.ShardedCounter,
        lambda name: recipes.Index(name, on=owner, value=codecs.text),
        lambda name: recipes.ExportQueue(name, key=codecs.text, value=codecs.text),
        lambda name: recipes.CombineQueue(name, key=codecs.text, value=codecs.integer, combine=sum),
    ],
)
def test_a_name_that_is_not_utf8_is_refused_and_shown(named: Callable[[str], object]) -> None:
    """Python makes such names of bytes in arguments and file names that are not UTF-8."""
    with pytest.raises(
        SchemaError, match=r"the (table|column) name '.*a\\udcffb.*' cannot be encoded as UTF-8"
    ):
        named("a\udcffb")


def test_a_key_that_python_does_not_show_is_refused_with_the_name_of_its_table() -> None:
    numbers = Table("numbers", key=codecs.ordered_integer)
    with pytest.raises(SchemaError, match=r"table 'numbers', row \(int\): the number does not fit"):
        encoded_key(numbers, 10**5000)


def test_a_colon_in_a_column_name_has_no_meaning() -> None:
    assert accounts.column("money:balance", codecs.integer).name == b"money:balance"


def test_tables_and_columns_with_equal_names_are_equal() -> None:
    assert Table("accounts") == accounts
    assert Table("others") != accounts
    assert accounts.column("balance", codecs.text) == balance
    assert len({balance, owner, accounts.column(b"owner", codecs.text)}) == 2


def test_a_row_decodes_the_requested_columns() -> None:
    row = Row(accounts, "bob", {b"balance": codecs.integer.encode(7), b"other": b"x"})
    assert row[balance] == 7
    assert row.get(owner, "unknown") == "unknown"
    assert balance in row
    assert owner not in row
    assert len(row) == 2
    assert row.raw() == {b"balance": codecs.integer.encode(7), b"other": b"x"}
    with pytest.raises(KeyError, match="bob"):
        row[owner]


def test_a_row_refuses_columns_of_other_tables() -> None:
    row = Row(accounts, "bob", {})
    stranger = Table("others").column("balance", codecs.integer)
    with pytest.raises(SchemaError):
        row.get(stranger)
    with pytest.raises(SchemaError):
        _ = "balance" in row  # type: ignore[operator]


edges = accounts.family("edge:", codecs.integer)


def test_a_family_makes_columns_of_its_prefix_and_codec() -> None:
    assert edges.column("bob") == accounts.column("edge:bob", codecs.integer)
    assert edges.column(b"\xff").name == b"edge:\xff"
    assert edges.column("bob").codec is codecs.integer
    assert accounts.family(b"edge:", codecs.text) == edges
    assert (
        len({edges, Family(accounts, "edge:", codecs.integer), accounts.family("e", edges.codec)})
        == 2
    )


@pytest.mark.parametrize("prefix", ["", b"", "\0", "x" * 256, None, 5])
def test_a_family_has_a_prefix_that_a_column_can_have(prefix: Any) -> None:
    with pytest.raises(SchemaError):
        accounts.family(prefix, codecs.integer)


@pytest.mark.parametrize("name", ["", b"", "x" * 251, None, 5])
def test_a_column_of_a_family_has_a_name_after_the_prefix(name: Any) -> None:
    with pytest.raises(SchemaError, match="a column name must have 1 to 255 bytes"):
        edges.column(name)


def test_an_empty_name_is_shown_as_text_whatever_it_is() -> None:
    with pytest.raises(SchemaError, match=r"1 to 255 bytes, got ''$"):
        accounts.column(b"", codecs.integer)


def test_a_row_shows_a_family_by_name_in_order() -> None:
    one, two = codecs.integer.encode(1), codecs.integer.encode(2)
    cells = {b"edge:joe": two, b"owner": b"Bob", b"edge:bob": one, b"edge": b"x", b"edge;": b"y"}
    row = Row(accounts, "hub", cells, [owner, edges, edges.column("joe")])
    for _ in range(2):
        assert row.family(edges) == {"bob": 1, "joe": 2}
        assert list(row.family(edges)) == ["bob", "joe"]
        assert [(column.name, value) for column, value in row.items()] == [
            (b"owner", "Bob"),
            (b"edge:bob", 1),
            (b"edge:joe", 2),
        ]
    assert row.family(accounts.family("none:", codecs.integer)) == {}


def test_a_name_in_a_family_that_is_no_text_is_refused_where_it_cannot_be_shown() -> None:
    row = Row(accounts, "hub", {b"edge:\xff": codecs.integer.encode(1)}, [edges])
    with pytest.raises(
        SchemaError, match=r"row 'hub': the name of column b'edge:\\xff' is not text"
    ):
        row.family(edges)
    assert row.items() == [(edges.column(b"\xff"), 1)]


def test_a_row_refuses_families_of_other_tables() -> None:
    stranger: Any
    for stranger in (Table("others").family("edge:", codecs.integer), balance):
        with pytest.raises(SchemaError, match="is not a family of table 'accounts'"):
            Row(accounts, "hub", {}).family(stranger)


def test_the_type_of_a_column_may_leave_out_that_of_the_rows_where_annotations_are_evaluated() -> (
    None
):
    assert get_args(Column[int]) == (int, Any)
    assert get_args(Column[int, str]) == (int, str)


# Cells as errors show them.


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (CellAddress(7, b"bob", b"balance"), "row 'bob', column 'balance' of table 7"),
        (CellAddress(7, bytes(64), b""), f"row {bytes(64)!r}, column '' of table 7"),
        (
            CellAddress(7, b"r" * 65, b"c" * 4_097),
            f"row {'r' * 64!r}... (65 bytes), column {'c' * 64!r}... (4097 bytes) of table 7",
        ),
    ],
)
def test_long_names_are_shortened(cell: CellAddress, text: str) -> None:
    assert str(cell) == text


def test_the_table_is_named_if_its_name_is_known() -> None:
    text = "row 'bob', column 'c' of table 'accounts'"
    assert CellAddress(7, b"bob", b"c").described("accounts") == text


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("bob", "row 'bob', column 'c' of table 'orders'"),
        (["eu", 17], "row [\"eu\", 17], column 'c' of table 'orders'"),
        ("x" * 200, f"row '{'x' * 99}... (3 bytes), column 'c' of table 'orders'"),
    ],
)
def test_the_row_is_shown_by_its_key_if_that_is_known(key: object, text: str) -> None:
    assert CellAddress(7, b"\0\1\2", b"c").described("orders", key) == text


# Timestamps as values.

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


# Recipes, and functions of programs, take transactions of both kinds, and nothing else.

__all__ = ["percolator_db"]


def test_what_is_neither_kind_is_refused_at_once(percolator_db: Database) -> None:
    visits = ShardedCounter("visits")
    with pytest.raises(UsageError, match="expected a database, got str"):
        visits.create("here")  # type: ignore[call-overload]
    visits.create(percolator_db)
    with percolator_db.snapshot() as snapshot:
        with pytest.raises(UsageError, match="expected a transaction, got Snapshot"):
            visits.add(snapshot, "home", 1)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="expected a snapshot or a transaction, got Database"):
            visits.value(percolator_db, "home")  # type: ignore[call-overload]


def test_a_transaction_that_has_ended_is_refused(percolator_db: Database) -> None:
    visits = ShardedCounter("visits")
    visits.create(percolator_db)
    tx = percolator_db.transaction()
    tx.rollback()
    with pytest.raises(UsageError, match="was rolled back"):
        visits.add(tx, "home", 1)


@both_kinds
async def total(reads: aio.Transaction | aio.Snapshot, names: Sequence[str]) -> int:
    """All of them together."""
    return sum([await reads.get(name, balance, default=0) for name in names])


@both_kinds
async def deposit(tx: aio.Transaction, name: str, *, amount: int) -> int:
    left = await total(tx, [name]) + amount
    await tx.set(name, balance, left)
    return left


def test_a_function_written_once_works_with_blocking_transactions(percolator_db: Database) -> None:
    percolator_db.create_table(accounts)
    with percolator_db.transaction() as tx:
        assert deposit(tx, "bob", amount=3) == 3
        assert deposit(tx, "bob", amount=4) == 7
        assert tx.get("bob", balance) == 7
    assert total(percolator_db.snapshot(), ["bob", "joe"]) == 7


async def test_a_function_written_once_works_with_those_of_asyncio() -> None:
    async with percolator.testing.connect_async() as db:
        await db.create_table(accounts)
        async with db.transaction() as tx:
            assert await deposit(tx, "bob", amount=3) == 3
        assert await total(db.snapshot(), ["bob", "joe"]) == 3


def test_an_error_of_the_function_reaches_its_blocking_caller(percolator_db: Database) -> None:
    percolator_db.create_table(accounts)
    with (
        percolator_db.transaction() as tx,
        pytest.raises(SchemaError, match="expected int"),
    ):
        deposit(tx, "bob", amount=0.5)  # type: ignore[call-overload]


def test_a_function_written_once_keeps_its_name_and_takes_nothing_else(
    percolator_db: Database,
) -> None:
    assert (getattr(total, "__name__", ""), total.__doc__) == ("total", "All of them together.")
    with pytest.raises(UsageError, match="expected a snapshot or a transaction, got Database"):
        total(percolator_db, [])  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="both_kinds takes an async function"):
        both_kinds(len)  # type: ignore[arg-type]
