"""Records benchmark runs in benchmarks/results, and makes README's table of figures from them.

    make figures        # on the reference machine, after its benchmarks

Runs wait in var/benchmarks until they are recorded. Only runs of the reference machine belong in
benchmarks/results, so that the figures of two versions can be compared; `make figures` prints the
machine of each run that it records. A test compares README with benchmarks/results, so README never
shows a figure that was not measured.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RUNS, summary

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results"
_PLACE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    file: str
    name: str
    """The name of the result in that file."""
    unit: str
    command: str


FIGURES = [
    Figure(
        "transfers between random rows of 100,000 in nine tablets, 1,000 in flight",
        "loads",
        "transfers among 100,000, 1,000 in flight",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "... CPU per transfer, client and servers",
        "loads",
        "CPU, transfers among 100,000, 1,000 in flight",
        "µs",
        "make bench-loads",
    ),
    Figure(
        "... PostgreSQL on the same machine, 64 connections of pgbench",
        "loads",
        "PostgreSQL, transfers among 100,000, pgbench, 64 connections",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "... from 64 threads using the blocking API",
        "loads",
        "transfers among 100,000, 64 threads",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "... PostgreSQL, 64 threads of psycopg",
        "loads",
        "PostgreSQL, transfers among 100,000, psycopg, 64 threads",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "... a lone transfer, median",
        "loads",
        "latency, transfers among 100,000, alone, median",
        "ms",
        "make bench-loads",
    ),
    Figure(
        "... PostgreSQL, a lone transfer of psycopg, median",
        "loads",
        "latency, PostgreSQL, transfers among 100,000, psycopg, alone, median",
        "ms",
        "make bench-loads",
    ),
    Figure(
        "... 1,000 in flight among 10,000 rows",
        "loads",
        "transfers among 10,000, 1,000 in flight",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "changes of a backlog handled by the smallest observer, as `def`",
        "loads",
        "observed changes, def, backlog of 10,000",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "... as `async def`",
        "loads",
        "observed changes, async-def, backlog of 10,000",
        "/s",
        "make bench-loads",
    ),
    Figure(
        "read-write transactions of one row, 1,000 in flight",
        "transactions",
        "read-write, asyncio, 1,000 in flight, 1 tablet",
        "/s",
        "make bench-transactions",
    ),
    Figure(
        "... CPU per transaction, client and servers",
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
        "... PostgreSQL on the same machine, 64 connections",
        "transactions",
        "PostgreSQL read-write, 64 connections",
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
        "time back to 80 % of throughput after a tablet server is killed",
        "failover",
        "back at 80 % of the surviving capacity within",
        "s",
        "make bench-failover",
    ),
    Figure(
        "Spark: rows written transactionally",
        "spark",
        "write, transactions of 1,000 rows",
        "/s",
        "make bench-spark",
    ),
    Figure("... scanned", "spark", "full scan", "/s", "make bench-spark"),
    Figure(
        "one changed document among a million served, median",
        "incremental",
        "    1,000,000 documents, 2.78 changes/s (1 % an hour): median",
        "ms",
        "make bench-incremental",
    ),
    Figure(
        "... by a Spark batch job over all documents",
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


def record(runs: Path = RUNS, results: Path = RESULTS) -> list[Path]:
    """Moves the files of all runs into the recorded results, and returns where they are now.

    Moved, not copied: a run that stayed behind would be recorded again later, over a newer one.
    """
    found = sorted([*runs.glob("*.json"), *runs.glob("*.svg")])
    return [Path(shutil.move(one, results / one.name)) for one in found]


def main() -> None:
    """Records all runs and rewrites the table in README.md."""
    recorded = record()
    for one in recorded:
        told = ""
        if one.suffix == ".json":
            told = f"  ({summary(json.loads(one.read_text())['environment'])})"
        print(f"recorded {one.name}{told}")
    if not recorded:
        print("no run is waiting in var/benchmarks; README's table is made from benchmarks/results")
    README.write_text(_PLACE.sub(lambda _: table(), README.read_text()))


if __name__ == "__main__":
    main()
