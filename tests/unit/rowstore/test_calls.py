"""How many calls steps take, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.codecs.values import after_prefix
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    PercolatorError,
    Retry,
    SchemaError,
    SnapshotTooOld,
    Unavailable,
)
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    LockRecord,
    RecordKind,
    WriteRecord,
    read_lock_column,
)
from percolator.protocol import steps
from percolator.protocol.write_set import WriteSteps
from percolator.routing.catalog import NO_OBSERVERS
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    FoundCell,
    ListedStep,
    RangeRequest,
    Refused,
    RowRequest,
    RowResult,
)
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.intents import ROWS_MAX as INTENTS_MAX
from percolator.rowstore.intents import SharedWrites
from percolator.rowstore.layout import (
    ALL_COLUMNS,
    SPACING,
    WRITES,
    SpacedTimestamps,
    Times,
    column_bounds,
    column_of,
    row_key,
    row_of,
    stored_column,
)
from percolator.rowstore.mapping import check_of, mapped, mapped_step
from percolator.rowstore.port import TIME_UNIT, RowChange, SetCell, StoredRow
from percolator.rowstore.reads import ROWS_MAX
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import Mutation, RowRead
from tests.unit.rowstore.model_store import TABLE, TIMES, ModelStore, at


@pytest.fixture
@asynccontextmanager
async def rows() -> AsyncIterator[ModelStore]:
    """An empty row store."""
    yield await ModelStore().opened()


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
        itself: Any = self
        rows.cells._mutations._store = rows.cells._reads._store = rows.cells._store = itself

    async def check_and_mutate(self, *arguments: Any) -> bool:
        self._called("mutate")
        return await self._store.check_and_mutate(*arguments)

    async def read(self, *arguments: Any) -> list[StoredRow]:
        self._called("read")
        return await self._store.read(*arguments)

    async def scan(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append("scan")
        async for row in self._store.scan(*arguments, **options):
            yield row
            self._fail()

    def _called(self, method: str) -> None:
        self.calls.append(method)
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


async def read_row(rows: ModelStore, columns: Sequence[bytes] = ()) -> RowResult:
    """Row `a` at 9: these columns, or all."""
    read = RowRead(row=b"a", columns=columns, all_columns=not columns, timestamp=at(9))
    (found,) = await rows.cells.read([RowRequest(TABLE, read)], rows.deadline)
    return found


def reads_of(keys: Sequence[bytes]) -> list[RowRequest]:
    return [RowRequest(TABLE, RowRead(row=key, columns=[b"c"], timestamp=at(9))) for key in keys]


def cover_the_table(bounds: Iterable[tuple[bytes, bytes]], *, reverse: bool) -> None:
    """These parts follow each other without a gap."""
    ordered = list(bounds)[::-1] if reverse else list(bounds)
    assert (ordered[0][0], ordered[-1][1]) == (b"", b"")
    assert [one[1] for one in ordered[:-1]] == [other[0] for other in ordered[1:]]


async def test_steps_of_one_transaction_on_one_row_are_one_call(rows: ModelStore) -> None:
    counted = CountedStore(rows)
    for some in (
        prewrites(at(1), b"a", COLUMNS[:10]),
        commits(at(1), at(2), b"a", COLUMNS[:10]),
        _of(steps.roll_back(b"a", column, at(3)) for column in COLUMNS[:10]),
    ):
        assert await rows.cells.mutate(some, rows.deadline) == [APPLIED] * 10
    assert counted.calls == ["mutate"] * 3


async def test_checks_stay_below_what_a_filter_may_have(rows: ModelStore) -> None:
    """The model refuses longer ones, as the service does."""
    counted = CountedStore(rows)
    names = [b"%0200d" % number for number in range(100)]
    answers = await rows.cells.mutate(prewrites(at(1), b"a", names), rows.deadline)
    assert answers == [APPLIED] * 100
    assert 1 < len(counted.calls) < 60


@pytest.mark.parametrize(
    ("before", "steps_", "condition", "calls"),
    [
        (
            [prewrites(at(1), b"a", [b"1"])],
            prewrites(at(2), b"a", [b"0", b"1", b"2"]),
            steps.PREWRITE_LOCKED,
            ["mutate", "read", "mutate"],
        ),
        (
            [prewrites(at(1), b"a", [b"0", b"1", b"2"]), commits(at(1), at(2), b"a", [b"1"])],
            commits(at(1), at(2), b"a", [b"0", b"1", b"2"]),
            steps.OWN_COMMIT,
            ["mutate", "read", "mutate"],
        ),
    ],
    ids=["prewrites", "commits, of which another one has made some"],
)
async def test_of_joined_steps_only_those_that_are_not_possible_are_refused(
    rows: ModelStore,
    before: list[list[CellMutation]],
    steps_: list[CellMutation],
    condition: int,
    calls: list[str],
) -> None:
    for some in before:
        await rows.cells.mutate(some, rows.deadline)
    counted = CountedStore(rows)
    first, second, third = await rows.cells.mutate(steps_, rows.deadline)
    assert first is third is APPLIED
    assert isinstance(second, Refused)
    assert (second.condition, counted.calls) == (condition, calls)


async def test_two_steps_of_one_cell_are_two_calls_in_their_order(rows: ModelStore) -> None:
    (prewrite,) = prewrites(at(1), b"a", [b"0"])
    (commit,) = commits(at(1), at(2), b"a", [b"0"])
    assert await rows.cells.mutate([prewrite, commit], rows.deadline) == [APPLIED] * 2


LOST = ExecutionUnknown("no answer")


@pytest.mark.parametrize(
    ("failures", "answer"),
    [([NotExecuted("busy")] * 2, APPLIED), ([LOST], LOST)],
    ids=["not executed", "perhaps executed"],
)
async def test_only_what_was_not_executed_is_sent_again(
    rows: ModelStore, failures: list[PercolatorError], answer: Answer
) -> None:
    """Only the protocol knows what repeating another step would mean."""
    counted = CountedStore(rows, *failures)
    assert await rows.cells.mutate(prewrites(at(1), b"a", [b"0"]), rows.deadline) == [answer]
    assert counted.calls == ["mutate"] * (3 if answer is APPLIED else 1)


class TwiceStore(CountedStore):
    """The network brings each change twice, and the answer of the second copy."""

    async def check_and_mutate(self, *arguments: Any) -> bool:
        await super().check_and_mutate(*arguments)
        return await super().check_and_mutate(*arguments)


@pytest.mark.parametrize("problem", [ExecutionUnknown("no answer"), SchemaError("no table")])
async def test_a_refusal_that_cannot_be_explained_may_be_that_of_a_second_copy(
    rows: ModelStore,
    problem: PercolatorError,
) -> None:
    """Taken for a refusal, it would have a client report a committed transaction as rolled back."""
    store = TwiceStore(rows)

    async def silent(*_: Any) -> list[StoredRow]:
        raise problem

    store.read = silent  # type: ignore[method-assign]
    (answer,) = await rows.cells.mutate(prewrites(at(1), b"a", [b"0"]), rows.deadline)
    assert isinstance(answer, DeadlineExceeded | SchemaError)
    assert answer.retry is Retry.UNKNOWN


async def test_a_question_that_is_not_answered_in_time_was_not_executed(rows: ModelStore) -> None:
    store = CountedStore(rows)

    async def silent(*_: Any) -> list[StoredRow]:
        raise ExecutionUnknown("no answer")

    store.read = silent  # type: ignore[method-assign]
    question = CellMutation(TABLE, steps.status(b"a", b"0", at(1)))
    (answer,) = await rows.cells.mutate([question], rows.deadline)
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.SAFE


async def test_a_read_is_repeated_until_it_is_answered(rows: ModelStore) -> None:
    await written(rows, b"a", [b"0"])
    CountedStore(rows, ExecutionUnknown("lost"), NotExecuted("busy"))
    assert await rows.cells.read_cell(TABLE, b"a", b"0", at(9), rows.deadline) is not None


async def test_rows_that_want_the_same_columns_are_one_call(rows: ModelStore) -> None:
    counted = CountedStore(rows)
    keys = [b"%d" % number for number in range(100)]
    assert len(await rows.cells.read(reads_of([*keys, *keys[:3]]), rows.deadline)) == 103
    assert counted.calls == ["read"]


async def test_long_keys_are_read_with_as_many_calls_as_the_store_permits(rows: ModelStore) -> None:
    """Bigtable refuses requests to read of more than 512 KiB."""
    keys = [b"%04096d" % number for number in range(rows.limits.batch_rows_max)]
    for key in keys:
        await written(rows, key, [b"c"])
    store = CountedStore(rows)
    results = await rows.cells.read(reads_of(keys), rows.deadline)
    assert all(result.found for result in results)
    assert store.calls == ["read"] * 4


async def test_a_read_ends_when_it_has_found_more_than_its_caller_wants(rows: ModelStore) -> None:
    """Values apart from their records are fetched row by row."""
    keys, data = [b"%03d" % number for number in range(50)], b"v" * 100
    apart = RecordKind.PUT_IN_DATA
    record = WriteRecord(at(1), apart, b"").encode()
    for key in keys:
        begun = steps.prewrite(key, b"c", at(1), lock(at(1), apart, b""), data)
        ended = steps.commit_secondary(key, b"c", at(1), at(2), record, ())
        for step in (begun, ended):
            assert await rows.cells.mutate(_of([step]), rows.deadline) == [APPLIED]
    counted = CountedStore(rows)
    requests = reads_of(keys)
    with pytest.raises(InvalidArgument, match=r"^rows: .* more than 500 bytes"):
        await rows.cells.read(requests, rows.deadline, bytes_max=500)
    assert len(counted.calls) < 10
    assert len(await rows.cells.read(requests, rows.deadline, bytes_max=5_050)) == 50


async def test_a_read_of_more_columns_than_a_call_can_name_finds_them_and_no_others(
    rows: ModelStore,
) -> None:
    names = [b"%0200d" % number for number in range(100)]
    await written(rows, b"a", [*names, b"unwanted"])
    assert sorted((await read_row(rows, names)).found) == names


async def test_a_scan_finds_the_columns_with_a_prefix_and_no_others(rows: ModelStore) -> None:
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
    cover_the_table(bounds, reverse=reverse)


@pytest.mark.parametrize(
    "step",
    [
        steps.forget_notifications(b"a", b"c", b"observer", [at(1)]),
        Mutation(row=b"a", column=b"c"),
        steps.prewrite(b"a", b"c", at(1) + 1, lock(at(1) + 1), None),
    ],
)
async def test_what_a_row_store_cannot_do_is_refused_and_nothing_is_done(
    rows: ModelStore, step: Mutation
) -> None:
    counted = CountedStore(rows)
    possible = prewrites(at(3), b"a", [b"other"])
    answers = await rows.cells.mutate([CellMutation(TABLE, step), *possible], rows.deadline)
    assert isinstance(answers[0], InvalidArgument)
    assert answers[1] is APPLIED
    assert counted.calls == ["mutate"]


async def test_what_repeated_commits_look_at_stays_below_it_too(rows: ModelStore) -> None:
    """They look at more than they check, and each is answered as if it had come alone."""
    names = [b"%0200d" % number for number in range(100)]
    await written(rows, b"a", names)
    await rows.cells.mutate(prewrites(at(3), b"a", names[:50]), rows.deadline)
    answers = await rows.cells.mutate(commits(at(3), at(4), b"a", names), rows.deadline)
    assert answers[:50] == [APPLIED] * 50
    assert all(isinstance(answer, Refused) for answer in answers[50:])
    again = await rows.cells.mutate(commits(at(3), at(4), b"a", names), rows.deadline)
    assert {answer.condition for answer in again[:50] if isinstance(answer, Refused)} == {0}
    assert all(isinstance(answer, Refused) for answer in again)


async def test_values_apart_are_read_in_as_many_calls_as_their_columns_take(
    rows: ModelStore,
) -> None:
    names = [b"%0200d" % number for number in range(100)]
    value = b"v" * 2_000
    locks = _of(steps.prewrite(b"a", one, at(1), lock(at(1), value=b""), value) for one in names)
    await rows.cells.mutate(locks, rows.deadline)
    record = WriteRecord(at(1), RecordKind.PUT_IN_DATA).encode()
    ends = _of(steps.commit_secondary(b"a", one, at(1), at(2), record, ()) for one in names)
    assert await rows.cells.mutate(ends, rows.deadline) == [APPLIED] * 100
    counted = CountedStore(rows)
    found = (await read_row(rows)).found
    assert {name: cell.value for name, cell in found.items()} == dict.fromkeys(names, value)
    assert 2 < len(counted.calls) < 20


# The common steps are mapped as their messages are.

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
        steps.prewrite_step(cell, at(5) + 1, 1_000),
        steps.commit_primary_step(NO_OBSERVERS, at(5) + 1, at(9)),
        steps.commit_secondary_step(cell, NO_OBSERVERS, at(9)),
    ):
        assert isinstance(asked.mutation, ListedStep)
        common, plain = mapped_step(asked.mutation, TIMES), mapped(asked.message(), TIMES)
        assert common[1:] == plain[1:]
        assert common.mutation == plain.mutation == asked.message()
        assert check_of([common]) == check_of([plain])


def test_the_lock_of_a_reader_asks_about_the_cell() -> None:
    cell = CellAddress(TABLE, b"row", read_lock_column(b"c", at(5)))
    steps = WriteSteps(at(5), {cell: (KIND_LOCK_ONLY, b"")}, 100)
    steps.session = b"session"
    asked = steps.prewrite_step(cell, at(5) + 1, 1_000)
    common, plain = mapped_step(asked.mutation, TIMES), mapped(asked.message(), TIMES)
    assert common.mutation == asked.message()
    assert check_of([common]) == check_of([plain])


def test_a_timestamp_that_cannot_be_stored_is_refused() -> None:
    cell = CellAddress(TABLE, b"row", b"c")
    steps = WriteSteps(at(5) + 1, {cell: (KIND_PUT, b"value")}, 100)
    with pytest.raises(InvalidArgument, match="multiples of 64"):
        mapped_step(steps.prewrite_step(cell, at(6), 1_000).mutation, TIMES)


# Reads that begin together share a call; each is answered for itself.

ROWS = [b"a", b"b", b"c"]


async def _opened() -> ModelStore:
    rows = await ModelStore().opened()
    for row in ROWS[:2]:
        await written(rows, row, [b"0"])
    return rows


@pytest.fixture
@asynccontextmanager
async def filled() -> AsyncIterator[ModelStore]:
    """A row store with two rows."""
    yield await _opened()


async def _read(rows: ModelStore, row: bytes, number: int = 9) -> object:
    return await rows.cells.read_cell(TABLE, row, b"0", at(number), rows.deadline)


@pytest.mark.parametrize(
    "numbers", [(9, 9, 9), (9, 5, 7)], ids=["at one timestamp", "of several transactions"]
)
async def test_reads_that_begin_together_are_one_call(
    filled: ModelStore, numbers: tuple[int, ...]
) -> None:
    store = CountedStore(filled)
    asked = [*zip(ROWS, numbers, strict=True), (b"a", 9)]
    found = await asyncio.gather(*(_read(filled, row, number) for row, number in asked))
    cell = FoundCell(at(2), b"v")
    assert (found, store.calls) == ([cell, cell, None, cell], ["read"])


@pytest.mark.parametrize("leads", [1, 9])
async def test_a_version_that_a_later_reader_sees_hides_none_from_an_earlier_one(
    filled: ModelStore,
    leads: int,
) -> None:
    """The earlier one reads by itself, whoever leads: it sees what was there before."""
    await filled.cells.mutate(prewrites(at(5), b"a", [b"0"]), filled.deadline)
    await filled.cells.mutate(commits(at(5), at(6), b"a", [b"0"]), filled.deadline)
    store = CountedStore(filled)
    numbers = [leads, 3, 10 - leads]
    found = await asyncio.gather(*(_read(filled, b"a", number) for number in numbers))
    seen = {1: None, 3: FoundCell(at(2), b"v"), 9: FoundCell(at(6), b"v")}
    assert list(found) == [seen[number] for number in numbers]
    assert store.calls == ["read"] * 3


async def test_a_lock_above_a_readers_timestamp_is_in_nobody_elses_way(filled: ModelStore) -> None:
    await filled.cells.mutate(prewrites(at(5), b"a", [b"0"]), filled.deadline)
    late, early = await asyncio.gather(_read(filled, b"a", 9), _read(filled, b"a", 3))
    assert isinstance(late, RowResult)
    assert early == FoundCell(at(2), b"v")


async def _columns(rows: ModelStore, number: int, passing: int = 0) -> dict[bytes, int]:
    """The commit timestamps of a row's cells, and 0 for those that are locked."""
    read = RowRead(row=b"a", all_columns=True, timestamp=at(number))
    if passing:
        read.passing.append(at(passing))
    (found,) = await rows.cells.read([RowRequest(TABLE, read)], rows.deadline)
    cells = {column: cell.commit_timestamp for column, cell in found.found.items()}
    return cells | {lock.column: 0 for lock in found.locks}


