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
    lock_prefix,
)
from percolator.tablet.cells import (
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
    encode,
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
