"""The story of the demo, one chapter after another; each chapter waits until its condition holds.

A crawl arrives at a steady rate while observers keep the index up to date. In the middle of it, a
tablet server is killed; in a row store, which has none, the leading oracle and a worker. When no
work is left, everything that is served is compared with the correct result, and again after
documents were updated and deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from examples.demo.checking import Checked, WentWrong, check
from examples.demo.gauges import Gauges
from examples.demo.outages import OracleAndWorkerKilled, TabletServerKilled
from examples.demo.queries import show_queries
from examples.demo.screen import Screen
from examples.demo.state import State
from examples.webindex import tables
from examples.webindex.crawl import Crawl
from examples.webindex.load import Change, Crawling, changes
from percolator import Limits, RetryPolicy, aio
from percolator.services.local.cluster import LocalCluster

OBSERVERS = "examples.webindex.observers:observers"
PATIENCE_SECONDS = 300.0
"""For the whole story, which takes about half a minute; if it takes longer, something hangs."""
PATIENT = Limits(call_seconds=60.0)
PERSISTENT = RetryPolicy(deadline_seconds=PATIENCE_SECONDS)
"""A slow machine is not a failure; only the end of the story decides what is wrong."""


@dataclass(frozen=True)
class Plan:
    """The amount of everything."""

    documents: int
    rate: float
    updates: int
    deletions: int
    seed: int = 0
    tablets: int = 3
    """Tablets of each table that is keyed by URL."""


async def tell(cluster: LocalCluster, plan: Plan, screen: Screen) -> str:
    """Runs the story. Raises `WentWrong`, or returns the URL of the page with the most inlinks."""
    state = State()
    connecting = aio.connect(
        cluster.address, description="make demo", limits=PATIENT, retry=PERSISTENT
    )
    async with connecting as db:
        story = _Story(db, cluster, plan, screen, state)
        await story.make_tables()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
                watching = group.create_task(story.gauges.watch())
                showing = group.create_task(screen.follow(state))
                checked = await story.happens(group)
                for task in (watching, showing):
                    task.cancel()
        except TimeoutError:
            raise WentWrong(f"not done after {PATIENCE_SECONDS:g} s: {state.chapter}") from None
        except ExceptionGroup as errors:
            raise _first(errors) from None
        screen.chapter("queries")
        return await show_queries(db, checked.pages, screen)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The first error; the others have the same cause."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class _Story:
    def __init__(
        self,
        db: aio.Database,
        cluster: LocalCluster,
        plan: Plan,
        screen: Screen,
        state: State,
    ) -> None:
        self._db = db
        self._cluster = cluster
        self._plan = plan
        self._screen = screen
        self._state = state
        self._crawl = Crawl(plan.documents, plan.seed)
        self._written: dict[str, str] = {}
        """Documents that must be in the store once all changes are written: URL and text."""
        has_tablets = any(name.startswith("tabletserver") for name in cluster.processes)
        outage = TabletServerKilled if has_tablets else OracleAndWorkerKilled
        self._outage = outage(cluster, db.internal.engine.world.network, state)
        self.gauges = Gauges(db, cluster, state, self._outage)

    async def make_tables(self) -> None:
        """Creates the tables; those keyed by URL are split into equal parts, where there are
        tablets."""
        if found := await self._db.tables():
            raise WentWrong(
                f"the store has tables: {', '.join(found)}; the demo needs an empty one"
            )
        await tables.create_tables_async(self._db, self._crawl.splits(self._plan.tablets))

    async def happens(self, group: asyncio.TaskGroup) -> Checked:
        """Runs from beginning to end. Returns what was found right at the end."""
        plan = self._plan
        self._chapter("observers wait for a crawl")
        await self._prepare()
        self._chapter(f"a crawl of {plan.documents:,} documents, {plan.rate:g} each second")
        documents = ((one.url, one.body) for one in self._crawl)
        loading = group.create_task(self._load(documents, plan.documents))
        await self._until(lambda: self._state.written >= plan.documents // 2 or loading.done())
        killed = await self._kill()
        await loading
        self._screen.say(f"{plan.documents:,} documents are written; observers finish")
        await self._require_right()
        for name in killed:
            await asyncio.to_thread(self._cluster.restart, name)
        self.gauges.killed.difference_update(killed)
        self._screen.say(f"started again: {', '.join(killed)}; {self._outage.comeback()}")

        self._chapter(f"{plan.updates:,} documents are updated, {plan.deletions:,} deleted")
        await self._load(
            changes(self._crawl, plan.updates, plan.deletions, forever=False),
            plan.updates + plan.deletions,
        )
        return await self._require_right()

    def _chapter(self, title: str) -> None:
        self._state.chapter = title
        self._screen.chapter(title)

    async def _prepare(self) -> None:
        await asyncio.to_thread(self._cluster.wait_workers)
        await self._until(self._outage.is_whole)
        self._screen.say(
            f"{len(tables.ALL)} tables, {self._outage.parts()}; {self._workers} workers run "
            f"{OBSERVERS}"
        )

    @property
    def _workers(self) -> int:
        return sum(name.startswith("worker") for name in self._cluster.processes)

    async def _load(self, source: Iterable[Change], count: int) -> None:
        """Returns when all changes are committed."""
        self._state.written, self._state.to_write = 0, count
        await self.gauges.begin_latencies()
        crawling = Crawling(self._db, self._plan.rate, progress=lambda _: None)
        self.gauges.crawling = crawling
        await crawling.write_all(self._remembered(source))
        self._state.written = crawling.written
        if crawling.written != count:
            raise WentWrong(f"{crawling.written:,} changes were written, of {count:,}")

    def _remembered(self, source: Iterable[Change]) -> Iterator[Change]:
        """Remembers each change. Two changes of one document are written in this order."""
        for url, body in source:
            if body is None:
                self._written.pop(url, None)
            else:
                self._written[url] = body
            yield url, body

    # ------------------------------------------------------------------ the kill

    async def _kill(self) -> list[str]:
        """Kills what the crawl needs most. Returns the names once everything works again."""
        # A busy oracle may not have answered the last look: then nobody knows which one leads.
        await self._until(self._outage.is_whole)
        names = self._outage.victims()
        self.gauges.killed.update(names)
        at = self._state.written
        victims = [self._cluster.processes[name] for name in names]
        for victim in victims:
            victim.kill()
        began = time.monotonic()
        killed = " and ".join(f"{one.name}, process {one.pid}" for one in victims)
        self._screen.say(
            f"kill -9 of {killed}, after {at:,} documents: {self._outage.damage()}",
            style="bold red",
        )
        await self._until(lambda: self._outage.is_whole(without=names))
        self._screen.say(self._outage.recovery(time.monotonic() - began))
        return names

    # ------------------------------------------------------------------ the check

    async def _require_right(self) -> Checked:
        """Waits until no work is left, and compares."""
        quiet = await self._db.wait_for_observers()
        if quiet.dead_letters:
            raise WentWrong(f"changes became dead letters: {dict(quiet.dead_letters)}")
        checked = await check(self._db, self._written)
        if checked.documents != sum(page.documents for page in checked.pages.values()):
            raise WentWrong("the pages do not add up to the number of documents")
        self._screen.say(
            f"right: {checked.documents:,} documents in the store, as written; "
            f"{len(checked.pages):,} pages and {checked.inlinks:,} inlinks served, exactly those "
            "that examples/webindex/definition.py computes from the documents",
            style="bold green",
        )
        return checked

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.gauges.next_look()
