"""What is done to containers, one thing at a time; each fault shows that it had an effect.

The recovery time is measured from the injection until everything can be read, and written in every
tablet, through the published port; it includes the restart of a container if no other can take
over.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from percolator.wire.cluster import addresses_of, describe
from tests.chaos.pulse import RECOVERY_SECONDS_MAX, leader
from tests.chaos.supervisor import Supervisor
from tests.containers.composed import (
    KINDS,
    ComposedCluster,
    Container,
    ContainersFailed,
    until_described,
)

LONGER_THAN_LEASES_SECONDS = 4.5


@dataclass(frozen=True)
class Scene:
    """Everything that a fault may hurt, and the supervisor that watches."""

    cluster: ComposedCluster
    supervisor: Supervisor

    async def missed_most(self, kind: str) -> Container:
        """The most important container of a kind: the leader, or the owner of the most tablets."""
        if kind == "gateway":
            return self.cluster.containers("gateway")[0]
        described = await describe(
            self.supervisor.network, [self.cluster.address], RECOVERY_SECONDS_MAX
        )
        addresses = addresses_of(described, KINDS[kind])
        if kind in ("master", "oracle"):
            address = await leader(self.supervisor.network, kind, addresses)
        elif kind == "tabletserver":
            address = await self.supervisor.owner_of_most(addresses)
        else:
            address = addresses[-1]
        return await asyncio.to_thread(self.cluster.at, address)

    async def recovered_since(self, began: float) -> float:
        await self.supervisor.recovered()
        return time.monotonic() - began


class Fault(ABC):
    """One kind of fault, on one kind of container."""

    name: str

    @abstractmethod
    async def inject(self, scene: Scene) -> float:
        """Injects the fault, repairs, and returns the seconds until everything worked again."""


class Kill(Fault):
    """kill -9; restarted after others have taken over, or at once if no other can."""

    def __init__(self, kind: str, *, replaced: bool) -> None:
        leading = "leading " if kind in ("master", "oracle") else ""
        self.name = f"kill -9 of a {leading}{kind}"
        self._kind = kind
        self._replaced = replaced

    async def inject(self, scene: Scene) -> float:
        victim = await scene.missed_most(self._kind)
        began = time.monotonic()
        await asyncio.to_thread(victim.kill)
        if not self._replaced:
            await asyncio.to_thread(victim.start)
        seconds = await scene.recovered_since(began)
        if self._replaced:
            await asyncio.to_thread(victim.start)
        return seconds


class Disconnect(Fault):
    """A tablet server loses its network until all its leases have expired, then gets it back."""

    name = "disconnection of a tabletserver"

    async def inject(self, scene: Scene) -> float:
        victim = await scene.missed_most("tabletserver")
        host = victim.id[:12]
        began = time.monotonic()
        networks = await asyncio.to_thread(victim.disconnect)
        try:
            seconds = await scene.recovered_since(began)
            if any(one.address.startswith(host) for one in await scene.supervisor.tablets()):
                raise ContainersFailed(
                    f"tablets are still assigned to {host}, which is disconnected"
                )
            await asyncio.sleep(max(0.0, began + LONGER_THAN_LEASES_SECONDS - time.monotonic()))
        finally:
            await asyncio.to_thread(victim.connect, networks)
        await scene.recovered_since(time.monotonic())
        return seconds


class DownAndUp(Fault):
    """All containers are removed and created again, with one more tablet server: the data stays."""

    name = "down, and up with more tablet servers"

    def __init__(self, tablet_servers: int) -> None:
        self._tablet_servers = tablet_servers

    async def inject(self, scene: Scene) -> float:
        before = {one.id for one in scene.cluster.containers()}
        began = time.monotonic()
        await asyncio.to_thread(scene.cluster.down)
        await asyncio.to_thread(scene.cluster.up, tabletserver=self._tablet_servers, loader=0)
        # A dozen processes begin at once: on a slow machine, that alone takes longer than a
        # recovery may.
        wanted = dict.fromkeys(KINDS, 1) | {"tabletserver": self._tablet_servers}
        await until_described(scene.cluster.address, wanted)
        seconds = await scene.recovered_since(began)
        if before & {one.id for one in scene.cluster.containers()}:
            raise ContainersFailed("containers have survived `down`")
        if len(scene.cluster.containers("tabletserver")) != self._tablet_servers:
            raise ContainersFailed(f"there are not {self._tablet_servers} tablet servers")
        return seconds


def all_faults(tablet_servers: int) -> list[Fault]:
    """One fault of each kind."""
    return [
        Kill("tabletserver", replaced=True),
        Disconnect(),
        Kill("oracle", replaced=True),
        Kill("master", replaced=True),
        Kill("lockservice", replaced=False),
        Kill("gateway", replaced=False),
        Kill("worker", replaced=True),
        DownAndUp(tablet_servers + 1),
    ]
