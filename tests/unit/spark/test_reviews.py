"""What is left of the writes of a transaction, once it is known what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import percolator
from percolator import Receipt, Table, Timestamp, codecs
from percolator.aio import SharedTransaction
from percolator.errors import CellAddress, ConflictError, OutcomeUnknown, RowChanged
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.protocol.write_set import Write
from percolator.routing.cells import FoundCell
from percolator.spark.atomic_writer import commit_or_roll_back
from percolator.spark.transaction_writer import (
    BYTES_MAX,
    CELLS_MAX,
    FEW_CELLS,
    Condition,
    Versions,
    Writes,
    cut,
    differing,
    merged,
)

if TYPE_CHECKING:
    from percolator.spark.shapes import Cell


SINCE, BEGAN = Timestamp(100), Timestamp(200)
CONDITION = Condition("pages", SINCE, BEGAN, codecs.text)


def at(row: str, column: str = "title") -> CellAddress:
    return CellAddress(7, row.encode(), column.encode())


def put(value: str) -> tuple[int, bytes]:
    return KIND_PUT, value.encode()


DELETE = (KIND_DELETE, b"")


def found(timestamp: int, value: str | None) -> FoundCell:
    return FoundCell(timestamp, None if value is None else value.encode())


def test_rows_that_are_older_than_the_snapshot_are_written() -> None:
    writes = {at("a"): put("new"), at("b"): put("new")}
    there = {at("a"): found(100, "old"), at("a", "visits"): found(3, "1")}
    assert CONDITION.unwritten(writes, there, may_be_own=False) == writes


@pytest.mark.parametrize(
    "changed",
    [
        {at("b"): found(101, "other")},
        {at("b"): found(101, None)},
        {at("b"): found(50, "old"), at("b", "visits"): found(101, "2")},
        {at("b"): found(201, "new")},
    ],
    ids=["updated", "deleted", "in another column", "to the same value"],
)
def test_a_row_that_was_written_since_is_refused_by_its_name(changed: Versions) -> None:
    with pytest.raises(
        RowChanged, match=r"row 'b' of table 'pages' was written at \d+, after 100"
    ) as e:
        CONDITION.unwritten({at("a"): put("new"), at("b"): put("new")}, changed, may_be_own=False)
    assert (e.value.table, e.value.row, e.value.since) == ("pages", b"b", 100)
    assert e.value.commit_timestamp in (101, 201)


def test_a_cell_of_which_nothing_is_left_is_refused() -> None:
    CONDITION.refuse_vanished([])
    with pytest.raises(
        RowChanged, match=r"row 'a' .* was written and cleaned up, after 100, column"
    ):
        CONDITION.refuse_vanished([at("a")])


def test_what_an_earlier_attempt_has_written_is_not_written_again() -> None:
    writes: Writes = {
        at("a"): put("new"),
        at("a", "visits"): DELETE,
        at("b"): put("new"),
    }
    own = {at("a"): found(201, "new"), at("a", "visits"): found(201, None)}
    assert CONDITION.unwritten(writes, own, may_be_own=True) == {at("b"): put("new")}


EQUAL = replace(CONDITION, skip_equal=True)
MERGE = replace(CONDITION, is_merge=True)


@pytest.mark.parametrize(
    ("condition", "writes", "there"),
    [
        (
            EQUAL,
            {at("a"): put("new"), at("a", "visits"): put("1"), at("a", "owner"): DELETE},
            {at("a"): found(201, "new"), at("a", "visits"): found(90, "1")},
        ),
        (
            MERGE,
            {at("a"): DELETE, at("a", "visits"): DELETE, at("a", "owner"): DELETE},
            {at("a"): found(201, None), at("a", "visits"): found(90, None)},
        ),
    ],
    ids=["equal cells", "deletions of nothing"],
)
def test_an_earlier_attempt_is_recognized_without_the_cells_that_it_has_left_out(
    condition: Condition, writes: Writes, there: Versions
) -> None:
    assert condition.unwritten(writes, there, may_be_own=True) == {}
    with pytest.raises(RowChanged):
        CONDITION.unwritten(writes, there, may_be_own=True)


@pytest.mark.parametrize(
    ("condition", "writes", "there"),
    [
        (
            EQUAL,
            {at("a"): put("new"), at("a", "visits"): put("2")},
            {at("a"): found(201, "new"), at("a", "visits"): found(90, "1")},
        ),
        (
            EQUAL,
            {at("a"): put("new"), at("a", "expiring"): put("1")},
            {at("a"): found(201, "new"), at("a", "expiring"): found(90, "1")},
        ),
        (
            MERGE,
            {at("a"): DELETE, at("a", "visits"): DELETE},
            {at("a"): found(201, None), at("a", "visits"): found(90, "1")},
        ),
        (
            MERGE,
            {at("a"): put("new"), at("a", "visits"): DELETE},
            {at("a"): found(201, "new")},
        ),
    ],
    ids=["another value", "one that expires", "what is there", "of a row that stays"],
)
def test_an_earlier_attempt_would_have_left_out_nothing_else(
    condition: Condition, writes: Writes, there: Versions
) -> None:
    with pytest.raises(RowChanged):
        condition.unwritten(writes, there, may_be_own=True, expiring={b"expiring"})


@pytest.mark.parametrize(
    "others",
    [
        {at("a"): found(201, "other"), at("a", "visits"): found(201, None)},
        {at("a"): found(201, "new"), at("a", "visits"): found(202, None)},
        {at("a"): found(201, "new"), at("a", "visits"): found(90, "1")},
        {at("a"): found(150, "new"), at("a", "visits"): found(150, None)},
        {
            at("a"): found(201, "new"),
            at("a", "visits"): found(201, None),
            at("a", "owner"): found(201, "x"),
        },
    ],
    ids=["other value", "two transactions", "a part", "before the job", "more than it writes"],
)
def test_what_an_earlier_attempt_cannot_have_written_is_refused(others: Versions) -> None:
    writes: Writes = {at("a"): put("new"), at("a", "visits"): DELETE}
    with pytest.raises(RowChanged):
        CONDITION.unwritten(writes, others, may_be_own=True)


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("insert", [True, False])
def test_a_merge_inserts_updates_and_deletes_as_asked(update: bool, insert: bool) -> None:
    writes: Writes = {
        at("old"): put("new"),
        at("absent"): put("new"),
        at("old but gone"): DELETE,
        at("old but gone", "visits"): DELETE,
        at("absent and gone"): DELETE,
        at("deleted before"): put("new"),
    }
    there = {
        at("old", "visits"): found(1, "1"),
        at("old but gone", "visits"): found(1, "1"),
        at("deleted before"): found(2, None),
    }
    expected = {at("old but gone", "visits")}
    expected |= {at("old")} if update else set()
    expected |= {at("absent"), at("deleted before")} if insert else set()
    assert set(merged(writes, there, update=update, insert=insert)) == expected


rows = st.sampled_from(["a", "b", "c"])
columns = st.sampled_from(["title", "visits"])
cells = st.builds(at, rows, columns)
values = st.sampled_from([put("1"), put("2"), DELETE])
stored = st.builds(found, st.integers(1, 100), st.sampled_from(["1", "2", None]))


@given(st.dictionaries(cells, values, min_size=1), st.dictionaries(cells, stored))
def test_equal_cells_are_left_out_and_the_outcome_is_the_same(
    writes: Writes, there: dict[CellAddress, FoundCell]
) -> None:
    def outcome(applied: Writes) -> dict[CellAddress, bytes]:
        state = {address: cell.value for address, cell in there.items() if cell.value is not None}
        for address, (kind, value) in applied.items():
            state.pop(address, None)
            if kind == KIND_PUT:
                state[address] = value
        return state

    left = differing(writes, there)
    assert outcome(left) == outcome(writes)
    assert all(outcome({address: write}) != outcome({}) for address, write in left.items())


def test_equal_values_that_expire_are_written_again() -> None:
    """Otherwise they would expire as if nobody had written them again."""
    there = {at("a"): found(1, "1"), at("a", "visits"): found(1, "1")}
    writes = {at("a"): put("1"), at("a", "visits"): put("1"), at("b", "visits"): DELETE}
    assert set(differing(writes, there, {b"visits"})) == {at("a", "visits")}


NO_LIMIT = 1_000_000


def _row(number: int) -> bytes:
    return b"%06d" % number


def _cells(rows: int, columns: int = 1, value: bytes = b"v") -> list[Cell]:
    return [(_row(n), b"c%d" % c, value) for n in reversed(range(rows)) for c in range(columns)]


def _rows(part: dict[CellAddress, Write]) -> list[bytes]:
    return list(dict.fromkeys(address.row for address in part))


def test_the_parts_are_in_order_and_have_every_cell_once() -> None:
    found = list(cut(_cells(2_000, 3), 7, 300, [_row(450), _row(1_111)]))
    rows = [row for part in found for row in _rows(part)]
    assert rows == [_row(n) for n in range(2_000)]
    assert sum(len(part) for part in found) == 6_000
    assert {address.table_id for part in found for address in part} == {7}


def test_no_part_has_more_rows_cells_or_bytes_than_allowed() -> None:
    assert [len(_rows(part)) for part in cut(_cells(25), 1, 10, [])] == [10, 10, 5]
    by_cells = [len(part) for part in cut(_cells(1_000, 3), 1, NO_LIMIT, [])]
    assert max(by_cells) <= CELLS_MAX
    assert min(by_cells[:-1]) > CELLS_MAX - 3
    large = b"x" * (BYTES_MAX // 4)
    assert [len(part) for part in cut(_cells(9, 1, large), 1, NO_LIMIT, [])] == [4, 4, 1]


def test_a_row_is_never_cut_however_large_it_is() -> None:
    huge = b"x" * (BYTES_MAX + 1)
    found = list(cut([(b"b", b"c", huge), (b"b", b"d", huge), (b"a", b"c", b"v")], 1, 10, []))
    assert [_rows(part) for part in found] == [[b"a"], [b"b"]]
    assert len(found[1]) == 2


def test_a_part_ends_where_its_tablet_ends() -> None:
    borders = [_row(n) for n in (100, 101, 250)]
    found = list(cut(_cells(300), 1, NO_LIMIT, borders))
    assert [_rows(part)[0] for part in found] == [_row(0), _row(100), _row(250)]


def test_a_few_cells_before_a_border_go_on_with_the_next_tablet() -> None:
    found = list(cut(_cells(100), 1, NO_LIMIT, [_row(FEW_CELLS - 1)]))
    assert [len(part) for part in found] == [100]
    found = list(cut(_cells(100), 1, NO_LIMIT, [_row(FEW_CELLS)]))
    assert [len(part) for part in found] == [FEW_CELLS, 100 - FEW_CELLS]


def test_of_a_cell_that_is_written_twice_the_last_value_counts_and_none_deletes() -> None:
    cells: list[Cell] = [(b"b", b"c", b"1"), (b"a", b"c", None), (b"b", b"c", b"2")]
    (part,) = cut(cells, 1, 10, [])
    assert part == {
        CellAddress(1, b"a", b"c"): (KIND_DELETE, b""),
        CellAddress(1, b"b", b"c"): (KIND_PUT, b"2"),
    }


pages = Table("pages")
size = pages.column("size", codecs.integer)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_unknown_outcome_is_settled(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    db, commit = percolator_db, SharedTransaction.commit
    db.create_table(pages)

    async def unanswered(
        self: SharedTransaction, receipts: Sequence[Receipt], **_: object
    ) -> Timestamp | None:
        if is_committed:
            # As if the answer had been lost: only the store knows.
            await commit(self, receipts)
            self._ended, self.commit_timestamp = "", None
        raise OutcomeUnknown("no answer", start_timestamp=1)

    monkeypatch.setattr(SharedTransaction, "commit", unanswered)
    with db.shared_transaction() as whole:
        with db.share(whole.ticket, task="1") as share:
            share.set("page", size, 1)
            receipt = share.finish()
        if is_committed:
            assert whole.call_inside(commit_or_roll_back, [receipt], "the job")
        else:
            with pytest.raises(ConflictError, match="the job was rolled back: no answer"):
                whole.call_inside(commit_or_roll_back, [receipt], "the job")
    with db.snapshot() as snapshot:
        assert snapshot.get("page", size) == (1 if is_committed else None)
