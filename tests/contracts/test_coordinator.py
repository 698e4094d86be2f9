"""What every back end of the coordinator promises. To add one, see `coordinators.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import InvalidArgument, NotReady, StoreFault, StoreUnusable
from tests.contracts.coordinators import TIMES, Opened, any_back_end, is_waiting, soon

__all__ = ["any_back_end"]


async def test_what_a_leader_wrote_is_read_by_it_and_by_all_others(back_end: Opened) -> None:
    async with back_end() as store:
        leader, other = store.process(), store.process()
        led = await soon(leader.coordinator.campaign("master", "a:1"))
        assert await led.get("map") is None
        await led.put("map", b"one")
        await led.put("map", b"two")
        assert await led.get("map") == b"two"
        assert await other.coordinator.read("master", "map") == b"two"
        found = await other.coordinator.leader("master")
        assert found is not None
        assert (found.epoch, found.holder) == (led.epoch, "a:1")


async def test_a_role_that_never_had_a_leader_has_no_values(back_end: Opened) -> None:
    async with back_end() as store:
        coordinator = store.process().coordinator
        assert await coordinator.leader("master") is None
        assert await coordinator.read("master", "map") is None


async def test_while_a_leader_lives_candidates_wait(back_end: Opened) -> None:
    async with back_end() as store:
        led = await soon(store.process().coordinator.campaign("master", "a:1"))
        waiting = asyncio.create_task(store.process().coordinator.campaign("master", "b:1"))
        assert await is_waiting(waiting, store.clock, 3 * TIMES.grace_seconds)
        assert await led.stands()
        waiting.cancel()


async def test_a_leader_that_a_candidate_knows_to_be_lost_is_replaced_though_it_lives(
    back_end: Opened,
) -> None:
    async with back_end() as store:
        first = await soon(store.process().coordinator.campaign("oracle", "a:1"))
        await first.put("mark", b"one")
        lost = [""]
        candidate = store.process().coordinator
        waiting = asyncio.create_task(candidate.campaign("oracle", "b:1", lambda: lost[-1]))
        assert await is_waiting(waiting, store.clock, 2 * TIMES.grace_seconds)
        lost.append("another:1")
        assert await is_waiting(waiting, store.clock, 2 * TIMES.grace_seconds)
        lost.append("a:1")
        second = await soon(waiting)
        assert await second.get("mark") == b"one"
        assert not await first.stands()
        with pytest.raises(NotReady):
            await first.put("mark", b"late")


async def test_after_a_leader_resigned_the_next_one_has_its_values(back_end: Opened) -> None:
    async with back_end() as store:
        first = await soon(store.process().coordinator.campaign("master", "a:1"))
        await first.put("map", b"one")
        await first.resign()
        second = await soon(store.process().coordinator.campaign("master", "b:1"))
        assert second.epoch > first.epoch
        assert await second.get("map") == b"one"
        with pytest.raises(NotReady):
            await first.check()
        with pytest.raises(NotReady):
            await first.put("map", b"late")
        assert await second.get("map") == b"one"


async def test_a_process_that_leads_term_after_term_keeps_only_the_last(back_end: Opened) -> None:
    async with back_end() as store:
        coordinator: Any = store.process().coordinator
        for _ in range(5):
            led = await soon(coordinator.campaign("master", "a:1"))
            await led.resign()
        led = await soon(coordinator.campaign("master", "a:1"))
        assert coordinator._led == [led]
        await coordinator.close()
        assert not await led.stands(), "the last one is resigned with its process"


async def test_a_killed_leader_is_replaced(
    back_end: Opened,
) -> None:
    async with back_end() as store:
        killed = store.process()
        await soon(killed.coordinator.campaign("master", "a:1"))
        killed.kill()
        started = store.clock.monotonic_seconds()
        await soon(store.process().coordinator.campaign("master", "b:1"))
        assert store.clock.monotonic_seconds() - started < store.death_seconds


async def test_a_paused_leader_is_replaced_and_refuses_to_answer_when_it_wakes(
    back_end: Opened,
) -> None:
    async with back_end() as store:
        paused = store.process()
        first = await soon(paused.coordinator.campaign("oracle", "a:1"))
        await first.put("mark", b"100")
        paused.pause()
        late = asyncio.create_task(first.put("mark", b"200"))
        second = await soon(store.process().coordinator.campaign("oracle", "b:1"))
        assert await second.get("mark") == b"100"
        paused.resume()
        assert not await first.stands()
        with pytest.raises((NotReady, StoreUnusable)):
            await late
        with pytest.raises(NotReady):
            await first.get("mark")
        assert await second.get("mark") == b"100"
        assert await second.stands()


async def test_a_leader_paused_after_its_value_was_durable_does_not_say_so(
    back_end: Opened,
) -> None:
    """Its successor may have read the value or not: only a check after the pause can tell."""
    async with back_end() as store:
        paused = store.process()
        first = await soon(paused.coordinator.campaign("master", "a:1"))
        paused.pause_after_value()
        late = asyncio.create_task(first.put("map", b"one"))
        second = await soon(store.process().coordinator.campaign("master", "b:1"))
        await second.put("map", b"two")
        paused.resume()
        with pytest.raises(NotReady):
            await late
        assert await second.get("map") == b"two"


async def test_a_successor_of_a_paused_leader_is_itself_replaced_when_killed(
    back_end: Opened,
) -> None:
    """In a directory at once. It did not get the lock of the paused leader, and gets it as soon as
    that one wakes."""
    async with back_end() as store:
        paused, second = store.process(), store.process()
        first = await soon(paused.coordinator.campaign("master", "a:1"))
        paused.pause()
        await soon(second.coordinator.campaign("master", "b:1"))
        paused.resume()
        await first.resign()
        await store.clock.sleep(5 * TIMES.beat_seconds)
        second.kill()
        started = store.clock.monotonic_seconds()
        await soon(store.process().coordinator.campaign("master", "c:1"))
        assert store.clock.monotonic_seconds() - started < store.death_seconds


async def test_of_many_candidates_one_leads_at_a_time(back_end: Opened) -> None:
    async with back_end() as store:
        order: list[int] = []

        async def serve_a_term(number: int) -> None:
            led = await soon(store.process().coordinator.campaign("master", f"h:{number}"))
            value = await led.get("terms") or b""
            await led.put("terms", value + b"%d," % number)
            order.append(number)
            await led.resign()

        await asyncio.gather(*(serve_a_term(number) for number in range(1, 6)))
        found = await store.process().coordinator.read("master", "terms")
        assert found == b"".join(b"%d," % number for number in order)
        assert len(order) == 5


async def test_roles_do_not_touch_each_other(back_end: Opened) -> None:
    async with back_end() as store:
        coordinator = store.process().coordinator
        master = await soon(coordinator.campaign("master", "a:1"))
        oracle = await soon(coordinator.campaign("oracle", "a:2"))
        await master.put("mark", b"m")
        assert await oracle.get("mark") is None
        assert await master.stands()
        assert await oracle.stands()


async def test_watching_shows_the_value_now_and_every_later_change(back_end: Opened) -> None:
    async with back_end() as store:
        led = await soon(store.process().coordinator.campaign("master", "a:1"))
        values = store.process().coordinator.watch("master", "map")
        assert await anext(values) is None
        await led.put("map", b"one")
        assert await anext(values) == b"one"
        await led.put("map", b"two")
        assert await anext(values) == b"two"
        await values.aclose()


async def test_sessions_are_listed_while_their_owners_live(back_end: Opened) -> None:
    async with back_end() as store:
        stays, leaves, dies = (store.process() for _ in range(3))
        await stays.coordinator.open_session("master-1", b"stays")
        left = await leaves.coordinator.open_session("master-2", b"leaves")
        await dies.coordinator.open_session("master-3", b"dies")
        await stays.coordinator.open_session("worker-1", b"another kind")
        reader = store.process().coordinator
        assert set((await reader.sessions("master-")).values()) == {b"stays", b"leaves", b"dies"}
        await left.close()
        dies.kill()
        assert set(await reader.sessions("master-")) == {"master-1", "master-3"}
        for _ in range(40):
            await store.clock.sleep(TIMES.grace_seconds / 20)
            await reader.sessions("master-")
        assert await reader.sessions("master-") == {"master-1": b"stays"}


@pytest.mark.parametrize("name", ["", "Map", "../map", "a/b", "x" * 101, "-", "a.new"])
async def test_names_that_no_back_end_could_store_are_refused(back_end: Opened, name: str) -> None:
    async with back_end() as store:
        coordinator = store.process().coordinator
        with pytest.raises(InvalidArgument) as role:
            await coordinator.campaign(name, "a:1")
        assert role.value.field == "role"
        led = await soon(coordinator.campaign("master", "a:1"))
        with pytest.raises(InvalidArgument) as key:
            await led.put(name, b"")
        assert key.value.field == "key"


async def test_a_damaged_value_is_refused_and_never_guessed(back_end: Opened) -> None:
    async with back_end() as store:
        led = await soon(store.process().coordinator.campaign("master", "a:1"))
        await led.put("map", b"all tablets")
        whole = await store.damage(led, "master", "map", None)
        for damaged in (b"", whole[:-1], whole + b"x", whole.replace(b"all", b"few")):
            await store.damage(led, "master", "map", damaged)
            with pytest.raises(StoreUnusable) as caught:
                await led.get("map")
            assert caught.value.fault is StoreFault.DAMAGED
