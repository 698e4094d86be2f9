"""Faults of different roles overlap, those of one role do not; what never occurred is named."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import percolator.testing
from percolator import aio
from percolator.recipes import ExportFile
from percolator.world import Random
from tests.chaos import clients as shops
from tests.chaos.clients import Shop
from tests.chaos.compaction import NoEffect
from tests.chaos.faults import Fault
from tests.chaos.recipes import at_work
from tests.chaos.recipes.client import (
    ABORTED,
    COMMITTED,
    Deed,
    Exported,
    Held,
    Log,
    found_in,
    judge,
    logged,
    read,
    torn,
)
from tests.chaos.scene import Roles
from tests.chaos.streams import Streams
from tests.chaos.supervisor import NoRecovery, Pulse, now
from tests.integration import recipes_at_work
from tests.integration.observed_orders import orders, packed, placed, shipped
from tests.integration.recipes_at_work import sums
from tests.unit.connected import Cluster, connected


class Counted(Fault):
    """Takes a while, and notes what else was in effect."""

    def __init__(self, role: str, name: str, log: FaultLog, *also: str) -> None:
        super().__init__(role)
        self._name = name
        self._log = log
        self._also = also

    @property
    def name(self) -> str:
        return self._name

    @property
    def roles(self) -> tuple[str, ...]:
        return (self._role, *self._also)

    async def inject(self, scene: Any, chance: Random) -> float:
        self._log.order.append(self.name)
        self._log.begin(self.roles)
        await asyncio.sleep(1.0 + chance.random())
        self._log.end(self.roles)
        return 1.0


class Missing(Counted):
    async def inject(self, scene: Any, chance: Random) -> float:
        raise NoEffect("there was nothing to break")


class FaultLog:
    """Faults that were in effect at the same time."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.most = 0
        self._disturbed: Counter[str] = Counter()

    def begin(self, roles: tuple[str, ...]) -> None:
        self._disturbed.update(roles)
        assert max(self._disturbed.values()) == 1, "a role was disturbed twice at once"
        self.most = max(self.most, sum(self._disturbed.values()))

    def end(self, roles: tuple[str, ...]) -> None:
        self._disturbed.subtract(roles)


def made(kinds: dict[str, list[Fault]], *, seed: int = 1, together: int = 100) -> Streams:
    scene: Any = SimpleNamespace(roles=Roles())
    return Streams(scene, kinds, seed=seed, together=together)


def kinds(log: FaultLog) -> dict[str, list[Fault]]:
    roles = ("a", "b", "c", "d")
    found: dict[str, list[Fault]] = {
        role: [Counted(role, f"{what} {role}", log) for what in ("kill", "pause", "cut")]
        for role in roles
    }
    found["everything"] = [Counted("everything", "power cut", log, *roles)]
    return found


async def test_streams_inject_faults_at_the_same_time_and_no_role_is_disturbed_twice_at_once() -> (
    None
):
    log = FaultLog()
    streams = made(kinds(log))
    await streams.run(60.0)
    assert log.most >= 3
    assert streams.never_injected() == []
    assert len(streams.injected) > 30


async def test_with_a_limit_of_one_no_two_faults_meet() -> None:
    log = FaultLog()
    streams = made(kinds(log), together=1)
    await streams.run(60.0)
    spans = sorted((one.began, one.ended) for one in streams.injected)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


async def test_each_kind_of_a_stream_occurs_before_any_occurs_again() -> None:
    log = FaultLog()
    streams = made({"a": kinds(log)["a"]})
    await streams.run(60.0)
    assert len(set(log.order[:3])) == len(set(log.order[3:6])) == 3


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_seed_decides_the_order_of_a_stream(seed: int) -> None:
    orders = []
    for _ in range(2):
        log = FaultLog()
        await made({"a": kinds(log)["a"]}, seed=seed).run(60.0)
        orders.append(log.order)
    assert orders[0] == orders[1]