async def test_whole_rows_are_read_together_each_as_of_its_own_timestamp(
    filled: ModelStore,
) -> None:
    await written(filled, b"a", [b"1"], since=5)
    await filled.cells.mutate(prewrites(at(7), b"a", [b"2"]), filled.deadline)
    store = CountedStore(filled)
    found = await asyncio.gather(
        _columns(filled, 9),
        _columns(filled, 4),
        _columns(filled, 9, passing=7),
        _columns(filled, 6),
    )
    newest = {b"0": at(2), b"1": at(6)}
    assert list(found) == [newest | {b"2": 0}, {b"0": at(2)}, newest, newest]
    assert store.calls == ["read", "read"], "one for all, and one for whom a version was hidden"


async def test_reads_of_different_columns_are_different_calls(filled: ModelStore) -> None:
    store = CountedStore(filled)
    found = await asyncio.gather(_columns(filled, 9), _read(filled, b"a"))
    assert list(found) == [{b"0": at(2)}, FoundCell(at(2), b"v")]
    assert store.calls == ["read", "read"]


@pytest.mark.parametrize("order", [(9, 3), (3, 9)])
async def test_a_note_of_collection_refuses_only_those_below_it(
    filled: ModelStore, order: tuple[int, int]
) -> None:
    await written(filled, b"a", [b"0"], since=5)
    bounds = Bounds(at(8), at(8))
    await RowCollector(filled.store, TIMES, filled.world, filled.limits).collect(
        TABLE, bounds, Collected()
    )
    found = await asyncio.gather(
        *(_read(filled, b"a", number) for number in order), return_exceptions=True
    )
    told = dict(zip(order, found, strict=True))
    assert told[9] == FoundCell(at(6), b"v")
    assert isinstance(told[3], SnapshotTooOld)


