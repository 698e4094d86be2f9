"""Lock and write records: round trips, damaged bytes, and the byte examples of docs/formats.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import CellAddress, InvariantViolation
from percolator.formats.records import (
    LOCK_KIND_OFFSET,
    WRITE_KIND_OFFSET,
    LockRecord,
    RecordKind,
    WriteRecord,
    acknowledgement_column,
    acknowledging_observer,
    lock_prefix,
    locked_column,
    observed_column,
    read_lock_column,
)
from percolator.tablet.cells import (
    AFTER_READ_LOCKS,
    DATA,
    FENCES,
    FORMAT_KEY,
    LOCK,
    NEWEST_KEY,
    NOTIFY,
    ROLLBACK,
    SAFE_POINT_KEY,
    STATISTICS_KEY,
    WRITE,
    cell_prefix,
    encode,
    locked_cell,
    read_locks_prefix,
)

TIMESTAMPS = st.integers(0, 2**64 - 1)
LOCKS = st.builds(
    LockRecord,
    start_timestamp=TIMESTAMPS,
    min_commit_timestamp=TIMESTAMPS,
    ttl_milliseconds=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(RecordKind),
    session=st.binary(max_size=255),
    primary=st.builds(CellAddress, st.integers(0, 2**64 - 1), st.binary(), st.binary()),
    value=st.binary(),
)
CHANGES = st.sampled_from([RecordKind.PUT, RecordKind.PUT_IN_DATA, RecordKind.DELETE])
LOCK_ONLY = st.just(RecordKind.LOCK_ONLY)
WRITES = st.builds(WriteRecord, TIMESTAMPS, CHANGES, st.binary()) | st.builds(
    WriteRecord, TIMESTAMPS, LOCK_ONLY, last_change=st.none() | TIMESTAMPS
)


@given(lock=LOCKS)
def test_a_lock_record_survives_encoding_and_decoding(lock: LockRecord) -> None:
    record = lock.encode()
    assert LockRecord.decode(record) == lock
    assert record[LOCK_KIND_OFFSET] == lock.kind
    assert record.startswith(
        lock_prefix(lock.start_timestamp, lock.min_commit_timestamp, lock.ttl_milliseconds)
    )


@given(write=WRITES)
def test_a_write_record_survives_encoding_and_decoding(write: WriteRecord) -> None:
    record = write.encode()
    assert WriteRecord.decode(record) == write
    assert record[WRITE_KIND_OFFSET] == write.kind


@given(lock=LOCKS, data=st.data())
def test_a_lock_record_that_was_cut_off_is_reported(lock: LockRecord, data: st.DataObject) -> None:
    whole = lock.encode()
    length = data.draw(st.integers(0, len(whole) - len(lock.value) - 1))
    with pytest.raises(InvariantViolation):
        LockRecord.decode(whole[:length])


@pytest.mark.parametrize("damaged", [b"", bytes(8), bytes(9), bytes(8) + b"\x05"])
def test_damaged_write_records_are_reported(damaged: bytes) -> None:
    with pytest.raises(InvariantViolation):
        WriteRecord.decode(damaged)


def documented(section: str) -> str:
    """A section of docs/formats.md, without line breaks."""
    text = (Path(__file__).parents[3] / "docs/formats.md").read_text(encoding="utf-8")
    _, _, found = text.partition(f"\n## {section}\n")
    assert found, section
    return " ".join(found.partition("\n## ")[0].split())


@pytest.mark.parametrize(
    ("example", "key"),
    [
        ("`L`, row `ann`, column `balance`", encode(LOCK, b"ann", b"balance")),
        (
            "`W`, row `ann`, column `balance`, timestamp 5",
            encode(WRITE, b"ann", b"balance", 5),
        ),
        (
            "`W`, row `a` `00` `b`, empty column, timestamp 5",
            encode(WRITE, b"a\0b", b"", 5),
        ),
        (
            "`D`, row `ann`, column `balance`, timestamp 3",
            encode(DATA, b"ann", b"balance", 3),
        ),
        (
            "`R`, row `ann`, column `balance`, timestamp 3",
            encode(ROLLBACK, b"ann", b"balance", 3),
        ),
        (
            "`N`, row `ann`, column `balance`, observer `index`, timestamp 5",
            encode(NOTIFY, b"ann", b"balance", 5, b"index"),
        ),
    ],
)
def test_the_documented_keys_are_the_real_ones(example: str, key: bytes) -> None:
    assert f"| {example} | `{key.hex(' ')}` |" in documented("Cells")


def test_the_documented_fences_and_notes_are_the_real_ones() -> None:
    text = documented("Cells")
    fences = ", ".join(f"`{fence.decode()}`" for fence in FENCES)
    assert f"are never deleted: {fences}." in text
    notes = (FORMAT_KEY, SAFE_POINT_KEY, NEWEST_KEY, STATISTICS_KEY)
    for note in notes:
        assert f"| `{note.decode()}` |" in text


def test_the_documented_lock_record_is_the_real_one() -> None:
    primary = CellAddress(7, b"ann", b"balance")
    record = LockRecord(3, 4, 3000, RecordKind.PUT, b"S1", primary, b"10").encode()
    assert record.hex(" ") in documented("Lock record")


@pytest.mark.parametrize(
    ("example", "record"),
    [
        ("start 3, put of `10`", WriteRecord(3, RecordKind.PUT, b"10")),
        ("start 3, put, the value is in `D` at 3", WriteRecord(3, RecordKind.PUT_IN_DATA)),
        ("start 3, deletion", WriteRecord(3, RecordKind.DELETE)),
        (
            "start 3, lock only: nothing changed since 2",
            WriteRecord(3, RecordKind.LOCK_ONLY, last_change=2),
        ),
        ("start 3, lock only, newest change unknown", WriteRecord(3, RecordKind.LOCK_ONLY)),
    ],
)
def test_the_documented_write_records_are_the_real_ones(example: str, record: WriteRecord) -> None:
    assert f"| {example} | `{record.encode().hex(' ')}` |" in documented("Write record")


# The names of hidden columns, and which cells they belong to.

NAMES = st.binary(max_size=12) | st.text("\0\x01ab", max_size=6).map(str.encode)
STARTS = st.integers(0, 2**64 - 1)


@given(NAMES, STARTS)
def test_a_read_lock_names_its_column_and_its_transaction(column: bytes, start: int) -> None:
    name = read_lock_column(column, start)
    assert (locked_column(name), int.from_bytes(name[-8:], "big")) == (column, start)
    assert observed_column(name) is None
    assert locked_column(acknowledgement_column(b"index", column)) is None


@given(NAMES, NAMES)
def test_an_acknowledgement_names_its_observer_and_the_observed_column(
    observer: bytes, column: bytes
) -> None:
    name = acknowledgement_column(observer, column)
    assert (acknowledging_observer(name), observed_column(name)) == (observer, column)


@given(NAMES)
def test_other_names_are_no_read_locks(name: bytes) -> None:
    assert locked_column(name) is None
    assert locked_column(read_lock_column(name, 1)[:-1]) is None
    assert locked_column(read_lock_column(name, 1) + b"x") is None


@given(NAMES, NAMES, STARTS)
def test_a_read_lock_is_found_from_its_cell_and_the_other_way_round(
    row: bytes, column: bytes, start: int
) -> None:
    cell = cell_prefix(row, column)
    hidden = cell_prefix(row, read_lock_column(column, start))
    assert locked_cell(hidden) == cell
    assert locked_cell(cell) is None
    prefix = read_locks_prefix(cell)
    assert prefix < hidden < prefix + AFTER_READ_LOCKS
    assert hidden.startswith(prefix)


@given(NAMES, NAMES, NAMES, STARTS)
def test_the_read_locks_of_two_columns_are_never_mixed(
    row: bytes, column: bytes, other: bytes, start: int
) -> None:
    hidden = cell_prefix(row, read_lock_column(other, start))
    found = hidden.startswith(read_locks_prefix(cell_prefix(row, column)))
    assert found == (column == other)


def test_the_documented_read_lock_is_the_real_one() -> None:
    name = read_lock_column(b"balance", 3).hex(" ")
    assert f"`balance`, start 3: `{name}`" in documented("Read locks")