async def test_a_kind_that_never_has_an_effect_is_tried_for_long_and_then_named() -> None:
    log = FaultLog()
    found = kinds(log)
    found["a"].append(Missing("a", "full disk", log))
    streams = made(found)
    began = now()
    await streams.run(10.0)
    assert streams.never_injected() == ["full disk"]
    assert now() - began > 60.0
    assert streams.missed[0] == "full disk: there was nothing to break"


# Everything works again once each probe has succeeded that began after the fault.


class Way:
    """One way to use the cluster, which may be broken."""

    def __init__(self) -> None:
        self.works = asyncio.Event()
        self.works.set()

    async def use(self) -> None:
        await asyncio.sleep(0.1)
        await self.works.wait()


@asynccontextmanager
async def running(*ways: Way) -> AsyncIterator[Pulse]:
    pulse = Pulse({f"way {number}": way.use for number, way in enumerate(ways)}, 30.0)
    task = asyncio.create_task(pulse.run())
    try:
        yield pulse
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_healthy_cluster_works_as_soon_as_the_slowest_probe_was_repeated() -> None:
    async with running(Way(), Way()) as pulse:
        await asyncio.sleep(1.02)
        assert 0.1 <= await pulse.works_since(now()) <= 0.3


async def test_it_does_not_work_while_a_single_way_is_broken() -> None:
    broken = Way()
    async with running(Way(), broken) as pulse:
        await asyncio.sleep(1.0)
        broken.works.clear()
        began = now()
        asyncio.get_running_loop().call_later(5.0, broken.works.set)
        assert 5.0 < await pulse.works_since(began) < 5.5


async def test_a_probe_that_began_before_the_fault_does_not_count() -> None:
    way = Way()
    async with running(way) as pulse:
        await asyncio.sleep(0.05)  # in the middle of the first probe
        assert await pulse.works_since(now()) > 0.15


async def test_what_does_not_work_within_the_limit_is_named() -> None:
    broken = Way()
    broken.works.clear()
    pulse = Pulse({"orders": broken.use, "reads": Way().use}, 30.0)
    task = asyncio.create_task(pulse.run())
    with pytest.raises(NoRecovery, match="orders: not for 30 s"):
        await pulse.works_since(now())
    with pytest.raises(ExceptionGroup) as group:
        await task
    assert "orders: nothing has worked for 30 s" in str(group.value.exceptions[0])


# The shop tells which orders were lost or handled wrongly, and blames nothing else.


@asynccontextmanager
async def open_shop() -> AsyncIterator[tuple[aio.Database, Cluster, Shop]]:
    async with connected() as (database, cluster):
        shop = Shop(database)
        await shop.open()
        yield database, cluster, shop


async def handle(database: aio.Database, row: str, times: int = 1) -> None:
    async with database.transaction() as tx:
        await tx.set(row, packed, times)
        await tx.set(row, shipped, times)


async def test_an_order_whose_placing_was_cancelled_is_not_missed() -> None:
    async with open_shop() as (database, cluster, shop):
        await handle(database, await shop.place())
        cluster.silent = True
        cancelled = asyncio.create_task(shop.place())
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        cluster.silent = False
        assert cancelled.cancelled()
        assert shop.placed == 1
        assert await shop.problems() == []


async def test_an_order_that_is_no_longer_stored_is_lost() -> None:
    async with open_shop() as (database, _, shop):
        row = await shop.place()
        async with database.transaction() as tx:
            await tx.delete(row, placed)
        assert await shop.problems() == [f"order {row} was placed and is not stored"]


@pytest.mark.parametrize("times", [0, 2])
async def test_an_order_must_be_handled_once(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shops, "ANSWERED_SECONDS", 0.2)
    async with open_shop() as (database, _, shop):
        await handle(database, await shop.place())
        row = await shop.place()
        if times:
            await handle(database, row, times)
        assert await shop.problems() == [
            f"order {row}: packed and shipped {(times, times)} times, of 2 orders"
        ]


async def test_an_order_that_is_handled_and_was_never_placed_is_told() -> None:
    async with open_shop() as (database, _, shop):
        await handle(database, "3-3")
        async with database.snapshot() as snapshot:
            assert [row.key async for row in snapshot.scan(orders)] == ["3-3"]
        assert await shop.problems() == ["order 3-3 is handled and was never placed"]


