"""Runs one seed, from the first start of its cluster to the verdict.

    load -> trouble, while clients work -> heal and come to rest -> last reading -> verdict

The verdict covers unexpected events anywhere; the promises of the workload; the checker on the
whole history, including the last reading; the audit of what is stored; and what the library said
about transactions whose outcome was unknown.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import structlog

from percolator.aio import Database
from percolator.aio.observing import worker_context
from percolator.aio.shared import shared_table
from percolator.errors import InvariantViolation, PercolatorError
from percolator.observers.dead_letters import DEAD_LETTERS, dead_letters_table
from percolator.observers.quiet import wait_until_quiet
from percolator.observers.registration import register
from percolator.schema import SHARED_NAME, Table
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import master_pb2
from percolator.v1.cells_pb2 import SPACE_WRITE
from percolator.wire import methods
from percolator.world import Random, World
from tests.isolation.checker import check, settled
from tests.isolation.history import Found, History, Scan
from tests.isolation.store_audit import StoredTable, audit, stored_tables
from tests.simulation.cluster import Cluster
from tests.simulation.disruptions import Disruptions
from tests.simulation.loop import SimulationLoop, run_simulation
from tests.simulation.rows import COLLECTED_FROM_ROWS
from tests.simulation.scenario import Scenario
from tests.simulation.sessions import (
    NAME,
    JoinedScans,
    LateObserver,
    Session,
    left_to_run,
    watched_columns,
)
from tests.simulation.virtual_time import WALL_MILLISECONDS
from tests.simulation.workloads.catalogue import ON_ROWS, UNDRAWN, WITH_MASTER, WORKLOADS
from tests.simulation.workloads.workload import Ending, Rows

# The last reading, once everything is at rest: every row in a transaction, every stored cell.

IN_ONE_ROUND = "transaction committed in one round"
LOCK_HELD = "advisory lock held by another worker"
_RETRY_SECONDS = 0.3
_CALL_SECONDS = 5.0
_READINGS_MAX = 20
"""Longer than a message is under way and waits in a tablet. What then still commits is judged."""


class LastReading:
    """The last reading; `read` fills it, in a separate process."""

    def __init__(self, cluster: Cluster, tables: Sequence[Table[bytes]]) -> None:
        self._cluster = cluster
        self._tables = tables
        self._joined = JoinedScans(
            cluster.scenario.joined_share, Random("last joined scans"), cluster.chronicle.occurred
        )
        self.tables: dict[str, Rows] = {}
        self.stored: list[StoredTable] = []
        self.timestamp = 0
        """Newer than everything that is stored."""
        self._read_at = 0
        self.collected_below = 0
        """History may be collected below it."""
        self.catalogue = cluster.placements.loaded.current
        """The tables that bulk loads have created; with real masters on a row store, all."""

    async def read(self, world: World) -> None:
        """Tries until it succeeds. Reads the rows first, which resolves the locks that are left."""
        database = await self._cluster.connected(world)
        for _ in range(_READINGS_MAX):
            await _until_done(lambda: self._read_rows(database))
            await _until_done(lambda: self._read_cells(world, database))
            if not self._has_missed_a_commit():
                break
            await asyncio.sleep(_RETRY_SECONDS)
        self.timestamp = await database.timestamp()
        if self._cluster.row_collector is not None:
            self.collected_below = self._cluster.row_collector.decided.transactions
        if self._cluster.scenario.with_master:
            await _until_done(lambda: self._ask_the_master(world))
        if self._cluster.row_cluster is not None:
            self.catalogue = await self._cluster.row_cluster.catalogue(world)
            await self._cluster.row_cluster.count_leaders(world)
        if self._cluster.bucket is not None:
            await self._cluster.bucket.count(world, self._cluster.occurred)
        await database.close()

    def _has_missed_a_commit(self) -> bool:
        """True if cells show a commit that the rows do not: a commit without a response to its
        client may still arrive between the two readings, on a slow link."""
        return any(
            cell.space == SPACE_WRITE and cell.timestamp > self._read_at
            for table in self.stored
            for cell in table.cells
        )

    async def _read_rows(self, database: Database) -> bool:
        recorded = self._cluster.chronicle.recorder.begin("auditor")
        try:
            async with database.snapshot() as snapshot:
                self._read_at = await snapshot.timestamp()
                recorded.began(self._read_at)
                for table in self._tables:
                    rows = {row.key: row.raw() async for row in snapshot.scan(table)}
                    self.tables[table.name] = rows
                    found = tuple(
                        Found(row, *cell)
                        for row, cells in rows.items()
                        for cell in sorted(cells.items())
                    )
                    recorded.scan(Scan(table.name, b"", b"", found))
                    if self._joined.is_due():
                        recorded.scan(await self._joined.scan(snapshot, table))
        except PercolatorError:
            recorded.aborted()
            return False
        recorded.committed()
        return True

    async def _read_cells(self, world: World, database: Database) -> bool:
        deadline = world.clock.monotonic_seconds() + _CALL_SECONDS
        names = [table.name for table in self._tables]
        store = self._cluster.row_store
        if store is not None:
            try:
                tables = await database._engine.catalog.tables(deadline)
            except PercolatorError:
                return False
            placed = {one.name: one.table_id for one in tables}
            self.stored = [await store.stored(placed[name], name) for name in names]
            return True
        try:
            catalog = database._engine.catalog
            self.stored = await stored_tables(world.network, catalog, names, deadline)
        except PercolatorError:
            return False
        return True

    async def _ask_the_master(self, world: World) -> bool:
        for master in self._cluster.masters:
            try:
                answer = await world.network.unary(master, methods.DESCRIBE_COLLECTION)(
                    master_pb2.DescribeCollectionRequest(), _CALL_SECONDS
                )
            except PercolatorError:
                continue
            self.collected_below = answer.transactions_safe_point
            return True
        return False


async def _until_done(attempt: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await attempt():
            return
        await asyncio.sleep(_RETRY_SECONDS)


_REST_SECONDS = 90.0
"""Longer than any time-out of a client: a client that still waits then will wait forever."""
_WORK_SECONDS = 40.0
_LATE_SECONDS = 1.0
_POLL_SECONDS = 0.1
_LONG_RETENTION = timedelta(hours=1)
_LEAD_SECONDS_MAX = 3_600.0
"""Far above the sum of all small clock jumps of a run, and below the smallest large one."""


@dataclass
class Verdict:
    """The result of one seed."""

    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    occurred: Counter[str] = field(default_factory=Counter)
    transactions: int = 0
    committed: int = 0
    messages: int = 0
    virtual_seconds: float = 0.0
    history: History = field(default_factory=History)

    @property
    def failed(self) -> bool:
        return bool(self.problems)


def simulate(scenario: Scenario) -> Verdict:
    """Runs a scenario, the same way every time."""
    verdict = Verdict(scenario)
    with _listening_to_logs(verdict), _without_collector():
        try:
            run_simulation(lambda loop: _Run(loop, verdict).run())
        except (PercolatorError, RuntimeError) as error:
            verdict.problems.append(f"the run ended with {error!r}")
    return verdict


class _Run:
    """One scenario on its loop."""

    def __init__(self, loop: SimulationLoop, verdict: Verdict) -> None:
        self._loop = loop
        self._verdict = verdict
        name = verdict.scenario.workload
        make = UNDRAWN.get(name) or WORKLOADS[name]
        if verdict.scenario.on_rows:
            make = ON_ROWS.get(name, make)
        elif verdict.scenario.with_master:
            make = WITH_MASTER.get(name, make)
        self._workload = make()
        self._cluster = Cluster(loop, verdict.scenario, self._workload)
        self._late = (
            LateObserver(self._workload.observers)
            if self._workload.observers
            and (verdict.scenario.with_master or verdict.scenario.on_rows)
            else None
        )
        self._observers_rest = False
        """True once a client has waited until the observers had nothing left to do."""

    async def run(self) -> None:
        cluster, verdict = self._cluster, self._verdict
        self._loop.set_exception_handler(self._unhandled)
        await cluster.start_servers()
        supervising = asyncio.create_task(cluster.supervise())
        try:
            async with asyncio.timeout(_REST_SECONDS):
                await self._load()
            await self._trouble()
            await self._rest()
            async with asyncio.timeout(_REST_SECONDS):
                await self._judge()
        except TimeoutError:
            verdict.problems.append("a cluster in good order does not answer")
        if supervising.done():
            supervising.result()  # it never returns by itself: this raises the error that ended it
        supervising.cancel()
        verdict.problems.extend(cluster.exits())
        verdict.problems.extend(f"unexpected: {error!r}" for error in cluster.wire.unexpected)
        verdict.problems.extend(cluster.chronicle.broken)
        verdict.occurred = cluster.occurred + Counter(
            {fault.value: count for fault, count in cluster.wire.counts.items()}
        )
        verdict.occurred += cluster.chronicle.occurred
        verdict.occurred[IN_ONE_ROUND] = cluster.chronicle.committed_in_one_round
        verdict.occurred[LOCK_HELD] = sum(one.contended for one in cluster.root.lock_counts)
        if cluster.row_store is not None:
            verdict.occurred[COLLECTED_FROM_ROWS] = len(cluster.root.collected)
        verdict.messages = cluster.wire.messages
        verdict.virtual_seconds = self._loop.time()
        verdict.history = cluster.chronicle.recorder.history
        await cluster.shut_down()

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._verdict.problems.append(f"not handled: {context}")

    async def _load(self) -> None:
        """Loads the initial rows on a healthy cluster. They are part of the history."""

        async def load(world: World) -> None:
            chronicle = self._cluster.chronicle
            chronicle.left["loader"] = 1_000
            database = await self._cluster.connected(world)
            if self._verdict.scenario.with_master:
                await self._create_tables(database)
                if self._workload.observers and not self._workload.registers_late:
                    await register(worker_context(database._engine), self._workload.observers)
            session = Session(chronicle, "loader", 1, database, Random("loader"))
            await self._workload.load(session)
            await database.close()

        await self._cluster.visit("loader:1", load)

    async def _create_tables(self, database: Database) -> None:
        """In every other run with locks, an empty table keeps less history than the others. Then
        what tells only of ended transactions is collected, and the history around it stays."""
        keeps_more = self._workload.locks and self._verdict.scenario.seed % 2 == 1
        retention = _LONG_RETENTION if keeps_more else None
        await self._workload.create(database)
        for cells in self._workload.tables:
            if cells.name in self._workload.created_late:
                continue
            if cells.name == DEAD_LETTERS.name:
                # As the first worker does: no program creates an internal table.
                await dead_letters_table(worker_context(database.internal.engine))
                continue
            if cells.name == SHARED_NAME:
                engine = database.internal.engine
                await shared_table(engine, engine.now() + 30.0)
                continue
            ttl = {
                cells.column(name.decode()): timedelta(milliseconds=milliseconds)
                for name, milliseconds in self._workload.ttls.items()
            }
            await database.create_table(
                cells.table, cells.splits, retention=retention, ttl=ttl, timeout=30.0
            )
        if keeps_more:
            await database.create_table(Table("keeps-less"), timeout=30.0)

    async def _trouble(self) -> None:
        cluster = self._cluster
        cluster.wire.faults = cluster.scenario.network
        if cluster.bucket is not None:
            cluster.bucket.misbehave(cluster.scenario.bucket_badness)
        await cluster.start_workers()
        await cluster.start_clients()
        registering = asyncio.create_task(self._register_late())
        until = self._loop.time() + _WORK_SECONDS
        await Disruptions(cluster).run()
        await self._clients_done(until)
        cluster.chronicle.stopped = True
        cluster.heal()
        # If it takes longer, the verdict will show it; if it fails, so does the run.
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST_SECONDS):
                await registering

    async def _register_late(self) -> None:
        if self._late is None:
            return
        late = self._late

        async def register(world: World) -> None:
            database = await self._cluster.connected(world)
            await world.clock.sleep(_LATE_SECONDS)
            await late.register(world, database)
            await database.close()

        await self._cluster.visit("registrar:1", register)

    async def _rest(self) -> None:
        """Waits until everything under way has ended by itself."""
        if not await self._clients_done(self._loop.time() + _REST_SECONDS):
            self._verdict.problems.append("clients do not come to rest on a healed cluster")
        if self._workload.leaves_behind:
            try:
                async with asyncio.timeout(_REST_SECONDS):
                    await self._cluster.visit("rester:1", self._rest_workload)
            except TimeoutError:
                self._verdict.problems.append("what clients left behind cannot be ended")
        observers = self._workload.observers
        if observers:

            async def wait(world: World) -> None:
                database = await self._cluster.connected(world)
                await wait_until_quiet(worker_context(database.internal.engine))
                await database.close()
                self._observers_rest = True

            try:
                async with asyncio.timeout(_REST_SECONDS):
                    await self._cluster.visit("waiter:1", wait)
            except TimeoutError:
                self._verdict.problems.append("observers do not come to rest on a healed cluster")
            self._cluster.stop_workers()

    async def _rest_workload(self, world: World) -> None:
        self._cluster.chronicle.left["rester"] = 1_000
        database = await self._cluster.connected(world)
        session = Session(self._cluster.chronicle, "rester", 1, database, Random("rester"))
        await self._workload.rest(session)
        await database.close()

    async def _clients_done(self, until: float) -> bool:
        while self._loop.time() < until:
            if self._cluster.clients_done:
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _judge(self) -> None:
        cluster = self._cluster
        reading = LastReading(cluster, [cells.table for cells in self._workload.tables])
        await cluster.visit("auditor:1", reading.read)
        self._verdict.problems.extend(self._wrong(reading))

    def _runaway(self, reading: LastReading) -> Iterator[str]:
        """Checks that timestamps are not ahead of what most clocks have shown."""
        right_milliseconds = WALL_MILLISECONDS + self._loop.time() * 1000
        lead_seconds = (reading.timestamp >> SEQUENCE_BITS) / 1000 - right_milliseconds / 1000
        if self._verdict.scenario.with_master and lead_seconds > _LEAD_SECONDS_MAX:
            yield f"timestamps have run away: they are {lead_seconds:,.0f} s ahead of most clocks"

    def _wrong(self, reading: LastReading) -> Iterator[str]:
        yield from self._runaway(reading)
        history = self._cluster.chronicle.recorder.history
        history.ttls = {
            (cells.name, column): ttl
            for cells in self._workload.tables
            for column, ttl in self._workload.ttls.items()
        }
        watched = watched_columns(self._workload.observers)
        found = audit(
            reading.stored,
            history=history,
            history_is_complete=True,
            observers=watched,
            timestamp_max=reading.timestamp,
            collected_below=reading.collected_below,
            collected=self._cluster.root.collected,
            parts=self._cluster.chronicle.parts,
            left_out=[one.table_id for one in reading.catalogue.tables.values() if one.deleting],
        )
        yield from map(str, found.report.violations)
        left = left_to_run(
            found.stored.notifications,
            history,
            watched,
            found.stored.commits,
            on_rows=self._verdict.scenario.on_rows,
        ) - {NAME}
        if self._observers_rest and left:
            yield f"waiting for observers has overlooked work of {sorted(left)}"
        if self._late is not None:
            yield from self._late.missed(found.stored)
        report = check(history, resolve=found.stored.commit_timestamp, observers=watched)
        yield from map(str, report.violations)
        final = settled(history, found.stored.commit_timestamp)
        self._verdict.transactions = len(final)
        self._verdict.committed = sum(record.committed for record in final)
        for claim in self._cluster.chronicle.claims:
            committed = found.stored.commit_timestamp(claim.record) is not None
            if committed is not claim.committed:
                yield (
                    f"{claim.record} was said to be {_called(claim.committed)}, "
                    f"and is {_called(committed)}"
                )
        yield from self._workload.check(Ending(reading.tables, final))
        for table in reading.catalogue.tables.values():
            if table.is_hidden and not table.deleting:
                yield f"nobody ends the load of {table.name}"


def _called(committed: bool) -> str:
    return "committed" if committed else "aborted"


class _Log(logging.Handler):
    """Collects invariants that the library found broken in the background."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(logging.WARNING)
        self._verdict = verdict

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        broken = any(isinstance(argument, InvariantViolation) for argument in arguments)
        if broken or record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else ""
            self._verdict.problems.append(f"logged: {record.getMessage()} {error!r}")


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disables the garbage collector: it would take a tenth of a run, which leaves little garbage.

    It does not collect at the end either, which would take another twentieth: a campaign ends its
    processes instead, and in any other process the collector runs by itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _listening_to_logs(verdict: Verdict) -> Iterator[None]:
    """Drops what services log, and examines what the library logs."""
    former = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    library = logging.getLogger("percolator")
    handler, propagated = _Log(verdict), library.propagate
    library.addHandler(handler)
    library.propagate = False
    try:
        yield
    finally:
        library.removeHandler(handler)
        library.propagate = propagated
        structlog.configure(**former)
