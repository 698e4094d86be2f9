"""Faults of the processes of a cluster.

Each fault is injected, measures how long the outage lasted, repairs what it broke, and shows that
it had an effect. The recovery time is measured from the injection until everything works; it
includes the start of a new process if no other one can take over. Faults of different roles occur
at the same time, so each has to expect that others keep the cluster from recovering for a while.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import psutil

from percolator.errors import PercolatorError, TabletLocation
from percolator.services.local.link import Disturbance, Link
from percolator.services.local.process import ServiceProcess
from percolator.v1 import master_pb2
from percolator.wire import methods
from percolator.wire.cluster import describe
from percolator.wire.cluster_clock import clocks_of
from percolator.world import Random
from tests.bucket.ceph import GATEWAYS, OSDS
from tests.chaos import tablet_server
from tests.chaos.compaction import (
    NoEffect,
    pause_in_compaction,
    remove_locks,
    require_deposed,
    require_stopped,
)
from tests.chaos.scene import SERVICES, Scene
from tests.chaos.supervisor import RECOVERY_SECONDS_MAX

_SECOND_SIGNAL_SECONDS_MAX = 0.02
_AT_ONCE_SECONDS = 5.0
_DEAD_SECONDS_MAX = 6.0
"""A process that others can replace is started again within this time, as by a supervisor."""
_STOPPED_SECONDS = 30.0
_POLL_SECONDS = 0.01
_CUT_OFF = 1
"""The exit code of a service that drained, but had to cut off calls: others were disturbed, too."""


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
        """The roles that no other fault may affect meanwhile."""
        return (self._role,)

    @abstractmethod
    async def inject(self, scene: Scene, chance: Random) -> float:
        """Injects the fault, repairs, and returns the seconds until everything worked again."""


class Kill(Fault):
    """kill -9; restarted at once if no other can take over, otherwise some seconds later."""

    def __init__(self, role: str, *, replaced: bool) -> None:
        super().__init__(role)
        self._replaced = replaced

    @property
    def name(self) -> str:
        return f"kill -9 of {a(self._role)}"

    async def inject(self, scene: Scene, chance: Random) -> float:
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

    async def inject(self, scene: Scene, chance: Random) -> float:
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

    async def inject(self, scene: Scene, chance: Random) -> float:
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

    async def inject(self, scene: Scene, chance: Random) -> float:
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

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        async with scene.outage() as outage:
            victim.ask_to_stop()
            await asyncio.sleep(_SECOND_SIGNAL_SECONDS_MAX * chance.random())
            victim.ask_to_stop()
            code = await exit_code(victim, _AT_ONCE_SECONDS)
            await scene.restart(victim)
            seconds = await outage.over()
        if code != 128 + signal.SIGTERM:
            raise NoEffect(f"{victim.name} had ended before, with exit code {code}")
        return seconds


async def exit_code(process: ServiceProcess, seconds: float) -> int:
    """Waits for its end. A process that does not end is a failure of the product."""
    deadline = time.monotonic() + seconds
    while process.exit_code is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"{process.name} has not ended after {seconds:g} s")
        await asyncio.sleep(_POLL_SECONDS)
    return process.exit_code


# What is done to clients, in the middle of their commits.

_DEAD_SECONDS = 3.0


class KillClient(Fault):
    """kill -9 in the middle of its commits, whose locks then block all other clients."""

    def __init__(self) -> None:
        super().__init__("client")

    @property
    def name(self) -> str:
        return "kill -9 of a client in mid-commit"

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = chance.choice(scene.clients.all)
        victim.disturbed = True
        await asyncio.to_thread(victim.catch_in_a_commit)
        async with scene.outage() as outage:
            victim.kill()
            await outage.last(_DEAD_SECONDS)
            victim.begin_another_life()
            victim.disturbed = False
            return await outage.over()


class PauseClient(Fault):
    """SIGSTOP in the middle of its commits, until others have declared it dead; then SIGCONT."""

    def __init__(self) -> None:
        super().__init__("client")

    @property
    def name(self) -> str:
        return "pause of a client in mid-commit"

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = chance.choice(scene.clients.all)
        victim.disturbed = True
        await asyncio.to_thread(victim.catch_in_a_commit)
        async with scene.outage() as outage:
            try:
                await outage.last()
            finally:
                victim.signal(signal.SIGCONT)
            victim.disturbed = False
            return await outage.over()


# Wrong wall clocks, on one of the hosts over which the processes are spread.

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

    async def inject(self, scene: Scene, chance: Random) -> float:
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

    async def inject(self, scene: Scene, chance: Random) -> float:
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
    raise NoEffect(f"no process of host {host} has reported a clock {wrong / _DAY:+.2f} days off")


async def _known_clocks(scene: Scene) -> dict[str, int]:
    """Clocks that the leading master knows: a standby, which may answer first, knows its own."""
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
    # Other faults may occur meanwhile, and cut the power for example.
    timestamp = await scene.supervisor.database.timestamp(timeout=RECOVERY_SECONDS_MAX)
    milliseconds = timestamp >> 18
    ahead = milliseconds / 1000 - time.time()
    if ahead > _LEAD_SECONDS_MAX:
        raise AssertionError(f"timestamps are {ahead:.0f} s ahead of two of three clocks")


# Cuts and losses between processes, at the links through which all calls go.

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

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        link = scene.cluster.links[victim.name]
        async with scene.outage() as outage:
            cut = link.cut(answers_only=self._answers_only)
            try:
                await outage.last()
            finally:
                link.mend(cut)
            seconds = await outage.over()
        if not cut.hits:
            raise NoEffect(f"nothing was to pass between {victim.name} and others")
        return seconds


class CutCaller(Fault):
    """It reaches nothing, while others can still call it: a process with a broken uplink."""

    @property
    def name(self) -> str:
        return f"cut off: everything from {a(self._role)}"

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        whose = dialled_by([victim])
        async with scene.outage() as outage:
            cuts = [(link, link.cut(whose=whose)) for link in scene.cluster.links.values()]
            try:
                await outage.last()
            finally:
                mend(cuts)
            seconds = await outage.over()
        if not any(cut.hits for _, cut in cuts):
            raise NoEffect(f"{victim.name} called nothing")
        return seconds


class CutFromMasters(Fault):
    """No master can reach it, but clients can: they are served until it is deposed."""

    @property
    def name(self) -> str:
        return f"cut off from the masters alone: {a(self._role)}"

    @property
    def roles(self) -> tuple[str, ...]:
        return (self._role, "master")

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        link = scene.cluster.links[victim.name]
        lost = [one for one in await scene.tablets() if one.address == victim.address]
        async with scene.outage() as outage:
            cut = link.cut(whose=dialled_by(scene.all("master")))
            try:
                await outage.last()
                if not cut.hits:
                    raise NoEffect(f"no master tried to reach {victim.name}")
                taken_over = await scene.taken_over(lost)
                if not taken_over:
                    raise NoEffect(f"{victim.name} has kept its tablets")
                # It answers clients all the time, but not for tablets that were taken from it.
                for tablet in taken_over:
                    await require_deposed(scene.supervisor.network, victim.address, tablet)
            except PercolatorError as error:
                raise NoEffect(f"what {victim.name} serves is not known: {error}") from error
            finally:
                link.mend(cut)
            return await outage.over()


class Loss(Fault):
    """Packets to and from it are lost, and those that it sends when it calls."""

    @property
    def name(self) -> str:
        return f"lost packets of {a(self._role)}"

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        own, share = scene.cluster.links[victim.name], chance.choice(_LOST_SHARES)
        random, whose = Random(chance.random()), dialled_by([victim])
        since = time.monotonic()
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
        if not any(loss.hits for _, loss in losses):
            raise NoEffect(f"{victim.name} lost nothing in {time.monotonic() - since:.1f} s")
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
        return set()  # another fault has killed it


# What an operator orders while everything else happens: splits, moves, drains.

_TABLETS_MAX = 32
_DRAIN_SECONDS = 5.0


class Split(Fault):
    """A tablet that is in use is split where its data says."""

    def __init__(self) -> None:
        super().__init__("operator")

    @property
    def name(self) -> str:
        return "split of a tablet"

    async def inject(self, scene: Scene, chance: Random) -> float:
        tablets = await scene.tablets()
        if len(tablets) > _TABLETS_MAX:
            raise NoEffect(f"there are {len(tablets)} tablets already")
        tablet = chance.choice(tablets)
        since = time.monotonic()
        await scene.ask_master(
            methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=tablet.tablet_id)
        )
        return await scene.recovered_since(since)


class Move(Fault):
    """A tablet that is in use is moved to another server."""

    def __init__(self) -> None:
        super().__init__("operator")

    @property
    def name(self) -> str:
        return "move of a tablet"

    async def inject(self, scene: Scene, chance: Random) -> float:
        tablet = chance.choice(await scene.tablets())
        servers = [scene.cluster.links[one.name].address for one in scene.all("tabletserver")]
        target = chance.choice([one for one in servers if one != tablet.address])
        since = time.monotonic()
        await scene.ask_master(
            methods.MOVE_TABLET,
            master_pb2.MoveTabletRequest(tablet_id=tablet.tablet_id, server=target),
        )
        return await scene.recovered_since(since)


class Drain(Fault):
    """A server's tablets are moved away, and it may have tablets again later."""

    def __init__(self) -> None:
        super().__init__("operator")

    @property
    def name(self) -> str:
        return "drain of a tabletserver"

    async def inject(self, scene: Scene, chance: Random) -> float:
        servers = [scene.cluster.links[one.name].address for one in scene.all("tabletserver")]
        server = chance.choice(servers)
        before = await scene.tablets()
        if not _on(server, before):
            raise NoEffect(f"{server} has no tablets")
        since = time.monotonic()
        await scene.ask_master(methods.DRAIN_SERVER, master_pb2.DrainServerRequest(server=server))
        try:
            deadline = since + _DRAIN_SECONDS
            while len(_on(server, await scene.tablets())) >= len(_on(server, before)):
                if time.monotonic() > deadline:
                    raise NoEffect(f"{server} has kept its tablets")
                await asyncio.sleep(0.1)
            seconds = await scene.recovered_since(since)
        finally:
            undo = master_pb2.DrainServerRequest(server=server, undo=True)
            await scene.ask_master(methods.DRAIN_SERVER, undo, RECOVERY_SECONDS_MAX)
        return seconds


