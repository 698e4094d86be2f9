"""Processes that the demo kills in the middle of a crawl, and how it sees that all works again.

Where tablet servers have the cells, it is the one that the observers need most. In a row store, it
is the leading oracle, and a worker.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection

from examples.demo.state import LEADS, Server, State, Tablet
from examples.webindex import tables
from percolator.errors import PercolatorError
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1.master_pb2 import ListTabletsRequest
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire import methods
from percolator.world import Network

ANSWER_SECONDS = 5.0
LEADER_SECONDS = 1.0


class Outage(ABC):
    """Knows the processes that may be killed, from what `look` has filled in."""

    asked: str
    """The questions of `look`."""

    def __init__(self, cluster: LocalCluster, network: Network, state: State) -> None:
        self._cluster = cluster
        self._network = network
        self._state = state

    @abstractmethod
    async def look(self) -> None:
        """Fills in the state of these processes, and of what they do."""

    @abstractmethod
    def is_whole(self, without: Collection[str] = ()) -> bool:
        """Everything was done by somebody, and by none of these processes."""

    @abstractmethod
    def parts(self) -> str:
        """The processes that there are."""

    @abstractmethod
    def victims(self) -> list[str]:
        """The names of the processes to kill. What depends on them is remembered as lost."""

    @abstractmethod
    def damage(self) -> str:
        """The failure without them."""

    @abstractmethod
    def recovery(self, seconds: float) -> str:
        """The processes that do their work after that time."""

    @abstractmethod
    def comeback(self) -> str:
        """Their work when they are started again."""

    def _named(self, kind: str) -> list[ServiceProcess]:
        processes = self._cluster.processes.items()
        return [one for name, one in processes if name.partition("-")[0] == kind]


class TabletServerKilled(Outage):
    """The tablet server with the table that all observers share."""

    asked = "master"

    async def look(self) -> None:
        self._state.servers = [
            Server(one.name, one.pid, one.address, one.exit_code is None)
            for one in self._named("tabletserver")
        ]
        list_tablets = self._network.unary(self._cluster.address, methods.LIST_TABLETS)
        answer = await list_tablets(ListTabletsRequest(), ANSWER_SECONDS)
        self._state.tablets = [
            Tablet(one.location.tablet_id, one.table, one.location.address, one.serving)
            for one in answer.tablets
        ]

    def is_whole(self, without: Collection[str] = ()) -> bool:
        found = self._state.tablets
        gone = {self._cluster.processes[name].address for name in without}
        return bool(found) and all(one.serving and one.address not in gone for one in found)

    def parts(self) -> str:
        return f"{len(self._state.tablets)} tablets on {len(self._state.servers)} tablet servers"

    def victims(self) -> list[str]:
        state = self._state
        (groups, *_) = [one for one in state.tablets if one.table == tables.groups.name]
        state.lost = frozenset(
            one.tablet_id for one in state.tablets if one.address == groups.address
        )
        return [state.server_of(groups.address)]

    def damage(self) -> str:
        return f"{len(self._state.lost)} tablets have no server"

    def recovery(self, seconds: float) -> str:
        return f"all of them are served again after {seconds:.1f} s: {self._moved()}"

    def _moved(self) -> str:
        state, names = self._state, self._state.names()
        by_server: dict[str, list[Tablet]] = {}
        for tablet in state.tablets:
            if tablet.tablet_id in state.lost:
                by_server.setdefault(state.server_of(tablet.address), []).append(tablet)
        return "; ".join(
            f"{', '.join(names[one.tablet_id] for one in here)} by {server}"
            for server, here in sorted(by_server.items())
        )

    def comeback(self) -> str:
        return "the master gives it tablets as needed"


class OracleAndWorkerKilled(Outage):
    """The leading oracle, and the first worker."""

    asked = "oracles"

    async def look(self) -> None:
        oracles = self._named("oracle")
        leading = await asyncio.gather(*(self._leads(one) for one in oracles))
        roles = [LEADS if leads else "stands by" for leads in leading]
        workers = self._named("worker")
        self._state.servers = [
            Server(one.name, one.pid, one.address, one.exit_code is None, role)
            for one, role in zip(
                [*oracles, *workers], [*roles, *["runs observers"] * len(workers)], strict=True
            )
            if one.ready
        ]

    async def _leads(self, oracle: ServiceProcess) -> bool:
        """Only the one that leads gives out timestamps."""
        if oracle.exit_code is not None:
            return False
        ask = self._network.unary(oracle.address, methods.GET_TIMESTAMPS)
        try:
            await ask(GetTimestampsRequest(count=1), LEADER_SECONDS)
        except PercolatorError:
            return False
        return True

    def _leader(self) -> str:
        """Empty if there is none."""
        return next((one.name for one in self._state.servers if one.role == LEADS), "")

    def is_whole(self, without: Collection[str] = ()) -> bool:
        leader = self._leader()
        return bool(leader) and leader not in without

    def parts(self) -> str:
        return f"no tablets, and {len(self._named('oracle'))} oracles, of which one leads"

    def victims(self) -> list[str]:
        return [self._leader(), self._named("worker")[0].name]

    def damage(self) -> str:
        return "nobody gives out timestamps"

    def recovery(self, seconds: float) -> str:
        left = [one.name for one in self._named("worker") if one.exit_code is None]
        return f"{self._leader()} leads after {seconds:.1f} s; {', '.join(left)} runs all observers"

    def comeback(self) -> str:
        return "the oracle stands by, and the worker takes its share of the work"
