"""Transactions that commit in one round: what stops them, what waits for them, how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from percolator.errors import (
    InvalidArgument,
    NotReady,
    Overloaded,
    SchemaChanged,
    TabletMoved,
    Unavailable,
)
from percolator.formats.records import KIND_PUT_IN_DATA, WriteRecord
from percolator.tablet.cells import HeldCells, Holder, cell_prefix
from percolator.tablet.state import SafePoints
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import (
    APPLIED,
    COLUMN,
    DATA,
    DELETE,
    IDENTITY,
    LOCK,
    LOCK_ONLY,
    NOT_EXECUTED,
    NOTIFY,
    REFUSED,
    ROLLBACK,
    UNKNOWN,
    WRITE,
    Change,
    OneRoundRig,
    Rig,
    SlowDisk,
    changes,
    look,
    not_executed,
    one_round,
    one_round_read_lock,
    only,
    outcomes,
    own,
    prewrite,
    roll_back,
    started,
    together,
    under_way,
    written,
)

FENCE = pb.FenceRequest(
    target=pb.TabletTarget(tablet_id=1, epoch=2),
    action=pb.FenceRequest.ACTION_RAISE,
    fence=pb.LoadFence(name="load", run=50),
)


@pytest.fixture
@asynccontextmanager
async def rig() -> AsyncIterator[OneRoundRig]:
    """A tablet whose transactions commit in one round."""
    yield await OneRoundRig().open()


# ---------------------------------------------------------------- committing


async def test_all_cells_are_written_at_one_fresh_timestamp(rig: OneRoundRig) -> None:
    result = await rig.commit(one_round(10, {b"a": b"1", b"b": b"2"}))
    assert list(result.commit_timestamps) == [100]
    assert not result.uncommitted
    assert (await rig.value(b"a", 100), await rig.value(b"b", 100)) == (b"1", b"2")
    assert await rig.value(b"a", 99) is None
    assert not await rig.cells(LOCK)


async def test_transactions_of_a_request_share_a_question_to_the_oracle_and_a_write(
    rig: OneRoundRig,
) -> None:
    before = rig.slow_disk.writes
    result = await rig.commit(*(one_round(10 + n, {b"%d" % n: b"x"}) for n in range(5)))
    assert list(result.commit_timestamps) == [100, 101, 102, 103, 104]
    assert (rig.oracle.asked, rig.slow_disk.writes) == ([5], before + 1)


async def test_the_timestamp_after_a_commit_is_set_aside_if_another_transaction_follows(
    rig: OneRoundRig,
) -> None:
    request = together(one_round(10 + n, {b"%d" % n: b"x"}) for n in range(4))
    request.followed.extend((0, 2))
    result = await rig.tablet.commit(request, deadline_seconds=1e9)
    assert rig.oracle.asked == [6]
    assert (list(result.commit_timestamps), list(result.followed)) == ([100, 102, 103, 105], [0, 2])


async def test_nothing_is_set_aside_after_a_commit_that_was_found_or_refused(
    rig: OneRoundRig,
) -> None:
    """The request that committed it has said so, and its caller may have begun there."""
    request = together([one_round(10, {b"a": b"1"}), one_round(11, {b"b": b"1"})])
    request.followed.append(0)
    await rig.tablet.commit(request, deadline_seconds=1e9)
    result = await rig.tablet.commit(request, deadline_seconds=1e9)
    assert list(result.commit_timestamps) == [0, 0]
    assert not result.followed


async def test_every_kind_of_write_leaves_the_record_of_its_kind(rig: OneRoundRig) -> None:
    await rig.commit(one_round(10, {b"a": b"1", b"b": b"2"}))
    await rig.commit(
        one_round(110, {b"a": b""}, DELETE),
        one_round(111, {b"b": b""}, LOCK_ONLY),
        one_round(112, {b"c": b"long"}, KIND_PUT_IN_DATA),
    )
    assert (await rig.value(b"a", 300), await rig.value(b"b", 300)) == (None, b"2")
    assert await rig.value(b"c", 300) == b"long"
    assert [cell.value for cell in await rig.cells(DATA)] == [b"long"]


async def test_a_lock_only_record_names_the_change_below_it(rig: OneRoundRig) -> None:
    await rig.commit(one_round(10, {b"a": b"1"}))
    await rig.commit(one_round(110, {b"a": b""}, LOCK_ONLY))
    records = [WriteRecord.decode(c.value) for c in await rig.cells(WRITE, from_timestamp=101)]
    assert [record.last_change for record in records] == [100]


async def test_observers_are_notified_of_puts_and_deletions_but_not_of_locks(
    rig: OneRoundRig,
) -> None:
    request = together(
        [
            one_round(10, {b"put": b"1"}),
            one_round(11, {b"deleted": b""}, DELETE),
            one_round(12, {b"locked": b""}, LOCK_ONLY),
        ]
    )
    request.observed.add(column=COLUMN, observers=[b"f", b"g"])
    request.notifications.add(transaction=2, row=b"weak", column=b"w", observers=[b"h"])
    await rig.tablet.commit(request, deadline_seconds=1e9)
    found = {(cell.row, cell.qualifier, cell.timestamp) for cell in await rig.cells(NOTIFY)}
    assert found == {
        (b"put", b"f", 100),
        (b"put", b"g", 100),
        (b"deleted", b"f", 101),
        (b"deleted", b"g", 101),
        (b"weak", b"h", 102),
    }
    assert rig.tablet.statistics().notifications_written == 5


# ---------------------------------------------------------------- judging


async def test_what_transactions_meet_is_shown_as_far_as_it_fits_into_the_answer() -> None:
    rig = await OneRoundRig(answer_bytes_max=250).open()
    rows = [b"%d" % number for number in range(9)]
    await rig.apply(*(prewrite(row, 5, b"x" * 60) for row in rows))
    result = await rig.commit(*(one_round(10 + n, {row: b""}) for n, row in enumerate(rows)))
    shown = [one.result.outcome for one in result.uncommitted]
    assert shown.count(REFUSED) in (2, 3)
    assert shown.count(NOT_EXECUTED) == len(rows) - shown.count(REFUSED)
    assert result.ByteSize() < 250 + 100 * len(rows)


async def test_its_own_commit_is_shown_even_if_the_answer_is_full() -> None:
    rig = await OneRoundRig(answer_bytes_max=10).open()
    requests = [one_round(10 + n, {b"%d" % n: b"long" * 10}) for n in range(3)]
    await rig.commit(*requests)
    found = [one.result for one in (await rig.commit(*requests)).uncommitted]
    assert [(one.outcome, one.failed_condition) for one in found] == [(REFUSED, 0)] * 3


async def test_weak_notifications_fill_the_queue_as_cells_do() -> None:
    rig = await OneRoundRig(queue_bytes_max=10_000).open()
    request = one_round(10, {b"a": b"1"})
    for number in range(30):
        request.notifications.add(row=b"%d" % number, column=b"w", observers=[b"h"])
    first = await under_way(rig.commit(request), seconds=0)
    with pytest.raises(Overloaded):
        await rig.commit(one_round(11, {b"b": b"2"}))
    assert list((await first).commit_timestamps) == [100]


@pytest.mark.parametrize("start", [5, 10, 15])
async def test_a_lock_on_any_cell_stops_it_its_own_too(rig: OneRoundRig, start: int) -> None:
    """Its own lock is that of another committer, in two phases: it alone may go on."""
    await rig.apply(prewrite(b"b", start))
    refusal = only(await rig.commit(one_round(10, {b"a": b"1", b"b": b"2"})))
    assert (refusal.outcome, refusal.failed_condition) == (REFUSED, 2)
    assert refusal.cell.value.startswith(own(start))


async def test_a_repeated_request_finds_its_commit(rig: OneRoundRig) -> None:
    await rig.commit(one_round(10, {b"a": b"1"}))
    await rig.commit(one_round(120, {b"a": b"2"}))
    found = only(await rig.commit(one_round(10, {b"a": b"1"})))
    assert (found.outcome, found.failed_condition, found.cell.timestamp) == (REFUSED, 0, 100)
    assert await rig.value(b"a", 300) == b"2"


@pytest.mark.parametrize(
    ("step", "condition", "timestamp"),
    [(roll_back(b"b", 10), 1, 10), (written(b"b", 11, 12), 3, 12)],
    ids=["a marker", "a newer commit"],
)
async def test_what_is_on_any_cell_stops_it(
    rig: OneRoundRig, step: pb.Mutation, condition: int, timestamp: int
) -> None:
    """A late copy must not commit what `resolve` has rolled back."""
    await rig.apply(step)
    found = only(await rig.commit(one_round(10, {b"a": b"1", b"b": b"2"})))
    assert (found.outcome, found.failed_condition) == (REFUSED, condition)
    assert (found.cell.row, found.cell.timestamp) == (b"b", timestamp)
    assert await rig.value(b"a", 200) is None


async def test_a_refusal_leaves_only_while_the_tablet_is_owned(rig: OneRoundRig) -> None:
    await rig.apply(prewrite(b"a", 5))
    rig.owner = False
    assert only(await rig.commit(one_round(10, {b"a": b"1"}))).outcome == UNKNOWN


async def test_two_transactions_of_one_cell_follow_each_other(rig: OneRoundRig) -> None:
    result = await rig.commit(one_round(10, {b"a": b"1"}), one_round(11, {b"a": b"2"}))
    assert list(result.commit_timestamps) == [100, 0]
    assert result.uncommitted[0].result.failed_condition == 3


# ---------------------------------------------------------------- what changes the tablet


async def test_what_needs_all_cells_let_go_is_not_starved_by_a_stream_of_transactions(
    rig: OneRoundRig,
) -> None:
    done = asyncio.ensure_future(rig.tablet.set_schema_version(4))
    begun = asyncio.get_running_loop().time()
    stream = await under_way(_commit_all_the_time(rig, until=begun + 60))
    for number in range(5):
        await rig.tablet.raise_safe_points(SafePoints(reads=1 + number))
    assert asyncio.get_running_loop().time() < begun + 30
    await asyncio.gather(done, stream)


async def _commit_all_the_time(rig: OneRoundRig, until: float) -> None:
    running: set[asyncio.Future[pb.TransactionBatchResult]] = set()
    number = 0
    while asyncio.get_running_loop().time() < until:
        number += 1
        request = together([one_round(10 + number, {b"row-%d" % number: b"x"})], schema_version=4)
        running.add(asyncio.ensure_future(rig.tablet.commit(request, deadline_seconds=1e9)))
        await asyncio.sleep(0.1)
    results = await asyncio.gather(*running)
    assert all(list(result.commit_timestamps) != [0] for result in results)


@pytest.mark.parametrize("others", [1, 2, 4])
async def test_a_transaction_is_not_starved_by_those_that_need_all_cells_let_go(
    rig: OneRoundRig,
    others: int,
) -> None:
    """They overlap: while one of them writes, the others wait."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + 300.0

    async def raise_all_the_time(number: int) -> None:
        while loop.time() < ends:
            number += others
            await rig.tablet.raise_safe_points(SafePoints(collected=number))

    raising = [asyncio.ensure_future(raise_all_the_time(number)) for number in range(others)]
    await asyncio.sleep(3.3)
    for number in range(5):
        begun = loop.time()
        result = await rig.commit(one_round(1_000_000 + number, {b"row-%d" % number: b"x"}))
        assert loop.time() - begun < 10.0, result
    await asyncio.gather(*raising)


