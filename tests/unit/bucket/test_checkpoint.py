"""Bytes of batches and checkpoints are read as they were written, or refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.bucket.checkpoint import (
    Checkpoint,
    LoggedBatch,
    Position,
    StoredFile,
    put_changes,
)
from percolator.errors import StoreUnusable
from percolator.testing.memory_storage import MemoryBatch

CHANGES = st.lists(st.tuples(st.binary(), st.none() | st.binary()))
CHECKPOINT = Checkpoint(
    {"000005.ldb": StoredFile("tablets/1/table/t-1-000005.ldb", 7, 99)},
    {"MANIFEST-000004": b"\0\1manifest", "CURRENT": b"MANIFEST-000004\n"},
)


@given(CHANGES)
def test_a_batch_read_from_the_log_changes_what_it_changed_when_it_was_written(
    changes: list[tuple[bytes, bytes | None]],
) -> None:
    written = MemoryBatch()
    batch = LoggedBatch(written)
    for key, value in changes:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    read = MemoryBatch()
    assert put_changes(batch.body(), read) == len(changes)
    assert list(read.changes.items()) == list(written.changes.items())


def test_a_checkpoint_is_read_as_it_was_written() -> None:
    read = Checkpoint.decode(CHECKPOINT.encode(), "here")
    assert read == CHECKPOINT
    assert list(read.small) == list(CHECKPOINT.small)


@given(st.data())
def test_other_bytes_than_those_of_a_checkpoint_are_refused_by_name(data: st.DataObject) -> None:
    whole = CHECKPOINT.encode()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (flipped, whole[:at], whole + b"x"):
        with pytest.raises(StoreUnusable, match=r"^here is damaged"):
            Checkpoint.decode(damaged, "here")


@pytest.mark.parametrize("record", [b"", b"7", b"7 1 w", b"w 7 1 f", b"\xff"])
def test_a_position_that_cannot_be_read_is_none(record: bytes) -> None:
    assert Position.decode(record) is None
    position = Position.of("tablets/1", 7, "w", b"body")
    assert Position.decode(position.encode()) == position