# The judge of a chaos run finds what recipes have lost, doubled, torn, or exported in no order.

DEEDS = 30

Told = dict[str, Deed]
Run = tuple[Told, Held, list[Exported]]


@asynccontextmanager
async def recipes() -> AsyncIterator[aio.Database]:
    async with percolator.testing.connect_async() as database:
        await at_work.create(database)
        yield database


async def a_run(directory: Path) -> Run:
    log_path = directory / "log"
    async with recipes() as database:
        chance = Random("deeds")
        with log_path.open("w") as file:
            log = Log(file, "client")
            for number in range(DEEDS):
                deed = Deed.of(f"deed {number}", chance)
                log.began(deed)
                async with database.transaction() as tx:
                    await deed.write(tx)
                log.ended(deed.known(COMMITTED, tx.commit_timestamp or 0))
                if number % 10 == 0:
                    await percolator.testing.run_observers_async(database, at_work.observers)
        await percolator.testing.run_observers_async(database, at_work.observers)
        return logged([log_path]), await found_in(database), read(directory / "exports")


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes_at_work, "file", ExportFile(directory / "exports"))
        return asyncio.run(a_run(directory))


def test_a_run_without_faults_is_found_right(run: Run) -> None:
    assert list(judge(*run)) == []


def without_a_deed(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(deeds=held.deeds - {"deed 7"}), exported


def with_an_aborted_deed(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told | {"deed 7": replace(told["deed 7"], outcome=ABORTED)}, held, exported


def with_a_deed_that_was_never_written(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(deeds=held.deeds | {"another"}), exported


def with_one_sum_doubled(told: Told, held: Held, exported: list[Exported]) -> Run:
    key, amount = next((key, amount) for key, amount in held.sums.items() if amount)
    return told, held._replace(sums={**held.sums, key: 2 * amount}), exported


def with_an_old_mirror(told: Told, held: Held, exported: list[Exported]) -> Run:
    key = next(key for key, amount in held.mirrors.items() if amount)
    return told, held._replace(mirrors={**held.mirrors, key: 0}), exported


def without_a_counter(told: Told, held: Held, exported: list[Exported]) -> Run:
    key = next(key for key, amount in held.counts.items() if amount)
    left = {one: amount for one, amount in held.counts.items() if one != key}
    return told, held._replace(counts=left), exported


def without_an_export(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held, exported[1:]


def with_an_export_twice(told: Told, held: Held, exported: list[Exported]) -> Run:
    again = exported[0]._replace(sequence=exported[-1].sequence + 1)
    return told, held, [*exported, again]


def with_exports_in_no_order(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held, exported[::-1]


def with_a_value_not_exported(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(waiting=1), exported


def with_an_index_that_lags(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(found=held.found[1:]), exported


def with_somebody_gone(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(cities=dict(list(held.cities.items())[1:])), exported


@pytest.mark.parametrize(
    "doctored",
    [
        without_a_deed,
        with_an_aborted_deed,
        with_a_deed_that_was_never_written,
        with_one_sum_doubled,
        with_an_old_mirror,
        without_a_counter,
        without_an_export,
        with_an_export_twice,
        with_exports_in_no_order,
        with_a_value_not_exported,
        with_an_index_that_lags,
        with_somebody_gone,
    ],
)
def test_whatever_is_wrong_is_found(run: Run, doctored: Callable[..., Run]) -> None:
    assert list(judge(*doctored(*run)))


def test_too_few_transactions_prove_nothing(run: Run) -> None:
    told, held, exported = run
    assert any("proves nothing" in one for one in judge(told, held._replace(deeds=set()), exported))


async def test_a_snapshot_that_shows_a_part_of_a_transaction_is_torn() -> None:
    async with recipes() as database:
        async with database.snapshot() as snapshot:
            assert await torn(snapshot) == []
        async with database.transaction() as tx:
            await sums.add(tx, "key 1", 5)
        async with database.snapshot() as snapshot:
            assert await torn(snapshot) == ["all that was combined comes to 5"]