# ---------------------------------------------------------------- deadlines


async def test_a_transaction_that_waits_for_a_cell_is_answered_at_its_deadline(
    rig: OneRoundRig,
) -> None:
    rig.oracle.gate = asyncio.Event()
    holding = await under_way(rig.commit(one_round(10, {b"a": b"1"})), seconds=0)
    begun = asyncio.get_running_loop().time()
    result = only(await rig.commit(one_round(20, {b"a": b"2", b"b": b"2"}), within_seconds=3.0))
    assert asyncio.get_running_loop().time() - begun == pytest.approx(3.0)
    assert result.outcome == NOT_EXECUTED
    assert "deadline passed" in result.error.message
    assert "other transactions hold its cells" in result.error.message
    # It has left the lines, so its marker does not wait for it.
    assert [one.outcome for one in await rig.mutate(roll_back(b"b", 20))] == [APPLIED]
    rig.oracle.gate.set()
    assert list((await holding).commit_timestamps) == [100]
    assert [one.outcome for one in await rig.mutate(roll_back(b"a", 20))] == [APPLIED]


async def test_a_transaction_kept_out_by_a_change_is_answered_at_its_deadline(
    rig: OneRoundRig,
) -> None:
    """Its marker does not wait for it then: no transaction may hold cells, and still its place in
    the line is free."""
    rig.oracle.gate = asyncio.Event()
    holding = await under_way(rig.commit(one_round(10, {b"a": b"1"})), seconds=0)
    changing = await under_way(rig.tablet.raise_safe_points(SafePoints(collected=1)), seconds=0.1)
    late = rig.committing(one_round(20, {b"b": b"2"}), within_seconds=3.0)
    in_time = rig.committing(one_round(30, {b"c": b"3"}), within_seconds=60.0)
    said = not_executed(only(await late)).message
    assert "the tablet waits for all cells to be let go" in said
    assert await outcomes(started(rig, roll_back(b"b", 20))) == [APPLIED]
    assert not changing.done()
    rig.oracle.gate.set()
    found = [list((await one).commit_timestamps) for one in (holding, in_time)]
    assert found == [[100], [200]]
    await changing
    assert await rig.value(b"c", 300) == b"3"


