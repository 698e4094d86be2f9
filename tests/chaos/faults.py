"""What is done to the processes of a cluster.

Each fault strikes, measures how long the outage lasted, repairs what it broke, and shows that it
did strike. The recovery time is measured from the strike until everything works; it includes the
start of a new process if no other one can take over. Faults of different roles strike at the same
time, so each has to expect that others keep the cluster from recovering for a while.
"""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod

from percolator.services.local.process import ServiceProcess
from percolator.world import Random
from tests.chaos.scene import Scene
from tests.chaos.standing_still import DidNotStrike, require_stopped

_SECOND_SIGNAL_SECONDS_MAX = 0.02
_AT_ONCE_SECONDS = 5.0
_DEAD_SECONDS_MAX = 6.0
"""A process that others can replace is started again within this time, as by a supervisor."""
_STOPPED_SECONDS = 30.0
_POLL_SECONDS = 0.01
_CUT_OFF = 1
"""The exit code of a service that drained, but had to cut off calls: others were struck, too."""


def a(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


class Fault(ABC):
    """One kind of fault, on one role."""

    def __init__(self, role: str) -> None:
        self._role = role

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which it is counted and reported."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Those of which nothing else may be struck meanwhile."""
        return (self._role,)

    @abstractmethod
    async def strike(self, scene: Scene, chance: Random) -> float:
        """Strikes, repairs, and returns the seconds until everything worked again."""


class Kill(Fault):
    """kill -9; restarted at once if no other can take over, otherwise some seconds later."""

    def __init__(self, role: str, *, replaced: bool) -> None:
        super().__init__(role)
        self._replaced = replaced

    @property
    def name(self) -> str:
        return f"kill -9 of {a(self._role)}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        async with scene.outage() as outage:
            victim.kill()
            if self._replaced:
                await outage.last(_DEAD_SECONDS_MAX * chance.random())
            await scene.restart(victim)
            return await outage.over()


class KillTogether(Fault):
    """kill -9 of all but one at the same time."""

    @property
    def name(self) -> str:
        return f"kill -9 of every {self._role} but one"

    async def strike(self, scene: Scene, chance: Random) -> float:
        processes = scene.all(self._role)
        survivor = chance.choice(processes)
        victims = [one for one in processes if one is not survivor]
        async with scene.outage() as outage:
            for victim in victims:
                victim.kill()
            await outage.last(_DEAD_SECONDS_MAX * chance.random())
            await scene.restart(*victims)
            return await outage.over()


class Pause(Fault):
    """SIGSTOP for longer than every lease, then SIGCONT: anything that it then says is refused."""

    @property
    def name(self) -> str:
        return f"pause of {a(self._role)}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        async with scene.outage() as outage:
            victim.pause()
            try:
                require_stopped(victim.pid)
                await outage.last()
            finally:
                victim.resume()
            return await outage.over()


class RollingRestart(Fault):
    """SIGTERM to one after another, each restarted before the next."""

    @property
    def name(self) -> str:
        return f"rolling restart of every {self._role}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        longest = 0.0
        for process in scene.all(self._role):
            async with scene.outage() as outage:
                process.ask_to_stop()
                code = await exit_code(process, _STOPPED_SECONDS)
                if code not in (0, _CUT_OFF):
                    raise AssertionError(f"{process.name} did not drain: exit code {code}")
                await scene.restart(process)
                longest = max(longest, await outage.over())
        return longest


class StopTwice(Fault):
    """SIGTERM, and another while it drains: it must end at once, with what it does half done."""

    @property
    def name(self) -> str:
        return f"SIGTERM twice to {a(self._role)}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        async with scene.outage() as outage:
            victim.ask_to_stop()
            await asyncio.sleep(_SECOND_SIGNAL_SECONDS_MAX * chance.random())
            victim.ask_to_stop()
            code = await exit_code(victim, _AT_ONCE_SECONDS)
            await scene.restart(victim)
            seconds = await outage.over()
        if code != 128 + signal.SIGTERM:
            raise DidNotStrike(f"{victim.name} had ended before, with exit code {code}")
        return seconds


async def exit_code(process: ServiceProcess, seconds: float) -> int:
    """Waits for its end. A process that does not end is a failure of the product."""
    deadline = time.monotonic() + seconds
    while process.exit_code is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"{process.name} has not ended after {seconds:g} s")
        await asyncio.sleep(_POLL_SECONDS)
    return process.exit_code
