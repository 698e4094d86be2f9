"""The metrics that the dashboards and alerts of deploy/monitoring query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
_ALERT = re.compile(r"- alert: (\w+)\n +expr: (?:>-\n)?((?:.|\n)*?)\n +(?:for|labels):")


def panels() -> dict[str, list[str]]:
    """The queries of each panel, by title."""
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in _dashboard()["panels"]
        if panel["type"] != "row"
    }


def places_of_panels() -> list[dict[str, int]]:
    """The place and size of each panel and each row's title: x, y, w and h."""
    return [panel["gridPos"] for panel in _dashboard()["panels"]]


def _dashboard() -> dict[str, Any]:
    text = (MONITORING / "grafana/dashboards/percolator.json").read_text()
    dashboard: dict[str, Any] = json.loads(text)
    return dashboard


def alerts() -> dict[str, str]:
    """The expression of each alert, by name."""
    text = (MONITORING / "alerts.yml").read_text()
    found = {name: " ".join(expression.split()) for name, expression in _ALERT.findall(text)}
    if len(found) != text.count("- alert:"):
        raise ValueError("alerts.yml: not every alert was understood, or two have one name")
    return found


def metrics_in(query: str) -> set[str]:
    """The metrics that a query uses; `ValueError` if it is not a query."""
    found: set[str] = set()

    def note(expression: promql_parser.Expr) -> None:
        if isinstance(expression, promql_parser.MatrixSelector):
            expression = expression.vector_selector
        if isinstance(expression, promql_parser.VectorSelector):
            found.add(str(expression.name))

    promql_parser.walk(promql_parser.parse(query), pre_visit=note)
    return found