async def test_a_transaction_is_not_written_after_its_deadline(rig: OneRoundRig) -> None:
    """Its cells are let go: nothing else waits for it, and a reader sees what was there before."""
    rig.oracle.seconds = 0.1
    writing = await under_way(rig.mutate(written(b"z", 5, 6)), seconds=0)
    late = rig.committing(one_round(10, {b"a": b"1"}), within_seconds=0.5)
    in_time = rig.committing(one_round(11, {b"b": b"1"}), within_seconds=5.0)
    assert "waited for its batch" in not_executed(only(await late)).message
    assert list((await in_time).commit_timestamps) == [200]
    assert await rig.value(b"a", 300) is None
    assert [one.outcome for one in await rig.mutate(roll_back(b"a", 10))] == [APPLIED]
    await writing


# What waits for the cells that a transaction holds while it commits in one round, and how long.


@dataclass(eq=False)
class Committing:
    """Holds a cell, and counts how often it is looked at."""

    cells: Sequence[bytes]
    start: int = 10
    looks: int = 0

    @property
    def commit_ts(self) -> int:
        self.looks += 1
        return 0


def _committing(rows: int) -> tuple[HeldCells, list[Committing]]:
    held = HeldCells()
    holders = [Committing([cell_prefix(b"%03d" % row, COLUMN)]) for row in range(rows)]
    for holder in holders:
        held.hold(holder)
    return held, holders


