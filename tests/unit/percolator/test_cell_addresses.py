"""Cells as errors show them."""

from __future__ import annotations

import pytest

from percolator.errors import CellAddress


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (CellAddress(7, b"bob", b"balance"), "b'bob', b'balance' of table 7"),
        (CellAddress(7, bytes(64), b""), f"{bytes(64)!r}, b'' of table 7"),
        (
            CellAddress(7, b"r" * 65, b"c" * 4_097),
            f"{b'r' * 64!r}... (65 bytes), {b'c' * 64!r}... (4097 bytes) of table 7",
        ),
    ],
)
def test_long_names_are_shortened(cell: CellAddress, text: str) -> None:
    assert str(cell) == text


def test_the_table_is_named_if_its_name_is_known() -> None:
    assert CellAddress(7, b"bob", b"c").described("accounts") == "b'bob', b'c' of table 'accounts'"
