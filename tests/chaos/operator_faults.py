"""What an operator orders while everything else happens: splits, moves, drains."""

from __future__ import annotations

import asyncio
import time

from percolator.errors import TabletLocation
from percolator.v1 import master_pb2
from percolator.wire import methods
from percolator.world import Random
from tests.chaos.faults import Fault
from tests.chaos.leading import RECOVERY_SECONDS_MAX
from tests.chaos.scene import Scene
from tests.chaos.standing_still import DidNotStrike

_TABLETS_MAX = 32
_DRAIN_SECONDS = 5.0


class Split(Fault):
    """A tablet that is in use is split where its data says."""

    def __init__(self) -> None:
        super().__init__("operator")

    @property
    def name(self) -> str:
        return "split of a tablet"

    async def strike(self, scene: Scene, chance: Random) -> float:
        tablets = await scene.tablets()
        if len(tablets) > _TABLETS_MAX:
            raise DidNotStrike(f"there are {len(tablets)} tablets already")
        tablet = chance.choice(tablets)
        struck = time.monotonic()
        await scene.ask_master(
            methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=tablet.tablet_id)
        )
        return await scene.recovered_since(struck)


class Move(Fault):
    """A tablet that is in use is moved to another server."""

    def __init__(self) -> None:
        super().__init__("operator")

    @property
    def name(self) -> str:
        return "move of a tablet"

    async def strike(self, scene: Scene, chance: Random) -> float:
        tablet = chance.choice(await scene.tablets())
        servers = [scene.cluster.links[one.name].address for one in scene.all("tabletserver")]
        target = chance.choice([one for one in servers if one != tablet.address])
        struck = time.monotonic()
        await scene.ask_master(
            methods.MOVE_TABLET,
            master_pb2.MoveTabletRequest(tablet_id=tablet.tablet_id, server=target),
        )
        return await scene.recovered_since(struck)


class Drain(Fault):
    """A server's tablets are moved away, and it may have tablets again later."""

    def __init__(self) -> None:
        super().__init__("operator")

    @property
    def name(self) -> str:
        return "drain of a tabletserver"

    async def strike(self, scene: Scene, chance: Random) -> float:
        servers = [scene.cluster.links[one.name].address for one in scene.all("tabletserver")]
        server = chance.choice(servers)
        before = await scene.tablets()
        if not _on(server, before):
            raise DidNotStrike(f"{server} has no tablets")
        struck = time.monotonic()
        await scene.ask_master(methods.DRAIN_SERVER, master_pb2.DrainServerRequest(server=server))
        try:
            deadline = struck + _DRAIN_SECONDS
            while len(_on(server, await scene.tablets())) >= len(_on(server, before)):
                if time.monotonic() > deadline:
                    raise DidNotStrike(f"{server} has kept its tablets")
                await asyncio.sleep(0.1)
            seconds = await scene.recovered_since(struck)
        finally:
            undo = master_pb2.DrainServerRequest(server=server, undo=True)
            await scene.ask_master(methods.DRAIN_SERVER, undo, RECOVERY_SECONDS_MAX)
        return seconds


def _on(server: str, tablets: list[TabletLocation]) -> list[TabletLocation]:
    return [one for one in tablets if one.address == server]
