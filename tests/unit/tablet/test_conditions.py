"""Every expectation, in every space, and the cell that each failure names."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    BEGINS_IF_PRESENT,
    COLUMN,
    EQUALS,
    LOCK,
    NOTIFY,
    PRESENT,
    REFUSED,
    ROLLBACK,
    WRITE,
    Rig,
    condition,
    delete_if,
    lock_record,
    mutation,
    own,
    put,
    write_record,
)

ROW = b"row"
SEEN = own(10) + own(11) + (3000).to_bytes(4, "big")
PUSHED = own(10) + own(99) + (3000).to_bytes(4, "big")
WHOLE = lock_record(10, b"value")

Case = tuple[pb.Condition, int | None]
"""A condition, and the timestamp of the cell that fails it: None if it holds, -1 for no cell."""


def cases(space: cells_pb2.Space, *rows: tuple[Any, ...]) -> list[Case]:
    found = []
    for expectation, fails, *fields in rows:
        found.append((condition(space, expectation, **(fields[0] if fields else {})), fails))
    return found


# The row has a lock of 10, writes (2, 4], (5, 7] and (8, 9] (start, commit], a marker of 3 and a
# notification of f at 4.
CASES: list[Case] = [
    *cases(
        LOCK,
        (ABSENT, 0),
        (ABSENT, 0, {"prefix": own(10)}),
        (ABSENT, None, {"prefix": own(11)}),
        (ABSENT, 0, {"prefix": WHOLE}),
        (ABSENT, None, {"prefix": WHOLE + b"more"}),
        (PRESENT, None),
        (PRESENT, None, {"prefix": SEEN}),
        (PRESENT, 0, {"prefix": PUSHED}),
        (PRESENT, None, {"prefix": WHOLE[:-1]}),
        (EQUALS, None, {"prefix": WHOLE}),
        (EQUALS, 0, {"prefix": WHOLE[:-1]}),
        (EQUALS, 0, {"prefix": own(10)}),
        (BEGINS_IF_PRESENT, None, {"prefix": own(10), "required": SEEN}),
        (BEGINS_IF_PRESENT, 0, {"prefix": own(10), "required": PUSHED}),
        (BEGINS_IF_PRESENT, None, {"prefix": own(11), "required": PUSHED}),
        (BEGINS_IF_PRESENT, None, {"prefix": own(10), "required": WHOLE}),
        (BEGINS_IF_PRESENT, 0, {"prefix": own(10), "required": WHOLE + b"more"}),
    ),
    *cases(
        WRITE,
        (ABSENT, 4),
        (ABSENT, 7, {"from_timestamp": 5}),
        (ABSENT, 9, {"from_timestamp": 9}),
        (ABSENT, None, {"from_timestamp": 10}),
        (ABSENT, 4, {"until_timestamp": 5}),
        (ABSENT, None, {"until_timestamp": 4}),
        (ABSENT, None, {"from_timestamp": 5, "until_timestamp": 7}),
        (ABSENT, 7, {"from_timestamp": 7, "until_timestamp": 8}),
        (ABSENT, 4, {"from_timestamp": 2, "prefix": own(2)}),
        (ABSENT, 9, {"from_timestamp": 8, "prefix": own(8)}),
        (ABSENT, None, {"from_timestamp": 3, "prefix": own(3)}),
        (ABSENT, 9, {"prefix": own(8)}),
        (PRESENT, None),
        (PRESENT, None, {"from_timestamp": 9}),
        (PRESENT, -1, {"from_timestamp": 10}),
        (PRESENT, 9, {"prefix": own(3)}),
        (PRESENT, 7, {"prefix": own(3), "until_timestamp": 9}),
        (PRESENT, None, {"prefix": own(2)}),
        (EQUALS, None, {"prefix": write_record(8, b"c")}),
        (EQUALS, None, {"prefix": write_record(5, b"b")}),
        (EQUALS, 9, {"prefix": write_record(5)}),
        (EQUALS, 9, {"prefix": own(3)}),
        (EQUALS, -1, {"prefix": own(3), "until_timestamp": 4}),
        (BEGINS_IF_PRESENT, None, {"from_timestamp": 10, "required": b"x"}),
        (BEGINS_IF_PRESENT, 9, {"required": own(5)}),
        (BEGINS_IF_PRESENT, None, {"prefix": own(5), "required": write_record(5, b"b")}),
        (BEGINS_IF_PRESENT, 7, {"prefix": own(5), "required": write_record(5, b"x")}),
        (BEGINS_IF_PRESENT, 7, {"required": own(2), "until_timestamp": 9}),
    ),
    *cases(
        ROLLBACK,
        (ABSENT, 3),
        (ABSENT, 3, {"from_timestamp": 3, "until_timestamp": 4}),
        (ABSENT, None, {"from_timestamp": 4, "until_timestamp": 5}),
        (ABSENT, None, {"from_timestamp": 2, "until_timestamp": 3}),
        (PRESENT, None, {"from_timestamp": 3, "until_timestamp": 4}),
        (PRESENT, -1, {"from_timestamp": 4}),
        (EQUALS, None),
    ),
    *cases(
        NOTIFY,
        (ABSENT, 4, {"qualifier": b"f"}),
        (ABSENT, None, {"qualifier": b"g"}),
        (ABSENT, None),
        (PRESENT, None, {"qualifier": b"f", "from_timestamp": 4, "until_timestamp": 5}),
        (PRESENT, -1, {"qualifier": b"f", "from_timestamp": 5}),
    ),
]


async def filled() -> Rig:
    rig = await Rig().open()
    await rig.apply(
        mutation(
            ROW,
            put(LOCK, WHOLE),
            put(WRITE, write_record(2, b"a"), 4),
            put(WRITE, write_record(5, b"b"), 7),
            put(WRITE, write_record(8, b"c"), 9),
            put(ROLLBACK, b"", 3),
            put(NOTIFY, b"", 4, b"f"),
        )
    )
    return rig


@pytest.mark.parametrize(("asked", "fails"), CASES)
async def test_a_condition_holds_or_names_the_cell_that_fails_it(
    asked: pb.Condition, fails: int | None
) -> None:
    rig = await filled()
    always = condition(LOCK, PRESENT)
    [result] = await rig.mutate(mutation(ROW, conditions=[always, asked]))
    if fails is None:
        assert result.outcome == APPLIED
        return
    assert result.outcome == REFUSED
    assert result.failed_condition == 1
    assert result.HasField("cell") == (fails >= 0)
    if fails >= 0:
        [stored] = [
            cell
            for cell in await rig.cells(asked.space)
            if cell.timestamp == fails and cell.qualifier == asked.qualifier
        ]
        assert result.cell == stored


async def test_conditions_are_about_one_column_of_one_row() -> None:
    rig = await filled()
    absent = [condition(space, ABSENT) for space in (LOCK, WRITE, ROLLBACK)]
    neighbours = [(b"ro", COLUMN), (b"row\0", COLUMN), (ROW, b"balanc"), (ROW, b"balance\0")]
    for row, column in neighbours:
        [result] = await rig.mutate(mutation(row, conditions=absent, column=column))
        assert result.outcome == APPLIED


@pytest.mark.parametrize(
    ("prefix", "gone"),
    [(own(10), True), (own(11), False), (WHOLE, True), (WHOLE + b"x", False), (b"", True)],
)
async def test_a_lock_is_deleted_only_by_a_change_that_names_its_prefix(
    prefix: bytes, gone: bool
) -> None:
    """A rollback must not remove the lock of another transaction."""
    rig = await filled()
    await rig.apply(mutation(ROW, delete_if(LOCK, prefix)))
    assert (await rig.cells(LOCK) == []) == gone


@pytest.mark.parametrize(("prefix", "gone"), [(own(5), True), (own(2), False)])
async def test_any_cell_can_be_deleted_by_prefix(prefix: bytes, gone: bool) -> None:
    rig = await filled()
    await rig.apply(mutation(ROW, delete_if(WRITE, prefix, 7)))
    assert ([cell.timestamp for cell in await rig.cells(WRITE)] == [9, 4]) == gone
