"""Everything that may be disturbed, and what faults share: victims, restarts, and the watch."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from percolator.errors import PercolatorError, TabletLocation
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import LocalClusterError, ServiceProcess
from percolator.v1 import master_pb2
from percolator.wire import methods
from percolator.world import Random, RequestT, ResponseT, UnaryMethod
from tests.bucket.ceph import Ceph
from tests.chaos.clients import Clients
from tests.chaos.compaction import Filler, NoEffect
from tests.chaos.host_clock import HostClock
from tests.chaos.supervisor import RECOVERY_SECONDS_MAX, NoRecovery, Pulse, Supervisor, leader, now
from tests.mounted_file_system import FileSystem

LONGER_THAN_LEASES_SECONDS = 4.5
"""Above the lease of a tablet server and the time to live of sessions and locks, 3 s each."""
SERVICES = ("master", "oracle", "lockservice", "tabletserver", "gateway", "worker")
_ASK_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_MAY_PASS = 1
"""The exit code of a program that could not start for a reason that may pass."""


class Roles:
    """Keeps two faults from disabling the same role at once: others could not take over."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def taken(self, roles: Iterable[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            # Always in the same order, so that two faults never wait for each other.
            for role in sorted(set(roles)):
                await stack.enter_async_context(self._locks[role])
            yield

    def is_taken(self, role: str) -> bool:
        return self._locks[role].locked()


class Outage:
    """Measures from now until everything works again, whether or not it is repaired by then."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._began = now()
        self._recovering = asyncio.create_task(pulse.works_since(self._began))

    async def last(self, seconds: float = LONGER_THAN_LEASES_SECONDS) -> None:
        """Returns when it has lasted so long, so that others have to take over. It is repaired
        then even if other faults keep everything from working: they may be waiting for this."""
        await asyncio.sleep(max(0.0, self._began + seconds - now()))

    async def over(self) -> float:
        """Returns when everything works again and the repair has broken nothing, and how many
        seconds the longer of the two took."""
        after_repair = await self._pulse.works_since(now())
        return max(after_repair, await self._recovering)

    async def forget(self) -> None:
        self._recovering.cancel()
        await asyncio.wait([self._recovering])


@dataclass(frozen=True)
class Scene:
    """Everything that a fault may hurt, and the supervisor that watches."""

    cluster: LocalCluster
    clients: Clients
    supervisor: Supervisor
    filler: Filler
    pulse: Pulse
    clocks: list[HostClock]
    """One for each host of the cluster."""
    disk: FileSystem | None
    """The disk under the store; None if this machine does not let us mount one."""
    ceph: Ceph | None = None
    """What the store is on; None for a directory."""
    roles: Roles = field(default_factory=Roles)

    @property
    def store(self) -> Ceph:
        if self.ceph is None:
            raise NoEffect("the store is a directory")
        return self.ceph

    def all(self, kind: str) -> list[ServiceProcess]:
        processes = self.cluster.processes
        return [one for name, one in processes.items() if kind_of(name) == kind]

    async def some(self, kind: str, chance: Random) -> ServiceProcess:
        """The most important process of a kind: the leader, or the owner of the most tablets.

        If other faults keep it from being found, any.
        """
        processes = self.all(kind)
        at = {self.cluster.links[process.name].address: process for process in processes}
        anyone = chance.choice(processes)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                if kind in ("master", "oracle"):
                    return at[await leader(self.supervisor.network, kind, list(at))]
                if kind == "tabletserver":
                    return at[await self.supervisor.owner_of_most(at)]
        except (TimeoutError, PercolatorError, NoRecovery):
            pass
        return anyone

    async def tablets(self) -> list[TabletLocation]:
        """Where all tablets of the workload are."""
        return await _told(self.supervisor.tablets())

    async def server_to_fill(self, chance: Random) -> tuple[ServiceProcess, list[TabletLocation]]:
        """The most important tablet server with tablets of the table whose rows are overwritten all
        the time, and these tablets. The owner of most others may have none of them to the end."""
        first = await self.some("tabletserver", chance)
        for server in sorted(self.all("tabletserver"), key=lambda one: one is not first):
            tablets = await _told(self.filler.tablets_of(server.address))
            if tablets:
                return server, tablets
        raise NoEffect("no server has a tablet that is written to")

    async def taken_over(self, tablets: Sequence[TabletLocation]) -> list[TabletLocation]:
        """The tablets among these that are served at a later epoch. Until then, the former owner
        keeps them, whatever the master has decided: the new one may lack a disk."""
        request = master_pb2.ListTabletsRequest(limit=1_000)
        now_served = {
            one.location.tablet_id: one.location.epoch
            for one in (await self.ask_master(methods.LIST_TABLETS, request)).tablets
            if one.serving
        }
        return [one for one in tablets if now_served.get(one.tablet_id, 0) > one.epoch]

    async def restart(self, *processes: ServiceProcess) -> None:
        """Starts them together, and again as long as the reason for not starting may pass."""
        for process in processes:
            process.start()
        await asyncio.gather(*(self._until_ready(process) for process in processes))

    async def _until_ready(self, process: ServiceProcess) -> None:
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while True:
            try:
                await asyncio.to_thread(process.wait_ready, deadline - time.monotonic())
            except LocalClusterError:
                if process.exit_code != _MAY_PASS or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
                process.start()
            else:
                return

    async def recovered_since(self, began: float) -> float:
        """Returns when everything works again, and the seconds since then."""
        return await self.pulse.works_since(began)

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[Outage]:
        """The block injects a fault at once, and repairs at the end."""
        outage = Outage(self.pulse)
        try:
            yield outage
        finally:
            await outage.forget()

    async def ask_master(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        seconds: float = _ASK_SECONDS,
    ) -> ResponseT:
        """Makes a call that only the leading master answers."""
        deadline = time.monotonic() + seconds
        reason: PercolatorError | None = None
        while time.monotonic() < deadline:
            for address in self.cluster.address.split(","):
                try:
                    network = self.supervisor.network
                    return await network.unary(address, method)(request, _ASK_SECONDS)
                except PercolatorError as error:
                    reason = error
            await asyncio.sleep(_RETRY_SECONDS)
        raise NoEffect(f"no master did it: {reason}")

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Probes all the time, and looks for processes that end by themselves."""
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self.pulse.run()), tasks.create_task(self.watch())]
            await self.recovered_since(time.monotonic())
            yield
            for one in watching:
                one.cancel()

    async def watch(self) -> None:
        """Fails if a process ends by itself. Returns never: cancel it."""
        while True:
            for name, process in self.cluster.processes.items():
                code = process.exit_code
                # Disturbed in the meantime, it may have been ended by the fault.
                if code is not None and not self.roles.is_taken(kind_of(name)):
                    raise AssertionError(f"{name} ended by itself: {code}: {process.last_words()}")
            await asyncio.sleep(_RETRY_SECONDS)


async def _told(asked: Awaitable[list[TabletLocation]]) -> list[TabletLocation]:
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            return await asked
    except (TimeoutError, PercolatorError) as error:
        raise NoEffect(f"no master says where the tablets are: {error!r}") from error


def kind_of(name: str) -> str:
    return name.partition("-")[0]
