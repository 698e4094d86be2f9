"""Faults of the owners of tablets, and of the disk under them."""

from __future__ import annotations

import asyncio
import time

from percolator.errors import PercolatorError
from percolator.world import Random
from tests.chaos import tablet_server
from tests.chaos.compaction import pause_in_compaction, remove_locks, require_deposed
from tests.chaos.faults import Fault, a
from tests.chaos.scene import SERVICES, Scene
from tests.chaos.standing_still import DidNotStrike, require_stopped

_UNSYNCED_SECONDS = 20.0
_FULL_SECONDS = 4.0
_FULL = '"the disk is full: refusing writes"'


class PauseInCompaction(Fault):
    """SIGSTOP of an owner while LevelDB writes tables, with its LOCK files removed; SIGCONT when
    others have taken over its tablets and written to them."""

    @property
    def name(self) -> str:
        return f"pause of {a(self._role)} in a compaction, without its locks"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        store = scene.cluster.data / "store"
        async with scene.filler.writing():
            tablets = await scene.tablets_to_fill(victim)
            if not tablets:
                raise DidNotStrike(f"{victim.name} has no tablet that is written to")
            await pause_in_compaction(victim, store, tablets)
            async with scene.outage() as outage:
                try:
                    if not remove_locks(store, tablets):
                        raise DidNotStrike("there was no LOCK to be removed")
                    await outage.last()
                    taken_over = await scene.taken_over(tablets)
                    if not taken_over:
                        raise DidNotStrike(f"{victim.name} has kept its tablets")
                finally:
                    victim.resume()
                seconds = await outage.over()
            try:
                for tablet in taken_over:
                    await require_deposed(scene.supervisor.network, victim.address, tablet)
            except PercolatorError as error:
                raise DidNotStrike(f"{victim.name} did not say what it serves: {error}") from error
        await scene.filler.require_intact()
        return seconds


class PowerCut(Fault):
    """Every process dies at once, and each tablet's log loses what was not synced."""

    def __init__(self) -> None:
        super().__init__("everything")

    @property
    def name(self) -> str:
        return "power cut"

    @property
    def roles(self) -> tuple[str, ...]:
        return SERVICES

    async def strike(self, scene: Scene, chance: Random) -> float:
        store = scene.cluster.data / "store"
        processes = list(scene.cluster.processes.values())
        async with scene.filler.writing():
            await self._stop_in_a_write(scene)
            struck = time.monotonic()
            for process in processes:
                process.kill()
            dropped = tablet_server.drop_unsynced(store, chance)
            await scene.restart(*processes)
            seconds = await scene.recovered_since(struck)
        await scene.filler.require_intact()
        if not dropped:
            raise DidNotStrike("everything was on the disk")
        return seconds

    async def _stop_in_a_write(self, scene: Scene) -> None:
        """Stops all owners, at least one of which has appended data that is not synced yet."""
        store = scene.cluster.data / "store"
        owners = scene.all("tabletserver")
        deadline = time.monotonic() + _UNSYNCED_SECONDS
        while time.monotonic() < deadline:
            for owner in owners:
                owner.pause()
            for owner in owners:
                require_stopped(owner.pid)
            if tablet_server.unsynced(store):
                return
            for owner in owners:
                owner.resume()
            await asyncio.sleep(0.01)
        raise DidNotStrike("nothing was being written")


class FullDisk(Fault):
    """Nothing can be written to the store, and then there is space again."""

    def __init__(self) -> None:
        super().__init__("disk")

    @property
    def name(self) -> str:
        return "full disk"

    async def strike(self, scene: Scene, chance: Random) -> float:
        if scene.disk is None:
            raise DidNotStrike("the store has no disk of its own")
        before = self._refusals(scene)
        scene.disk.fill()
        try:
            await asyncio.sleep(_FULL_SECONDS)
        finally:
            scene.disk.empty()
        # Without space nothing can work, so only the time from then on counts.
        seconds = await scene.recovered_since(time.monotonic())
        if self._refusals(scene) == before:
            raise DidNotStrike("no tablet server has noticed")
        return seconds

    def _refusals(self, scene: Scene) -> int:
        return sum(one.log.read_text().count(_FULL) for one in scene.all("tabletserver"))