async def test_if_the_call_fails_each_reads_for_itself(filled: ModelStore) -> None:
    """The reason may be another's row, such as one that is too large to be read."""
    store = CountedStore(filled, InvalidArgument("response", "a row is too large"))
    found = await asyncio.gather(*(_read(filled, row) for row in ROWS))
    assert found == [FoundCell(at(2), b"v"), FoundCell(at(2), b"v"), None]
    assert store.calls == ["read"] * 4


async def test_a_read_that_fails_by_itself_is_not_repeated(filled: ModelStore) -> None:
    store = CountedStore(filled, InvalidArgument("row", "refused"))
    with pytest.raises(InvalidArgument, match="row: refused"):
        await _read(filled, b"a")
    assert store.calls == ["read"]


async def test_no_read_waits_for_a_call_with_a_later_deadline(filled: ModelStore) -> None:
    store = CountedStore(filled)
    some = [
        filled.cells.read_cell(TABLE, row, b"0", at(9), filled.deadline + seconds)
        for row, seconds in ((b"a", 0.0), (b"b", 1.0), (b"c", -1.0))
    ]
    assert await asyncio.gather(*some) == [FoundCell(at(2), b"v")] * 2 + [None]
    assert store.calls == ["read", "read"]


async def test_a_call_reads_a_limited_number_of_rows(filled: ModelStore) -> None:
    store = CountedStore(filled)
    keys = [b"%d" % number for number in range(ROWS_MAX + 1)]
    assert await asyncio.gather(*(_read(filled, key) for key in keys)) == [None] * len(keys)
    assert store.calls == ["read", "read"]


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_cancelled_read_cancels_no_other(filled: ModelStore, cancelled: int) -> None:
    reads = [asyncio.create_task(_read(filled, row)) for row in (b"a", b"b")]
    await asyncio.sleep(0)
    reads[cancelled].cancel()
    assert await reads[1 - cancelled] == FoundCell(at(2), b"v")
    with pytest.raises(asyncio.CancelledError):
        await reads[cancelled]


