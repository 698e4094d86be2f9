"""The common steps are mapped as their messages are."""

from __future__ import annotations

import pytest

from percolator.errors import CellAddress, InvalidArgument
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, read_lock_column
from percolator.protocol.write_set import WriteSteps
from percolator.routing.catalog import NO_OBSERVERS
from percolator.routing.cells import CommonStep
from percolator.rowstore.mapping import check_of, mapped, mapped_step
from tests.unit.rowstore.model_store import TABLE, TIMES, at

_COLUMNS = (b"c", b"", b"\0hidden", b"\xff\xff", b"balance")


@pytest.mark.parametrize("column", _COLUMNS)
@pytest.mark.parametrize(
    "write", [(KIND_PUT, b"value"), (KIND_PUT, b""), (KIND_DELETE, b""), (KIND_LOCK_ONLY, b"")]
)
def test_a_common_step_means_what_its_message_means(
    column: bytes, write: tuple[int, bytes]
) -> None:
    cell = CellAddress(TABLE, b"row", column)
    steps = WriteSteps(at(5), {cell: write}, 100)
    steps.session = b"session"
    for asked in (
        steps.prewrite(cell, at(5) + 1, 1_000),
        steps.commit_primary(NO_OBSERVERS, at(5) + 1, at(9)),
        steps.commit_secondary(cell, NO_OBSERVERS, at(9)),
    ):
        assert isinstance(asked.mutation, CommonStep)
        common, plain = mapped_step(asked.mutation, TIMES), mapped(asked.message(), TIMES)
        assert common[1:] == plain[1:]
        assert common.mutation == plain.mutation == asked.message()
        assert check_of([common]) == check_of([plain])


def test_the_lock_of_a_reader_asks_about_the_cell() -> None:
    cell = CellAddress(TABLE, b"row", read_lock_column(b"c", at(5)))
    steps = WriteSteps(at(5), {cell: (KIND_LOCK_ONLY, b"")}, 100)
    steps.session = b"session"
    asked = steps.prewrite(cell, at(5) + 1, 1_000)
    common, plain = mapped_step(asked.mutation, TIMES), mapped(asked.message(), TIMES)
    assert common.mutation == asked.message()
    assert check_of([common]) == check_of([plain])


def test_a_timestamp_that_cannot_be_stored_is_refused() -> None:
    cell = CellAddress(TABLE, b"row", b"c")
    steps = WriteSteps(at(5) + 1, {cell: (KIND_PUT, b"value")}, 100)
    with pytest.raises(InvalidArgument, match="multiples of 64"):
        mapped_step(steps.prewrite(cell, at(6), 1_000).mutation, TIMES)
