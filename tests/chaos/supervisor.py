"""The only client that is never hurt: it loads data, measures outages, and judges at the end.

What it does is part of the history like everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from percolator import aio
from percolator.errors import TabletLocation
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import describe
from percolator.wire.credentials import client_credentials
from percolator.wire.through import routed_world
from percolator.world import MachineClock, Network, Random, World, machine_random
from tests.chaos.client import chronicle_of
from tests.chaos.clients import Clients
from tests.chaos.pulse import RECOVERY_SECONDS_MAX, NoRecovery
from tests.isolation.checker import check, settled
from tests.isolation.history import History, HistoryFile, write_history
from tests.isolation.store_audit import Audit, StoredTable, audit
from tests.isolation.stored_cells import stored_tables
from tests.simulation.recorded_tx import Body, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.catalogue import WORKLOADS
from tests.simulation.workloads.workload import Ending, Rows

_RETRY_SECONDS = 0.01
_LAST_WORDS = ("InvariantViolation", "never retrieved", "Fatal Python error")


class Watched(Protocol):
    """A cluster of processes or of containers."""

    @property
    def address(self) -> str:
        """The address for clients."""

    def logs(self) -> dict[str, str]:
        """The logs of its programs, by name."""


class Supervisor:
    """The supervisor of one run of one workload on one cluster."""

    def __init__(self, cluster: Watched, workload: str, history: HistoryFile, world: World) -> None:
        self._cluster = cluster
        self.workload = WORKLOADS[workload]()
        self._world = world
        self._chronicle = chronicle_of(history)
        self._database: aio.Database | None = None
        self._sessions = 0

    @property
    def network(self) -> Network:
        return self._world.network

    @property
    def database(self) -> aio.Database:
        if self._database is None:
            raise NoRecovery("not connected")
        return self._database

    async def load(self) -> None:
        """Loads the initial rows into a healthy cluster."""
        self._database = await aio.connect(self._cluster.address, description="supervisor")
        for cells in self.workload.tables:
            await self.database.create_table(cells.table, cells.splits)
        session = Session(self._chronicle, "loader", 1, self.database, Random("loader"))
        await self.workload.load(session)

    # ------------------------------------------------------------------ recovery

    async def recovered(self, database: aio.Database | None = None) -> None:
        """Returns when everything can be read, written in every tablet, and a master answers.

        Another database than the supervisor's own shows that its way to the cluster works.
        """
        name = "probe" if database is None else "probe of another"

        async def touch_everything(tx: RecordedTx) -> None:
            for cells in self.workload.tables:
                await tx.scan(cells.table)
            for cells in self.workload.tables:
                for row in (b"\0", *cells.splits):
                    # Separate rows: a probe never waits for the workload or for another probe.
                    await tx.lock(row + b"\0" + name.encode(), cells.column())

        await self._until_it_commits(name, touch_everything, database)
        await (database or self.database).tables(timeout=RECOVERY_SECONDS_MAX)

    async def _until_it_commits(
        self, name: str, body: Body, database: aio.Database | None = None
    ) -> None:
        began = time.monotonic()
        self._sessions += 1
        database = database or self.database
        session = Session(self._chronicle, name, self._sessions, database, Random(began))
        while not await session.run(body):
            if time.monotonic() - began > RECOVERY_SECONDS_MAX:
                raise NoRecovery(f"nothing has worked for {RECOVERY_SECONDS_MAX:g} s")
            await asyncio.sleep(_RETRY_SECONDS)

    async def owner_of_most(self, addresses: Iterable[str]) -> str:
        """The server that serves the most tablets."""
        owners = Counter(one.address for one in await self.tablets())
        return max(addresses, key=lambda address: owners[address])

    async def tablets(self) -> list[TabletLocation]:
        """The locations of all tablets, as far as the master knows."""
        deadline = self._world.clock.monotonic_seconds() + RECOVERY_SECONDS_MAX
        catalog = self.database._engine.catalog
        found: list[TabletLocation] = []
        for cells in self.workload.tables:
            info = await catalog.table(cells.name, deadline)
            found += await catalog.all_tablets(info.table_id, deadline)
        return found

    # ------------------------------------------------------------------ the end

    async def judge(self, clients: Clients) -> Verdict:
        """Judges the run after all clients have stopped, on a healthy cluster."""
        rows: dict[str, Rows] = {}

        async def read_everything(tx: RecordedTx) -> None:
            for cells in self.workload.tables:
                rows[cells.name] = await tx.scan(cells.table)

        until = time.monotonic() + RECOVERY_SECONDS_MAX
        while True:
            # Reading resolves the locks that are left, so it comes before checking what is stored.
            await self._until_it_commits("last reading", read_everything)
            history, found = await self._audited(clients)
            if not found.stored.locks or time.monotonic() > until:
                break
            # A client that was killed counts as alive until its session is over. Readers pass its
            # locks until then.
            await asyncio.sleep(_RETRY_SECONDS)
        await self.database.close()
        return Verdict(history, list(self._wrong(found, rows, history, clients)))

    async def _audited(self, clients: Clients) -> tuple[History, Audit]:
        """History of all clients, and the audit of the store."""
        stored = await self._stored()
        timestamp = await self.database.timestamp()
        history = clients.history().merged_with([self._chronicle.recorder.history])
        return history, audit(
            stored, history=history, history_is_complete=True, timestamp_max=timestamp
        )

    async def _stored(self) -> list[StoredTable]:
        deadline = self._world.clock.monotonic_seconds() + RECOVERY_SECONDS_MAX
        names = [cells.name for cells in self.workload.tables]
        catalog = self.database._engine.catalog
        return await stored_tables(self._world.network, catalog, names, deadline)

    def _wrong(
        self, found: Audit, rows: dict[str, Rows], history: History, clients: Clients
    ) -> Iterator[str]:
        if not found.report:
            yield str(found.report)
        report = check(history, resolve=found.stored.commit_timestamp)
        if not report:
            yield str(report)
        for key in found.stored.locks:
            yield f"{key} is still locked, after it was read"
        final = settled(history, found.stored.commit_timestamp)
        committed = {(one.session, one.number): one.committed for one in final}
        for transaction, said in clients.claims().items():
            if committed[transaction] is not said:
                yield f"{transaction} was said to be committed: {said}, which is false"
        yield from self.workload.check(Ending(rows, final))
        yield from self._chronicle.broken
        for name, log in (clients.logs() | self._cluster.logs()).items():
            yield from (f"{name}: {line}" for line in log.splitlines() if _is_last_word(line))


def _is_last_word(line: str) -> bool:
    return any(words in line for words in _LAST_WORDS)


class Verdict:
    """The result of a run."""

    def __init__(self, history: History, problems: list[str]) -> None:
        self.history = history
        self.problems = problems

    @property
    def committed(self) -> int:
        return sum(record.committed and bool(record.writes()) for record in self.history)

    @property
    def unknown(self) -> int:
        """The transactions whose outcome only the store knows: no client was told."""
        return sum(
            record.outcome.value == "unknown" and bool(record.writes()) for record in self.history
        )

    def require_clean(self, directory: Path) -> None:
        """Raises if there were problems, and leaves the history so that they can be examined."""
        if self.problems:
            path = directory / "failed.history"
            write_history(self.history, path)
            raise AssertionError(f"history: {path}\n" + "\n".join(self.problems))


@asynccontextmanager
async def supervising(
    cluster: Watched, workload: str, directory: Path
) -> AsyncIterator[Supervisor]:
    network = GrpcNetwork(client_credentials())
    world = World(MachineClock(), network, machine_random())
    addresses = cluster.address.split(",")
    described = await describe(network, addresses, RECOVERY_SECONDS_MAX)
    with HistoryFile(directory / "supervisor.history") as history:
        supervisor = Supervisor(
            cluster, workload, history, routed_world(world, addresses, described)
        )
        await supervisor.load()
        try:
            yield supervisor
        finally:
            await supervisor.database.close()
            await network.close()
