"""Rows, values, times and timestamps as the command line reads and shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from percolator import Change, ChangeKind, Table, Timestamp, codecs
from percolator.cli import cells, pins
from percolator.cli.cells import _line
from percolator.cli.connection import make_connection
from percolator.cli.notifications import Shown, _changed, _data, _is_of
from percolator.cli.sessions import as_data
from percolator.cli.tables import column_ttls
from percolator.cli.values import UNKNOWN, Forms, ValueType, described
from percolator.codecs.names import CodecNames
from percolator.errors import CellAddress, InvalidArgument
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.observers import dead_letters
from percolator.observers.dead_letters import DeadLetter
from percolator.v1.cells_pb2 import Cell, Space
from percolator.v1.lockservice_pb2 import Session, SessionInfo
from percolator.v1.master_pb2 import DescribeCollectionResponse, TableHistory


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


def test_columns_and_times_are_parsed() -> None:
    found = column_ttls(["token=30d", "a=b=1.5s", "hex:ff=0.0001s"])
    assert [(one.column, one.ttl_milliseconds) for one in found] == [
        (b"token", 30 * 86_400_000),
        (b"a=b", 1_500),
        (b"\xff", 1),
    ]
    assert column_ttls(None) == []


def test_no_time_ends_it_only_where_there_is_one() -> None:
    (found,) = column_ttls(["token="], may_be_empty=True)
    assert (found.column, found.ttl_milliseconds) == (b"token", 0)
    with pytest.raises(InvalidArgument, match="--ttl: expected a time such as 90s"):
        column_ttls(["token="])


@pytest.mark.parametrize("text", ["token", "=3s", "", "token=soon", "token=-1s"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--ttl: expected"):
        column_ttls([text])


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["token=36501d"], "expected at most 100 years, found '36501d'"),
        (["token=1e99d"], "expected at most 100 years, found '1e99d'"),
        (["token=1d", "hex:746f6b656e=2d"], "column 'hex:746f6b656e' is named twice"),
    ],
)
def test_what_no_column_can_have_is_refused_by_the_name_of_the_option(
    texts: list[str], reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        column_ttls(texts)
    assert (caught.value.field, caught.value.reason) == ("--ttl", reason)


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


def test_a_weak_notification_is_shown_without_a_time_of_change() -> None:
    def letter(commit: int) -> DeadLetter:
        return DeadLetter("docs", "clean", b"source", b"a", commit, "error", 5, 7)

    assert _changed(letter(0)) == "never"
    assert _changed(letter(1 << 18)).startswith("1970-01-01T00:00:00.001Z")


def test_rows_are_shown_and_chosen_by_their_keys() -> None:
    key = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    row = key.encode(("eu", 17))
    letter = DeadLetter("orders", "count", b"state", row, 1 << 18, "error", 5, 7)
    forms = Forms(CodecNames(key="tuple_of(text, ordered_integer)"))
    assert forms.row_text(row) == '["eu", 17]'
    assert _data([letter], {"orders": forms})[0]["key"] == ["eu", 17]
    assert _is_of(letter, '["eu", 17]', forms)
    assert _is_of(letter, "hex:" + row.hex(), forms)
    assert not _is_of(letter, '["eu", 18]', forms)
    assert not _is_of(letter, "eu", forms)


AT = Timestamp.of(1_800_000_000_000, 7)
"""Not a multiple of 64, as every number of this size is that JavaScript can hold."""
_LOCK = LockRecord(AT, AT, 3000, RecordKind.PUT, b"", CellAddress(1, b"r", b"c"), b"")
_WAITING = Shown("t", "o", "c", b"r", UNKNOWN, (AT,))
_LETTER = DeadLetter("t", "o", b"c", b"r", AT, "error", 1, AT)
_COLLECTION = DescribeCollectionResponse(
    tables=[TableHistory(table="t", safe_point=AT, collected_below=AT)],
    transactions_safe_point=AT,
    held_at=AT,
)


def as_javascript_reads(data: object) -> Any:
    return json.loads(json.dumps(data), parse_int=float)


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (as_data(Session(info=SessionInfo(oldest_start_timestamp=AT))), ["oldest_start_timestamp"]),
        (
            described(Cell(space=Space.SPACE_LOCK, value=_LOCK.encode())),
            ["start_timestamp", "min_commit_timestamp"],
        ),
        (
            described(
                Cell(
                    space=Space.SPACE_WRITE,
                    timestamp=AT,
                    value=WriteRecord(AT, RecordKind.PUT, b"").encode(),
                )
            ),
            ["commit_timestamp", "start_timestamp"],
        ),
        (described(Cell(space=Space.SPACE_DATA, timestamp=AT)), ["timestamp"]),
        (dead_letters.as_data(_LETTER), ["commit_timestamp", "parked_at"]),
        (pins._as_data(_COLLECTION), ["transactions_safe_point", "held_at"]),
        (pins._as_data(_COLLECTION)["tables"][0], ["safe_point", "collected_below"]),  # type: ignore[index]
        ({"first": _WAITING.as_data()["timestamps"][0]}, ["first"]),  # type: ignore[index]
    ],
)
def test_every_timestamp_is_exact(data: dict[str, object], fields: list[str]) -> None:
    read = as_javascript_reads(data)
    assert [int(read[field]) for field in fields] == [AT] * len(fields)


def test_a_consumer_of_changes_can_go_on_after_the_last_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If `--after` were rounded up, it would skip changes."""
    table = Table("t", key=codecs.raw)
    change = Change(
        table,
        b"r",
        b"c",
        AT,
        ChangeKind.INSERT,
        b"v",
        None,
        before_is_known=False,
        ends_commit=True,
    )
    here = make_connection("127.0.0.1:7100", 1.0, True)
    cells._show(here, change, Forms(CodecNames()), before=False)
    shown = json.loads(capsys.readouterr().out, parse_int=float)
    assert Timestamp.parse(str(shown["commit_timestamp"])) == AT
