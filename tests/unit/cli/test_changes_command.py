"""How `percolator changes` writes a change for people."""

from __future__ import annotations

import pytest

from percolator import Change, ChangeKind, Table, Timestamp, codecs
from percolator.cli.changes import _line
from percolator.cli.values import Forms, ValueType
from percolator.codec_names import CodecNames

rows = Table("t", key=codecs.raw)


def line(
    value: bytes | None,
    before: bytes | None,
    kind: ValueType | None = None,
    *,
    row: bytes = b"a",
    ends: bool = True,
) -> str:
    change = Change(
        rows,
        row,
        b"c",
        Timestamp(7),
        ChangeKind.DELETE if value is None else ChangeKind.UPDATE,
        value,
        before,
        before_is_known=True,
        ends_commit=ends,
    )
    return _line(change, Forms(CodecNames(), kind), before=True)


def test_a_missing_value_is_told_from_the_value_of_a_dash() -> None:
    assert line(None, b"-") == '7  delete  "a"  "c"  "-"  -  (end of commit)'
    assert line(b"-", None, ends=False) == '7  update  "a"  "c"  -  "-"'
    assert line(b"-", b"") != line(b"", b"-")


@pytest.mark.parametrize(
    "value", [b"(end of commit)", b'x"  "y', b"x  y", b"", b"hex:00", b"\0", b"\xff", b"\\"]
)
def test_no_text_is_taken_for_anything_else(value: bytes) -> None:
    shown = line(value, None, ends=False)
    assert shown.startswith('7  update  "a"  "c"  -  ')
    word = shown.removeprefix('7  update  "a"  "c"  -  ')
    if word.startswith("hex:"):
        assert bytes.fromhex(word.removeprefix("hex:")) == value
    else:
        assert codecs.json.decode(word.encode()) == value.decode()
    assert line(b"v", None, row=value).startswith(f"7  update  {word}  ")


def test_typed_values_are_shown_as_json() -> None:
    assert line(codecs.integer.encode(5), codecs.integer.encode(-3), ValueType.INTEGER) == (
        '7  update  "a"  "c"  -3  5  (end of commit)'
    )
    assert '  "-"  ' in line(codecs.json.encode("-"), None, ValueType.JSON)
