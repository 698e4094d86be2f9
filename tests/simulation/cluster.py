"""A whole cluster in one process, on virtual time, from one seed.

A supervisor restarts processes after a while, as in any deployment. Events that must never happen
(a program that fails by itself, a handler that raises what no handler may, a background task that
finds an invariant broken) are collected in `unexpected`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from math import inf
from typing import Any

from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.errors import StoreUnusable, Unavailable
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.services.chassis import rpc
from percolator.services.chassis.access import OWN, CallerIdentity
from percolator.v1.cluster_pb2 import RowStorePlace
from percolator.wire.roles import Role
from percolator.wire.tokens import Right, Rights
from percolator.world import Random, World
from tests.isolation.history import Recorder
from tests.simulation import sessions
from tests.simulation.bucket import (
    IN_A_BUCKET,
    TABLETS_IN_A_BUCKET,
    BucketOfTablets,
    SimulatedBucket,
)
from tests.simulation.loop import SimulationLoop
from tests.simulation.network import PERFECT, Wire
from tests.simulation.placement import Placements
from tests.simulation.process import Incarnation, Main, SimulatedProcess
from tests.simulation.programs import (
    LOCK_SERVICE,
    MASTER,
    ORACLE,
    STANDBY,
    STANDBY_ORACLE,
    Masters,
    Operator,
    Programs,
    StoreRoot,
)
from tests.simulation.rows import (
    COLLECTOR,
    EPOCH_MILLISECONDS,
    ON_ROWS,
    ROW_STORE,
    WHOLLY_ON_ROWS,
    RowCluster,
    RowCollectorProgram,
    RowStoreProgram,
    rows_over,
)
from tests.simulation.scenario import CLIENTS, Scenario
from tests.simulation.sessions import LIMIT_SECONDS, Chronicle, Session, registered
from tests.simulation.workloads.workload import Workload

_SETTLING_SECONDS = 0.5
_SUPERVISE_SECONDS = 0.25
_CONNECT_SECONDS = 2.0
_AGAIN_SECONDS = 0.2
_THINK_SECONDS_MAX = 0.06
WORKERS = 2
RESTRICTED = "clients with rights to some tables only"


def host_of(address: str) -> str:
    """Processes of one host share its clock."""
    return address.partition(":")[0]


class Cluster:
    """The processes of the cluster, and what clients write down."""

    def __init__(self, loop: SimulationLoop, scenario: Scenario, workload: Workload) -> None:
        self.loop = loop
        self.scenario = scenario
        self._limits = Limits(
            call_seconds=LIMIT_SECONDS,
            silence_seconds=0.4,
            attempt_seconds_max=1.0,
            background_seconds=5.0,
            lock_wait_seconds=1.5,
            lock_ttl_seconds=scenario.lock_ttl_seconds,
            heartbeat_seconds=scenario.lock_ttl_seconds / 3,
            page_rows_max=scenario.page_rows_max,
        )
        self.workload = workload
        self.occurred: Counter[str] = Counter()
        self.wire = Wire(loop, Random(f"network {scenario.seed}"))
        self.wire.on_call = self._called
        self.root = StoreRoot(self.occurred, scenario.fsync_seconds_max)
        self.chronicle = Chronicle(
            Recorder(itertools.count().__next__),
            doubled_share=scenario.doubled_share,
            switches_feeds=scenario.with_master,
            one_round_share=scenario.one_round_share,
            joined_share=scenario.joined_share,
        )
        self.down_until: dict[str, float] = {}
        """The earliest time of a restart, by address."""
        self._programs: dict[str, Main] = {}
        self.processes: dict[str, SimulatedProcess] = {}
        self.row_store = RowStoreProgram(self.root.collected) if scenario.on_rows else None
        self.tablet_servers = [f"tablets-{n}:7003" for n in range(scenario.tablet_servers)]
        """Servers of the cells: the favourite targets of faults."""
        if self.row_store is not None:
            self.tablet_servers = [ROW_STORE]
            self.occurred[ON_ROWS] += 1
        self.clients = [f"client-{n}:1" for n in range(CLIENTS)]
        self._identities: dict[str, CallerIdentity] = {}
        """Identities of clients whose token has rights to some tables only, by address."""
        if scenario.restricted:
            # To all tables of the workload: so they may do everything, but in another way.
            names = [cells.name for cells in workload.tables]
            everything = tuple(map(Right, names))
            rights = Rights(everything, everything, everything)
            self._identities = {
                address: CallerIdentity(Role.CLIENT, (b"", address), RESTRICTED, address, rights)
                for address in self.clients[::2]
            }
            self.occurred[RESTRICTED] += 1
        self.workers = [f"worker-{n}:1" for n in range(WORKERS if workload.observers else 0)]
        self.masters = [MASTER, STANDBY] if scenario.with_master else [MASTER]
        rows = (
            None if self.row_store is None else RowStorePlace(epoch_milliseconds=EPOCH_MILLISECONDS)
        )
        self.bucket: SimulatedBucket | None = None
        roles: SimulatedBucket | None = None
        self.tablets: BucketOfTablets | None = None
        if scenario.roles_in_bucket and scenario.with_master:
            self.bucket = roles = SimulatedBucket(loop, scenario.seed)
            self.occurred[IN_A_BUCKET] += 1
        if scenario.tablets_in_bucket:
            self.bucket = self.bucket or SimulatedBucket(loop, scenario.seed)
            self.tablets = BucketOfTablets(self.bucket, self.occurred, scenario.seed)
            self.occurred[TABLETS_IN_A_BUCKET] += 1
        programs = Programs(self.root, self.masters, rows, roles, self.tablets)
        self.row_cluster: RowCluster | None = None
        if self.row_store is not None and scenario.with_master:
            self.row_cluster = RowCluster(self.row_store, self.masters, self.occurred)
            self.occurred[WHOLLY_ON_ROWS] += 1
        self.placements = Placements(self.tablet_servers)
        self.operator = Operator(
            self.masters, self.tablet_servers, Random(f"operator {scenario.seed}")
        )
        if not scenario.with_master:
            for cells in workload.tables:
                self.placements.add_table(
                    cells.name,
                    cells.splits,
                    [] if workload.registers_late else registered(workload.observers, cells.name),
                    change_feed=workload.change_feed,
                    ttls=workload.ttls,
                )
        self.row_collector: RowCollectorProgram | None = None
        self._add_servers(programs)
        self.servers = list(self.processes)
        for process, skew in zip(
            self.processes.values(), scenario.clock_skews_milliseconds, strict=False
        ):
            process.clock.set_wall_back(skew)

    def _add_servers(self, programs: Programs) -> None:
        """Masters first, as they have to start first."""
        whole = self.row_cluster
        real = Masters(self.root, self.bucket).serve if whole is None else whole.master
        for address in self.masters:
            self._add(address, real if self.scenario.with_master else self.placements.serve)
        oracle = programs.oracle if whole is None else whole.oracle
        self._add(ORACLE, oracle)
        if self.scenario.with_master:
            self._add(STANDBY_ORACLE, oracle)
        self._add(LOCK_SERVICE, programs.lock_service)
        for address in self.tablet_servers:
            store = self.row_store
            self._add(address, programs.tablet_server if store is None else store.serve)
        if self.row_store is not None and whole is None:
            self.row_collector = self._add_row_collector()

    def _add_row_collector(self) -> RowCollectorProgram:
        """In every other run with locks, it collects only what tells of ended transactions."""
        found = RowCollectorProgram(
            self.connected,
            lambda: [table.table_id for table in self.placements.all_tables()],
            keeps_snapshots=self.workload.locks and self.scenario.seed % 2 == 1,
        )
        self._add(COLLECTOR, found.serve)
        return found

    def _add(self, address: str, program: Main) -> SimulatedProcess:
        process = SimulatedProcess(address, self.wire, Random(f"{address} {self.scenario.seed}"))
        for other in self.processes.values():
            if host_of(other.address) == host_of(address):
                process.clock = other.clock
        self.processes[address] = process
        self._programs[address] = program
        return process

    def _called(self, remaining: Callable[[], float], caller: str) -> None:
        """Tells the chassis of a call, in the context of its handler."""
        rpc._remaining.set(remaining)
        rpc._caller.set(self._identities.get(caller, OWN))

    # ------------------------------------------------------------------ processes

    async def start_servers(self) -> None:
        """Starts the masters first: they refuse a root in which other services have written."""
        if self.row_store is not None and self.row_cluster is None:
            await self.row_store.create(INTENTS_TABLE)
            for table in self.placements.tables.values():
                await self.row_store.create(table.table_id)
        for address in self.servers:
            if self.scenario.with_master and address == ORACLE:
                await asyncio.sleep(_SETTLING_SECONDS)
            self.processes[address].start(self._programs[address])

    async def start_clients(self) -> None:
        share = self.scenario.transactions_per_session
        each, working = self.scenario.sessions_per_client, set(self.scenario.sessions)
        for client, address in enumerate(self.clients):
            for number in range(each):
                works = client * each + number in working
                self.chronicle.left[f"{address} {number}"] = share if works else 0
            self._add(address, self._client).start(self._client)

    async def start_workers(self) -> None:
        for address in self.workers:
            self._add(address, self._worker).start(self._worker)

    def stop_workers(self) -> None:
        """Stops them for good: they have nothing left to do."""
        for address in self.workers:
            self.down_until[address] = inf
            self.processes[address].crash()

    async def supervise(self) -> None:
        """Restarts processes that have ended, until cancelled."""
        while True:
            await asyncio.sleep(_SUPERVISE_SECONDS)
            # A copy: while one is started, visitors come and go.
            for address, process in list(self.processes.items()):
                if address not in self.processes or process.alive:
                    continue
                if self.loop.time() < self.down_until.get(address, 0.0):
                    continue
                if address not in self.clients or self._client_has_work(address):
                    await process.restart()

    def _client_has_work(self, address: str) -> bool:
        return not self.chronicle.stopped and any(
            left > 0 for name, left in self.chronicle.left.items() if name.startswith(address)
        )

    @property
    def clients_done(self) -> bool:
        return not any(
            self.processes[address].alive or self._client_has_work(address)
            for address in self.clients
        )

    def heal(self) -> None:
        """Ends all faults: from now on nothing goes wrong."""
        self.wire.faults = PERFECT
        self.wire.watcher = None
        self.wire.links.heal()
        if self.bucket is not None:
            self.bucket.heal()
        self.down_until.clear()
        self.root.answers.set()
        for files in self.root.open_files.values():
            files.is_full = False
            files.answers.set()
            files.fsync_seconds_max = self.scenario.fsync_seconds_max
            files.faults.heal()
        for process in self.processes.values():
            process.resume()

    def exits(self) -> Iterable[str]:
        """Programs that failed by themselves, except because of their disk."""
        for address, process in self.processes.items():
            for error in process.exits:
                if error is not None and not isinstance(error, StoreUnusable):
                    yield f"{address} failed: {error!r}"

    async def shut_down(self) -> None:
        for process in self.processes.values():
            process.crash()
            await process.ended()

    # ------------------------------------------------------------------ clients

    async def _client(self, incarnation: Incarnation) -> None:
        # No process calls a client, but its machine may have lost power, and is back by now.
        incarnation.listen([])
        database = await self.connected(incarnation.world)
        sessions = [
            Session(
                self.chronicle,
                f"{incarnation.address} {number}",
                incarnation.number,
                database,
                Random(f"{incarnation.address} {number} {incarnation.number} {self.scenario.seed}"),
            )
            for number in range(self.scenario.sessions_per_client)
        ]
        await asyncio.gather(*(self._work(session, incarnation.address) for session in sessions))
        await database.close()

    async def _worker(self, incarnation: Incarnation) -> None:
        incarnation.listen([])
        # One worker's observers commit in one round, as far as they can.
        one_round = self.scenario.one_round_share and incarnation.address == self.workers[0]
        database = await self.connected(incarnation.world, in_one_round=bool(one_round))
        name = incarnation.life.name
        observers = functools.partial(self.workload.observers_of, incarnation.address)
        await sessions.work(database, self.chronicle.recorder, name, observers)

    async def _work(self, session: Session, address: str) -> None:
        while session.goes_on:
            await self.loop.sleep(self._think_seconds(session, address))
            await self.workload.step(session)

    def _think_seconds(self, session: Session, address: str) -> float:
        burst = self.scenario.burst_seconds
        if not burst:
            return session.random.random() * _THINK_SECONDS_MAX
        # One client after another, so that it is not always the same ones that wait for each other.
        phase = self.clients.index(address) / len(self.clients) * burst
        return burst - (self.loop.now - phase) % burst

    async def visit(self, address: str, work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` in a process of the simulation itself. If that is killed, it starts again."""
        done: asyncio.Future[None] = self.loop.create_future()

        async def program(incarnation: Incarnation) -> None:
            # Like a client's, its machine may have lost power, and is back by now.
            incarnation.listen([])
            try:
                await work(incarnation.world)
            except Exception as error:  # noqa: BLE001  # raised again where it is awaited
                done.set_exception(error)
            else:
                done.set_result(None)

        process = self._add(address, program)
        process.start(program)
        try:
            await done
        finally:
            process.crash()
            await process.ended()
            del self.processes[address]

    async def connected(self, world: World, *, in_one_round: bool = True) -> Database:
        """Tries until it succeeds."""
        limits = self._limits if in_one_round else replace(self._limits, one_round_cells_max=0)
        if self.row_cluster is not None:
            await self.row_cluster.learn_times(world)
        store = self.row_store
        while True:
            try:
                database = await connect_to(
                    world,
                    self.masters,
                    limits,
                    RetryPolicy(),
                    timeout_seconds=_CONNECT_SECONDS,
                    rows=None if store is None else rows_over(world.network, store.times),
                )
            except Unavailable:
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return database
