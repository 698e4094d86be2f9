"""A cluster that keeps everything in the simulated row store: the real masters and oracles.

There is no disk. Who leads is decided by rows, and so are the oracle's mark, the catalogue and its
epoch. A process that finds the store silent when it starts ends, and is started again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from percolator.errors import PercolatorError, Retry, StoreFault, StoreUnusable
from percolator.rowstore.times import Times
from percolator.services.chassis import cluster_store
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.services.chassis.coordinator import CoordinatorTimes
from percolator.services.chassis.row_coordinator import Records
from percolator.services.master.cluster_map import Catalogue
from percolator.services.master.map_store import KEY, decoded_catalogue
from percolator.services.master.master import ROLE as MASTER_ROLE
from percolator.services.master.service import MasterSettings, master_service
from percolator.services.oracle.oracle import ROLE as ORACLE_ROLE
from percolator.services.oracle.service import OracleSettings, oracle_service
from percolator.v1 import cluster_pb2
from percolator.wire.cluster import describe
from percolator.world import World
from tests.doubles.memory_disk import MemoryDisk
from tests.simulation.disks import SimulatedFiles
from tests.simulation.process import Incarnation
from tests.simulation.programs import POLL_SECONDS, failure, host_for, register
from tests.simulation.rows import PLACE, RowStoreProgram

MASTERS_REPLACED = "master replaced on a row store"
ORACLES_REPLACED = "oracle replaced on a row store"
_SILENCE_SECONDS = 1.0
"""Soon, so that a run sees many leaders: even a busy one is replaced now and then."""
_COLLECTION_SECONDS = 0.7
_DESCRIBE_SECONDS = 0.5
_AGAIN_SECONDS = 0.2
_TIMES = CoordinatorTimes()


class RowCluster:
    """Its programs, and what they have recorded."""

    def __init__(
        self, store: RowStoreProgram, masters: Sequence[str], struck: Counter[str]
    ) -> None:
        self._store = store
        self._masters = tuple(masters)
        self._struck = struck

    async def master(self, incarnation: Incarnation) -> None:
        """The program of a master: one leads, the others wait."""
        incarnation.wire.wake(incarnation.address)  # it asks the store before it listens
        settings = MasterSettings(
            store=str(PLACE),
            server_silence_seconds=5.0,
            collection_seconds=_COLLECTION_SECONDS,
            retention_seconds=1.5,
            retention_min_seconds=1.0,
            leader_silence_seconds=_SILENCE_SECONDS,
        )
        kind = cluster_pb2.SERVICE_KIND_MASTER
        host = host_for(incarnation, self._no_files(incarnation), settings, kind, "")
        store = _opened(incarnation)
        async with (
            _needing_the_store(),
            master_service(host, store, poll_seconds=POLL_SECONDS) as exposed,
        ):
            incarnation.listen(exposed)
            await host.failed.wait()
        raise failure(host, incarnation)

    async def oracle(self, incarnation: Incarnation) -> None:
        """The program of an oracle."""
        incarnation.wire.wake(incarnation.address)
        settings = OracleSettings(
            store=str(PLACE),
            standby=True,
            masters=self._masters,
            leader_silence_seconds=_SILENCE_SECONDS,
        )
        kind = cluster_pb2.SERVICE_KIND_ORACLE
        cluster_id = await self._cluster_id(incarnation.world)
        host = host_for(incarnation, self._no_files(incarnation), settings, kind, cluster_id)
        store = _opened(incarnation)
        async with _needing_the_store():
            await store.refuse_other_cluster(cluster_id)
            async with oracle_service(host, store, poll_seconds=POLL_SECONDS) as exposed:
                incarnation.listen(exposed)
                host.background(
                    "register", register(incarnation, self._masters, host.announced, forever=True)
                )
                await host.failed.wait()
        raise failure(host, incarnation)

    async def _cluster_id(self, world: World) -> str:
        """As a service learns it before it does anything else."""
        while True:
            seconds = _DESCRIBE_SECONDS * len(self._masters)
            try:
                return (await describe(world.network, self._masters, seconds)).cluster_id
            except PercolatorError:
                await asyncio.sleep(_AGAIN_SECONDS)

    def _no_files(self, incarnation: Incarnation) -> SimulatedFiles:
        """An empty disk, which no strike hits: these services write nothing to it."""
        answers = asyncio.Event()
        answers.set()
        return SimulatedFiles(
            incarnation.wire.loop,
            MemoryDisk(),
            incarnation.world.random,
            self._struck,
            0.0,
            answers,
        )

    # ------------------------------------------------------------------ looks from outside

    async def learn_times(self, world: World) -> None:
        """What times are counted from, which the first master has written. Waits for it."""
        while True:
            found = await cluster_store.read(Records(self._seen(world).store, world), str(PLACE))
            if found is not None:
                self._store.times = Times(found.epoch_milliseconds)
                return
            await asyncio.sleep(_AGAIN_SECONDS)

    async def catalogue(self, world: World) -> Catalogue:
        """As the last leader has recorded it."""
        recorded = self._seen(world).coordinator(_TIMES)
        return decoded_catalogue(await recorded.read(MASTER_ROLE, KEY))

    async def count_leaders(self, world: World) -> None:
        """Counts how often another leader took over."""
        recorded = self._seen(world).coordinator(_TIMES)
        for role, name in ((MASTER_ROLE, MASTERS_REPLACED), (ORACLE_ROLE, ORACLES_REPLACED)):
            leader = await recorded.leader(role)
            self._struck[name] += 0 if leader is None else leader.epoch - 1

    def _seen(self, world: World) -> RowClusterStore:
        return RowClusterStore(self._store.directly(), PLACE, world)


def _opened(incarnation: Incarnation) -> RowClusterStore:
    return RowClusterStore(incarnation.world.network, PLACE, incarnation.world)


@asynccontextmanager
async def _needing_the_store() -> AsyncIterator[None]:
    """A store that does not answer when a process starts ends the process."""
    try:
        yield
    except PercolatorError as error:
        if error.retry is Retry.USELESS:
            raise
        raise StoreUnusable(str(error), fault=StoreFault.INPUT_OUTPUT) from error