async def test_reads_at_or_above_the_start_wait_and_see_the_commit(rig: OneRoundRig) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    scanning = await under_way(rig.scan(150), seconds=0.1)
    assert [one.done() for one in (reading, scanning)] == [False, False]
    assert await rig.value(b"a", 9) is None  # below the start
    assert await rig.value(b"b", 150) is None  # another cell
    assert list((await committing).commit_timestamps) == [100]
    assert await reading == b"1"
    assert list((await scanning)[0].found.values) == [b"1"]


@pytest.mark.parametrize("row", [b"a", b"named like \0read\0\0\1"])
async def test_a_read_of_all_columns_waits_too(rig: OneRoundRig, row: bytes) -> None:
    committing = await under_way(rig.commit(one_round(10, {row: b"1"})))
    reading = await under_way(rig.read_row(row, 150), seconds=0.1)
    assert not reading.done()
    await committing
    assert list((await reading).found.values) == [b"1"]


async def test_a_read_goes_on_once_the_commit_is_known_to_be_above_it(rig: OneRoundRig) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    reading = asyncio.ensure_future(rig.value(b"a", 50))
    await asyncio.sleep(0.4)
    assert not reading.done()
    await asyncio.sleep(0.2)  # the oracle has answered: 100
    assert (reading.done(), committing.done()) == (True, False)
    assert await reading is None
    await committing