# Callers that write at the same time share a call, and each is answered for its own rows.

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


@pytest.fixture
def store() -> _Store:
    """A store without failures."""
    return _Store()


@pytest.mark.parametrize(
    ("writes", "calls"),
    [
        ([{"keys": b"ab"}, {"keys": b"c"}, {"keys": b"a"}], [[b"a", b"b", b"c"]]),
        ([{"keys": b"a"}, {"keys": b"b", "deadline": DEADLINE - 1.0}], [[b"a"], [b"b"]]),
        ([{"keys": b"a"}, {"keys": b"a", "value": b"another"}], [[b"a"], [b"a"]]),
    ],
    ids=["together", "no later deadline", "no row that is to become two things"],
)
async def test_those_who_write_at_the_same_time_share_a_call(
    store: _Store, writes: list[dict[str, Any]], calls: list[list[bytes]]
) -> None:
    works = []
    for options in writes:
        keys = [bytes([key]) for key in options.pop("keys")]
        works.append(store.write(*keys, **options))
    await asyncio.gather(*works)
    assert store.calls == calls


async def test_nobody_joins_a_call_that_was_sent(store: _Store) -> None:
    first = asyncio.create_task(store.write(b"a"))
    await asyncio.sleep(0.5)
    await store.write(b"b")
    await first
    assert store.calls == [[b"a"], [b"b"]]


