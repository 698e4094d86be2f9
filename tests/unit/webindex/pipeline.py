"""The document pipeline on a small cluster in memory: crawls that change, and what is served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from examples.webindex import clustering, linking, tables
from examples.webindex.documents import Document
from examples.webindex.observers import observers
from percolator import aio
from percolator.aio.connecting import connect_to
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import RequestT, ResponseT, UnaryCall, UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock

URLS = [f"http://{'x' * (number % 3)}{number}" for number in range(10)]
NEVER_CRAWLED = ["http://never", "http://elsewhere"]
DELAY_SECONDS_MAX = 0.004


def document(url: str, title: str, opening: str, ending: str, links: str = "none") -> Document:
    return Document(url, f"{title}\n\n{opening}\n\n{links}\n\n{ending}\n")


def any_document(chance: random.Random, url: str) -> Document:
    """Documents from few titles, openings and endings: most have duplicates, by different keys."""
    title, opening, ending = (f"{part}{chance.randrange(4)}" for part in ("T", "O", "E"))
    targets = [chance.choice(URLS + NEVER_CRAWLED) for _ in range(chance.randrange(5))]
    links = " ".join(f"[a{chance.randrange(2)}]({target})" for target in targets)
    return document(url, title, opening, ending, links or "none")


class KnowingNothing(dict[Any, Any]):
    def get(self, key: object, default: object = None) -> None:
        return None


def take_small_steps(patch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """So small that all which is done in steps takes several, and groups are soon hot."""
    if chance.random() < 0.5:
        # As in processes of their own, where they do not know of each other.
        patch.setattr(clustering, "changing", KnowingNothing())
    patch.setattr(clustering, "TOGETHER_MAX", chance.choice([0, 1, 3, 16]))
    patch.setattr(clustering, "HOT", chance.choice([0, 1, 3]))
    patch.setattr(clustering, "MESSAGES_MAX", chance.randint(1, 3))
    patch.setattr(clustering, "WALK_MAX", chance.randint(1, 3))
    patch.setattr(clustering, "VISITS_MAX", chance.randint(0, 2))
    patch.setattr(linking, "LINKS_MAX", chance.randint(1, 3))
    patch.setattr(linking, "AT_ONCE_MAX", chance.choice([0, 1, 16]))


class Crawled:
    """Documents that were crawled, kept beside the store."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}

    def change(self, chance: random.Random) -> tuple[str, str | None]:
        """A document that is new, or another one than before, or gone: its URL and body."""
        url = chance.choice(URLS)
        if url in self.documents and chance.random() < 0.3:
            del self.documents[url]
            return url, None
        self.documents[url] = any_document(chance, url)
        return url, self.documents[url].body


async def write(db: aio.Database, url: str, body: str | None) -> None:
    async def write_once(tx: aio.Transaction) -> None:
        if body is None:
            await tx.delete(url, tables.body)
        else:
            await tx.set(url, tables.body, body)

    await db.run(write_once)


class DelayingNetwork(InProcessNetwork):
    """Every call takes its time, there and back, so that transactions overlap."""

    def __init__(self, handlers: dict[str, object], chance: random.Random) -> None:
        super().__init__(handlers)
        self._chance = chance

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        call_at_once = super().unary(address, method)

        async def call(request: RequestT, timeout: float) -> ResponseT:
            await asyncio.sleep(self._chance.uniform(0, DELAY_SECONDS_MAX))
            response = await call_at_once(request, timeout)
            await asyncio.sleep(self._chance.uniform(0, DELAY_SECONDS_MAX))
            return response

        return call


@asynccontextmanager
async def clients(seed: int, number: int) -> AsyncIterator[list[aio.Database]]:
    """Clients of one cluster with the pipeline's tables and observers."""
    clock = VirtualClock(asyncio.get_running_loop())
    network = DelayingNetwork({ADDRESS: ClusterInMemory(clock)}, random.Random(seed))
    opened = []
    for one in range(number):
        world = World(clock, network, random.Random(seed * number + one))
        opened.append(await connect_to(world, [ADDRESS], Limits(), RetryPolicy()))
    await tables.create_tables_async(opened[0])
    await opened[0].register_observers(observers)
    yield opened
    for db in opened:
        await db.close()
