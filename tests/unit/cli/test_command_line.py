"""The parts of the command line that need no cluster."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from percolator import Change, ChangeKind, Table, Timestamp, codecs
from percolator.cli import app as program
from percolator.cli import pins
from percolator.cli.app import app
from percolator.cli.connection import make_connection, plain
from percolator.cli.notifications import Shown, _changed, _data, _is_of
from percolator.cli.options import timestamp_of
from percolator.cli.rows import _line, _show
from percolator.cli.sessions import _as_table, as_data
from percolator.cli.status import Overview, _as_text
from percolator.cli.tables import column_ttls
from percolator.cli.values import UNKNOWN, Forms, ValueType, described
from percolator.codecs.names import CodecNames
from percolator.codecs.readable import row_bytes, row_text
from percolator.errors import CellAddress, InvalidArgument
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.observers import dead_letters
from percolator.observers.dead_letters import DeadLetter
from percolator.v1.cells_pb2 import Cell, Space
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.lockservice_pb2 import Session, SessionInfo
from percolator.v1.master_pb2 import DescribeCollectionResponse, TableHistory
from tests.command_line import CliRunner

run = CliRunner()


def test_a_timestamp_is_decoded_to_its_time_and_sequence() -> None:
    result = run.invoke(app, ["--json", "timestamp", "decode", str((1_800_000_000_000 << 18) | 7)])
    assert result.exit_code == 0
    assert json.loads(result.output) == {
        "timestamp": str((1_800_000_000_000 << 18) | 7),
        "time": "2027-01-15T08:00:00.000Z",
        "physical_milliseconds": 1_800_000_000_000,
        "sequence": 7,
    }


def test_garbage_collections_of_a_command_skip_what_it_has_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped = []
    monkeypatch.setattr(program, "app", lambda args: skipped.append(gc.get_freeze_count()))
    monkeypatch.setattr(sys, "argv", ["percolator", "timestamp"])
    gc.unfreeze()
    program.main()
    assert skipped > [0]


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (">/dev/full", 1, "error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
@pytest.mark.parametrize("arguments", ["timestamp decode 7", "--json timestamp decode 7", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_no_traceback(
    output: str, code: int, said: str, arguments: str, unbuffered: str
) -> None:
    command = f"{sys.executable} -m percolator.cli {arguments} {output}"
    done = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"\xe9\u4e2d"), ("latin-1", "\u00e9\\u4e2d")]
)
def test_what_the_encoding_of_a_locale_lacks_is_shown_escaped(
    tmp_path: Path, encoding: str, shown: str
) -> None:
    """Rows and names may be in any language, whatever the reader's locale can express."""
    line: dict[str, object] = dict.fromkeys(("rows_read", "round_trips", "written", "locked"), 1)
    line |= {"table": "t", "observer": "o", "row": "\u00e9\u4e2d", "ended": "committed"}
    line |= {"changes": [7], "start": 8, "commit": 9, "seconds": 0.1, "cpu_seconds": 0.1}
    (tmp_path / "trace").write_text(json.dumps(line) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "percolator.cli", "observers", "trace", tmp_path / "trace"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert f"o of {shown}" in done.stdout.decode(encoding)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["tables", "create", "NAME"], "arguments"),
        (["tables", "create", "orders", "--split", "NAME"], "--split"),
        (["tablets", "--table", "NAME"], "arguments"),
        (["locks", "orders", "NAME"], "row"),
        (["servers", "drain", "NAME"], "arguments"),
        (["observers", "pause", "orders", "NAME"], "arguments"),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_in_one_line_that_shows_it(
    arguments: list[str], field: str
) -> None:
    """Python passes bytes that are not UTF-8 on as text that cannot be encoded."""
    given = ["a\udcffb" if one == "NAME" else one for one in arguments]
    result = run.invoke(app, ["--address", "127.0.0.1:1", *given])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {field}: 'a\\udcffb' cannot be encoded as UTF-8")


