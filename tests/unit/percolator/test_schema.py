"""Tables and columns are names with codecs, and rows know their columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from percolator import Column, Family, Row, SchemaError, Table, codecs, recipes
from percolator.schema import encoded_key

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