@pytest.mark.parametrize(
    ("failures", "told", "calls"),
    [
        ([InvalidArgument("row", "refused")], ["row: refused", "None"], [[b"a", b"b"], [b"b"]]),
        (
            [DeadlineExceeded("late"), DeadlineExceeded("later")],
            ["late", "later"],
            [[b"a", b"b"], [b"b"]],
        ),
    ],
    ids=["once", "twice"],
)
async def test_if_the_call_fails_each_of_the_others_writes_for_itself_and_is_told(
    failures: list[PercolatorError], told: list[str], calls: list[list[bytes]]
) -> None:
    store = _Store(*failures)
    works = [store.write(b"a"), store.write(b"b")]
    found = await asyncio.gather(*works, return_exceptions=True)
    assert ([str(one) for one in found], store.calls) == (told, calls)


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_cancelled_write_cancels_no_other(store: _Store, cancelled: int) -> None:
    works = [asyncio.create_task(store.write(key)) for key in (b"a", b"b")]
    await asyncio.sleep(0.5)
    works[cancelled].cancel()
    await works[1 - cancelled]
    with pytest.raises(asyncio.CancelledError):
        await works[cancelled]


async def test_a_call_writes_a_limited_number_of_rows(store: _Store) -> None:
    await asyncio.gather(*(store.write(b"%d" % number) for number in range(INTENTS_MAX + 1)))
    assert [len(keys) for keys in store.calls] == [INTENTS_MAX, 1]