def _on(server: str, tablets: list[TabletLocation]) -> list[TabletLocation]:
    return [one for one in tablets if one.address == server]


# Faults of the owners of tablets, and of the disk under them.

_UNSYNCED_SECONDS = 20.0
_FULL_SECONDS = 4.0
_FULL = '"the disk is full: refusing writes"'


class PauseInCompaction(Fault):
    """SIGSTOP of an owner while LevelDB writes tables, with its LOCK files removed; SIGCONT when
    others have taken over its tablets and written to them."""

    @property
    def name(self) -> str:
        return f"pause of {a(self._role)} in a compaction, without its locks"

    async def inject(self, scene: Scene, chance: Random) -> float:
        store = scene.cluster.data / "store"
        async with scene.filler.writing():
            victim, tablets = await scene.server_to_fill(chance)
            await pause_in_compaction(victim, store, tablets)
            async with scene.outage() as outage:
                try:
                    if not remove_locks(store, tablets):
                        raise NoEffect("there was no LOCK to be removed")
                    await outage.last()
                    taken_over = await scene.taken_over(tablets)
                    if not taken_over:
                        raise NoEffect(f"{victim.name} has kept its tablets")
                finally:
                    victim.resume()
                seconds = await outage.over()
            try:
                for tablet in taken_over:
                    await require_deposed(scene.supervisor.network, victim.address, tablet)
            except PercolatorError as error:
                raise NoEffect(f"{victim.name} did not say what it serves: {error}") from error
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

    async def inject(self, scene: Scene, chance: Random) -> float:
        store = scene.cluster.data / "store"
        processes = list(scene.cluster.processes.values())
        async with scene.filler.writing():
            await self._stop_in_a_write(scene)
            since = time.monotonic()
            for process in processes:
                process.kill()
            dropped = tablet_server.drop_unsynced(store, chance)
            await scene.restart(*processes)
            seconds = await scene.recovered_since(since)
        await scene.filler.require_intact()
        if not dropped:
            raise NoEffect("everything was on the disk")
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
        raise NoEffect("nothing was being written")


