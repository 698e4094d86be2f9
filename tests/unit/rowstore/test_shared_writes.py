"""Callers that write at the same time share a call, and each is answered for its own rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from percolator.errors import DeadlineExceeded, InvalidArgument, PercolatorError
from percolator.rowstore.intents import ROWS_MAX, SharedWrites
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import TIME_UNIT, RowChange, SetCell

DEADLINE = 10.0


class _Store:
    """Notes its calls, which fail when told to."""

    def __init__(self, *failures: PercolatorError) -> None:
        self.calls: list[list[bytes]] = []
        self.written: set[bytes] = set()
        self._failures = list(failures)
        self.shared = SharedWrites(self._write)

    async def _write(self, rows: Sequence[RowChange], deadline: float) -> None:
        keys = [row.key for row in rows]
        assert len(set(keys)) == len(keys)
        self.calls.append(keys)
        await asyncio.sleep(1.0)
        if self._failures:
            raise self._failures.pop(0)
        self.written.update(keys)

    async def write(self, *keys: bytes, value: bytes = b"", deadline: float = DEADLINE) -> None:
        """Returns only when the rows are there."""
        await self.shared.write([_row(key, value) for key in keys], deadline)
        assert self.written.issuperset(keys)


def _row(key: bytes, value: bytes = b"") -> RowChange:
    return RowChange(key, (SetCell(WRITES, b"c", TIME_UNIT, value),))


async def test_those_who_write_at_the_same_time_share_a_call() -> None:
    store = _Store()
    await asyncio.gather(store.write(b"a", b"b"), store.write(b"c"), store.write(b"a"))
    assert store.calls == [[b"a", b"b", b"c"]]


async def test_nobody_joins_a_call_that_was_sent() -> None:
    store = _Store()
    first = asyncio.create_task(store.write(b"a"))
    await asyncio.sleep(0.5)
    await store.write(b"b")
    await first
    assert store.calls == [[b"a"], [b"b"]]


async def test_if_the_call_fails_each_of_the_others_writes_for_itself() -> None:
    store = _Store(InvalidArgument("row", "refused"))
    works = [store.write(b"a"), store.write(b"b"), store.write(b"c")]
    found = await asyncio.gather(*works, return_exceptions=True)
    assert [type(one) for one in found] == [InvalidArgument, type(None), type(None)]
    assert store.calls == [[b"a", b"b", b"c"], [b"b"], [b"c"]]


async def test_who_fails_a_second_time_is_told() -> None:
    store = _Store(DeadlineExceeded("late"), DeadlineExceeded("later"))
    works = [store.write(b"a"), store.write(b"b")]
    found = await asyncio.gather(*works, return_exceptions=True)
    assert [str(one) for one in found] == ["late", "later"]


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_who_is_cancelled_takes_nobody_along(cancelled: int) -> None:
    store = _Store()
    works = [asyncio.create_task(store.write(key)) for key in (b"a", b"b")]
    await asyncio.sleep(0.5)
    works[cancelled].cancel()
    await works[1 - cancelled]
    with pytest.raises(asyncio.CancelledError):
        await works[cancelled]


async def test_nobody_waits_for_a_call_with_a_later_deadline() -> None:
    store = _Store()
    await asyncio.gather(store.write(b"a"), store.write(b"b", deadline=DEADLINE - 1.0))
    assert store.calls == [[b"a"], [b"b"]]


async def test_a_row_that_is_to_become_two_things_is_not_shared() -> None:
    store = _Store()
    await asyncio.gather(store.write(b"a"), store.write(b"a", value=b"another"))
    assert store.calls == [[b"a"], [b"a"]]


async def test_a_call_writes_a_limited_number_of_rows() -> None:
    store = _Store()
    await asyncio.gather(*(store.write(b"%d" % number) for number in range(ROWS_MAX + 1)))
    assert [len(keys) for keys in store.calls] == [ROWS_MAX, 1]
