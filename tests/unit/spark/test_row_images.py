"""A row of a stream shows its row of the table as it was just after the commit."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.routing.cells import FoundCell, StoredChange
from percolator.spark.change_rows import Cells, RowImage, RowImages, Values
from percolator.spark.chosen_rows import ALL_ROWS, RowRanges, RowsBetween
from percolator.timestamps import Timestamp, is_expired

COLUMNS = (b"price", b"state")
T = TypeVar("T")

writes = st.dictionaries(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.sampled_from([*COLUMNS, b"other"])),
    st.one_of(st.none(), st.sampled_from([b"1", b"2"])),
    min_size=1,
)


class History:
    """A table and its feed: what each commit has written, in the order of commits, one of them in
    each millisecond. `ttls` has milliseconds by column."""

    def __init__(
        self,
        commits: Sequence[dict[tuple[bytes, bytes], bytes | None]],
        ttls: Mapping[bytes, int] | None = None,
    ) -> None:
        self.ttls = ttls or {}
        self.changes = [
            StoredChange(Timestamp.of(at), row, column, value, None)
            for at, written in enumerate(commits, 1)
            for (row, column), value in sorted(written.items())
        ]

    def cells(self, at: int, row: bytes) -> Cells:
        """What a snapshot shows of the row."""
        newest: dict[bytes, FoundCell] = {}
        for commit, changed, column, value, _ in self.changes:
            if changed == row and commit <= at:
                newest[column] = FoundCell(commit, value)
        return tuple(self._visible(at, column, newest.get(column)) for column in COLUMNS)

    def _visible(self, at: int, column: bytes, cell: FoundCell | None) -> FoundCell | None:
        if cell is None or cell.value is None:
            return None
        ttl = self.ttls.get(column)
        return None if ttl and is_expired(cell.commit_timestamp, at, ttl) else cell

    def values(self, at: int, row: bytes) -> Values:
        return tuple(None if cell is None else cell.value for cell in self.cells(at, row))

    async def read(self, at: int, rows: Sequence[bytes]) -> dict[bytes, Cells]:
        found = {row: self.cells(at, row) for row in rows}
        return {row: cells for row, cells in found.items() if any(cells)}

    def expected(self, after: int) -> list[RowImage]:
        found = []
        touched = {c[:2] for c in self.changes if c.commit_timestamp > after}
        wanted = {c[:2] for c in self.changes if c.column in COLUMNS}
        for commit, row in sorted(touched & wanted):
            before, values = self.values(commit - 1, row), self.values(commit, row)
            if not any(before) and not any(values):
                continue
            kind = "delete" if not any(values) else "update" if any(before) else "insert"
            found.append(RowImage(commit, row, kind, values))
        return found


async def images(
    history: History, pages: list[list[StoredChange]], rows: RowRanges = ALL_ROWS
) -> list[RowImage]:
    async def given_pages() -> AsyncIterator[list[StoredChange]]:
        for page in pages:
            yield page

    made = RowImages(rows, COLUMNS, history.read, history.ttls).of(given_pages())
    return [image async for some in made for image in some]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


@pytest.mark.parametrize("ttls", [{}, {b"price": 1}, {b"price": 1, b"state": 2}])
@given(st.lists(writes, max_size=8), st.integers(0, 8), st.lists(st.integers(0, 24)))
def test_an_image_is_what_a_snapshot_at_its_commit_shows_wherever_pages_are_cut(
    ttls: dict[bytes, int],
    commits: list[dict[tuple[bytes, bytes], bytes | None]],
    after: int,
    cuts: list[int],
) -> None:
    history = History(commits, ttls)
    begin = Timestamp.of(min(after, len(commits)))
    changes = [change for change in history.changes if change.commit_timestamp > begin]
    bounds = [0, *sorted(min(cut, len(changes)) for cut in cuts), len(changes)]
    pages = [changes[first:last] for first, last in itertools.pairwise(bounds)]
    assert at_once(images(history, pages)) == history.expected(begin)


async def test_rows_that_were_not_chosen_are_left_out() -> None:
    history = History([{(b"a", b"price"): b"1", (b"b", b"price"): b"1"}])
    chosen = RowRanges([RowsBetween.only(b"b")])
    assert [one.row for one in await images(history, [history.changes], chosen)] == [b"b"]