async def test_reads_wait_until_memory_knows_of_the_batch() -> None:
    """The storage shows a batch before its writer hears that the write has ended."""

    class Heard(SlowDisk):
        async def heard(self) -> None:
            await asyncio.sleep(1)

    rig = await OneRoundRig(disk=Heard()).open()
    committing = rig.committing(one_round(10, {b"a": b"1"}))
    await asyncio.sleep(2.5)  # durable, and not yet heard
    reading = await under_way(rig.value(b"a", 150), seconds=0.1)
    assert not reading.done()
    await committing
    assert await reading == b"1"


async def test_a_read_does_not_wait_for_ever(rig: OneRoundRig) -> None:
    rig.oracle.seconds = 60.0
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    with pytest.raises(NotReady, match="oracle or the disk is slow"):
        await rig.value(b"a", 150)
    await committing


async def test_the_time_that_a_read_waits_does_not_start_again_when_other_cells_change_hands(
    rig: OneRoundRig,
) -> None:
    rig.oracle.seconds = 60.0
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    rig.oracle.seconds = 0.5
    for row in (b"b", b"c", b"d", b"e"):
        await rig.commit(one_round(20, {row: b"2"}))
    assert reading.done()
    with pytest.raises(NotReady, match="oracle or the disk is slow"):
        await reading
    await committing


async def test_what_waits_is_woken_only_by_those_in_its_way() -> None:
    held, (first, *others) = _committing(100)
    looks = 0

    def look() -> list[Holder]:
        nonlocal looks
        looks += 1
        return held.in_the_way_in_rows(b"000", b"000\0", 50)

    waiting = asyncio.ensure_future(held.let_pass(look))
    for holder in others:
        await asyncio.sleep(0)
        held.changed([holder])
        held.let_go([holder])
    assert (looks, waiting.done()) == (1, False)
    held.let_go([first])
    await waiting
    assert looks == 1  # no cell is held by then


async def test_a_read_of_one_row_does_not_look_at_what_is_held_in_others() -> None:
    held, holders = _committing(200)
    assert held.in_the_way_in_rows(b"007", b"007\0", 50) == [holders[7]]
    assert held.in_the_way_in_rows(b"198", b"", 50) == holders[198:]
    assert held.in_the_way_in_rows(b"199", b"", 5) == []
    assert sum(holder.looks for holder in holders) == 3


async def test_a_marker_waits_and_finds_the_commit(rig: OneRoundRig) -> None:
    """`resolve` asks the primary of a transaction that is on its way."""
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    marking = started(rig, roll_back(b"a", 10))
    other = started(rig, written(b"b", 10, 20))
    assert await outcomes(other) == [APPLIED]
    assert not marking.done()
    assert list((await committing).commit_timestamps) == [100]
    (refusal,) = await marking
    assert (refusal.outcome, refusal.failed_condition) == (REFUSED, 0)
    assert refusal.cell.timestamp == 100


