"""Many tablets on one server: opened, lost, failing and coming back, each by itself."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from percolator.errors import InvalidArgument, StoreFault, StoreUnusable, TabletMoved
from percolator.services.chassis.epoch_directory import EPOCH_MAX
from percolator.services.tabletserver.tablets import REOPEN_SECONDS_MAX
from percolator.tablet import opening
from percolator.tablet.state import TabletState
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tabletserver.memory_store import (
    Machine,
    MemoryOwnership,
    disk_full,
    outcomes,
    put,
    target,
)


async def test_an_opened_tablet_serves_and_opening_it_again_changes_nothing() -> None:
    machine = Machine()
    first = await machine.open(1)
    assert outcomes((await machine.mutate(put(1, b"row")))[0]) == ["APPLIED"]
    assert (await machine.open(1)).epoch == first.epoch
    assert machine.store.opened == 1
    assert await machine.value(1, b"row") == b"v"


async def test_a_higher_epoch_closes_the_lower_one_and_inherits_its_rows() -> None:
    machine = Machine()
    await machine.open(1, epoch=1)
    await machine.mutate(put(1, b"row"))
    await machine.open(1, epoch=2)
    assert await machine.value(1, b"row", epoch=2) == b"v"
    (stale,) = await machine.mutate(put(1, b"row", epoch=1))
    assert stale.error.HasField("tablet_moved")
    with pytest.raises(TabletMoved):
        await machine.open(1, epoch=1)


async def test_nothing_is_kept_of_tablets_that_have_left() -> None:
    """Tables are created and dropped for as long as a server runs."""
    machine = Machine()
    for tablet in range(1, 11):
        await machine.open(tablet)
        await machine.handler.close_tablet(pb.CloseTabletRequest(tablet_id=tablet, epoch=1))
    for unknown in range(100, 110):
        await machine.handler.close_tablet(pb.CloseTabletRequest(tablet_id=unknown, epoch=1))
    assert len(machine.tablets._orders) == 0
    assert machine.tablets.all() == []


async def test_the_same_epoch_with_another_range_is_refused() -> None:
    machine = Machine()
    await machine.open(1, end=b"m")
    with pytest.raises(InvalidArgument, match="range"):
        await machine.open(1, end=b"n")


@pytest.mark.parametrize(
    ("field", "value"),
    [("table_id", 0), ("tablet_id", 0), ("epoch", 0), ("epoch", EPOCH_MAX + 1), ("range", 0)],
)
async def test_an_impossible_order_names_its_field(field: str, value: int) -> None:
    machine = Machine()
    request = pb.OpenTabletRequest(table_id=1, tablet_id=1, epoch=1)
    if field == "range":
        request.range.start, request.range.end = b"b", b"a"
    else:
        setattr(request, field, value)
    with pytest.raises(InvalidArgument, match=field):
        await machine.handler.open_tablet(request)
    assert machine.tablets.all() == []


async def test_a_newer_schema_version_comes_with_opening_again_and_never_goes_back() -> None:
    machine = Machine()
    await machine.open(1, schema=1)
    await machine.open(1, schema=3)
    assert (await machine.open(1, schema=2)).schema_version == 3
    (refused,) = await machine.mutate(put(1, b"row"))
    assert refused.error.schema_changed.schema_version == 3


async def test_a_schema_version_ordered_while_the_tablet_is_opened_again_is_judged_under(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acknowledged but not judged under, observed cells would change without a notification."""
    machine = Machine()
    await machine.open(1, schema=1)
    (served,) = machine.tablets.all()
    loading, go_on, load = asyncio.Event(), asyncio.Event(), opening.load

    async def slow(state: TabletState) -> None:
        loading.set()
        await go_on.wait()
        await load(state)

    monkeypatch.setattr(opening, "load", slow)
    machine.store.disks[1].failures = 1
    await machine.mutate(put(1, b"row"))
    await loading.wait()
    order = asyncio.create_task(machine.open(1, schema=2))
    await asyncio.sleep(0.01)
    assert served.report().schema_version == 1
    assert served.describe().schema_version == 1
    go_on.set()
    assert (await order).schema_version == 2
    assert served.report().schema_version == 2
    assert (await served.serving()).schema_version == 2


async def test_a_schema_version_is_reported_once_the_batch_under_the_older_one_is_answered() -> (
    None
):
    """The master takes a report as an acknowledgement, so everything before must be finished."""
    machine = Machine()
    await machine.open(1, schema=1)
    (served,) = machine.tablets.all()
    gate = machine.store.disks[1].gate = asyncio.Event()
    writing = asyncio.create_task(machine.mutate(put(1, b"row")))
    await asyncio.sleep(0.01)
    order = asyncio.create_task(machine.open(1, schema=2))
    await asyncio.sleep(0.01)
    assert not writing.done()
    assert served.report().schema_version == 1
    assert served.describe().schema_version == 1
    gate.set()
    assert (await order).schema_version == 2
    assert writing.done()
    assert served.report().schema_version == 2


