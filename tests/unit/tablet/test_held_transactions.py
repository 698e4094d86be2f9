"""Transactions that commit in one round: what stops them, what waits for them, how they end."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import Overloaded
from percolator.formats.records import KIND_PUT_IN_DATA, WriteRecord
from tests.unit.tablet.tablets import (
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
