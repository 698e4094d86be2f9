"""Transactions of a task are cut so that each can commit with one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.protocol.write_set import Write
from percolator.spark.transaction_writer import BYTES_MAX, CELLS_MAX, FEW_CELLS, cut

if TYPE_CHECKING:  # it needs pyspark
    from percolator.spark.shapes import Cell

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
