"""Many tablets on one server: opened, lost, failing and coming back, each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog

from percolator.errors import InvalidArgument, StoreFault, StoreUnusable, TabletMoved
from percolator.services.chassis.epoch_directory import (
    EPOCH_MAX,
    Inheritance,
    remove_superseded,
    take_over,
)
from percolator.services.chassis.files import DiskThreads, RealFiles
from percolator.services.tabletserver.storage import Ancestry, SharedDirectoryStore, clone_leveldb
from percolator.services.tabletserver.tablets import REOPEN_SECONDS_MAX, OrderQueues
from percolator.tablet import opening
from percolator.tablet.state import Ownership, TabletIdentity, TabletState
from percolator.testing.memory_storage import MemoryStorage
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import from_detail, to_detail
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.unit.tablet.tablets import under_way
from tests.unit.tabletserver.memory_store import (
    Machine,
    MemoryOwnership,
    MemoryStore,
    disk_full,
    outcomes,
    put,
    target,
)


async def test_an_opened_tablet_serves_and_opening_it_again_changes_nothing(
    machine: Machine,
) -> None:
    first = await machine.open(1)
    assert outcomes((await machine.mutate(put(1, b"row")))[0]) == ["APPLIED"]
    assert (await machine.open(1)).epoch == first.epoch
    assert machine.store.opened == 1
    assert await machine.value(1, b"row") == b"v"


async def test_a_higher_epoch_closes_the_lower_one_and_inherits_its_rows(serving: Machine) -> None:
    await serving.mutate(put(1, b"row"))
    await serving.open(1, epoch=2)
    assert await serving.value(1, b"row", epoch=2) == b"v"
    assert (await serving.refusal(put(1, b"row", epoch=1))).HasField("tablet_moved")
    with pytest.raises(TabletMoved):
        await serving.open(1, epoch=1)


async def test_nothing_is_kept_of_tablets_that_have_left(machine: Machine) -> None:
    """Tables are created and dropped for as long as a server runs."""
    for tablet in range(1, 11):
        await machine.open(tablet)
        await machine.handler.close_tablet(pb.CloseTabletRequest(tablet_id=tablet, epoch=1))
    for unknown in range(100, 110):
        await machine.handler.close_tablet(pb.CloseTabletRequest(tablet_id=unknown, epoch=1))
    assert (len(machine.tablets._orders), machine.tablets.all()) == (0, [])


async def test_the_same_epoch_with_another_range_is_refused(machine: Machine) -> None:
    await machine.open(1, end=b"m")
    with pytest.raises(InvalidArgument, match="range"):
        await machine.open(1, end=b"n")


@pytest.mark.parametrize(
    ("field", "value"),
    [("table_id", 0), ("tablet_id", 0), ("epoch", 0), ("epoch", EPOCH_MAX + 1), ("range", 0)],
)
async def test_an_impossible_order_names_its_field(
    machine: Machine, field: str, value: int
) -> None:
    request = pb.OpenTabletRequest(table_id=1, tablet_id=1, epoch=1)
    if field == "range":
        request.range.start, request.range.end = b"b", b"a"
    else:
        setattr(request, field, value)
    with pytest.raises(InvalidArgument, match=field):
        await machine.handler.open_tablet(request)
    assert machine.tablets.all() == []


async def test_a_newer_schema_version_comes_with_opening_again_and_never_goes_back(
    serving: Machine,
) -> None:
    await serving.open(1, schema=3)
    assert (await serving.open(1, schema=2)).schema_version == 3
    assert (await serving.refusal(put(1, b"row"))).schema_changed.schema_version == 3


async def test_a_schema_version_ordered_while_the_tablet_is_opened_again_is_judged_under(
    serving: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acknowledged but not judged under, observed cells would change without a notification."""
    (served,) = serving.tablets.all()
    loading, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        loading.set()
        await go_on.wait()

    _before_loading(monkeypatch, wait)
    serving.store.disks[1].failures = 1
    await serving.mutate(put(1, b"row"))
    await loading.wait()
    order = await under_way(serving.open(1, schema=2), seconds=0.01)
    assert (served.report().schema_version, served.describe().schema_version) == (1, 1)
    go_on.set()
    assert (await order).schema_version == 2
    assert served.report().schema_version == 2
    assert (await served.serving()).schema_version == 2