# Names of rows and columns in a row store.

_NAMES = st.binary(max_size=4) | st.text("\0a", max_size=3).map(str.encode)


@given(_NAMES, _NAMES)
def test_keys_have_the_order_of_rows_and_are_never_empty(one: bytes, other: bytes) -> None:
    assert row_of(row_key(one)) == one
    assert row_key(one)
    assert (row_key(one) < row_key(other)) is (one < other)


@given(_NAMES)
def test_only_hidden_columns_are_outside_of_all_columns(column: bytes) -> None:
    stored = stored_column(column)
    assert column_of(stored) == column
    assert (ALL_COLUMNS[0] <= stored < ALL_COLUMNS[1]) is not column.startswith(b"\0")
    first, end = column_bounds(column)
    assert first == stored < end == stored + b"\0"


@given(st.binary(max_size=3), st.binary(max_size=4))
def test_what_begins_with_a_prefix_lies_before_its_end(prefix: bytes, name: bytes) -> None:
    end = after_prefix(prefix)
    assert (prefix <= name and (not end or name < end)) is name.startswith(prefix)


# Timestamps as times of a row store.

EPOCH = 1_700_000_000_000
FIRST = EPOCH << SEQUENCE_BITS
RECENT_TIMES = Times(EPOCH)
_SEVENTY_YEARS = 70 * 365 * 86_400_000