class FullDisk(Fault):
    """Nothing can be written to the store, and then there is space again."""

    def __init__(self) -> None:
        super().__init__("disk")

    @property
    def name(self) -> str:
        return "full disk"

    async def inject(self, scene: Scene, chance: Random) -> float:
        if scene.disk is None:
            raise NoEffect("the store has no disk of its own")
        before = self._refusals(scene)
        scene.disk.fill()
        try:
            await asyncio.sleep(_FULL_SECONDS)
        finally:
            scene.disk.empty()
        # Without space nothing can work, so only the time from then on counts.
        seconds = await scene.recovered_since(time.monotonic())
        if self._refusals(scene) == before:
            raise NoEffect("no tablet server has noticed")
        return seconds

    def _refusals(self, scene: Scene) -> int:
        return sum(one.log.read_text().count(_FULL) for one in scene.all("tabletserver"))


# Faults of a cluster whose store is a bucket: of Ceph under it, and of the disks that it has left.

OSD = "OSD"
CEPH_GATEWAY = "gateway of Ceph"
_STORE_DEAD_SECONDS_MAX = 8.0
"""Long enough that Ceph does without an OSD, and short enough that the copies on it are of use."""


class KillOfStore(Fault):
    """kill -9 of a part of Ceph, which is started again on the disk or port that it had.

    One at a time, so that data stays available: of three copies, Ceph needs two.
    """

    @property
    def name(self) -> str:
        return f"kill -9 of {a(self._role)}"

    async def inject(self, scene: Scene, chance: Random) -> float:
        ceph = scene.store
        if self._role == OSD:
            count, kill, start, wait = OSDS, ceph.kill_osd, ceph.start_osd, ceph.wait_for_osds
        else:
            count, kill = GATEWAYS, ceph.kill_gateway
            start, wait = ceph.start_gateway, ceph.wait_for_gateways
        number = chance.randrange(count)
        async with scene.outage() as outage:
            await asyncio.to_thread(kill, number)
            try:
                await outage.last(_STORE_DEAD_SECONDS_MAX * chance.random())
            finally:
                start(number)
            await asyncio.to_thread(wait)
            return await outage.over()


