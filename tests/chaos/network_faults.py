"""Cuts and losses between processes, at the links through which all calls go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import psutil

from percolator.errors import PercolatorError
from percolator.services.local.link import Disturbance, Link
from percolator.services.local.process import ServiceProcess
from percolator.world import Random
from tests.chaos.compaction import require_deposed
from tests.chaos.faults import Fault, a
from tests.chaos.scene import Scene
from tests.chaos.standing_still import DidNotStrike

_LOST_SHARES = (0.1, 0.25, 0.5)
_LOSS_SECONDS = 5.0


class Cut(Fault):
    """Nothing reaches it, or its responses reach no one, while it can still call others."""

    def __init__(self, role: str, *, answers_only: bool) -> None:
        super().__init__(role)
        self._answers_only = answers_only

    @property
    def name(self) -> str:
        what = "answers of" if self._answers_only else "everything to"
        return f"cut off: {what} {a(self._role)}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        link = scene.cluster.links[victim.name]
        async with scene.outage() as outage:
            cut = link.cut(answers_only=self._answers_only)
            try:
                await outage.last()
            finally:
                link.mend(cut)
            seconds = await outage.over()
        if not cut.struck:
            raise DidNotStrike(f"nothing was to pass between {victim.name} and others")
        return seconds


class CutCaller(Fault):
    """It reaches nothing, while others can still call it: a process with a broken uplink."""

    @property
    def name(self) -> str:
        return f"cut off: everything from {a(self._role)}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        whose = dialled_by([victim])
        async with scene.outage() as outage:
            cuts = [(link, link.cut(whose=whose)) for link in scene.cluster.links.values()]
            try:
                await outage.last()
            finally:
                mend(cuts)
            seconds = await outage.over()
        if not any(cut.struck for _, cut in cuts):
            raise DidNotStrike(f"{victim.name} called nothing")
        return seconds


class CutFromMasters(Fault):
    """No master can reach it, but clients can: they are served until it is deposed."""

    @property
    def name(self) -> str:
        return f"cut off from the masters alone: {a(self._role)}"

    @property
    def roles(self) -> tuple[str, ...]:
        return (self._role, "master")

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        link = scene.cluster.links[victim.name]
        lost = [one for one in await scene.tablets() if one.address == victim.address]
        async with scene.outage() as outage:
            cut = link.cut(whose=dialled_by(scene.all("master")))
            try:
                await outage.last()
                if not cut.struck:
                    raise DidNotStrike(f"no master tried to reach {victim.name}")
                taken_over = await scene.taken_over(lost)
                if not taken_over:
                    raise DidNotStrike(f"{victim.name} has kept its tablets")
                # It answers clients all the time, but not for tablets that were taken from it.
                for tablet in taken_over:
                    await require_deposed(scene.supervisor.network, victim.address, tablet)
            except PercolatorError as error:
                raise DidNotStrike(f"what {victim.name} serves is not known: {error}") from error
            finally:
                link.mend(cut)
            return await outage.over()


class Loss(Fault):
    """Packets to and from it are lost, and those that it sends when it calls."""

    @property
    def name(self) -> str:
        return f"lost packets of {a(self._role)}"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        own, share = scene.cluster.links[victim.name], chance.choice(_LOST_SHARES)
        random, whose = Random(chance.random()), dialled_by([victim])
        struck = time.monotonic()
        losses = [
            (
                link,
                link.lose(share, random) if link is own else link.lose(share, random, whose=whose),
            )
            for link in scene.cluster.links.values()
        ]
        try:
            await asyncio.sleep(_LOSS_SECONDS)
        finally:
            mend(losses)
        # What is lost over and over may hang until then, so that no earlier end is promised.
        seconds = await scene.recovered_since(time.monotonic())
        if not any(loss.struck for _, loss in losses):
            raise DidNotStrike(f"{victim.name} lost nothing in {time.monotonic() - struck:.1f} s")
        return seconds


def mend(disturbed: Iterable[tuple[Link, Disturbance]]) -> None:
    for link, disturbance in disturbed:
        link.mend(disturbance)


def dialled_by(processes: Iterable[ServiceProcess]) -> Callable[[int], bool]:
    """Tells by the port of a connection whether it comes from one of these processes."""
    known: dict[int, bool] = {}
    pids = [one.pid for one in processes]

    def is_theirs(port: int) -> bool:
        if port not in known:
            known[port] = any(port in _ports_of(pid) for pid in pids)
        return known[port]

    return is_theirs


def _ports_of(pid: int) -> set[int]:
    try:
        return {one.laddr.port for one in psutil.Process(pid).net_connections("tcp")}
    except psutil.NoSuchProcess:
        return set()  # another strike has killed it