def _before_loading(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[object]]) -> None:
    """Does some work before a tablet that is opened takes in what is stored."""
    load = opening.load

    async def later(state: TabletState) -> None:
        await work()
        await load(state)

    monkeypatch.setattr(opening, "load", later)


async def test_a_schema_version_is_reported_once_the_batch_under_the_older_one_is_answered(
    serving: Machine,
) -> None:
    """The master takes a report as an acknowledgement, so everything before must be finished."""
    (served,) = serving.tablets.all()
    gate = serving.store.disks[1].gate = asyncio.Event()
    writing = await under_way(serving.mutate(put(1, b"row")), seconds=0.01)
    order = asyncio.create_task(serving.open(1, schema=2))
    await asyncio.sleep(0.01)
    assert not writing.done()
    assert (served.report().schema_version, served.describe().schema_version) == (1, 1)
    gate.set()
    assert (await order).schema_version == 2
    assert writing.done()
    assert served.report().schema_version == 2


async def test_a_schema_version_that_could_not_be_installed_is_not_acknowledged(
    serving: Machine,
) -> None:
    (served,) = serving.tablets.all()
    await serving.lose_disk()
    with pytest.raises(StoreUnusable):
        await serving.open(1, schema=2)
    assert served.report().schema_version == 1
    serving.store.open_fails = None
    await serving.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert served.report().schema_version == (await served.serving()).schema_version == 2