async def test_a_schema_version_that_could_not_be_installed_is_not_acknowledged() -> None:
    machine = Machine()
    await machine.open(1, schema=1)
    (served,) = machine.tablets.all()
    machine.store.disks[1].failures = 1
    machine.store.open_fails = disk_full()
    await machine.mutate(put(1, b"row"))
    with pytest.raises(StoreUnusable):
        await machine.open(1, schema=2)
    assert served.report().schema_version == 1
    machine.store.open_fails = None
    await machine.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert served.report().schema_version == (await served.serving()).schema_version == 2


async def test_an_order_to_open_is_carried_out_even_if_its_caller_stops_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If each order cancelled the last one, a tablet that opens slowly would never be open."""
    machine = Machine()
    load = opening.load

    async def slow(state: TabletState) -> None:
        await machine.clock.sleep(5.0)
        await load(state)

    monkeypatch.setattr(opening, "load", slow)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await machine.open(1)
    await machine.open(1)
    assert machine.store.opened == 1
    assert outcomes((await machine.mutate(put(1, b"row")))[0]) == ["APPLIED"]


async def test_an_opening_that_fails_after_its_master_has_left_fails_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tablet's description says why; conftest.py refuses what the event loop would log."""
    machine = Machine()

    async def fails(state: TabletState) -> None:
        await machine.clock.sleep(5.0)
        raise disk_full()

    monkeypatch.setattr(opening, "load", fails)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await machine.open(1)
    await machine.clock.sleep(4.0)
    (described,) = machine.tablets.describe([])
    assert described.error.HasField("store_unusable")


async def test_a_tablet_that_is_still_being_opened_has_moved_once_another_owner_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise clients that were sent here earlier would ask here while this disk hangs."""
    machine = Machine()

    async def hangs(state: TabletState) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(opening, "load", hangs)
    order = asyncio.create_task(machine.open(1))
    await asyncio.sleep(0.01)
    (result,) = await machine.mutate(put(1, b"row"))
    assert result.error.HasField("not_ready")
    machine.store.owners[1].lost = True
    (result,) = await machine.mutate(put(1, b"row"))
    assert result.error.HasField("tablet_moved")
    order.cancel()
    await machine.tablets.close_all()
    assert machine.tablets.all() == []


async def test_a_failed_write_is_unknown_and_the_tablet_opens_again_by_itself() -> None:
    machine = Machine()
    await machine.open(1)
    await machine.open(2)
    machine.store.disks[1].failures = 1
    failed, other = await machine.mutate(put(1, b"row"), put(2, b"row"))
    assert outcomes(failed) == ["UNKNOWN"]
    assert outcomes(other) == ["APPLIED"]
    await machine.clock.sleep(1)
    assert await machine.value(1, b"row") == b"v"
    assert machine.tablets.events.reopened == 1


async def test_a_full_disk_at_reopening_is_tried_until_there_is_room() -> None:
    machine = Machine()
    await machine.open(1)
    machine.store.disks[1].failures = 1
    machine.store.open_fails = disk_full()
    with structlog.testing.capture_logs() as log:
        await machine.mutate(put(1, b"row"))
        await machine.clock.sleep(60)
    assert [one["event"] for one in log].count("tablet cannot be opened yet") == 1
    (described,) = machine.tablets.describe([])
    assert described.error.HasField("store_unusable")
    machine.store.open_fails = None
    await machine.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert await machine.value(1, b"row") == b"v"
    (described,) = machine.tablets.describe([])
    assert not described.HasField("error")


async def test_tablets_that_one_disk_has_closed_are_not_opened_again_at_the_same_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each opening replays a log: all at once, again and again, they would delay each other."""
    machine = Machine()
    attempts: dict[int, list[float]] = {1: [], 2: []}

    async def fails(ownership: MemoryOwnership, *, open_tablets: int) -> None:
        attempts[ownership.identity.tablet_id].append(machine.clock.monotonic_seconds())
        raise disk_full()

    for tablet in attempts:
        await machine.open(tablet)
        machine.store.disks[tablet].failures = 1
    monkeypatch.setattr(machine.store, "open", fails)
    await machine.mutate(put(1, b"row"), put(2, b"row"))
    await machine.clock.sleep(60)
    first, second = attempts.values()
    assert first[0] == pytest.approx(second[0])
    assert min(len(first), len(second)) > 10
    assert not set(first[1:]) & set(second[1:])


