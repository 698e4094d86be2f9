"""Wrong wall clocks, on one of the hosts over which the processes are spread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from percolator.errors import PercolatorError
from percolator.wire.cluster import describe
from percolator.wire.cluster_clock import clocks_of
from percolator.world import Random
from tests.chaos.faults import Fault
from tests.chaos.leading import RECOVERY_SECONDS_MAX
from tests.chaos.scene import Scene
from tests.chaos.standing_still import DidNotStrike

_HOUR = 3_600_000
_DAY = 24 * _HOUR
BACK = (-_DAY, -_HOUR)
AHEAD = (2 * _HOUR, _DAY, 40 * _DAY, 400 * _DAY)
_KNOWN_SECONDS = 10.0
_LEAD_SECONDS_MAX = 60.0


class WrongClock(Fault):
    """The clock of a host is set, and later set right, while its processes run."""

    def __init__(self, name: str, amounts: Sequence[int]) -> None:
        super().__init__("clock")
        self._name = name
        self._amounts = amounts

    @property
    def name(self) -> str:
        return self._name

    async def strike(self, scene: Scene, chance: Random) -> float:
        host = chance.randrange(len(scene.clocks))
        wrong = chance.choice(self._amounts)
        async with scene.outage() as outage:
            scene.clocks[host].set_ahead(wrong)
            try:
                await outage.last()
                await require_known(scene, host, wrong)
            finally:
                scene.clocks[host].set_ahead(0)
            seconds = await outage.over()
        await require_right_time(scene)
        return seconds


class OracleWithWrongClock(Fault):
    """Both oracles are killed, and the one that starts first has a wrong clock."""

    def __init__(self) -> None:
        super().__init__("clock")

    @property
    def name(self) -> str:
        return "an oracle leads with a wrong clock"

    @property
    def roles(self) -> tuple[str, ...]:
        return ("clock", "oracle")

    async def strike(self, scene: Scene, chance: Random) -> float:
        oracles = scene.all("oracle")
        first = chance.choice(oracles)
        host = scene.cluster.host_of[first.name]
        async with scene.outage() as outage:
            for oracle in oracles:
                oracle.kill()
            wrong = chance.choice((*BACK, *AHEAD))
            scene.clocks[host].set_ahead(wrong)
            try:
                await scene.restart(first)
                await outage.last()
                await require_known(scene, host, wrong)
                await require_right_time(scene)
            finally:
                await scene.restart(*(one for one in oracles if one is not first))
                scene.clocks[host].set_ahead(0)
            return await outage.over()


async def require_known(scene: Scene, host: int, wrong: int) -> None:
    """Waits until the masters have been told by a process of the host that its clock is wrong."""
    names = [name for name, number in scene.cluster.host_of.items() if number == host]
    addresses = {scene.cluster.links[name].address for name in names}
    deadline = time.monotonic() + _KNOWN_SECONDS
    while time.monotonic() < deadline:
        clocks = await _known_clocks(scene)
        now = time.time_ns() // 1_000_000
        if any(
            abs(one - now - wrong) < _HOUR // 2
            for address, one in clocks.items()
            if address in addresses
        ):
            return
        await asyncio.sleep(0.1)
    raise DidNotStrike(
        f"no process of host {host} has reported a clock {wrong / _DAY:+.2f} days off"
    )


async def _known_clocks(scene: Scene) -> dict[str, int]:
    """Those that the leading master knows: a standby, which may answer first, knows its own."""
    known: dict[str, int] = {}
    for master in scene.cluster.address.split(","):
        try:
            described = await describe(scene.supervisor.network, [master], 1.0)
        except PercolatorError:
            continue  # it is down, or cut off
        known = max(known, clocks_of(described), key=len)
    return known


async def require_right_time(scene: Scene) -> None:
    """The oracle says what time it is: whichever oracle leads, timestamps stay with most clocks."""
    # Others may strike meanwhile, and cut the power for example.
    timestamp = await scene.supervisor.database.timestamp(timeout=RECOVERY_SECONDS_MAX)
    milliseconds = timestamp >> 18
    ahead = milliseconds / 1000 - time.time()
    if ahead > _LEAD_SECONDS_MAX:
        raise AssertionError(f"timestamps are {ahead:.0f} s ahead of two of three clocks")
