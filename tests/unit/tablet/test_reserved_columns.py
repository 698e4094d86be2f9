"""Columns that begin with 00 hold observers' notes, and are read only when named."""

from __future__ import annotations

import pytest

from percolator import Table, codecs
from percolator.errors import SchemaError
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    LOCK,
    TARGET,
    WRITE,
    Rig,
    lock_record,
    mutation,
    put,
    write_record,
)

RESERVED = b"\x00ack\x00"
VISIBLE = b"\x01"


async def rig_with(*columns: bytes) -> Rig:
    """One row with a value in each of these columns."""
    rig = await Rig().open()
    await rig.apply(*(mutation(b"r", put(WRITE, write_record(5, c), 6), column=c) for c in columns))
    return rig


async def read_all(rig: Rig) -> pb.ReadBatchResult:
    read = pb.RowRead(row=b"r", all_columns=True, timestamp=9)
    return await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))


async def test_all_columns_means_all_but_the_reserved_ones() -> None:
    rig = await rig_with(b"", RESERVED, b"\0", VISIBLE, b"a\0")
    assert list((await read_all(rig)).found.columns) == [b"", VISIBLE, b"a\0"]
    for reverse in (False, True):
        (page,) = await rig.scan(9, reverse=reverse)
        assert list(page.found.columns) == [b"", VISIBLE, b"a\0"]


async def test_a_row_with_only_reserved_columns_is_not_a_row() -> None:
    rig = await rig_with(RESERVED)
    assert not (await read_all(rig)).found.columns
    (page,) = await rig.scan(9)
    assert not page.found.rows
    assert not page.HasField("rest")


async def test_a_read_that_names_a_reserved_column_gets_it() -> None:
    rig = await rig_with(RESERVED, VISIBLE)
    assert list((await rig.read(b"r", 9, RESERVED)).found.values) == [RESERVED]
    (page,) = await rig.scan(9, columns=[RESERVED])
    assert list(page.found.values) == [RESERVED]


async def test_a_lock_on_a_reserved_column_blocks_only_reads_that_name_it() -> None:
    """Otherwise, scans over rows with active observers would wait for their acknowledgements."""
    rig = await rig_with(VISIBLE)
    await rig.apply(mutation(b"r", put(LOCK, lock_record(4)), column=RESERVED))
    assert not (await read_all(rig)).locks
    (page,) = await rig.scan(9)
    assert not page.locks
    assert len((await rig.read(b"r", 9, RESERVED)).locks) == 1
    (page,) = await rig.scan(9, columns=[RESERVED])
    assert len(page.locks) == 1


async def test_many_versions_of_reserved_columns_do_not_end_a_page_early() -> None:
    rig = await rig_with(VISIBLE)
    for at in range(10, 60, 2):
        await rig.apply(mutation(b"r", put(WRITE, write_record(at), at + 1), column=RESERVED))
    assert list((await read_all(rig)).found.columns) == [VISIBLE]


def test_programs_cannot_name_a_reserved_column() -> None:
    for name in ("\0", b"\x00ack\x00f"):
        with pytest.raises(SchemaError, match="reserved"):
            Table("pages").column(name, codecs.text)
