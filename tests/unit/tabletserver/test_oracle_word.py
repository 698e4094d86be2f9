"""How a tablet server finds the oracle that it asks for the time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.errors import DeadlineExceeded, NotReady, PercolatorError, Unavailable
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.oracle_pb2 import GetTimestampsResponse
from percolator.wire.methods import DESCRIBE, GET_TIMESTAMPS
from percolator.wire.timestamp_source import ANSWER_SECONDS_MAX, OracleOfCluster
from percolator.world import UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_network import UnaryNetwork


class Cluster(UnaryNetwork):
    """A master, and several oracles, one of which leads."""

    def __init__(self) -> None:
        self.oracles = ["a:1"]
        self.leading = "a:1"
        self.now = 7
        self.asked: list[str] = []
        self.silent: set[str] = set()
        """Addresses that answer nothing."""

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        self.asked.append(address)
        await asyncio.sleep(timeout if address in self.silent else 0.001)
        if address in self.silent:
            raise DeadlineExceeded("silent", where=address)
        if method is DESCRIBE:
            kind = ServiceKind.SERVICE_KIND_ORACLE
            servers = [Server(kind=kind, address=one) for one in self.oracles]
            return DescribeResponse(servers=servers)
        assert method is GET_TIMESTAMPS
        if address != self.leading:
            raise Unavailable("nothing is there", where=address)
        first, self.now = self.now + 1, self.now + request.count
        return GetTimestampsResponse(first=first, count=request.count)


@asynccontextmanager
async def asking() -> AsyncIterator[tuple[Cluster, OracleOfCluster]]:
    cluster = Cluster()
    world = World(VirtualClock(asyncio.get_running_loop()), cluster, random.Random(1))
    word = OracleOfCluster(world, ["master:1"])
    yield cluster, word
    await word.close()


async def test_all_who_ask_at_once_share_a_description_and_hardly_any_requests() -> None:
    async with asking() as (cluster, word):
        answers = await asyncio.gather(*(word.take() for _ in range(100)))
        assert len(set(answers)) == 100
        assert cluster.asked.count("master:1") == 1
        assert cluster.asked.count("a:1") <= 2


async def test_an_oracle_that_has_taken_the_place_of_another_one_is_found() -> None:
    async with asking() as (cluster, word):
        await word.take()
        cluster.oracles, cluster.leading = ["b:1"], "b:1"
        assert await word.take() == cluster.now
        assert cluster.asked[-1] == "b:1"


@pytest.mark.parametrize("known", [False, True], ids=["the first", "one that is known"])
async def test_none_queues_behind_silent_masters(known: bool) -> None:
    """All who ask at about the same time share one attempt to find the oracle, and none waits
    longer than one answer may take, however many there are."""
    async with asking() as (cluster, word):
        if known:
            await word.take()
            cluster.leading = ""
        cluster.silent.add("master:1")
        now = asyncio.get_running_loop().time

        async def take() -> float:
            began = now()
            with pytest.raises(PercolatorError):
                await word.take()
            return now() - began

        takers = []
        for _ in range(20):
            takers.append(asyncio.ensure_future(take()))
            await asyncio.sleep(0.1)
        waited = await asyncio.gather(*takers)
        assert max(waited) <= ANSWER_SECONDS_MAX + 0.001
        assert cluster.asked.count("master:1") <= 5


async def test_with_silent_masters_an_oracle_that_is_known_is_asked_at_once() -> None:
    async with asking() as (cluster, word):
        await word.take()
        cluster.leading = ""
        cluster.silent.add("master:1")
        with pytest.raises(PercolatorError):
            await word.take()
        cluster.leading = "a:1"
        began = asyncio.get_running_loop().time()
        assert await word.take() == cluster.now
        assert asyncio.get_running_loop().time() - began < 0.5


async def test_one_who_leaves_takes_the_attempt_from_no_other() -> None:
    async with asking() as (_, word):
        leaving, staying = (asyncio.ensure_future(word.take()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying


async def test_where_no_oracle_is_registered_that_is_said_at_once() -> None:
    async with asking() as (cluster, word):
        cluster.oracles = []
        with pytest.raises(NotReady, match="no oracle is registered"):
            await word.take()


async def test_an_oracle_that_does_not_answer_is_waited_for_as_long_as_a_caller_waits() -> None:
    async with asking() as (cluster, word):
        cluster.leading = ""
        began = asyncio.get_running_loop().time()
        with pytest.raises(PercolatorError):
            await word.take()
        assert asyncio.get_running_loop().time() - began < 2 * ANSWER_SECONDS_MAX
