"""Readers meet locks: resolved, passed, pushed or waited for, and never ignored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percolator.aio import Database
from percolator.codecs import integer, text
from percolator.conditions import Predicate
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    InvariantViolation,
    OutcomeUnknown,
    Retry,
    SchemaError,
    SnapshotTooOld,
)
from percolator.formats.records import KIND_LOCK_ONLY, LockRecord, RecordKind
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.protocol.commit import Commit
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Statistics, Verdicts
from percolator.protocol.read import (
    PASSING_MAX,
    TABLETS_AT_ONCE,
    FoundRow,
    count_rows,
    read_rows,
    scan_pages,
)
from percolator.protocol.roll_forward import JOINED_SECONDS, About, AskedOnce
from percolator.protocol.write_set import WriteSet
from percolator.routing.catalog import Catalog, TableSchema
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    RangeRequest,
    RowRequest,
    RowResult,
)
from percolator.routing.lanes import CellAnswer
from percolator.routing.router import Router
from percolator.schema import Table
from percolator.testing import connect_async
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.timestamp_source import TimestampSource
from tests.simulation.virtual_time import VirtualClock
from tests.unit.protocol.naive_cells import LOCK, NOTIFY, WRITE
from tests.unit.protocol.protocol_world import (
    OBSERVED,
    OBSERVER,
    PATIENT,
    A,
    B,
    C,
    Client,
    World,
    address,
    cancel,
    give_up,
    left_behind,
    locked,
    put,
    puts,
    settled,
)

NEVER_PUSHING = Limits(push_after_seconds=1e6)


async def whole_row(
    reader: Client, timestamp: int, row: bytes = b"row", seconds: float = 20.0
) -> tuple[RowResult, RowRequest, Statistics]:
    """A row, how it was asked for in the end, and what that took."""
    request = RowRequest(1, RowRead(row=row, all_columns=True, timestamp=timestamp))
    deadline, statistics = reader.deadline(seconds), Statistics()
    (answer,) = await read_rows(reader.env, reader.cleanup, [request], deadline, statistics)
    return answer, request, statistics


async def test_a_commit_is_visible_at_its_timestamp_but_not_below(client: Client) -> None:
    commit = await client.write({A: put(b"1")})
    assert (await client.read(A, commit), await client.read(A, commit - 1)) == (b"1", None)


async def test_a_reader_rolls_forward_what_was_committed_and_left_behind(
    here: World, reader: Client
) -> None:
    observed = CellAddress(2, b"z", OBSERVED)
    await left_behind(here, A, B, observed, committed=True)
    timestamp = await reader.start_timestamp()
    assert await reader.read(B, timestamp) == b"pending"
    assert await reader.read(observed, timestamp) == b"pending"
    await settled(reader)
    assert here.store.lock_of(B) is None
    ((commit, _),) = here.store.commits(A)
    assert [at for at, _ in here.store.commits(observed)] == [commit]
    assert (NOTIFY, OBSERVER, commit) in here.store.cells[observed]


async def test_a_reader_rolls_back_what_was_not_committed_on_the_primary_first(
    here: World, reader: Client
) -> None:
    start = await left_behind(here, A, B, committed=False)
    assert await reader.read(B, await reader.start_timestamp()) is None
    assert (here.store.lock_of(A), here.store.lock_of(B)) == (None, None)
    assert reader.env.verdicts.get(start) == ROLLED_BACK
    marked = [address(step) for step in reader.network.steps if step.message().changes]
    assert marked == [A, B]


async def test_locks_with_one_primary_are_settled_together(here: World, reader: Client) -> None:
    """Ten locks of one dead transaction cost one question: they say what their cells hold."""
    cells = [CellAddress(1, b"row", b"%d" % i) for i in range(10)]
    await left_behind(here, A, *cells, committed=True)
    timestamp = await reader.start_timestamp()
    answer, _, statistics = await whole_row(reader, timestamp)
    assert (len(answer.found), statistics.round_trips) == (10, 1)
    await settled(reader)
    assert not any(here.store.lock_of(cell) for cell in cells)
    assert len([step for step in reader.network.steps if not step.message().changes]) == 1


async def test_a_reader_waits_for_a_live_writer(here: World) -> None:
    writer, reader = here.client(PATIENT), here.client(NEVER_PUSHING)
    commit = await locked(writer, A, B)
    timestamp = await reader.start_timestamp()
    reading = asyncio.ensure_future(reader.read(B, timestamp))
    await asyncio.sleep(0.5)
    assert not reading.done()
    await commit.commit_primary(writer.deadline())
    assert await reading is None  # it committed above the reader
    assert commit.begin_two_phases().commit_ts > timestamp


async def test_waiting_for_a_lock_ends_with_the_deadline_and_names_its_holder(here: World) -> None:
    writer, reader = here.client(PATIENT), here.client(NEVER_PUSHING)
    writer.heartbeats.add((await locked(writer, A)).begin_two_phases())
    timestamp = await reader.start_timestamp()
    request = RowRequest(1, RowRead(row=b"a", columns=[b"x"], timestamp=timestamp))
    statistics = Statistics()
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await read_rows(
            reader.env,
            reader.cleanup,
            [request],
            reader.deadline(1.0),
            statistics,
        )
    assert caught.value.retry is Retry.SAFE
    (wait,) = statistics.lock_waits
    assert (wait.row, wait.column) == (b"a", b"x")
    assert wait.seconds > 0.5
    writer.heartbeats.close()


async def test_a_reader_pushes_a_live_writer_instead_of_waiting_for_its_end(
    here: World, writer: Client, reader: Client
) -> None:
    await locked(writer, A, B)
    timestamp = await reader.start_timestamp()
    before = here.clock.monotonic_seconds()
    assert await reader.read(B, timestamp) is None  # the lock in the way is not the primary's
    assert PATIENT.push_after_seconds < here.clock.monotonic_seconds() - before < 0.5
    lock = here.lock(A)
    assert lock.min_commit_timestamp == timestamp + 1
    unchanged = here.lock(B)
    assert unchanged.min_commit_timestamp == lock.start_timestamp + 1


@pytest.mark.parametrize("fate", ["committed above the reader", "pushed", "rolled back"])
async def test_more_locks_than_a_read_can_name_do_not_block_readers(here: World, fate: str) -> None:
    """One row, whose cells are locked by more transactions than fit into a read's list."""
    many = PASSING_MAX + 10
    columns = [b"%d" % i for i in range(many)]
    owner, reader = here.client(PATIENT), here.client(Limits(lock_ttl_seconds=3.0))
    commits = [
        await locked(owner, CellAddress(1, b"primaries", column), CellAddress(1, b"row", column))
        for column in columns
    ]
    timestamp = await reader.start_timestamp()
    if fate == "committed above the reader":
        for commit in commits:
            await commit.commit_primary(owner.deadline())
    elif fate == "rolled back":
        owner.crash()
    answer, request, _ = await whole_row(reader, timestamp, seconds=2.0)
    assert (answer.found, answer.locks) == ({}, [])
    assert len(request.read.passing) <= PASSING_MAX
    for commit in commits:
        if fate == "pushed":
            assert await commit.settle(owner.deadline()) > timestamp


