"""Timestamps in `--json` survive programs that keep numbers as JavaScript does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from percolator import Change, ChangeKind, Table, Timestamp, codecs
from percolator.cli import changes, gc
from percolator.cli.connection import make_connection
from percolator.cli.notifications import Shown
from percolator.cli.sessions import as_data
from percolator.cli.stored import described
from percolator.cli.values import UNKNOWN, Forms
from percolator.codec_names import CodecNames
from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.observers.running import dead_letter_box
from percolator.observers.running.dead_letter import DeadLetter
from percolator.v1.cells_pb2 import Cell, Space
from percolator.v1.lockservice_pb2 import Session, SessionInfo
from percolator.v1.master_pb2 import DescribeCollectionResponse, TableHistory

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
        (dead_letter_box.as_data(_LETTER), ["commit_timestamp", "parked_at"]),
        (gc._as_data(_COLLECTION), ["transactions_safe_point", "held_at"]),
        (gc._as_data(_COLLECTION)["tables"][0], ["safe_point", "collected_below"]),  # type: ignore[index]
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
    changes._show(here, change, Forms(CodecNames()), before=False)
    shown = json.loads(capsys.readouterr().out, parse_int=float)
    assert Timestamp.parse(str(shown["commit_timestamp"])) == AT
