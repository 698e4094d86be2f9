"""The end of every benchmark: a table for people, and a file for comparing versions.

The file is var/benchmarks/NAME.json: {"environment": {...}, "results": [{"name", "value", "unit",
"must", "met"}]}. Git ignores var/, so running a benchmark changes nothing that a check reads;
`make figures` records the runs of the reference machine.

A must is a bound on a ratio within one run, or on a count. Absolute figures carry no verdict:
machines differ by a factor of two. A missed must is marked in the table and does not change the
exit code, because neighbours on the machine can move even a ratio.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_HERE = Path(__file__).parent
RUNS = _HERE.parent / "var" / "benchmarks"
"""Where a run leaves its results."""
JUDGED_UNITS = ("×", "times", "%", "")
"""Units of ratios, and of counts, which have none."""
_WIDTH_OF_A_FILE = 130


@dataclass(frozen=True)
class Result:
    """One figure."""

    name: str
    value: float
    unit: str
    must: float | None
    at_least: bool

    @property
    def met(self) -> bool | None:
        """None when the result has no must."""
        if self.must is None:
            return None
        return self.value >= self.must if self.at_least else self.value <= self.must

    @property
    def demand(self) -> str | None:
        """ ">= 300000" or "<= 80"."""
        if self.must is None:
            return None
        return f"{'>=' if self.at_least else '<='} {self.must:.10g}"


class Report:
    """The figures of one benchmark, in the order in which they were added."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._results: list[Result] = []
        # Before the benchmark adds its own load.
        self._environment = environment()

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        must: float | None = None,
        at_least: bool = False,
    ) -> None:
        """Adds a figure; `must` is its upper bound, or with `at_least` its lower bound."""
        if must is not None and unit not in JUDGED_UNITS:
            raise ValueError(
                f"{name!r} has a must in {unit!r}: bound a ratio within the run, or a count; "
                "an absolute figure differs between machines and is only printed"
            )
        self._results.append(Result(name, value, unit, must, at_least))

    def finish(self, *, runs: Path = RUNS, merge: bool = False) -> int:
        """Prints the table and writes the file. Returns the benchmark's exit code.

        `merge`: keeps what the file has of other parts of this benchmark, with their environment.
        """
        code = self.show()
        runs.mkdir(parents=True, exist_ok=True)
        path = runs / f"{self._name}.json"
        found = self._as_json()
        if merge and path.exists():
            found = _merged(json.loads(path.read_text()), found)
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        print(f"written to {path}")
        return code

    def show(self) -> int:
        """Prints the table without writing a file."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH_OF_A_FILE)
        console.print(self._table())
        return 0

    def _table(self) -> Table:
        table = Table(title=f"{self._name}  ({summary(self._environment)})", title_justify="left")
        table.add_column("what")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("must", justify="right")
        table.add_column("")
        verdicts = {True: "met", False: "[bold red]missed[/]", None: ""}
        for result in self._results:
            table.add_row(
                result.name,
                _number(result.value),
                result.unit,
                result.demand or "",
                verdicts[result.met],
            )
        return table

    def _as_json(self) -> dict[str, Any]:
        return {
            "environment": self._environment,
            "results": [
                {
                    "name": result.name,
                    "value": float(f"{result.value:.5g}"),
                    "unit": result.unit,
                    "must": result.demand,
                    "met": result.met,
                }
                for result in self._results
            ],
        }


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new run, and what only the old one has: figures with the indented ones below them."""
    measured = {one["name"] for one in new["results"] if not one["name"].startswith(" ")}
    kept, keeping = [], False
    for one in old["results"]:
        if not one["name"].startswith(" "):
            keeping = one["name"] not in measured
        if keeping:
            kept.append({"environment": old["environment"]} | one)
    return {"environment": new["environment"], "results": new["results"] + kept}


def environment() -> dict[str, object]:
    """Describes what the figures depend on, without naming the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "protobuf": version("protobuf"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
    }


def summary(found: dict[str, object]) -> str:
    """One line about the machine and the revision, from an `environment`."""
    return (
        f"{found['cpu']}, {found['cores']} cores, load {found['load_average_before']}, "
        f"Python {found['python']}, revision {found['revision']}"
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _revision() -> str:
    """The commit, with "+" if tracked files have changed since."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_HERE, check=True, capture_output=True, text=True
    ).stdout.strip()


def _number(value: float) -> str:
    """At least four significant digits, with separators between thousands."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
