"""The reading orders of docs/paper-to-code.md lead to what they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STOPS_MIN, STOPS_MAX = 10, 16
FILES_MAX, LINES_MAX = 20, 4650
"""Limits for reading a commit from top to bottom. Files count whole, although a stop names only
parts of them: `handler.py` and `tablet.py` are a sixth of the lines, and pass the commit on."""

_STOP = re.compile(r"^\d+\. `([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)\. ")


_PATH = re.compile(r"`([\w/]+/\w+\.py)`")


def _section(title: str) -> str:
    text = (ROOT / "docs/paper-to-code.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n#")[0]


def _orders() -> dict[str, list[tuple[str, list[str]]]]:
    orders: dict[str, list[tuple[str, list[str]]]] = {}
    stops: list[tuple[str, list[str]]] = []
    for line in (ROOT / "docs/paper-to-code.md").read_text().splitlines():
        if line.startswith("#"):
            stops = []
        if line.startswith("## Read a"):
            stops = orders[line.removeprefix("## ")] = []
        elif re.match(r"\d+\. ", line):
            stop = _STOP.match(line)
            assert stop is not None, f"not a stop: {line}"
            stops.append((stop[1], re.findall(r"`([\w.]+)`", stop[2])))
    return orders


ORDERS = _orders()


def _defined(file: str) -> set[str]:
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_there_is_an_order_for_each_way_to_call_to_commit_to_read_and_to_find_work() -> None:
    found = [name.removesuffix(" in this order").split(maxsplit=2)[2] for name in ORDERS]
    assert found == [
        "call",
        "commit",
        "commit in one round",
        "dead client's lock",
        "read",
        "scan",
        "shared transaction",
        "row store",
        "notification",
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_has_about_a_dozen_stops_each_at_definitions_that_exist(order: str) -> None:
    stops = ORDERS[order]
    assert STOPS_MIN <= len(stops) <= STOPS_MAX
    for file, names in stops:
        assert set(names) <= _defined(file), file


def test_a_commit_is_read_in_few_files() -> None:
    """Every file that the section names counts, whether it is a stop or is named on the way."""
    files = set(_PATH.findall(_section("Read a commit in this order")))
    assert files > {file for file, _ in ORDERS["Read a commit in this order"]}
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert len(files) <= FILES_MAX
    assert lines <= LINES_MAX


def test_the_three_places_that_newcomers_look_for_exist() -> None:
    text = (ROOT / "docs/paper-to-code.md").read_text()
    places = re.findall(r"`([\w/]+\.py)`\s+\(`([\w.]+)`\)", text)
    assert len(places) == 3
    for file, name in places:
        assert name in _defined(file), file