async def test_each_row_is_read_again_with_the_locks_that_it_had_itself(here: World) -> None:
    owner, reader = here.client(PATIENT), here.client(PATIENT)
    rows = [b"%d" % i for i in range(PASSING_MAX + 10)]
    for row in rows:
        await locked(owner, CellAddress(1, row, b"a"), CellAddress(1, row, b"b"))
    timestamp = await reader.start_timestamp()
    requests = [
        RowRequest(1, RowRead(row=row, columns=[b"b"], timestamp=timestamp)) for row in rows
    ]
    statistics = Statistics()
    await read_rows(reader.env, reader.cleanup, requests, reader.deadline(), statistics)
    assert {len(request.read.passing) for request in requests} == {1}


async def test_a_lock_younger_than_the_reader_is_not_seen(here: World) -> None:
    reader = here.client(NEVER_PUSHING)
    timestamp = await reader.start_timestamp()
    await locked(here.client(PATIENT), A)
    assert await reader.read(A, timestamp) is None


async def test_a_lock_only_lock_does_not_block_readers(here: World) -> None:
    client = here.client(PATIENT)
    await client.write({A: put(b"1")})
    lock = client.commit(await client.start_timestamp(), {A: (KIND_LOCK_ONLY, b"")})
    await lock.prewrite(client.deadline())
    reader = here.client(NEVER_PUSHING)
    assert await reader.read(A, await reader.start_timestamp()) == b"1"


