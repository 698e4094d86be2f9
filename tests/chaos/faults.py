"""What is done to a cluster, one thing at a time, with recovery in between.

Each fault strikes, measures how long nothing went on, repairs what it broke, and shows that it did
strike. The recovery time counts from the strike until everything can be read, and written in every
tablet; it includes starting a new process where nobody else can take over.
"""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from percolator.world import Random
from services.local.cluster import LocalCluster
from services.local.process import ServiceProcess
from tests.chaos.clients import Clients
from tests.chaos.compaction import Filler
from tests.chaos.standing_still import DidNotStrike, require_stopped
from tests.chaos.supervisor import Supervisor

LONGER_THAN_LEASES_SECONDS = 4.5
"""Above the lease of a tablet server and the time to live of sessions and locks, 3 s each."""


@dataclass(frozen=True)
class Scene:
    """Whatever a fault may hurt, and who watches."""

    cluster: LocalCluster
    clients: Clients
    supervisor: Supervisor
    filler: Filler
    chance: Random

    async def some(self, kind: str) -> ServiceProcess:
        """The process of a kind that is missed most: who leads, who serves most tablets."""
        names = [name for name in self.cluster.processes if name.partition("-")[0] == kind]
        processes = [self.cluster.processes[name] for name in names]
        at = {self.cluster.links[process.name].address: process for process in processes}
        if kind in ("master", "oracle"):
            return at[await self.supervisor.leader(kind, list(at))]
        if kind == "tabletserver":
            return at[await self.supervisor.owner_of_most(at)]
        return self.chance.choice(processes)

    async def restart(self, process: ServiceProcess) -> None:
        await asyncio.to_thread(self.cluster.restart, process.name)

    async def recovered_since(self, strike: float) -> float:
        await self.supervisor.recovered()
        return time.monotonic() - strike


class Fault(ABC):
    """One kind of fault, on one kind of process."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @property
    @abstractmethod
    def name(self) -> str:
        """As it is counted and reported."""

    @abstractmethod
    async def strike(self, scene: Scene) -> float:
        """Strikes, repairs, and returns the seconds until everything worked again."""


class Kill(Fault):
    """kill -9; started again at once where nobody else can take over, else after that."""

    def __init__(self, kind: str, *, replaced: bool) -> None:
        super().__init__(kind)
        self._replaced = replaced

    @property
    def name(self) -> str:
        return f"kill -9 of a {self._kind}"

    async def strike(self, scene: Scene) -> float:
        victim = await scene.some(self._kind)
        struck = time.monotonic()
        victim.kill()
        if victim.exit_code != -signal.SIGKILL:
            raise DidNotStrike(f"{victim.name} exited with {victim.exit_code}")
        if self._replaced:
            seconds = await scene.recovered_since(struck)
            await scene.restart(victim)
        else:
            await scene.restart(victim)
            seconds = await scene.recovered_since(struck)
        return seconds


class Pause(Fault):
    """SIGSTOP for longer than every lease, then SIGCONT: what it then says must be refused."""

    def __init__(self, kind: str, *, replaced: bool) -> None:
        super().__init__(kind)
        self._replaced = replaced

    @property
    def name(self) -> str:
        return f"pause of a {self._kind}"

    async def strike(self, scene: Scene) -> float:
        victim = await scene.some(self._kind)
        struck = time.monotonic()
        victim.pause()
        try:
            require_stopped(victim.pid)
            taken_over = await outlast_leases(scene, struck, replaced=self._replaced)
        finally:
            victim.resume()
        resumed = await scene.recovered_since(time.monotonic())
        return resumed if taken_over is None else taken_over


class Cut(Fault):
    """Nobody reaches it any more, or it can answer nobody, while it goes on reaching others."""

    def __init__(self, kind: str, *, answers_only: bool, replaced: bool) -> None:
        super().__init__(kind)
        self._answers_only = answers_only
        self._replaced = replaced

    @property
    def name(self) -> str:
        what = "answers of" if self._answers_only else "everything to"
        return f"cut off: {what} a {self._kind}"

    async def strike(self, scene: Scene) -> float:
        victim = await scene.some(self._kind)
        link = scene.cluster.links[victim.name]
        held_back = link.held_back
        struck = time.monotonic()
        link.cut(answers_only=self._answers_only)
        try:
            taken_over = await outlast_leases(scene, struck, replaced=self._replaced)
            if link.held_back == held_back:
                raise DidNotStrike(f"nothing was to pass between {victim.name} and others")
        finally:
            link.mend()
        mended = await scene.recovered_since(time.monotonic())
        return mended if taken_over is None else taken_over


class RollingRestart(Fault):
    """SIGTERM to one after the other, each started again before the next."""

    @property
    def name(self) -> str:
        return f"rolling restart of every {self._kind}"

    async def strike(self, scene: Scene) -> float:
        longest = 0.0
        for name, process in scene.cluster.processes.items():
            if name.partition("-")[0] != self._kind:
                continue
            struck = time.monotonic()
            process.ask_to_stop()
            code = await asyncio.to_thread(process.wait_stopped)
            if code != 0:
                raise DidNotStrike(f"{name} did not drain: exit code {code}")
            longest = max(longest, await scene.recovered_since(struck))
            await scene.restart(process)
        return longest


class KillClient(Fault):
    """kill -9 in the middle of its commits, whose locks then stand in everybody's way."""

    def __init__(self) -> None:
        super().__init__("client")

    @property
    def name(self) -> str:
        return "kill -9 of a client in mid-commit"

    async def strike(self, scene: Scene) -> float:
        victim = scene.chance.choice(scene.clients.all)
        await asyncio.to_thread(victim.catch_in_a_commit)
        struck = time.monotonic()
        victim.kill()
        seconds = await scene.recovered_since(struck)
        victim.begin_another_life()
        return seconds


class PauseClient(Fault):
    """SIGSTOP in the middle of its commits, until others have declared it dead; then SIGCONT."""

    def __init__(self) -> None:
        super().__init__("client")

    @property
    def name(self) -> str:
        return "pause of a client in mid-commit"

    async def strike(self, scene: Scene) -> float:
        victim = scene.chance.choice(scene.clients.all)
        await asyncio.to_thread(victim.catch_in_a_commit)
        struck = time.monotonic()
        try:
            seconds = await scene.recovered_since(struck)
            await asyncio.sleep(max(0, LONGER_THAN_LEASES_SECONDS - seconds))
        finally:
            victim.signal(signal.SIGCONT)
        return seconds


async def outlast_leases(scene: Scene, struck: float, *, replaced: bool) -> float | None:
    """Waits until others have taken over, and until they would have; returns when they had."""
    seconds = await scene.recovered_since(struck) if replaced else None
    await asyncio.sleep(max(0.0, struck + LONGER_THAN_LEASES_SECONDS - time.monotonic()))
    return seconds
