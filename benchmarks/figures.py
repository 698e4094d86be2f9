"""The table of figures in README.md, made from benchmarks/results.

    make figures        # after a benchmark

A test compares the two, so that README never shows what was not measured.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS

README = Path(__file__).parents[1] / "README.md"
_PLACE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    what: str
    file: str
    name: str
    """Of the result in that file."""
    unit: str
    command: str


FIGURES = [
    Figure(
        "transactions that read and write, 1,000 in flight",
        "transactions",
        "read-write, asyncio, 1,000 in flight, 1 tablet",
        "/s",
        "make bench-transactions",
    ),
    Figure(
        "... CPU of one, client and servers",
        "transactions",
        "CPU, read-write, asyncio, 1,000 in flight, 1 tablet",
        "µs",
        "make bench-transactions",
    ),
    Figure(
        "... over three servers with ten tablets each",
        "transactions",
        "read-write, asyncio, 1,000 in flight, 3 servers x 10 tablets",
        "/s",
        "make bench-transactions",
    ),
    Figure(
        "... from 64 threads of the blocking API",
        "transactions",
        "read-write, 64 blocking threads, 1 tablet",
        "/s",
        "make bench-transactions",
    ),
    Figure(
        "... CPU of one of these",
        "transactions",
        "CPU, read-write, 64 blocking threads, 1 tablet",
        "µs",
        "make bench-transactions",
    ),
    Figure(
        "... PostgreSQL on the same machine, 64 connections",
        "transactions",
        "PostgreSQL read-write, 64 connections",
        "/s",
        "make bench-transactions",
    ),
    Figure(
        "... CPU of one there",
        "transactions",
        "CPU, PostgreSQL read-write, 64 connections",
        "µs",
        "make bench-transactions",
    ),
    Figure(
        "a lone transaction from begin to commit, median",
        "transactions",
        "latency, read-write, 1 blocking thread, median",
        "ms",
        "make bench-transactions",
    ),
    Figure(
        "reads, each in a snapshot of its own",
        "transactions",
        "read in its own snapshot, asyncio, 1,000 in flight, 1 tablet",
        "/s",
        "make bench-transactions",
    ),
    Figure(
        "observer runs, a chain of three, one worker",
        "observers",
        "runs, chain of 3, 1 worker",
        "/s",
        "make bench-observers",
    ),
    Figure(
        "... from a commit to its observer's commit, median",
        "observers",
        "commit to the observer's commit, median",
        "ms",
        "make bench-observers",
    ),
    Figure(
        "back at 80 % of throughput after a tablet server was killed",
        "failover",
        "back at 80 % of the surviving capacity within",
        "s",
        "make bench-failover",
    ),
    Figure(
        "timestamps, one by one, two clients",
        "oracle",
        "single, 2 clients, 2000 awaited each",
        "/s",
        "make bench-oracle",
    ),
    Figure(
        "Spark: rows written in transactions",
        "spark",
        "write, transactions of 1,000 rows",
        "/s",
        "make bench-spark",
    ),
    Figure(
        "... loaded in bulk",
        "spark",
        "bulk load, arranging included",
        "/s",
        "make bench-spark",
    ),
    Figure("... scanned", "spark", "full scan", "/s", "make bench-spark"),
    Figure(
        "a changed document of a million is served, median",
        "incremental",
        "    1,000,000 documents, 2.78 changes/s (1 % an hour): median",
        "ms",
        "make bench-incremental",
    ),
    Figure(
        "... by a Spark batch job over all of them",
        "incremental",
        "1,000,000 documents: Spark batch pass",
        "s",
        "make bench-incremental",
    ),
]


def table() -> str:
    """As Markdown."""
    lines = ["| what | measured | with |", "|---|---|---|"]
    lines += [f"| {one.what} | {_value(one)} {one.unit} | `{one.command}` |" for one in FIGURES]
    return "\n".join(lines) + "\n"


def _value(figure: Figure) -> str:
    """Two significant digits: a second run would not confirm more."""
    results = json.loads((RESULTS / f"{figure.file}.json").read_text())["results"]
    (found,) = (one["value"] for one in results if one["name"] == figure.name)
    rounded = float(f"{found:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def shown() -> str:
    """The table as README has it."""
    found = _PLACE.search(README.read_text())
    if found is None:
        raise LookupError("README.md has no place for figures")
    return found[0]


def main() -> None:
    """Writes it into README.md."""
    README.write_text(_PLACE.sub(lambda _: table(), README.read_text()))


if __name__ == "__main__":
    main()