async def test_a_transaction_without_a_trace_on_its_primary_is_not_dead(here: World) -> None:
    """Prewrites travel in parallel: the secondary may be there before the primary."""
    writer, reader = here.client(PATIENT), here.client(NEVER_PUSHING)
    writer.network.slow(1.0, LOCK, A)
    writing = asyncio.ensure_future(writer.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(0.5)
    timestamp = await reader.start_timestamp()
    reading = asyncio.ensure_future(reader.read(B, timestamp))
    assert await writing > timestamp
    assert await reading is None
    assert [record.value for _, record in here.store.commits(B)] == [b"2"]


async def test_a_late_prewrite_after_the_cleanup_is_refused(
    here: World, writer: Client, reader: Client
) -> None:
    writer.network.session_id = b"gone" * 4
    held: list[CellMutation] = []

    async def keep(step: CellMutation) -> None:
        if address(step) == A and puts(step, 1):
            held.append(step)
            await asyncio.sleep(3600.0)

    writer.network.before_send = keep
    writing = asyncio.ensure_future(writer.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(4.0)  # its time to live has passed
    assert await reader.read(B, await reader.start_timestamp()) is None
    assert getattr(here.store.apply(held[0]), "condition", None) == 1, "the marker stops it"
    assert here.store.lock_of(A) is None
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await writer.env.background.drain(0.0)


async def test_a_heartbeat_proves_the_owner_alive_until_it_is_rolled_back(
    here: World, writer: Client, reader: Client
) -> None:
    """The lock has changed since it was judged, so nothing is rolled back."""
    writer.network.session_id = None
    commit = await locked(writer, A)
    await asyncio.sleep(3.2)

    async def beat_first(step: CellMutation) -> None:
        if step.message().changes:
            reader.network.before_send = None
            beat = commit.begin_two_phases().heartbeat()
            answer = here.store.apply(beat.step)
            commit.begin_two_phases().after_heartbeat(beat, answer, 0.0)

    reader.network.before_send = beat_first
    timestamp = await reader.start_timestamp()
    assert await reader.read(A, timestamp) is None
    assert await commit.commit_primary(writer.deadline()) > timestamp


async def test_own_commits_are_known_at_once(here: World) -> None:
    """The next transaction of the same process does not ask about its own locks."""
    client = here.client(PATIENT)
    client.network.slow(1.0, WRITE, B)
    await client.write({A: put(b"1"), B: put(b"2")})
    client.network.before_send = None
    sent = len(client.network.steps)
    assert await client.read(B, await client.start_timestamp()) == b"2"
    assert all(step.message().changes for step in client.network.steps[sent:])
    await settled(client)


async def test_two_outcomes_of_one_transaction_are_an_invariant_violation() -> None:
    verdicts = Verdicts(entries_max=2)
    verdicts.put(5, 9)
    verdicts.put(5, 9)
    with pytest.raises(InvariantViolation, match="two outcomes"):
        verdicts.put(5, ROLLED_BACK)
    verdicts.put(6, 10)
    verdicts.put(7, ROLLED_BACK)
    assert verdicts.get(5) is None  # forgotten: there are three


async def test_a_snapshot_below_the_safe_point_is_refused(here: World, client: Client) -> None:
    timestamp = await client.start_timestamp()
    here.store.safe_point = timestamp + 1
    committing = client.commit(timestamp, {A: put(b"1")}).run(client.deadline())
    for call in (client.read(A, timestamp), committing):
        with pytest.raises(SnapshotTooOld):
            await call


# Reads of one cell as it is now: when they take a timestamp all the same.

_accounts = Table("accounts")
_balance = _accounts.column("balance", integer)


def _timestamps(db: Database) -> int:
    timestamps = db._engine.timestamps
    assert isinstance(timestamps, TimestampSource)
    return timestamps.requests_answered


async def test_a_single_read_asks_for_no_timestamp_unless_it_meets_a_lock() -> None:
    """The lock is that of a transaction that has been acknowledged and not yet cleaned up."""
    async with connect_async() as db:
        await db.create_table(_accounts)
        async with db.transaction() as tx:
            await tx.set("bob", _balance, 1)
        before = _timestamps(db)
        assert (await db.get("bob", _balance), await db.get("joe", _balance, default=5)) == (1, 5)
        assert _timestamps(db) == before
        two = db.transaction()
        two._only_two_phases = True
        await two.set("amy", _balance, 2)
        await two.set("bob", _balance, 2)
        await two.commit()  # bob is committed in the background
        before = _timestamps(db)
        for _ in range(2):
            assert await db.get("bob", _balance) == 2
            assert _timestamps(db) == before + 1


async def test_a_cell_whose_values_expire_takes_a_timestamp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if only its tablet knows that they do."""
    async with connect_async() as db:
        await db.create_table(_accounts, ttl={_balance: timedelta(hours=1)})
        async with db.transaction() as tx:
            await tx.set("bob", _balance, 1)
        before = _timestamps(db)
        assert await db.get("bob", _balance) == 1
        assert _timestamps(db) == before + 1
        monkeypatch.setattr(Catalog, "get", lambda *_: TableSchema())
        assert await db.get("bob", _balance) == 1
        assert _timestamps(db) == before + 2


async def test_another_refusal_of_a_single_read_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> CellAnswer:
        raise InvalidArgument("reads[0].columns", "reserved")

    async with connect_async() as db:
        await db.create_table(_accounts)
        monkeypatch.setattr(Router, "read_cell", refused)
        with pytest.raises(InvalidArgument, match="columns"):
            await db.get("bob", _balance)


# Scans: rows with locks are read again in place, and own writes hide what is stored.


async def _scan(
    client: Client, own: WriteSet | None = None, *, reverse: bool = False, start: bytes = b""
) -> list[tuple[bytes, dict[bytes, bytes | None]]]:
    request = RangeRequest(1, start, b"", None, await client.start_timestamp(), reverse)
    found = []
    async for page in scan_pages(client.env, client.cleanup, request, own, 20.0, Statistics()):
        for row, cells in page:
            found.append((row, {column: cell.value for column, cell in cells.items()}))
    return found


async def _ten_rows(here: World) -> None:
    client = here.client()
    await client.write({CellAddress(1, b"%d" % i, b"x"): put(b"%d" % i) for i in range(10)})
    await settled(client)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_reads_rows_with_locks_again_in_their_place(
    here: World, reverse: bool
) -> None:
    await _ten_rows(here)
    cells = [CellAddress(1, b"%d" % i, b"x") for i in (1, 4, 7)]
    await left_behind(here, *cells, CellAddress(1, b"55", b"x"), committed=True)
    await left_behind(
        here, CellAddress(1, b"2", b"x"), CellAddress(1, b"66", b"x"), committed=False
    )
    found = await _scan(here.client(PATIENT), reverse=reverse)
    rows = [row for row, _ in found]
    assert rows == sorted([*(b"%d" % i for i in range(10)), b"55"], reverse=reverse)
    values = {row: cells[b"x"] for row, cells in found}
    assert values[b"4"] == values[b"55"] == b"pending"
    assert values[b"2"] == b"2"


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_shows_the_transactions_own_writes(here: World, reverse: bool) -> None:
    await _ten_rows(here)
    own = WriteSet(Limits())
    own.put(CellAddress(1, b"3", b"x"), b"changed")
    own.delete(CellAddress(1, b"5", b"x"))
    own.put(CellAddress(1, b"50", b"x"), b"new")
    own.put(CellAddress(1, b"999", b"x"), b"behind the last")
    own.put(CellAddress(1, b"", b"x"), b"before the first")
    own.lock(CellAddress(1, b"88", b"x"))
    own.put(CellAddress(2, b"4", b"x"), b"another table")
    found = await _scan(here.client(), own, reverse=reverse)
    rows = [row for row, _ in found]
    expected = [b"", b"0", b"1", b"2", b"3", b"4", b"50", b"6", b"7", b"8", b"9", b"999"]
    assert rows == (expected[::-1] if reverse else expected)
    assert dict(found)[b"3"] == {b"x": b"changed"}


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_with_a_condition_reads_tablets_ahead_and_yields_their_rows_in_order(
    here: World, reverse: bool
) -> None:
    await _ten_rows(here)
    await left_behind(here, *(CellAddress(1, b"%d" % i, b"x") for i in (4, 7)), committed=True)
    own = WriteSet(Limits())
    own.put(CellAddress(1, b"60", b"x"), b"7")
    client = here.client(PATIENT)
    pages = _scan_where(client, await client.start_timestamp(), own, reverse=reverse)
    found: list[tuple[bytes, bytes | None]] = []
    async for page in pages:
        found += [(row, cells[b"x"].value) for row, cells in page]
    expected = [(b"%d" % i, b"%d" % i) for i in (1, 2, 3, 5, 6)]
    expected = sorted([*expected, (b"60", b"7"), (b"8", b"8"), (b"9", b"9")], reverse=reverse)
    assert found == expected, "0 and the two that are now `pending` are left out"
    assert client.network.scans_at_once == TABLETS_AT_ONCE


async def test_a_page_shows_what_was_written_before_it_was_asked_for(here: World) -> None:
    await _ten_rows(here)
    client, own = here.client(), WriteSet(Limits())
    async with aclosing(_scan_where(client, await client.start_timestamp(), own)) as pages:
        found = [row for row, _ in await anext(pages)]
        await asyncio.sleep(1.0)  # all tablets are read by now
        own.delete(CellAddress(1, b"7", b"x"))
        own.put(CellAddress(1, b"66", b"x"), b"7")
        async for page in pages:
            found += [row for row, _ in page]
    assert found == [b"1", b"2", b"3", b"4", b"5", b"6", b"66", b"8", b"9"]


@pytest.mark.parametrize("pages_read", [0, 1])
async def test_a_scan_that_is_left_early_leaves_no_reads_behind(
    here: World, pages_read: int
) -> None:
    await _ten_rows(here)
    client = here.client()
    pages = _scan_where(client, await client.start_timestamp())
    for _ in range(pages_read):
        await anext(pages)
    assert bool(client.network.scans) == bool(pages_read)
    await pages.aclose()
    assert not client.network.scans


@pytest.mark.parametrize(("value", "is_read"), [(b"0", True), (b"1" * (1 << 20), False)])
async def test_tablets_are_read_ahead_to_the_end_unless_much_of_them_would_wait(
    here: World, value: bytes, is_read: bool
) -> None:
    client = here.client()
    rows = [b"%02d" % row for row in (*range(5), *range(20, 40))]
    await client.write({CellAddress(1, row, b"x"): put(value) for row in rows})
    await client.write({CellAddress(1, b"00", b"x"): put(b"1")})
    await settled(client)
    async with aclosing(_scan_where(client, await client.start_timestamp())) as pages:
        await anext(pages)
        await asyncio.sleep(10.0)
        assert (b"2" not in client.network.scans) == is_read


async def test_a_scan_that_is_cancelled_twice_leaves_no_reads_behind(here: World) -> None:
    await _ten_rows(here)
    client = here.client()
    start, found = await client.start_timestamp(), asyncio.Event()

    async def read_and_wait() -> None:
        async with aclosing(_scan_where(client, start)) as pages:
            await anext(pages)
            found.set()
            await asyncio.Event().wait()

    reading = asyncio.create_task(read_and_wait())
    await found.wait()
    reading.cancel()
    await asyncio.sleep(0)
    await cancel(reading)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not client.network.scans


async def test_the_error_of_a_later_tablet_comes_after_the_rows_before_it(here: World) -> None:
    await _ten_rows(here)
    client = here.client()
    await client.write({CellAddress(1, b"77", b"x"): put(b"\xff")})
    pages = _scan_where(client, await client.start_timestamp())
    found: list[bytes] = []
    while len(found) < 7:
        found += [row for row, _ in await anext(pages)]
    with pytest.raises(SchemaError, match=r"where, in row '77'"):
        await anext(pages)
    assert found == [b"%d" % i for i in range(1, 8)]
    assert not client.network.scans
    request = RangeRequest(1, b"", b"", None, await client.start_timestamp(), predicate=_not_zero())
    with pytest.raises(SchemaError, match=r"where, in row '77'"):
        await count_rows(client.env, client.cleanup, request, None, 20.0, Statistics())
    assert not client.network.scans


def _not_zero() -> Predicate:
    x = Table("texts").column("x", text)
    return Predicate(((x > "0") & (x < "a")).message)


def _scan_where(
    client: Client, start: int, own: WriteSet | None = None, *, reverse: bool = False
) -> AsyncGenerator[list[FoundRow], None]:
    request = RangeRequest(1, b"", b"", None, start, reverse, predicate=_not_zero())
    return scan_pages(client.env, client.cleanup, request, own, 20.0, Statistics())


# Transactions that the collection of old versions has overtaken.


async def test_a_commit_whose_record_may_be_collected_is_never_reported_as_aborted(
    here: World, client: Client
) -> None:
    """Its answer was lost, and when its outcome is asked for, the primary holds no trace of it."""
    client.network.loses_answer = lambda step: puts(step, WRITE)
    commit = client.commit(await client.start_timestamp(), {A: put(b"1")})
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(1.0))
    client.network.loses_answer = lambda step: False
    await settled(client)
    here.store.cells[A].clear()
    here.store.safe_point = await client.start_timestamp()
    with pytest.raises(OutcomeUnknown, match="too old"):
        await commit.settle(client.deadline())
    assert not here.store.cells[A], "no marker is put either"


async def test_a_secondary_that_was_committed_and_collected_meanwhile_is_not_a_torn_commit(
    here: World, client: Client
) -> None:

    async def overtaken(step: CellMutation) -> None:
        if address(step) == B and puts(step, WRITE):
            here.store.cells[B].clear()
            here.store.safe_point = await client.start_timestamp()

    client.network.before_send = overtaken
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    assert await commit.run(client.deadline())
    await settled(client)
    assert not here.store.cells[B]


@pytest.mark.parametrize("cell", [B, C])
async def test_a_reader_that_is_late_to_ask_about_a_lock_finds_what_was_committed(
    here: World,
    cell: CellAddress,
) -> None:
    """The lock was resolved after the reader met it, and its primary collected: no trace is left.
    A marker there would mean that the committed transaction was rolled back."""
    start = await left_behind(here, A, cell, committed=True)
    other, reader = here.client(), here.client(PATIENT)
    timestamp = await reader.start_timestamp()

    async def overtaken(step: CellMutation) -> None:
        if address(step) == A and not here.store.collected:
            assert await other.read(cell, timestamp) == b"pending"
            here.store.cells[A].clear()
            here.store.safe_point = here.store.collected = timestamp
            here.store.new_tables = {C.table_id}  # as if nothing was ever collected in it

    reader.network.before_send = overtaken
    assert await reader.read(cell, timestamp) == b"pending"
    assert here.store.collected
    assert not here.store.cells[A]
    assert reader.env.verdicts.get(start) is None


async def test_an_owners_late_rollback_of_a_secondary_is_tried_once(here: World) -> None:
    """Others have resolved its locks, so every further attempt would be refused, too."""
    client, other = here.client(), here.client()

    async def overtaken(step: CellMutation) -> None:
        if address(step) == B:
            here.store.cells[B].clear()
            here.store.collected = here.store.safe_point = await other.start_timestamp()

    commit = await locked(client, A, B)
    client.network.before_send = overtaken
    await give_up(client, commit)
    await settled(client)
    assert [address(step) for step in client.network.steps].count(B) == 2  # with its prewrite
    assert not here.store.cells[B]


async def test_a_lock_in_a_table_that_is_younger_than_the_last_collection_is_settled(
    here: World,
) -> None:
    """Its transaction began before the collection, and its primary refuses older rollbacks."""
    late, reader = here.client(PATIENT), here.client(PATIENT)
    start = await late.start_timestamp()
    here.store.collected = here.store.safe_point = await reader.start_timestamp()
    here.store.new_tables = {C.table_id}
    with pytest.raises(SnapshotTooOld):
        await late.commit(start, {A: put(b"1"), C: put(b"2")}).run(late.deadline())
    assert here.store.lock_of(C) is not None
    assert await reader.read(C, await reader.start_timestamp()) is None
    assert here.store.lock_of(C) is None
    assert not here.store.cells.get(A)
    assert reader.env.verdicts.get(start) is None, "for all we know, it committed long ago"


async def contradictory(here: World, *locks: tuple[CellAddress, CellAddress]) -> int:
    """Leaves locks of one transaction, each with the primary that it names; returns its start."""
    start = await here.client(PATIENT).start_timestamp()
    for (table_id, row, column), primary in locks:
        lock = LockRecord(start, 0, 0, RecordKind.PUT, b"", primary, b"forged").encode()
        step = CellMutation(table_id, steps.prewrite(row, column, start, lock, None))
        assert here.store.apply(step) is APPLIED
    return start


async def collected(here: World, start: int, *cells: CellAddress) -> None:
    """Resolves what is left of a transaction that can no longer commit, as collection does."""
    client = here.client(PATIENT)
    for _ in cells:
        left = [(cell, here.store.lock_of(cell)) for cell in cells]
        await client.cleanup.resolve(
            [MetLock(cell, lock) for cell, lock in left if lock is not None],
            deadline=client.deadline(),
            known_now=await client.start_timestamp(),
            waited_seconds=0.0,
            ended_below=start + 1,
        )
    assert [here.store.lock_of(cell) for cell in cells] == [None] * len(cells)


async def test_locks_that_name_each_other_as_primary_hold_up_no_collection(
    here: World, reader: Client
) -> None:
    start = await contradictory(here, (A, B), (B, A), (C, A))
    with pytest.raises(InvariantViolation, match="two primaries"):
        await reader.read(A, await reader.start_timestamp())
    await collected(here, start, A, B, C)
    assert not [commit for cell in (A, B, C) for commit in here.store.commits(cell)]


async def test_a_lock_whose_primary_decides_nothing_takes_no_commit_with_it(here: World) -> None:
    start = await left_behind(here, A, B, committed=True)
    lock = LockRecord(start, 0, 0, RecordKind.PUT, b"", B, b"forged").encode()
    step = CellMutation(C.table_id, steps.prewrite(C.row, C.column, start, lock, None))
    assert here.store.apply(step) is APPLIED
    await collected(here, start, B, C)
    assert [record.value for _, record in here.store.commits(B)] == [b"pending"]
    assert not here.store.commits(C)


async def test_a_lock_below_the_safe_point_is_rolled_forward_by_whoever_knows_its_commit(
    here: World,
    reader: Client,
) -> None:
    """The owner of such a lock may not do it any more: its message could come late."""
    start = await left_behind(here, A, B, committed=True)
    ((commit, _),) = here.store.commits(A)
    here.store.safe_point = timestamp = await reader.start_timestamp()
    reader.env.verdicts.put(start, commit)
    assert await reader.read(B, timestamp) == b"pending"
    await settled(reader)
    assert here.store.lock_of(B) is None
    assert [at for at, _ in here.store.commits(B)] == [commit]


# A lock is in the way, and the time is up in the middle of a call: the error names the lock.

Call = Callable[..., Awaitable[list[Any]]]


def answering_once(answer: Call, late: Callable[[Sequence[object]], list[Any]]) -> Call:
    """Answers the first call; later ones get what `late` returns or raises."""
    calls = 0

    async def call(requests: Sequence[object], deadline: float, **how: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return await answer(requests, deadline, **how) if calls == 1 else late(requests)

    return call


async def test_a_read_ends_with_the_lock_that_it_met(
    monkeypatch: pytest.MonkeyPatch, writer: Client, reader: Client
) -> None:
    def no_answer(_: Sequence[object]) -> list[Any]:
        raise DeadlineExceeded("no answer in time")

    commit = await locked(writer, A)
    timestamp = await reader.start_timestamp()
    cells = reader.env.cells
    monkeypatch.setattr(cells, "read", answering_once(cells.read, no_answer))
    request = RowRequest(1, RowRead(row=b"a", columns=[b"x"], timestamp=timestamp))
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await read_rows(reader.env, reader.cleanup, [request], reader.deadline(), Statistics())
    assert caught.value.other_start_timestamp == commit._write.start
    assert isinstance(caught.value.__cause__, DeadlineExceeded)


async def test_a_commit_ends_with_the_lock_that_it_met(
    monkeypatch: pytest.MonkeyPatch, here: World
) -> None:
    def no_answers(steps: Sequence[object]) -> list[Any]:
        return [DeadlineExceeded("no answer in time") for _ in steps]

    older, younger = here.client(PATIENT), here.client(PATIENT)
    holder = await locked(older, A)
    commit = younger.commit(await younger.start_timestamp(), {A: put(b"new")})
    lock = commit.begin_two_phases()
    send = answering_once(partial(commit._send_prewrites, lock), no_answers)
    monkeypatch.setattr(Commit, "_send_prewrites", lambda self, lock, *sent: send(*sent))
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await commit.run(younger.deadline(0.1))
    assert caught.value.other_start_timestamp == holder._write.start


async def test_a_commit_that_waits_for_a_lock_keeps_time_for_its_marker(
    here: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message was sent, so without the marker a late copy may commit it: nobody would know."""
    older, younger = here.client(PATIENT), here.client(PATIENT)
    holder = await locked(older, A)
    mutate = younger.env.cells.mutate

    async def slowly(steps: Sequence[Any], deadline: float) -> list[Any]:
        if deadline - younger.env.now() < 0.005:
            return [DeadlineExceeded("no answer in time") for _ in steps]
        return await mutate(steps, deadline)

    monkeypatch.setattr(younger.env.cells, "mutate", slowly)
    start = await younger.start_timestamp()
    commit = younger.commit(start, {A: put(b"new")}, two_phases=False)
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await commit.run(younger.deadline(0.1))
    assert caught.value.other_start_timestamp == holder._write.start
    assert not commit.may_be_committed


# Steps that many transactions need at one moment are sent once, and hold up nobody else's.

LOST, SERVED = (CellAddress(1, row, b"c") for row in (b"lost", b"served"))


class _Cells:
    """No server has the lost cell: what is asked with it is answered at the deadline."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.seconds = 0.01
        self.sent: list[bytes] = []

    async def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        rows = [one.mutation.row for one in mutations]
        self.sent += rows
        if LOST.row not in rows:
            await asyncio.sleep(self.seconds)
            return [APPLIED] * len(rows)
        await asyncio.sleep(deadline - self._clock.monotonic_seconds())
        return [DeadlineExceeded("late") if row == LOST.row else APPLIED for row in rows]


def _asked(*cells: CellAddress) -> dict[About, CellMutation]:
    return {
        About("status", cell, 7): CellMutation(1, steps.status(cell.row, cell.column, 7))
        for cell in cells
    }


def _once() -> tuple[AskedOnce, _Cells, VirtualClock]:
    clock = VirtualClock(asyncio.get_running_loop())
    cells = _Cells(clock)
    env = SimpleNamespace(now=clock.monotonic_seconds)
    return AskedOnce(cast(Any, env), cells), cells, clock


async def test_steps_that_are_asked_together_are_sent_once() -> None:
    once, cells, clock = _once()
    asking = [once.mutate(_asked(SERVED), clock.monotonic_seconds() + 5) for _ in range(100)]
    assert await asyncio.gather(*asking) == [[APPLIED]] * 100
    assert cells.sent == [b"served"]


async def test_who_joins_a_step_does_not_wait_for_others_that_were_sent_with_it() -> None:
    once, cells, clock = _once()
    first = asyncio.create_task(once.mutate(_asked(LOST, SERVED), 10.0))
    await asyncio.sleep(0.1)
    joining = [once.mutate(_asked(SERVED), 5.0) for _ in range(100)]
    assert await asyncio.gather(*joining) == [[APPLIED]] * 100
    assert clock.monotonic_seconds() < 0.1 + 2 * JOINED_SECONDS
    assert cells.sent == [b"lost", b"served", b"served"]
    (late, applied) = await first
    assert isinstance(late, DeadlineExceeded)
    assert applied is APPLIED


async def test_nobody_waits_beyond_a_deadline_of_its_own() -> None:
    once, cells, clock = _once()
    cells.seconds = 100.0
    first = asyncio.create_task(once.mutate(_asked(SERVED), 200.0))
    await asyncio.sleep(0.1)
    (late,) = await once.mutate(_asked(SERVED), 0.1 + JOINED_SECONDS / 2)
    assert isinstance(late, DeadlineExceeded)
    assert clock.monotonic_seconds() < 0.1 + JOINED_SECONDS
    assert await first == [APPLIED]