async def test_an_order_to_open_is_carried_out_even_if_its_caller_stops_waiting(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If each order cancelled the last one, a tablet that opens slowly would never be open."""
    _before_loading(monkeypatch, lambda: machine.clock.sleep(5.0))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await machine.open(1)
    await machine.open(1)
    assert machine.store.opened == 1
    assert outcomes((await machine.mutate(put(1, b"row")))[0]) == ["APPLIED"]


async def test_an_opening_that_fails_after_its_master_has_left_fails_silently(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tablet's description says why; conftest.py refuses what the event loop would log."""

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
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise clients that were sent here earlier would ask here while this disk hangs."""
    _before_loading(monkeypatch, asyncio.Event().wait)
    order = await under_way(machine.open(1), seconds=0.01)
    assert (await machine.refusal(put(1, b"row"))).HasField("not_ready")
    machine.store.owners[1].lost = True
    assert (await machine.refusal(put(1, b"row"))).HasField("tablet_moved")
    order.cancel()
    await machine.tablets.close_all()
    assert machine.tablets.all() == []


async def test_a_failed_write_is_unknown_and_the_tablet_opens_again_by_itself(
    serving: Machine,
) -> None:
    await serving.open(2)
    serving.store.disks[1].failures = 1
    failed, other = await serving.mutate(put(1, b"row"), put(2, b"row"))
    assert (outcomes(failed), outcomes(other)) == (["UNKNOWN"], ["APPLIED"])
    await serving.clock.sleep(1)
    assert await serving.value(1, b"row") == b"v"
    assert serving.tablets.events.reopened == 1


async def test_a_tablet_opens_again_although_the_store_does_not_say_who_owns_it(
    serving: Machine,
) -> None:
    """Opening asks again. Until it has succeeded, no request is answered as if it were owned."""
    serving.store.owners[1].silent = True
    serving.store.disks[1].failures = 1
    serving.store.open_fails = StoreUnusable("silent", fault=StoreFault.INPUT_OUTPUT)
    await serving.mutate(put(1, b"row"))
    await serving.clock.sleep(1)
    assert (await serving.refusal(put(1, b"row"))).HasField("not_ready")
    serving.store.open_fails = None
    serving.store.owners[1].silent = False
    await serving.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert await serving.value(1, b"row") == b"v"
    assert (serving.tablets.events.reopened, serving.tablets.events.lost) == (1, 0)


async def test_a_full_disk_at_reopening_is_tried_until_it_is_not_full(serving: Machine) -> None:
    serving.store.disks[1].failures = 1
    serving.store.open_fails = disk_full()
    with structlog.testing.capture_logs() as log:
        await serving.mutate(put(1, b"row"))
        await serving.clock.sleep(60)
    assert [one["event"] for one in log].count("tablet cannot be opened yet") == 1
    (described,) = serving.tablets.describe([])
    assert described.error.HasField("store_unusable")
    serving.store.open_fails = None
    await serving.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert await serving.value(1, b"row") == b"v"
    (described,) = serving.tablets.describe([])
    assert not described.HasField("error")


async def test_tablets_that_one_disk_has_closed_are_not_opened_again_at_the_same_moments(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each opening replays a log: all at once, again and again, they would delay each other."""
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


async def test_a_damaged_tablet_stays_closed_and_is_reported_while_others_serve(
    machine: Machine,
) -> None:
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


async def test_a_tablet_that_another_server_owns_now_is_released_without_an_answer(
    serving: Machine,
) -> None:
    serving.store.owners[1].lost = True
    (result,) = await serving.mutate(put(1, b"row"))
    assert outcomes(result) == ["UNKNOWN"]
    await serving.clock.sleep(1)
    assert (serving.tablets.all(), serving.tablets.events.lost) == ([], 1)
    assert (await serving.refusal(put(1, b"row"))).HasField("tablet_moved")


async def test_closing_waits_for_the_running_batch_and_is_repeatable(serving: Machine) -> None:
    gate = serving.store.disks[1].gate = asyncio.Event()
    writing = await under_way(serving.mutate(put(1, b"row")), seconds=0.01)
    closing = asyncio.create_task(serving.tablets.close(1, 1))
    await asyncio.sleep(0.01)
    assert not closing.done()
    gate.set()
    await closing
    assert outcomes((await writing)[0]) == ["APPLIED"]
    await serving.tablets.close(1, 1)
    serving.store.disks[1].gate = None
    await serving.open(1, epoch=2)
    assert await serving.value(1, b"row", epoch=2) == b"v"


async def test_an_order_about_an_older_epoch_is_refused_with_the_one_that_is_served(
    machine: Machine,
) -> None:
    await machine.open(1, epoch=9)
    with pytest.raises(TabletMoved):
        await machine.tablets.close(1, 4)
    with pytest.raises(TabletMoved) as refused:
        await machine.open(1, epoch=3)
    assert (refused.value.highest_epoch, len(machine.tablets.all())) == (9, 1)


async def test_closing_ends_the_attempts_to_open_again(serving: Machine) -> None:
    await serving.lose_disk()
    await serving.clock.sleep(1)
    await serving.tablets.close_all()
    serving.store.open_fails = None
    await serving.clock.sleep(60)
    assert (serving.store.opened, serving.tablets.all()) == (1, [])


async def test_what_former_owners_left_is_cleared_up_after_opening(serving: Machine) -> None:
    await serving.clock.sleep(1)
    assert serving.store.cleared == [1]


async def test_former_owners_are_cleared_up_even_if_the_first_order_to_open_fails(
    machine: Machine,
) -> None:
    """It stayed until the next owner came, which may take months."""
    machine.store.open_fails = StoreUnusable("no room", fault=StoreFault.DISK_FULL)
    with pytest.raises(StoreUnusable):
        await machine.open(3)
    machine.store.open_fails = None
    await machine.open(3)
    await machine.open(3)
    await asyncio.sleep(0.1)
    assert machine.store.cleared == [3]


async def test_unknown_tablets_are_left_out_of_a_description(machine: Machine) -> None:
    await machine.open(1, end=b"m")
    await machine.open(2, start=b"m")
    (described,) = machine.tablets.describe([2, 9])
    assert (described.tablet_id, described.range.start) == (2, b"m")
    with pytest.raises(TabletMoved):
        await machine.tablets.serving(target(9))


async def test_many_tablets_are_warned_of_once_and_again_when_they_have_doubled(
    machine: Machine,
) -> None:
    """A failover opens hundreds within seconds."""

    async def warned_at(tablets: int, epoch: int) -> list[int]:
        with structlog.testing.capture_logs() as log:
            for tablet in range(tablets):
                await machine.open(tablet + 1, epoch)
        for tablet in range(tablets):
            await machine.tablets.close(tablet + 1, epoch)
        return [line["tablets"] for line in log if "many tablets" in line["event"]]

    assert (await warned_at(250, epoch=1), await warned_at(102, epoch=2)) == ([101, 203], [101])


# What can happen to a tablet before its end: failures, orders and other owners, concurrently.


class _StoreOfOne(MemoryStore):
    """Like LevelDB, it refuses to open a tablet that is already open."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[MemoryStorage] = []

    async def open(self, ownership: Ownership, *, open_tablets: int) -> MemoryStorage:
        if self.any_open:
            raise StoreUnusable("this process has it open", fault=StoreFault.INPUT_OUTPUT)
        self.storages.append(await super().open(ownership, open_tablets=open_tablets))
        return self.storages[-1]

    @property
    def any_open(self) -> bool:
        return not all(map(_is_closed, self.storages))


def _is_closed(storage: MemoryStorage) -> bool:
    try:
        storage.get(b"")
    except RuntimeError:
        return True
    except OSError:  # a write failed, and it is still open
        return False
    return False


@pytest.mark.parametrize("fault", [StoreFault.DISK_FULL, StoreFault.DAMAGED])
async def test_a_tablet_is_not_opened_again_where_another_owner_has_taken_it_over(
    serving: Machine,
    fault: StoreFault,
) -> None:
    """Its directory is gone for good, and an order to close it may never come."""
    await serving.lose_disk()
    await serving.clock.sleep(1)
    serving.store.owners[1].lost = True
    serving.store.open_fails = StoreUnusable("not there", fault=fault)
    await serving.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert (serving.tablets.all(), serving.tablets.events.lost) == ([], 1)
    assert all(task.done() for task in serving.tasks)


@pytest.mark.parametrize("order", ["close", "open"])
async def test_a_tablet_that_failed_is_closed_whatever_is_ordered_at_that_moment(
    order: str,
) -> None:
    """Otherwise its LevelDB would stay open, use memory, and keep any other one from opening."""
    failed = asyncio.Event()

    class Interrupted(Machine):
        def _background(self, name: str, work: Coroutine[Any, Any, object], /) -> asyncio.Task[Any]:
            failed.set()  # those that wait for it get a turn before the work starts
            return super()._background(name, work)

    machine = Interrupted(store=(store := _StoreOfOne()))
    await machine.open(1)
    (served,) = machine.tablets.all()
    store.disks[1].failures = 1
    failed.clear()
    writing = asyncio.create_task(machine.mutate(put(1, b"row")))
    await failed.wait()
    assert store.any_open
    await getattr(served, order)()
    assert store.any_open == (order == "open")
    assert outcomes((await writing)[0]) == ["UNKNOWN"]
    await machine.tablets.close_all()
    assert not store.any_open


def _loading_waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Opening a tablet stops half-way until this is set."""
    go_on = asyncio.Event()
    _before_loading(monkeypatch, go_on.wait)
    return go_on


async def test_another_master_that_orders_the_same_waits_for_what_the_former_one_has_ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The former order serves the tablet then: two would open one directory twice."""
    machine = Machine(store=(store := _StoreOfOne()))
    go_on = _loading_waits(monkeypatch)
    (await under_way(machine.open(1), seconds=0.01)).cancel()
    orders = [asyncio.create_task(machine.open(1, epoch=epoch)) for epoch in (1, 2, 1)]
    closing = await under_way(machine.tablets.close(1, 1), seconds=0.01)
    assert not any(task.done() for task in (*orders, closing))
    go_on.set()
    same, higher, late = await asyncio.gather(*orders, return_exceptions=True)
    assert not isinstance(same, BaseException)
    assert not isinstance(higher, BaseException)
    assert (same.epoch, higher.epoch) == (1, 2)
    assert isinstance(late, TabletMoved)
    with pytest.raises(TabletMoved):
        await closing
    assert store.opened == 2
    assert outcomes((await machine.mutate(put(1, b"row", epoch=2)))[0]) == ["APPLIED"]


async def test_an_order_to_close_what_is_still_being_opened_closes_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(store=(store := _StoreOfOne()))
    go_on = _loading_waits(monkeypatch)
    order = await under_way(machine.open(1), seconds=0.01)
    closing = asyncio.create_task(machine.tablets.close(1, 1))
    await asyncio.sleep(0.01)
    closing.cancel()
    go_on.set()
    await order
    await machine.clock.sleep(1)
    assert machine.tablets.all() == []
    assert not store.any_open


async def test_what_is_opened_when_the_process_ends_is_closed_and_nothing_that_waits_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(store=(store := _StoreOfOne()))
    _loading_waits(monkeypatch)
    orders = [asyncio.create_task(machine.open(1, epoch=epoch)) for epoch in (1, 1, 2)]
    await asyncio.sleep(0.01)
    await machine.tablets.close_all()
    ended = await asyncio.gather(*orders, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    assert (machine.tablets.all(), store.opened, store.any_open) == ([], 1, False)


@pytest.mark.parametrize("order", ["close", "open at a higher epoch"])
async def test_what_is_being_closed_when_the_process_ends_is_closed_before_it_does(
    order: str,
) -> None:
    """A process that ended under a thread that still flushes would crash."""
    machine = Machine(store=(store := _StoreOfOne()))
    await machine.open(1)
    gate = store.disks[1].gate = asyncio.Event()
    ordered: asyncio.Task[Any]
    if order == "close":
        ordered = asyncio.create_task(machine.tablets.close(1, 1))
    else:
        ordered = asyncio.create_task(machine.open(1, epoch=2))
    await asyncio.sleep(0.01)
    assert machine.tablets.all() == []
    ending = await under_way(machine.tablets.close_all(), seconds=0.01)
    assert not ending.done()
    gate.set()
    await ending
    assert not store.any_open
    assert machine.tablets.all() == []
    await asyncio.wait([ordered])


# Orders about one tablet come one after another, and leave nothing behind.


async def test_orders_about_a_tablet_run_one_after_another_in_their_order() -> None:
    queues, log = OrderQueues(), []

    async def order(tablet: int, name: str) -> None:
        async with queues.in_order(tablet):
            log.append(f"{name} begins")
            await asyncio.sleep(1)
            log.append(f"{name} ends")

    await asyncio.gather(order(7, "first"), order(7, "second"), order(8, "other"))
    assert [one for one in log if "other" not in one] == [
        "first begins",
        "first ends",
        "second begins",
        "second ends",
    ]
    assert log.index("other begins") < log.index("first ends")
    assert len(queues) == 0


async def test_an_order_that_fails_or_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    queues = OrderQueues()

    async def fail() -> None:
        async with queues.in_order(7):
            await asyncio.sleep(1)
            raise LookupError

    async def wait() -> None:
        async with queues.in_order(7):
            raise AssertionError("it was cancelled before it began")

    failing, waiting = asyncio.create_task(fail()), asyncio.create_task(wait())
    await asyncio.sleep(0.5)
    waiting.cancel()
    with pytest.raises(LookupError):
        await failing
    assert waiting.cancelled()
    assert len(queues) == 0


# A tablet whose newest epoch was deleted, or is missing in a restored copy, is not served.

ROOT = Path("/store")
TABLET = Path("/store/1/7")


def made(*directories: Path) -> MemoryFiles:
    """A store in memory with these directories."""
    disk = MemoryDisk()
    for directory in directories:
        disk.make_durable_directory(directory)
    return MemoryFiles(disk)


async def write(files: MemoryFiles, path: Path) -> None:
    async with await files.create(path) as file:
        await file.append(path.name.encode())


async def served_at_2() -> MemoryFiles:
    """Owned at epoch 1, and then at epoch 2, which acknowledged more."""
    files = made(TABLET)
    await take_over(files, TABLET, 1, clone_leveldb)
    await add(files, "CURRENT")
    await take_over(files, TABLET, 2, clone_leveldb)
    await add(files, "000003.log")
    return files


async def add(files: MemoryFiles, name: str) -> None:
    live = max(one for one in await files.list(TABLET) if one in ("e1", "e2"))
    await write(files, TABLET / live / name)


async def owned(files: MemoryFiles, epoch: int, served_epoch: int) -> list[str]:
    """Names that the owner at `epoch` serves."""
    store = SharedDirectoryStore(files, ROOT, DiskThreads(0, "none"))
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=epoch, start=b"", end=b"")
    ancestry = Ancestry(must_exist=True, served_epoch=served_epoch)
    return await files.list((await store.take_over(tablet, ancestry)).path)


@pytest.mark.parametrize("epoch", [2, 3], ids=["the owner that lost it", "the next owner"])
async def test_a_tablet_never_goes_back_to_an_epoch_before_the_last_one_that_was_served(
    epoch: int,
) -> None:
    files = await served_at_2()
    await files.rename(TABLET / "e2", TABLET / "elsewhere")
    with pytest.raises(StoreUnusable, match=r"e2 was in use, but .* e1\.sealed lacks") as e:
        await owned(files, epoch, served_epoch=2)
    assert e.value.fault is StoreFault.DAMAGED
    assert await files.list(TABLET) == ["e1.sealed", "elsewhere"], "nothing was changed"
    await files.rename(TABLET / "elsewhere", TABLET / "e2")
    assert await owned(files, 3, served_epoch=2) == ["000003.log", "CURRENT"]


async def test_without_any_epoch_it_is_refused_too() -> None:
    files = await served_at_2()
    for name in await files.list(TABLET):
        await files.rename(TABLET / name, TABLET / f"lost-{name}")
    with pytest.raises(StoreUnusable, match=r"e2 was in use, but .* none is left"):
        await owned(files, 3, served_epoch=2)


async def test_who_gives_the_last_epoch_up_gives_its_name_to_the_one_before() -> None:
    """docs/formats.md tells operators to do this."""
    files = await served_at_2()
    await files.rename(TABLET / "e2", TABLET / "elsewhere")
    await files.rename(TABLET / "e1.sealed", TABLET / "e2.sealed")
    assert await owned(files, 3, served_epoch=2) == ["CURRENT"]


@pytest.mark.parametrize("served_epoch", [0, 1, 2])
async def test_epochs_that_were_used_and_never_served_are_not_missed(served_epoch: int) -> None:
    files = await served_at_2()
    for withdrawn in ("e3.tmp", "e4.withdrawn"):
        await files.make_directory(TABLET / withdrawn)
    assert await owned(files, 5, served_epoch) == ["000003.log", "CURRENT"]


# A claimant that comes too late is told which epoch it would have to be above.


async def refusal(epoch: int, *names: str) -> TabletMoved:
    """The refusal of a claimant at `epoch` where these directories are."""
    files = made(TABLET)
    for name in names:
        await files.make_directory(TABLET / name)
    with pytest.raises(TabletMoved) as refused:
        await take_over(files, TABLET, epoch, clone_leveldb)
    return refused.value


@pytest.mark.parametrize("highest", ["e90", "e90.sealed", "e90.tmp", "e90.withdrawn"])
async def test_the_highest_epoch_in_the_store_is_told_and_reaches_the_master(highest: str) -> None:
    error = await refusal(3, "e2.sealed", "e5.sealed", highest, "e7")
    told = from_detail(to_detail(error))
    assert isinstance(told, TabletMoved)
    assert (told.epoch, told.highest_epoch) == (3, 90)


async def test_a_name_that_no_master_gave_out_is_not_told_as_an_epoch() -> None:
    assert (await refusal(3, f"e{EPOCH_MAX}")).highest_epoch == EPOCH_MAX
    assert (await refusal(3, f"e{EPOCH_MAX + 1}")).highest_epoch == 0


# Directories under a live name whose epoch was sealed: created by a deposed owner.

CHILD = Path("/store/1/8")


async def haunted() -> MemoryFiles:
    """Owned at epoch 1 and sealed by a claimant that died; then `e1` was created again."""
    files = made(TABLET, CHILD)
    owner = await take_over(files, TABLET, 1, clone_leveldb)
    for name in ("CURRENT", "000003.log"):
        await write(files, owner.path / name)
    await files.rename(TABLET / "e1", TABLET / "e1.sealed")
    await make_ghost(files)
    return files


async def make_ghost(files: MemoryFiles) -> None:
    await files.make_directory(TABLET / "e1")
    await write(files, TABLET / "e1" / "LOCK")


async def test_a_ghost_is_put_aside_and_what_was_sealed_is_inherited_and_so_is_a_second() -> None:
    """The claimant that renamed the first ghost died before it removed it."""
    files = await haunted()
    owner = await take_over(files, TABLET, 2, clone_leveldb)
    assert await files.list(owner.path) == ["000003.log", "CURRENT"]
    assert await files.list(TABLET) == ["e1.sealed", "e1.withdrawn", "e2"]
    await make_ghost(files)
    owner = await take_over(files, TABLET, 3, clone_leveldb)
    assert await files.list(owner.path) == ["000003.log", "CURRENT"]
    await remove_superseded(files, TABLET, 3)
    assert await files.list(TABLET) == ["e2.sealed", "e3"]


async def test_a_child_is_cloned_from_what_was_sealed_and_not_from_the_ghost() -> None:
    files = await haunted()
    inheritance = Inheritance(origin=TABLET / "e1")
    owner = await take_over(files, CHILD, 1, clone_leveldb, inheritance)
    assert await files.list(owner.path) == ["000003.log", "CURRENT"]


@pytest.mark.real_time
async def test_no_database_is_created_for_a_tablet_that_was_served_before(tmp_path: Path) -> None:
    """A sealed epoch that holds nothing: serving it as an empty tablet would hide the loss."""
    files = RealFiles()
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=2, start=b"", end=b"")
    (tmp_path / "1" / "7" / "e1.sealed").mkdir(parents=True)
    with DiskThreads(1, "leveldb") as threads:
        store = SharedDirectoryStore(files, tmp_path, threads)
        owned = await store.take_over(tablet, Ancestry(must_exist=True))
        with pytest.raises(StoreUnusable, match="no CURRENT") as caught:
            await store.open(owned, open_tablets=1)
    assert caught.value.fault is StoreFault.DAMAGED
    files.close()


@pytest.mark.real_time
async def test_a_deposed_owner_leaves_no_directory_behind_when_it_opens(tmp_path: Path) -> None:
    files = RealFiles()
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=1, start=b"", end=b"")
    directory = tmp_path / "1" / "7"
    with DiskThreads(1, "leveldb") as threads:
        store = SharedDirectoryStore(files, tmp_path, threads)
        owned = await store.take_over(tablet, Ancestry())
        listed = files.list

        async def sealed_just_then(path: Path) -> list[str]:
            names = await listed(path)
            (directory / "e1").rename(directory / "e1.sealed")
            return names

        files.list = sealed_just_then  # type: ignore[method-assign]
        with pytest.raises(StoreUnusable):
            await store.open(owned, open_tablets=1)
    assert [path.name for path in directory.iterdir()] == ["e1.sealed"]
    files.close()


# What LevelDB's own repair leaves in a tablet's directory does not stay there forever.


async def test_a_repaired_epoch_is_removed_as_any_other() -> None:
    """A repair moves what it has replaced into `lost`. Later epochs would have stayed, too."""
    files = made(TABLET)
    damaged = (await take_over(files, TABLET, 1, clone_leveldb)).path
    await files.make_directory(damaged / "lost")
    for name in ("CURRENT", "MANIFEST-000001", "000004.ldb", "lost/000003.log"):
        await write(files, damaged / name)
    for epoch in (2, 3, 4):
        await take_over(files, TABLET, epoch, clone_leveldb)
    assert await files.list(TABLET / "e4") == ["000004.ldb", "CURRENT", "MANIFEST-000001"]
    await remove_superseded(files, TABLET, 4)
    assert await files.list(TABLET) == ["e3.sealed", "e4"]
