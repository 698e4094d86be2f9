"""How many calls steps take, and what becomes of those that fail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    PercolatorError,
    Retry,
    SchemaError,
)
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.routing.cells import (
    APPLIED,
    CellMutation,
    RangeRequest,
    Refused,
    RowRequest,
)
from percolator.rowstore.port import Sample, StoredRow
from percolator.v1.tabletserver_pb2 import Mutation, RowRead
from tests.unit.rowstore.model_store import TABLE, ModelStore, at

COLUMNS = [b"%d" % number for number in range(200)]


class CountedStore:
    """The model's store, with calls that are counted, and fail when told to."""

    def __init__(self, rows: ModelStore, *failures: PercolatorError) -> None:
        self._store = rows.store
        self.check_bytes_max = rows.store.check_bytes_max
        self.keys_bytes_max = rows.store.keys_bytes_max
        self.ranges_max = rows.store.ranges_max
        self.scans_backwards = True
        self.name_of = rows.store.name_of
        self.calls: list[str] = []
        self._failures = list(failures)
        rows.cells._mutations._store = rows.cells._reads._store = rows.cells._store = self

    async def check_and_mutate(self, *arguments: Any) -> bool:
        self.calls.append("mutate")
        self._fail()
        return await self._store.check_and_mutate(*arguments)

    async def write(self, *arguments: Any) -> None:
        self.calls.append("write")
        self._fail()
        await self._store.write(*arguments)

    async def read(self, *arguments: Any) -> list[StoredRow]:
        self.calls.append("read")
        self._fail()
        return await self._store.read(*arguments)

    async def sample(self, *arguments: Any) -> list[Sample]:
        self.calls.append("sample")
        self._fail()
        return await self._store.sample(*arguments)

    async def scan(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append("scan")
        async for row in self._store.scan(*arguments, **options):
            yield row
            self._fail()

    def _fail(self) -> None:
        if self._failures:
            raise self._failures.pop(0)


def lock(start: int, kind: RecordKind = RecordKind.PUT, value: bytes = b"v") -> bytes:
    primary = CellAddress(TABLE, b"a", b"0")
    return LockRecord(start, start + 1, 1_000, kind, b"", primary, value).encode()


def prewrites(start: int, row: bytes, columns: Sequence[bytes]) -> list[CellMutation]:
    return _of(steps.prewrite(row, column, start, lock(start), None) for column in columns)


def commits(start: int, end: int, row: bytes, columns: Sequence[bytes]) -> list[CellMutation]:
    record = WriteRecord(start, RecordKind.PUT, b"v").encode()
    return _of(steps.commit_secondary(row, column, start, end, record, ()) for column in columns)


def _of(mutations: Any) -> list[CellMutation]:
    return [CellMutation(TABLE, mutation) for mutation in mutations]


async def written(rows: ModelStore, row: bytes, columns: Sequence[bytes], since: int = 1) -> None:
    begun, committed = at(since), at(since + 1)
    await rows.cells.mutate(prewrites(begun, row, columns), rows.deadline)
    await rows.cells.mutate(commits(begun, committed, row, columns), rows.deadline)


async def test_steps_of_one_transaction_on_one_row_are_one_call() -> None:
    rows = await ModelStore().opened()
    counted = CountedStore(rows)
    for some in (
        prewrites(at(1), b"a", COLUMNS[:10]),
        commits(at(1), at(2), b"a", COLUMNS[:10]),
        _of(steps.roll_back(b"a", column, at(3)) for column in COLUMNS[:10]),
    ):
        assert await rows.cells.mutate(some, rows.deadline) == [APPLIED] * 10
    assert counted.calls == ["mutate"] * 3


async def test_checks_stay_below_what_a_filter_may_have() -> None:
    """The model refuses longer ones, as the service does."""
    rows = await ModelStore().opened()
    counted = CountedStore(rows)
    names = [b"%0200d" % number for number in range(100)]
    answers = await rows.cells.mutate(prewrites(at(1), b"a", names), rows.deadline)
    assert answers == [APPLIED] * 100
    assert 1 < len(counted.calls) < 60


async def test_of_joined_steps_only_those_that_are_not_possible_are_refused() -> None:
    rows = await ModelStore().opened()
    await rows.cells.mutate(prewrites(at(1), b"a", [b"1"]), rows.deadline)
    counted = CountedStore(rows)
    answers = await rows.cells.mutate(prewrites(at(2), b"a", [b"0", b"1", b"2"]), rows.deadline)
    assert [answer is APPLIED for answer in answers] == [True, False, True]
    assert isinstance(answers[1], Refused)
    assert answers[1].condition == steps.PREWRITE_LOCKED
    assert counted.calls == ["mutate", "read", "mutate"]


async def test_commits_of_which_some_were_made_by_others_are_made_for_the_rest() -> None:
    rows = await ModelStore().opened()
    await rows.cells.mutate(prewrites(at(1), b"a", [b"0", b"1", b"2"]), rows.deadline)
    await rows.cells.mutate(commits(at(1), at(2), b"a", [b"1"]), rows.deadline)
    some = commits(at(1), at(2), b"a", [b"0", b"1", b"2"])
    answers = await rows.cells.mutate(some, rows.deadline)
    assert [answer is APPLIED for answer in answers] == [True, False, True]
    assert isinstance(answers[1], Refused)
    assert answers[1].condition == steps.OWN_COMMIT


async def test_two_steps_of_one_cell_are_two_calls_in_their_order() -> None:
    rows = await ModelStore().opened()
    (prewrite,) = prewrites(at(1), b"a", [b"0"])
    (commit,) = commits(at(1), at(2), b"a", [b"0"])
    assert await rows.cells.mutate([prewrite, commit], rows.deadline) == [APPLIED] * 2


async def test_what_was_not_executed_is_sent_again() -> None:
    rows = await ModelStore().opened()
    counted = CountedStore(rows, NotExecuted("busy"), NotExecuted("busy"))
    assert await rows.cells.mutate(prewrites(at(1), b"a", [b"0"]), rows.deadline) == [APPLIED]
    assert counted.calls == ["mutate"] * 3


async def test_what_may_have_been_executed_is_not() -> None:
    """Only the protocol knows what repeating it would mean."""
    rows = await ModelStore().opened()
    lost = ExecutionUnknown("no answer")
    counted = CountedStore(rows, lost)
    assert await rows.cells.mutate(prewrites(at(1), b"a", [b"0"]), rows.deadline) == [lost]
    assert counted.calls == ["mutate"]


class TwiceStore(CountedStore):
    """The network brings each change twice, and the answer of the second copy."""

    async def check_and_mutate(self, *arguments: Any) -> bool:
        await super().check_and_mutate(*arguments)
        return await super().check_and_mutate(*arguments)


@pytest.mark.parametrize("problem", [ExecutionUnknown("no answer"), SchemaError("no table")])
async def test_a_refusal_that_cannot_be_explained_may_be_that_of_a_second_copy(
    problem: PercolatorError,
) -> None:
    """Taken for a refusal, it would have a client report a committed transaction as rolled back."""
    rows = await ModelStore().opened()
    store = TwiceStore(rows)

    async def silent(*_: Any) -> list[StoredRow]:
        raise problem

    store.read = silent  # type: ignore[method-assign]
    (answer,) = await rows.cells.mutate(prewrites(at(1), b"a", [b"0"]), rows.deadline)
    assert isinstance(answer, DeadlineExceeded | SchemaError)
    assert answer.retry is Retry.UNKNOWN


async def test_a_question_that_is_not_answered_in_time_was_not_executed() -> None:
    rows = await ModelStore().opened()
    store = CountedStore(rows)

    async def silent(*_: Any) -> list[StoredRow]:
        raise ExecutionUnknown("no answer")

    store.read = silent  # type: ignore[method-assign]
    question = CellMutation(TABLE, steps.status(b"a", b"0", at(1)))
    (answer,) = await rows.cells.mutate([question], rows.deadline)
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.SAFE


async def test_a_read_is_repeated_until_it_is_answered() -> None:
    rows = await ModelStore().opened()
    await written(rows, b"a", [b"0"])
    CountedStore(rows, ExecutionUnknown("lost"), NotExecuted("busy"))
    found = await rows.cells.read_cell(TABLE, b"a", b"0", at(9), rows.deadline)
    assert found is not None
    assert found is not None


async def test_rows_that_want_the_same_columns_are_one_call() -> None:
    rows = await ModelStore().opened()
    counted = CountedStore(rows)
    reads = [RowRead(row=b"%d" % n, columns=[b"c"], timestamp=at(9)) for n in range(100)]
    requests = [RowRequest(TABLE, read) for read in [*reads, *reads[:3]]]
    assert len(await rows.cells.read(requests, rows.deadline)) == 103
    assert counted.calls == ["read"]


async def test_long_keys_are_read_with_as_many_calls_as_the_store_permits() -> None:
    """Bigtable refuses requests to read of more than 512 KiB."""
    rows = await ModelStore().opened()
    keys = [b"%04096d" % number for number in range(rows.limits.batch_rows_max)]
    for key in keys:
        await written(rows, key, [b"c"])
    store = CountedStore(rows)
    reads = [RowRead(row=key, columns=[b"c"], timestamp=at(9)) for key in keys]
    results = await rows.cells.read([RowRequest(TABLE, one) for one in reads], rows.deadline)
    assert all(result.found for result in results)
    assert store.calls == ["read"] * 4


async def test_a_read_ends_when_it_has_found_more_than_its_caller_wants() -> None:
    """Values apart from their records are fetched row by row."""
    rows = await ModelStore().opened()
    keys, data = [b"%03d" % number for number in range(50)], b"v" * 100
    apart = RecordKind.PUT_IN_DATA
    record = WriteRecord(at(1), apart, b"").encode()
    for key in keys:
        begun = steps.prewrite(key, b"c", at(1), lock(at(1), apart, b""), data)
        ended = steps.commit_secondary(key, b"c", at(1), at(2), record, ())
        for step in (begun, ended):
            assert await rows.cells.mutate(_of([step]), rows.deadline) == [APPLIED]
    counted = CountedStore(rows)
    reads = [RowRead(row=key, columns=[b"c"], timestamp=at(9)) for key in keys]
    requests = [RowRequest(TABLE, read) for read in reads]
    with pytest.raises(InvalidArgument, match=r"^rows: .* more than 500 bytes"):
        await rows.cells.read(requests, rows.deadline, bytes_max=500)
    assert len(counted.calls) < 10
    assert len(await rows.cells.read(requests, rows.deadline, bytes_max=5_050)) == 50


async def test_a_read_of_more_columns_than_a_call_can_name_finds_them_and_no_others() -> None:
    rows = await ModelStore().opened()
    names = [b"%0200d" % number for number in range(100)]
    await written(rows, b"a", [*names, b"unwanted"])
    read = RowRead(row=b"a", columns=names, timestamp=at(9))
    (result,) = await rows.cells.read([RowRequest(TABLE, read)], rows.deadline)
    assert sorted(result.found) == names


async def test_a_scan_finds_the_columns_with_a_prefix_and_no_others() -> None:
    rows = await ModelStore().opened()
    await written(rows, b"a", [b"c", b"ca", b"d", b"\0hidden"])
    request = RangeRequest(TABLE, b"", b"", (b"d",), at(9), prefixes=(b"ca",))
    for _ in range(2):
        pages = [page async for page in rows.cells.scan(request, 10.0)]
        assert [list(page.rows[b"a"]) for page in pages] == [[b"ca", b"d"]]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
async def test_pages_have_no_gaps_even_if_calls_break_off(reverse: bool, breaks: bool) -> None:
    rows = await ModelStore(page_rows_max=3).opened()
    names = [b"", b"\0", b"a", b"b", b"c", b"d", b"e"]
    for name in names:
        await written(rows, name, [b"0"])
    CountedStore(rows, *[ExecutionUnknown("broken off")] * breaks)
    request = RangeRequest(TABLE, b"", b"", None, at(9), reverse)
    found, bounds = [], []
    async for page in rows.cells.scan(request, 10.0):
        found += list(page.rows)
        bounds.append((page.start, page.end))
    assert found == sorted(names, reverse=reverse)
    if reverse:
        bounds.reverse()
    assert bounds[0][0] == b""
    assert bounds[-1][1] == b""
    for before, after in itertools.pairwise(bounds):
        assert before[1] == after[0]


@pytest.mark.parametrize(
    "step",
    [
        steps.forget_notifications(b"a", b"c", b"observer", [at(1)]),
        Mutation(row=b"a", column=b"c"),
        steps.prewrite(b"a", b"c", at(1) + 1, lock(at(1) + 1), None),
    ],
)
async def test_what_a_row_store_cannot_do_is_refused_and_nothing_is_done(step: Mutation) -> None:
    rows = await ModelStore().opened()
    counted = CountedStore(rows)
    possible = prewrites(at(3), b"a", [b"other"])
    answers = await rows.cells.mutate([CellMutation(TABLE, step), *possible], rows.deadline)
    assert isinstance(answers[0], InvalidArgument)
    assert answers[1] is APPLIED
    assert counted.calls == ["mutate"]


async def test_what_repeated_commits_look_at_stays_below_it_too() -> None:
    """They look at more than they check, and each is answered as if it had come alone."""
    rows = await ModelStore().opened()
    names = [b"%0200d" % number for number in range(100)]
    await written(rows, b"a", names)
    await rows.cells.mutate(prewrites(at(3), b"a", names[:50]), rows.deadline)
    answers = await rows.cells.mutate(commits(at(3), at(4), b"a", names), rows.deadline)
    assert answers[:50] == [APPLIED] * 50
    assert all(isinstance(answer, Refused) for answer in answers[50:])
    again = await rows.cells.mutate(commits(at(3), at(4), b"a", names), rows.deadline)
    assert {answer.condition for answer in again[:50] if isinstance(answer, Refused)} == {0}
    assert all(isinstance(answer, Refused) for answer in again)


async def test_values_apart_are_read_in_as_many_calls_as_their_columns_take() -> None:
    rows = await ModelStore().opened()
    names = [b"%0200d" % number for number in range(100)]
    value = b"v" * 2_000
    locks = _of(steps.prewrite(b"a", one, at(1), lock(at(1), value=b""), value) for one in names)
    await rows.cells.mutate(locks, rows.deadline)
    record = WriteRecord(at(1), RecordKind.PUT_IN_DATA).encode()
    ends = _of(steps.commit_secondary(b"a", one, at(1), at(2), record, ()) for one in names)
    assert await rows.cells.mutate(ends, rows.deadline) == [APPLIED] * 100
    counted = CountedStore(rows)
    read = RowRequest(TABLE, RowRead(row=b"a", timestamp=at(3), all_columns=True))
    (found,) = await rows.cells.read([read], rows.deadline)
    assert {name: cell.value for name, cell in found.found.items()} == dict.fromkeys(names, value)
    assert 2 < len(counted.calls) < 20
