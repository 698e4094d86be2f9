"""A malformed mutation is refused by the name of its field, and nothing of its request happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    SchemaChanged,
    TabletMoved,
)
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    WRITE_HEADER,
    LockRecord,
    RecordKind,
)
from percolator.protocol import steps
from percolator.protocol.steps import raise_lock, replace_lock
from percolator.schema import ROW_BYTES_MAX
from percolator.tablet.state import TabletIdentity
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    BEGINS_IF_PRESENT,
    COLUMN,
    DATA,
    EQUALS,
    LOCK,
    NOT_EXECUTED,
    NOTIFY,
    PRESENT,
    REFUSED,
    ROLLBACK,
    TARGET,
    WRITE,
    Rig,
    condition,
    delete,
    delete_if,
    lock_record,
    mutation,
    own,
    prewrite,
    put,
    read_lock,
    roll_back,
    started,
    under_way,
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
    with refused(f"mutations[1].{field}"):
        await rig.mutate(written(b"before", 5, 6), bad, written(b"behind", 5, 6))
    await asyncio.sleep(10)
    assert (await rig.cells(WRITE), await rig.cells(LOCK)) == ([], [])


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
        with refused("reads[0].row"):
            await rig.read(row, 30)


async def test_a_request_without_mutations_is_refused(rig: Rig) -> None:
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
    rig: Rig, target: pb.TabletTarget, error: type[Exception]
) -> None:
    mutations = pb.MutationBatch(target=target, mutations=[written(b"a", 5, 6)])
    scan = pb.ScanRequest(target=target, timestamp=5, all_columns=True)
    for asking in (
        rig.tablet.mutate(mutations, deadline_seconds=1e9),
        rig.tablet.read(pb.ReadBatch(target=target)),
        anext(rig.tablet.scan(scan)),
        anext(rig.tablet.scan_cells(pb.ScanCellsRequest(target=target, space=WRITE))),
    ):
        with pytest.raises(error):
            await asking


async def test_what_is_within_the_limits_is_stored() -> None:
    rig = await Rig(**SMALL).open()
    largest = mutation(b"r" * 8, put(DATA, b"v" * 64, 5), column=b"c" * 8)
    empty = mutation(b"", put(WRITE, write_record(5, b"", RecordKind.LOCK_ONLY), 6), column=b"")
    assert [result.outcome for result in await rig.mutate(largest, empty)] == [APPLIED, APPLIED]
    [cell] = await rig.cells(DATA)
    assert (cell.row, cell.column, cell.value) == (b"r" * 8, b"c" * 8, b"v" * 64)


# Every expectation, in every space, and the cell that each failure names.

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
    assert (result.outcome, result.failed_condition) == (REFUSED, 1)
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
    await rig.apply(
        *(mutation(row, conditions=absent, column=column) for row, column in neighbours)
    )


@pytest.mark.parametrize(
    ("space", "at", "prefix", "gone"),
    [
        (LOCK, 0, own(10), True),
        (LOCK, 0, own(11), False),
        (LOCK, 0, WHOLE, True),
        (LOCK, 0, WHOLE + b"x", False),
        (LOCK, 0, b"", True),
        (WRITE, 7, own(5), True),
        (WRITE, 7, own(2), False),
    ],
)
async def test_a_cell_is_deleted_only_by_a_change_that_names_its_prefix(
    space: cells_pb2.Space, at: int, prefix: bytes, gone: bool
) -> None:
    """A rollback must not remove the lock of another transaction."""
    rig = await filled()
    stored = await rig.cells(space)
    await rig.apply(mutation(ROW, delete_if(space, prefix, at)))
    left = [cell for cell in stored if cell.timestamp != at or not gone]
    assert await rig.cells(space) == left


# Steps and reads in parallel lists are checked as strictly as those that come one by one.

START, LISTED_COMMIT = NOW + 5, NOW + 6
RECORD = WRITE_HEADER.pack(START, KIND_PUT) + b"value"


def _prewrites(*rows: bytes, **changed: Any) -> pb.StepList:
    fields: dict[str, Any] = {
        "kinds": [pb.StepList.KIND_PREWRITE] * len(rows),
        "rows": rows,
        "columns": [COLUMN] * len(rows),
        "values": [lock_record(START)] * len(rows),
        "start_timestamps": [START] * len(rows),
        "commit_timestamps": [0] * len(rows),
        "min_commit_timestamps": [0] * len(rows),
    }
    return pb.StepList(**fields | changed)


def _commit_list(**changed: Any) -> pb.StepList:
    fields: dict[str, Any] = {
        "kinds": [pb.StepList.KIND_COMMIT_PRIMARY],
        "values": [RECORD],
        "commit_timestamps": [LISTED_COMMIT],
        "min_commit_timestamps": [START + 1],
    }
    return _prewrites(b"a", **fields | changed)


def _write(commit: int, start: int = 0, **changed: Any) -> pb.StepList:
    return _commit_list(
        kinds=[pb.StepList.KIND_WRITE],
        values=[WRITE_HEADER.pack(commit - 1, KIND_PUT)],
        start_timestamps=[start],
        commit_timestamps=[commit],
        **changed,
    )


async def _apply(rig: Rig, steps: pb.StepList) -> pb.MutationBatchResult:
    batch = pb.MutationBatch(target=TARGET, steps=steps)
    return await rig.tablet.mutate(batch, deadline_seconds=1e9)


async def test_only_the_steps_that_were_not_applied_are_in_the_answer(rig: Rig) -> None:
    await rig.apply(written(b"b", START, LISTED_COMMIT))
    answer = await _apply(rig, _prewrites(b"a", b"b", b"c"))
    assert answer.mutations == 3
    [refused] = answer.unapplied
    assert (refused.mutation, refused.result.outcome) == (1, REFUSED)
    assert refused.result.cell.row == b"b"


async def test_a_lock_and_a_commit_in_lists_are_read_like_others(rig: Rig) -> None:
    for listed in (_prewrites(b"a"), _commit_list()):
        answer = await _apply(rig, listed)
        assert (answer.mutations, len(answer.unapplied)) == (1, 0)
    assert await rig.value(b"a", LISTED_COMMIT) == b"value"


async def test_a_write_outside_of_transactions_is_refused_by_one_that_is_as_new(rig: Rig) -> None:
    assert not (await _apply(rig, _write(LISTED_COMMIT))).unapplied
    assert [one.mutation for one in (await _apply(rig, _write(LISTED_COMMIT))).unapplied] == [0]
    assert not (await _apply(rig, _write(LISTED_COMMIT + 1))).unapplied


BAD_LISTS: list[tuple[str, pb.StepList]] = [
    ("steps", _prewrites(b"a", rows=[])),
    ("steps", _prewrites(b"a", min_commit_timestamps=[])),
    ("steps.kinds[0]", _prewrites(b"a", kinds=[0])),
    ("steps.kinds[0]", _prewrites(b"a", kinds=[5])),
    ("steps.rows[1]", _prewrites(b"a", b"r" * 5000)),
    ("steps.columns[0]", _prewrites(b"a", columns=[b"c" * 1100])),
    ("steps.values[0]", _prewrites(b"a", values=[b"x"])),
    ("steps.values[0]", _prewrites(b"a", values=[bytes(5 << 20)])),
    ("steps.values[0]", _prewrites(b"a", values=[lock_record(START + 1)])),
    ("steps.values[0]", _commit_list(values=[b"x"])),
    ("steps.values[0]", _commit_list(values=[WRITE_HEADER.pack(START - 1, KIND_PUT)])),
    ("steps.start_timestamps[0]", _prewrites(b"a", start_timestamps=[0])),
    ("steps.start_timestamps[0]", _write(LISTED_COMMIT, START)),
    ("steps.commit_timestamps[0]", _prewrites(b"a", commit_timestamps=[LISTED_COMMIT])),
    ("steps.commit_timestamps[0]", _commit_list(commit_timestamps=[0])),
    ("steps.commit_timestamps[0]", _commit_list(commit_timestamps=[START])),
    ("steps.commit_timestamps[0]", _commit_list(commit_timestamps=[NOW + 2 * HOUR])),
    ("steps.observed", _commit_list(observed=[pb.ObservedColumn(column=COLUMN, observers=[b""])])),
]


@pytest.mark.parametrize(("field", "steps"), BAD_LISTS)
async def test_bad_steps_are_refused_by_the_name_of_their_list(
    rig: Rig, field: str, steps: pb.StepList
) -> None:
    with refused(field):
        await _apply(rig, steps)
    assert await rig.cells(LOCK) == await rig.cells(WRITE) == []


async def test_a_long_row_can_be_committed_once_it_is_locked() -> None:
    """The limit may have been lowered since, and other cells may wait for the outcome."""
    rig = await Rig(row_bytes_max=5000).open()
    await _apply(rig, _prewrites(b"r" * 5000))
    rig = await Rig(disk=rig.disk).open()
    assert not (await _apply(rig, _commit_list(rows=[b"r" * 5000]))).unapplied
    longer, outside = _commit_list(rows=[b"r" * 65_537]), _write(LISTED_COMMIT, rows=[b"r" * 5000])
    for listed, said in ((longer, "65537 bytes"), (outside, "5000 bytes")):
        with pytest.raises(InvalidArgument, match=rf"steps.rows\[0\]: {said}"):
            await _apply(rig, listed)


async def test_the_lock_of_a_long_row_can_be_replaced_and_raised() -> None:
    """Or a commit that takes long would be taken for dead once its tablet has a server that allows
    less, and readers could not push it."""
    row, seen = b"r" * 5000, lock_record(START)
    rig = await Rig(row_bytes_max=5000).open()
    await _apply(rig, _prewrites(row))
    rig = await Rig(disk=rig.disk).open()
    longer, higher = (
        replace(LockRecord.decode(seen), min_commit_timestamp=START + least, ttl_milliseconds=9_999)
        for least in (1, 20)
    )
    await rig.apply(replace_lock(row, COLUMN, LockRecord.decode(seen).prefix, longer.encode()))
    await rig.apply(raise_lock(row, COLUMN, START, START + 19, higher.encode()))
    assert [cell.value for cell in await rig.cells(LOCK)] == [higher.encode()]


async def test_a_group_has_no_steps(rig: Rig) -> None:
    batch = pb.MutationBatch(target=TARGET, steps=_prewrites(b"a"))
    with pytest.raises(InvalidArgument, match="a group has mutations"):
        await rig.tablet.mutate_together(batch, deadline_seconds=1e9)
    assert await rig.cells(LOCK) == []


async def test_steps_are_numbered_after_the_mutations_of_their_batch(rig: Rig) -> None:
    await rig.apply(written(b"c", START, LISTED_COMMIT))
    batch = pb.MutationBatch(
        target=TARGET,
        mutations=[written(b"a", START, LISTED_COMMIT), written(b"b", START, LISTED_COMMIT)],
        steps=_prewrites(b"d", b"c"),
    )
    answer = await rig.tablet.mutate(batch, deadline_seconds=1e9)
    assert (answer.mutations, [one.mutation for one in answer.unapplied]) == (4, [3])
    assert [cell.row for cell in await rig.cells(WRITE)] == [b"a", b"b", b"c"]
    assert [cell.row for cell in await rig.cells(LOCK)] == [b"d"]


async def test_a_batch_with_an_invalid_step_changes_nothing(rig: Rig) -> None:
    batch = pb.MutationBatch(
        target=TARGET,
        mutations=[written(b"a", START, LISTED_COMMIT)],
        steps=_prewrites(b"b", kinds=[9]),
    )
    with pytest.raises(InvalidArgument, match=r"steps\.kinds\[0\]"):
        await rig.tablet.mutate(batch, deadline_seconds=1e9)
    assert await rig.cells(WRITE) == []


async def test_cells_in_lists_are_read_as_one_by_one(rig: Rig) -> None:
    await rig.apply(
        written(b"a", START, LISTED_COMMIT, b"of a"), written(b"c", START, LISTED_COMMIT, b"of c")
    )
    await _apply(rig, _prewrites(b"d", values=[lock_record(START)]))
    rows, at = (
        [b"a", b"b", b"c", b"d", b"a"],
        [LISTED_COMMIT, LISTED_COMMIT, LISTED_COMMIT + 1, LISTED_COMMIT, START],
    )
    reads = [
        pb.RowRead(row=row, columns=[COLUMN], timestamp=timestamp)
        for row, timestamp in zip(rows, at, strict=True)
    ]
    cells = pb.CellReads(rows=rows, columns=[COLUMN] * 5, timestamps=at)
    alone = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
    listed = await rig.tablet.read(pb.ReadBatch(target=TARGET, cells=cells))
    assert (list(alone.found.reads), [lock.read for lock in alone.locks]) == ([0, 2], [3])
    assert (listed.reads, listed) == (5, alone)
    both = pb.ReadBatch(target=TARGET, reads=reads[:2], cells=cells)
    answer = await rig.tablet.read(both)
    assert (answer.reads, list(answer.found.reads)) == (7, [0, 2, 4])
    assert [lock.read for lock in answer.locks] == [5]


async def test_lists_of_cells_that_differ_in_number_are_refused(rig: Rig) -> None:
    cells = pb.CellReads(rows=[b"a"], columns=[COLUMN], timestamps=[])
    with pytest.raises(InvalidArgument, match="differ in number"):
        await rig.tablet.read(pb.ReadBatch(target=TARGET, cells=cells))


# Groups of mutations that take effect at one moment or not at all, and how a lock is compared.

COMMIT = 50


def _commit(row: bytes, start: int = 10, commit: int = COMMIT) -> pb.Mutation:
    record = WRITE_HEADER.pack(start, KIND_LOCK_ONLY)
    return steps.commit_part(row, b"balance", start, commit, record)


async def _together(rig: Rig, *mutations: pb.Mutation, seconds: float = 3600.0) -> list[int]:
    response = await rig.tablet.mutate_together(
        pb.MutationBatch(target=TARGET, mutations=mutations),
        deadline_seconds=rig.clock.monotonic_seconds() + seconds,
    )
    return [result.outcome for result in response.results]


async def _locked(*rows: bytes) -> Rig:
    rig = await Rig().open()
    await rig.apply(*(prewrite(row, 10) for row in rows))
    return rig


async def test_all_are_applied_with_one_write() -> None:
    rig = await _locked(b"a", b"b", b"c")
    before = rig.disk.writes  # type: ignore[attr-defined]
    assert await _together(rig, _commit(b"a"), _commit(b"b"), _commit(b"c")) == [APPLIED] * 3
    assert rig.disk.writes == before + 1  # type: ignore[attr-defined]
    assert [cell.timestamp for cell in await rig.cells(WRITE)] == [COMMIT] * 3
    assert not await rig.cells(LOCK)


async def test_if_one_is_refused_none_is_applied() -> None:
    rig = await _locked(b"a", b"b", b"c")
    await rig.apply(roll_back(b"b", 10))
    outcomes = await _together(rig, _commit(b"a"), _commit(b"b"), _commit(b"c"))
    assert outcomes == [NOT_EXECUTED, REFUSED, NOT_EXECUTED]
    assert not await rig.cells(WRITE)
    assert (len(await rig.cells(LOCK)), len(await rig.cells(ROLLBACK))) == (2, 1)


async def test_a_repeated_group_is_refused_by_its_own_commits() -> None:
    rig = await _locked(b"a", b"b")
    await _together(rig, _commit(b"a"), _commit(b"b"))
    assert await _together(rig, _commit(b"a"), _commit(b"b")) == [REFUSED] * 2


@pytest.mark.parametrize(
    ("start", "pushed_to", "outcome"),
    [(10, COMMIT, APPLIED), (10, COMMIT + 1, REFUSED), (11, 0, REFUSED)],
    ids=["pushed up to the commit", "pushed above", "of another transaction"],
)
async def test_a_lock_may_be_pushed_up_to_the_commit_and_must_be_its_own(
    rig: Rig, start: int, pushed_to: int, outcome: int
) -> None:
    await rig.apply(prewrite(b"a", start, min_commit_timestamp=pushed_to))
    assert await _together(rig, _commit(b"a")) == [outcome]


async def test_a_group_waits_for_the_batch_in_progress() -> None:
    rig = await _locked(b"a")
    rolling = started(rig, roll_back(b"a", 10))
    await asyncio.sleep(0.5)  # its batch is on its way to the disk
    assert await _together(rig, _commit(b"a")) == [REFUSED]
    await rolling


async def test_the_outcome_is_unknown_when_the_tablet_was_lost() -> None:
    rig = await _locked(b"a")
    rig.owner = False
    with pytest.raises(ExecutionUnknown):
        await _together(rig, _commit(b"a"))
    assert rig.closed


async def test_the_outcome_is_unknown_when_the_disk_fails() -> None:
    rig = await _locked(b"a")
    rig.disk.failure = OSError("broken")  # type: ignore[attr-defined]
    with pytest.raises(ExecutionUnknown, match="broken"):
        await _together(rig, _commit(b"a"))
    assert rig.closed


async def test_what_cannot_be_judged_is_not_executed() -> None:
    rig = await _locked(b"a")
    for asking, error, said in (
        (_together(rig, _commit(b"a"), _commit(b"a")), InvalidArgument, "two mutations of one"),
        (_together(rig), InvalidArgument, "none"),
        (_together(rig, _commit(b"a"), seconds=0.0), NotExecuted, "deadline"),
    ):
        with pytest.raises(error, match=said):
            await asking
    writing = await under_way(rig.mutate(prewrite(b"b", 10)), seconds=0.1)
    begun = asyncio.get_running_loop().time()
    with pytest.raises(NotExecuted, match="deadline"):
        await _together(rig, _commit(b"a"), seconds=0.5)
    assert asyncio.get_running_loop().time() - begun == pytest.approx(0.5)
    await writing
    assert not await rig.cells(WRITE)
    await rig.tablet.set_schema_version(4)
    with pytest.raises(SchemaChanged):
        await _together(rig, _commit(b"a"))


async def test_a_cancelled_caller_does_not_tear_the_group() -> None:
    rig = await _locked(b"a", b"b")
    (await under_way(_together(rig, _commit(b"a"), _commit(b"b")))).cancel()
    await asyncio.sleep(2.0)
    assert len(await rig.cells(WRITE)) == 2
    assert not await rig.cells(LOCK)


@pytest.mark.parametrize("reader_first", [False, True])
async def test_a_cell_is_not_written_and_read_locked_in_one_group(
    rig: Rig, reader_first: bool
) -> None:
    """Each would be judged before the other is durable, and both would pass."""
    steps_ = [prewrite(b"a", 10), read_lock(b"a", 12)]
    with pytest.raises(InvalidArgument, match="a cell is written and read-locked"):
        await _together(rig, *(reversed(steps_) if reader_first else steps_))
    assert not await rig.cells(LOCK)
    readers = [read_lock(b"a", 12), read_lock(b"a", 14), prewrite(b"b", 10)]
    assert await _together(rig, *readers) == [APPLIED] * 3
