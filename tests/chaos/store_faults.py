"""What is done to those who own tablets, and to the disk under them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import psutil

from services.local.process import ServiceProcess
from tests.chaos import tablet_server
from tests.chaos.compaction import pause_in_compaction, remove_locks, require_deposed
from tests.chaos.faults import Fault, Scene, outlast_leases
from tests.chaos.standing_still import DidNotStrike, require_stopped

_UNSYNCED_SECONDS = 20.0


class PauseInCompaction(Fault):
    """SIGSTOP of an owner while LevelDB writes tables, its LOCK files removed; SIGCONT when others
    have its tablets and went on writing."""

    @property
    def name(self) -> str:
        return f"pause of a {self._kind} in a compaction, without its locks"

    async def strike(self, scene: Scene) -> float:
        victim = await scene.some(self._kind)
        store = scene.cluster.data / "store"
        async with scene.filler.writing():
            tablets = await scene.filler.tablets_of(victim.address)
            if not tablets:
                raise DidNotStrike(f"{victim.name} has no tablet that is written to")
            await pause_in_compaction(victim, store, tablets)
            struck = time.monotonic()
            try:
                if not remove_locks(store, tablets):
                    raise DidNotStrike("there was no LOCK to be removed")
                seconds = await outlast_leases(scene, struck, replaced=True)
                if await scene.filler.tablets_of(victim.address):
                    raise DidNotStrike(f"{victim.name} has kept its tablets")
            finally:
                victim.resume()
            network = scene.supervisor.network
            for tablet in tablets:
                await require_deposed(network, victim.address, tablet)
            await scene.recovered_since(time.monotonic())
        await scene.filler.require_intact()
        return seconds or 0.0


class CutFromMasters(Fault):
    """No master reaches it any more, clients still do: they are served until it is deposed."""

    @property
    def name(self) -> str:
        return f"cut off from the masters alone: a {self._kind}"

    async def strike(self, scene: Scene) -> float:
        victim = await scene.some(self._kind)
        link = scene.cluster.links[victim.name]
        tablets = await scene.supervisor.tablets()
        lost = [one for one in tablets if one.address == victim.address]
        held_back = link.held_back
        masters = [one for name, one in scene.cluster.processes.items() if name[:6] == "master"]
        struck = time.monotonic()
        link.cut(whose=dialled_by(masters))
        try:
            seconds = await outlast_leases(scene, struck, replaced=True)
            if link.held_back == held_back:
                raise DidNotStrike(f"no master tried to reach {victim.name}")
            if any(one.address == victim.address for one in await scene.supervisor.tablets()):
                raise DidNotStrike(f"{victim.name} has kept its tablets")
            # It answers clients all the time; but of what was taken from it, nothing.
            for tablet in lost:
                await require_deposed(scene.supervisor.network, victim.address, tablet)
        finally:
            link.mend()
        await scene.recovered_since(time.monotonic())
        return seconds or 0.0


class KillTogether(Fault):
    """kill -9 of all but one at once."""

    @property
    def name(self) -> str:
        return f"kill -9 of every {self._kind} but one"

    async def strike(self, scene: Scene) -> float:
        processes = _named(scene, self._kind)
        survivor = scene.chance.choice(processes)
        victims = [one for one in processes if one is not survivor]
        struck = time.monotonic()
        for victim in victims:
            victim.kill()
        seconds = await scene.recovered_since(struck)
        for victim in victims:
            await scene.restart(victim)
        return seconds


class PowerCut(Fault):
    """Every process dies at once, and of each tablet's log what was not synced is torn off."""

    def __init__(self) -> None:
        super().__init__("everything")

    @property
    def name(self) -> str:
        return "power cut"

    async def strike(self, scene: Scene) -> float:
        store = scene.cluster.data / "store"
        async with scene.filler.writing():
            await self._stop_in_a_write(scene)
            struck = time.monotonic()
            for process in scene.cluster.processes.values():
                process.kill()
            if not tablet_server.drop_unsynced(store, scene.chance):
                raise DidNotStrike("everything was on the disk")
            for process in scene.cluster.processes.values():
                await scene.restart(process)
            seconds = await scene.recovered_since(struck)
        await scene.filler.require_intact()
        return seconds

    async def _stop_in_a_write(self, scene: Scene) -> None:
        """All owners stand still, and at least one has appended what is not synced yet."""
        store = scene.cluster.data / "store"
        owners = _named(scene, "tabletserver")
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


def _named(scene: Scene, kind: str) -> list[ServiceProcess]:
    processes = scene.cluster.processes
    return [one for name, one in processes.items() if name.partition("-")[0] == kind]


def dialled_by(processes: Iterable[ServiceProcess]) -> Callable[[int], bool]:
    """By the port that a connection comes from: whether it is one of theirs."""
    known: dict[int, bool] = {}
    pids = [one.pid for one in processes]

    def is_theirs(port: int) -> bool:
        if port not in known:
            known[port] = any(
                port == connection.laddr.port
                for pid in pids
                for connection in psutil.Process(pid).net_connections("tcp")
            )
        return known[port]

    return is_theirs
