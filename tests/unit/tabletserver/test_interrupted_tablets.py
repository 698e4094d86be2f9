"""What can happen to a tablet before its end: failures, orders and other owners, concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from percolator.errors import StoreFault, StoreUnusable, TabletMoved
from percolator.services.tabletserver.tablets import REOPEN_SECONDS_MAX
from percolator.tablet import opening
from percolator.tablet.state import Ownership, TabletState
from percolator.testing.memory_storage import MemoryStorage
from tests.unit.tabletserver.memory_store import Machine, MemoryStore, disk_full, outcomes, put


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
    fault: StoreFault,
) -> None:
    """Its directory is gone for good, and an order to close it may never come."""
    machine = Machine()
    await machine.open(1)
    machine.store.disks[1].failures = 1
    machine.store.open_fails = disk_full()
    await machine.mutate(put(1, b"row"))
    await machine.clock.sleep(1)
    machine.store.owners[1].lost = True
    machine.store.open_fails = StoreUnusable("not there", fault=fault)
    await machine.clock.sleep(2 * REOPEN_SECONDS_MAX)
    assert machine.tablets.all() == []
    assert machine.tablets.events.lost == 1
    assert all(task.done() for task in machine.tasks)


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
    go_on, load = asyncio.Event(), opening.load

    async def slow(state: TabletState) -> None:
        await go_on.wait()
        await load(state)

    monkeypatch.setattr(opening, "load", slow)
    return go_on


async def test_another_master_that_orders_the_same_waits_for_what_the_former_one_has_ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The former order serves the tablet then: two would open one directory twice."""
    machine = Machine(store=(store := _StoreOfOne()))
    go_on = _loading_waits(monkeypatch)
    former = asyncio.create_task(machine.open(1))
    await asyncio.sleep(0.01)
    former.cancel()
    orders = [asyncio.create_task(machine.open(1, epoch=epoch)) for epoch in (1, 2, 1)]
    closing = asyncio.create_task(machine.tablets.close(1, 1))
    await asyncio.sleep(0.01)
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
    order = asyncio.create_task(machine.open(1))
    await asyncio.sleep(0.01)
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

    async def hangs(state: TabletState) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(opening, "load", hangs)
    orders = [asyncio.create_task(machine.open(1, epoch=epoch)) for epoch in (1, 1, 2)]
    await asyncio.sleep(0.01)
    await machine.tablets.close_all()
    ended = await asyncio.gather(*orders, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    assert machine.tablets.all() == []
    assert store.opened == 1
    assert not store.any_open


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
    ending = asyncio.create_task(machine.tablets.close_all())
    await asyncio.sleep(0.01)
    assert not ending.done()
    gate.set()
    await ending
    assert not store.any_open
    assert machine.tablets.all() == []
    await asyncio.wait([ordered])