@pytest.mark.parametrize("number", [0, 1, 4095, 4096, _SEVENTY_YEARS << 12])
def test_a_timestamp_comes_back_from_its_time(number: int) -> None:
    timestamp = FIRST + number * SPACING
    time = RECENT_TIMES.time(timestamp)
    assert time % 1_000 == 0
    assert 0 < time < 2**63
    assert (RECENT_TIMES.timestamp(time), RECENT_TIMES.at_or_above(timestamp)) == (timestamp, time)
    assert RECENT_TIMES.at_or_above(timestamp + 1) == time + 1_000
    assert RECENT_TIMES.at_or_above(timestamp - 1) == time


@pytest.mark.parametrize("timestamp", [FIRST + 1, FIRST - SPACING, 0, 2**64 - SPACING])
def test_what_cannot_be_stored_is_refused(timestamp: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{timestamp} cannot be stored"):
        RECENT_TIMES.time(timestamp)


def test_bounds_of_any_timestamp_are_in_the_range_of_times() -> None:
    assert RECENT_TIMES.at_or_above(0) == RECENT_TIMES.time(FIRST), (
        "an end of 0 would mean that there is none"
    )
    assert 0 < RECENT_TIMES.at_or_above(2**64 - 1) < 2**63


class _Oracle:
    catalogue_epoch = 0

    def __init__(self, first: int) -> None:
        self.next = first
        self.error: Exception | None = None

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.next)
        self.next += count
        return future


@pytest.mark.parametrize("first", [FIRST, FIRST + 1, FIRST + SPACING - 1])
async def test_each_timestamp_is_among_the_numbers_that_were_handed_out_for_it(first: int) -> None:
    oracle = _Oracle(first)
    source = SpacedTimestamps(oracle)
    for _ in range(3):
        begin = oracle.next
        timestamp = await source.get()
        assert begin <= timestamp < oracle.next
        assert timestamp % SPACING == 0


async def test_errors_and_cancellations_pass() -> None:
    oracle = _Oracle(FIRST)
    source = SpacedTimestamps(oracle)
    oracle.error = Unavailable("no oracle")
    with pytest.raises(Unavailable):
        await source.get()
    source.get().cancel()
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match="count"):
        source.get(2)
