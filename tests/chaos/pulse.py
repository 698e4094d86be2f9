"""Tells when everything works: probes that never stop, each of another way to use the cluster.

After a fault, everything works again once each probe has succeeded that began after the fault.
All faults share the probes, so that many faults at once do not mean many probes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from percolator.errors import PercolatorError
from percolator.v1 import master_pb2, oracle_pb2
from percolator.wire import methods
from percolator.world import Network

_PAUSE_SECONDS = 0.05


class NoRecovery(Exception):
    """The cluster does not recover."""


class Pulse:
    """Runs the probes. `run` belongs in a task of its own."""

    def __init__(self, probes: dict[str, Callable[[], Awaitable[None]]], limit: float) -> None:
        self._probes = probes
        self._limit = limit
        self._began = dict.fromkeys(probes, -math.inf)
        """When the last successful attempt of each probe began."""
        self._beat = asyncio.Event()

    async def run(self) -> None:
        """Returns never: cancel it."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._probes:
                tasks.create_task(self._repeat(name))

    async def _repeat(self, name: str) -> None:
        while True:
            began = now()
            try:
                async with asyncio.timeout(self._limit):
                    await self._probes[name]()
            except TimeoutError:
                late = {one: round(began - at, 1) for one, at in self._began.items()}
                raise NoRecovery(
                    f"{name}: nothing has worked for {self._limit:g} s; before that, the last "
                    f"success of each probe had begun so many seconds ago: {late}"
                ) from None
            self._began[name] = began
            self._beat.set()
            self._beat = asyncio.Event()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def works_since(self, instant: float) -> float:
        """Returns when all probes have succeeded since then, and how many seconds that took."""
        while missing := [name for name, began in self._began.items() if began < instant]:
            try:
                async with asyncio.timeout_at(instant + self._limit):
                    await self._beat.wait()
            except TimeoutError:
                raise NoRecovery(f"{', '.join(missing)}: not for {self._limit:g} s") from None
        return now() - instant


def now() -> float:
    """The time of the event loop, which on a real machine is the monotonic clock."""
    return asyncio.get_running_loop().time()


# Finds the process that leads, among those of one kind.

RECOVERY_SECONDS_MAX = 30.0
_ASK_SECONDS = 1.0
_RETRY_SECONDS = 0.01


async def leader(network: Network, kind: str, addresses: Sequence[str]) -> str:
    """The one of them that answers a call that only a leader, or the active oracle, answers."""
    deadline = time.monotonic() + RECOVERY_SECONDS_MAX
    for address in itertools.cycle(addresses):
        try:
            if kind == "oracle":
                request = oracle_pb2.GetTimestampsRequest(count=1)
                await network.unary(address, methods.GET_TIMESTAMPS)(request, _ASK_SECONDS)
            else:
                servers = master_pb2.ListServersRequest()
                await network.unary(address, methods.LIST_SERVERS)(servers, _ASK_SECONDS)
        except PercolatorError as error:
            if time.monotonic() > deadline:
                raise NoRecovery(f"no {kind} leads; {address}: {error}") from error
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return address
    raise NoRecovery("there is no process that could lead")
