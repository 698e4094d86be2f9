"""Transactions that commit in one round: what stops them, what waits for them, how they end."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import Overloaded
from percolator.formats.records import KIND_PUT_IN_DATA, WriteRecord
from percolator.tablet.state import SafePoints
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    APPLIED,
    COLUMN,
    DATA,
    LOCK,
    NOT_EXECUTED,
    NOTIFY,
    REFUSED,
    UNKNOWN,
    WRITE,
    own,
    prewrite,
    roll_back,
    started,
    written,
)
from tests.unit.tablet.whole_transactions import (
    DELETE,
    LOCK_ONLY,
    OneRoundRig,
    only,
    together,
    whole,
)

# ---------------------------------------------------------------- committing


async def test_all_cells_are_written_at_one_fresh_timestamp() -> None:
    rig = OneRoundRig()
    await rig.open()
    result = await rig.commit(whole(10, {b"a": b"1", b"b": b"2"}))
    assert list(result.commit_timestamps) == [100]
    assert not result.uncommitted
    assert await rig.value(b"a", 100) == b"1"
    assert await rig.value(b"b", 100) == b"2"
    assert await rig.value(b"a", 99) is None
    assert not await rig.cells(LOCK)


async def test_transactions_of_a_request_share_a_question_to_the_oracle_and_a_write() -> None:
    rig = OneRoundRig()
    await rig.open()
    before = rig.slow_disk.writes
    result = await rig.commit(*(whole(10 + n, {b"%d" % n: b"x"}) for n in range(5)))
    assert list(result.commit_timestamps) == [100, 101, 102, 103, 104]
    assert rig.oracle.asked == [5]
    assert rig.slow_disk.writes == before + 1


async def test_the_timestamp_after_a_commit_is_set_aside_if_another_transaction_follows() -> None:
    rig = OneRoundRig()
    await rig.open()
    request = together(whole(10 + n, {b"%d" % n: b"x"}) for n in range(4))
    request.followed.extend((0, 2))
    result = await rig.tablet.commit(request, deadline_seconds=1e9)
    assert rig.oracle.asked == [6]
    assert list(result.commit_timestamps) == [100, 102, 103, 105]
    assert list(result.followed) == [0, 2]


async def test_nothing_is_set_aside_after_a_commit_that_was_found_or_refused() -> None:
    """The request that committed it has said so, and its caller may have begun there."""
    rig = OneRoundRig()
    await rig.open()
    request = together([whole(10, {b"a": b"1"}), whole(11, {b"b": b"1"})])
    request.followed.append(0)
    await rig.tablet.commit(request, deadline_seconds=1e9)
    result = await rig.tablet.commit(request, deadline_seconds=1e9)
    assert list(result.commit_timestamps) == [0, 0]
    assert not result.followed


async def test_every_kind_of_write_leaves_the_record_of_its_kind() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.commit(whole(10, {b"a": b"1", b"b": b"2"}))
    await rig.commit(
        whole(110, {b"a": b""}, DELETE),
        whole(111, {b"b": b""}, LOCK_ONLY),
        whole(112, {b"c": b"long"}, KIND_PUT_IN_DATA),
    )
    assert await rig.value(b"a", 300) is None
    assert await rig.value(b"b", 300) == b"2"
    assert await rig.value(b"c", 300) == b"long"
    assert [cell.value for cell in await rig.cells(DATA)] == [b"long"]


async def test_a_lock_only_record_names_the_change_below_it() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.commit(whole(10, {b"a": b"1"}))
    await rig.commit(whole(110, {b"a": b""}, LOCK_ONLY))
    records = [WriteRecord.decode(c.value) for c in await rig.cells(WRITE, from_timestamp=101)]
    assert [record.last_change for record in records] == [100]


async def test_observers_are_notified_of_puts_and_deletions_but_not_of_locks() -> None:
    rig = OneRoundRig()
    await rig.open()
    request = together(
        [
            whole(10, {b"put": b"1"}),
            whole(11, {b"deleted": b""}, DELETE),
            whole(12, {b"locked": b""}, LOCK_ONLY),
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


async def test_a_repeated_request_finds_its_commit() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.commit(whole(10, {b"a": b"1"}))
    await rig.commit(whole(120, {b"a": b"2"}))
    refused = only(await rig.commit(whole(10, {b"a": b"1"})))
    assert (refused.outcome, refused.failed_condition) == (REFUSED, 0)
    assert refused.cell.timestamp == 100
    assert await rig.value(b"a", 300) == b"2"


async def test_a_marker_on_any_cell_stops_it() -> None:
    """A late copy must not commit what `resolve` has rolled back."""
    rig = OneRoundRig()
    await rig.open()
    await rig.apply(roll_back(b"b", 10))
    refused = only(await rig.commit(whole(10, {b"a": b"1", b"b": b"2"})))
    assert (refused.outcome, refused.failed_condition) == (REFUSED, 1)
    assert refused.cell.row == b"b"
    assert await rig.value(b"a", 200) is None


async def test_what_transactions_meet_is_shown_as_far_as_the_answer_has_room() -> None:
    rig = OneRoundRig(answer_bytes_max=250)
    await rig.open()
    rows = [b"%d" % number for number in range(9)]
    await rig.apply(*(prewrite(row, 5, b"x" * 60) for row in rows))
    result = await rig.commit(*(whole(10 + n, {row: b""}) for n, row in enumerate(rows)))
    shown = [one.result.outcome for one in result.uncommitted]
    assert shown.count(REFUSED) in (2, 3)
    assert shown.count(NOT_EXECUTED) == len(rows) - shown.count(REFUSED)
    assert result.ByteSize() < 250 + 100 * len(rows)


async def test_its_own_commit_is_shown_even_if_the_answer_is_full() -> None:
    rig = OneRoundRig(answer_bytes_max=10)
    await rig.open()
    requests = [whole(10 + n, {b"%d" % n: b"long" * 10}) for n in range(3)]
    await rig.commit(*requests)
    repeated = await rig.commit(*requests)
    assert [one.result.failed_condition for one in repeated.uncommitted] == [0, 0, 0]
    assert [one.result.outcome for one in repeated.uncommitted] == [REFUSED] * 3


async def test_weak_notifications_fill_the_queue_as_cells_do() -> None:
    rig = OneRoundRig(queue_bytes_max=10_000)
    await rig.open()
    request = whole(10, {b"a": b"1"})
    for number in range(30):
        request.notifications.add(row=b"%d" % number, column=b"w", observers=[b"h"])
    first = rig.committing(request)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await rig.commit(whole(11, {b"b": b"2"}))
    assert list((await first).commit_timestamps) == [100]


@pytest.mark.parametrize("start", [5, 10, 15])
async def test_a_lock_on_any_cell_stops_it_its_own_too(start: int) -> None:
    """Its own lock is that of another committer, in two phases: it alone may go on."""
    rig = OneRoundRig()
    await rig.open()
    await rig.apply(prewrite(b"b", start))
    refused = only(await rig.commit(whole(10, {b"a": b"1", b"b": b"2"})))
    assert (refused.outcome, refused.failed_condition) == (REFUSED, 2)
    assert refused.cell.value.startswith(own(start))


async def test_a_newer_commit_on_any_cell_stops_it() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.apply(written(b"b", 11, 12))
    refused = only(await rig.commit(whole(10, {b"a": b"1", b"b": b"2"})))
    assert (refused.outcome, refused.failed_condition) == (REFUSED, 3)
    assert refused.cell.timestamp == 12


async def test_a_refusal_leaves_only_while_the_tablet_is_owned() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.apply(prewrite(b"a", 5))
    rig.owner = False
    assert only(await rig.commit(whole(10, {b"a": b"1"}))).outcome == UNKNOWN


async def test_two_transactions_of_one_cell_follow_each_other() -> None:
    rig = OneRoundRig()
    await rig.open()
    result = await rig.commit(whole(10, {b"a": b"1"}), whole(11, {b"a": b"2"}))
    assert list(result.commit_timestamps) == [100, 0]
    assert result.uncommitted[0].result.failed_condition == 3


# ---------------------------------------------------------------- what changes the tablet


async def test_what_needs_all_cells_let_go_has_its_turn_among_a_stream_of_transactions() -> None:
    rig = OneRoundRig()
    await rig.open()
    done = asyncio.ensure_future(rig.tablet.set_schema_version(4))
    begun = asyncio.get_running_loop().time()
    stream = asyncio.ensure_future(_commit_all_the_time(rig, until=begun + 60))
    await asyncio.sleep(0.5)
    for number in range(5):
        await rig.tablet.raise_safe_points(SafePoints(reads=1 + number))
    assert asyncio.get_running_loop().time() < begun + 30
    await asyncio.gather(done, stream)


async def _commit_all_the_time(rig: OneRoundRig, until: float) -> None:
    running: set[asyncio.Future[pb.TransactionBatchResult]] = set()
    number = 0
    while asyncio.get_running_loop().time() < until:
        number += 1
        request = together([whole(10 + number, {b"row-%d" % number: b"x"})], schema_version=4)
        running.add(asyncio.ensure_future(rig.tablet.commit(request, deadline_seconds=1e9)))
        await asyncio.sleep(0.1)
    results = await asyncio.gather(*running)
    assert all(list(result.commit_timestamps) != [0] for result in results)


@pytest.mark.parametrize("others", [1, 2, 4])
async def test_a_transaction_has_its_turn_among_those_that_need_all_cells_let_go(
    others: int,
) -> None:
    """They overlap: while one of them writes, the others wait."""
    rig = OneRoundRig()
    await rig.open()
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
        result = await rig.commit(whole(1_000_000 + number, {b"row-%d" % number: b"x"}))
        assert loop.time() - begun < 10.0, result
    await asyncio.gather(*raising)


# ---------------------------------------------------------------- deadlines


async def test_a_transaction_that_waits_for_a_cell_is_answered_at_its_deadline() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.gate = asyncio.Event()
    holding = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    result = only(await rig.commit(whole(20, {b"a": b"2", b"b": b"2"}), within_seconds=3.0))
    assert asyncio.get_running_loop().time() - begun == pytest.approx(3.0)
    assert result.outcome == NOT_EXECUTED
    assert "deadline passed" in result.error.message
    assert "other transactions hold its cells" in result.error.message
    # It has left the lines, so its marker does not wait for it.
    assert [one.outcome for one in await rig.mutate(roll_back(b"b", 20))] == [APPLIED]
    rig.oracle.gate.set()
    assert list((await holding).commit_timestamps) == [100]
    assert [one.outcome for one in await rig.mutate(roll_back(b"a", 20))] == [APPLIED]


async def test_a_transaction_kept_out_by_a_change_is_answered_at_its_deadline() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.gate = asyncio.Event()
    holding = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0)
    changing = asyncio.ensure_future(rig.tablet.raise_safe_points(SafePoints(collected=1)))
    await asyncio.sleep(0.1)
    late = rig.committing(whole(20, {b"b": b"2"}), within_seconds=3.0)
    in_time = rig.committing(whole(30, {b"b": b"3"}), within_seconds=60.0)
    result = only(await late)
    assert result.outcome == NOT_EXECUTED
    assert "the tablet waits for all cells to be let go" in result.error.message
    marking = asyncio.ensure_future(rig.mutate(roll_back(b"b", 20)))
    rig.oracle.gate.set()
    assert list((await holding).commit_timestamps) == [100]
    assert list((await in_time).commit_timestamps) == [200]
    assert [one.outcome for one in await marking] == [APPLIED]
    await changing
    assert await rig.value(b"b", 300) == b"3"


async def test_a_marker_does_not_wait_for_its_own_transaction_after_the_deadline() -> None:
    """No transaction may hold cells, and still its place in the line is free."""
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.gate = asyncio.Event()
    holding = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0)
    changing = asyncio.ensure_future(rig.tablet.raise_safe_points(SafePoints(collected=1)))
    await asyncio.sleep(0.1)
    assert only(await rig.commit(whole(20, {b"b": b"2"}), within_seconds=3.0)).outcome == (
        NOT_EXECUTED
    )
    assert [one.outcome for one in await rig.mutate(roll_back(b"b", 20))] == [APPLIED]
    assert not changing.done()
    rig.oracle.gate.set()
    await asyncio.gather(holding, changing)


async def test_a_transaction_is_not_written_after_its_deadline() -> None:
    """Its cells are let go: nothing else waits for it, and a reader sees what was there before."""
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.seconds = 0.1
    writing = started(rig, written(b"z", 5, 6))
    await asyncio.sleep(0)
    late = rig.committing(whole(10, {b"a": b"1"}), within_seconds=0.5)
    in_time = rig.committing(whole(11, {b"b": b"1"}), within_seconds=5.0)
    result = only(await late)
    assert result.outcome == NOT_EXECUTED
    assert "waited for its batch" in result.error.message
    assert list((await in_time).commit_timestamps) == [200]
    assert await rig.value(b"a", 300) is None
    assert [one.outcome for one in await rig.mutate(roll_back(b"a", 10))] == [APPLIED]
    await writing
