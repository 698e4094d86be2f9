"""The only client that is never hurt: it loads data, measures outages, and judges at the end.

What it does is part of the history like everything else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from percolator import aio
from percolator.errors import NotReady, PercolatorError, TabletLocation
from percolator.v1 import master_pb2, oracle_pb2
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import describe
from percolator.wire.credentials import client_credentials
from percolator.wire.through import routed_world
from percolator.world import MachineClock, Network, Random, World, machine_random
from tests.chaos.client import chronicle_of
from tests.chaos.clients import Clients
from tests.isolation.checker import check, settled
from tests.isolation.history import History, HistoryFile, write_history
from tests.isolation.store_audit import Audit, StoredTable, audit, stored_tables
from tests.simulation.sessions import Body, RecordedTx, Session
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
        while True:
            try:
                return await stored_tables(self._world.network, catalog, names, deadline)
            except NotReady:
                # The master still balances servers that came back: the new owner of a tablet says
                # so while it opens it.
                if self._world.clock.monotonic_seconds() > deadline:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)

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


# Tells when everything works: probes that never stop, each of another way to use the cluster.
#
# After a fault, everything works again once each probe has succeeded that began after the fault.
# All faults share the probes, so that many faults at once do not mean many probes.

_PAUSE_SECONDS = 0.05


class NoRecovery(Exception):
    """The cluster does not recover."""


class Pulse:
    """Runs the probes. `run` belongs in a task of its own."""

    def __init__(self, probes: Mapping[str, Callable[[], Awaitable[None]]], limit: float) -> None:
        self._probes = probes
        self._limit = limit
        self._began = dict.fromkeys(probes, -math.inf)
        """When the last successful attempt of each probe began."""
        self._beat = asyncio.Event()

    async def run(self) -> None:
        """Returns never: cancel it."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._probes:
                tasks.create_task(self._repeat(name))

    async def _repeat(self, name: str) -> None:
        while True:
            began = now()
            try:
                async with asyncio.timeout(self._limit):
                    await self._probes[name]()
            except TimeoutError:
                late = {one: round(began - at, 1) for one, at in self._began.items()}
                raise NoRecovery(
                    f"{name}: nothing has worked for {self._limit:g} s; before that, the last "
                    f"success of each probe had begun so many seconds ago: {late}"
                ) from None
            self._began[name] = began
            self._beat.set()
            self._beat = asyncio.Event()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def works_since(self, instant: float) -> float:
        """Returns when all probes have succeeded since then, and how many seconds that took."""
        while missing := [name for name, began in self._began.items() if began < instant]:
            try:
                async with asyncio.timeout_at(instant + self._limit):
                    await self._beat.wait()
            except TimeoutError:
                raise NoRecovery(f"{', '.join(missing)}: not for {self._limit:g} s") from None
        return now() - instant


def now() -> float:
    """The time of the event loop, which on a real machine is the monotonic clock."""
    return asyncio.get_running_loop().time()


# Finds the process that leads, among those of one kind.

RECOVERY_SECONDS_MAX = float(os.environ.get("CHAOS_RECOVERY_SECONDS", "30"))
_ASK_SECONDS = 1.0


async def leader(network: Network, kind: str, addresses: Sequence[str]) -> str:
    """The one of them that answers a call that only a leader, or the active oracle, answers."""
    deadline = time.monotonic() + RECOVERY_SECONDS_MAX
    for address in itertools.cycle(addresses):
        try:
            if kind == "oracle":
                request = oracle_pb2.GetTimestampsRequest(count=1)
                await network.unary(address, methods.GET_TIMESTAMPS)(request, _ASK_SECONDS)
            else:
                servers = master_pb2.ListServersRequest()
                await network.unary(address, methods.LIST_SERVERS)(servers, _ASK_SECONDS)
        except PercolatorError as error:
            if time.monotonic() > deadline:
                raise NoRecovery(f"no {kind} leads; {address}: {error}") from error
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return address
    raise NoRecovery("there is no process that could lead")


# How soon everything works again, by kind of fault and by how many others occur meanwhile.
#
#     make recovery       # after `make chaos`, on the reference machine
#
# Each run of `make chaos` leaves its figures in var/chaos. `make recovery` moves them into
# recovery.json in this folder, prints the table, and puts it into docs/operating.md. A test
# compares the two, so the document never shows what was not measured.

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "var" / "chaos"
"""Where a run leaves its figures; git does not look there."""
RECORDED = Path(__file__).parent / "recovery.json"
DOCUMENT = ROOT / "docs" / "operating.md"
_PLACE = re.compile(r"(?<=<!-- recovery -->\n).*?(?=<!-- end of recovery -->)", re.DOTALL)
_COLUMNS = (("alone", 0, 0), ("with 1 or 2 others", 1, 2), ("with 3 or more", 3, 1_000))


@dataclass(frozen=True)
class Injection:
    """One fault. Instants are seconds since the run began."""

    kind: str
    began: float
    ended: float
    """When it was repaired, and everything worked again."""
    seconds: float
    """How long it took until everything worked again."""


@dataclass(frozen=True)
class Figure:
    """One fault, as it counts in the table."""

    kind: str
    beside: int
    """How many other faults were in effect at some time while it was."""
    seconds: float


def figures(injected: Sequence[Injection]) -> list[Figure]:
    return [
        Figure(
            one.kind,
            sum(
                other.began < one.ended and one.began < other.ended
                for other in injected
                if other is not one
            ),
            round(one.seconds, 2),
        )
        for one in injected
    ]


def write_run(name: str, injected: Sequence[Injection], directory: Path = RUNS) -> Path:
    """Leaves the figures of a run where `make recovery` finds them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps([asdict(one) for one in figures(injected)], indent=1) + "\n")
    return path


def record_of(path: Path = RECORDED) -> list[Figure]:
    """Figures recorded in a file, or not yet recorded."""
    return [Figure(**one) for one in json.loads(path.read_text())] if path.exists() else []


def record(runs: Path = RUNS, recorded: Path = RECORDED) -> list[Figure]:
    """Replaces what is recorded by the waiting runs, if there are any. Returns what is recorded."""
    waiting = sorted(runs.glob("*.json"))
    if waiting:
        found = [figure for path in waiting for figure in record_of(path)]
        found.sort(key=lambda one: (one.kind, one.beside, one.seconds))
        lines = ",\n".join(json.dumps(asdict(one)) for one in found)
        recorded.write_text(f"[\n{lines}\n]\n")
        for path in waiting:
            path.unlink()
    return record_of(recorded)


def table(found: Iterable[Figure]) -> str:
    """Rows of the kinds; in each cell, the median and the worst time in seconds."""
    cells: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        for column, least, most in _COLUMNS:
            if least <= one.beside <= most:
                cells[one.kind][column].append(one.seconds)
    names = [column for column, _, _ in _COLUMNS]
    lines = [f"| fault | times | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for kind in sorted(cells):
        times = sum(map(len, cells[kind].values()))
        shown = [_median_and_worst(cells[kind][name]) for name in names]
        lines.append(f"| {kind} | {times} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _median_and_worst(seconds: list[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""


def shown(document: Path = DOCUMENT) -> str:
    """The table in the document."""
    found = _PLACE.search(document.read_text())
    return found[0] if found else ""


def main() -> None:
    made = table(record())
    print(made, end="")
    DOCUMENT.write_text(_PLACE.sub(lambda _: made, DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
