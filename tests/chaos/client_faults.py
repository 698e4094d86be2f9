"""What is done to clients, in the middle of their commits."""

from __future__ import annotations

import asyncio
import signal

from percolator.world import Random
from tests.chaos.faults import Fault
from tests.chaos.scene import Scene

_DEAD_SECONDS = 3.0


class KillClient(Fault):
    """kill -9 in the middle of its commits, whose locks then block all other clients."""

    def __init__(self) -> None:
        super().__init__("client")

    @property
    def name(self) -> str:
        return "kill -9 of a client in mid-commit"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = chance.choice(scene.clients.all)
        victim.struck = True
        await asyncio.to_thread(victim.catch_in_a_commit)
        async with scene.outage() as outage:
            victim.kill()
            await outage.last(_DEAD_SECONDS)
            victim.begin_another_life()
            victim.struck = False
            return await outage.over()


class PauseClient(Fault):
    """SIGSTOP in the middle of its commits, until others have declared it dead; then SIGCONT."""

    def __init__(self) -> None:
        super().__init__("client")

    @property
    def name(self) -> str:
        return "pause of a client in mid-commit"

    async def strike(self, scene: Scene, chance: Random) -> float:
        victim = chance.choice(scene.clients.all)
        victim.struck = True
        await asyncio.to_thread(victim.catch_in_a_commit)
        async with scene.outage() as outage:
            try:
                await outage.last()
            finally:
                victim.signal(signal.SIGCONT)
            victim.struck = False
            return await outage.over()
