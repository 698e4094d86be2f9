"""The demonstration shows what its state says, on a terminal and in a line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from examples.demo.gauges import RUNS, parsed, runs_by_observer
from examples.demo.state import Latency, Runs, Server, State, Tablet
from examples.demo.view import line, view


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
        observers={"tend": Runs(20, 3), "parse": Runs(1_400, 9, 1)},
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
    assert lines.index("parse 1,400 9 1") + 1 == lines.index("tend 20 3 0")


def test_tablets_stand_at_their_servers_marked_if_taken_over_or_not_served(state: State) -> None:
    lines = seen(state)
    assert "tabletserver-1 71 documents-1 +documents-2 ?groups" in lines
    assert "tabletserver-2 killed ?links" in lines, "it has not been taken over yet"


def test_a_line_holds_the_same_figures(state: State) -> None:
    assert line(state, 12.3) == (
        " 12.3 s  150 of 400 changes written; runs parse 1,400, tend 20, 12 repeated; "
        "70 pages for 140 documents; median 0.10 s, 95 of 100 within 1.91 s; "
        "33 notifications wait; 3 of 4 tablets served"
    )


def test_what_does_not_answer_is_named_beside_its_older_figures(state: State) -> None:
    state.silent.add("serving table")
    assert line(state, 0.0).endswith("tablets served (no answer yet: serving table)")
    assert any(one.endswith("(no answer yet: serving table)") for one in seen(state))


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
