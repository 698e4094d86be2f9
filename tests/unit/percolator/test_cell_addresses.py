"""Cells as errors show them."""

from __future__ import annotations

import pytest

from percolator.errors import CellAddress


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
