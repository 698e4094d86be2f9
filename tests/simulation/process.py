"""Processes of a simulation: started, killed, paused, and started again, each on its own machine.

`loop.py` is the event loop of all processes, in virtual time; `network.py` carries their calls.
Everything random comes from the seed, and nothing may depend on addresses, hash order or real time:
the same seed has to take the same course on every machine.

    process = SimulatedProcess("oracle:7001", wire, random)
    process.start(main)         # async def main(incarnation): builds, listens, waits
    process.crash()
    await process.restart()

The machine remains between two lives of its process: its clock keeps running. Disks are up to
`main`, which opens them for one incarnation and detaches them with `incarnation.life.at_end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from percolator.errors import UsageError
from percolator.world import Random, World
from tests.simulation.loop import Life, SimulationLoop
from tests.simulation.network import Fault, Served, SimulatedNetwork, Wire
from tests.simulation.virtual_time import VirtualClock


@dataclass(frozen=True)
class Incarnation:
    """One run of a process, from its start to its end: the environment that its code sees."""

    address: str
    number: int
    """1 for the first start of the process."""
    world: World
    life: Life
    wire: Wire

    def listen(self, services: Iterable[Served]) -> None:
        """From now on, answers calls at the address of the process."""
        self.wire.listen(self.life, self.address, services)


class SimulatedClock(VirtualClock):
    """A machine's clock, which uses the loop's cheaper way to sleep."""

    def __init__(self, loop: SimulationLoop) -> None:
        super().__init__(loop)
        self._virtual = loop
        self._sleep = loop.sleep

    def monotonic_seconds(self) -> float:
        return self._virtual.now

    async def sleep(self, seconds: float) -> None:
        await self._sleep(seconds)


Main = Callable[[Incarnation], Coroutine[Any, Any, None]]
"""The whole program. When it returns or raises, the process has exited."""


class SimulatedProcess:
    """One process on one machine."""

    def __init__(self, address: str, wire: Wire, random: Random) -> None:
        self.address = address
        self.clock = SimulatedClock(wire.loop)
        """The clock of its machine: it runs while the process is down, and can be set wrong."""
        self.exits: list[BaseException | None] = []
        """How each life that was not killed has ended: None, or what its main raised."""
        self._wire = wire
        self._random = random
        self._main: Main | None = None
        self._incarnation: Incarnation | None = None

    @property
    def alive(self) -> bool:
        return self._incarnation is not None and self._incarnation.life.alive

    @property
    def paused(self) -> bool:
        return self.alive and self._life().paused

    def start(self, main: Main) -> Incarnation:
        """Starts a new life with an empty memory. The last one must have ended."""
        if self.alive:
            raise UsageError(f"{self.address} is already running")
        number = 1 if self._incarnation is None else self._incarnation.number + 1
        life = Life(self._wire.loop, f"{self.address} #{number}")
        world = World(
            self.clock,
            SimulatedNetwork(self._wire, life, self.address),
            Random(self._random.getrandbits(64)),
        )
        self._main = main
        incarnation = Incarnation(self.address, number, world, life, self._wire)
        self._incarnation = incarnation
        life.spawn(self._run(main, incarnation))
        return incarnation

    def crash(self, *, machine: bool = False) -> None:
        """Kills it between two of its steps. Its callers see their connections reset at once.

        With `machine`, the machine loses power too: nothing answers there, and callers wait for
        their time-outs.
        """
        if self.alive:
            self._wire.counts[Fault.CRASH] += 1
            if machine:
                self._wire.silence(self.address)
            self._life().end()

    def pause(self) -> None:
        """Stops it between two of its steps, without notice. Messages to it are queued."""
        if self.alive and not self.paused:
            self._wire.counts[Fault.PAUSE] += 1
            self._life().pause()

    def resume(self) -> None:
        if self.paused:
            self._life().resume()

    async def restart(self) -> Incarnation:
        """Starts the same program again, after killing it if it still runs."""
        if self._main is None:
            raise UsageError(f"{self.address} was never started")
        self.crash()
        await self._life().ended()
        self._wire.counts[Fault.RESTART] += 1
        return self.start(self._main)

    async def ended(self) -> None:
        """Returns when nothing of a process that crashed or exited is left."""
        await self._life().ended()

    def _life(self) -> Life:
        if self._incarnation is None:
            raise UsageError(f"{self.address} was never started")
        return self._incarnation.life

    async def _run(self, main: Main, incarnation: Incarnation) -> None:
        outcome: BaseException | None = None
        try:
            await main(incarnation)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  # recorded as its exit status
            outcome = error
        if incarnation.life.alive:
            self.exits.append(outcome)
            incarnation.life.end()
