"""A row of a stream shows its row of the table as it was just after the commit."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from percolator.routing.cells import StoredChange
from percolator.spark.choosing.row_ranges import ALL_ROWS, RowRanges, RowsBetween
from percolator.spark.streaming.row_images import RowImage, RowImages, Values

COLUMNS = (b"price", b"state")
T = TypeVar("T")

writes = st.dictionaries(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.sampled_from([*COLUMNS, b"other"])),
    st.one_of(st.none(), st.sampled_from([b"1", b"2"])),
    min_size=1,
)


class History:
    """A table and its feed: what each commit has written, in the order of commits."""

    def __init__(self, commits: Sequence[dict[tuple[bytes, bytes], bytes | None]]) -> None:
        self.changes: list[StoredChange] = []
        self.states: dict[int, dict[tuple[bytes, bytes], bytes]] = {0: {}}
        for commit, written in enumerate(commits, 1):
            state = dict(self.states[commit - 1])
            for (row, column), value in sorted(written.items()):
                self.changes.append(StoredChange(commit, row, column, value, None))
                state.pop((row, column), None)
                if value is not None:
                    state[row, column] = value
            self.states[commit] = state

    def values(self, at: int, row: bytes) -> Values:
        return tuple(self.states[at].get((row, column)) for column in COLUMNS)

    async def read(self, at: int, rows: Sequence[bytes]) -> dict[bytes, Values]:
        found = {row: self.values(at, row) for row in rows}
        return {row: values for row, values in found.items() if any(values)}

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

    made = RowImages(rows, COLUMNS, history.read).of(given_pages())
    return [image async for some in made for image in some]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


@given(st.lists(writes, max_size=8), st.integers(0, 8), st.lists(st.integers(0, 24)))
def test_an_image_is_what_a_snapshot_at_its_commit_shows_wherever_pages_are_cut(
    commits: list[dict[tuple[bytes, bytes], bytes | None]], after: int, cuts: list[int]
) -> None:
    history = History(commits)
    after = min(after, len(commits))
    changes = [change for change in history.changes if change.commit_timestamp > after]
    bounds = [0, *sorted(min(cut, len(changes)) for cut in cuts), len(changes)]
    pages = [changes[first:last] for first, last in itertools.pairwise(bounds)]
    assert at_once(images(history, pages)) == history.expected(after)


async def test_rows_that_were_not_chosen_are_left_out() -> None:
    history = History([{(b"a", b"price"): b"1", (b"b", b"price"): b"1"}])
    chosen = RowRanges([RowsBetween.only(b"b")])
    assert [one.row for one in await images(history, [history.changes], chosen)] == [b"b"]
