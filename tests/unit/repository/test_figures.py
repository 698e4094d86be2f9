"""Benchmarks run anywhere without breaking a check, and README shows what was recorded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import bulk_loads, figures, report
from benchmarks.report import RUNS, Report

ROOT = Path(__file__).parents[3]


def test_the_figures_in_the_readme_are_those_of_the_recorded_results() -> None:
    assert figures.shown() == figures.table(), "run `make figures`"


def test_a_run_is_written_where_git_does_not_look() -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", RUNS / "oracle.json"], cwd=ROOT)
    assert ignored.returncode == 0, f"git does not ignore {RUNS}"


def test_benchmarks_leave_the_recorded_results_alone() -> None:
    """`figures` is the only module that knows where they are."""
    modules = set((ROOT / "benchmarks").glob("*.py")) - {Path(figures.__file__)}
    knowing = [one.name for one in modules if "benchmarks/results" in one.read_text()]
    knowing += [one.name for one in modules if "benchmarks.figures" in one.read_text()]
    assert knowing == []
    assert figures.RESULTS not in (RUNS, *RUNS.parents)


def test_recording_a_run_takes_it_out_of_the_waiting_runs(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    (results / "oracle.json").write_text("an earlier run")
    made = Report("oracle")
    made.add("timestamps", 570_000.0, "/s")
    made.finish(runs=runs)

    assert figures.record(runs, results) == [results / "oracle.json"]
    assert json.loads((results / "oracle.json").read_text())["results"][0]["value"] == 570_000.0
    assert figures.record(runs, results) == []


def test_a_part_of_a_benchmark_replaces_its_own_figures_only(tmp_path: Path) -> None:
    def run(**figures_of_parts: list[float]) -> None:
        made = Report("parts")
        for name, values in figures_of_parts.items():
            for number, value in enumerate(values):
                made.add("    of it" if number else name, value, "ms")
        made.finish(runs=tmp_path, merge=True)

    run(scan=[1.0, 2.0], write=[3.0, 4.0])
    run(write=[5.0, 6.0])
    found = json.loads((tmp_path / "parts.json").read_text())["results"]
    assert [(one["name"], one["value"]) for one in found] == [
        ("write", 5.0), ("    of it", 6.0), ("scan", 1.0), ("    of it", 2.0)
    ]  # fmt: skip
    assert ["environment" in one for one in found] == [False, False, True, True]


def test_an_absolute_figure_is_never_judged() -> None:
    """Machines differ by a factor of two, so a bound on one would judge the machine."""
    made = Report("oracle")
    with pytest.raises(ValueError, match=r"'timestamps' has a must in '/s'"):
        made.add("timestamps", 570_000.0, "/s", must=300_000.0, at_least=True)
    made.add("raw / transaction", 0.3, "×", must=0.28, at_least=True)
    made.add("commits lost", 0.0, "", must=0)


def test_no_recorded_verdict_is_about_an_absolute_figure() -> None:
    judged = [
        f"{path.name}: {one['name']}"
        for path in figures.RESULTS.glob("*.json")
        for one in json.loads(path.read_text())["results"]
        if one["must"] is not None and one["unit"] not in report.JUDGED_UNITS
    ]
    assert judged == []


@pytest.mark.real_time
async def test_commits_beside_bulk_loads_are_measured(tmp_path: Path) -> None:
    found = await bulk_loads.measure(tmp_path / "tablet", rounds=1, seconds=0.3)
    assert set(found.beside) == set(found.cells) == {1, bulk_loads.LOADERS}
    assert not found.failed, found
    assert min(found.alone, found.loads, *found.cells.values()) > 0
    assert min(found.beside.values()) > 0, "a loader keeps all transactions out"
    assert f"{found.expected:,.0f} commits per CPU second are expected" in str(found)
