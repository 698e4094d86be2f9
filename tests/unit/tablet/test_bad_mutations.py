"""A malformed mutation is refused by the name of its field, and nothing of its request happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import InvalidArgument, SchemaChanged, TabletMoved
from percolator.formats.records import RecordKind
from percolator.schema import ROW_BYTES_MAX
from percolator.tablet.state import TabletIdentity
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    DATA,
    LOCK,
    NOTIFY,
    ROLLBACK,
    WRITE,
    Rig,
    condition,
    delete,
    delete_if,
    lock_record,
    mutation,
    put,
    write_record,
    written,
)

HOUR = 3_600_000 << 18
NOW = 1_800_000_000_000 << 18  # the virtual clock's
MARGIN = 60_000 << 18  # virtual time advances
ANY_SPACE: Any = 99

SMALL: dict[str, Any] = {
    "row_bytes_max": 8,
    "column_bytes_max": 8,
    "qualifier_bytes_max": 8,
    "value_bytes_max": 64,
    "conditions_max": 2,
    "changes_max": 2,
}


def check(**fields: Any) -> pb.Mutation:
    fields = {"space": WRITE, "expectation": ABSENT} | fields
    return mutation(b"row", conditions=[pb.Condition(**fields)])


BAD: list[tuple[str, pb.Mutation]] = [
    ("row", mutation(b"r" * 9, put(LOCK, lock_record(5)))),
    ("row", mutation(b"r" * 9, put(LOCK, lock_record(5)), conditions=[condition(LOCK, ABSENT)])),
    ("row", mutation(b"r" * 9, put(DATA, b"v", 5))),
    ("row", mutation(b"r" * 9, put(WRITE, write_record(5), 6))),
    ("row", mutation(b"r" * (ROW_BYTES_MAX + 1))),
    ("column", mutation(b"row", column=b"c" * 9)),
    ("not_below", mutation(b"row", not_below=NOW + HOUR + MARGIN)),
    ("conditions", mutation(b"row", conditions=[condition(LOCK, ABSENT)] * 3)),
    ("conditions[0].space", check(space=0)),
    ("conditions[0].space", check(space=ANY_SPACE)),
    ("conditions[0].expectation", check(expectation=0)),
    ("conditions[0].expectation", check(expectation=ANY_SPACE)),
    ("conditions[0].until_timestamp", check(from_timestamp=5, until_timestamp=5)),
    ("conditions[0].until_timestamp", check(from_timestamp=5, until_timestamp=4)),
    ("conditions[0].from_timestamp", check(space=LOCK, from_timestamp=1)),
    ("conditions[0].from_timestamp", check(space=LOCK, until_timestamp=1)),
    ("conditions[0].qualifier", check(qualifier=b"f")),
    ("changes", mutation(b"row", *(put(ROLLBACK, b"", time) for time in (1, 2, 3)))),
    ("changes", mutation(b"row", put(ROLLBACK, b"", 1), delete(ROLLBACK, 1))),
    ("changes", mutation(b"row", delete(LOCK), delete_if(LOCK, b"x"))),
    ("changes", mutation(b"row", put(NOTIFY, b"", 1, b"f"), put(NOTIFY, b"", 1, b"f"))),
    ("changes[0].kind", mutation(b"row", pb.Change(space=LOCK))),
    ("changes[0].kind", mutation(b"row", pb.Change(space=LOCK, kind=ANY_SPACE))),
    ("changes[0].space", mutation(b"row", put(ANY_SPACE, b"", 1))),
    ("changes[0].space", mutation(b"row", pb.Change(kind=pb.Change.KIND_PUT, timestamp=1))),
    ("changes[0].timestamp", mutation(b"row", put(LOCK, lock_record(5), 5))),
    ("changes[0].timestamp", mutation(b"row", put(ROLLBACK))),
    ("changes[0].timestamp", mutation(b"row", put(ROLLBACK, b"", NOW + HOUR + MARGIN))),
    ("changes[0].timestamp", mutation(b"row", put(ROLLBACK, b"", 2**64 - 1))),
    ("changes[0].timestamp", mutation(b"row", put(WRITE, write_record(20), 20))),
    ("changes[0].value", mutation(b"row", put(DATA, b"v" * 65, 5))),
    ("changes[0].value", mutation(b"row", put(LOCK, lock_record(5)[:20]))),
    ("changes[0].value", mutation(b"row", put(LOCK, bytes(21)))),
    ("changes[0].value", mutation(b"row", put(WRITE, write_record(5)[:8], 6))),
    ("changes[0].value", mutation(b"row", put(WRITE, bytes(9), 6))),
    ("changes[0].qualifier", mutation(b"row", put(NOTIFY, b"", 5))),
    ("changes[0].qualifier", mutation(b"row", put(NOTIFY, b"", 5, b"q" * 9))),
    ("changes[0].qualifier", mutation(b"row", put(DATA, b"", 5, b"f"))),
]


@pytest.mark.parametrize(("field", "bad"), BAD)
async def test_the_field_is_named_and_nothing_is_applied(field: str, bad: pb.Mutation) -> None:
    rig = await Rig(**SMALL).open()
    with pytest.raises(InvalidArgument) as caught:
        await rig.mutate(written(b"before", 5, 6), bad, written(b"behind", 5, 6))
    assert caught.value.field == f"mutations[1].{field}"
    await asyncio.sleep(10)
    assert await rig.cells(WRITE) == []
    assert await rig.cells(LOCK) == []


async def test_a_long_row_can_be_asked_rolled_back_and_unlocked() -> None:
    """It may be the primary of locks on other cells: without an answer, they would stay."""
    rig = await Rig(**SMALL).open()
    await rig.apply(
        mutation(b"r" * 9, conditions=[condition(LOCK, ABSENT)]),
        mutation(b"r" * 9, delete_if(LOCK, b"x"), put(ROLLBACK, b"", 5)),
    )
    assert [cell.row for cell in await rig.cells(ROLLBACK)] == [b"r" * 9]


async def test_rows_outside_the_tablet_are_refused() -> None:
    identity = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"b", end=b"d")
    rig = await Rig(identity=identity).open()
    await rig.apply(written(b"b", 5, 6), written(b"c\xff\xff", 5, 6))
    for row in (b"", b"a\xff", b"d", b"d\0", b"z"):
        with pytest.raises(InvalidArgument) as caught:
            await rig.mutate(written(row, 5, 6))
        assert caught.value.field == "mutations[0].row"
        with pytest.raises(InvalidArgument) as caught:
            await rig.read(row, 30)
        assert caught.value.field == "reads[0].row"


async def test_a_request_without_mutations_is_refused() -> None:
    rig = await Rig().open()
    with pytest.raises(InvalidArgument):
        await rig.mutate()


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (pb.TabletTarget(tablet_id=9, epoch=2, schema_version=3), TabletMoved),
        (pb.TabletTarget(tablet_id=1, epoch=1, schema_version=3), TabletMoved),
        (pb.TabletTarget(tablet_id=1, epoch=3, schema_version=3), TabletMoved),
        (pb.TabletTarget(tablet_id=1, epoch=2, schema_version=2), SchemaChanged),
        (pb.TabletTarget(tablet_id=1, epoch=2, schema_version=4), SchemaChanged),
    ],
)
async def test_a_request_for_another_tablet_epoch_or_schema_is_refused(
    target: pb.TabletTarget, error: type[Exception]
) -> None:
    rig = await Rig().open()
    mutations = pb.MutationBatch(target=target, mutations=[written(b"a", 5, 6)])
    with pytest.raises(error):
        await rig.tablet.mutate(mutations, deadline_seconds=1e9)
    with pytest.raises(error):
        await rig.tablet.read(pb.ReadBatch(target=target))
    with pytest.raises(error):
        await anext(rig.tablet.scan(pb.ScanRequest(target=target, timestamp=5, all_columns=True)))
    with pytest.raises(error):
        await anext(rig.tablet.scan_cells(pb.ScanCellsRequest(target=target, space=WRITE)))


async def test_what_is_within_the_limits_is_stored() -> None:
    rig = await Rig(**SMALL).open()
    largest = mutation(b"r" * 8, put(DATA, b"v" * 64, 5), column=b"c" * 8)
    empty = mutation(b"", put(WRITE, write_record(5, b"", RecordKind.LOCK_ONLY), 6), column=b"")
    assert [result.outcome for result in await rig.mutate(largest, empty)] == [APPLIED, APPLIED]
    [cell] = await rig.cells(DATA)
    assert (cell.row, cell.column, cell.value) == (b"r" * 8, b"c" * 8, b"v" * 64)
