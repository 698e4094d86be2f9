"""An empty row is a key like any other, or none at all: it depends on the codec of the keys."""

from __future__ import annotations

import pytest

from percolator import codecs
from percolator.cli.values import Forms
from percolator.codec_names import CodecNames
from percolator.errors import InvalidArgument


@pytest.mark.parametrize(
    "key", ["ordered_integer", "uuid", "ordered_date", "tuple_of(text, ordered_integer)"]
)
def test_an_empty_row_is_refused_where_no_key_is_empty(key: str) -> None:
    """A row that no program can read would stop all their scans: `set orders "$ROW"`."""
    with pytest.raises(InvalidArgument, match="row: expected "):
        Forms(CodecNames(key=key)).row("row", "")


@pytest.mark.parametrize(
    ("key", "row"), [("", b""), ("text", b""), ("raw", b""), ("hashed(text)", b"\0\0")]
)
def test_an_empty_row_is_the_row_of_the_empty_key(key: str, row: bytes) -> None:
    assert codecs.hashed(codecs.text).encode("") == b"\0\0"
    assert Forms(CodecNames(key=key)).row("row", "") == row


def test_an_empty_end_of_a_range_means_none() -> None:
    forms = Forms(CodecNames(key="ordered_integer"))
    assert forms.end_of_range("--start", "") == b""
    assert forms.end_of_range("--start", "7") == codecs.ordered_integer.encode(7)