async def test_a_transaction_waits_for_a_cell_that_a_batch_is_changing(rig: OneRoundRig) -> None:
    """Judged against what is not durable, it would miss the marker that is on its way."""
    marking = await under_way(rig.mutate(roll_back(b"a", 10)))
    committing = rig.committing(one_round(10, {b"a": b"1"}))
    await asyncio.sleep(0.1)
    assert rig.oracle.asked == []
    await marking
    assert only(await committing).failed_condition == 1


async def test_the_next_transactions_get_their_timestamps_while_the_disk_is_busy(
    rig: OneRoundRig,
) -> None:
    began = rig.clock.monotonic_seconds()
    first = rig.committing(one_round(10, {b"a": b"1"}))
    await asyncio.sleep(1.2)  # at the disk, until 2.0
    second = rig.committing(one_round(11, {b"b": b"2"}))
    await first
    await second
    # One after the other: asked at 2.0, written at 4.0.
    assert rig.clock.monotonic_seconds() - began == pytest.approx(3.2)


async def test_mutations_do_not_wait_for_the_oracle(rig: OneRoundRig) -> None:
    rig.oracle.seconds = 60.0
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    await rig.apply(written(b"b", 10, 20))
    assert not committing.done()
    await committing


async def test_a_mutation_that_waits_is_judged_before_the_next_transaction(
    rig: OneRoundRig,
) -> None:
    """A crowd of transactions would otherwise keep a roll-back waiting forever."""
    first = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    marking = started(rig, roll_back(b"a", 20))
    await asyncio.sleep(0.1)
    second = rig.committing(one_round(20, {b"a": b"2"}))
    await first
    assert await outcomes(marking) == [APPLIED]
    assert only(await second).failed_condition == 1


# ---------------------------------------------------------------- changes


async def test_a_scan_of_changes_waits_for_a_commit_at_or_below_its_end() -> None:
    """There is no lock that would tell it to end earlier, and it never comes back."""
    rig = await OneRoundRig(change_feed=True).open()
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    reading = asyncio.ensure_future(changes(rig, 0, 150))
    looking = await under_way(look(rig, 0, 150), seconds=0.1)
    assert [one.done() for one in (reading, looking)] == [False, False]
    assert (await changes(rig, 0, 9)).reached == 9  # below the start
    await committing
    answer = await reading
    assert (answer.changes, answer.reached) == ([Change(100, b"a", COLUMN, b"1")], 150)
    assert await looking == (150, 100)


async def test_a_scan_of_changes_goes_on_once_the_commit_is_known_to_be_above_its_end() -> None:
    rig = await OneRoundRig(change_feed=True).open()
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    reading = asyncio.ensure_future(changes(rig, 0, 50))
    await asyncio.sleep(0.6)  # the oracle has answered: 100
    assert not committing.done()
    assert (await reading).reached == 50
    await committing
    assert (await changes(rig, 50, 150)).changes == [Change(100, b"a", COLUMN, b"1")]


async def test_reads_of_whole_rows_do_not_wait_for_a_read_lock(rig: OneRoundRig) -> None:
    """It changes nothing that they could see."""
    await rig.apply(written(b"a", 2, 3, b"v"))
    committing = await under_way(rig.commit(one_round_read_lock(10, b"a")))
    reading = asyncio.ensure_future(rig.read_row(b"a", 150))
    scanning = await under_way(rig.scan(150), seconds=0.1)
    assert [one.done() for one in (reading, scanning, committing)] == [True, True, False]
    assert list((await reading).found.values) == [b"v"]
    assert list((await scanning)[0].found.values) == [b"v"]
    await committing


# Transactions that commit in one round, and are not executed, or of which that is unknown.

# ---------------------------------------------------------------- not executed


async def test_without_a_timestamp_it_is_not_executed_and_lets_go(rig: OneRoundRig) -> None:
    rig.oracle.failure = Unavailable("cut off")
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    marking = started(rig, roll_back(b"a", 10))
    assert "cut off" in not_executed(only(await committing)).message
    assert await reading is None
    assert await outcomes(marking) == [APPLIED]


