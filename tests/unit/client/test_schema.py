"""Tables and columns are names with codecs; rows know their columns."""

from __future__ import annotations

import pytest

from percolator import Row, SchemaError, Table, codecs

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
owner = accounts.column("owner", codecs.text)


@pytest.mark.parametrize("name", ["", "x" * 256, b"bytes", None, 5])
def test_a_tables_name_has_1_to_255_bytes(name: object) -> None:
    with pytest.raises(SchemaError):
        Table(name)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["", b"", "ä" * 128, None, 5])
def test_a_columns_name_has_1_to_255_bytes(name: object) -> None:
    with pytest.raises(SchemaError):
        accounts.column(name, codecs.text)  # type: ignore[arg-type]


def test_a_colon_in_a_columns_name_means_nothing() -> None:
    assert accounts.column("money:balance", codecs.integer).name == b"money:balance"


def test_tables_and_columns_are_their_names() -> None:
    assert Table("accounts") == accounts
    assert Table("others") != accounts
    assert accounts.column("balance", codecs.text) == balance
    assert len({balance, owner, accounts.column(b"owner", codecs.text)}) == 2


def test_a_row_decodes_what_it_is_asked_for() -> None:
    row = Row(accounts, "bob", {b"balance": codecs.integer.encode(7), b"other": b"x"})
    assert row[balance] == 7
    assert row.get(owner, "nobody") == "nobody"
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