async def test_a_damaged_tablet_stays_closed_and_is_reported_while_others_serve() -> None:
    machine = Machine()
    await machine.open(2)
    machine.store.open_fails = StoreUnusable("bad", fault=StoreFault.DAMAGED)
    with pytest.raises(StoreUnusable):
        await machine.open(1)
    machine.store.open_fails = None
    damaged, whole = machine.tablets.describe([])
    assert damaged.error.HasField("store_unusable")
    assert not whole.HasField("error")
    assert outcomes((await machine.mutate(put(2, b"row")))[0]) == ["APPLIED"]
    # Repaired by hand, and asked for again.
    await machine.open(1)
    assert outcomes((await machine.mutate(put(1, b"row")))[0]) == ["APPLIED"]


async def test_a_tablet_that_another_server_owns_now_is_released_without_an_answer() -> None:
    machine = Machine()
    await machine.open(1)
    machine.store.owners[1].lost = True
    (result,) = await machine.mutate(put(1, b"row"))
    assert outcomes(result) == ["UNKNOWN"]
    await machine.clock.sleep(1)
    assert machine.tablets.all() == []
    assert machine.tablets.events.lost == 1
    (refused,) = await machine.mutate(put(1, b"row"))
    assert refused.error.HasField("tablet_moved")


async def test_closing_waits_for_the_running_batch_and_is_repeatable() -> None:
    machine = Machine()
    await machine.open(1)
    gate = machine.store.disks[1].gate = asyncio.Event()
    writing = asyncio.create_task(machine.mutate(put(1, b"row")))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(machine.tablets.close(1, 1))
    await asyncio.sleep(0.01)
    assert not closing.done()
    gate.set()
    await closing
    assert outcomes((await writing)[0]) == ["APPLIED"]
    await machine.tablets.close(1, 1)
    machine.store.disks[1].gate = None
    await machine.open(1, epoch=2)
    assert await machine.value(1, b"row", epoch=2) == b"v"


async def test_an_order_to_close_an_older_epoch_is_refused() -> None:
    machine = Machine()
    await machine.open(1, epoch=5)
    with pytest.raises(TabletMoved):
        await machine.tablets.close(1, 4)
    assert len(machine.tablets.all()) == 1


async def test_closing_ends_the_attempts_to_open_again() -> None:
    machine = Machine()
    await machine.open(1)
    machine.store.disks[1].failures = 1
    machine.store.open_fails = disk_full()
    await machine.mutate(put(1, b"row"))
    await machine.clock.sleep(1)
    await machine.tablets.close_all()
    machine.store.open_fails = None
    await machine.clock.sleep(60)
    assert machine.store.opened == 1
    assert machine.tablets.all() == []


async def test_what_former_owners_left_is_cleared_up_after_opening() -> None:
    machine = Machine()
    await machine.open(1)
    await machine.clock.sleep(1)
    assert machine.store.cleared == [1]


async def test_former_owners_are_cleared_up_even_if_the_first_order_to_open_fails() -> None:
    """It stayed until the next owner came, which may take months."""
    machine = Machine()
    machine.store.open_fails = StoreUnusable("no room", fault=StoreFault.DISK_FULL)
    with pytest.raises(StoreUnusable):
        await machine.open(3)
    machine.store.open_fails = None
    await machine.open(3)
    await machine.open(3)
    await asyncio.sleep(0.1)
    assert machine.store.cleared == [3]


async def test_unknown_tablets_are_left_out_of_a_description() -> None:
    machine = Machine()
    await machine.open(1, end=b"m")
    await machine.open(2, start=b"m")
    (described,) = machine.tablets.describe([2, 9])
    assert (described.tablet_id, described.range.start) == (2, b"m")
    with pytest.raises(TabletMoved):
        await machine.tablets.serving(target(9))


async def test_many_tablets_are_warned_of_once_and_again_when_they_have_doubled() -> None:
    """A failover opens hundreds within seconds."""
    machine = Machine()

    async def warned_at(tablets: int, epoch: int) -> list[int]:
        with structlog.testing.capture_logs() as log:
            for tablet in range(tablets):
                await machine.open(tablet + 1, epoch)
        for tablet in range(tablets):
            await machine.tablets.close(tablet + 1, epoch)
        return [line["tablets"] for line in log if "many tablets" in line["event"]]

    assert await warned_at(250, epoch=1) == [101, 203]
    assert await warned_at(102, epoch=2) == [101]