def test_a_moment_is_turned_into_its_first_timestamp() -> None:
    result = run.invoke(app, ["--json", "timestamp", "decode", "2027-01-15T08:00:00Z"])
    assert json.loads(result.output)["timestamp"] == str(1_800_000_000_000 << 18)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--address", "", "status"], "--address"),
        (["--address", "nowhere", "status"], "--address"),
        (["--address", "host:0", "status"], "--address"),
        (["--address", "host:7100,,host:7101", "status"], "--address"),
        (["observers", "backfill", "t", "o", "--to", "hex:0"], "--to"),
        (["timestamp", "--count", "0"], "--count"),
        (["timestamp", "--count", "-1"], "--count"),
        (["timestamp", "--count", "1000001"], "--count"),
        (["timestamp", "decode", "soon"], "timestamp"),
        (["timestamp", "decode", "2027-01-15T08:00:00"], "time zone"),
        (["timestamp", "decode", str(1 << 64)], "timestamp"),
        (["get", "t", "a", ""], "columns"),
        (["get", "t", "a", "c" * 256], "columns"),
        (["get", "t", "a", "hex:00ff"], "columns"),
        (["delete", "t", "a", ""], "columns"),
        (["delete", "t", "a", "hex:00ff"], "columns"),
        (["scan", "t", "--column", ""], "--column"),
        (["scan", "t", "--where", "city"], "--where"),
        (["scan", "t", "--where", ">=3"], "--where"),
        (["scan", "t", "--where", "hex:00ff=1"], "--where"),
        (["scan", "t", "--where", "a=1", "--raw"], "--raw"),
        (["scan", "t", "--count", "--column", "a"], "--count"),
        (["set", "t", "a", "c" * 256 + "=1"], "cells"),
        (["set", "t", "a", "hex:00ff=1"], "cells"),
    ],
)
def test_bad_input_names_the_field_and_exits_with_2(arguments: list[str], named: str) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["get", "t", "a", "--at", ""], "--at"),
        (["scan", "t", "--at="], "--at"),
        (["export", "--at", "", "d"], "--at"),
        (["pins", "create", "--at", ""], "--at"),
        (["changes", "t", "--follow", "--after", ""], "--after"),
        (["changes", "t", "--after", "1", "--until", ""], "--until"),
        (["history", "t", "a", ""], "column"),
        (["tablets", "--table", ""], "--table"),
        (["tablets", "move", "1", "--to", ""], "--to"),
        (["notifications", "--observer", ""], "--observer"),
        (["observers", "list", "--table", ""], "--table"),
        (["observers", "stats", "--observer", ""], "--observer"),
        (["dead-letters", "retry", "--table", "", "--observer", "o"], "--table"),
        (["dead-letters", "clear", "--yes", "--table", "t", "--observer", ""], "--observer"),
        (["export", "d", "--table", ""], "--table"),
        (["import", "d", "--table", ""], "--table"),
        (["pins", "create", "--for", ""], "--for"),
    ],
)
def test_a_variable_of_the_shell_that_is_not_set_does_not_widen_a_command(
    arguments: list[str], named: str
) -> None:
    """Without the refusal an empty value would mean all tables, or now."""
    result = run.invoke(app, ["--address", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert result.stderr == f"error: {named}: is empty: give a value, or leave it out\n"


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCOLATOR_ADDRESS", "host;7100")
    result = run.invoke(app, ["status"])
    assert result.exit_code == 2
    assert "PERCOLATOR_ADDRESS" in result.output


def test_every_command_explains_itself() -> None:
    commands: tuple[list[str], ...] = (
        [],
        ["status"],
        ["sessions"],
        ["timestamp"],
        ["timestamp", "decode"],
        ["observers"],
        ["observers", "backfill"],
        ["notifications"],
        ["wait"],
        ["pins"],
        ["gc"],
        ["history"],
        ["export"],
        ["import"],
    )
    for command in commands:
        result = run.invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Usage:" in result.output


HOSTILE = "[/red] \x1b[2J\r\n\u202e"
"""Markup that closes nothing, terminal control codes, more lines, and right-to-left text."""
HARMLESS = r"[/red] \x1b[2J\r\n\u202e"


def printed(shown: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_text_that_others_wrote_is_shown_without_taking_effect() -> None:
    """Any client may open a session, or register a server, under any description."""
    session = Session(session_id=b"x" * 16, info=SessionInfo(description=HOSTILE))
    server = Server(kind=ServiceKind.SERVICE_KIND_WORKER, address=HOSTILE, version=HOSTILE)
    cluster = DescribeResponse(cluster_id=HOSTILE, servers=[server])
    assert printed(plain(HOSTILE)).strip() == HARMLESS
    assert printed(_as_table([session])).count(HARMLESS) == 1
    assert printed(_as_text(Overview(cluster))).count(HARMLESS) == 3


@pytest.mark.parametrize("form", [["--json"], []])
def test_what_is_shown_a_number_of_times_fails_if_the_last_time_did(form: list[str]) -> None:
    there = ["--address", "127.0.0.1:1", *form]
    result = run.invoke(app, [*there, "top", "--times", "2", "--every", "0.2"])
    assert result.exit_code == 1
    assert result.output.count("failed to connect") == 2


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
        # A pause that cannot be slept, and no refresh at all, which is not until Ctrl-C.
        (["status", "--watch", "--every", "inf"], "Invalid value for '--every'"),
        (["top", "--every", "1e15"], "Invalid value for '--every'"),
        (["top", "--times", "0"], "Invalid value for '--times'"),
        (["pins", "create", "--for", "soon"], "--for"),
        (["pins", "create", "--for", "-1h"], "--for"),
        (["pins", "create", "--at", "yesterday"], "'yesterday' is neither"),
        (["pins", "create", "--at", "2026-01-01T00:00:00"], "no time zone"),
        (["pins", "release", "zz"], "session_id: expected 32 hexadecimal digits"),
        (["history", "accounts", "hex:0"], "row: expected pairs"),
        (["export", "a", "b"], "expected one directory"),
        (["export", "verify"], "verify needs a directory"),
        (["export", ""], "DIR: is empty"),
        (["export", "verify", ""], "DIR: is empty"),
        (["import", ""], "DIR: is empty"),
        (["import", "--abandon", ""], "DIR: is empty"),
        (["export", "verify", "a", "--at", "1"], "it takes neither --at nor --table"),
        *(
            (["get", "t", "a", "--at", ago], "--at")
            for ago in ("-", "-5x", "-0s", "--5m", "-inf", "-nans")
        ),
        (["get", "t", "a", "--at", "-99999999999d"], "--at"),
    ],
)
def test_bad_input_names_the_option_and_exits_with_2(arguments: list[str], named: str) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("typed", "said"),
    [("n\n", "Delete the table 't'"), ("", "Without a terminal, answer with --yes")],
)
def test_no_table_is_deleted_without_confirmation(typed: str, said: str) -> None:
    result = run.invoke(app, ["tables", "delete", "t"], input=typed)
    assert result.exit_code == 2
    assert said in result.output