async def test_a_start_from_the_future_stops_only_its_own_transaction(rig: OneRoundRig) -> None:
    result = await rig.commit(one_round(100, {b"a": b"1"}), one_round(50, {b"b": b"2"}))
    assert list(result.commit_timestamps) == [0, 101]
    assert result.uncommitted[0].result.outcome == NOT_EXECUTED
    assert not await rig.value(b"a", 150)


async def test_a_server_without_an_oracle_does_not_execute_it() -> None:
    rig = await Rig().open()
    result = await rig.tablet.commit(together([one_round(10, {b"a": b"1"})]), deadline_seconds=1e9)
    assert only(result).outcome == NOT_EXECUTED


async def test_an_oracle_that_takes_no_more_requests_leaves_no_cell_held() -> None:
    def full(count: int) -> Awaitable[int]:
        raise Overloaded("too many wait", retry_after_seconds=1.0)

    rig = await Rig(timestamps=full).open()
    for start in (10, 11):
        request = together([one_round(start, {b"a": b"1"})])
        assert (
            "too many wait"
            in not_executed(only(await rig.tablet.commit(request, deadline_seconds=1e9))).message
        )
    assert await rig.value(b"a", 150) is None


async def test_a_batch_that_fails_leaves_it_unknown_and_what_waits_not_executed(
    rig: OneRoundRig,
) -> None:
    rig.slow_disk.failure = OSError("on fire")
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})), seconds=1.5)
    behind = rig.committing(one_round(11, {b"b": b"1"}))
    waiting = rig.committing(one_round(12, {b"a": b"2"}))
    assert (only(await committing).outcome, only(await behind).outcome) == (UNKNOWN, NOT_EXECUTED)
    assert only(await waiting).outcome == NOT_EXECUTED


async def test_a_lost_tablet_leaves_it_unknown(rig: OneRoundRig) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    rig.owner = False
    assert only(await committing).outcome == UNKNOWN
    assert [type(error) for error in rig.closed] == [TabletMoved]


async def test_below_the_safe_point_it_is_not_executed_but_found_by_a_later_copy(
    rig: OneRoundRig,
) -> None:
    message = one_round(10, {b"a": b"1", b"b": b"2"})
    assert list((await rig.commit(message)).commit_timestamps) == [100]
    await rig.tablet.raise_safe_points(rig.tablet.safe_points._replace(transactions=101))
    found = only(await rig.commit(message))
    assert (found.outcome, found.failed_condition, found.cell.timestamp) == (REFUSED, 0, 100)
    other = not_executed(only(await rig.commit(one_round(11, {b"a": b"1"}))))
    assert other.HasField("snapshot_too_old"), "a conflict proves nothing down there"


async def test_a_full_queue_refuses_the_request() -> None:
    rig = await OneRoundRig(queue_bytes_max=2_000).open()
    first = await under_way(rig.commit(one_round(10, {b"a": b"x" * 1_800})))
    with pytest.raises(Exception, match="bytes of mutations wait"):
        await rig.commit(one_round(11, {b"b": b"x" * 1_800}))
    await first
    await rig.commit(one_round(101, {b"b": b"x" * 1_800}))


# ---------------------------------------------------------------- what changes between batches


async def test_a_new_schema_is_acknowledged_only_after_what_was_judged_under_the_old_one(
    rig: OneRoundRig,
) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    changing = asyncio.ensure_future(rig.tablet.set_schema_version(4))
    await asyncio.sleep(0.1)
    waiting = rig.committing(one_round(11, {b"b": b"1"}))
    with pytest.raises(SchemaChanged, match="at version 3"):
        await rig.commit(one_round(12, {b"c": b"1"}), schema_version=4)
    assert not changing.done()
    await changing
    assert committing.done()
    later = rig.committing(one_round(12, {b"c": b"1"}), schema_version=4)
    assert list((await committing).commit_timestamps) == [100]
    result = only(await waiting)
    assert (result.outcome, result.error.schema_changed.schema_version) == (NOT_EXECUTED, 4)
    assert list((await later).commit_timestamps) == [200]