class PauseOfStore(Fault):
    """SIGSTOP of a gateway of Ceph: connections stay, and whether a call arrives is not known."""

    def __init__(self) -> None:
        super().__init__(CEPH_GATEWAY)

    @property
    def name(self) -> str:
        return f"pause of {a(self._role)}"

    async def inject(self, scene: Scene, chance: Random) -> float:
        number = chance.randrange(GATEWAYS)
        async with scene.outage() as outage:
            scene.store.pause_gateway(number)
            try:
                await outage.last()
            finally:
                scene.store.resume_gateway(number)
            return await outage.over()


class LoseCache(Fault):
    """kill -9 of an owner of tablets, whose directory is empty when it is started again."""

    def __init__(self) -> None:
        super().__init__("tabletserver")

    @property
    def name(self) -> str:
        return f"loss of the cache of {a(self._role)}"

    async def inject(self, scene: Scene, chance: Random) -> float:
        victim = await scene.some(self._role, chance)
        async with scene.outage() as outage:
            victim.kill()
            lost = _lose_caches(scene, [victim])
            await scene.restart(victim)
            seconds = await outage.over()
        if not lost:
            raise NoEffect(f"{victim.name} had no cache")
        return seconds


class LoseEverything(Fault):
    """Every process dies at once, and all that is on their machines is lost."""

    def __init__(self) -> None:
        super().__init__("everything")

    @property
    def name(self) -> str:
        return "loss of every machine"

    @property
    def roles(self) -> tuple[str, ...]:
        return SERVICES

    async def inject(self, scene: Scene, chance: Random) -> float:
        processes = list(scene.cluster.processes.values())
        async with scene.filler.writing():
            since = time.monotonic()
            for process in processes:
                process.kill()
            lost = _lose_caches(scene, scene.all("tabletserver"))
            await scene.restart(*processes)
            seconds = await scene.recovered_since(since)
        await scene.filler.require_intact()
        if not lost:
            raise NoEffect("there was no cache")
        return seconds


def _lose_caches(scene: Scene, servers: Iterable[ServiceProcess]) -> int:
    """Deletes the caches of tablets of dead servers. Returns how many there were."""
    lost = 0
    for server in servers:
        caches = scene.cluster.data / "run" / f"{server.name}.cache"
        lost += sum(1 for _ in caches.glob("*/*-*"))
        shutil.rmtree(caches, ignore_errors=True)
    return lost
