"""A parser of PromQL, which also checks types, reads the queries of dashboards and alerts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.repository.monitored import alerts, metrics_in, panels, places_of_panels

GUIDE = Path(__file__).parents[3] / "docs" / "operating.md"


@pytest.mark.parametrize("title", panels())
def test_the_queries_of_a_panel_are_queries(title: str) -> None:
    assert all(metrics_in(query) for query in panels()[title])


@pytest.mark.parametrize("name", alerts())
def test_the_expression_of_an_alert_is_a_query_and_the_guide_says_what_to_do(name: str) -> None:
    assert metrics_in(alerts()[name])
    assert f"`{name}`" in GUIDE.read_text()


def test_calls_without_permission_raise_an_alert_wherever_they_are_refused() -> None:
    """A gateway refuses those that it would forward, and counts them as forwarded calls only."""
    assert metrics_in(alerts()["AccessDenied"]) == {
        "percolator_rpc_finished_total",
        "percolator_gateway_forwarded_total",
    }


def test_a_dashboard_shows_all_that_is_measured_about_the_queues_of_cells() -> None:
    documented = (GUIDE.parent / "metrics.md").read_text()
    measured = set(re.findall(r"`(percolator_tabletserver_tablet_turns?_\w+)`", documented))
    shown = {name for queries in panels().values() for one in queries for name in metrics_in(one)}
    assert measured
    assert measured - shown == set()


def test_no_two_panels_of_the_dashboard_overlap() -> None:
    places = [
        (place["x"] + x, place["y"] + y)
        for place in places_of_panels()
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(places) == len(set(places))


def test_metrics_are_found_wherever_a_query_has_them() -> None:
    query = 'sum by (le) (rate(a_total{b="c"}[5m])) / on () (max(d) or e) > bool 1'
    assert metrics_in(query) == {"a_total", "d", "e"}
    assert metrics_in("max_over_time(sum by (s) (up)[15m:15s])") == {"up"}


@pytest.mark.parametrize("query", ["rate(a)", "sum(a", "histogram_quantile(a)", "nonsense(a)"])
def test_what_is_no_query_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        metrics_in(query)