async def test_a_fence_waits_for_the_cells_and_then_finds_them(rig: OneRoundRig) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    response = await rig.tablet.fence(FENCE)
    assert committing.done()
    assert response.obstacle.row == b"a"


async def test_behind_a_fence_it_is_not_executed(rig: OneRoundRig) -> None:
    raising = await under_way(rig.tablet.fence(FENCE))  # it is on its way to the disk
    result = only(await rig.commit(one_round(60, {b"a": b"1"})))
    await raising
    assert result.outcome == NOT_EXECUTED
    assert result.error.HasField("not_ready")


async def test_closing_lets_what_is_held_land_and_refuses_the_rest(rig: OneRoundRig) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    waiting = rig.committing(one_round(11, {b"a": b"2"}))
    closing = asyncio.ensure_future(rig.tablet.close())
    assert list((await committing).commit_timestamps) == [100]
    await closing
    assert only(await waiting).outcome == NOT_EXECUTED
    assert await (await OneRoundRig(disk=rig.disk).open()).value(b"a", 150) == b"1"


async def test_a_caller_that_leaves_does_not_stop_what_is_held(rig: OneRoundRig) -> None:
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    waiting = rig.committing(one_round(11, {b"a": b"2"}))
    await asyncio.sleep(0.1)
    committing.cancel()
    waiting.cancel()
    assert await rig.value(b"a", 150) == b"1"
    assert not await rig.cells(ROLLBACK)
    await rig.commit(one_round(120, {b"a": b"3"}))
    assert [cell.timestamp for cell in await rig.cells(WRITE)] == [200, 100]


# ---------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("start_timestamps", lambda b: b.ClearField("start_timestamps")),
        ("start_timestamps[0]", lambda b: b.start_timestamps.__setitem__(0, 0)),
        ("start_timestamps[0]", lambda b: b.start_timestamps.__setitem__(0, 2**63)),
        ("cells", lambda b: b.cells.append(1)),
        ("cells[0]", lambda b: b.cells.__setitem__(0, 0)),
        ("cells[0]", lambda b: b.cells.__setitem__(0, 3)),
        ("cells", lambda b: b.cells.__setitem__(0, 1)),
        ("cells[0]", lambda b: b.rows.__setitem__(1, b"a")),
        ("rows", lambda b: b.rows.append(b"x")),
        ("rows[0]", lambda b: b.rows.__setitem__(0, b"x" * 5_000)),
        ("columns[0]", lambda b: b.columns.__setitem__(0, b"x" * 5_000)),
        ("kinds[0]", lambda b: b.kinds.__setitem__(0, 9)),
        ("values[0]", lambda b: b.kinds.__setitem__(0, DELETE)),
        ("values[0]", lambda b: b.values.__setitem__(0, b"x" * (5 << 20))),
        ("observed", lambda b: b.observed.add(column=b"c", observers=[b""])),
        ("observed", lambda b: b.observed.add(column=b"c", observers=[b"f", b"f"])),
        ("notifications[0]", lambda b: b.notifications.add(transaction=1)),
        ("followed[0]", lambda b: b.followed.append(1)),
    ],
)
async def test_a_malformed_request_is_refused_and_changes_nothing(
    rig: OneRoundRig, field: str, spoil: Callable[[pb.TransactionBatch], None]
) -> None:
    request = together([one_round(10, {b"a": b"1", b"b": b"2"})])
    spoil(request)
    with refused(field):
        await rig.tablet.commit(request, deadline_seconds=1e9)
    assert not await rig.cells(WRITE)


async def test_a_row_of_another_tablet_is_refused() -> None:
    rig = await OneRoundRig(identity=replace(IDENTITY, start=b"m")).open()
    with pytest.raises(InvalidArgument, match="not in this tablet"):
        await rig.commit(one_round(10, {b"a": b"1"}))
