"""Keeps asking the cluster for its state, and fills in a `State`.

    master           where each tablet is, and whether it is served
    oracles          which one leads                           (instead, if there are no tablets)
    workers          how often each observer has run           (their metrics, over HTTP)
    tablet servers   how many notifications are pending        (their metrics, over HTTP)
    serving table    how many pages there are, and how long it took to serve them

While servers are dead, some of these do not answer; then the figures stay as they were, and the
state says so. If a process ends that the story did not kill, the story ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from http.client import HTTPConnection, HTTPException

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from examples.demo.checking import WentWrong
from examples.demo.outages import ANSWER_SECONDS, Outage
from examples.demo.state import Latency, Runs, State
from examples.webindex import tables
from examples.webindex.load import Crawling
from percolator import aio
from percolator.errors import ConflictError, ExecutionUnknown, NotExecuted
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.timestamps import seconds_between

OFTEN_SECONDS = 0.25
SELDOM_SECONDS = 1.0

RUNS = "percolator_observer_"
NOTIFICATIONS = "percolator_tabletserver_tablet_notifications"


class Gauges:
    """The gauges of one cluster."""

    def __init__(
        self, db: aio.Database, cluster: LocalCluster, state: State, outage: Outage
    ) -> None:
        self._db = db
        self._cluster = cluster
        self._state = state
        self._outage = outage
        self._latencies: dict[tuple[bytes, int], float] = {}
        """Seconds, by row of the serving table and its commit timestamp."""
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        """By name and process id: the samples of its last answer."""
        self._since = 0
        """Older versions of the serving table belong to an earlier chapter."""
        self._looked = asyncio.Event()
        self.crawling: Crawling | None = None
        """The loader, while it is loading."""
        self.killed: set[str] = set()
        """Processes that the story killed."""

    async def watch(self) -> None:
        """Runs until it is cancelled. Raises `WentWrong` if a process has died."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self._outage.asked, self._processes, OFTEN_SECONDS))
            group.create_task(self._repeat("metrics", self._metrics, SELDOM_SECONDS))
            group.create_task(self._repeat("serving table", self._served, SELDOM_SECONDS))

    async def begin_latencies(self) -> None:
        """Starts measuring again, with what is served from now on."""
        self._since = await self._db.timestamp()
        self._latencies.clear()

    async def next_look(self) -> None:
        """Returns when the state may have changed."""
        self._looked.clear()
        await self._looked.wait()

    async def _repeat(self, name: str, ask: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            try:
                await ask()
            except (NotExecuted, ExecutionUnknown, ConflictError):
                # Tablets have no server for a while, or a cell is locked for longer than a look
                # lasts: commits are slow on a busy machine. If that lasts, the story times out.
                self._state.silent.add(name)
            else:
                self._state.silent.discard(name)
            self._looked.set()
            await asyncio.sleep(seconds)

    # ------------------------------------------------------------------ processes

    async def _processes(self) -> None:
        self._look_at_processes()
        if self.crawling is not None:
            self._state.written = self.crawling.written
        await self._outage.look()

    def _look_at_processes(self) -> None:
        for process in self._cluster.processes.values():
            code = process.exit_code
            if code is not None and process.name not in self.killed:
                raise WentWrong(f"{process.name} has ended with {code}: {process.last_words()}")

    def _named(self, kind: str) -> list[ServiceProcess]:
        processes = self._cluster.processes.items()
        return [one for name, one in processes if name.partition("-")[0] == kind]

    # ------------------------------------------------------------------ metrics

    async def _metrics(self) -> None:
        workers, servers = self._named("worker"), self._named("tabletserver")
        alive = [one for one in (*workers, *servers) if one.ready and one.exit_code is None]
        self._state.silent -= {
            one.name for one in (*workers, *servers) if one not in alive
        }  # dead processes are expected to be silent
        await asyncio.gather(*(self._scrape(one) for one in alive))
        samples = [
            sample
            for (name, _), found in self._samples.items()
            if name.startswith("worker")
            for sample in found
        ]
        self._state.observers = runs_by_observer(samples)
        self._state.notifications = sum(
            int(sample.value)
            for one in servers
            if one in alive
            for sample in self._samples.get((one.name, one.pid), ())
        )

    async def _scrape(self, process: ServiceProcess) -> None:
        """A process that does not answer, being too busy or just killed, keeps its last samples."""
        if process.ready is None:
            return
        life = process.name, process.pid
        host, _, port = process.ready.metrics_address.rpartition(":")
        try:
            text = await asyncio.to_thread(_get, host, int(port))
        except (OSError, HTTPException):
            self._state.silent.add(process.name)
        else:
            self._state.silent.discard(process.name)
            self._samples[life] = list(parsed(text, (RUNS, NOTIFICATIONS)))

    # ------------------------------------------------------------------ what is served

    async def _served(self) -> None:
        pages = documents = 0
        async with self._db.snapshot(timeout=ANSWER_SECONDS) as snapshot:
            wanted = [tables.cause.name, tables.size.name]
            async for page in snapshot.scan_cells(tables.serving, columns=wanted):
                cells = zip(
                    page.rows, page.columns, page.commit_timestamps, page.values, strict=True
                )
                for row, column, commit, value in cells:
                    if column == tables.cause.name:
                        if commit < self._since:
                            continue
                        cause = tables.cause.codec.decode(value)
                        self._latencies[row, commit] = seconds_between(cause, commit)
                    else:
                        pages += 1
                        documents += tables.size.codec.decode(value)
        self._state.pages, self._state.documents_served = pages, documents
        self._state.latency = Latency.of(list(self._latencies.values()))


def runs_by_observer(samples: list[Sample]) -> dict[str, Runs]:
    """Sums over all workers, and all of their lives."""
    counts = Counter[tuple[str, str]]()
    for sample in samples:
        if "observer" in sample.labels:
            what = sample.name.removeprefix(RUNS).removesuffix("_total")
            counts[sample.labels["observer"], what] += int(sample.value)
    return {
        name: Runs(
            committed=counts[name, "commits"],
            repeated=counts[name, "conflicts"] + counts[name, "postponed"],
            failed=counts[name, "failures"],
        )
        for name in {name for name, _ in counts}
    }


def _get(host: str, port: int) -> str:
    connection = HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def parsed(text: str, prefixes: tuple[str, ...]) -> Iterator[Sample]:
    """Samples whose names begin with one of these prefixes."""
    lines = "".join(f"{one}\n" for one in text.splitlines() if one.startswith(prefixes))
    for family in text_string_to_metric_families(lines):
        yield from family.samples
