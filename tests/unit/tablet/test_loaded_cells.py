"""The cells of a bulk load are stored as each of them would be if it came alone."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.formats.records import RecordKind, WriteRecord
from percolator.tablet.cells import D, N, W, cell_prefix, change_key, component, inverted
from percolator.tablet.state import loaded_change
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import TARGET, Rig
from tests.unit.tablet.test_bulk_load import COMMIT, RAISE, START, fence

CELLS = st.dictionaries(
    st.tuples(
        st.sampled_from([b"b", b"b\0", b"b\0\x01", b"c", b"l\xff"]),
        st.sampled_from([b"a", b"a\0", b"\0hidden", b"\xff"]),
    ),
    st.sampled_from([b"", b"v", b"\0\x01", b"i" * 1024, b"d" * 1025]),
    min_size=1,
)


def expected(row: bytes, column: bytes, value: bytes, observed: bytes) -> dict[bytes, bytes]:
    cell, commit = cell_prefix(row, column), inverted(COMMIT)
    is_inline = len(value) <= 1024
    kind = RecordKind.PUT if is_inline else RecordKind.PUT_IN_DATA
    record = WriteRecord(START, kind, value if is_inline else b"")
    stored = {W + cell + commit: record.encode()}
    if not is_inline:
        stored[D + cell + inverted(START)] = value
    if not column.startswith(b"\0"):
        stored[change_key(cell, COMMIT)] = loaded_change(START)
    if column == observed:
        stored[N + cell + component(b"observer") + commit] = b""
    return stored


@settings(deadline=None)
@given(CELLS, st.integers(1, 5), st.sampled_from([b"a", b"\xff"]))
def test_every_cell_is_stored_and_counted_once(
    cells: dict[tuple[bytes, bytes], bytes], slice_rows: int, observed: bytes
) -> None:
    async def run() -> None:
        rig = await Rig(disk=DurableMemory(), slice_rows=slice_rows, change_feed=True).open()
        await rig.tablet.fence(fence(RAISE))
        storage = rig.tablet._state.storage
        before = dict(storage.iterate(b"", b"\xff"))
        request = pb.LoadRequest(
            target=TARGET,
            name="load",
            start_timestamp=START,
            commit_timestamp=COMMIT,
            rows=[row for row, _ in cells],
            columns=[column for _, column in cells],
            values=cells.values(),
            observed=[pb.ObservedColumn(column=observed, observers=[b"observer"])],
        )
        await rig.tablet.load(request)
        stored = dict(storage.iterate(b"", b"\xff"))
        added = {key: value for key, value in stored.items() if key not in before}
        wanted: dict[bytes, bytes] = {}
        for (row, column), value in cells.items():
            wanted |= expected(row, column, value, observed)
        assert added == wanted
        counted = {key: value for key, value in wanted.items() if key[:1] in (W, D)}
        statistics = rig.tablet.statistics()
        assert statistics.cells == len(counted)
        assert statistics.bytes == sum(len(key) + len(value) for key, value in counted.items())

    asyncio.run(run())
