"""The health service, as load balancers watch it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
)

from percolator.services.chassis.server import Health

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


async def asking(name: str = "") -> AsyncIterator[HealthCheckRequest]:
    """The request of a watcher."""
    yield HealthCheckRequest(service=name)


def watching(health: Health, name: str = "") -> tuple[list[int], asyncio.Task[None]]:
    """The statuses that a watcher receives, and its task."""
    told: list[int] = []

    async def watch() -> None:
        async for response in health.watch(asking(name), None):
            told.append(response.status)  # noqa: PERF401  # one by one is what is tested

    return told, asyncio.create_task(watch())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_every_watcher_is_told_every_change_until_the_end() -> None:
    health = Health()
    whole, first = watching(health)
    shop, second = watching(health, "Shop")
    await settle()
    health.add(["Shop"])
    await settle()
    health.set_serving(True)
    await settle()
    health.set_serving(False)
    await settle()
    health.set_serving(True)
    await settle()
    health.finish()
    await asyncio.gather(first, second)
    assert whole == [NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert shop == [UNKNOWN, *whole]


async def test_all_services_are_listed_with_their_status() -> None:
    health = Health()
    health.add(["Shop"])
    health.set_serving(True)
    answer = await health.list(HealthListRequest(), None)
    assert {name: one.status for name, one in answer.statuses.items()} == {
        "": SERVING,
        "Shop": SERVING,
    }


async def test_a_watcher_that_leaves_takes_nothing_from_the_others() -> None:
    health = Health()
    _, leaving = watching(health)
    told, staying = watching(health)
    await settle()
    leaving.cancel()
    await settle()
    health.set_serving(True)
    await settle()
    assert told == [NOT_SERVING, SERVING]
    staying.cancel()


async def test_after_the_end_nothing_serves_again() -> None:
    health = Health()
    health.finish()
    health.set_serving(True)
    told, watch = watching(health)
    await watch
    assert told == [NOT_SERVING]


async def test_an_end_that_comes_while_an_answer_leaves_is_told_too() -> None:
    """A watcher that saw SERVING, and then only the end of the stream, would not know."""
    health = Health()
    health.set_serving(True)
    watch = health.watch(asking(), None)
    assert (await anext(watch)).status == SERVING
    health.finish()
    assert [response.status async for response in watch] == [NOT_SERVING]
