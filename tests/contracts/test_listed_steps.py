"""A step in a list means what its mutation means, which row stores apply."""

from __future__ import annotations

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.protocol.write_set import Write, WriteSteps
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import CellMutation, CommonStep
from percolator.routing.lanes import fill_list
from percolator.tablet.cells import ColumnEncoder
from percolator.tablet.requests import MutationChecker, StepChecker
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import Rig

NOW = 1_800_000_000_000 << 18  # the virtual clock's
START, PUSHED, COMMIT = NOW + 7, NOW + 8, NOW + 9
WRITES: dict[CellAddress, Write] = {
    CellAddress(1, b"row", b"put"): (KIND_PUT, b"value"),
    CellAddress(1, b"row", b"long"): (KIND_PUT, b"longer than fits into a lock"),
    CellAddress(1, b"row", b"deleted"): (KIND_DELETE, b""),
    CellAddress(1, b"row", b"locked"): (KIND_LOCK_ONLY, b""),
}
SCHEMA = TableSchema(
    3, {b"put": (b"one", b"two"), b"long": (b"one",), b"deleted": (b"one",), b"locked": (b"one",)}
)


def _sent() -> list[CellMutation]:
    """What transactions send on their way to a commit, for every kind of write."""
    found = []
    for cell, write in WRITES.items():
        steps = WriteSteps(START, {cell: write}, inline_bytes_max=10)
        steps.session = b"session"
        found += [
            steps.prewrite(cell, 0, 1000),
            steps.prewrite(cell, PUSHED, 1000),
            steps.commit_primary(SCHEMA, 0, COMMIT),
            steps.commit_primary(SCHEMA, PUSHED, COMMIT),
            steps.commit_secondary(cell, SCHEMA, COMMIT),
        ]
    return found


async def test_a_step_in_a_list_is_the_same_mutation_to_the_tablet() -> None:
    rig = await Rig().open()
    listed = [one for one in _sent() if isinstance(one.mutation, CommonStep)]
    in_list = pb.StepList()
    fill_list(in_list, [one.mutation for one in listed if isinstance(one.mutation, CommonStep)])
    alone = pb.MutationBatch(mutations=[one.message() for one in listed])
    state, columns = rig.tablet._state, ColumnEncoder()
    await state.guard.require(COMMIT, "commit")
    assert StepChecker(state, columns).check(in_list) == MutationChecker(state, columns).check(
        alone
    )


def test_everything_on_the_way_to_a_commit_travels_in_lists_but_a_lock_with_long_data() -> None:
    alone = [one.message() for one in _sent() if not isinstance(one.mutation, CommonStep)]
    assert [(one.column, len(one.changes)) for one in alone] == [(b"long", 2)] * 2