def test_without_a_terminal_an_export_says_on_standard_error_only_what_is_wrong(
    tmp_path: Path,
) -> None:
    """A line of a progress bar, even an empty one, would be mail from cron after each backup."""
    result = run.invoke(app, ["export", "verify", str(tmp_path)])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: directory: ")
    assert "holds no export" in line


def test_a_time_ago_is_a_moment_before_now() -> None:
    now = datetime.now(UTC)
    found = timestamp_of("-5m")
    assert found is not None
    assert abs((now - found.to_datetime()).total_seconds() - 300) < 60


@pytest.mark.parametrize("command", ["pins", "dead-letters"])
def test_a_group_without_a_subcommand_lists(command: str) -> None:
    result = run.invoke(app, ["--address", "127.0.0.1:1", "--timeout", "0.1", command])
    assert result.exit_code == 1
    assert "Usage" not in result.output


DAY_MILLISECONDS = 86_400_000


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ({}, ""),
        ({"held_by": "a report", "held_milliseconds": DAY_MILLISECONDS}, ""),
        (
            {"held_by": "a report", "held_milliseconds": 2 * DAY_MILLISECONDS},
            "a report holds back history for 2 days, 0:00:00 longer than tables keep it",
        ),
        ({"age_milliseconds": 3_600_000}, ""),
        (
            {"age_milliseconds": 7_200_000, "error": ErrorDetail(message="tablet 3 is gone")},
            "no history was collected for 2:00:00: tablet 3 is gone",
        ),
    ],
)
def test_status_names_what_has_held_collection_back_for_too_long(
    history: dict[str, Any], problem: str
) -> None:
    described = DescribeCollectionResponse(**history)
    found = Overview(DescribeResponse(), history=described).problems()
    told = [one for one in found if "history" in one]
    assert len(told) == bool(problem)
    assert all(one.startswith(problem) for one in told)


# Rows, values, times and timestamps as the command line reads and shows them.


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
    _show(here, change, Forms(CodecNames()), before=False)
    shown = json.loads(capsys.readouterr().out, parse_int=float)
    assert Timestamp.parse(str(shown["commit_timestamp"])) == AT
