"""How commands about tables and tablets write rows, and refuse bad input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.cli.app import app
from percolator.row_text import row_bytes, row_text
from tests.command_line import CliRunner

run = CliRunner()


@given(st.binary(max_size=40))
def test_every_row_is_read_back_from_the_text_that_shows_it(row: bytes) -> None:
    assert row_bytes("row", row_text(row)) == row
    assert row_text(row).isprintable()


@given(
    st.text(st.characters(codec="utf-8"), max_size=40).filter(
        lambda text: not text.startswith("hex:")
    )
)
def test_a_row_of_text_is_written_as_that_text(text: str) -> None:
    assert row_bytes("row", text) == text.encode()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tables", "create", "t", "--split", "hex:0"], "--split"),
        (["tables", "create", "t", "--split", "hex:0g"], "--split"),
        (["tables", "create", "t", "--retention", "-1"], "--retention"),
        (["tables", "create", "t", "--retention", "1e300"], "--retention"),
        (["tables", "create", "t", "--retention", "nan"], "--retention"),
        (["tables", "create", "t", "--split-mib", "99999999999999"], "--split-mib"),
        (["tablets", "split", "7", "--row", "hex:xyz"], "--row"),
        (["tablets", "split", "0"], "tablet"),
        (["wait", "--timeout", "0"], "--timeout"),
        (["notifications", "--limit", "0"], "--limit"),
        (["notifications", "--follow", "--count"], "--count"),
        (["tablets", "split", "99999999999999999999999"], "tablet"),
        (["tablets", "move", "seven"], "tablet"),
        (["tables", "change-feed", "t"], "--on"),
        (["tables", "change-feed", "t", "--on", "--off"], "--on"),
        (["changes", "t"], "--after"),
        (["changes", "t", "--after", "soon"], "--after"),
        (["changes", "t", "--after", "5", "--until", "2027-01-15T08:00:00"], "--until"),
        (["changes", "t", "--follow", "--until", "5"], "--until"),
    ],
)
def test_bad_input_names_the_option_and_exits_with_2(arguments: list[str], named: str) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_no_table_is_deleted_without_confirmation() -> None:
    result = run.invoke(app, ["tables", "delete", "t"], input="n\n")
    assert result.exit_code == 2
    assert "Delete the table 't'" in result.output


def test_without_a_terminal_the_option_that_confirms_is_named() -> None:
    result = run.invoke(app, ["tables", "delete", "t"], input="")
    assert result.exit_code == 2
    assert "Without a terminal, answer with --yes" in result.output
