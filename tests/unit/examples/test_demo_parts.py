"""The demonstration shows what its state says, on a terminal and in a line."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from examples.demo.checking import WentWrong, check
from examples.demo.gauges import RUNS, Gauges, parsed, runs_by_observer
from examples.demo.outages import OracleAndWorkerKilled
from examples.demo.screen import Screen
from examples.demo.state import LEADS, Latency, Runs, Server, State, Tablet
from examples.demo.story import _Story
from examples.demo.view import line, view
from examples.webindex import tables
from examples.webindex.crawl import Crawl
from examples.webindex.load import write
from examples.webindex.observers import observers
from percolator import aio
from percolator.errors import ConflictError, NotExecuted, PercolatorError
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from tests.unit.webindex.pipeline import clients


def seen(state: State) -> list[str]:
    """The lines of the view, as a person sees them."""
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(view(state, 12.3))
    return [" ".join(one.split()) for one in captured.get().splitlines()]


@pytest.fixture
def state() -> State:
    return State(
        chapter="a crawl",
        to_write=400,
        written=150,
        observers={"update_group": Runs(20, 3), "parse": Runs(1_400, 9, 1)},
        notifications=33,
        pages=70,
        documents_served=140,
        latency=Latency.of([0.1] * 19 + [2.0]),
        servers=[
            Server("tabletserver-1", 71, "a:1"),
            Server("tabletserver-2", 72, "a:2", alive=False),
        ],
        tablets=[
            Tablet(1, "documents", "a:1", serving=True),
            Tablet(2, "documents", "a:1", serving=True),
            Tablet(3, "groups", "a:1", serving=False),
            Tablet(4, "links", "a:2", serving=True),
        ],
        lost=frozenset([2, 3, 4]),
    )


def test_the_view_shows_every_figure(state: State) -> None:
    lines = seen(state)
    assert "a crawl, 12 s" in lines
    assert any(one.endswith("150 of 400 changes") for one in lines)
    assert "served 70 pages, for 140 documents" in lines
    assert "written → served median 0.10 s, 95 of 100 within 1.91 s" in lines
    assert "backlog 33 notifications wait for observers" in lines
    assert lines.index("parse 1,400 9 1") + 1 == lines.index("update_group 20 3 0")


def test_tablets_stand_at_their_servers_marked_if_taken_over_or_not_served(state: State) -> None:
    lines = seen(state)
    assert "tabletserver-1 71 documents-1 +documents-2 ?groups" in lines
    assert "tabletserver-2 killed ?links" in lines, "it has not been taken over yet"


def test_a_line_holds_the_same_figures(state: State) -> None:
    assert line(state, 12.3) == (
        " 12.3 s  150 of 400 changes written; runs parse 1,400, update_group 20, 12 repeated; "
        "70 pages for 140 documents; median 0.10 s, 95 of 100 within 1.91 s; "
        "33 notifications wait; 3 of 4 tablets served"
    )


def test_what_does_not_answer_is_named_next_to_its_older_figures(state: State) -> None:
    state.silent.add("serving table")
    assert line(state, 0.0).endswith("tablets served (no answer yet: serving table)")
    assert any(one.endswith("(no answer yet: serving table)") for one in seen(state))


@pytest.mark.parametrize("error", [ConflictError("locked"), NotExecuted("no server")])
async def test_a_look_that_fails_while_servers_are_dead_or_slow_is_repeated(
    state: State, error: PercolatorError
) -> None:
    gauges = Gauges(Mock(), Mock(), state, Mock())
    silent: list[bool] = []

    async def ask() -> None:
        silent.append("serving table" in state.silent)
        if len(silent) == 1:
            raise error

    looking = asyncio.create_task(gauges._repeat("serving table", ask, 1.0))
    await asyncio.sleep(2.5)
    looking.cancel()
    assert silent == [False, True, False]


def test_a_state_of_which_nothing_is_known_yet_is_shown() -> None:
    assert "written → served nothing is served yet" in seen(State())
    assert "0 of 0 changes written" in line(State(), 0.0)


def test_runs_of_an_observer_are_added_up_over_workers_and_kinds_of_repetition() -> None:
    text = (
        'percolator_observer_commits_total{observer="parse",table="documents"} 4.0\n'
        'percolator_observer_conflicts_total{observer="parse",table="documents"} 2.0\n'
        'percolator_observer_postponed_total{observer="parse",table="documents"} 1.0\n'
        'percolator_observer_failures_total{observer="parse",table="documents"} 5.0\n'
        "process_cpu_seconds_total 7.0\n"
    )
    samples = list(parsed(text, (RUNS,)))
    assert runs_by_observer(samples * 2) == {"parse": Runs(committed=8, repeated=6, failed=10)}


# The demonstration notices whatever is not as it has to be, and says what.

Damage = Callable[[aio.Transaction, str], Awaitable[None]]

CRAWL = Crawl(20)
WRITTEN = {one.url: one.body for one in CRAWL}


async def index(db: aio.Database) -> None:
    async with db.run_observers(observers):
        for url, body in WRITTEN.items():
            await write(db, url, body)
        await db.wait_for_observers()


async def test_what_is_right_is_counted() -> None:
    async with clients(0, 1) as (db,):
        await index(db)
        checked = await check(db, WRITTEN)
    assert checked.documents == len(WRITTEN)
    assert sum(page.documents for page in checked.pages.values()) == len(WRITTEN)
    assert checked.inlinks > len(WRITTEN)


async def lose_a_document(tx: aio.Transaction, url: str) -> None:
    await tx.delete(url, tables.body)


async def count_a_document_twice(tx: aio.Transaction, url: str) -> None:
    size = await tx.get(url, tables.size, 0)
    await tx.set(url, tables.size, size + 1)


async def make_an_inlink(tx: aio.Transaction, url: str) -> None:
    await tx.set((url, "http://unlinked", "", ""), tables.anchor, "never written")


async def link_to_nothing(tx: aio.Transaction, url: str) -> None:
    await tx.set((f"{url}/nothing", "http://unlinked", "", ""), tables.anchor, "never written")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lose_a_document, "1 differ: 19 documents in the store, 20 written"),
        (count_a_document_twice, r"1 differ: (\d+) pages served, \1 computed from scratch"),
        (make_an_inlink, "never written"),
        (link_to_nothing, "inlinks of pages that are not served"),
    ],
)
async def test_any_difference_is_an_error_that_shows_it(damage: Damage, told: str) -> None:
    async with clients(0, 1) as (db,):
        await index(db)
        served = sorted((await check(db, WRITTEN)).pages)
        await db.run(damage, served[0])
        with pytest.raises(WentWrong, match=told):
            await check(db, WRITTEN)


# The demo kills a leader, and has to know which process that is.


class Looks:
    """Gauges whose looks find what the test says, one after another."""

    def __init__(self, state: State, found: list[list[Server]]) -> None:
        self.killed: set[str] = set()
        self._state = state
        self._found = found

    async def next_look(self) -> None:
        self._state.servers = self._found.pop(0)


def server(name: str, role: str) -> Server:
    return Server(name, 1, f"{name}:1", True, role)


async def test_the_kill_waits_until_it_is_known_who_leads() -> None:
    state = State()
    processes = {}
    for name in ("oracle", "oracle-2", "worker"):
        processes[name] = Mock(spec=ServiceProcess, pid=1, exit_code=None)
        processes[name].name = name
    cluster = Mock(spec=LocalCluster, processes=processes)
    unanswered = [server("oracle", "stands by"), server("oracle-2", "stands by")]
    led = [server("oracle", LEADS), server("oracle-2", "stands by")]
    taken_over = [server("oracle", "stands by"), server("oracle-2", LEADS)]
    story: Any = object.__new__(_Story)
    story._cluster, story._state, story._screen = cluster, state, Mock(spec=Screen)
    story._outage = OracleAndWorkerKilled(cluster, Mock(), state)
    story.gauges = Looks(state, [unanswered, led, taken_over])
    assert await story._kill() == ["oracle", "worker"]
    for name, process in processes.items():
        assert process.kill.called is (name != "oracle-2")
